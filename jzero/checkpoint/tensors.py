"""What going out to safetensors and coming in from it have in common: dtypes and tensors by name, checksums.

The format has no checksum. `export` writes one beside each file, `model.safetensors.xxh3`: a line that `xxhsum -c`
reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from jzero.checkpoint.seal import Damage

BUFFER = 2**20

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
}  # fmt: skip


def renamed(name: str, names: Any) -> Any:
    """What a function or a mapping gives for a name; the name itself where there is neither, or no entry."""
    return name if names is None else names(name) if callable(names) else names.get(name, name)


def check_names(names: Any, where: str) -> None:
    """Raises TypeError for what is neither a function, nor a mapping, nor None."""
    if names is not None and not callable(names) and not isinstance(names, Mapping):
        raise TypeError(f"{where}: names is a function or a mapping of names, not {type(names).__name__}.")


def check_texts(value: Any, name: str, where: str) -> tuple[str, ...]:
    """Several texts; one text is refused, whose letters would be taken for texts.

    Raises:
      TypeError: one text, or what is no sequence of texts.
    """
    if isinstance(value, str):
        raise TypeError(f"{where}({name}={value!r}): {name} is a list. Pass {name}=[{value!r}].")
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(isinstance(x, str) for x in value):
        raise TypeError(f"{where}({name}={value!r}): {name} is a list of texts.")
    return tuple(value)


def checksum_file(file: Path) -> Path:
    """Where the checksum of a file lies."""
    return file.with_name(f"{file.name}.xxh3")


def checksum_line(digest: str, file: Path) -> str:
    """As `xxhsum -H3` writes it."""
    return f"XXH3_{digest}  {file.name}\n"


def damage(file: Path) -> list[Damage]:
    """What is wrong with a file that has a checksum beside it; nothing is known of one that has none."""
    beside = checksum_file(file)
    if not beside.is_file():
        return []
    digest = xxhash.xxh3_64()
    with open(file, "rb", buffering=0) as data:
        while block := data.read(BUFFER):
            digest.update(block)
    if beside.read_text(errors="replace") == checksum_line(digest.hexdigest(), file):
        return []
    return [Damage(file.name, f"differs from its checksum in {beside.name}")]
