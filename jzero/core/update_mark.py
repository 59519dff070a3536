"""A mark in the trace of a step: which values are the params and the optimizer state of an update, and by which plan.

The compiled program does not say it: an average has the names and shapes of the params, an NNX state has no names. The
mark is an equation of the jaxpr that returns its operands as they are; nothing of it is lowered. `proof.record` reads
it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jzero.core.jaxprs import is_tracer

UPDATE = "jzero_update"
_update_p = Primitive(UPDATE)
_update_p.multiple_results = True


@dataclasses.dataclass(frozen=True, repr=False)
class Marked:
    """What a mark says: the plan, the optimizer as the user wrote it, and the path of each leaf of the state."""

    plan: Any
    tx: Any
    paths: tuple[Any, ...]

    def __repr__(self):
        return f"<{self.plan.title}>"


def marked(params: Sequence[Any], state: Any, plan: Any, tx: Any) -> tuple[list[Any], Any]:
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


def _same(*values, **_):
    return list(values)


def _jvp(primals, tangents, **params):
    return _update_p.bind(*primals, **params), list(tangents)


def _batch(values, dims, **params):
    return _update_p.bind(*values, **params), list(dims)


_update_p.def_impl(_same)
_update_p.def_abstract_eval(_same)
ad.primitive_jvps[_update_p] = _jvp
batching.primitive_batchers[_update_p] = _batch
mlir.register_lowering(_update_p, mlir.lower_fun(_same, multiple_results=True))
