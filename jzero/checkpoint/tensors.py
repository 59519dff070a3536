"""What going out to safetensors and coming in from it have in common: dtypes by name, and other names for tensors."""

from __future__ import annotations

from typing import Any

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
}  # fmt: skip


def renamed(name: str, names: Any) -> Any:
    """What a function or a mapping gives for a name; the name itself where there is neither, or no entry."""
    return name if names is None else names(name) if callable(names) else names.get(name, name)
