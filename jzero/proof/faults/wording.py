"""What the rules of `check` have in common: how leaves are listed, and how many values the params have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jzero.layout.leaf_rule import Layout
from jzero.proof.collectives import Site
from jzero.proof.evidence import Argument, Evidence
from jzero.proof.places import joined_names

Faults = Iterator[tuple[str, int, str]]
"""Of each fault its text, its bytes on one device, and the remedy."""
MOST_NAMES = 3
ACROSS = (
    "Rows looked up or summed across the batch (x[senders], segment_sum): a batch [N, ...] of N devices with its own "
    "rows in each entry, and jax.vmap over it, so that no device needs those of another."
)
COPIES = (
    "A layout on the mesh that an average, or another copy of the params, has already is kept. So first: "
    "copy = jax.device_put(copy, jax.tree.unflatten(jax.tree.structure(copy), "
    "map(plan.sharding, plan.copy_specs(copy))))."
)
NAMED = (
    "Copies of the params as a tree with their names, which jzero.shard splits as the moments: "
    "copy = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(copy))."
)


def elements(e: Evidence) -> int:
    """Elements of all split params that are trained, as a device uses them: of their gradients."""
    return sum(e.local(x) for x in e.split if x.frozen is None)


def axes_text(axes: Iterable[str]) -> str:
    """Mesh axes in a sentence."""
    return ", ".join(map(repr, axes))


def are_copies(e: Evidence, leaves: Iterable[Argument]) -> bool:
    """True where some are neither params nor of the optimizer state, as far as paths tell."""
    named = any(x.in_opt_state for x in e.leaves)
    return named and not all(x.is_param or x.in_opt_state for x in leaves)


def names_text(leaves: list[Argument] | list[Layout]) -> str:
    """The first leaves with their shapes, and how many more there are."""
    shown = ", ".join(f"{x.name}[{','.join(map(str, x.shape))}]" for x in leaves[:MOST_NAMES])
    return f"{shown}{more_text(leaves)}."


def is_tied(e: Evidence, x: Layout) -> bool:
    """True for a table whose rows are looked up and that is multiplied too."""
    kinds = {use.kind for use in (e.uses or {}).get(x.name, ()) if use.has_gradient}
    return "lookup" in kinds and len(kinds) > 1


def more_text(rows) -> str:
    """How many rows there are besides the first."""
    return f" and {len(rows) - MOST_NAMES} more" if len(rows) > MOST_NAMES else ""


def equation(s: Site) -> str:
    """Where a collective comes from: of several joined equations one that is not jzero's."""
    names = joined_names(s.stack)
    return next((name for name in names if "jzero." not in name), names[0]) or f"%{s.name}"
