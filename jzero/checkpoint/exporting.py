"""Consolidated weights out of a checkpoint: safetensors files, leaf by leaf, without devices and without the model."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax.typing import DTypeLike

from jzero.checkpoint import moments, pairs, store
from jzero.checkpoint.converting import converted
from jzero.checkpoint.logical import MASTER, Name, needed_by_model
from jzero.checkpoint.match import Described, text
from jzero.checkpoint.restoring import checked
from jzero.checkpoint.tensors import (
    DTYPES,
    check_names,
    check_texts,
    checksum_file,
    checksum_text,
    files_of,
    renamed,
)
from jzero.core import durable
from jzero.core.errors import check_dtype, check_int, counted, listing, nearest
from jzero.core.types import PyTree
from jzero.update.pairs import PAIRS

Names = Callable[[str], str] | Mapping[str, str] | None
FILE_BYTES = 5_000_000_000  # of one output file, as the Hugging Face hub has them
READ_BYTES = 256 * 2**20  # of leaves that are in memory at once, or the largest leaf


def export(
    path: store.PathLike,
    file: store.PathLike,
    *,
    dtype: DTypeLike | None = None,
    max_file_bytes: int = FILE_BYTES,
    names: Names = None,
    include: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Writes the model of a checkpoint to safetensors: params and statistics, in NNX all variables but random keys.

    Args:
      path: a checkpoint of `jzero.checkpoint.save` or plain orbax.
      file: `model.safetensors`; files of an earlier export to it are replaced. Above `max_file_bytes` it is split:
        `model-00001-of-00003.safetensors` and so on, with `model.safetensors.index.json` as the Hugging Face hub
        has it. Their checksums lie beside them, in `model.safetensors.xxh3`, which `load_safetensors` and `xxhsum
        -c` read.
      dtype: of the floating-point params and of what `include` names; statistics stay as stored. None: as stored, or
        the fp32 master if there is one.
      max_file_bytes: of tensors in one file; one larger tensor has a file of its own.
      names: from `Dense_0.kernel` to the name in the file, as a function or a mapping; None: unchanged. Statistics of a
        TrainState are `batch_stats.BatchNorm_0.mean`, those of NNX `norm.mean`.
      include: further parts of the state, e.g. `("ema",)`; their tensors are named `ema.…`. A variable of an NNX
        model that lies in none of its modules is such a part.
      progress: called with the bytes written and the bytes in all.

    Returns:
      The files written, the index last.

    Raises:
      ValueError: `file` does not end in .safetensors, two tensors get one name, a part is not there, safetensors
        lacks a dtype, or `dtype` cannot hold a number.
      TypeError: `include` is a single string, or `names` is not a function or mapping, or does not give a string.
      CheckpointDamaged: as `restore`.
      FileNotFoundError: there is nothing at `path`.
      RuntimeError: the job has several processes.

    Cost:
      256 MiB of host memory, or the largest leaf. A tied weight is one leaf and one tensor.
    """
    where = "jzero.checkpoint.export"
    if jax.process_count() > 1:
        raise RuntimeError(
            f"{where}: this job has {jax.process_count()} processes. Export in a process of its own, beside the job or "
            "after it: that needs neither devices nor the model."
        )
    check_names(names, where)
    include = check_texts(include, "include", where)
    check_int(max_file_bytes, "max_file_bytes", where=where, low=1)
    path, file = store.locate(path, where), store.absolute(file, where)
    if file.suffix != ".safetensors":
        raise ValueError(f"{where}: {file.name} must end in .safetensors.")
    checked(path, where)
    tree, stored = store.stored(path)
    have = moments.with_values(pairs.with_masters(stored), (), convert=True)
    tensors = _tensors(have, dtype, names, include, {name[1:] for name in stored if name[0] in PAIRS}, where)
    groups = _grouped(tensors, [t.nbytes for t in tensors], max_file_bytes)
    if len(groups) == 1 and _index(file).exists() and _index(file).name not in files_of(checksum_file(file)):
        raise ValueError(
            f"{where}: {_index(file)} is not of an earlier export, and would be read in place of {file.name}. Export "
            "to another name or folder."
        )
    total = sum(t.nbytes for t in tensors)
    done = 0
    outputs = _outputs(file, len(groups))
    file.parent.mkdir(parents=True, exist_ok=True)
    with _Files(file) as written:
        for name, group in zip(outputs, groups, strict=True):
            with written.open(name) as out:
                out.write(_header(group))
                for tensor, value in _values(path, tree, group):
                    what = f"{where}: {tensor.name}"
                    out.write(np.ascontiguousarray(converted(value, tensor.dtype, what)).tobytes())
                    done += tensor.nbytes
                    if progress is not None:
                        progress(done, total)
        if len(groups) > 1:
            index = _index(file)
            weight_map = {t.name: f.name for f, group in zip(outputs, groups, strict=True) for t in group}
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
            with written.open(index) as out:
                out.write(text.encode())
            outputs.append(index)
        written.keep()
    return outputs


class _Files:
    """Files that get their names, and checksums beside them, once all are written; a failure leaves nothing.

    They replace the files of an earlier export to the same name, by its checksums: it may have been split differently.
    """

    def __init__(self, file: Path):
        self._sums = checksum_file(file)
        # the index first: without it the others are read together
        self._before = sorted((file.with_name(n) for n in files_of(self._sums)), key=lambda f: f != _index(file))
        self._digests: dict[Path, str] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *exc: Any) -> None:
        for file in self._digests:
            _temporary(file).unlink(missing_ok=True)

    @contextlib.contextmanager
    def open(self, file: Path) -> Iterator[_Hashed]:
        """A file to write to, under a temporary name."""
        self._digests[file] = ""
        with open(_temporary(file), "wb") as out:
            hashed = _Hashed(out)
            yield hashed
            out.flush()
            os.fsync(out.fileno())
        self._digests[file] = hashed.digest.hexdigest()

    def keep(self) -> None:
        """Gives all their names. Old checksums go first: they would be taken for those of the new files."""
        self._sums.unlink(missing_ok=True)
        for file in self._digests:
            durable.rename(_temporary(file), file)
        for file in self._before:
            if file not in self._digests:
                file.unlink(missing_ok=True)
        durable.write(self._sums, checksum_text(self._digests).encode())


class _Hashed:
    """A file whose bytes are hashed as they are written."""

    def __init__(self, out: BinaryIO):
        self._out, self.digest = out, xxhash.xxh3_64()

    def write(self, data: bytes) -> None:
        self._out.write(data)
        self.digest.update(data)


def _temporary(file: Path) -> Path:
    return file.with_name(f".{file.name}.tmp")


class _Tensor:
    """One tensor of the output: its name, where it is read, and in which dtype it is written.

    Of a param that is read from its master, `param` is the param as it is stored: what the user has changed in it since
    the last update is not in the master yet.
    """

    def __init__(
        self, name: str, source: Name, stored: Described, dtype: np.dtype, param: tuple[Name, Described] | None
    ):
        self.name, self.source, self.dtype, self.param = name, source, dtype, param
        self.shape, self.stored = stored
        self.nbytes = math.prod(self.shape) * dtype.itemsize


def _tensors(
    have: Mapping[Name, Described],
    dtype: DTypeLike | None,
    names: Names,
    include: tuple[str, ...],
    beside: Collection[Name],
    where: str,
) -> list[_Tensor]:
    """What is written; `beside`: the params whose masters are stored beside them, and follow them anyway."""
    top = {name[0] for name in have}
    for part in include:
        if part not in top:
            raise ValueError(
                f"{where}: the checkpoint has no {part!r}, only {sorted(top)}.{nearest(part, top)}"
            )
    wanted = None if dtype is None else check_dtype(dtype, "dtype", where=where)
    needed = needed_by_model(have)
    found = []
    for name in have:
        if name[0] == "params":
            plain, source = name[1:], (MASTER, *name[1:])
        elif name[0] in include or "params" not in top or name in needed:
            plain, source = name, name
        else:
            continue
        source = source if source in have else name
        stored = have[source]
        given = name[0] == "params" or name[0] in include or "params" not in top  # statistics stay as they are
        floating = jnp.issubdtype(stored[1], jnp.floating)
        out = wanted if wanted is not None and given and floating else stored[1]
        if out.name not in DTYPES:
            raise ValueError(f"{where}: {text(name)} has dtype {out.name}, which safetensors does not have.")
        given_name = renamed(".".join(plain), names)
        if not isinstance(given_name, str):
            raise TypeError(
                f"{where}: names gives {given_name!r} for {'.'.join(plain)!r}, but every tensor needs a name. To "
                "export some params, save them alone: jzero.checkpoint.save(path, some_params)."
            )
        param = (name, have[name]) if source != name and name[1:] not in beside else None
        found.append(_Tensor(given_name, source, stored, out, param))
    double = sorted(name for name, count in Counter(t.name for t in found).items() if count > 1)
    if double:
        raise ValueError(
            f"{where}: names= gives {counted(len(double), 'name')} twice:\n{listing([(n,) for n in double])}"
        )
    return sorted(found, key=lambda t: t.name)


def _grouped(tensors: Sequence[_Tensor], sizes: Sequence[int], most: int) -> list[list[_Tensor]]:
    """Consecutive tensors of at most `most` bytes together; a larger one by itself."""
    groups: list[list[_Tensor]] = [[]]
    held = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        if groups[-1] and held + size > most:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += size
    return groups


def _index(file: Path) -> Path:
    return file.with_name(file.name + ".index.json")


def _outputs(file: Path, count: int) -> list[Path]:
    if count == 1:
        return [file]
    return [file.with_name(f"{file.stem}-{i + 1:05}-of-{count:05}.safetensors") for i in range(count)]


def _header(tensors: Sequence[_Tensor]) -> bytes:
    """The safetensors header: its length in 8 bytes, then JSON with dtype, shape and place of every tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "flax"}}
    at = 0
    for t in tensors:
        header[t.name] = {
            "dtype": DTYPES[t.dtype.name],
            "shape": list(t.shape),
            "data_offsets": [at, at + t.nbytes],
        }
        at += t.nbytes
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)  # data begins at a multiple of 8
    return len(data).to_bytes(8, "little") + data


def _values(path: Path, tree: PyTree, tensors: Sequence[_Tensor]) -> Iterator[tuple[_Tensor, np.ndarray]]:
    """The tensors in order, read a bounded number of bytes at a time."""
    sizes = [math.prod(t.shape) * t.stored.itemsize for t in tensors]
    for group in _grouped(tensors, sizes, READ_BYTES):
        targets = {t.source: store.Numpy(t.shape, t.stored) for t in group}
        targets |= {name: store.Numpy(*of) for name, of in (t.param for t in group if t.param is not None)}
        read = moments.load(path, tree, targets)
        for t in group:
            value = read[t.source]
            if t.param is not None:
                value = pairs.taken_over_on_host(read[t.param[0]], value)
            yield t, value
