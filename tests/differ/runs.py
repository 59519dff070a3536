"""The sharded run of a case in each flavour: a state, a step as its users write it, and what events do to it.

A run has `state`, a pytree for "linen" and "plain" and a pair of NNX objects for "nnx"; `step(batch, key)` trains it
and returns (loss, gradients as a list of host arrays); `parts()` is (params, optimizer state, masters or None) as lists
of host arrays in the plain run's order and shapes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh

import jzero
from differ.chains import chain_of, is_trained, trained_flags, trained_part
from differ.grammar import OUTSIDE, TIERS, stacks_of
from differ.models import form_of, loss_of, model_of, plain_forward
from jzero.flax.adapters import take_apart
from jzero.optim import ZeroState, whole_state

P = jax.P


class State(TrainState):
    """A TrainState with batch statistics."""

    rest: Any = struct.field(default_factory=dict)


def mesh_of(spec: dict, devices: Sequence[Any] | None = None) -> tuple[Mesh, dict[str, Any]]:
    """The mesh, and the fields of `ZeroConfig` that name its axes; `devices`: others than those that are here."""
    n, kind = spec["n"], spec["kind"]
    devices = np.array((jax.devices() if devices is None else list(devices))[:n])
    if kind == "explicit":
        return Mesh(devices, ("data",), axis_types=(AxisType.Explicit,)), {}
    if kind == "flat":
        return Mesh(devices, ("data",)), {}
    levels = spec.get("levels")
    if kind == "tp" and levels is None:
        return Mesh(devices.reshape(n // 2, 2), ("data", "model")), {}
    axes = ("host", "gpu")
    fields = {
        "two": {"axis": axes}, "hpz": {"axis": axes, "param_axis": "gpu"}, "hsdp": {"axis": "gpu", "batch_axis": axes}
    }  # fmt: skip
    if levels:
        return Mesh(devices.reshape(2, n // 4, 2), (*axes, "model")), fields[levels]
    return Mesh(devices.reshape(2, n // 2), axes), fields[kind]


def tensor_parallel(x: Any, axis: str) -> P:
    """The last dim of a matrix over an axis."""
    split = x.ndim > 1 and x.shape[-1] % 2 == 0
    return P(*[None] * (x.ndim - 1), axis) if split else P()


def fields_of(config: dict, folder: Path) -> dict[str, Any]:
    """The fields of `ZeroConfig`; `folder`: for a state on disk, a name in it that is new."""
    fields = {k: v for k, v in config.items() if k not in ("tier", "in_flight_bytes", "buffer_bytes", "prefetch_state")}
    tier = dict(TIERS[config["tier"]])
    for name, asked in (("in_flight_bytes", "in_flight_bytes"), ("buffer_bytes", "buffer_bytes"),
                        ("prefetch_state", "prefetch")):  # fmt: skip
        if name in config:
            tier[asked] = config[name]
    if tier.get("tier") == "disk":
        tier["path"] = tempfile.mkdtemp(dir=folder, prefix="disk-")
    if tier:
        fields["offload"] = jzero.Offload(**tier)
    return fields


def names_all(opt_state, params) -> bool:
    """True for an optimizer state with a copy of each of these params."""
    paths = [jax.tree_util.keystr(k) for k, _ in jax.tree_util.tree_leaves_with_path(opt_state)]
    names = [jax.tree_util.keystr(k) for k, _ in jax.tree_util.tree_leaves_with_path(params)]
    return all(any(path.endswith(name) for path in paths) for name in names)


def host(tree) -> list[np.ndarray]:
    """The leaves on the host; keys as their numbers."""
    def one(x):
        if hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.array(x)

    return [one(x) for x in jax.tree.leaves(tree)]


class Run:
    """What the flavours share."""

    def __init__(
        self, case: dict, folder: Path, mesh: dict | None = None, config: dict | None = None, abstract: bool = False,
        devices: Sequence[Any] | None = None,
    ):  # fmt: skip
        self.case, self.folder, self.abstract = case, folder, abstract
        self.config = case["config"] if config is None else config
        self.mesh_spec = case["mesh"] if mesh is None else mesh
        self.mesh, axes = mesh_of(self.mesh_spec, devices)
        self.fields = fields_of(self.config, folder) | axes
        self.trainable = case.get("trainable")
        self.asked = {"trainable": is_trained} if self.trainable == "filter" else {}
        if "scan_axes" in case:
            self.asked["scan_axes"] = stacks_of(case) if case["scan_axes"] == "named" else {}
        self.form, self.tx = form_of(case), chain_of(case)
        self.model = model_of(case["flavour"], self.form)
        self.outside = self.config["tier"] in OUTSIDE
        self.reference: Any = None
        self.writes: int | None = None  # that a disk has room for in the next update
        with self.context():
            self.start()
        self.build()

    def context(self):
        """Of everything that runs under an Explicit mesh."""
        explicit = self.mesh_spec["kind"] == "explicit"
        return jax.set_mesh(self.mesh) if explicit else contextlib.nullcontext()

    def jitted(self, step, jit=jax.jit, donate=0):
        """The step as the case wants it."""
        if self.case["step"] == "eager":
            return step
        if self.case["step"] == "jzero.jit":
            found = "plan" in self.case and not self.outside  # or there is no optimizer among the arguments
            return jzero.jit(step) if found else jzero.jit(step, self.plan)
        return jit(step, donate_argnums=donate) if self.case["donate"] else jit(step)

    def placed(self, batch):
        """A batch as the step takes it."""
        return batch if self.case["step"] == "jzero.jit" else self.plan.place_batch(batch)

    def gathered(self, loss):
        """The loss; at stage 3 with weights gathered where they are used, below it as the case wants."""
        stage3 = self.config["stage"] == 3
        return jzero.gather_on_use(self.closed(loss), self.plan) if stage3 or self.case["gather"] else loss

    def closed(self, loss):
        """The loss; if the case wants it, one that reads arrays from outside of it: a variable, a default, a dict."""
        if "closes" not in self.case:
            return loss
        one, ones, more = jnp.ones(()), jnp.ones(3), {"scale": (jnp.ones(4),)}

        @functools.wraps(loss)
        def run(*args, also=ones):
            found = loss(*args)
            factor = one * also[0] * more["scale"][0][-1]
            scaled = lambda value: value * factor.astype(value.dtype)  # noqa: E731
            return (scaled(found[0]), *found[1:]) if isinstance(found, tuple) else scaled(found)

        return run

    def rest(self):
        """What a model holds besides params: statistics; in NNX keys and their counts, too."""
        return ()

    def grad(self, loss):
        """`jax.value_and_grad`, or in micro-batches: (params, batch, ...) -> ((loss, rest), gradients)."""
        micro = self.case.get("micro")
        if micro is None:
            return jax.value_and_grad(loss, has_aux=True)

        def run(params, batch):
            value, grads = self.in_micro_batches(lambda *args: loss(*args)[0])(params, batch)
            return (value, {}), grads

        return run

    def in_micro_batches(self, loss):
        """(params or module, batch) -> (mean loss, gradients); of a sum, or with aux, if the case says so."""
        loss, sums, aux = self.closed(loss), self.case.get("sum"), self.case.get("aux")
        weight = (lambda batch: batch["mask"].sum()) if self.case.get("weighed") else None
        if not (sums or aux):
            return jzero.value_and_grad(loss, self.plan, weight=weight, **self.case["micro"])

        def given(params, batch):
            value = loss(params, batch)
            value = value * len(batch["y"]) if sums else value
            return (value, beside(batch)) if aux else value

        def beside(batch):
            y = batch["y"]
            return {"sum": y.sum(), "mean": y.mean(), "count": (y > 0).sum(), "number": jnp.int32(7), "rows": y.mean(0)}

        def run(params, batch):
            options = {"has_aux": bool(aux), "weight": weight, **self.case["micro"]}
            out, grads = jzero.value_and_grad(given, self.plan, **options)(params, batch)
            value, found = out if aux else (out, {})
            if sums:
                value, grads = jax.tree.map(lambda x: (x / len(batch["y"])).astype(x.dtype), (value, grads))
            if aux:  # wrong aux shows as a wrong loss
                gaps = jax.tree.map(lambda a, b: jnp.abs(a - b).max() / (1 + jnp.abs(b).max()), found, beside(batch))
                value = value + jnp.where(sum(jax.tree.leaves(gaps)) < 1e-3, 0, 1).astype(value.dtype)
            return value, grads

        return run

    def beside(self, step):
        """A step that also reads a tree in the form of one that it replaces, its first argument, if the case has it."""
        if "reference" not in self.case:
            return step

        def run(reference, *args):
            *news, value, grads = step(*args)
            floating = [x for x in jax.tree.leaves(reference) if jnp.issubdtype(x.dtype, jnp.floating)]
            return *news, value + 0 * sum(jnp.sum(x.astype(jnp.float32)) for x in floating), grads

        return run

    def read(self) -> tuple[Any, ...]:
        """What such a step is given first: a copy of the first state, or of its params where others are on the host."""
        if "reference" not in self.case:
            return ()
        if self.reference is None:
            self.reference = jax.tree.map(jnp.copy, self.like_reference())
        return (self.reference,)

    def like_reference(self):
        return self.state if self.config["tier"] == "device" else self.visible()

    def updated(self, update):
        """What an update outside of the program returns; where the disk is full, that of the second try."""
        writes, self.writes = self.writes, None
        if writes is not None:
            counted, pwritev = itertools.count(), os.pwritev

            def full(*args):
                if next(counted) >= writes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return pwritev(*args)

            with mock.patch.object(os, "pwritev", full), contextlib.suppress(OSError):
                return update()
        return update()

    def step(self, batch, key):
        """One step; the gradients on the host."""
        with self.context():
            loss, grads = self.train(self.placed(batch), key)
            return float(loss), host(grads)

    def parts(self):
        """Params, optimizer state and masters on the host."""
        with self.context():
            opt_state, params = self.whole()
            params = self.visible()
            opt_state = jzero.unshard(opt_state, tx=self.wrapped(), params=params)
            if isinstance(opt_state, ZeroState):
                masters = jax.tree.leaves(opt_state.master, is_leaf=lambda x: x is None)
                return host(params), host(opt_state.inner), [None if m is None else np.asarray(m) for m in masters]
            return host(params), host(opt_state), None

    def bytes(self) -> tuple[int, int]:
        """Bytes of params and of optimizer state that the fullest device holds, in device and host memory."""
        def fullest(tree):
            held: dict[Any, int] = {}
            for x in jax.tree.leaves(tree):
                for shard in getattr(x, "addressable_shards", ()):
                    size = shard.data.size * (x.dtype.itemsize if hasattr(x.dtype, "itemsize") else 4)
                    held[shard.device] = held.get(shard.device, 0) + size
            return max(held.values(), default=0)

        return fullest(self.visible()), fullest(self.opt_state())

    def fresh(self, mesh: dict, config: dict, *, abstract: bool = False):
        """Another run of this case in another place, with a state of its own, or an abstract one."""
        return type(self)(self.case | {"born": True}, self.folder, mesh, config, abstract)

    def restored(self, mesh: dict, config: dict):
        """The state saved, and restored into another place."""
        path = Path(tempfile.mkdtemp(dir=self.folder)) / "saved"
        with self.context():
            self.save(path)
        abstract = self.case["flavour"] != "plain" and (self.case["born"] or "disk" in config["tier"])
        other = self.fresh(mesh, config, abstract=abstract)
        # a run that has quantized no leaf has saved no word of it
        wide = config.get("moment_dtype") == "int8" and all(
            x.dtype != jnp.int8 for x in jax.tree.leaves(self.opt_state())
        )
        with other.context():
            other.load(path, cast=wide)
        return other


class LinenRun(Run):
    """A TrainState."""

    def start(self):
        def made(params, rest):
            own = trained_part(params, trained_flags(params)) if self.trainable == "part" else params
            opt_state = self.tx.init(own)
            if self.trainable == "part" and not names_all(opt_state, own):  # it does not say of which params it is
                self.asked |= {"trainable": is_trained}
            return State(self.case.get("begins", 0), self.model.module.apply, params, self.tx, opt_state, rest)

        jax.eval_shape(lambda: made(*self.model.init()).params)
        given = (lambda: made(*self.model.init())) if self.case["born"] else made(*_initial("linen", self.form))
        self.state = self.place(given, **self.asked)

    def place(self, given, **asked):
        """The state in its layout, made inside of a jit where the case says so: RL code has its whole run in one."""
        of = functools.partial(jzero.abstract if self.abstract else jzero.shard, given, mesh=self.mesh)
        inside = "inside" in self.case and not (self.abstract or self.outside or self.config["tier"] == "params")
        if not inside:
            return of(**asked, **self.fields)
        if self.case["flavour"] != "nnx":
            return jax.jit(lambda: of(**asked, **self.fields))()
        graphs = []  # what a jit returns are the arrays

        def arrays():
            graph, leaves = nnx.split(of(**asked, **self.fields))
            graphs.append(graph)
            return leaves

        leaves = jax.jit(arrays)()
        return nnx.merge(graphs[0], leaves)

    @property
    def plan(self):
        return jzero.plan_of(self.state)

    def build(self):
        def gradients(state, batch, key):
            def loss(params, batch):
                variables = {"params": params, **state.rest}
                out, new = state.apply_fn(variables, batch, rngs={"dropout": key}, mutable=list(state.rest))
                return loss_of(self.form, out, batch), dict(new)

            (value, rest), grads = self.grad(loss)(state.params, batch)
            return value, rest, grads

        def step(state, batch, key):
            value, rest, grads = gradients(state, batch, key)
            return state.apply_gradients(grads=grads, rest=rest), value, grads if self.case["fed"] else ()

        if self.outside:
            run = jzero.jit(gradients, self.plan) if self.case["step"] == "jzero.jit" else jax.jit(gradients)

            def train(batch, key):
                value, rest, grads = run(self.state, batch, key)
                grads_before = host(grads)
                self.state = self.updated(lambda: self.state.apply_gradients(grads=grads, rest=rest))
                return value, grads_before

        else:
            run = self.run = self.jitted(self.beside(step))

            def train(batch, key):
                self.state, value, grads = run(*self.read(), self.state, batch, key)
                return value, grads

        self.train = train

    def visible(self):
        return self.state.params

    def opt_state(self):
        return self.state.opt_state

    def wrapped(self):
        return self.state.tx

    def whole(self):
        parts = take_apart(self.state, where="differential")
        return parts.opt_state, parts.params

    def rest(self):
        return self.state.rest

    def count(self):
        return int(self.state.step)

    def jit(self, donate: bool):
        with self.context():
            self.state = jax.jit(lambda s: s, donate_argnums=0 if donate else ())(self.state)

    def replace(self, change):
        self.state = self.state.replace(params=change(self.state.params))

    def reshard(self, mesh: dict, config: dict):
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.config, other.mesh_spec, other.reference = config, mesh, None
        other.mesh, axes = mesh_of(mesh)
        other.fields, other.outside = fields_of(config, self.folder) | axes, config["tier"] in OUTSIDE
        other.lay_again()
        other.build()
        return other

    def lay_again(self):
        self.state = jzero.shard(self.state, mesh=self.mesh, **self.fields)

    def save(self, path):
        jzero.checkpoint.save(path, self.state)

    def load(self, path, only=None, cast=False):
        self.state = jzero.checkpoint.restore(path, self.state, only=only, cast=cast)

    def resumed(self):
        """A state that goes on from a snapshot of this one's files, in a folder of its own."""
        path = jzero.checkpoint.snapshot(Path(tempfile.mkdtemp(dir=self.folder)) / "snapshot", self.state)
        other = self.fresh(self.mesh_spec, self.config, abstract=True)
        other.take_rest(self)
        other.load(path)
        return other

    def take_rest(self, other):
        """What the files do not hold."""
        self.state = self.state.replace(rest=other.state.rest, params=other.state.params)  # of frozen ones


class NnxRun(LinenRun):
    """A pair of NNX objects."""

    def start(self):
        def create():
            model = self.model.module()
            optimizer = nnx.Optimizer(model, self.tx, wrt=self.wrt)
            if "begins" in self.case:
                optimizer.step[...] = jnp.asarray(self.case["begins"], optimizer.step.dtype)
            return model, optimizer

        inside = "inside" in self.case  # objects that a trace changes are made in it
        given = create if self.case["born"] or inside else create()
        specs = self.layouts(*create()) if self.mesh_spec["kind"] == "tp" else {}
        self.state = self.place(given, **specs, **self.asked)

    def layouts(self, model, optimizer):
        """As Flax gives those of a model or of the pair: shardings, or logical names with rules."""
        logical, apart = (self.mesh_spec[k] for k in ("logical", "apart"))
        state = jax.tree.map(lambda x: x, nnx.state(model if apart else (model, optimizer)))
        for _, variable in nnx.to_flat_state(state):
            if not isinstance(variable, nnx.Param):
                continue
            value = variable.get_value()
            spec = tensor_parallel(value, "columns" if logical else "model")
            variable.set_metadata(out_sharding=tuple(spec))
            if apart and len(spec) and value.shape[-1] % self.mesh.size == 0:
                variable.set_metadata(optimizer_sharding=(*spec[:-1], ("model", "data")))
        if logical:
            return {"param_specs": nnx.get_partition_spec(state), "logical_axis_rules": [("columns", "model")]}
        return {"param_specs": nnx.get_named_sharding(state, self.mesh)}

    @property
    def wrt(self):
        """What the optimizer is given."""
        return nnx.All(nnx.Param, is_trained) if self.trainable == "wrt" else nnx.Param

    @property
    def plan(self):
        return jzero.plan_of(self.state[1])

    def build(self):
        def gradients(model, batch):
            def loss(model, batch):
                return loss_of(self.form, model(batch), batch)

            if self.case.get("micro") is not None:
                return self.in_micro_batches(loss)(model, batch)
            diff = nnx.DiffState(0, self.wrt)
            return nnx.value_and_grad(self.gathered(loss), argnums=diff)(model, batch)

        def step(model, optimizer, batch):
            value, grads = gradients(model, batch)
            optimizer.update(model, grads)
            return value, grads if self.case["fed"] else ()

        if self.outside:
            run = self.run = self.jitted(gradients, nnx.jit, ())
        else:
            run = self.run = self.jitted(self.beside(step), nnx.jit, (0, 1))

        def train(batch, key):
            model, optimizer = self.state
            if not self.outside:
                return run(*self.read(), model, optimizer, batch)
            value, grads = run(model, batch)
            grads_before = host(grads)
            self.updated(lambda: optimizer.update(model, grads))
            return value, grads_before

        self.train = train

    def visible(self):
        return nnx.as_pure(nnx.state(self.state[0], nnx.Param))

    def rest(self):
        return nnx.split(self.state[0], nnx.Param, ...)[2]

    def like_reference(self):
        return self.state[0]

    def take_rest(self, other):
        nnx.update(self.state[0], nnx.state(other.state[0]))

    def opt_state(self):
        return nnx.as_pure(self.state[1].opt_state)

    def wrapped(self):
        return self.state[1].tx

    def count(self):
        return int(self.state[1].step[...])

    def jit(self, donate: bool):
        with self.context():
            _, leaves = nnx.split(tuple(self.state))
            leaves = jax.jit(lambda s: s, donate_argnums=0 if donate else ())(leaves)
            nnx.update(tuple(self.state), leaves)

    def replace(self, change):
        state = nnx.state(self.state[0], nnx.Param)
        nnx.update(self.state[0], change(state))


class PlainRun(LinenRun):
    """Params and optimizer state of any optax loop."""

    def start(self):
        params = _initial("plain", self.form)[0]
        specs, rules = None, ()
        if self.mesh_spec["kind"] == "tp":
            logical = self.mesh_spec.get("logical", False)
            rules = [("columns", "model")] if logical else ()
            specs = jax.tree.map(lambda x: tensor_parallel(x, "columns" if logical else "model"), params)
        given = self.asked | ({"trainable": is_trained} if self.trainable else {})
        self.plan_made = jzero.make_plan(
            params, mesh=self.mesh, param_specs=specs, logical_axis_rules=rules, **given, **self.fields
        )
        self.tx_wrapped = jzero.zero(self.tx, self.plan_made)
        params = self.plan_made.place(params)
        init = self.tx_wrapped.init if "offload" in self.fields else jax.jit(self.tx_wrapped.init)
        self.state, self.steps = (params, init(self.own(params))), 0

    def own(self, params):
        """What the optimizer is handed."""
        return trained_part(params, trained_flags(params)) if self.trainable == "part" else params

    def changed(self, grads, params, opt_state):
        """The params and the state after an update."""
        own = self.own(params)
        updates, opt_state = self.tx_wrapped.update(self.own(grads), opt_state, own)
        news = iter(jax.tree.leaves(optax.apply_updates(own, updates)))
        flags = trained_flags(params) if self.trainable == "part" else [True] * len(jax.tree.leaves(params))
        leaves, tree = jax.tree.flatten(params)
        return tree.unflatten([next(news) if t else x for x, t in zip(leaves, flags, strict=True)]), opt_state

    @property
    def plan(self):
        return self.plan_made

    def build(self):
        def loss(params, batch):
            return loss_of(self.form, plain_forward(self.form, params, batch), batch), {}

        def gradients(params, batch):
            micro = self.case.get("micro")
            (value, _), grads = self.grad(loss if micro else self.gathered(loss))(params, batch)
            return value, grads

        def step(params, opt_state, batch):
            value, grads = gradients(params, batch)
            return *self.changed(grads, params, opt_state), value, grads if self.case["fed"] else ()

        run = self.jitted(gradients, donate=()) if self.outside else self.jitted(self.beside(step), donate=(0, 1))

        def train(batch, key):
            params, opt_state = self.state
            self.steps += 1
            if not self.outside:
                params, opt_state, value, grads = run(*self.read(), params, opt_state, batch)
                self.state = params, opt_state
                return value, grads
            value, grads = run(params, batch)
            grads_before = host(grads)
            self.state = self.updated(lambda: self.changed(grads, params, opt_state))
            return value, grads_before

        self.train = train

    def visible(self):
        return self.state[0]

    def opt_state(self):
        return self.state[1]

    def wrapped(self):
        return self.tx_wrapped

    def whole(self):
        return whole_state(self.state[1], self.state[0], self.tx_wrapped)

    def rest(self):
        return ()

    def like_reference(self):
        return self.state[0]

    def count(self):
        return self.steps

    def replace(self, change):
        self.state = change(self.state[0]), self.state[1]

    def reshard(self, mesh: dict, config: dict):
        return self.restored(mesh, config)

    def save(self, path):
        state = {"params": self.state[0], "opt_state": self.state[1], "step": np.int32(self.steps)}
        jzero.checkpoint.save(path, state, tx=self.tx_wrapped)

    def load(self, path, cast=False):
        like = {"params": self.state[0], "opt_state": self.state[1], "step": jnp.int32(0)}
        state = jzero.checkpoint.restore(path, like, tx=self.tx_wrapped, cast=cast)
        self.state, self.steps = (state["params"], state["opt_state"]), int(state["step"])


RUNS = {"linen": LinenRun, "nnx": NnxRun, "plain": PlainRun}


@functools.lru_cache(maxsize=4)
def _initial(flavour: str, form):
    """The params and the rest that a run starts from."""
    return jax.jit(model_of(flavour, form).init)()


def initial(case: dict):
    """The params and the rest that the plain run of a case starts from."""
    return _initial(case["flavour"], form_of(case))
