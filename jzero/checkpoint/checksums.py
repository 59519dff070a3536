"""Checksums of a saved state: of every byte of every file, with one for each stored chunk that names its leaf.

[Note: segments]
Tensorstore packs the chunks of many leaves into one data file; its own index says which bytes are whose. So a file is
cut into segments: one per chunk, with the leaf's name, and the rest in blocks. One pass over the files hashes all of
them, and a segment that differs names its leaf. Damage to a file of the index itself names every leaf, since
none of them can be located with certainty.

Each process hashes its share of the files and writes a part of its own; a part begins with its own checksum.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tensorstore as ts
import xxhash

from jzero.core import durable
from jzero.core.errors import counted

STATE = "state/"  # where orbax's files lie in a checkpoint
FOLDER = "state/checksums"
BLOCK = 4 * 2**20  # bytes of a file that belong to no chunk, under one checksum
TASK = 16 * 2**20  # bytes that one thread hashes at a time
BUFFER = 2**20
SMALL = 2**20  # bytes: files below it are checked before anything is parsed
VERSION = 2  # version 1 named files relative to `state`, and had no checksums of files beside it
THREADS = 4
NOTES = "_CHECKPOINT_METADATA"  # orbax's on the whole checkpoint
EVERY = "*"  # in place of a leaf: a file of the index

Segment = tuple[int, str | None]  # its length, its leaf


@dataclasses.dataclass(frozen=True)
class Damage:
    """What is wrong with one file of a checkpoint.

    Attributes:
      file: its path within the checkpoint: `state/d/...`.
      what: missing, of another size, or which bytes differ.
      leaves: the leaves whose data it is, by orbax's names.
    """

    file: str
    what: str
    leaves: tuple[str, ...] = ()

    def __str__(self):
        return f"{self.file}: {self.what}"


def write(directory: Path, *, process: int, processes: int, notes: Mapping[str, Any]) -> None:
    """Hashes this process's share of a finished checkpoint, writes the checksums, and flushes both to the disk.

    Args:
      directory: what orbax has written; every process sees all files.
      process, processes: the index of this one, and how many there are.
      notes: JSON of the caller by name (`custom`, `metrics`, `trained`), stored under the same checksum.
    """
    index = _Index(directory / STATE)
    names = _files(directory)[process::processes]
    segments = {name: _segments(index, name, (directory / name).stat().st_size) for name in names}
    digests = _digests(directory, segments)
    files = {
        name: [
            [length, digest, leaf]
            for (length, leaf), digest in zip(segments[name], digests[name], strict=True)
        ]
        for name in names
    }
    leaves = sorted(index.leaves) if process == 0 else []
    body = {"version": VERSION, "parts": processes, "files": files, "leaves": leaves, **notes}
    text = json.dumps(body, separators=(",", ":")).encode()
    folder = directory / FOLDER
    folder.mkdir(exist_ok=True)
    durable.write(folder / f"{process}.json", _hash(text).encode() + b"\n" + text)
    for name in names:
        durable.flush(directory / name)


def _segments(index: _Index, name: str, size: int) -> list[Segment]:
    """The segments of a file of a checkpoint."""
    if name.startswith(STATE):
        return index.segments(name.removeprefix(STATE), size)
    return [(n, None) for n in _blocks(size)]


class _Index:
    """Which leaf each byte of the data files belongs to, from tensorstore's index (OCDBT) of a directory.

    Attributes:
      leaves: the names of all stored leaves.
    """

    def __init__(self, directory: Path):
        self._base = ts.KvStore.open({"driver": "file", "path": f"{directory}/"}).result()  # no URL: % # ?
        self._chunks: dict[str, list[tuple[int, int, str]]] = {}
        self._nodes = {"manifest.ocdbt"}
        self.leaves: set[str] = set()
        manifest = ts.ocdbt.dump(self._base).result()
        self._walk(manifest["versions"][-1]["root"]["location"], b"")

    def _walk(self, location: str, prefix: bytes) -> None:
        self._nodes.add(_place(location)[0])
        for entry in ts.ocdbt.dump(self._base, location).result()["entries"]:
            key = prefix + entry["key"]
            if "location" in entry:
                self._walk(entry["location"], prefix + entry["subtree_common_prefix"])
                continue
            leaf = _leaf_of(key.decode())
            self.leaves.add(leaf)
            if "indirect_value" in entry:
                file, offset, length = _place(entry["indirect_value"])
                self._chunks.setdefault(file, []).append((offset, length, leaf))

    def segments(self, name: str, size: int) -> list[Segment]:
        """The segments of a data file."""
        rest = EVERY if name in self._nodes else None
        found: list[Segment] = []
        at = 0
        for offset, length, leaf in sorted(self._chunks.get(name, ())):
            found += [(n, rest) for n in _blocks(offset - at)]
            found.append((length, leaf))
            at = offset + length
        return found + [(n, rest) for n in _blocks(size - at)]


def _place(location: str) -> tuple[str, int, int]:
    """`value:ocdbt.process_0/:d/1f:128:64` is at byte 128 of `ocdbt.process_0/d/1f`, 64 bytes long."""
    _, folder, file, offset, length = location.split(":")
    return folder + file, int(offset), int(length)


def _blocks(count: int) -> list[int]:
    return [BLOCK] * (count // BLOCK) + ([count % BLOCK] if count % BLOCK else [])


def _digests(directory: Path, segments: dict[str, list[Segment]]) -> dict[str, list[str]]:
    """The checksum of every segment, by a few threads; an error where a file cannot be read to its end."""
    tasks = list(_tasks(segments))
    found: dict[str, list[str]] = {name: [] for name in segments}
    with ThreadPoolExecutor(THREADS) as pool:
        for (name, _, _), digests in zip(tasks, pool.map(lambda t: _read(directory, *t), tasks), strict=True):
            found[name] += digests
    return found


def _tasks(segments: dict[str, list[Segment]]) -> Iterator[tuple[str, int, list[int]]]:
    """Runs of segments: the file, where they begin, their lengths."""
    for name, cuts in segments.items():
        at, start, run = 0, 0, []
        for length, _ in cuts:
            run.append(length)
            at += length
            if at - start >= TASK:
                yield name, start, run
                start, run = at, []
        if run:
            yield name, start, run


def _read(directory: Path, name: str, start: int, lengths: list[int]) -> list[str]:
    buffer = memoryview(bytearray(min(max(lengths), BUFFER)))
    found = []
    with open(directory / name, "rb", buffering=0) as file:
        file.seek(start)
        for left in lengths:
            digest = xxhash.xxh3_64()
            while left:
                count = file.readinto(buffer[:left])
                if not count:
                    raise OSError(f"{name} ends too early")
                digest.update(buffer[:count])
                left -= count
            found.append(digest.hexdigest())
    return found


class Checksums:
    """The checksums of one checkpoint, read and themselves checked.

    Attributes:
      damage: what is wrong with the checksum files themselves.
      custom: the caller's JSON.
      metrics: numbers by name, or None; where `damage` is empty.
      has_metrics: the metrics are under the checksums; earlier versions left them out.
      trained: the names of the params that the optimizer takes, where it does not take all; else None.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.damage: list[Damage] = []
        self.custom: Any = None
        self.metrics: dict[str, float] | None = None
        self.has_metrics = False
        self.trained: list[str] | None = None
        self._files: dict[str, list[tuple[int, str, str | None]]] = {}
        self._every: list[str] = []
        process, processes = 0, 1
        while process < processes:
            body = self._part(process)
            if body is not None:
                processes = body["parts"]
                before = STATE if body["version"] == 1 else ""
                self._files |= {before + name: cuts for name, cuts in body["files"].items()}
                if process == 0:
                    self.custom, self._every = body["custom"], body["leaves"]
                    self.metrics, self.has_metrics = body.get("metrics"), "metrics" in body
                    self.trained = body.get("trained")
            process += 1

    def _part(self, process: int) -> dict[str, Any] | None:
        name = f"{FOLDER}/{process}.json"
        if not (self.directory / name).is_file():
            self.damage.append(self._damage(name, "missing"))
            return None
        data = (self.directory / name).read_bytes()
        digest, _, text = data.partition(b"\n")
        if _hash(text).encode() != digest:
            self.damage.append(self._damage(name, "its own checksum is wrong"))
            return None
        return json.loads(text)

    def _damage(self, name: str, what: str, leaves: Iterable[str | None] = ()) -> Damage:
        named = set(leaves)
        every = self._every if EVERY in named else sorted(x for x in named if x is not None)
        return Damage(name, what, tuple(every))

    def _size(self, name: str) -> int:
        return sum(length for length, _, _ in self._files[name])

    @property
    def nbytes(self) -> int:
        """Bytes of all files under checksums."""
        return sum(map(self._size, self._files))

    def small(self) -> list[Damage]:
        """What is wrong with small files: those that are parsed before any data is read."""
        return self._check([name for name in self._files if self._size(name) < SMALL])

    def unread(self) -> set[str]:
        """Files that a restore does not read: without them the state is whole."""
        return {name for name in self._files if not name.startswith(STATE) and name != NOTES}

    def large(self, *, process: int = 0, processes: int = 1) -> list[Damage]:
        """What is wrong with one share of the large files."""
        names = sorted(name for name in self._files if self._size(name) >= SMALL)
        return self._check(names[process::processes])

    def _check(self, names: list[str]) -> list[Damage]:
        found, readable = [], {}
        for name in names:
            what = self._unlike(name)
            if what is None:
                readable[name] = [(length, leaf) for length, _, leaf in self._files[name]]
            else:
                found.append(self._damage(name, what, (leaf for _, _, leaf in self._files[name])))
        for name, digests in _digests(self.directory, readable).items():
            found += self._compare(name, digests)
        return sorted(found, key=lambda d: d.file)

    def _unlike(self, name: str) -> str | None:
        """What is wrong with a file, as far as that shows without reading it."""
        try:
            found = (self.directory / name).stat()
            if not stat.S_ISREG(found.st_mode):  # to open a pipe would take forever
                return "not a regular file"
            with open(self.directory / name, "rb"):
                pass
        except FileNotFoundError:
            return "missing"
        except OSError as error:
            return str(error)
        want = self._size(name)
        return None if found.st_size == want else f"{found.st_size} bytes instead of {want}"

    def _compare(self, name: str, digests: list[str]) -> list[Damage]:
        at, spans, leaves = 0, [], []
        for (length, want, leaf), got in zip(self._files[name], digests, strict=True):
            if got != want:
                spans.append((at, at + length))
                leaves.append(leaf)
            at += length
        if not spans:
            return []
        more = f" and in {counted(len(spans) - 1, 'more place')}" if len(spans) > 1 else ""
        return [self._damage(name, f"differs within bytes {spans[0][0]} to {spans[0][1]}{more}", leaves)]


def exists(directory: Path) -> bool:
    """True for a directory with checksums, damaged or not."""
    return (directory / FOLDER).is_dir()


def _files(directory: Path) -> list[str]:
    """All files below a directory except the checksums, relative to it, in the same order on all processes."""
    found = []
    for root, folders, names in os.walk(directory):
        folders[:] = [f for f in folders if Path(root) / f != directory / FOLDER]
        found += [str((Path(root) / name).relative_to(directory)) for name in names]
    return sorted(found)


def _leaf_of(key: str) -> str:
    """`params.Dense_0.kernel/c/0/1` and `params.Dense_0.kernel/zarr.json` belong to `params.Dense_0.kernel`."""
    return key.removesuffix("/zarr.json") if key.endswith("/zarr.json") else key.rpartition("/c")[0]


def _hash(data) -> str:
    return xxhash.xxh3_64_hexdigest(data)
