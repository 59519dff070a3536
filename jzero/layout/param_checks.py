"""Refuses params that cannot be laid out, before anything is placed; the errors name every leaf."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jzero.config import ZeroConfig
from jzero.core.errors import check_arrays, counted, human_bytes, listing, typed_shape
from jzero.core.types import PyTree
from jzero.layout.leaf_rule import Layout, Whole, as_abstract
from jzero.layout.specs import axis_size
from jzero.layout.split import find_split

WHERE = "jzero.make_plan"


def check_params(params: PyTree, trained: Sequence[bool]) -> None:
    """Raises TypeError for leaves that are not arrays, ValueError if there are no leaves, or trained integers."""
    flat = jax.tree_util.tree_leaves_with_path(params)
    if not flat:
        raise ValueError(f"{WHERE}: the params are empty. Pass the tree of params, e.g. variables['params'].")
    remedy = (
        "Pass arrays or jax.ShapeDtypeStruct; for an Equinox module, eqx.filter(model, eqx.is_inexact_array)."
    )
    check_arrays(params, "the params", where=WHERE, remedy=remedy)
    rows = [
        (jax.tree_util.keystr(k), typed_shape(x))
        for (k, x), is_trained in zip(flat, trained, strict=True)
        if is_trained and not jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    if rows:
        raise ValueError(
            f"{WHERE}: {len(rows)} of {len(flat)} params are not floating-point and have no gradient:\n"
            f"{listing(rows)}\nFreeze them (trainable=), or keep them outside of the params (another collection, a "
            "field of the state)."
        )


def check_uneven(layouts: Sequence[Layout], config: ZeroConfig, mesh: Mesh) -> None:
    """Raises ValueError for leaves without a dim that divides, if `uneven="error"`."""
    bad = [x for x in layouts if x.whole is Whole.UNEVEN]
    if config.uneven != "error" or not bad:
        return
    n = axis_size(mesh, config.axes)
    cost = sum(x.size * 12 * (n - 1) / n for x in bad)
    raise ValueError(
        f"{WHERE}: {len(bad)} of {len(layouts)} leaves cannot be split over mesh axis "
        f"{config.axis!r} (size {n}):\n{listing([(x.name, typed_shape(x), x.reason) for x in bad])}\n"
        f'Pass ZeroConfig(uneven="pad") (costs {_padding(bad, config, mesh)} more per device) or uneven="replicate" '
        f"(costs {human_bytes(cost)} more per device), with an Adam-like state."
    )


def _padding(leaves: Sequence[Layout], config: ZeroConfig, mesh: Mesh) -> str:
    """Bytes per device that padding these leaves takes."""
    found = [
        (x, find_split(x.shape, x.used, config.axes, mesh, skip=() if x.scan_dim is None else (x.scan_dim,)))
        for x in leaves
    ]
    added = (math.prod(split.shape) - x.size for x, split in found if split is not None)
    return human_bytes(sum(added) * 12 / axis_size(mesh, config.axes))


def mismatch(tree: PyTree, layouts: Sequence[Layout], *, where: str) -> str:
    """The error text for a tree that the layouts were not made for; lists the leaves."""
    got = {
        jax.tree_util.keystr(k): typed_shape(as_abstract(v))
        for k, v in jax.tree_util.tree_leaves_with_path(tree)
    }
    want = {x.name: typed_shape(x) for x in layouts}
    rows = [(name, want.get(name, "absent"), got.get(name, "absent")) for name in {**want, **got}]
    rows = [r for r in rows if r[1].split("[")[-1] != r[2].split("[")[-1]]
    text = listing([("leaf", "plan", "given"), *rows])
    return (
        f"{where}: this tree is not the one that the plan was made for ({len(got)} leaves, the plan has "
        f"{len(want)}):\n{text}\nMake a plan for this tree with jzero.make_plan(tree, config, mesh=mesh); "
        "if it is a batch, use plan.place_batch(batch)."
    )


def check_pairs(layouts: Sequence[Layout], config: ZeroConfig) -> None:
    """Raises ValueError for trained params whose masters cannot be stored as what the params lack, if that is asked."""
    field = config.paired_by
    if field is None:
        return
    where = f'ZeroConfig({field}="{getattr(config, field)}")'
    others = [
        (x.name, typed_shape(x)) for x in layouts if config.master_for(x.dtype) is not None and x.dtype != jnp.bfloat16
    ]
    if others:
        raise ValueError(
            f"{where}: {counted(len(others), 'param is', 'params are')} of a dtype that is not the upper half of "
            f"float32:\n{listing(others)}\nCast the params to bfloat16, or leave {field} out."
        )
    if layouts and not any(x.dtype == jnp.bfloat16 for x in layouts):
        found = ", ".join(sorted({str(x.dtype) for x in layouts}))
        raise ValueError(
            f"{where}: no trained param is bfloat16 (they are {found}), so there is no master. Cast the params to "
            f"bfloat16, or leave {field} out."
        )
