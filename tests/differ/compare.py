"""One case from beginning to end: the sharded run beside the plain one, compared at each step.

[Note: fed]
Adam-like updates divide by the size of a gradient. Where that is near zero, rounding decides the sign of the update,
and two correct runs part. So in most cases the plain run does not follow its own gradients but those that the sharded
run returned: its params stay equal to the sharded ones to rounding, and at each step its own gradients, of the same
params and batch, are compared as well. Nothing is amplified, and tolerances stay tight. Free cases, where each run
follows its own gradients and the step returns none, use optimizers that amplify nothing.

[Note: tolerances]
Gradients: relative to the leaf's largest value, for the narrowest dtype that they went through. A gradient in 16 bits
that is further off, since what it sums cancels, must be as near to the gradient in fp32 as the plain run's is (twice
its error, at most 0.2 of the largest value, is allowed more). One that travels in codes may be off by two roundings of
each device's part, relative to the largest value of the part. Updates (fed): relative to how far the leaf has moved,
plus rounding of its values. State: relative to the leaf's largest value. Where a chain amplifies rounding, a second
plain run is fed the same gradients, each a rounding off: what lies between the two plain runs is allowed eight times
over, up to 1 % of the movement and 2 % of a leaf of the state. Where an update is the sign of a sum, and gradients have
16 bits, two values of a leaf, or 2 % of them (at most a quarter), may have turned; so too where `MultiSteps` keeps its
sums in bf16 (`moment_dtype`).
"""

from __future__ import annotations

import functools
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rounded_weights import after_codes

from differ.chains import AMPLIFY, SIGNS, SMOOTH, chain_of, trained_flags, trained_part
from differ.grammar import OUTSIDE, batch_parts, configs_of
from differ.models import batch_of, form_of, model_of
from differ.refusals import refusal
from differ.runs import RUNS, initial
from jzero.comm import reduce_in_codes
from jzero.layout import blocks
from jzero.layout.blocks import blocks_of
from jzero.layout.leaf_rule import path_keys
from jzero.sharding import Plan

SMALL, hosts_along = blocks.LEAST_QUANTIZED, reduce_in_codes.hosts_along
GRADIENT_CODES = {"int8": 2 / 254, "int4": 2 / 254 + 2 / 14}
"""By `reduce_dtype`: what each of the largest values of a block is off after two roundings, and two between hosts."""
EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}


class Outcome(NamedTuple):
    """How a case ended: "equal", "refused" or "FAILED", and why."""

    kind: str
    why: str = ""


class Differs(AssertionError):
    """Numbers that are not those of the plain run."""


class Plain:
    """The run without jzero: plain optax on one device, with a master copy where the config keeps one."""

    def __init__(self, case: dict):
        self.case, self.form = case, form_of(case)
        self.params, self.rest = initial(case)
        narrow = case["dtype"] != "float32"
        config = case["config"]
        self.wide = narrow and (config.get("master_dtype", "auto") is not None or config["tier"] in OUTSIDE)
        self.pairs = config.get("master_dtype") == "remainder" or "update_dtype" in config
        self.in_codes = False  # params are sums of updates that travel in codes
        self.master = jax.tree.map(lambda p: p.astype(jnp.float32), self.params) if self.wide else None
        self.tx = chain_of(case)
        count = len(jax.tree.leaves(self.params))
        self.flags = trained_flags(self.params) if case.get("trainable") else [True] * count
        self.opt_state = self.fresh_state()
        self.pending: list[Any] = []
        self.handed = self.params  # as the last update returned them
        self.start = [np.asarray(x, np.float32) for x in jax.tree.leaves(self.params)]
        self.replaced = False
        self.before = self.rest  # of the model, before the last gradients
        self.seen: Any = None  # params after their codes, as the sharded run's model sees them; None: as they are
        self.beside: Plain | None = None  # the run whose gradients are a rounding off, by `self.rounding`
        self.rounding = 0.0
        self.place(config, case["mesh"])

    def measure(self, rounding: float) -> None:
        """Start a second run whose gradients are off by `rounding`, relative to each of their values."""
        self.beside, self.rounding = Plain(self.case), rounding

    def apart(self, tree_of) -> list[float]:
        """By leaf of `tree_of(run)`: how far rounding alone has moved it."""
        if self.beside is None:
            return [0.0] * len(jax.tree.leaves(tree_of(self)))
        rows = zip(jax.tree.leaves(tree_of(self)), jax.tree.leaves(tree_of(self.beside)), strict=True)
        found = [np.abs(np.float64(_number(x)) - np.float64(_number(y))) for x, y in rows]
        return [float(np.nanmax(x, initial=0)) for x in found]

    def place(self, config: dict, mesh: dict) -> None:
        """Where the sharded run is now: that says when an update is late, and what an NNX model draws."""
        self.delay, self.devices = config["tier"].startswith("late"), batch_parts(mesh)
        self.once = reduced_once(self.case, config)
        if self.in_codes and "update_dtype" not in config:  # rounded again from their masters
            self.params = self.handed = jax.tree.map(lambda m, p: m.astype(p.dtype), self.master, self.params)
        self.in_codes = "update_dtype" in config
        if self.beside is not None:
            self.beside.place(config, mesh)

    def take_masters(self, params: list, masters: list) -> None:
        """The masters that the sharded run starts from: what its params were before they were rounded."""
        for p, m, own in zip(params, masters, jax.tree.leaves(self.params), strict=True):
            rounding = 4 * EPS["float16"] if str(p.dtype) == "float16" else 0.0  # see `_taken`
            rounding = EPS["bfloat16"] if self.pairs else rounding  # ties are rounded away from zero
            if m is not None and not np.allclose(np.float32(m.astype(p.dtype)), np.float32(p), rtol=rounding, atol=0):
                raise Differs(f"a master {m.shape} is not what its param was before it was rounded")
            if not np.allclose(np.float32(p), np.float32(own), rtol=4 * EPS[str(p.dtype)], atol=1e-6):
                raise Differs(f"a param {p.shape} does not start as in the plain run")
        tree = jax.tree.structure(self.params)
        self.params = self.handed = tree.unflatten(list(map(jnp.asarray, params)))
        rows = zip(masters, jax.tree.leaves(self.master), strict=True)
        own = [own if m is None else jnp.asarray(m) for m, own in rows]
        self.master = tree.unflatten(own if self.pairs else map(_taken, own, jax.tree.leaves(self.params)))
        self.opt_state = self.fresh_state()
        if self.beside is not None:
            self.beside.take_masters(params, masters)

    def fresh_state(self):
        """The optimizer's state, in fp32 where `moment_dtype` asks for it beside 16-bit params."""
        return jax.jit(self.tx.init)(self.in_fp32(self.own(self.master if self.wide else self.params)))

    def in_fp32(self, tree):
        """Gradients, params or state as the update takes them."""
        if self.wide or self.case["config"].get("moment_dtype") not in ("float32", "int8"):
            return tree
        return jax.tree.map(_in_fp32, tree)

    def own(self, tree):
        """What the optimizer takes of a tree like the params."""
        return trained_part(tree, self.flags)

    def see(self, run) -> None:
        """Take the codes in which a sharded run gathers its weights now."""
        self.seen = None
        if run.config["stage"] == 3 and run.config.get("gather_dtype"):
            found = after_codes(run.visible(), run.plan, self.form.compute)
            leaves = [p if x is None else x for p, x in zip(jax.tree.leaves(self.params), found, strict=True)]
            self.seen = jax.tree.structure(self.params).unflatten(leaves)
        if self.beside is not None:
            self.beside.seen = self.seen

    @property
    def read(self):
        """The params that the model reads."""
        return self.params if self.seen is None else self.seen

    def gradients(self, batch, key):
        """(loss, gradients of trained params); the rest advances."""
        run, micro = _gradients(self.case["flavour"], self.form), self.case.get("micro")
        self.before = self.rest
        if micro is None or self.case["flavour"] != "nnx":
            value, self.rest, grads = run(self.read, self.rest, batch, key)
            return float(value), jax.tree.leaves(self.own(grads))
        found, weights, start = [], [], self.rest
        for device in range(self.devices) if self.once else [None]:
            self.rest = start if device is None else of_device(start, device)
            for i in range(micro["accumulate"]):
                cut = functools.partial(rows_of, devices=self.devices, k=micro["accumulate"], device=device, i=i)
                rows = jax.tree.map(cut, batch)
                weights.append(float(rows["mask"].sum()) if "mask" in rows else 1.0)
                value, self.rest, grads = run(self.read, self.rest, rows, key)
                found.append((float(value), [np.asarray(g, np.float32) for g in jax.tree.leaves(self.own(grads))]))
        self.rest = jax.tree.map(lambda new, old: old if is_key(old) else new, self.rest, start)
        kept = [i for i, w in enumerate(weights) if w]
        values, grads = zip(*(found[i] for i in kept), strict=True)
        average = functools.partial(np.average, axis=0, weights=[weights[i] for i in kept])
        return float(average(values)), [average(np.stack(g)) for g in zip(*grads, strict=True)]

    def truth(self, batch, key) -> list[np.ndarray] | None:
        """The gradients of the same params computed in fp32; None where micro-batches draw keys of their own."""
        if self.case.get("micro") and self.case["flavour"] == "nnx":
            return None
        form = self.form._replace(dtype=jnp.dtype("float32"), compute=jnp.dtype("float32"))
        read, rest = jax.tree.map(_in_fp32, (self.read, self.before))
        _, _, grads = _gradients(self.case["flavour"], form)(read, rest, batch, key)
        return [np.asarray(g, np.float32) for g in jax.tree.leaves(self.own(grads))]

    def parts(self, batch, key) -> list[float]:
        """By leaf: the mean of the largest magnitudes in the gradients that devices and micro-batches add up."""
        micro = self.case.get("micro")
        k, found = micro["accumulate"] if micro else 1, []
        for device in range(self.devices):
            for i in range(k):
                cut = functools.partial(rows_of, devices=self.devices, k=k, device=device, i=i)
                run = _gradients(self.case["flavour"], self.form)
                _, _, grads = run(self.read, self.before, jax.tree.map(cut, batch), key)
                found.append([float(np.max(np.abs(g), initial=0)) for g in jax.tree.leaves(self.own(grads))])
        return [float(np.nanmean(x)) for x in zip(*found, strict=True)]  # an empty part of the batch has none

    def update(self, grads: list):
        """One step of the optimizer; with a delay the one before it."""
        wide = self.own(self.master if self.wide else self.params)
        given = [np.asarray(g, np.float32) for g in grads]
        rows = zip(grads, jax.tree.leaves(wide), strict=True)
        grads = jax.tree.structure(wide).unflatten([jnp.asarray(g).astype(p.dtype) for g, p in rows])
        self.flush()
        self.pending = [(grads, self.master if self.wide else self.params)]  # with a delay, as they are now
        if not self.delay:
            self.flush()
        if self.beside is not None:  # last: what flushes this run flushes that one, and its update may be late too
            signs = np.random.default_rng(len(given))
            self.beside.update([g * (1 + self.rounding * signs.choice([-1.0, 1.0], g.shape)) for g in given])

    def flush(self):
        """Apply an update that is late."""
        for grads, wide in self.pending:
            own = self.own(wide)
            new, state = _update(self.tx)(self.in_fp32(grads), self.opt_state, own, self.in_fp32(own))
            self.opt_state = self.in_fp32(state)
            news, tree = iter(jax.tree.leaves(new)), jax.tree.structure(wide)
            rows = zip(jax.tree.leaves(wide), self.flags, strict=True)
            new = tree.unflatten([next(news) if t else x for x, t in rows])
            if self.delay:  # what the user has replaced meanwhile stays
                new = jax.tree.map(
                    lambda n, p, h: jnp.where(p == h, n, p.astype(n.dtype)), new, self.params, self.handed
                )
            if self.wide:
                self.master = new
                new = jax.tree.map(lambda m, p: m.astype(p.dtype), new, self.params)
            self.params = self.handed = new
        self.pending = []
        if self.beside is not None:
            self.beside.flush()

    def replace(self, change):
        """Params that the user replaced: the masters take what differs."""
        if self.beside is not None:
            self.beside.replace(change)
        old, self.params = self.params, change(self.params)
        if self.in_codes:  # what codes have lost stays
            self.master = jax.tree.map(
                lambda p, o, m: jnp.where(p == o, m, p.astype(m.dtype) + (m - o.astype(m.dtype))),
                self.params, old, self.master,
            )  # fmt: skip
        elif self.wide and not self.pending:
            self.master = jax.tree.map(
                lambda p, m: jnp.where(p == m.astype(p.dtype), m, p.astype(m.dtype)), self.params, self.master
            )


def on_two_hosts(mesh, axis: str) -> int:
    """In place of `hosts_along`: the devices along an axis are on two hosts, where they may be."""
    return 2 if mesh.shape[axis] % 2 == 0 else 1


def reduced_once(case: dict, config: dict) -> bool:
    """Whether each device draws numbers of its own for a module: gradients are reduced once, after the loop."""
    micro = case.get("micro")
    if micro is None or "BatchNorm" in case["blocks"]:
        return False
    if micro["accumulate"] == 1:
        in_codes = config.get("reduce_dtype") in GRADIENT_CODES
        by_bucket = micro["reduce"] == "microbatch" or (micro["reduce"] == "auto" and in_codes)
        here = config["stage"] == 3 or (config["stage"] == 2 and by_bucket)
        return config.get("reduce_dtype") is not None and not here
    return micro["reduce"] == "step" or (micro["reduce"] == "auto" and config["stage"] < 2)


def rows_of(x, devices: int, k: int, device: int | None, i: int):
    """Micro-batch i, which has rows of every device; or those of one device."""
    parts = x.reshape(devices, k, -1, *x.shape[1:])[:, i]
    return parts[device] if device is not None else parts.reshape(-1, *x.shape[1:])


def _in_fp32(x):
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def is_key(x) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def of_device(rest, device: int):
    """The state of a model with the keys that a device draws from."""
    return jax.tree.map(lambda x: jax.random.fold_in(x, device) if is_key(x) else x, rest)


def _taken(master, param):
    """A master with the values of its param where it is another one.

    XLA's CPU backend of jaxlib 0.10 makes what a creation function computes in fp16 twice, for the param and for the
    master, and rounds in other places: up to two units in the last place apart. The first update takes the param.
    """
    return jnp.where(master.astype(param.dtype) == param, master, param.astype(master.dtype))


@functools.lru_cache(maxsize=4)
def _gradients(flavour, form):
    def run(params, rest, batch, key):
        loss = model_of(flavour, form._replace(plainly=True)).loss
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, batch, key)
        return value, rest, grads

    return jax.jit(run)


@functools.lru_cache(maxsize=4)
def _update(tx):
    def run(grads, state, params, seen):
        updates, state = tx.update(grads, state, seen)
        return optax.apply_updates(params, updates), state

    return jax.jit(run)


WHOLE = Plan.whole_bytes
"""As it is: a case with pieces has its own number of bytes."""


def _folder() -> tempfile.TemporaryDirectory:
    """Into which a thread with the last late update may still write while it is removed."""
    return tempfile.TemporaryDirectory(prefix="jzero-differential-", ignore_cleanup_errors=True)


def run_case(case: dict) -> Outcome:
    """Run a case; never raises."""
    with _folder() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        places = configs_of(case)
        gradients = {c.get("reduce_dtype") for c in places} & GRADIENT_CODES.keys()
        in_codes = case["config"].get("moment_dtype") == "int8"
        in_codes |= any({"gather_dtype", "update_dtype"} & c.keys() for c in places)
        blocks.LEAST_QUANTIZED = 16 if in_codes or gradients else SMALL  # the models are tiny
        Plan.whole_bytes = property(lambda plan: case["pieces"]) if case.get("pieces") else WHOLE
        reduce_in_codes.hosts_along = on_two_hosts if "int4" in gradients else hosts_along
        try:
            initial(case)  # before any context of a mesh
            _run(case, Path(folder))
        except Exception as error:
            known = refusal(error, case) or _plain_too(error, case)
            if known:
                return Outcome("refused", known)
            text = traceback.format_exc() if not isinstance(error, Differs) else str(error)
            return Outcome("FAILED", f"{type(error).__name__}: {error}\n{text}"[:6000])
    return Outcome("equal")


def _plain_too(error: Exception, case: dict) -> str | None:
    """Says that plain optax raises what the sharded run raised: SM3 refuses scalars, and so on."""
    if isinstance(error, Differs):
        return None
    same = _raises(_plain_step, case, error, str)
    if case["flavour"] == "nnx" and not same:  # whose text has other paths of leaves
        same = _raises(_plain_nnx_step, case, error, lambda e: str(e).partition("\n")[0])
    return "plain optax raises it too" if same else None


def _raises(step: Callable[[dict], None], case: dict, error: Exception, text: Callable[[Exception], str]) -> bool:
    try:
        step(case)
    except Exception as own:
        return type(own) is type(error) and text(own) == text(error)
    return False


def _plain_step(case: dict) -> None:
    plain = Plain(case)
    _, grads = plain.gradients(batch_of(case, 0), jax.random.key(0))
    plain.update(grads)
    plain.flush()


def _plain_nnx_step(case: dict) -> None:
    """With `nnx.Optimizer`, which loses a state's lists at the first update: a `cond` around SM3 fails from then on."""
    model = model_of("nnx", form_of(case)).module()
    optimizer = nnx.Optimizer(model, chain_of(case), wrt=nnx.Param)
    for _ in range(2):
        optimizer.update(model, nnx.state(model, nnx.Param))


def _run(case: dict, folder: Path) -> None:
    run, plain, tolerances = RUNS[case["flavour"]](case, folder), Plain(case), Tolerances(case)
    if case["optimizer"] in AMPLIFY:
        plain.measure(max(tolerances.excess(), EPS["float32"]))
    _check_bytes(run, case)
    if plain.wide:
        params, _, masters = run.parts()
        plain.take_masters(params, _of_all(masters, plain.flags))
    for step in range(case["steps"]):
        event = case["events"].get(str(step))
        if event:
            run = _happens(event, run, plain, case, folder)
            tolerances.replaced |= event["kind"] == "replace"
            tolerances.widen(run.config)
        where = f"step {step}" + (f", after {event['kind']}" if event else "")
        if event and event["kind"] in ("restore", "reshard") and run.config.get("moment_dtype") == "int8":
            _take_moments(run, plain, tolerances, where)  # leaves that were wide in the other place have codes here
        batch, key = batch_of(case, step), jax.random.key(step)
        if event and event["kind"] == "skip":
            batch["x"] = batch["x"] * np.float32("nan")
        if event and event["kind"] == "full disk":
            run.writes = event["writes"]
        before, handed = jax.tree.leaves(run.visible()), jax.tree.leaves(plain.params)
        plain.see(run)
        loss, grads = run.step(batch, key)
        if case["step"] == "jzero.jit" and not run.outside and not any(x.is_deleted() for x in before):
            raise Differs(f"{where}: jzero.jit did not donate the params")
        want, own = plain.gradients(batch, key)
        beside, others = (want, own) if plain.beside is None else plain.beside.gradients(batch, key)
        tolerances.loss(loss, want, where, abs(beside - want))
        if grads:
            if len(grads) == len(plain.flags):  # zeros, or what the model reads: of a frozen param no update takes it
                grads = [g for g, t in zip(grads, plain.flags, strict=True) if t]
            more = (functools.partial(of, batch, key) for of in (plain.truth, plain.parts))
            tolerances.gradients(grads, own, where, others, *more)
        plain.update(grads if case["fed"] else own)
        _check_params(run, plain, tolerances, where, handed)
        if run.config.get("moment_dtype") == "int8":
            _take_moments(run, plain, tolerances, where)
    _check_end(run, plain, tolerances, case)


def _happens(event: dict, run, plain: Plain, case: dict, folder: Path):
    """What an event does to the state; the run that goes on."""
    kind = event["kind"]
    if kind in ("jit", "donated jit"):
        run.jit(kind == "donated jit")
    elif kind == "restore":
        run = run.restored(event["mesh"], event["config"])
    elif kind == "reshard":
        run = run.reshard(event["mesh"], event["config"])
    elif kind == "replace":
        def change(params):
            leaves, tree = jax.tree.flatten(params)
            at = event["leaf"] % len(leaves)
            leaves[at] = jax.device_put(jnp.asarray(np.asarray(leaves[at]) * np.asarray(0.5, leaves[at].dtype)),
                                        leaves[at].sharding)  # fmt: skip
            return tree.unflatten(leaves)

        run.replace(change)
        plain.replace(change)
    elif kind == "pickle":
        again = pickle.loads(pickle.dumps(run.plan))
        if again != run.plan or hash(again) != hash(run.plan):
            raise Differs("a pickled plan is not equal to the plan")
    elif kind == "second":
        other = run.fresh(run.mesh_spec, run.config)
        fresh = Plain(case)
        fresh.place(run.config, run.mesh_spec)
        fresh.see(other)
        first = other.step(batch_of(case, 0), jax.random.key(0))[0]
        Tolerances(case | {"config": run.config}).loss(first, fresh.gradients(batch_of(case, 0), jax.random.key(0))[0],
                                                       "a second state")  # fmt: skip
    elif kind == "resume":
        with run.context():
            run = run.resumed()
    elif kind == "weights":
        _check_weights(run, plain, event, case, folder)
    if kind in ("restore", "reshard", "resume"):
        plain.flush()
    plain.place(run.config, run.mesh_spec)
    if kind in ("restore", "reshard"):
        _check_bytes(run, case)
    return run


class Tolerances:
    """What may differ, for a case's dtypes."""

    def __init__(self, case: dict):
        self.case = case
        dtypes = [case["dtype"], case["compute"] or "float32"]
        self.grads, self.rounded_state = 0.0, 0.0
        self.replaced, self.sums_rounded = False, False
        self.dtypes = dtypes
        self.widen(case["config"])

    def widen(self, config: dict) -> None:
        """Take in the dtypes of a config."""
        asked = [config.get(k) for k in ("compute_dtype", "reduce_dtype")]
        self.dtypes += [str(dtype) for dtype in asked if dtype not in (None, *GRADIENT_CODES)]
        self.in_codes = GRADIENT_CODES.get(config.get("reduce_dtype"), 0.0)
        eps = max(EPS[d] for d in self.dtypes)
        self.grads = max(3e-5, 12 * eps) if eps > 1e-6 else 2e-4
        if config.get("moment_dtype") == "bfloat16":
            self.rounded_state = 0.1
            # sums of gradients that cancel, each rounded to 16 bits, which most updates divide by their own size
            self.sums_rounded |= "multi_steps" in self.case["wraps"] and self.case["optimizer"] not in SMOOTH
        if self.case["dtype"] == "float16" and self.case["born"]:
            self.rounded_state = max(self.rounded_state, 0.01)  # see `_taken`
        if config.get("master_dtype", "auto") is None and self.case["dtype"] != "float32":
            self.rounded_state = max(self.rounded_state, 0.1)

    def excess(self) -> float:
        """Rounding of gradients that XLA leaves out between the backward pass and the update, in 16 bits."""
        eps = max(EPS[d] for d in self.dtypes)
        return eps if eps > EPS["float32"] else 0.0

    def loss(self, got: float, want: float, where: str, apart: float = 0.0) -> None:
        eps = max(EPS[d] for d in self.dtypes)
        if got == want or (np.isnan(want) and np.isnan(got)):  # both infinite, too
            return
        part = max(1e-5, 8 * eps, 0.0 if self.case["fed"] else 1e-3, self.rounded_state)
        if not abs(got - want) <= part * max(abs(want), 0.1) + min(8 * apart, 0.01 * abs(want)):
            raise Differs(f"{where}: loss {got!r}, plain {want!r}")

    def gradients(
        self, got: list, want: list, where: str, beside: list, truth: Callable[[], Any], parts: Callable[[], Any]
    ) -> None:  # fmt: skip
        want = [np.asarray(x, np.float32) for x in want]
        most = max((float(np.max(np.abs(w), initial=0, where=np.isfinite(w))) for w in want), default=0.0)
        for i, (g, w, b) in enumerate(zip(got, want, beside, strict=True)):
            g = np.asarray(g, np.float32)
            _same_form(g, w, f"{where}: gradient {i}")
            if not np.isfinite(w).all():
                if np.isfinite(g).all():
                    raise Differs(f"{where}: gradient {i} {w.shape} is finite, that of the plain run is not")
                continue
            error = float(np.max(np.abs(g - w), initial=0))
            few = 0.15 if w.size < 4 else 0.05  # sums of many terms that cancel
            if w.size == 1 and self.excess():  # each device's part of the sum is rounded to 16 bits
                few = 0.3
            largest = float(np.max(np.abs(w), initial=0))
            allowed = max(self.grads, self.rounded_state) * (largest + few * most) + 1e-7
            allowed += min(8 * float(np.nanmax(np.abs(np.float32(b) - w), initial=0)), 0.01 * largest)
            if not error <= allowed and self.in_codes:
                allowed += 1.2 * self.in_codes * parts()[i]
            if not error <= allowed and self.excess() and (exact := truth()) is not None:
                # is it as near to the true gradient as the plain run is?
                error = float(np.max(np.abs(g - exact[i]), initial=0))
                allowed += 2 * min(float(np.max(np.abs(w - exact[i]), initial=0)), 0.1 * largest)
            if not error <= allowed:
                raise Differs(f"{where}: gradient {i} {w.shape} differs by {error:.3g}, allowed {allowed:.3g}, largest "
                              f"value {largest:.3g}")  # fmt: skip

    def error(self, got, want) -> float:
        """The largest difference between two leaves, without those of values that may have turned."""
        off = np.abs(got - want)
        turned = self.case["optimizer"] in SIGNS and self.excess()
        if (turned or self.sums_rounded) and np.isfinite(off).all():
            off = np.sort(off, axis=None)[: off.size - min(max(2, off.size // 50), off.size // 4)]
        return float(np.max(off, initial=0))

    def values(self, got: list, want: list, where: str, apart: list[float], lost: list[float] | None = None) -> None:
        """Params or masters: by how far they have moved, by their rounding, and by what rounding alone has moved.

        `lost`: what codes of an update may have lost of each.
        """
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            if g is None:
                continue
            # a 16-bit param that was replaced one rounding apart is taken into its master
            rounding, least = EPS[self.case["dtype"] if self.replaced else str(g.dtype)], 0.0
            if str(g.dtype) == "float16":  # near zero its values are this far apart
                least = float(jnp.finfo(jnp.float16).smallest_subnormal)
            if "centralize" in self.case["wraps"]:  # of rows of one value only rounding is left, which rmsprop enlarges
                least += 1e-6
            g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
            _same_form(g, w, where)
            if not np.isfinite(w).all():  # the plain run diverged
                if not np.array_equal(np.isfinite(g), np.isfinite(w)):
                    raise Differs(f"{where}: leaf {i} {w.shape} is finite elsewhere than that of the plain run")
                continue
            moved = float(np.max(np.abs(w - self.started[i]), initial=0))
            free = 2e-3 if not self.case["fed"] else 0.0
            part = max(1e-4, free, self.rounded_state * 1.5, 3 * self.excess())
            error = self.error(g, w)
            allowed = part * moved + min(8 * apart[i], 0.01 * moved) + (lost[i] if lost else 0.0)
            allowed += 4 * rounding * float(np.max(np.abs(w), initial=0)) + least + 1e-9
            turned = float(np.max(np.abs(g - w), initial=0)) > 2 * moved + allowed  # further than by a sign
            if turned or not error <= allowed:
                raise Differs(
                    f"{where}: leaf {i} {w.shape} differs by {error:.3g}, allowed {allowed:.3g}, it has moved by "
                    f"{moved:.3g}"
                )

    def state(self, got: list, want: list, where: str, apart: list[float]) -> None:
        """Optimizer state: counts equal, the rest by each leaf's largest value and by what rounding has moved."""
        if len(got) != len(want):
            raise Differs(f"{where}: {len(got)} leaves, plain {len(want)}")
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            _same_form(g, w, f"{where}: leaf {i}")
            if not np.issubdtype(w.dtype, np.floating) and w.dtype != jnp.bfloat16:
                if not np.array_equal(g, w):
                    raise Differs(f"{where}: leaf {i} is {g.reshape(-1)[:4]}, plain {w.reshape(-1)[:4]}")
                continue
            narrow = 8 * EPS["bfloat16"] if w.dtype in (jnp.bfloat16, np.float16) else 0.0
            g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
            free = 5e-3 if not self.case["fed"] else 0.0
            part = max(2e-4, narrow, free, self.rounded_state * 1.5, 6 * self.excess())
            error = self.error(g, w)
            # differences that cancel in 16 bits, not quite in 32; an update that is a difference of params is rounded
            # as they are, where the gradient is zero too
            near = self.rounded_state or self.case["optimizer"].startswith(("schedule_free", "madgrad"))
            least = 1e-6 if near else 1e-9
            largest = float(np.max(np.abs(w), initial=0))
            allowed = part * largest + least + min(8 * apart[i], 0.02 * largest)
            if self.case["optimizer"] == "mechanize" and self.case["dtype"] != "float32" and w.shape == (6,):
                allowed += 0.15 * largest  # sums of products of 16-bit gradients and movements, which cancel
            if not error <= allowed and not (np.isnan(g) == np.isnan(w)).all():
                raise Differs(f"{where}: leaf {i} {w.shape} differs by {error:.3g}, allowed {allowed:.3g}")
            if not error <= allowed and not np.isnan(w).any():
                raise Differs(
                    f"{where}: leaf {i} {w.shape} differs by {error:.3g}, allowed {allowed:.3g}, largest value "
                    f"{largest:.3g}"
                )


    def codes(self, got: list, want: list, where: str, apart: list[float]) -> None:
        """Optimizer state, floating leaves to the distance of two codes beside the tolerance of `state`."""
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            _same_form(g, w, f"{where}: leaf {i}")
            if not jnp.issubdtype(w.dtype, jnp.floating):
                continue
            g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
            largest = float(np.max(np.abs(w), initial=0, where=np.isfinite(w)))
            # values c^4 s / 127^4 are 4 c^3 s / 127^4 apart, and more by 6 / c of that; a scale is at most the largest
            near = np.maximum(np.abs(g), np.abs(w))
            gap = 4.6 / 127 * largest**0.25 * near**0.75 + 16 * largest / 127**4
            part = max(2e-4, 5e-3 if not self.case["fed"] else 0.0, self.rounded_state * 1.5, 6 * self.excess())
            off = np.abs(g - w) - gap - part * largest - min(8 * apart[i], 0.02 * largest) - 1e-9
            if not (off[np.isfinite(w)] <= 0).all():
                worst = np.unravel_index(np.nanargmax(off), off.shape) if off.ndim else ()
                pair = f"{g[worst]:.4g}, plain {w[worst]:.4g}, largest {largest:.3g}"
                raise Differs(f"{where}: leaf {i} {w.shape} is {pair}")


def _same_form(got, want, where: str) -> None:
    if got.shape != want.shape:
        raise Differs(f"{where}: shape {got.shape}, plain {want.shape}")


def _check_params(run, plain: Plain, tolerances: Tolerances, where: str, handed: list) -> None:
    """The params after a step, `handed` those of the plain run before it."""
    from differ.runs import host

    tolerances.started = plain.start
    apart = plain.apart(lambda x: x.params)
    got, lost = host(run.visible()), None
    if plain.in_codes:
        rows = zip(_layouts(run), handed, jax.tree.leaves(plain.master), strict=True)
        lost = [_lost_by_codes(run, *row) for row in rows]
    tolerances.values(got, jax.tree.leaves(plain.params), f"{where}: params", apart, lost)
    if plain.in_codes:  # so its next update adds to the same params
        for of in (plain, plain.beside):
            if of is not None:
                of.params = of.handed = jax.tree.structure(of.params).unflatten(list(map(jnp.asarray, got)))


def _layouts(run) -> list:
    """The layouts of the params, in the order of the plain run's."""
    paths = [k for k, _ in jax.tree_util.tree_leaves_with_path(run.visible())]
    return [run.plan.by_keys[path_keys(k)] for k in paths]


def _lost_by_codes(run, x, param, master) -> float:
    """What the codes of an update may lose of a param: half a code, of which its largest value has 64 or more."""
    if blocks.update_blocks(x, run.plan) is None:
        return 0.0
    sent = np.abs(np.asarray(master, np.float32) - np.asarray(param, np.float32))
    return float(np.max(sent, initial=0, where=np.isfinite(sent))) / 64  # and is itself up to one code off


def _check_moments(inner: list, plain: Plain, run) -> None:
    """Some of what starts at zero and has a param's shape is stored in the dtype that the config asks for."""
    shapes = {x.shape for x in jax.tree.leaves(plain.own(plain.params))}
    first = [np.asarray(_number(x)) for x in jax.tree.leaves(plain.fresh_state())]
    zeros = [x.ndim > 1 and x.shape in shapes and jnp.issubdtype(x.dtype, np.floating) and not x.any() for x in first]
    moments = [g for g, z in zip(inner, zeros, strict=True) if z]
    asked = run.config.get("moment_dtype")
    if asked == "int8":  # the state was decoded for the comparison
        codes = [x for x in jax.tree.leaves(run.opt_state()) if x.dtype == jnp.int8]
        quantized = {x.shape for x in run.plan.trained.layouts if blocks_of(x, run.plan)}
        expected = "frozen" not in run.case["wraps"] and quantized & {g.shape for g in moments}
        if expected and not codes:
            raise Differs("moment_dtype=int8 and no codes")
        return
    if asked and moments and all(g.dtype != asked for g in moments):
        raise Differs(f"moment_dtype={asked} and no moment of that dtype: {[str(g.dtype) for g in moments]}")


def _take_moments(run, plain: Plain, tolerances: Tolerances, where: str) -> None:
    """Moments in 8 bits are at most a code away from those of the plain run, which goes on with them.

    So its next params are compared to rounding, whatever the codes have lost.
    """
    _, inner, _ = run.parts()
    for of in (plain, plain.beside):
        if of is None:
            continue
        leaves, tree = jax.tree.flatten(of.opt_state)
        if of is plain:
            apart = of.apart(lambda x: x.opt_state)
            tolerances.codes(inner, [_number(x) for x in leaves], f"{where}: optimizer state", apart)
        moments = [jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in leaves]
        taken = [jnp.asarray(g, x.dtype) if m else x for g, x, m in zip(inner, leaves, moments, strict=True)]
        of.opt_state = tree.unflatten(taken)


def _check_weights(run, plain: Plain, event: dict, case: dict, folder: Path) -> None:
    """Params that are read alone, into another place, are those of the state, with the statistics beside them."""
    path = Path(tempfile.mkdtemp(dir=folder)) / "saved"
    with run.context():
        run.save(path)
    other = run.fresh(event["mesh"], event["config"], abstract=case["born"])
    other.load(path, only="params")
    params = jax.tree.leaves(run.visible())
    again = "update_dtype" not in event["config"] and event["config"].get("master_dtype", "auto") is not None
    if run.config.get("master_dtype") == "remainder" or ("update_dtype" in run.config and again):
        # the other place rounds masters to even
        masters = _of_all(run.parts()[2], plain.flags)
        params = [p if m is None else m.astype(p.dtype) for p, m in zip(params, masters, strict=True)]
    for name, got, want in (("param", other.visible(), params), ("statistic", other.rest(), run.rest())):
        for i, (g, w) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)):
            if not jnp.issubdtype(w.dtype, jnp.floating):  # random keys and their counts
                continue
            g, w = np.asarray(g), np.asarray(w)
            if not np.array_equal(g, w, equal_nan=True):
                raise Differs(f"{name} {i} {w.shape} of a checkpoint that was read with only='params' is another one")


def _check_end(run, plain: Plain, tolerances: Tolerances, case: dict) -> None:
    """The whole state after the last step."""
    if run.count() != case["steps"] + case.get("begins", 0):
        raise Differs(f"the step count is {run.count()} after {case['steps']} steps from {case.get('begins', 0)}")
    plain.flush()
    _, inner, masters = run.parts()
    want = [_number(x) for x in jax.tree.leaves(plain.opt_state)]
    _check_moments(inner, plain, run)
    tolerances.state(inner, want, "optimizer state", plain.apart(lambda x: x.opt_state))
    if case["flavour"] == "nnx":
        from differ.runs import host

        own = host(plain.rest)
        tolerances.state(host(run.rest()), own, "statistics and counts", [0.0] * len(own))
    if masters is not None:
        want = jax.tree.leaves(plain.master if plain.wide else plain.params)
        masters = _of_all(masters, plain.flags)
        apart = plain.apart(lambda x: x.master if x.wide else x.params)
        tolerances.values(masters, want, "masters", apart)
    if masters is None and plain.wide and run.config.get("master_dtype", "auto") is not None:
        raise Differs("16-bit params without masters")


def _of_all(masters: list, flags: list[bool]) -> list:
    """The masters of all params, None for a frozen one."""
    if len(masters) == len(flags):
        return masters
    own = iter(masters)
    return [next(own) if t else None for t in flags]


def _number(x):
    key = hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if key else x)


def _check_bytes(run, case: dict) -> None:
    """What the fullest device holds is what the plan says, and split as the stage says."""
    plan, (params, state) = run.plan, run.bytes()
    planned = sum(
        int(np.prod(plan.sharding(x.stored).shard_shape(x.shape), dtype=int)) * x.dtype.itemsize for x in plan.layouts
    )
    if params != planned:
        raise Differs(f"params take {params} bytes of the fullest device, the plan says {planned}")
    whole = run.config["min_shard_bytes"] != 0 or run.config.get("uneven") == "replicate"
    if run.outside or not plan.config.stage or whole:
        return
    leaves = [x for x in jax.tree.leaves(run.opt_state()) if hasattr(x, "dtype") and hasattr(x, "nbytes")]
    split = "hsdp" in (run.mesh_spec["kind"], run.mesh_spec.get("levels")), run.mesh_spec["kind"] == "tp"
    parts = len(run.mesh.devices.flat) // 2 ** sum(split)
    padded = {x.shape for x in plan.layouts}  # others of more than 16 values are split where a dim divides, else whole

    def is_split(x):
        return x.size > 2 * parts if x.shape in padded else x.size > 16 and any(d % parts == 0 for d in x.shape)

    split = [is_split(x) for x in leaves]
    few = sum(x.nbytes for x, s in zip(leaves, split, strict=True) if not s)
    large = sum(x.nbytes for x, s in zip(leaves, split, strict=True) if s)
    if state > few + 3.5 * large / parts:
        raise Differs(
            f"optimizer state takes {state} bytes of the fullest device: {large} bytes in {parts} parts, {few} whole"
        )
