"""Fault of the update: the new state, or the gradients, do not come back, or the params come back unchanged."""

from __future__ import annotations

import collections
import math

from jzero.core.errors import counted
from jzero.layout.specs import shard_factor
from jzero.layout.state_layouts import Keys, named_by
from jzero.proof.evidence import THROUGH, Evidence
from jzero.proof.faults.wording import Faults, names_text
from jzero.proof.hlo import Module
from jzero.proof.leaves import prefix

COPIES = THROUGH | {"copy-start", "copy-done"}


def state_not_returned(e: Evidence) -> Faults:
    """Params or optimizer state that a training step takes and does not give back, or gives back unchanged."""
    yield from (list(_not_returned(e)) if e.trains else []) or _unchanged(e)


def _not_returned(e: Evidence) -> Faults:
    if e.plan.config.updates_outside:
        yield from _gradients_not_returned(e)
        return
    if e.makes_state:  # `blind.py` says it
        return
    mine = [x for x in e.leaves if x.is_param or x.in_opt_state or x.layout is not None]
    mine = [x for x in mine if x.layout is None or x.layout.frozen is None or x.returned is not None]
    here = {x.argument for x in mine if x.is_param}
    mine = [x for x in mine if x.is_param or x.in_opt_state or x.argument not in here]
    lost = [x for x in mine if x.returned is None]
    whole = len(lost) == len(mine)
    if whole or any(x.is_param for x in lost) or (lost and all(x.in_opt_state for x in lost)):
        what = (
            "nothing of the state comes back"
            if whole
            else f"{len(lost)} of {len(mine)} leaves do not come back"
        )
        yield (
            f"{what}, so the step trains nothing of it: {names_text(sorted(lost, key=lambda x: not x.is_param))}",
            sum(x.held or x.size * x.dtype.itemsize for x in lost),
            "return the new state: state.apply_gradients(grads=grads), or params and opt_state. jzero.jit, nnx.jit "
            "and pod.compile of a plain function change NNX objects in place; jax.jit changes copies.",
        )


def _unchanged(e: Evidence) -> Faults:
    """A step that is to train, and gives every param back as it came.

    One that returns gradients leaves the update to another function. XLA drops a backward pass that nothing reads: what
    the program takes says that it is to train.
    """
    known = e.record is not None and e.record.differentiates
    guessed = e.uses is None and not known and not e.module.has_backward
    trains = e.takes_optimizer and (e.trains if guessed else e.module.has_backward or e.under_grad or known)
    if not trains or unknown_beside_others(e) or e.plan.config.updates_outside:
        return
    passed_on = _passed_on(e.module)
    leaves = [x for x in e.leaves if x.is_param and x.returned is not None]
    if not leaves or any(x.number not in passed_on for x in leaves):
        return
    others = collections.Counter(x.size for x in e.module.results)
    others.subtract(x.returned // x.dtype.itemsize for x in e.state if x.returned and not x.is_key)
    sizes = {x.size // shard_factor(s, e.plan.mesh) for x in e.split for s in (x.grad, x.used)}
    if any(others[n] > 0 for n in sizes):
        return
    found = {x.layout for x in leaves}
    rest = [x for x in e.plan.trained.layouts if x not in found]
    aside = " (vectors were not compared)" if rest and all(x.vector for x in rest) else ""
    yield (
        f"the step never updates: {counted(len(leaves), 'param comes', 'params come')} back "
        f"as {'it' if len(leaves) == 1 else 'they'} went in{aside}. {names_text(leaves)}"
        + (" It has no backward pass; if it only evaluates, pass uses=jzero.param_uses(step, ...)." if guessed else ""),
        sum(x.held for x in leaves),
        "linen: return state.apply_gradients(grads=grads); NNX: optimizer.update(model, grads); optax: params = "
        "optax.apply_updates(params, updates), with updates from tx.update(grads, opt_state, params).",
    )


def unknown_beside_others(e: Evidence) -> bool:
    """True beside another model where the backward pass may be the other's alone, or the plan fits the other as well.

    A step that takes the plan's optimizer state and gives it back is to train its params too.
    """
    if not e.others:
        return False
    alike = collections.Counter[Keys]()  # by tree: of two equal models no path says which is the plan's
    for x in e.leaves:
        layout = next(named_by(x.keys[2:], e.plan.by_keys), None) if x.is_others_param else None
        if layout is not None and layout.shape == x.shape:
            alike[prefix(x.keys, layout)] += 1
    carried = any(x.in_opt_state and x.returned is not None for x in e.leaves)
    return not carried or len(e.plan.layouts) in alike.values()


def _gradients_not_returned(e: Evidence) -> Faults:
    """The same for an update outside of the program, which takes the gradients that this one returns."""
    given = collections.Counter(math.prod(x.dims) for x in e.module.results)
    lost = []
    layouts = e.plan.trained.layouts
    for x in sorted(layouts, key=lambda x: -x.nbytes):
        parts = (shard_factor(x.grad, e.plan.mesh), shard_factor(x.used, e.plan.mesh))
        size = next((x.size // n for n in parts if given[x.size // n]), None)
        if size is None:
            lost.append(x)
        else:
            given[size] -= 1
    if lost:
        yield (
            f"the update runs outside of this program, and {len(lost)} of {len(layouts)} gradients do not come "
            f"back from it: {names_text(lost)}",
            sum(x.nbytes for x in lost),
            "return the gradients of all params, and call apply_gradients (NNX: optimizer.update) on them outside of "
            "jit.",
        )


def _passed_on(module: Module) -> set[int]:
    """The numbers of the parameters that a program returns as they are."""
    entry = module.computations[module.entry]
    sources = (module.origin(entry, i, through=COPIES) for i in entry.outputs)
    return {i.number for i in sources if i.opcode == "parameter"}
