"""The metrics that are saved with a step: numbers by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jzero.core.errors import check_kind


def numbers_of(metrics: Mapping[str, Any] | None, where: str) -> dict[str, float]:
    """Metrics as Python numbers.

    Raises:
      TypeError: it is not a mapping, a name is not a string, or a value is not one real number.
    """
    if metrics is None:
        return {}
    check_kind(metrics, "metrics", Mapping, "numbers by name, {'loss': 0.5}", where=where)
    for name in metrics:
        if not isinstance(name, str):
            raise TypeError(f"{where}: the name of a metric must be a string, not {name!r}.")
    return {name: _number(name, value, where) for name, value in metrics.items()}


def _number(name: str, value: Any, where: str) -> float:
    try:
        array = np.asarray(value)
        if array.dtype.kind in "biu":
            return array.item()
        if jnp.issubdtype(array.dtype, jnp.floating):
            return float(array.item())
    except (TypeError, ValueError):  # not an array, or several numbers
        pass
    raise TypeError(f"{where}: metrics[{name!r}] must be one real number, not {type(value).__name__} ({value!r:.40}).")
