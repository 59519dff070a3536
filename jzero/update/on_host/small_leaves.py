"""The leaves that the user holds, as bytes in the record of a generation."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jzero.core.random_keys import is_key, key_impl
from jzero.layout.placement import host_data
from jzero.update.on_host.chain import Chain


def packed(small: Sequence[Any], first: int = 0) -> bytes:
    """The leaves that the user holds, as bytes, keys as their data; and the step that the first generation is of."""
    arrays = {str(i): host_data(x) for i, x in enumerate(small) if x is not None}
    file = io.BytesIO()
    types = {k: x.dtype.name for k, x in arrays.items()}
    columns: dict[str, Any] = {k: _plain(x) for k, x in arrays.items()}
    types_text = np.frombuffer(json.dumps(types).encode(), np.uint8)
    np.savez(file, types=types_text, first_step=np.int64(first), **columns)
    return file.getvalue()


def _plain(x: np.ndarray) -> np.ndarray:
    return x if x.dtype.kind in "biufc" else np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def first_step(data: bytes) -> int:
    """The step that the first generation is of; 0 in files that do not say."""
    with np.load(io.BytesIO(data)) as file:
        return int(file["first_step"]) if "first_step" in file else 0


def unpacked(data: bytes, chain: Chain) -> list[Any]:
    """The reverse, on the devices of the plan."""
    out: list[Any] = [None] * len(chain.leaves)
    with np.load(io.BytesIO(data)) as file:
        types: Mapping[str, str] = json.loads(bytes(file["types"]).decode())
        for k, name in types.items():
            leaf, x = chain.leaves[int(k)], file[k]
            x = x if x.dtype.name == name else x.view(jax.numpy.dtype(name)).reshape(leaf.shape)
            if is_key(leaf):
                x = jax.random.wrap_key_data(x, impl=key_impl(leaf))
            out[int(k)] = x
    rows = zip(out, chain.specs, strict=True)
    return [None if x is None else jax.device_put(x, chain.plan.sharding(spec)) for x, spec in rows]
