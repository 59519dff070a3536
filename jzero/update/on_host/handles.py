"""What stands in an optimizer state for arrays that live outside of the device.

[Note: the store lives as long as a state]
A handle has no leaves, so that `jit` and tree functions pass it on; what it says is the same from step to step. The one
leaf is the generation, a number that each update raises by one. The tree's structure knows the store by its number
alone: jit keeps structures for as long as the process lives, and would keep the arrays with them. Nodes, which users
hold, keep the store itself.

[Note: programs compiled for an abstract state]
The structure of an abstract state equals that of every state of its kind, or no program compiled for it could be run.
What such a program returns says nothing of its store: it is the only one of its kind, or unknown.

[Note: plain orbax]
Orbax would save the generation, and nothing of what the handles stand for, without a word. It names leaves by the keys
on their path and refuses a key of a kind that it does not know; the generation has one, whose text is the remedy.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.core.errors import human_bytes, short_dtype
from jzero.core.jaxprs import is_tracer

_stores: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
ABSTRACT = 0  # the number of no store: of a state that was never allocated


class StoreNumber:
    """A store in the structure of a tree; see [Note: programs compiled for an abstract state]."""

    __slots__ = ("value",)

    def __init__(self, value: int):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, StoreNumber) and (self.value == other.value or ABSTRACT in (self.value, other.value))

    def __hash__(self):
        return hash(StoreNumber)

    def __repr__(self):
        return f"<store {self.value}>"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Handle:
    """A place holder for an array of the optimizer's state; it has no leaves.

    Attributes:
      shape: as the array is stored.
      dtype: its name.
      place: where the array is: "host", or the file that holds it.
    """

    shape: tuple[int, ...]
    dtype: str
    place: str = "host"

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * np.dtype(jnp.dtype(self.dtype)).itemsize

    def __repr__(self):
        return f"<{short_dtype(jnp.dtype(self.dtype))}{list(self.shape)} on the {self.place}>"


class GenerationKey:
    """The key of the generation's path: see [Note: plain orbax]."""

    def __str__(self):
        return (
            ".generation: this optimizer state holds handles, and its arrays live outside of the device. Save it with "
            "jzero.checkpoint.save(path, state)"
        )

    def __eq__(self, other):
        return isinstance(other, GenerationKey)

    def __hash__(self):
        return hash(GenerationKey)


@jax.tree_util.register_pytree_with_keys_class
class Held:
    """The masters of a state with handles: one leaf, the generation, for masters and moments together.

    Attributes:
      generation: int32 scalar: how many updates the state has had.
      masters: a `Handle` for each param, None where it has no master.
      total: bytes of all that the store keeps.
    """

    def __init__(self, generation: Any, masters: Sequence[Handle | None], total: int, store: Any = None):
        self.generation, self.masters, self.total = generation, tuple(masters), total
        self._store = store
        self._number = StoreNumber(ABSTRACT if store is None else _number_of(store, (self.masters, total)))

    @property
    def store(self) -> Any:
        """Who keeps the arrays; None for an abstract state."""
        return self._store

    def tree_flatten_with_keys(self):
        """For JAX."""
        return ((GenerationKey(), self.generation),), (self.masters, self.total, self._number)

    def tree_flatten(self):
        """For JAX."""
        return (self.generation,), (self.masters, self.total, self._number)

    @classmethod
    def tree_unflatten(cls, structure, children):
        """For JAX: see [Note: the store lives as long as a state]."""
        masters, total, number = structure
        held = object.__new__(cls)
        held.generation, held.masters, held.total = children[0], masters, total
        value = number.value
        if isinstance(held.generation, jax.ShapeDtypeStruct):
            value = ABSTRACT
        elif value == ABSTRACT and isinstance(held.generation, jax.Array) and not is_tracer(held.generation):
            value = _only_one((masters, total))
        held._store, held._number = _stores.get(value), StoreNumber(value)
        return held

    @property
    def is_lost(self) -> bool:
        """True where the store is gone (no state that held it was alive for a while), or one of several."""
        return self._store is None and not isinstance(self.generation, jax.ShapeDtypeStruct)

    def __repr__(self):
        count = sum(m is not None for m in self.masters)
        try:
            at = int(self.generation)
        except Exception:  # abstract, or traced
            at = self.generation
        return f"<masters of {count} params and their moments: {human_bytes(self.total)}, generation {at}>"


def _number_of(store: Any, kind: Any) -> int:
    number = getattr(store, "number", None)
    if number is None:
        number, store.kind = next(_numbers), kind
        store.number = number
    _stores[number] = store
    return number


def _only_one(kind: Any) -> int:
    """The number of the store of this kind, if there is one and no other."""
    found = [number for number, store in _stores.items() if store.kind == kind]
    return found[0] if len(found) == 1 else ABSTRACT


def held_in(opt_state: Any) -> Held | None:
    """The node with the generation of a state with handles, else None."""
    found = getattr(opt_state, "master", None)
    return found if isinstance(found, Held) else None
