"""What a device holds of a weight that stage 3 has gathered: the whole of it, or pieces."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from jzero.layout.blocks import why_not_in_codes
from jzero.layout.specs import shard_factor

if TYPE_CHECKING:
    from jzero.layout.leaf_rule import Layout


def gathered_bytes(x: Layout, plan: Any) -> int:
    """Bytes of a param on one device once it is gathered whole, of one layer of a stack."""
    itemsize = (plan.config.compute_dtype or x.dtype).itemsize
    return x.size * itemsize // shard_factor(x.used, plan.mesh) // x.layers


def is_in_pieces(x: Layout, plan: Any) -> bool:
    """Whether a matmul, a lookup or a tiled loss gathers a param in pieces: see [Note: pieces of a weight]."""
    config = plan.config
    drops = config.row.params and config.reshard_after_forward and x.stored != x.used
    in_codes = config.gather_dtype is not None and not why_not_in_codes(x, plan)
    return drops and not in_codes and len(x.layer_shape) == 2 and gathered_bytes(x, plan) > plan.whole_bytes


def kept_gathered(plan: Any) -> frozenset[str]:
    """Names of the params that stay gathered from the forward to the backward pass; see `ZeroConfig`.

    A table whose rows are only looked up gains nothing by it, and which one that is a plan does not know: tables are
    large, and the smallest come first.
    """
    if not plan.config.reshard_after_forward:
        return frozenset(x.name for x in plan.layouts if plan.config.row.params and x.stored != x.used)
    sizes = sorted((n, x.name) for x in plan.layouts if (n := held_gathered(x, plan)))
    sums = itertools.accumulate(n for n, _ in sizes)
    pairs = zip(sizes, sums, strict=True)
    return frozenset(name for (_, name), total in pairs if total <= plan.config.kept_gathered_bytes)


def held_gathered(x: Layout, plan: Any) -> int:
    """Bytes of a param on one device if all of it stays gathered; 0 for one that does not."""
    stays = plan.config.row.params and x.stored != x.used and not is_in_pieces(x, plan)
    return gathered_bytes(x, plan) * x.layers if stays else 0
