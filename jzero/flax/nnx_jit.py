"""An `nnx.jit` with compiler options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class NnxJit:
    """An `nnx.jit` with compiler options, which it does not take: compiled ahead for each type of arguments."""

    jitted: Any
    compiler_options: Mapping[str, Any]
    _compiled: dict[Any, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    def __call__(self, *args, **kwargs):
        """Compile for arguments of these types, unless that is done already, and run."""
        from flax import nnx

        graph, arrays = nnx.split((args, kwargs))
        leaves = jax.tree.leaves(arrays)
        types = tuple((np.shape(x), jax.dtypes.result_type(x), getattr(x, "sharding", None)) for x in leaves)
        key = graph, types
        if key not in self._compiled:
            lowered = self.jitted.lower(*args, **kwargs)
            self._compiled[key] = lowered.compile(compiler_options=self.compiler_options)
        return self._compiled[key](*args, **kwargs)

    def __getattr__(self, name: str):
        if name in ("jitted", "compiler_options"):  # not set yet: copying
            raise AttributeError(name)
        return getattr(self.jitted, name)
