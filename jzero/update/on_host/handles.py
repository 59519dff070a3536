"""What stands in an optimizer state for arrays that live outside of the device.

[Note: the store lives as long as a state]
A handle has no leaves, so `jit` and tree functions pass it on; it does not change from step to step. The one leaf, the
stamp, holds the number of the store and the number of updates. It goes through programs as data, and tree structures do
not refer to a store. So all states of a kind, abstract ones too, share their programs, and jit, which keeps structures
as long as the process lives, keeps no arrays alive. Nodes (`Held`), which users hold, keep the store alive. A node that
JAX has made keeps all stores of its kind until its stamp is read, since the stamp may not be computed yet.

[Note: plain orbax]
Orbax would save the stamp, and nothing of what the handles stand for, without a word. It names leaves by the keys on
their path and refuses a key of a kind that it does not know; the stamp has one, whose text is the remedy.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.core.errors import human_bytes, short_dtype

_stores: weakref.WeakSet[Any] = weakref.WeakSet()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Handle:
    """A place holder for an array of the optimizer's state; it has no leaves.

    Attributes:
      shape: as the array is stored.
      dtype: its name.
      place: where the array is: "host" or "disk".
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


class StampKey:
    """The key of the stamp's path: see [Note: plain orbax]."""

    def __str__(self):
        return (
            ".stamp: this optimizer state holds handles, and its arrays live outside of the device. Save it with "
            "jzero.checkpoint.save(path, state)"
        )

    def __eq__(self, other):
        return isinstance(other, StampKey)

    def __hash__(self):
        return hash(StampKey)


@jax.tree_util.register_pytree_with_keys_class
class Held:
    """The masters of a state with handles: one leaf, the stamp, for masters and moments together.

    Attributes:
      stamp: `int32[2]`: the number of the store, and the generation: how many updates the store has made.
      masters: a `Handle` for each param, None where it has no master.
      total: bytes of all that the store keeps.
    """

    def __init__(self, stamp: Any, masters: Sequence[Handle | None], total: int, store: Any = None):
        self.stamp, self.masters, self.total = stamp, tuple(masters), total
        self._stores = () if store is None else (store,)
        if store is not None:
            store.kind = self.masters, total
            _stores.add(store)

    @property
    def generation(self) -> int:
        """How many updates the store has made to this state."""
        return int(np.asarray(self.stamp)[1])

    @property
    def store(self) -> Any:
        """Who keeps the arrays; None for an abstract state.

        Raises:
          RuntimeError: it is gone.
        """
        if isinstance(self.stamp, jax.ShapeDtypeStruct):
            return None
        number = int(np.asarray(self.stamp)[0])
        self._stores = tuple(s for s in self._stores if s.number == number)
        if not self._stores:
            raise RuntimeError(
                "jzero: the masters and moments of this state are gone: for a while no state that held them was alive. "
                "Keep the state itself, and not only its leaves and their structure."
            )
        return self._stores[0]

    def tree_flatten_with_keys(self):
        """For JAX."""
        return ((StampKey(), self.stamp),), (self.masters, self.total)

    def tree_flatten(self):
        """For JAX."""
        return (self.stamp,), (self.masters, self.total)

    @classmethod
    def tree_unflatten(cls, structure, children):
        """For JAX: see [Note: the store lives as long as a state]."""
        held = cls(children[0], *structure)
        if not isinstance(held.stamp, jax.ShapeDtypeStruct):
            held._stores = tuple(s for s in _stores if s.kind == structure)
        return held

    def __reduce__(self):
        """For `copy.deepcopy` and pickle: a copy of the store would count as the same one.

        Raises:
          TypeError: always.
        """
        raise TypeError(
            "jzero: this optimizer state cannot be copied or pickled: its masters and moments live outside of the "
            "device and are updated in place. jzero.checkpoint.save(path, state) keeps it as it is now; "
            "jzero.shard(state, stage=2), without an update outside of the program, makes a state of its own."
        )

    def __repr__(self):
        count = sum(m is not None for m in self.masters)
        try:
            at = self.generation
        except Exception:  # abstract, or traced
            at = "unknown"
        return f"<masters of {count} params and their moments: {human_bytes(self.total)}, generation {at}>"


def held_in(opt_state: Any) -> Held | None:
    """The node with the stamp of a state with handles, else None."""
    found = getattr(opt_state, "master", None)
    return found if isinstance(found, Held) else None
