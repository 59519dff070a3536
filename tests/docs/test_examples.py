"""The examples in jzero's docstrings, on eight devices."""

import doctest
import importlib
import pkgutil

import pytest

import jzero


def examples():
    names = [
        m.name for m in pkgutil.walk_packages(jzero.__path__, "jzero.") if not m.name.endswith("__main__")
    ]
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {}
    for name in names:
        for test in finder.find(importlib.import_module(name)):
            if test.examples:
                found[test.name] = test
    return found


EXAMPLES = examples()


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name):
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(EXAMPLES[name])
    assert result.attempted
    assert not result.failed


def test_all_are_found():
    assert {"jzero.flax.shard.shard", "jzero.checkpoint.saving.save", "jzero.optim.zero"} <= set(EXAMPLES)
