"""One update on shards: gradients reduced, masters taken over, state streamed, and what every param becomes.

[Note: the master follows the param]
A param that is not `cast(master)` was replaced by the user (a loaded checkpoint, pruning). The master takes
it over, element by element, at the next update. The comparison reads only the shard. (A remainder has no master to
compare with, nor has a difference: see [Note: no master to compare with] in `pairs.py`.)

[Note: old params die early]
A donated param's buffer can hold its own gradient once nothing reads the old param any more. The update
reads it (its shard is compared with the master, or is what the difference is added to), and XLA schedules
that read as late as it can, so that the buffer stays taken through the whole backward pass. Barriers make
every gradient wait for one number that exists only after all those reads. The number is all-reduced, and XLA
starts it early to hide that; numbers that stay on their shards change nothing (tried). The masters are compared in
place, so nothing else is alive for longer (with pairs, the shards of the old params are). Temp of a stage-2
step of the tests' GPT (4 layers, 64 H200): 106.6 MB without, 5.2 MB with; on jaxlib 0.12 106.6 and 2.0, beside 33.5
of cuBLAS. Vectors do not wait: they are small, and what their gradients are computed from would wait with them.

[Note: read twice]
In a `lax.scan` of steps, Shardy makes the forward pass read the shard instead of the param: a step of stage 2 sends
3.5 Psi. It replaces uses of a value with the end of a chain of constraints on it (stored, then split) if no constraint
of the chain has another reader. So the stored param gets another reader, the barrier of the note above. A barrier
between the two constraints works too, but the slices then have buffers of their own: 0.2 GB for a 7.5B GPT on 64 H100
at stage 2, 0.4 GB for a 2.6B one at stage 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jzero.comm import comm_of
from jzero.core.ordering import after, tied
from jzero.core.types import PyTree
from jzero.layout.leaf_rule import Layout
from jzero.layout.placement import HOST, memory_kind
from jzero.offload import placements_of, streamed, where_they_lie
from jzero.sharding import Plan
from jzero.stream.placement import Placement
from jzero.update.int8_moments import Int8Moments
from jzero.update.masters import seen_dtype
from jzero.update.owners import on_owners
from jzero.update.padded_state import align, check_dtypes, cut, cut_state, pad, pin_state
from jzero.update.pairs import Pair, pair_of, sent_in_codes


@dataclasses.dataclass(frozen=True)
class ShardedUpdate:
    """One update on shards: the wrapped transformation between stored state and stored state.

    Attributes:
      tx: the wrapped transformation.
      plan: the layouts.
      logical: gives the state as `tx` knows it, abstract.
      tree: of the params.
      extra: keyword arguments of the update.
      moments: 8-bit moments of `tx`; its state is then `Quantized`.
    """

    tx: optax.GradientTransformation
    plan: Plan
    logical: Callable[[], Any]
    tree: PyTree
    extra: PyTree
    moments: Int8Moments | None = None

    def cut(self, inner, master):
        """State and masters in the shapes that the wrapped transformation knows."""
        if self.plan.config.uneven == "pad":
            inner = cut_state(inner, self.logical(), self.plan)
        rows = zip(master, self.plan.layouts, strict=True)
        return inner, [m if m is None else cut(m, x.shape, x.state, self.plan) for m, x in rows]

    def masters(self, shards: list, master: list) -> list:
        """The masters, with what the user has changed in the params since; for params without one, their shards."""
        return self.joined(self.taken_over(shards, master), master)

    def taken_over(self, shards: list, master: list) -> list:
        """The same, but the param itself where it is one of a pair."""
        rows = zip(shards, master, self.plan.layouts, strict=True)
        return [p if self.pair(m, x) else take_over(p, m, x, self.plan) for p, m, x in rows]

    def joined(self, taken: list, master: list) -> list:
        """The masters of what `taken_over` returned."""
        found = []
        for p, m, x in zip(taken, master, self.plan.layouts, strict=True):
            pair = self.pair(m, x)
            found.append(p if pair is None else self.plan.constrain(pair.join(p, m), x.state))
        return found

    def pair(self, master, x: Layout) -> Pair | None:
        """How the master of a param is stored beside it, if not as it is."""
        return None if master is None else pair_of(self.plan.config, x.dtype)

    def __call__(self, shards: list, wide: list, grads: list, inner, master: list):
        """For every param, on its shard: the new value, or the difference without a master or with updates="delta".

        Args:
          shards: params on the shards of their state; read only where differences to them are made.
          wide: masters; for a param without one, the param.
          grads: reduced, or None.
          inner, master: the state, cut.

        Returns:
          The values and differences, those that travel in codes in fp32; the new inner state and the new masters, both
          as they are stored.
        """
        plan, layouts = self.plan, self.plan.layouts
        with jax.named_scope("jzero.update"):
            dtypes = [seen_dtype(x, plan) for x in layouts]
            wide = [w.astype(d) for w, d in zip(wide, dtypes, strict=True)]
            grads = [g if g is None else g.astype(d) for g, d in zip(grads, dtypes, strict=True)]
            update = on_owners(optax.with_extra_args_support(self.tx).update, plan)
            trees = self.tree.unflatten(grads), inner, self.tree.unflatten(wide)
            if self.moments is None:
                deltas, inner = update(*trees, **self.extra)
            else:
                deltas, inner = self.moments.update(update, *trees, self.extra)
            inner = pin_state(inner, plan)
            deltas = align(deltas, self.tree.unflatten(wide), where="jzero.zero: the wrapped update")
            moved = [self._moved(*row) for row in zip(shards, wide, master, deltas, layouts, strict=True)]
        return [new for new, _ in moved], inner, [m for _, m in moved]

    def _moved(self, shard, wide, master, delta, x: Layout):
        """What lands, and the new master as it is stored."""
        plan = self.plan
        if master is None or delta is None:
            kept = master if master is None else pad(master, x.state_shape, x.state, plan)
            # one number for all values is a delta too
            return delta if delta is None else plan.constrain(jnp.broadcast_to(delta, wide.shape), x.state), kept
        new = plan.constrain((wide + delta).astype(wide.dtype), x.state)
        if pair := self.pair(master, x):
            way = comm_of(plan).updates.codes(x)
            value, rest = sent_in_codes(new, shard, way) if way else pair.split(new, x.dtype)
            return plan.constrain(value, x.state), pad(rest, x.state_shape, x.state, plan)
        stored = pad(new, x.state_shape, x.state, plan)
        if plan.config.updates == "delta":
            return new - shard.astype(new.dtype), stored
        return plan.constrain(new.astype(x.dtype), x.state), stored

    def streamed(self, shards: list, grads: list, inner, master: list, run: Callable[..., Any] = streamed):
        """The same with state in host memory: `shards` are those of the params, without masters.

        A param in host memory gets its new value, master or not, in its stored layout and in its place. `run` runs the
        step: `offload.scheduled` takes abstract arrays instead, and says what is moved.
        """
        plan, layouts = self.plan, self.plan.layouts
        hosted = [memory_kind(p) == HOST for p in shards]

        def step(params, grads, *state):
            inner, master = self.cut(*state)
            rows = zip(params, layouts, hosted, strict=True)
            shards = [plan.constrain(p, x.state) if h else p for p, x, h in rows]
            news, *kept = self(shards, self.masters(shards, master), grads, inner, master)
            check_dtypes(inner, kept[0], (h.sharding is not None for h in state_lies))
            rows = zip(news, shards, master, layouts, hosted, strict=True)
            return [self._landed(n, p, m, x) if h else n for n, p, m, x, h in rows], *kept

        params_lie = where_they_lie(shards, [x.stored for x in layouts], plan)
        grads_lie = where_they_lie(grads, [x.state for x in layouts], plan)
        # a layout is found by the path of its param
        state_lies = placements_of((inner, self.tree.unflatten(master)), plan)
        first, count = len(params_lie), len(params_lie) + len(grads_lie)

        def out_placements(out):
            moved = [i for i, new in enumerate(out[0]) if new is not None]
            landed = [Placement(params_lie[i].sharding, i if hosted[i] else None) for i in moved]
            kept = [Placement(h.sharding, count + i if h.sharding else None) for i, h in enumerate(state_lies)]
            return [*landed, *kept]

        return run(
            step, (shards, grads, inner, master), plan, [*params_lie, *grads_lie, *state_lies], out_placements,
            gate=range(first, count),
        )  # fmt: skip

    def _landed(self, new, shard, master, x: Layout):
        """The new value of a param in its stored layout, from what `__call__` says of it."""
        if new is None:
            return None
        new = new if master is not None else (shard + new).astype(x.dtype)
        return self.plan.constrain(self.plan.constrain(new, x.state), x.stored)


def on_shards(params: list, plan: Plan) -> tuple[list, list]:
    """Params on the shards of their optimizer state; and those that are stored in another layout, in that layout.

    Params in host memory stay as they are. Every other one is constrained to its stored layout first, or else the carry
    of a scan over steps would take the layout of the shard: see [Note: read twice].
    """
    hosted = [memory_kind(p) == HOST for p in params]
    rows = list(zip(params, plan.layouts, hosted, strict=True))
    stored = [p if h else plan.constrain(p, x.stored) for p, x, h in rows]
    rows = list(zip(stored, plan.layouts, hosted, strict=True))
    shards = [p if h else plan.constrain(p, x.state) for p, x, h in rows]
    return shards, [p for p, x, h in rows if x.stored != x.state and not h]


def take_over(shard, master, x: Layout, plan: Plan):
    """The master on its shard, with what the user has changed in the param since; without master, the param."""
    if master is None:
        return shard
    return plan.constrain(taken_over(shard, master), x.state)


def taken_over(param, master):
    """The master with what is new in its param: see [Note: the master follows the param]."""
    return jnp.where(master.astype(param.dtype) == param, master, param.astype(master.dtype))


def read_params_first(wide: list, stored: list, grads: list, plan: Plan):
    """See [Note: old params die early]: no gradient is used before every old param has been read."""
    if not stored:
        return wide, grads
    split = [i for i, x in enumerate(plan.layouts) if x.state != x.stored and x.size and memory_kind(wide[i]) != HOST]
    wide, _ = after(wide, stored)
    if not plan.config.row.grads or not split:
        return wide, grads
    smallest = min(split, key=lambda i: plan.layouts[i].size)
    first = jax.lax.slice(wide[smallest], (0,) * wide[smallest].ndim, (1,) * wide[smallest].ndim)
    token = jnp.signbit(jnp.real(first)).astype(jnp.int32).reshape(())
    waits = [g is not None and not x.vector for g, x in zip(grads, plan.layouts, strict=True)]
    rows = [tied(g, token) if wait else (g, token) for g, wait in zip(grads, waits, strict=True)]
    # jaxlib 0.12 drops a barrier's operand whose result nobody reads: all tokens are read, by a sum that is never
    # negative, which XLA cannot know
    negative = sum(t for (_, t), wait in zip(rows, waits, strict=True) if wait) < 0
    wide[smallest] = jnp.where(negative, jnp.zeros_like(wide[smallest]), wide[smallest])
    return wide, [g for g, _ in rows]
