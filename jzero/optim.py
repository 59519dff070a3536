"""`zero(tx, plan)`: an optax transformation whose state is sharded and whose updates land on sharded masters.

[Note: an update knows where it lands]
With 16-bit params and an fp32 master the new param is `cast(master)`, a value and not a difference. A
difference would cost fp32 on the wire and, in 16 bits, be wrong. So the leaf that `update` returns answers
`param + leaf` with the new param: the master is updated on its shard, cast there, and the 16-bit result is
gathered. `optax.apply_updates` and Flax's `apply_gradients` need not know. Old params die as soon as their
own sum is taken, so their donated buffers take the new ones: on an H200 compile of a 0.2B GPT the temp is
0.16 bytes per parameter, against 2.1 for a returned fp32 difference.

[Note: the master follows the param]
A param that is not `cast(master)` was replaced by the user (a loaded checkpoint, pruning). The master takes
it over, element by element, at the next update. The comparison reads the shard alone.

[Note: old params die early]
A donated param's buffer can hold its own gradient once nothing reads the old param any more. The update
reads it (its shard is compared with the master, or is what the difference is added to), and XLA schedules
that read as late as it can, so that the buffer stays taken through the whole backward pass. Barriers make
every gradient wait for all those reads, which costs nothing: the masters are compared in place. Without
them the temp of the stage-2 step named above is 1.4 to 1.8 bytes per parameter, with them 0.3. Vectors do not
wait: they are small, and what their gradients are computed from would wait with them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jzero.errors import listing, typed_shape
from jzero.identity import same_key
from jzero.jaxprs import constant_zero_outputs, is_tracer
from jzero.landing import OneByOne, is_copied, land_by_layers, land_on_sum, landing, lands_by_layers
from jzero.layout import Layout
from jzero.mesh import check_context_mesh
from jzero.offload import check_host_memory, homes_of, streamed
from jzero.placement import on_device
from jzero.sharding import Plan
from jzero.units import DEVICE, Home


class ZeroState(NamedTuple):
    """Optimizer state of a run with master weights.

    Attributes:
      inner: the state of the wrapped transformation, made for the fp32 masters.
      master: the tree of params in the master dtype; None where a param needs none. Sharded like the moments.
    """

    inner: Any
    master: Any


def zero(tx: optax.GradientTransformation, plan: Plan) -> optax.GradientTransformationExtraArgs:
    """Any optax transformation with its state sharded as the plan says; optax in, optax out.

    The gradient is constrained to its shard (XLA makes that a reduce-scatter), the wrapped update runs on
    shards, and the new params are gathered to their stored layout in their own dtype (an all-gather at
    stages 1 and 2, nothing at stage 3).

    Args:
      tx: the whole chain. It sees gradients and params in the master dtype, in their logical shapes.
      plan: from `jzero.make_plan`.

    Returns:
      A transformation. `init(params)` pins the layout of every leaf; without masters its structure is that
      of `tx.init(params)`, with them it is `ZeroState(inner, master)`. `update(grads, state, params)`
      returns leaves to add to the params by `optax.apply_updates` or `p + u`, and nothing else; with
      `updates="delta"` plain arrays of the master dtype.

    Raises:
      TypeError: `tx` is no optax transformation, or already wrapped.
      ValueError: from `init` and `update`: params that the plan was not made for; `update` without params.

    Layout:
      grads: any layout in, used as `Layout.grad`; state and masters: `Layout.state`; params: `Layout.stored`.

    Cost:
      Per device and step, Psi_b = bytes of the params: (N-1)/N Psi_b for the reduce-scatter and as much for
      the all-gather (stages 1, 2). Memory: (state + master bytes) / N.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jzero
      >>> params = {"w": jnp.ones((1024, 512))}
      >>> tx = jzero.zero(optax.adam(1e-3), jzero.make_plan(params, stage=1))
      >>> tx.init(params)[0].mu["w"].sharding.spec
      PartitionSpec('data',)

    References:
      Rajbhandari et al., ZeRO (arXiv:1910.02054), section 5.
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(f"jzero.zero: tx must be an optax transformation, not {type(tx).__name__}.")
    if not isinstance(plan, Plan):
        raise TypeError(
            f"jzero.zero: plan must be a jzero.Plan, not {type(plan).__name__}. Make one: jzero.make_plan(params, ...)."
        )
    if is_wrapped(tx):
        raise TypeError(
            "jzero.zero: this transformation is wrapped already. Wrap the plain one: jzero.unwrap(tx)."
        )
    key = same_key(tx)
    return optax.GradientTransformationExtraArgs(_Init(tx, plan, key), _Update(tx, plan, key))


def is_wrapped(tx: Any) -> bool:
    """True for what `zero` returns."""
    return isinstance(getattr(tx, "init", None), _Init)


def init_shapes(tx: Any, params: Any) -> Any:
    """The state that a wrapped transformation makes, as `jax.ShapeDtypeStruct`."""
    return jax.eval_shape(tx.init.on_device, params)


def unwrap(tx: Any) -> optax.GradientTransformation:
    """The plain transformation inside a wrapped one; a plain one is returned as it is."""
    return tx.init.tx if is_wrapped(tx) else tx


@dataclasses.dataclass(frozen=True)
class _Wrapped:
    """Compares and hashes by what the transformation computes (`same_key`) and by the plan."""

    tx: Any = dataclasses.field(compare=False, repr=False)
    plan: Plan
    key: Any


class _Init(_Wrapped):
    def __call__(self, params):
        pairs = self.plan.match(params, where="jzero.zero: init")
        _check_devices([x for x, _ in pairs], self.plan)
        check_host_memory(lambda: jax.eval_shape(self.on_device, params), self.plan)
        return jax.jit(self.trace)(params)

    def trace(self, params, masters=None):
        """Init inside a trace; `masters` are better initial values than the params, where they are known."""
        if self.plan.config.tier is None:
            return self.on_device(params, masters)
        return streamed(
            lambda fixed, _: self.on_device(*fixed), (params, masters), (), self.plan, (),
            lambda _: homes_of(jax.eval_shape(self.on_device, params), self.plan),
        )  # fmt: skip

    def on_device(self, params, masters=None):
        """The same in device memory, wherever the state is to live."""
        wide = widen(params if masters is None else masters, params, self.plan)
        frozen = self.frozen(params)
        inner = pin_state(self.tx.init(wide), self.plan)
        return with_master(inner, wide, params, frozen, self.plan)

    def frozen(self, params) -> list[bool]:
        """For each param, whether the transformation never moves it: its update is a constant zero."""
        return frozen_leaves(self.tx, widen_abstract(params, self.plan))


class _Update(_Wrapped):
    @functools.cached_property
    def logical(self):
        """The shapes of the state as the wrapped transformation sees it; `init` is traced once for them."""
        return jax.eval_shape(self.tx.init, widen_abstract(self.plan.shapes, self.plan))

    def __call__(self, updates, state, params=None, **extra):
        check_context_mesh()
        if params is None:
            raise ValueError("jzero.zero: update needs the params: tx.update(grads, state, params).")
        pairs = self.plan.match(params, where="jzero.zero: update")
        _check_dtypes(pairs)
        grads = align(updates, params, where="jzero.zero: update")
        _check_grads(grads, self.plan)
        inner, master = split_master(state, params)
        step = _Step(self, jax.tree.structure(params), extra)
        offloaded = self.plan.config.tier is not None
        with jax.named_scope("jzero.master"):
            shards = [on_shard(p, x, self.plan) for p, x in pairs]
            if offloaded:  # the masters take over what is new when they are fetched
                wide: list[Any] = []
                shards, grads = read_params_first(shards, grads, self.plan)
            else:
                inner, master = step.cut(inner, master)
                wide, grads = read_params_first(step.masters(shards, master), grads, self.plan)
        grads = reduce_grads(grads, self.plan)
        if offloaded:
            news, inner, new_master = step.streamed(shards, grads, inner, master)
        else:
            news, inner, new_master = step(shards, wide, grads, inner, master)
        with jax.named_scope("jzero.gather_params"):
            copied = OneByOne(self.plan)
            rows = zip(news, master, self.plan.layouts, strict=True)
            out = [self._land(new, m is not None, x, copied) for new, m, x in rows]
        has_master, tree = isinstance(state, ZeroState), jax.tree.structure(params)
        return tree.unflatten(out), ZeroState(inner, tree.unflatten(new_master)) if has_master else inner

    def _land(self, new, has_master: bool, x: Layout, copied: OneByOne):
        """The leaf to return for what `_Step` gives."""
        if new is None:
            return None
        if self.plan.config.updates == "delta":
            return self.plan.constrain(new, x.stored)
        if not has_master:
            return land_on_sum(new, x, self.plan)
        if lands_by_layers(x):
            return landing(lambda param: land_by_layers(param, new, x, self.plan), x)
        value = copied.gather(new, x) if is_copied(x) else self.plan.constrain(new, x.stored)
        return landing(lambda _: value() if callable(value) else value, x)

    def on_params(self, value_fn, layouts, tree):
        """A line search evaluates the loss at candidate masters: hand it params as the model knows them."""

        def on_params(wide, *args, **kwargs):
            leaves = zip(jax.tree.leaves(wide), layouts, strict=True)
            params = [self.plan.constrain(w.astype(x.dtype), x.stored) for w, x in leaves]
            return value_fn(tree.unflatten(params), *args, **kwargs)

        return on_params


@dataclasses.dataclass(frozen=True)
class _Step:
    """One update on shards: the wrapped transformation between stored state and stored state."""

    update: _Update
    tree: Any
    extra: Any

    @property
    def plan(self) -> Plan:
        return self.update.plan

    def cut(self, inner, master):
        """State and masters in the shapes that the wrapped transformation knows."""
        if self.plan.config.uneven == "pad":
            inner = cut_state(inner, self.update.logical, self.plan)
        rows = zip(master, self.plan.layouts, strict=True)
        return inner, [m if m is None else cut(m, x.shape, x.state, self.plan) for m, x in rows]

    def masters(self, shards: list, master: list) -> list:
        """The masters, with what the user has changed in the params since; of params without one their shards."""
        rows = zip(shards, master, self.plan.layouts, strict=True)
        return [take_over(p, m, x, self.plan) for p, m, x in rows]

    def __call__(self, shards: list, wide: list, grads: list, inner, master: list):
        """For every param what lands on it, on its shard: the new value where it has a master, else the difference.

        Args:
          shards: params on the shards of their state; read with `updates="delta"` alone.
          wide: masters, or params without one.
          grads: reduced, or None.
          inner, master: the state, cut.

        Returns:
          That list, the new inner state and the new masters, both as they are stored.
        """
        plan, layouts = self.plan, self.plan.layouts
        with jax.named_scope("jzero.update"):
            grads = [g if g is None else g.astype(w.dtype) for g, w in zip(grads, wide, strict=True)]
            extra = {
                k: self.update.on_params(v, layouts, self.tree) if k == "value_fn" else v
                for k, v in self.extra.items()
            }
            update = optax.with_extra_args_support(self.update.tx).update
            deltas, inner = update(self.tree.unflatten(grads), inner, self.tree.unflatten(wide), **extra)
            inner = pin_state(inner, plan)
            deltas = align(deltas, self.tree.unflatten(wide), where="jzero.zero: the wrapped update")
            moved = [self._moved(*row) for row in zip(shards, wide, master, deltas, layouts, strict=True)]
        return [new for new, _ in moved], inner, [m for _, m in moved]

    def _moved(self, shard, wide, master, delta, x: Layout):
        """What lands, and the new master as it is stored."""
        plan = self.plan
        if master is None or delta is None:
            kept = master if master is None else pad(master, x.state_shape, x.state, plan)
            return delta if delta is None else plan.constrain(delta, x.state), kept
        new = plan.constrain((wide + delta).astype(wide.dtype), x.state)
        stored = pad(new, x.state_shape, x.state, plan)
        if plan.config.updates == "delta":
            return new - shard.astype(new.dtype), stored
        return plan.constrain(new.astype(x.dtype), x.state), stored

    def streamed(self, shards: list, grads: list, inner, master: list):
        """The same with state in host memory: `shards` are those of the params, without masters."""
        plan = self.plan

        def step(fixed, state):
            (shards, grads), (inner, master) = fixed, self.cut(*state)
            return self(shards, self.masters(shards, master), grads, inner, master)

        state_homes = homes_of(
            (inner, self.tree.unflatten(master)), plan
        )  # a layout is found by the path of its param
        first = len(jax.tree.leaves(shards))

        def out_homes(out):
            new = len(jax.tree.leaves(out[0]))
            count = first + len(jax.tree.leaves(grads))
            kept = [Home(h.sharding, count + i if h.sharding else None) for i, h in enumerate(state_homes)]
            return [*[DEVICE] * new, *kept]

        return streamed(
            step, (shards, grads), (inner, master), plan, state_homes, out_homes,
            gate=range(first, first + len(jax.tree.leaves(grads))),
        )  # fmt: skip


def reduce_grads(grads: list, plan: Plan) -> list:
    """Every gradient on its shard."""
    with jax.named_scope("jzero.reduce_grads"):
        return [reduce_grad(g, x, plan) for g, x in zip(grads, plan.layouts, strict=True)]


def reduce_grad(grad, x: Layout, plan: Plan):
    """The gradient on its shard.

    A stage that keeps whole gradients says so first: an all-reduce, then a slice. So do vectors (biases,
    norm scales): the layout of their gradient would spread back into what they are computed with, and batch
    statistics would come out of the step split. XLA joins the two into a reduce-scatter where it can. In a scan over
    layers it cannot: the all-reduce stays in the loop (3 Psi for a step of stage 1, where 2 are needed), so
    that a stack is reduced to its shard at every stage.
    """
    if grad is None:
        return None
    first = x.used if x.vector else x.state if x.scanned else x.grad
    return plan.constrain(plan.constrain(grad, first), x.state)


def on_shard(param, x: Layout, plan: Plan):
    """A param on the shard of its optimizer state."""
    # first as stored: the carry of a scan over steps would else take the layout of the shard
    return plan.constrain(plan.constrain(param, x.stored), x.state)


def take_over(shard, master, x: Layout, plan: Plan):
    """The master on its shard, with what the user has changed in the param since; without master, the param."""
    if master is None:
        return shard
    kept = jnp.where(master.astype(x.dtype) == shard, master, shard.astype(master.dtype))
    return plan.constrain(kept, x.state)


def read_params_first(wide: list, grads: list, plan: Plan):
    """See [Note: old params die early]: no gradient is used before every old param has been read."""
    split = [i for i, x in enumerate(plan.layouts) if x.state != x.stored]
    if not split or not plan.config.row.grads:
        return wide, grads
    wide = list(jax.lax.optimization_barrier(tuple(wide)))
    smallest = wide[min(split, key=lambda i: plan.layouts[i].size)]
    token = jnp.signbit(smallest.reshape(-1)[0]).astype(jnp.int32)
    late = [g is not None and not x.vector for g, x in zip(grads, plan.layouts, strict=True)]
    return wide, [
        jax.lax.optimization_barrier((g, token))[0] if wait else g
        for g, wait in zip(grads, late, strict=True)
    ]


def widen(values, params, plan: Plan):
    """Initial masters: `values` in the master dtype on their shards; leaves without master as they are."""
    pairs = zip(
        jax.tree.leaves(values), [x for _, x in plan.match(params, where="jzero.zero: init")], strict=True
    )
    leaves = [plan.constrain(v.astype(plan.config.master_for(x.dtype) or x.dtype), x.state) for v, x in pairs]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def widen_abstract(params, plan: Plan):
    """Shapes of the params in the dtype that the wrapped transformation sees."""
    leaves = [jax.ShapeDtypeStruct(x.shape, plan.config.master_for(x.dtype) or x.dtype) for x in plan.layouts]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def frozen_leaves(tx, params) -> list[bool]:
    """For each param, whether `tx.update` answers a constant zero whatever the gradient; read from its jaxpr."""

    def deltas(grads, state, params):
        return jax.tree.leaves(tx.update(grads, state, params)[0])

    # any state, not the initial one: a delayed or accumulated update starts at zero and is not frozen
    try:
        zeros = constant_zero_outputs(deltas, params, jax.eval_shape(tx.init, params), params)
    except Exception:  # an update that wants more (value=, value_fn=, its own params) freezes nothing
        return [False] * len(jax.tree.leaves(params))
    return zeros if len(zeros) == len(jax.tree.leaves(params)) else [False] * len(jax.tree.leaves(params))


def with_master(inner, wide, params, frozen, plan: Plan):
    """`ZeroState(inner, master)` where any param needs a master, else `inner`."""
    rows = zip(jax.tree.leaves(wide), plan.layouts, frozen, strict=True)
    masters = [
        pad(w, x.state_shape, x.state, plan) if plan.config.master_for(x.dtype) and not f else None
        for w, x, f in rows
    ]
    if all(m is None for m in masters):
        return inner
    return ZeroState(inner, jax.tree.structure(params).unflatten(masters))


def split_master(state, params):
    """The inner state, and one master or None per param."""
    if isinstance(state, ZeroState):
        return state.inner, align(state.master, params, where="jzero.zero: the master")
    return state, [None] * len(jax.tree.leaves(params))


def pin_state(state, plan: Plan):
    """Every leaf of an optimizer state in its stored shape and layout, scalars included."""
    leaves, tree = jax.tree.flatten(state)
    rows = zip(leaves, plan.state_forms(state), strict=True)
    return jax.tree.unflatten(tree, [pad(x, shape, spec, plan) for x, (spec, shape) in rows])


def cut_state(state, logical, plan: Plan):
    """The reverse of `pin_state`: every leaf in the shape that the wrapped transformation knows, on its shards."""
    leaves, tree = jax.tree.flatten(state)
    shapes = [tuple(x.shape) for x in jax.tree.leaves(logical)]
    rows = zip(leaves, shapes, plan.state_specs(state), strict=True)
    return jax.tree.unflatten(tree, [cut(x, shape, spec, plan) for x, shape, spec in rows])


def pad(x, shape, spec, plan: Plan):
    """An array in its stored shape and layout: zeros at the end of a dim that nothing divides."""
    if tuple(np.shape(x)) != tuple(shape):
        x = plan.constrain(x, spec)
        x = jnp.pad(x, [(0, new - old) for old, new in zip(np.shape(x), shape, strict=True)])
    return plan.constrain(x, spec)


def cut(x, shape, spec, plan: Plan):
    """The reverse of `pad`; inside of a trace on its shards, whose pieces may be unequal."""
    if tuple(np.shape(x)) == tuple(shape):
        return x
    return plan.constrain(jax.lax.slice(on_device(x), [0] * len(shape), shape), spec)


def align(updates, params, *, where: str) -> list:
    """The leaves of `updates` in the order of `params`; None where a leaf is missing.

    Raises:
      ValueError: the updates are no tree like the params.
    """
    tree = jax.tree.structure(params)
    try:
        return tree.flatten_up_to(updates)
    except ValueError as error:
        raise ValueError(f"{where}: the updates are not a tree like the params: {error}") from None


def _check_dtypes(pairs) -> None:
    """Raises TypeError for params that were replaced by values of another dtype."""
    bad = [(x.name, typed_shape(x), typed_shape(p)) for p, x in pairs if p.dtype != x.dtype]
    if bad:
        raise TypeError(
            f"jzero.zero: update: {len(bad)} params have another dtype than in the plan:\n"
            f"{listing([('param', 'plan', 'given'), *bad])}\nCast what replaces a param to its dtype, or make a plan "
            "for the new dtypes: jzero.shard(state, ...) again."
        )


def _check_grads(grads, plan: Plan) -> None:
    """Raises ValueError for gradients of other shapes than the params: per-example ones, say."""
    rows = zip(grads, plan.layouts, strict=True)
    bad = [
        (x.name, typed_shape(x), typed_shape(g))
        for g, x in rows
        if g is not None and tuple(g.shape) != x.shape
    ]
    if bad:
        raise ValueError(
            f"jzero.zero: update: {len(bad)} gradients have another shape than their param:\n"
            f"{listing([('param', 'its type', 'gradient'), *bad])}\nPer-example gradients (differential privacy) "
            "cannot be reduced before they are clipped: aggregate them first, and wrap the rest of the chain."
        )


def _check_devices(leaves, plan: Plan) -> None:
    mesh = set(plan.mesh.devices.flat)
    bad = [
        (x.name, typed_shape(a), ", ".join(sorted(map(str, a.sharding.device_set))[:3]))
        for a, x in zip(leaves, plan.layouts, strict=True)
        if isinstance(a, jax.Array) and not is_tracer(a) and a.committed and a.sharding.device_set != mesh
    ]
    if bad:
        raise ValueError(
            f"jzero.zero: init: {len(bad)} params are committed to other devices than the plan's mesh of "
            f"{len(mesh)}:\n{listing(bad)}\nPlace them first: params = plan.place(params)."
        )


__all__ = ["ZeroState", "unwrap", "zero"]
