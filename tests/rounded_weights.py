"""What a model sees of weights that are gathered in codes, computed again with numpy: `ZeroConfig(gather_dtype=)`."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jzero.layout.blocks import why_not_in_codes
from jzero.layout.leaf_rule import path_keys


def rounded(w, codes: str, size: int, scan_dim: int | None = None) -> np.ndarray:
    """A weight after its codes; `scan_dim`: each layer of a stack by itself."""
    w = np.asarray(w)
    if scan_dim is not None:
        layers = [rounded(x, codes, size) for x in np.moveaxis(w, scan_dim, 0)]
        return np.moveaxis(np.stack(layers), 0, scan_dim)
    behind = next((k for k in range(w.ndim - 1, 0, -1) if math.prod(w.shape[k:]) % size == 0), 0)
    rows = w.astype(np.float32).reshape(math.prod(w.shape[:behind]), -1)
    out = np.empty_like(rows)
    step = np.float32(1 / {"int4": 7, "int8": 127, "float8_e4m3fn": 448}[codes])
    for start in range(0, rows.shape[1], size):
        block = rows[:, start : start + size]
        scale = np.max(np.abs(block), axis=1, keepdims=True) * step
        share = block / np.where(scale > 0, scale, 1)
        code = np.rint(share) if codes.startswith("int") else share.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        out[:, start : start + size] = code * scale
    return out.reshape(w.shape).astype(w.dtype)


def after_codes(params, plan, compute=None) -> list:
    """By leaf of a tree of a plan's params: what the model sees of it; None where that is the param.

    `compute`: the dtype to which the model casts its weights: it is the cast ones that are gathered.
    """
    codes = {dtype.name for _, dtype in plan.config.gathers_in_codes}
    found = []
    for path, w in jax.tree_util.tree_leaves_with_path(params):
        x = plan.by_keys.get(path_keys(path))
        if x is None or x.stored == x.used or why_not_in_codes(x, plan):
            found.append(None)
            continue
        (name,) = codes
        cast = np.asarray(w).astype(plan.config.compute_dtype or compute or w.dtype)
        found.append(jnp.asarray(rounded(cast, name, plan.config.quantize_block, x.scan_dim)).astype(w.dtype))
    return found
