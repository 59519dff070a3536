"""Fault of memory between steps: more of the train state is held than the closed form says.

[Note: what is compared]
Arguments of the program with what `estimate` adds up from the plan: params as stored, optimizer state as the `tx` of
the state makes it, in its dtypes and its memory. Other copies of params (an average) are not in the estimate: they
are compared with the layout of the moments. What `state_whole` names already is left out, and so is a step that takes
its optimizer state without a `tx` beside it, and one with two models.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import jax
import optax

from jzero.core.errors import human_bytes, typed_shape
from jzero.layout.leaf_rule import Layout
from jzero.proof.evidence import Argument, Evidence
from jzero.proof.faults.state import whole_rows
from jzero.proof.faults.wording import COPIES, MOST_NAMES, NAMED, Faults, are_copies, more_text
from jzero.proof.memory import planned_state
from jzero.sharding import HOST, Plan

SHARE_MORE = 0.05


def more_memory_than_closed_form(e: Evidence) -> Faults:
    """5 % more of the train state than the closed form, in leaves that no other rule names."""
    if e.others:
        return
    rows = [(x, planned, _bytes(planned)) for x, planned in itertools.chain(_known(e), _nameless(e))]
    said = {x.name for x, *_ in whole_rows(e)}
    found = [(x, planned, _excess(x, planned)) for x, planned, _ in rows if x.held and x.name not in said]
    found = sorted((row for row in found if row[-1] > 0), key=lambda row: -row[-1])
    closed, more = sum(size for *_, size in rows), sum(size for *_, size in found)
    if more <= SHARE_MORE * closed:
        return
    listed = ", ".join(_text(*row) for row in found[:MOST_NAMES])
    leaves = [x for x, *_ in found]
    nameless = not all(x.is_param or x.in_opt_state or x.layout for x in leaves)
    yield (
        f"of the train state one device is to hold {human_bytes(closed)}, by the plan's closed form, and holds "
        f"{human_bytes(more)} more: {listed}{more_text(found)}.",
        more,
        "state = jzero.shard(state, plan.config, mesh=mesh) before the step, after a restore too, and no in_shardings "
        "but those of its arrays."
        + (f" {NAMED}" if nameless else "")
        + (f" {COPIES}" if are_copies(e, leaves) else ""),
    )


def _known(e: Evidence) -> Iterator[tuple[Argument, jax.ShapeDtypeStruct]]:
    """Params, optimizer state and named copies of params, each as one device should hold it."""
    params = dict(zip((x.name for x in e.plan.layouts), jax.tree.leaves(e.plan.shapes), strict=True))
    state = planned_leaves(e)[0]
    for x in e.leaves:
        place = x.place if x.in_opt_state else None
        if x.is_key:
            continue
        if x.is_param and x.layout is not None:
            yield x, params[x.layout.name]
        elif place in state:
            yield x, state[place]
        elif x.layout is not None and not x.layout.padded:
            yield x, params[x.layout.name] if x in e.frozen else _as_moment(e, x, x.layout)


def _nameless(e: Evidence) -> Iterator[tuple[Argument, jax.ShapeDtypeStruct]]:
    """What the state carries in the shapes of params under other names, such as a list of averages."""
    by_shape = {x.shape: x for x in e.plan.layouts if not (x.vector or x.padded)}
    here = {x.argument for x in e.leaves if x.is_param}
    if any(x.in_opt_state for x in e.leaves):  # an NNX model carries statistics and frozen weights beside its params
        here &= {x.argument for x in e.leaves if x.in_opt_state}
    for x in e.state:
        known = x.layout is not None or x.in_opt_state or x.argument not in here
        if not known and x.shape in by_shape:
            yield x, _as_moment(e, x, by_shape[x.shape])


def _as_moment(e: Evidence, x: Argument, layout: Layout) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(layout.state_shape, x.dtype, sharding=e.plan.sharding(layout.state))


def planned_leaves(e: Evidence) -> tuple[dict[str, jax.ShapeDtypeStruct], str]:
    """The leaves of the planned optimizer state by path; or none, and why its `tx` could not say them."""
    why = ""
    for tx in _optimizers(e):
        try:
            return _by_path(e.plan, tx), ""
        except Exception as error:  # of the user's transformation: an `init` that wants more than params
            why = f"{type(error).__name__}: {error}"
    return {}, why


def has_unknown_dtypes(e: Evidence) -> bool:
    """True for a step that carries optimizer state, and has no `tx` that says in which dtypes."""
    carried = any(x.in_opt_state or (x.layout is not None and not x.is_param) for x in e.state)
    return carried and e.trains and not (e.others or e.plan.config.updates_outside or _optimizers(e))


def _optimizers(e: Evidence) -> list[optax.GradientTransformation]:
    """That of the traced update; else those of the states among the arguments."""
    mine = e.record.of(e.plan) if e.record is not None else []
    return [mine[0].tx] if mine else [x.tx for x in e.train_states if hasattr(x, "params")]


def _by_path(plan: Plan, tx: optax.GradientTransformation) -> dict[str, jax.ShapeDtypeStruct]:
    leaves = jax.tree_util.tree_leaves_with_path(planned_state(plan, tx))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _bytes(planned: jax.ShapeDtypeStruct) -> int:
    return math.prod(_local(planned).shape) * planned.dtype.itemsize


def _local(planned: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    assert planned.sharding is not None
    return jax.ShapeDtypeStruct(planned.sharding.shard_shape(planned.shape), planned.dtype)


def _on_device(x: Argument, planned: jax.ShapeDtypeStruct) -> bool:
    """True for a param in device memory whose place is host memory; of the state `state_not_offloaded` says it."""
    assert planned.sharding is not None
    return x.is_param and planned.sharding.memory_kind == HOST and not x.on_host


def _excess(x: Argument, planned: jax.ShapeDtypeStruct) -> int:
    return x.held if _on_device(x, planned) else x.held - _bytes(planned)


def _text(x: Argument, planned: jax.ShapeDtypeStruct, size: int) -> str:
    here = typed_shape(jax.ShapeDtypeStruct(x.local, x.dtype))
    there = "in host memory" if _on_device(x, planned) else typed_shape(_local(planned))
    return f"{x.name} comes in as {here}, planned {there} ({human_bytes(size)} more)"
