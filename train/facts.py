"""What must be the same in every process of a run: flags, versions, code, data, checkpoints, what changes a program."""

from __future__ import annotations

import dataclasses
import os
import platform
import zlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import jzero
from train.checkpoints import saved_steps
from train.config import Config

PACKAGES = ("jax", "jaxlib", "numpy", "optax", "flax", "orbax-checkpoint", "grain")
OF_ONE = ("coordinator", "processes", "process_id", "start_timeout")  # of a process, or compared elsewhere
OF_PROGRAMS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_platforms")


def facts(config: Config, fingerprint: str) -> dict[str, Any]:
    """One line of text for each; `fingerprint` is that of the data."""
    flags = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    flags |= dataclasses.asdict(flags.pop("model")) | dataclasses.asdict(flags.pop("optim"))
    found = {f"--{name.replace('_', '-')}": str(x) for name, x in flags.items() if name not in OF_ONE}
    found |= {"data (checksum)": fingerprint, "the steps saved in --out": str(saved_steps(config.out))}
    found |= {"Python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    found["jzero and train (checksum)"] = code()
    found |= {name: str(getattr(jax.config, name)) for name in OF_PROGRAMS}
    found["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "not set")
    return found | {"number of GPUs in /dev": str(len(list(Path("/dev").glob("nvidia[0-9]*"))))}


def code() -> str:
    """A checksum of the sources that a run is made of."""
    total = 0
    for folder in (Path(jzero.__file__).parent, Path(__file__).parent):
        for file in sorted(folder.rglob("*.py")):
            total = zlib.crc32(
                file.read_bytes(), zlib.crc32(file.relative_to(folder).as_posix().encode(), total)
            )
    return f"{total:08x}"
