"""All 54 cells of Table 1 of the ZeRO paper, from compiled programs, to the table's rounding."""

from __future__ import annotations

import pytest
from scripts import load

pytestmark = pytest.mark.pod

table = load("make_paper_table")


@pytest.mark.default_cases("7.5B-64")
@pytest.mark.parametrize("n", table.DEVICES)
@pytest.mark.parametrize("model", table.PAPER)
def test_three_cells(model, n):
    text = table.PAGE.read_text()
    section = text.split(f"## {model}\n")[1].split("##")[0]
    row = next(line for line in section.splitlines() if line.startswith(f"| {n} |"))
    for stage, printed in zip(table.STAGES, table.PAPER[model][n], strict=True):
        compiled, estimated = table.cell(model, n, stage)
        assert table.agrees(compiled, printed), (compiled, printed)
        assert compiled == pytest.approx(estimated, rel=1e-6)
        shown = f"{compiled:.4g}" if compiled < 1e4 else f"{compiled:.0f}"
        assert f"{shown} ({printed})" in row, "the page is not up to date: python docs/make_paper_table.py"


def test_a_wrong_cell_is_seen():
    assert not table.agrees(31.4 * 1.01, "31.4")
    assert not table.agrees(119, "120")
    assert not table.agrees(1.891, "1.88")
