"""Places arrays on their devices in a layout, with one process or several."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import KeyPath

from jzero.core.errors import listing, typed_shape
from jzero.core.jaxprs import is_tracer
from jzero.core.processes import key_value_client, wait_for
from jzero.core.random_keys import by_data, is_key
from jzero.core.types import PyTree

HOST = "pinned_host"


def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """One leaf on its devices. Across processes each of them must hold the values that it needs."""
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    if jax.process_count() == 1:
        if isinstance(leaf, jax.Array) and (memory_kind(leaf) == HOST) != (sharding.memory_kind == HOST):
            leaf = _relaid_on_host(leaf, sharding)
        return jax.device_put(leaf, sharding)
    if is_global(leaf):
        return jax.jit(lambda x: x, out_shardings=sharding)(leaf)
    if is_key(leaf):
        return by_data(lambda x: put(x, sharding), leaf)
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _relaid_on_host(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """An array that changes both its memory and its layout, in the new layout in host memory.

    If it is asked for both at once, jax (0.10 to 0.12) takes pieces on the right devices from the wrong memory, and
    raises. An array on one device is split on the device, so that it is never whole in pinned memory.
    """
    if len(x.sharding.device_set) == 1:
        return x
    x = jax.device_put(x, x.sharding.with_memory_kind(HOST))
    return jax.device_put(x, sharding.with_memory_kind(HOST))


def on_device(x: Any) -> Any:
    """An array from host memory in the same layout in device memory; anything else unchanged."""
    kind = getattr(getattr(x, "sharding", None), "memory_kind", None)
    if not isinstance(x, jax.Array) or is_tracer(x) or kind in (None, "device"):
        return x
    return jax.device_put(x, x.sharding.with_memory_kind("device"))


def memory_kind(x: Any) -> str:
    """The kind of memory in which an array lies, traced or not."""
    if is_tracer(x):
        return HOST if x.aval.memory_space == jax.memory.Space.Host else "device"
    return getattr(getattr(x, "sharding", None), "memory_kind", None) or "device"


def device_type(x: Any) -> Any:
    """The type of an array for the trace of a function that knows nothing of host memory."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if memory_kind(x) == HOST else x


def is_global(leaf: object) -> bool:
    """True for an array that spans several processes."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def check_same(tree: PyTree, *, where: str) -> None:
    """Checks that every process has the same values, before arrays that lie on each of them become one.

    With a seed that depends on the process, each process would train a different state. Arrays that span the processes
    are not looked at. All processes must call.

    Raises:
      ValueError: the trees or the values of a leaf differ between processes; lists the leaves.

    Cost:
      Across processes a checksum of every byte on the CPU (some GB/s); 4 bytes per leaf and process are sent.
    """
    if jax.process_count() == 1:
        return
    named = [(jax.tree_util.keystr(k), x) for k, x in jax.tree_util.tree_leaves_with_path(tree)]
    named = [(name, host_data(x)) for name, x in named if not is_global(x)]
    outline = "\n".join(f"{name} {typed_shape(x)}" for name, x in named)
    if len(set(_gathered([zlib.crc32(outline.encode())])[:, 0].tolist())) > 1:
        raise ValueError(
            f"{where}: the paths, shapes or dtypes of the trees differ between processes; process "
            f"{jax.process_index()} has {len(named)} leaves that are local to it. Build the same state on "
            "every process, or pass the function that creates it."
        )
    sums = _gathered([_checksum(x) for _, x in named])
    rows = [
        (name, typed_shape(x), f"process {other} differs from process 0")
        for (name, x), column in zip(named, sums.T, strict=True)
        for other in np.flatnonzero(column != column[0])[:1]
    ]
    if rows:
        raise ValueError(
            f"{where}: the processes bring different values for {len(rows)} of {len(named)} leaves:\n{listing(rows)}\n"
            "Use the same seed (and the same file) on every process."
        )


def same_values(groups: Sequence[Sequence[Any]]) -> list[bool]:
    """For each group of arrays whether every process has the same values. All processes must call."""
    sums = []
    for group in groups:
        total = 0
        for x in group:
            total = _checksum(host_data(x), total)
        sums.append(total)
    return [bool(np.all(column == column[0])) for column in _gathered(sums).T] if groups else []


def check_same_program(lowered: jax.stages.Lowered, *, where: str) -> None:
    """Checks that every process has lowered the same program, constants included. All processes must call.

    JAX runs on each process what that process has compiled. With a seed that depends on the process, a function that
    creates a state would give replicas with different values.

    Raises:
      ValueError: the programs differ.

    Cost:
      Across processes the program's text, about twice the bytes of its constants; 4 bytes per process are sent.
    """
    if jax.process_count() == 1:
        return
    sums = _gathered([zlib.crc32(lowered.as_text().encode())])[:, 0]
    if others := np.flatnonzero(sums != sums[0]).tolist():
        raise ValueError(
            f"{where}: the creation function is another program on process {others[0]} than on process 0 "
            f"({len(others)} of {len(sums)} differ). Something in it depends on the process: a seed, an array or a "
            "file that it takes from outside, or jax.process_index(). It must be the same everywhere: it runs once, "
            "over all of them."
        )


_rows_agreed: set[tuple[tuple[KeyPath, int], ...]] = set()
_asked = itertools.count()


def check_rows(batch: PyTree, *, where: str, seconds: float = 300) -> None:
    """Checks that every process passes the same number of rows, whenever this process passes a new number.

    Each process computes the shape of the whole batch from its own rows, and JAX does not compare them. The processes
    write to the store of `jax.distributed`, and process 0 compares. Numbers that were agreed on are not checked again.

    Args:
      batch: a tree; dim 0 of its arrays is their rows. Scalars and arrays that span the processes are not looked at.
      where: the caller, for the error.
      seconds: how long to wait for the others.

    Raises:
      ValueError: the numbers differ between processes, or another process had nothing new to pass.
    """
    if jax.process_count() == 1:
        return
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    rows = tuple((path, np.shape(x)[0]) for path, x in leaves if np.ndim(x) and not is_global(x))
    if not rows or rows in _rows_agreed:
        return
    client, me, wait = key_value_client(), jax.process_index(), round(seconds * 1000)
    where_to = f"jzero/rows/{next(_asked)}"
    numbers = sorted({n for _, n in rows})
    each = ", ".join(f"{jax.tree_util.keystr(k)}: {n}" for k, n in rows)
    mine = f"{numbers[0]} rows" if len(numbers) == 1 else each
    if me:
        client.key_value_set(f"{where_to}/{me}", mine)
        wrong = wait_for(client, f"{where_to}/verdict", wait)
        wrong = f"process {me} brings {mine}, process 0 nothing new" if wrong is None else wrong
    else:
        found = {k: wait_for(client, f"{where_to}/{k}", wait) for k in range(1, jax.process_count())}
        bad = [f"process {k} {text or 'nothing new'}" for k, text in found.items() if text != mine]
        wrong = f"process 0 brings {mine}, {', '.join(bad[:4])}{', ...' if bad[4:] else ''}" if bad else ""
        client.key_value_set(f"{where_to}/verdict", wrong)
    if wrong:
        raise ValueError(
            f"{where}: the processes do not pass the same number of rows: {wrong}.\nGive each process an equal part of "
            "the batch, and leave out (or pad) a last one that is shorter somewhere. All processes must call."
        )
    _rows_agreed.add(rows)


def host_data(leaf: Any) -> np.ndarray:
    """The values of a leaf; for keys their data."""
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def _checksum(x: np.ndarray, start: int = 0) -> int:
    return zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data, start)


def _gathered(numbers: list[int]) -> np.ndarray:
    """`[processes, numbers]`: what each process passes."""
    from jax.experimental import multihost_utils

    return np.atleast_2d(multihost_utils.process_allgather(np.array(numbers, np.uint32)))


def check_host(mesh: Mesh, where: str) -> None:
    """Raises ValueError if the devices have no host memory of the kind that offloaded arrays live in."""
    device = mesh.devices.flat[0]
    kinds = [m.kind for m in device.addressable_memories()]
    if HOST not in kinds:
        raise ValueError(
            f"{where}: devices of platform {device.platform!r} have no {HOST} memory, only {', '.join(kinds)}. "
            "Leave offload out here."
        )
