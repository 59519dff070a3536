"""What export to safetensors and import from it share: names of dtypes and tensors, checksums.

The format has no checksum. `export` writes those of its files beside them, into `model.safetensors.xxh3`, as
`xxhsum -c` reads them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from jzero.checkpoint.checksums import Damage
from jzero.core.errors import check_kind

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
}  # fmt: skip


def renamed(name: str, names: Any) -> Any:
    """What a function or a mapping gives for a name; the name itself if `names` is None or has no entry for it."""
    return name if names is None else names(name) if callable(names) else names.get(name, name)


def check_names(names: Any, where: str) -> None:
    """Raises TypeError unless this is a function, a mapping or None."""
    kinds = (Callable, Mapping)
    check_kind(names, "names", kinds, "a function or a mapping of names", where=where, optional=True)


def check_texts(value: Any, name: str, where: str) -> tuple[str, ...]:
    """Several strings as a tuple; a single string is refused, since its letters would be taken for strings.

    Raises:
      TypeError: the value is a single string, or not a sequence of strings.
    """
    if isinstance(value, str):
        raise TypeError(f"{where}({name}={value!r}): {name} must be a list. Pass {name}=[{value!r}].")
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(isinstance(x, str) for x in value):
        raise TypeError(f"{where}({name}={value!r}): {name} must be a list of strings.")
    return tuple(value)


def checksum_file(file: Path) -> Path:
    """The file with the checksums of all files of an export to `file`."""
    return file.with_name(f"{file.name}.xxh3")


def checksum_text(digests: Mapping[Path, str]) -> str:
    """Checksums by file, as `xxhsum -H3` writes them, and that of these lines in a comment."""
    lines = "".join(f"XXH3_{digest}  {file.name}\n" for file, digest in digests.items())
    return f"{lines}# {xxhash.xxh3_64_hexdigest(lines.encode())}\n"


def files_of(sums: Path) -> list[str]:
    """The names of the files of an export, by its checksums; empty without them, or if they are damaged."""
    return list(_digests(sums) or ())


def damaged(files: Iterable[Path]) -> list[Damage]:
    """What is wrong with files that have checksums beside them; other files are not checked."""
    found, read = [], functools.cache(_digests)
    for file in files:
        for sums in sorted(file.parent.glob("*.safetensors.xxh3")):
            digests = read(sums)
            if digests is None:
                found.append(Damage(sums.name, "its own checksum is wrong"))
            elif file.name in digests:
                with open(file, "rb", buffering=0) as data:
                    digest = hashlib.file_digest(data, xxhash.xxh3_64).hexdigest()
                if digests[file.name] != digest:
                    found.append(Damage(file.name, f"differs from its checksum in {sums.name}"))
    return list(dict.fromkeys(found))


def _digests(sums: Path) -> dict[str, str] | None:
    """The checksums in a file, by name; None if that file is itself damaged."""
    lines, mark, own = sums.read_text(errors="replace").rpartition("# ") if sums.is_file() else ("", "", "")
    if not mark or own != xxhash.xxh3_64_hexdigest(lines.encode()) + "\n":
        return None
    pairs = [line.split("  ", 1) for line in lines.splitlines()]
    return {name: digest.removeprefix("XXH3_") for digest, name in pairs}
