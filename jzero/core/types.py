"""Names of types that every package uses.

JAX's own classes declare less than every jaxpr has: the `AbstractValue` of a variable has no shape and no dtype. What
jzero reads of jaxprs is declared here instead, under the names of JAX's classes. These are protocols: for
annotations, not for `isinstance`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from jax.extend.core import Primitive

PyTree: TypeAlias = Any
"""A tree of JAX: any nesting of registered containers. Its leaves are arrays unless a docstring says otherwise."""


class PyTreeDef(Protocol):
    """The structure of a tree of JAX: what `jax.tree.structure` returns."""

    num_leaves: int

    def unflatten(self, leaves: Iterable[Any], /) -> PyTree:
        """A tree of this structure."""

    def flatten_up_to(self, tree: PyTree, /) -> list[Any]:
        """The subtrees of a tree at the leaves of this structure."""
        ...


class Shaped(Protocol):
    """What has the type of an array: an array of JAX or numpy, traced or not, or a `jax.ShapeDtypeStruct`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of every dim."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """The dtype, or that of random keys."""
        ...


class Aval(Shaped, Protocol):
    """The type of a value in a jaxpr, a `ShapedArray`."""

    ndim: int
    size: int


class Var(Protocol):
    """A variable of a jaxpr."""

    aval: Aval


class JaxprEqn(Protocol):
    """An equation of a jaxpr."""

    primitive: Primitive
    params: dict[str, Any]
    invars: Sequence[Var]  # or literals
    outvars: Sequence[Var]
    effects: Any
    source_info: Any
    ctx: Any


class Jaxpr(Protocol):
    """A traced function, open: its constants are arguments of their own."""

    constvars: Sequence[Var]
    invars: Sequence[Var]
    outvars: Sequence[Var]  # or literals
    eqns: Sequence[JaxprEqn]
