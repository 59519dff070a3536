"""The numbers by name that are saved with a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np


def numbers_of(metrics: Mapping[str, Any] | None, where: str) -> dict[str, float]:
    """Metrics as numbers of Python.

    Raises:
      TypeError: no mapping, a name that is not a text, a value that is not a number.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"{where}: metrics are numbers by name, {{'loss': 0.5}}, not {type(metrics).__name__}."
        )
    return {_name(name, where): _number(name, value, where) for name, value in metrics.items()}


def _name(name: Any, where: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{where}: the name of a metric is text, not {name!r}.")
    return name


def _number(name: str, value: Any, where: str) -> float:
    try:
        array = np.asarray(value)
        if array.size != 1 or not (array.dtype.kind in "biu" or jnp.issubdtype(array.dtype, jnp.floating)):
            raise TypeError("a metric is one real number")
        return array.reshape(()).item() if array.dtype.kind in "iub" else float(array.reshape(()))
    except (TypeError, ValueError):
        raise TypeError(
            f"{where}: metrics[{name!r}] must be one real number, not {type(value).__name__} ({value!r:.40})."
        ) from None
