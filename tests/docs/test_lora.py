"""The table of docs/lora.md is what its command prints."""

from __future__ import annotations

import pytest
from scripts import load

lora = load("make_lora")


@pytest.mark.pod
def test_the_table_is_that_of_the_command():
    shown = lora.TABLE.search(lora.PAGE.read_text(encoding="utf-8"))
    assert shown[0] == lora.table(), "the page is not up to date: python docs/make_lora.py"
