"""Marks in the trace of a step: which values are the params and the optimizer state of an update, and of which plan.

Frozen weights are marked where a model reads them, since an update need not get them. The compiled program does not say
any of this: an average has the names and shapes of the params, and an NNX state has no names. A mark is an equation of
the jaxpr that returns its operands unchanged and compiles to nothing. `proof.record` reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.extend.core import Primitive

from jzero.core.custom_primitive import custom_primitive
from jzero.core.jaxprs import is_tracer
from jzero.core.types import PyTree

UPDATE = "jzero_update"
FROZEN = "jzero_frozen"


@dataclasses.dataclass(frozen=True, repr=False)
class Marked:
    """What a mark says: the plan, the optimizer as the user wrote it, and the path of each leaf of the state."""

    plan: Any
    tx: optax.GradientTransformation
    paths: tuple[Any, ...]

    def __repr__(self):
        return f"<{self.plan.title}>"


def marked(
    params: Sequence[jax.Array], state: PyTree, plan: Any, tx: optax.GradientTransformation
) -> tuple[list[jax.Array], PyTree]:
    """The same params and the same state, marked as those of an update by `plan`; untouched outside of a trace.

    Args:
      params: leaves, in the order of the plan.
      state: the optimizer state as it is stored.
      plan, tx: what the update is by, hashable.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(state)
    leaves = [x for _, x in paths]
    if not any(map(is_tracer, (*params, *leaves))):
        return list(params), state
    outs = _update_p.bind(*params, *leaves, of=Marked(plan, tx, tuple(path for path, _ in paths)))
    return outs[: len(params)], tree.unflatten(outs[len(params) :])


def marked_frozen(weights: Sequence[jax.Array], at: Sequence[int], plan: Any) -> list[jax.Array]:
    """The same weights, marked as frozen; `at`: their numbers in the plan. Untouched outside of a trace."""
    if not any(map(is_tracer, weights)):
        return list(weights)
    return _frozen_p.bind(*weights, plan=_Hidden(plan), at=tuple(at))


@dataclasses.dataclass(frozen=True, repr=False)
class _Hidden:
    """A plan in an equation, without its text."""

    plan: Any

    def __repr__(self):
        return f"<{self.plan.title}>"


def _identity(name: str) -> Primitive:
    """A primitive that returns its operands."""

    def both(values, others, **params):
        return p.bind(*values, **params), list(others)

    p = custom_primitive(name, lambda *values, **_: list(values), jvp=both, batch=both)
    return p


_update_p, _frozen_p = _identity(UPDATE), _identity(FROZEN)
