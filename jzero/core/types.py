"""Names of types that every package uses."""

from typing import Any, TypeAlias

PyTree: TypeAlias = Any
"""A tree of JAX: any nesting of registered containers. Its leaves are arrays unless a docstring says otherwise."""
