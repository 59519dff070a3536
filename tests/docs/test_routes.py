"""The table of docs/design.md that says who reduces which gradient."""

from __future__ import annotations

from scripts import load

routes = load("make_routes")


def test_the_table_is_what_the_step_does():
    assert routes.page() == routes.PAGE.read_text(), "run: python docs/make_routes.py --write"


def test_a_row_of_two_uses_is_right_for_both():
    row = routes.ROWS[0]
    for column in routes.COLUMNS.values():
        assert routes.cell(row, *column) == routes.cell(row._replace(kind=routes.LOOKUP), *column)


def test_the_ways_differ():
    """A version that reduces nothing where it is used has one way for all."""
    cells = {routes.cell(row, stage, True) for row in routes.ROWS for stage in (1, 2, 3)}
    assert {"update/shard", "use/shard", "use/whole first", "loop/whole first", "use/examples*"} <= cells
