"""A cache on disk of programs compiled for pods, under a key of everything that decides what XLA makes.

An entry holds the program's text, its memory statistics and the shardings that XLA chose, never machine code. The
folder is `$JZERO_POD_CACHE`, else `jzero/pods` in the user's cache directory; `JZERO_POD_CACHE=off` disables it. An
entry that cannot be read is compiled again. Processes that want the same program compile it once: the others wait.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import gzip
import hashlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jzero.core.compile_only import MemoryStats, Program
from jzero.core.folder_lock import FolderLock

ENVIRONMENT = "JZERO_POD_CACHE"
MOST_BYTES = 1_000_000_000
FORMAT = 2
_LOCATION = re.compile(r'^(#loc\d*) = loc\("((?:[^"\\]|\\.)*)"(?:\(#loc\d*\))?\)$', re.MULTILINE)


def program_key(stablehlo: str, *rest: Any) -> str:
    """The name of an entry: a hash of the program and of whatever else decides the compiled one.

    Args:
      stablehlo: the program with debug information. The names of its operations count (XLA carries them into the
        compiled text, where jzero reads scopes from them), the files and lines that they came from do not.
      *rest: target, devices, options and versions, as things whose `repr` tells them apart.
    """
    names = dict(_LOCATION.findall(stablehlo))
    code = "\n".join(line for line in stablehlo.splitlines() if not line.startswith("#loc"))
    named = re.sub(r"#loc\d*", lambda m: names.get(m[0], ""), code)
    return hashlib.sha256(repr((FORMAT, named, rest)).encode()).hexdigest()


def folder() -> Path | None:
    """Where entries are, or None where the cache is off."""
    wanted = os.environ.get(ENVIRONMENT, "")
    if wanted.lower() == "off":
        return None
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(wanted) if wanted else Path(base) / "jzero" / "pods"


def get_or_compile(key: str, compile_program: Callable[[], Program]) -> Program:
    """The entry of `key`, or what `compile_program` returns, which is then stored.

    A folder that cannot be written, or an entry that cannot be read, costs a compile and nothing else.
    """
    where = folder()
    if where is None:
        return compile_program()
    entry = where / f"{key}.gz"
    found = _read(entry)
    if found is not None:
        return found
    lock = FolderLock(where, f"{key}.lock", where="jzero.pod")
    try:
        with contextlib.suppress(OSError):
            lock.acquire(wait=True)
        found = _read(entry)  # by another process, while this one waited
        if found is None:
            found = compile_program()
            with contextlib.suppress(OSError):
                _write(entry, found)
                _drop_oldest(where)
        return found
    finally:
        lock.release()


def _read(entry: Path) -> Program | None:
    try:
        fields = json.loads(gzip.decompress(entry.read_bytes()))
        shardings = [tuple(map(base64.b64decode, fields[name])) for name in ("in", "out")]
        program = Program(fields["text"], MemoryStats(**fields["memory"]), *shardings, buffers=fields["buffers"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error):
        return None
    with contextlib.suppress(OSError):
        os.utime(entry)  # the newest use; the oldest entries go first
    return program


def _write(entry: Path, program: Program) -> None:
    """In a file beside it, then renamed: a reader sees a whole entry or none."""
    fields = {
        "text": program.text,
        "memory": dataclasses.asdict(program.memory),
        "in": [base64.b64encode(x).decode() for x in program.in_shardings],
        "out": [base64.b64encode(x).decode() for x in program.out_shardings],
        "buffers": program.buffers,
    }
    data = gzip.compress(json.dumps(fields).encode(), compresslevel=3)
    with tempfile.NamedTemporaryFile(dir=entry.parent, suffix=".part", delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.replace(file.name, entry)
        except BaseException:
            os.unlink(file.name)
            raise


def _drop_oldest(where: Path) -> None:
    """Deletes the least recently used entries until the rest takes at most MOST_BYTES."""
    entries = sorted((p.stat().st_mtime, p.stat().st_size, p) for p in where.glob("*.gz"))
    excess = sum(size for _, size, _ in entries) - MOST_BYTES
    for _, size, entry in entries:
        if excess <= 0:
            break
        entry.unlink(missing_ok=True)
        excess -= size
