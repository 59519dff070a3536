"""Checksums of a saved state: of every file in blocks, and of every stored chunk by the leaf that it belongs to.

[Note: two tables]
The blocks find damage: every byte of every file is in one, and reading them costs what a copy in memory costs. They
do not say whose bytes they are, because tensorstore packs the chunks of many leaves into one data file. The chunks do:
they are read by name, once when they are saved and again only when a block is wrong.

Each process hashes its share of files and chunks and writes a part of its own; a part begins with its own checksum.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tensorstore as ts
import xxhash

FOLDER = "checksums"
BLOCK = 4 * 2**20  # bytes of a file under one checksum
SMALL = 2**20  # bytes: files below it are checked before anything is parsed
VERSION = 1
THREADS = 4
OUTSTANDING = 4  # chunks that are read at once


@dataclasses.dataclass(frozen=True)
class Damage:
    """What is wrong with one file of a checkpoint.

    Attributes:
      file: its path within the checkpoint: `state/d/...`.
      what: missing, of another size, or which bytes differ.
    """

    file: str
    what: str

    def __str__(self):
        return f"{self.file}: {self.what}"


def write(directory: Path, *, part: int, parts: int, custom: Any) -> None:
    """Hashes this process's share of a finished directory and writes it down.

    Args:
      directory: what orbax has written; every process sees all files.
      part, parts: the process and their number.
      custom: JSON of the caller, kept under the same checksum.
    """
    names = _files(directory)[part::parts]
    with ThreadPoolExecutor(THREADS) as pool:
        blocks = dict(zip(names, pool.map(lambda name: _entry(directory / name), names), strict=True))
    chunks = {key: _hash(value) for key, value in _chunks(directory, part, parts)}
    body = {"version": VERSION, "parts": parts, "files": blocks, "chunks": chunks, "custom": custom}
    text = json.dumps(body, separators=(",", ":")).encode()
    folder = directory / FOLDER
    folder.mkdir(exist_ok=True)
    (folder / f"{part}.json").write_bytes(_hash(text).encode() + b"\n" + text)


class Seal:
    """The checksums of one directory, read and themselves checked.

    Attributes:
      damage: what is wrong with the checksum files themselves.
      custom: the caller's JSON.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.damage: list[Damage] = []
        self.custom: Any = None
        self._files: dict[str, dict[str, Any]] = {}
        self._chunks: dict[str, str] = {}
        part, parts = 0, 1
        while part < parts:
            body = self._part(part)
            if body is not None:
                parts = body["parts"]
                self.custom = body["custom"] if part == 0 else self.custom
                self._files |= body["files"]
                self._chunks |= body["chunks"]
            part += 1

    def _part(self, part: int) -> dict[str, Any] | None:
        name = f"{FOLDER}/{part}.json"
        try:
            data = (self.directory / name).read_bytes()
        except FileNotFoundError:
            self.damage.append(Damage(f"{self.directory.name}/{name}", "missing"))
            return None
        digest, _, text = data.partition(b"\n")
        if _hash(text).encode() != digest:
            self.damage.append(Damage(f"{self.directory.name}/{name}", "its own checksum is wrong"))
            return None
        return json.loads(text)

    @property
    def nbytes(self) -> int:
        """Bytes of all files under checksums."""
        return sum(entry["size"] for entry in self._files.values())

    def small(self) -> list[Damage]:
        """What is wrong with small files: those that are parsed before any data is read."""
        return self._check(name for name, entry in self._files.items() if entry["size"] < SMALL)

    def large(self, *, part: int = 0, parts: int = 1) -> list[Damage]:
        """What is wrong with one share of the large files."""
        large = sorted(name for name, entry in self._files.items() if entry["size"] >= SMALL)
        return self._check(large[part::parts])

    def _check(self, names: Iterable[str]) -> list[Damage]:
        names = list(names)
        with ThreadPoolExecutor(THREADS) as pool:
            found = pool.map(lambda name: _compare(self.directory, name, self._files[name]), names)
            return [damage for damage in found if damage is not None]

    def leaves(self) -> list[str]:
        """The leaves whose stored chunks are damaged or cannot be read, by name; slow, for a message."""
        try:
            store = _open(self.directory)
        except Exception:
            return []
        bad = set()
        for key, digest in self._chunks.items():
            try:
                ok = _hash(store.read(key).result().value) == digest
            except Exception:
                ok = False
            if not ok:
                bad.add(_leaf_of(key))
        return sorted(bad)


def exists(directory: Path) -> bool:
    """True where a directory has checksums, whole or not."""
    return (directory / FOLDER).is_dir()


def _files(directory: Path) -> list[str]:
    """All files below a directory but the checksums, relative to it, in one order on all processes."""
    found = []
    for root, folders, names in os.walk(directory):
        folders[:] = [f for f in folders if not (Path(root) == directory and f == FOLDER)]
        found += [str((Path(root) / name).relative_to(directory)) for name in names]
    return sorted(found)


def _entry(file: Path) -> dict[str, Any]:
    return {"size": file.stat().st_size, "blocks": list(_blocks(file))}


def _blocks(file: Path) -> Iterable[str]:
    buffer = memoryview(bytearray(min(BLOCK, max(file.stat().st_size, 1))))
    with open(file, "rb", buffering=0) as f:
        while count := _fill(f, buffer):
            yield _hash(buffer[:count])


def _fill(file, buffer: memoryview) -> int:
    """Bytes read into a buffer: fewer than it holds at the end of the file alone."""
    done = 0
    while done < len(buffer) and (count := file.readinto(buffer[done:])):
        done += count
    return done


def _compare(directory: Path, name: str, entry: dict[str, Any]) -> Damage | None:
    what = _difference(directory / name, entry)
    return Damage(f"{directory.name}/{name}", what) if what else None


def _difference(file: Path, entry: dict[str, Any]) -> str | None:
    try:
        size = file.stat().st_size
        if size != entry["size"]:
            return f"{size} bytes instead of {entry['size']}"
        for i, (got, want) in enumerate(zip(_blocks(file), entry["blocks"], strict=True)):
            if got != want:
                return f"differs within bytes {i * BLOCK} to {min((i + 1) * BLOCK, size)}"
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _chunks(directory: Path, part: int, parts: int) -> Iterable[tuple[str, bytes]]:
    """One process's share of the chunks in the store, a bounded number of them in memory."""
    store = _open(directory)
    keys = sorted(store.list().result())[part::parts]
    waiting: list[tuple[bytes, Any]] = []
    for key in keys:
        waiting.append((key, store.read(key)))
        if len(waiting) >= OUTSTANDING:
            key, value = waiting.pop(0)
            yield key.decode(), value.result().value
    for key, value in waiting:
        yield key.decode(), value.result().value


def _open(directory: Path) -> ts.KvStore:
    return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{directory}/"}).result()


def _leaf_of(key: str) -> str:
    """`params.Dense_0.kernel/c/0/1` and `params.Dense_0.kernel/zarr.json` belong to `params.Dense_0.kernel`."""
    return key.removesuffix("/zarr.json") if key.endswith("/zarr.json") else key.rpartition("/c")[0]


def _hash(data) -> str:
    return xxhash.xxh3_64_hexdigest(data)
