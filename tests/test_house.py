"""How the code is kept: what stands where, so that a new feature has a place to go."""

from __future__ import annotations

import ast
import collections
from pathlib import Path

import pytest

import jzero

HOUSE = Path(jzero.__file__).parent
FILES = sorted(HOUSE.rglob("*.py"))

pytestmark = pytest.mark.unit


def parsed(file):
    return ast.parse(file.read_text())


def test_few_entries_at_the_top():
    entries = [p.name for p in HOUSE.iterdir() if p.name != "__pycache__"]
    assert len(entries) <= 20
    assert {"sharding.py", "optim.py", "offload.py"} <= set(entries)


def test_every_package_opens_with_its_vocabulary():
    for package in (p for p in HOUSE.iterdir() if (p / "__init__.py").exists()):
        text = ast.get_docstring(parsed(package / "__init__.py")) or ""
        assert 4 <= len(text.splitlines()) <= 30, package.name


def test_only_core_touches_the_internals_of_jax():
    for file in FILES:
        if file.relative_to(HOUSE).parts[0] == "core":
            continue
        for node in ast.walk(parsed(file)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            inside = [n for n in names if n.startswith(("jax._src", "jax.extend", "jax.interpreters"))]
            assert not inside, file


def test_only_core_orders_values():
    for file in FILES:
        attributes = [n.attr for n in ast.walk(parsed(file)) if isinstance(n, ast.Attribute)]
        assert "optimization_barrier" not in attributes or file.parent.name == "core", file


def test_collectives_are_made_in_one_package():
    made = {"psum", "psum_scatter", "all_gather", "all_to_all", "ppermute"}
    for file in FILES:
        attributes = {n.attr for n in ast.walk(parsed(file)) if isinstance(n, ast.Attribute)}
        assert not made & attributes or file.parent.name == "comm", file


def test_no_class_name_twice():
    classes = collections.Counter(
        node.name for file in FILES for node in ast.walk(parsed(file)) if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in classes.items() if count > 1 and not name.startswith("_")]


def test_no_test_imports_another():
    """What several tests share is in tests/*.py."""
    for file in Path(__file__).parent.rglob("*.py"):
        names = [n.module or "" for n in ast.walk(parsed(file)) if isinstance(n, ast.ImportFrom)]
        names += [a.name for n in ast.walk(parsed(file)) if isinstance(n, ast.Import) for a in n.names]
        assert not [n for n in names if n.startswith("test_")], file
