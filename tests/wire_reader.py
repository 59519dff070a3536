"""A second reader of compiled programs, to hold jzero's against: what one device sends in one run of a program.

It shares nothing with `jzero.proof`, and knows less: no phases, no axes, no overlap. It walks the text from the entry,
multiplies by the trip counts of loops, takes every branch, and adds up rings: (n-1)/n of a tensor, twice that for an
all-reduce, all of it for a permutation. What it does not know it refuses.
"""

from __future__ import annotations

import math
import re

BITS = {"pred": 8, "bf16": 16}
LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
KINDS = {"all-gather": 1, "all-reduce": 2, "reduce-scatter": 1, "all-to-all": 1, "ragged-all-to-all": 1}


def sent(text: str) -> float:
    """Bytes that one device sends."""
    homes, entry = computations(text)
    devices = int((re.search(r"num_partitions=(\d+)", text) or [0, 1])[1])
    return of(homes, entry, devices)


def computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, and the name of the entry."""
    homes: dict[str, list[str]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line.endswith("{") and (line.startswith("%") or line.startswith("ENTRY")):
            name = line.split()[1 if line.startswith("ENTRY") else 0].lstrip("%")
            entry = name if line.startswith("ENTRY") else entry
            current = homes.setdefault(name, [])
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    return homes, entry


def of(homes: dict[str, list[str]], name: str, devices: int) -> float:
    """Bytes that one run of a computation sends."""
    rows = [m for line in homes[name] if (m := LINE.match(line))]
    results = {m[4].split(")")[0].split(",")[0].split()[-1].lstrip("%"): m[2] for m in rows if m[3].endswith("-done")}
    total = 0.0
    for m in rows:
        kind = m[3].removesuffix("-start")
        if kind in KINDS or kind == "collective-permute":
            total += wire(kind, results.get(m[1], m[2]) if m[3].endswith("-start") else m[2], m[4], devices)
        elif re.search(r"replica_groups=|source_target_pairs=", m[4]):
            raise ValueError(f"not known: {m[0][:120]}")
        times = 1
        if kind == "while":
            known = re.search(r'"known_trip_count":\{"n":"(\d+)"', m[4])
            times = int(known[1]) if known else math.nan
        for inner in called(m[4]):
            total += times * below if inner in homes and (below := of(homes, inner, devices)) else 0
    return total


def called(rest: str) -> list[str]:
    """Names of what an instruction runs; a reduction's sum of two numbers sends nothing."""
    roles = "body|condition|calls|to_apply|called_computations|branch_computations|true_computation|false_computation"
    found = re.findall(rf"\b(?:{roles})=(\{{[^}}]*\}}|%?[\w.\-]+)", rest)
    return [name for some in found for name in re.findall(r"[\w.\-]+", some)]


def wire(kind: str, result: str, rest: str, devices: int) -> float:
    """Bytes of one collective."""
    size = sum(nbytes(*found) for found in ARRAY.findall(result))
    if kind == "collective-permute":
        return size
    n = group(rest, devices)
    size *= n if kind == "reduce-scatter" else 1
    return KINDS[kind] * size * (n - 1) // n


def nbytes(dtype: str, dims: str) -> int:
    """Bytes of an array."""
    bits = BITS.get(dtype) or int(re.match(r"[a-z]+(\d+)", dtype)[1])
    return math.prod(int(d) for d in dims.split(",") if d) * bits // 8


def group(rest: str, devices: int) -> int:
    """Devices in a group."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=", rest):
        return int(iota[1].split(",")[-1])
    listed = re.search(r"replica_groups=\{(?:\{([\d,]*)\})?", rest)
    return len(listed[1].split(",")) if listed and listed[1] else devices
