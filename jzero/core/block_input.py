"""What a remat region keeps of its input: two primitives with different forward and backward programs.

[Note: the boundary of a block]
`jax.checkpoint` keeps the inputs of a region unchanged. To keep one split, or in host memory, and to have it back only
for the second run, the region begins with `x, _, token = begin(x)` and ends with `y = end(y, token)`. Without
differentiation both are the identity. JAX divides the region into what runs forward and what runs again backward (the
rules for `partial_eval_jaxpr_custom`):

- forward, `begin` returns `x` unchanged and makes the copy that is kept: constrained to its slice, sent to the host.
  `end` ties the result of the block to that copy, so that it is written while the block runs. (XLA writes as late as
  it can: in straight-line code that was just before the copy was read again.) A scan writes it in each round anyway,
  and XLA cannot place a stack on the host that a barrier reads as well, so there nothing is tied.
- backward, `begin` is the copy, fetched and gathered. Nothing reads `x` itself there, so it is not kept.

The token is a second result for the copy, since JAX rounds what a region both keeps and reads (`reduce_precision`), and
XLA would warn of a computation on a copy in host memory.

A sharding constraint on a `checkpoint_name` would keep an input split without primitives, but it would be gathered in
the forward pass too, and its cotangent would be split and gathered again.

The rules ask the policy of the region: an outer region with another policy computes the inner one's input again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Var
from jax.interpreters import ad
from jax.interpreters import partial_eval as pe
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.core.custom_primitive import custom_primitive
from jzero.core.jaxprs import in_differentiated_loop, is_literal
from jzero.core.types import JaxprEqn

BEGIN, END = "jzero_block_input", "jzero_block_output"


@dataclasses.dataclass(frozen=True)
class InputStorage:
    """How an input is kept.

    Attributes:
      mesh, axes, dim: split over these axes of the mesh along this dim; no axes: it keeps its layout.
      host: in pinned host memory.
      refused: why it cannot be kept this way.
      loop_limit: why it cannot be kept this way in a loop.
    """

    mesh: Mesh | None
    axes: str | tuple[str, ...] | None
    dim: int
    host: bool
    refused: str = ""
    loop_limit: str = ""

    def store(self, x: jax.Array) -> list[jax.Array]:
        """The input for the block, and the copy that is kept."""
        if self.refused:
            raise (NotImplementedError if self.refused == self.loop_limit else ValueError)(self.refused)
        kept = x
        if self.axes is not None:
            x = self.constrain(x, None)  # the layout of the copy must not spread to it
            kept = self.constrain(x, self.axes)
        return [x, jax.device_put(kept, jax.memory.Space.Host) if self.host else kept]

    def load(self, kept: jax.Array) -> list[jax.Array]:
        """The input again, from the copy."""
        x = jax.device_put(kept, jax.memory.Space.Device) if self.host else kept
        if self.axes is not None:
            x = self.constrain(self.constrain(x, self.axes), None)  # fetched as it was kept, then gathered
        return [x]

    def constrain(self, x: jax.Array, axes: str | tuple[str, ...] | None) -> jax.Array:
        """The array with its dim split over the axes, or whole; the layout of the other dims is left open."""
        assert self.mesh is not None
        entries: list[Any] = [P.UNCONSTRAINED] * x.ndim
        entries[self.dim] = axes
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*entries)))

    def batched(self) -> InputStorage:
        """The same under `vmap`, with the new dim first."""
        return dataclasses.replace(self, dim=self.dim + 1)


@dataclasses.dataclass(frozen=True)
class KeepsInputs:
    """A checkpoint policy: what `begin` keeps, and what another policy keeps."""

    policy: Callable[..., Any] | None = None

    def __call__(self, prim, *args, **params):
        """Called like those of `jax.checkpoint_policies`."""
        if prim.name == BEGIN:
            return True
        return False if self.policy is None else self.policy(prim, *args, **params)


def begin(x: jax.Array, kept: InputStorage) -> list[jax.Array]:
    """The first thing in a region: its input, the copy that is kept, and a token for `end`."""
    if kept.loop_limit and not kept.refused and in_differentiated_loop():
        kept = dataclasses.replace(kept, refused=kept.loop_limit)
    return _begin_p.bind(x, kept=kept)


def begin_again(eqn: JaxprEqn, x: jax.Array) -> list[jax.Array]:
    """`begin` for another input: a block under `jit` was traced once for all its places, loops among them."""
    return begin(x, eqn.params["kept"])


def end(y: jax.Array, tokens: Sequence[jax.Array]) -> jax.Array:
    """The last thing in a region: one of its results."""
    return _end_p.bind(y, *tokens, tied=False)


def _begin_jvp(primals, tangents, *, kept):
    outs = _begin_p.bind(*primals, kept=kept)
    return outs, [tangents[0], *(ad.Zero(jax.typeof(o).to_tangent_aval()) for o in outs[1:])]


def _begin_batch(args, dims, *, kept):
    x = args[0] if dims[0] == 0 else jax.numpy.moveaxis(args[0], dims[0], 0)
    return _begin_p.bind(x, kept=kept.batched()), [0, 0, 0]


def _begin_avals(x, *, kept):
    copy = x.update(memory_space=jax.memory.Space.Host) if kept.host else x
    return [x, copy, copy]


def _end(y, *tokens, tied):
    return jax.lax.optimization_barrier((y, *tokens))[0] if tied else y


def _end_jvp(primals, tangents, *, tied):
    return _end_p.bind(*primals, tied=tied), tangents[0]


def _end_batch(args, dims, *, tied):
    return _end_p.bind(*args, tied=tied), dims[0]


def _begin_rule(saveable, unknown, instantiated, eqn):
    (x,), kept = eqn.invars, eqn.params["kept"]
    missing = [x] if not is_literal(x) and not instantiated[0] else []
    if unknown[0]:
        return None, eqn, [True] * 3, [True] * 3, missing
    # `is`: some policies answer with objects, all of which are true
    if saveable(_begin_p, x.aval, **eqn.params) is not True:
        return eqn, eqn, [False] * 3, [True] * 3, missing
    copy = eqn.outvars[1] if type(eqn.outvars[1]) is Var else Var(eqn.outvars[1].aval)
    store, load = _programs(x.aval, copy.aval, kept)
    known = store.replace(
        invars=[x], outvars=[eqn.outvars[0], copy, eqn.outvars[2]], source_info=eqn.source_info
    )
    staged = load.replace(invars=[copy], outvars=[eqn.outvars[0]], source_info=eqn.source_info)
    return known, staged, [False] * 3, [True, False, False], [copy]


def _end_rule(saveable, unknown, instantiated, eqn):
    missing = [v for v, i in zip(eqn.invars, instantiated, strict=True) if not i and not is_literal(v)]
    if any(unknown):
        return None, eqn, [True], [True], missing
    if not missing:  # nothing was kept: `begin` was in a region with another policy
        return eqn, eqn, [False], [True], []
    return eqn.replace(params={"tied": True}), None, [False], [False], []


@functools.lru_cache(maxsize=256)
def _programs(aval, copy, kept: InputStorage):
    """The equations of `store` and of `load`; one for all blocks of a kind."""

    def jzero_store(x):
        x, copy = kept.store(x)
        return [x, copy, copy]

    def jzero_load(x):
        return kept.load(x)

    return _equation(jzero_store, aval), _equation(jzero_load, copy)


def _equation(fn: Callable, *avals):
    """A function as one equation, a call of it."""
    return jax.make_jaxpr(jax.jit(fn))(*avals).eqns[0]


_begin_p = custom_primitive(
    BEGIN, lambda x, *, kept: [x, x, x], out_avals=_begin_avals, jvp=_begin_jvp, batch=_begin_batch
)
_end_p = custom_primitive(
    END, _end, out_avals=lambda y, *tokens, tied: y, jvp=_end_jvp, batch=_end_batch, several=False
)
pe.partial_eval_jaxpr_custom_rules[_begin_p] = _begin_rule
pe.partial_eval_jaxpr_custom_rules[_end_p] = _end_rule
