"""Checkpoints of orbax: names, files, metadata, and the index of tensorstore."""

from __future__ import annotations

import atexit
import dataclasses
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from canaries import check, constant, differences, once
from canaries.jaxpr import matrix

COLUMNS = 4096  # a row is one chunk, too large for tensorstore to keep it in its index
_renames: list[tuple[str, str]] = []

_made: list[str] = []


def _audit(event: str, args: tuple) -> None:
    if event == "os.rename":
        _renames.append((os.fspath(args[0]), os.fspath(args[1])))
    elif event == "os.mkdir":
        _made.append(os.fspath(args[0]))


@once
def saved() -> tuple[Path, list[str], list[tuple[str, str]]]:
    """A checkpoint by orbax, the folders made for it and what was renamed, as Python's audit events tell."""
    import jax
    import numpy as np
    from orbax.checkpoint import v1 as ocp

    sys.addaudithook(_audit)
    folder = Path(tempfile.mkdtemp(prefix="jzero-canary-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    context = ocp.Context()
    context.array.saving.storage_options.chunk_byte_size = 4 * COLUMNS
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.device_put(
        np.arange(8 * COLUMNS, dtype=np.float32).reshape(8, COLUMNS), jax.NamedSharding(mesh, jax.P("data"))
    )
    with context:
        response = ocp.save_async(
            str(folder / "7"), {"a": split, "b": {"c": matrix(3)}, "n": 5}, custom_metadata={"canary": 1}
        )
    response.result()
    return folder / "7", list(_made), list(_renames)


@check("checkpoint/store.py (TEMPORARY), checkpoint/commit.py")
def orbax_temporary_names():
    """Until it is whole a checkpoint's folder is <name>.orbax-checkpoint-tmp..., and is then renamed."""
    path, made, renames = saved()
    mark = path.name + constant("checkpoint.store", "TEMPORARY", ".orbax-checkpoint-tmp")
    own = [Path(d).name for d in made if Path(d).parent == path.parent]
    final = [Path(a).name for a, b in renames if Path(b) == path]
    rows = [("folders made", [d for d in own if not d.startswith(mark)], []), ("any made", bool(own), True),
            ("renamed from", [n.startswith(mark) for n in final], [True])]  # fmt: skip
    return differences(rows)


@check("checkpoint/store.py (STATE), checkpoint/checksums.py (NOTES)")
def orbax_files():
    """A checkpoint has the folder `state` with manifest.ocdbt, and _CHECKPOINT_METADATA with the custom metadata."""
    path, _, _ = saved()
    notes = path / constant("checkpoint.checksums", "NOTES", "_CHECKPOINT_METADATA")
    state = path / constant("checkpoint.store", "STATE", "state")
    rows = [("state", (state / "manifest.ocdbt").is_file() or sorted(p.name for p in path.iterdir()), True),
            ("metadata", notes.is_file() and "canary" in notes.read_text(), True)]  # fmt: skip
    return differences(rows)


@check("checkpoint/store.py")
def orbax_metadata():
    """ocp.metadata(path).metadata is the saved tree, each leaf with shape, dtype and storage_metadata.chunk_shape; a
    Python number is one of its type."""
    from orbax.checkpoint import v1 as ocp

    tree = ocp.metadata(str(saved()[0])).metadata
    leaf = tree["a"]
    rows = [("keys", sorted(tree), ["a", "b", "n"]), ("shape", tuple(leaf.shape), (8, COLUMNS)),
            ("dtype", str(leaf.dtype), "float32"), ("chunks", tuple(leaf.storage_metadata.chunk_shape), (1, COLUMNS)),
            ("a number", type(tree["n"]), int)]  # fmt: skip
    return differences(rows)


@check("checkpoint/store.py")
def orbax_loads_parts():
    """ocp.load skips ocp.PLACEHOLDER; shape and dtype without a sharding give numpy, an abstract array its layout; with
    enable_padding_and_truncation a larger shape is filled with zeros."""
    import jax
    import numpy as np
    from orbax.checkpoint import v1 as ocp

    @dataclasses.dataclass
    class Numpy:
        shape: tuple[int, ...]
        dtype: np.dtype

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    target = jax.ShapeDtypeStruct(
        (8, COLUMNS + 4), "float32", sharding=jax.NamedSharding(mesh, jax.P("data"))
    )
    context = ocp.Context()
    context.array.loading.enable_padding_and_truncation = True
    context.memory.read_concurrent_bytes = 2**26
    with context:
        like = {"a": target, "b": {"c": Numpy((3,), np.dtype("float32"))}, "n": ocp.PLACEHOLDER}
        out = ocp.load(str(saved()[0]), like)
    padding = np.asarray(out["a"])[:, COLUMNS:]
    rows = [("layout", out["a"].sharding.spec, jax.P("data")), ("padded", float(abs(padding).max()), 0.0),
            ("last value", float(out["a"][7, COLUMNS - 1]), 8 * COLUMNS - 1.0),
            ("numpy", isinstance(out["b"]["c"], np.ndarray), True),
            ("left out", out["n"] is ocp.PLACEHOLDER, True)]  # fmt: skip
    return differences(rows)


@check("checkpoint/checksums.py")
def tensorstore_index():
    """ts.ocdbt.dump gives versions with a root, then nodes with entries: key, location and subtree_common_prefix, or
    indirect_value; a location is value:folder:file:offset:length."""
    import tensorstore as ts

    base = ts.KvStore.open({"driver": "file", "path": f"{saved()[0]}/state/"}).result()
    apart, leaves, odd = 0, set(), []
    pending = [ts.ocdbt.dump(base).result()["versions"][-1]["root"]["location"]]
    while pending:
        location = pending.pop()
        for entry in ts.ocdbt.dump(base, location).result()["entries"]:
            if "location" in entry:
                pending.append(entry["location"])
                odd += [] if "subtree_common_prefix" in entry else [sorted(entry)]
                continue
            leaves.add(entry["key"].decode())
            if "indirect_value" not in entry:
                continue
            apart, place = apart + 1, entry["indirect_value"]
            if not re.fullmatch(r"\w+:[^:]*:[^:]+:\d+:\d+", place):
                odd.append(place)
            elif not (saved()[0] / "state" / "".join(place.split(":")[1:3])).is_file():
                odd.append(f"no file of {place}")
    chunks = len([k for k in leaves if k.startswith("a/") and not k.endswith((".zarray", "zarr.json"))])
    rows = [("another form", odd[:1], []), ("chunks of a leaf", chunks, 8), ("chunks in files", apart, 8)]
    return differences(rows)
