"""An `nnx.jit` with compiler options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class NnxJit:
    """An `nnx.jit` with compiler options, which it does not take: compiled ahead for each type of arguments."""

    jitted: Any
    compiler_options: Mapping[str, Any]
    static: Callable[[int], Collection[int | str]]
    """Which arguments are static in a call with so many positional ones: positions, and names."""
    _compiled: dict[Any, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    def __call__(self, *args, **kwargs):
        """Compile for arguments of these types, unless that is done already, and run."""
        from flax import nnx

        static = self.static(len(args))
        taken = tuple(x for i, x in enumerate(args) if i not in static)
        named = {k: x for k, x in kwargs.items() if k not in static}
        fixed = tuple((k, *hashed(x)) for k, x in (*enumerate(args), *sorted(kwargs.items())) if k in static)
        graph, arrays = nnx.split((taken, named))
        leaves = jax.tree.leaves(arrays)
        types = tuple((np.shape(x), jax.dtypes.result_type(x), getattr(x, "sharding", None)) for x in leaves)
        key = graph, types, fixed
        if key not in self._compiled:
            lowered = self.jitted.lower(*args, **kwargs)
            self._compiled[key] = lowered.compile(compiler_options=self.compiler_options)
        return self._compiled[key](*taken, **named)  # the static ones are compiled in

    def __getattr__(self, name: str):
        if name in ("jitted", "compiler_options", "static"):  # not set yet: copying
            raise AttributeError(name)
        return getattr(self.jitted, name)


def hashed(x: Any) -> tuple[type, Any]:
    """A static argument as part of a key; what cannot be hashed is left to JAX, which refuses it."""
    try:
        hash(x)
    except TypeError:
        return type(x), None
    return type(x), x
