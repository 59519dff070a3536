"""Names of types that every package uses.

JAX's own classes promise less than every jaxpr has: the `AbstractValue` of a variable is without shape and dtype. So
what jzero reads of jaxprs is written down here, under the names that JAX's classes have. These are protocols: nothing is
an instance of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

PyTree: TypeAlias = Any
"""A tree of JAX: any nesting of registered containers. Its leaves are arrays unless a docstring says otherwise."""


class Shaped(Protocol):
    """What has the type of an array: an array of JAX or numpy, traced or not, or a `jax.ShapeDtypeStruct`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...


class Aval(Shaped, Protocol):
    """The type of a value in a jaxpr: a `ShapedArray`."""

    @property
    def ndim(self) -> int: ...


class Var(Protocol):
    """A variable of a jaxpr."""

    @property
    def aval(self) -> Aval: ...


Atom: TypeAlias = Var
"""A variable or a literal."""


class Primitive(Protocol):
    """An operation of JAX."""

    name: str
    multiple_results: bool

    def bind(self, *args: Any, **params: Any) -> Any: ...
    def get_bind_params(self, params: dict[str, Any]) -> dict[str, Any]: ...


class JaxprEqn(Protocol):
    """An equation of a jaxpr."""

    invars: Sequence[Atom]
    outvars: Sequence[Var]
    primitive: Primitive
    params: dict[str, Any]
    effects: Any
    source_info: Any
    ctx: Any

    def replace(self, **changes: Any) -> JaxprEqn: ...


class Jaxpr(Protocol):
    """A traced function, open: its constants are arguments of their own."""

    eqns: Sequence[JaxprEqn]
    invars: Sequence[Var]
    outvars: Sequence[Atom]
    constvars: Sequence[Var]


class ClosedJaxpr(Protocol):
    """A traced function with its constants."""

    jaxpr: Jaxpr
    consts: Sequence[Any]
