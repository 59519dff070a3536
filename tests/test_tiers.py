"""The tiers: which cases are in the default one, what is said of those left out, progress, the nightly parts."""

from __future__ import annotations

import types

import conftest
import nightly
import progress
import pytest

pytestmark = pytest.mark.unit


class Item:
    """What pytest's hooks ask of a test."""

    def __init__(self, case: str, *marks):
        self.callspec, self.marks, self.originalname = types.SimpleNamespace(id=case), list(marks), "test_x"
        self.parent = types.SimpleNamespace(nodeid="tests/test_y.py")

    def get_closest_marker(self, name):
        return next((m for m in self.marks if m.name == name), None)

    def add_marker(self, decorator):
        self.marks.append(decorator.mark)


def config(*args):
    dropped = []
    hook = types.SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items))
    return types.SimpleNamespace(args=args, hook=hook, dropped=dropped)


def test_cases_that_are_not_named_are_nightly():
    named = pytest.mark.default_cases("2-True").mark
    items = [Item("2-True", named), Item("3-True", named), Item("3-True")]
    conftest.pytest_collection_modifyitems(config("tests"), items)
    assert [item.get_closest_marker("nightly") is not None for item in items] == [False, True, False]


def test_a_case_that_does_not_exist_is_an_error():
    named = pytest.mark.default_cases("2-True", "2-Ture").mark
    with pytest.raises(pytest.UsageError, match=r"(?s)do not exist:.*tests/test_y.py::test_x: \['2-Ture'\]"):
        conftest.pytest_collection_modifyitems(config("tests"), [Item("2-True", named)])
    conftest.pytest_collection_modifyitems(config("tests/test_y.py::test_x[2-True]"), [Item("2-True", named)])


def test_without_the_plugin_one_line_says_what_is_left_out_and_what_brings_it(monkeypatch):
    monkeypatch.setattr(conftest, "HAS_PLUGIN", False)
    compiles, other = Item("a", pytest.mark.pod.mark), Item("b")
    items, run = [compiles, other], config("tests")
    conftest.pytest_collection_modifyitems(run, items)
    assert (items, run.dropped) == ([other], [compiles])
    lines = []
    conftest.pytest_terminal_summary(types.SimpleNamespace(write_line=lambda text, **_: lines.append(text)))
    assert len(lines) == 1
    assert "compile for GPUs" in lines[0]
    assert '".[pod]"' in lines[0]


def test_progress_says_how_many_and_how_long():
    lines, seconds = [], [100]
    terminal = types.SimpleNamespace(isatty=False, write_line=lines.append)
    bar = progress.Progress(terminal, now=lambda: seconds[-1])
    bar.begin(4)
    for now, failed in ((119, False), (130, True)):
        seconds.append(now)
        bar.pytest_runtest_logreport(
            types.SimpleNamespace(when="teardown", failed=failed, nodeid="tests/a.py::b")
        )
    assert lines == [
        "  0%  0 of 4 tests, 0:00",
        " 25%  1 of 4 tests, 0:19, about 0:57 left",
        "FAILED tests/a.py::b",
        " 50%  2 of 4 tests, 1 failed, 0:30, about 0:30 left",
    ]


def test_every_test_file_is_in_a_nightly_part():
    parts = nightly.parts()
    files = [word for words in parts.values() for word in words if word.endswith(".py") and "/test_" in word]
    assert files == sorted(
        str(p.relative_to(nightly.ROOT)) for p in (nightly.ROOT / "tests").rglob("test_*.py")
    )
    assert list(parts)[-1] == "mutations"
    assert (
        nightly.counts("..\n2 failed, 210 passed, 3 skipped in 61.00s\n") == "2 failed, 210 passed, 3 skipped"
    )
