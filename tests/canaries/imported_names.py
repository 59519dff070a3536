"""Names of other packages in jzero's source: do they exist?"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from canaries import check, once

ROOT = Path(__file__).resolve().parents[2]


@once
def names_used() -> dict[str, set[str]]:
    """Every dotted name of another package in jzero's source, with the files that use it."""
    found: dict[str, set[str]] = {}
    for file in sorted((ROOT / "jzero").rglob("*.py")):
        where = str(file.relative_to(ROOT / "jzero"))
        tree = ast.parse(file.read_text())
        aliases: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for a in node.names:
                    aliases[a.asname or a.name.split(".")[0]] = a.name if a.asname else a.name.split(".")[0]
                    found.setdefault(a.name, set()).add(where)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for a in node.names:
                    aliases[a.asname or a.name] = f"{node.module}.{a.name}"
                    found.setdefault(f"{node.module}.{a.name}", set()).add(where)
        for node in ast.walk(tree):
            parts: list[str] = []
            while isinstance(node, ast.Attribute):
                parts.insert(0, node.attr)
                node = node.value
            if parts and isinstance(node, ast.Name) and node.id in aliases:
                found.setdefault(".".join((aliases[node.id], *parts)), set()).add(where)
    return found


def exists(dotted: str) -> bool:
    """True for a module, or an attribute of one, as far as its parts are modules or classes."""
    parts = dotted.split(".")
    value: Any = None
    for i, part in enumerate(parts):
        if value is not None and not inspect.ismodule(value) and not inspect.isclass(value):
            return True
        if inspect.isclass(value) and dataclasses.is_dataclass(value) and part in value.__dataclass_fields__:
            return True
        if value is not None and hasattr(value, part):
            value = getattr(value, part)
            continue
        try:
            value = importlib.import_module(".".join(parts[: i + 1]))
        except ImportError:
            return False
    return True


def absent(*prefixes: str, but: Sequence[str] = ()) -> str:
    """The names under these prefixes that are not there, with the files."""
    own = [n for n in names_used() if n.startswith(prefixes) and not n.startswith(tuple(but) or ("\0",))]
    if not own:
        return "jzero uses none of these names: the check is out of date"
    return ", ".join(f"no {n} ({', '.join(sorted(names_used()[n]))})" for n in sorted(own) if not exists(n))


PRIVATE = ("jax._src", "jax.extend", "jax.interpreters", "jaxlib")


@check("jzero/__init__.py")
def jzero_imports():
    """`import jzero`, its proof, its checkpoints and its compiles for GPUs load."""
    for name in ("jzero", "jzero.proof", "jzero.checkpoint", "jzero.deepspeed", "jzero.core.compile_only"):
        importlib.import_module(name)


@check("core/")
def private_jax_names():
    """The modules and names of jax._src, jax.extend, jax.interpreters and jaxlib that jzero/core imports exist."""
    return absent(*PRIVATE)


@check("all packages")
def public_jax_names():
    """The public names of jax that jzero uses exist."""
    return absent("jax.", but=PRIVATE)


@check("core/nnx_modules.py, flax/, activations/remat.py")
def flax_names():
    """The names of Flax (nnx, linen, core.lift) that jzero uses exist."""
    return absent("flax.")


@check("checkpoint/")
def orbax_names():
    """The names of orbax and tensorstore that jzero uses exist."""
    return absent("orbax.", "tensorstore.")


@check("optim.py, update/")
def optax_names():
    """The names of optax that jzero uses exist."""
    return absent("optax.")
