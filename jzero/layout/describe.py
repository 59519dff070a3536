"""A plan as a table: where every leaf lives, what it costs, and why it stays whole, if it does."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jzero.core.errors import counted, human_bytes, listing, table, typed_shape
from jzero.core.random_keys import is_key
from jzero.core.types import Shaped
from jzero.layout.blocks import blocks_of, why_not_in_codes, why_sent_whole, why_wide
from jzero.layout.gathered import gathered_bytes, held_gathered, is_in_pieces
from jzero.layout.specs import shard_factor
from jzero.layout.state_layouts import SCALES

SHOWN = 3


def describe_plan(plan: Any, tx: optax.GradientTransformation | None) -> str:
    """The text of `Plan.describe`."""
    config, mesh = plan.config, plan.mesh
    rows = []
    for x in plan.layouts:
        held = x.nbytes // shard_factor(x.stored, mesh)
        specs = [str(x.stored), str(x.used), "frozen", "frozen"]
        if x.frozen is None:
            held += x.nbytes // shard_factor(x.grad, mesh)
            specs[2:] = str(x.grad), str(x.state)
        rows.append([x.name, typed_shape(x), *specs, human_bytes(held), x.reason])
    header = ["param", "type", "stored", "used", "grad", "state", "bytes/device", "whole because"]
    axes = ", ".join(f"{k}: {v}" for k, v in mesh.shape.items())
    title = f"stage {config.stage} ({config.row.text}) over {'x'.join(config.axes)} of mesh {{{axes}}}"
    parts = [title, table(header, rows)]
    if tx is not None:
        offload = config.offload is not None
        columns = ["optimizer state", "type", "layout", "bytes/device", *(["memory"] if offload else [])]
        state = _state_leaves(plan, tx)
        parts += ["", table(columns, [row[: len(columns)] for row, _ in state])]
        parts += [_host_line(plan, [(row[-1], size) for row, size in state])] if offload else []
        parts += _quantized_lines(plan, state) if config.moment_dtype == jnp.int8 else []
    parts += _large_lines(plan) + _kept_lines(plan)
    parts += _gathered_lines(plan) if config.gather_dtype is not None else []
    parts += _updated_lines(plan) if config.update_dtype is not None else []
    whole = [x for x in plan.layouts if x.reason and x.stored == x.used]
    bytes_whole = sum(x.nbytes for x in whole)
    frozen = [x for x in plan.layouts if x.frozen is not None]
    also = f"; {len(frozen)} frozen ({human_bytes(sum(x.nbytes for x in frozen))})" if frozen else ""
    parts.append(
        f"{counted(len(plan.layouts), 'param')}, {sum(x.size for x in plan.layouts):,} values, "
        f"{human_bytes(plan.param_bytes)}; {len(whole)} whole over the ZeRO axis ({human_bytes(bytes_whole)}){also}"
    )
    return "\n".join([*parts, *(f"note: {note}" for note in [*plan.notes, *_guesses(plan)])])


def _large_lines(plan: Any) -> list[str]:
    """Which weights are gathered in pieces."""
    rows = [f"{x.name} ({human_bytes(gathered_bytes(x, plan))})" for x in plan.layouts if is_in_pieces(x, plan)]
    uses = f"a matmul, a lookup or a tiled loss, being more than {human_bytes(plan.whole_bytes)}"
    return [f"gathered in pieces by {uses}: {', '.join(rows)}"] if rows else []


def _kept_lines(plan: Any) -> list[str]:
    """Which weights stay gathered from the forward to the backward pass, where that is chosen weight by weight."""
    if not plan.config.kept_gathered_bytes:
        return []
    kept = [x for x in plan.layouts if x.name in plan.kept_gathered]
    size = sum(held_gathered(x, plan) for x in kept)
    names = f": {', '.join(x.name for x in kept)}" if kept else ""
    count = counted(len(plan.layouts), "param")
    return [f"{len(kept)} of {count} stay gathered for the backward pass ({human_bytes(size)} per device){names}"]


def _guesses(plan: Any) -> list[str]:
    """A note on the leaves that were taken for stacks of layers by a guess, if that decides a layout."""
    guessed = [x for x in plan.layouts if x.guessed]
    if not guessed or plan.n == 1 or not plan.config.row.state:
        return []
    paths = ["/".join(x.keys) for x in guessed]
    shown = ", ".join(f"{path} {typed_shape(x)}" for path, x in list(zip(paths, guessed, strict=True))[:SHOWN])
    return [
        f"dim 0 of {counted(len(guessed), 'param')} is taken for a stack of layers and not split, a guess from shapes: "
        f"{shown}{f' and {len(guessed) - SHOWN} more' if len(guessed) > SHOWN else ''}. If it is one, or if it is not "
        f'(experts), say so: scan_axes={{"{paths[0].partition("/")[0]}": 0}}, or scan_axes={{}}.'
    ]


def _state_leaves(plan: Any, tx: optax.GradientTransformation) -> list[tuple[list[str], int]]:
    """One row per leaf of the state that `tx` makes for this plan's params, and its bytes on one device."""
    shapes = getattr(tx.init, "shapes", None) if plan.config.updates_outside else None
    state = jax.eval_shape(tx.init, plan.shapes) if shapes is None else shapes(plan.shapes)
    paths = [k for k, _ in jax.tree_util.tree_leaves_with_path(state)]
    leaves = zip(paths, jax.tree.leaves(state), plan.state_specs(state), plan.offloaded(state), strict=True)
    rows = []
    for path, x, spec, away in leaves:
        size = leaf_bytes(x) // shard_factor(spec, plan.mesh)
        memory = plan.config.offload_options.tier if away else "device"
        name = jax.tree_util.keystr(path)
        rows.append(([name, typed_shape(x), str(spec), human_bytes(size), memory], size))
    return rows


def _quantized_lines(plan: Any, state: list[tuple[list[str], int]]) -> list[str]:
    """How much of the state is quantized, and which params' moments are not, with the reasons."""
    trained = [x for x in plan.layouts if x.frozen is None]
    wide = [(x, why_wide(x, plan)) for x in trained if blocks_of(x, plan) is None]
    share = 1 - sum(x.size for x, _ in wide) / max(sum(x.size for x in trained), 1)
    held: dict[str, int] = {}
    for (name, *_), size in state:
        owner = max((x.name for x in trained if name.endswith(x.name)), key=len, default="")
        if SCALES not in name:
            held[owner] = held.get(owner, 0) + size
    rows = [(x.name, why, f"{human_bytes(held.get(x.name, 0))} of state per device") for x, why in wide]
    line = f"moments of {share:.1%} of the trained values are in 8 bits, in blocks of {plan.config.quantize_block}"
    return [f"{line}; wide are:\n{listing(rows)}"] if rows else [line]


def _gathered_lines(plan: Any) -> list[str]:
    """Which weights are gathered in codes, and which as they are, with the reasons."""
    gathered = [x for x in plan.layouts if x.stored != x.used]
    rows = [(x.name, why, human_bytes(x.nbytes)) for x in gathered if (why := why_not_in_codes(x, plan))]
    codes = " and ".join(dict.fromkeys(str(dtype) for _, dtype in plan.config.gathers_in_codes))
    if plan.config.gathered_first:
        codes += f" over {', '.join(map(repr, plan.config.gathered_first))}"
    line = (
        f"weights of {len(gathered) - len(rows)} of {counted(len(gathered), 'param')} are gathered in {codes}, in "
        f"blocks of {plan.config.quantize_block}"
    )
    return [f"{line}; as they are:\n{listing(rows)}"] if rows else [line]


def _updated_lines(plan: Any) -> list[str]:
    """Which updates are added from codes, and which new params travel as they are, with the reasons."""
    gathered = [x for x in plan.layouts if x.state != x.stored and x.frozen is None]
    rows = [(x.name, why, human_bytes(x.nbytes)) for x in gathered if (why := why_sent_whole(x, plan))]
    line = (
        f"updates of {len(gathered) - len(rows)} of {counted(len(gathered), 'param')} travel in "
        f"{plan.config.update_dtype}, in blocks of {plan.config.quantize_block}"
    )
    return [f"{line}; new params travel as they are:\n{listing(rows)}"] if rows else [line]


def _host_line(plan: Any, leaves: list[tuple[str, int]]) -> str:
    hosted = [size for memory, size in leaves if memory != "device"]
    if plan.config.updates_outside:
        where = "in files" if plan.config.in_files else "in host memory"
        return (
            f"{len(hosted)} of {len(leaves)} state leaves {where}, updated outside of the program: "
            f"{human_bytes(sum(hosted))} per device, and a master of every param that has none here"
        )
    return (
        f"{len(hosted)} of {len(leaves)} state leaves in pinned host memory: {human_bytes(sum(hosted))} per device, at "
        f"most {human_bytes(min(plan.in_flight_bytes, sum(hosted)))} of them on the device at once; "
        f"{human_bytes(sum(leaf[1] for leaf in leaves) - sum(hosted))} stay there"
    )


def leaf_bytes(leaf: Shaped) -> int:
    """Bytes of a whole array or ShapeDtypeStruct; a PRNG key counts its data."""
    if is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return math.prod(leaf.shape) * leaf.dtype.itemsize
