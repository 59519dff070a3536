"""The record: one small file per step that says which slots, with which checksums, are a generation.

[Note: why a commit is all or nothing]
There are two record files; generation g is in `record.<g mod 2>`. A commit comes after every slot of its step is on the
disk. It overwrites the older record, and a record that was torn has a wrong checksum: the other one counts then, and no
slot that it names has been touched, since a step writes only to slots that the last generation does not use. A record
that a killed process has left in the page cache counts when the store is opened next, so it is flushed there before any
slot is written. Otherwise a later power failure could bring back the record before it, whose slots are gone.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from jzero.core import durable
from jzero.core.errors import shown
from jzero.update.on_host.disk.transfers import DamagedStore
from jzero.update.on_host.disk.units import FileUnit

VERSION = 1
MAGIC = b"jzero disk\n"
EMPTY = -1  # the slot of a unit that has never been written
_HEAD = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True)
class Record:
    """One generation.

    Attributes:
      generation: how many steps were committed; 0 is a store without contents.
      units, identity: what the store was created with.
      slots: of each unit 0, 1, or EMPTY.
      digests: of each unit one `uint64` per block.
      extra: what the caller committed with it.
    """

    generation: int
    units: tuple[FileUnit, ...]
    identity: dict[str, Any]
    slots: tuple[int, ...]
    digests: tuple[np.ndarray, ...]
    extra: bytes = b""

    @classmethod
    def first(cls, units: Sequence[FileUnit], identity: dict[str, Any]) -> Record:
        """Generation 0."""
        return cls(0, tuple(units), identity, (EMPTY,) * len(units), (np.zeros(0, np.uint64),) * len(units))

    def next(self, written: Mapping[int, np.ndarray], extra: bytes) -> Record:
        """The generation after this one, in which some units were written; their digests by index."""
        slots, digests = list(self.slots), list(self.digests)
        for i, found in written.items():
            slots[i], digests[i] = self.other(i), found
        return dataclasses.replace(
            self, generation=self.generation + 1, slots=tuple(slots), digests=tuple(digests), extra=extra
        )

    def other(self, index: int) -> int:
        """The slot of a unit that this generation does not use."""
        return 1 if self.slots[index] == 0 else 0

    def encode(self) -> bytes:
        """A checksum, the length of the header, the header (JSON), the digests, and what the caller committed."""
        header = {
            "version": VERSION,
            "generation": self.generation,
            "identity": self.identity,
            "units": [[u.name, u.arrays] for u in self.units],
            "slots": self.slots,
            "blocks": [d.size for d in self.digests],
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        digests = np.concatenate([np.zeros(0, np.uint64), *self.digests]).astype("<u8").tobytes()
        body = b"".join([_HEAD.pack(len(text)), text, digests, self.extra])
        return MAGIC + xxhash.xxh3_128_digest(body) + body

    @classmethod
    def decode(cls, data: bytes, *, file: Path) -> Record | None:
        """The record that bytes hold; None if they are damaged. Raises ValueError for another version."""
        digest, body = data[len(MAGIC) : len(MAGIC) + 16], data[len(MAGIC) + 16 :]
        if not data.startswith(MAGIC) or xxhash.xxh3_128_digest(body) != digest:
            return None
        (length,) = _HEAD.unpack_from(body)
        header = json.loads(body[_HEAD.size : _HEAD.size + length])
        if header["version"] != VERSION:
            raise ValueError(
                f"{file} has version {header['version']}, and this jzero reads version {VERSION}."
            )
        ends = np.cumsum([0, *header["blocks"]])
        at = _HEAD.size + length
        digests = np.frombuffer(body, "<u8", int(ends[-1]), at).astype(np.uint64)
        units = tuple(
            FileUnit(name, tuple((tuple(s), d) for s, d in arrays)) for name, arrays in header["units"]
        )
        return cls(
            header["generation"],
            units,
            header["identity"],
            tuple(header["slots"]),
            tuple(digests[a:b] for a, b in itertools.pairwise(ends)),
            body[at + 8 * int(ends[-1]) :],
        )


def file_of(folder: Path, generation: int) -> Path:
    """Where the record of a generation lies."""
    return folder / f"record.{generation % 2}"


def write(folder: Path, record: Record) -> None:
    """Writes a record over that of the generation before the last, for good."""
    file = file_of(folder, record.generation)
    known = file.exists()
    durable.write(file, record.encode())
    if not known:
        durable.flush(folder)


def write_first(folder: Path, record: Record) -> None:
    """Writes the first record of a folder; the file appears only when it is complete."""
    temporary = folder / "record.tmp"
    durable.write(temporary, record.encode())
    durable.rename(temporary, file_of(folder, record.generation))


def settle(folder: Path) -> None:
    """Flushes the records; see [Note: why a commit is all or nothing]."""
    for number in (0, 1):
        if file_of(folder, number).exists():
            durable.flush(file_of(folder, number))
    durable.flush(folder)


def invalidate(folder: Path, generation: int) -> None:
    """Makes sure that a record which could not be written does not count, whatever of it is on the disk."""
    file = file_of(folder, generation)
    if file.exists():
        durable.write(file, b"")


def load(folder: Path) -> Record | None:
    """The newest whole record of a folder; None where there is no record at all.

    Raises:
      DamagedStore: none is whole.
      ValueError: one of them has another version.
    """
    files = [f for f in (file_of(folder, n) for n in (0, 1)) if f.exists()]
    whole = [r for r in (Record.decode(f.read_bytes(), file=f) for f in files) if r is not None]
    if files and not whole:
        raise DamagedStore(
            f"jzero: no record in {folder} is whole, so nothing says which of its files belong together. Go back "
            "to a snapshot or to a checkpoint, and remove the folder."
        )
    return max(whole, key=lambda r: r.generation, default=None)


def at(folder: Path, generation: int) -> Record | None:
    """The record of one generation; None where it is not there, or not whole."""
    file = file_of(folder, generation)
    found = Record.decode(file.read_bytes(), file=file) if file.exists() else None
    return found if found is not None and found.generation == generation else None


def plain(identity: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """An identity as it comes back from JSON.

    Raises:
      TypeError: it is not a mapping, or JSON cannot hold it.
    """
    try:
        if not isinstance(identity, Mapping):
            raise TypeError
        return json.loads(json.dumps(dict(identity), allow_nan=False))
    except (TypeError, ValueError):
        raise TypeError(f"{where}(identity={shown(identity)}): identity must be a mapping of JSON.") from None
