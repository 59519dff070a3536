"""The Flax modules of the catalogue have the params that are published."""

import pytest
from shapes import MODELS

from benchmarks.catalogue import ENTRIES, count


@pytest.mark.unit
@pytest.mark.parametrize("name", ENTRIES)
def test_a_module_has_as_many_params_as_are_published(name):
    assert count(name) == MODELS["gpt2" if name == "gpt2-small" else name][1]
