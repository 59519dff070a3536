"""Where an argument or a result of a streamed function lives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding

from jzero.layout.specs import divides, shard_factor


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where an argument or a result lives.

    Attributes:
      sharding: its layout in host memory; None: device memory, in any layout.
      replaces: of a result, the argument whose buffer it takes; None: a new one.
      itemsize: the least bytes that an element counts as, so that arrays of narrower dtypes are cut like wide ones.
    """

    sharding: NamedSharding | None = None
    replaces: int | None = None
    itemsize: int = 0

    @property
    def on_device(self) -> NamedSharding:
        """The same layout in device memory."""
        assert self.sharding is not None
        return self.sharding.with_memory_kind("device")

    def of(self, layout: NamedSharding) -> NamedSharding:
        """A layout in the memory of this placement."""
        kind = "device" if self.sharding is None else str(self.sharding.memory_kind)
        return layout.with_memory_kind(kind)

    def fetch(self, x):
        """An array from this placement, in device memory."""
        if self.divides(x.shape):
            return jax.device_put(x, self.on_device)
        x = jax.device_put(x, jax.memory.Space.Device)
        return jax.lax.with_sharding_constraint(x, self.on_device)

    def take(self, x, layout: NamedSharding | None = None):
        """An array from device memory, in this placement; `layout`: of a chunk of it, in device memory."""
        if self.sharding is None:
            return x
        layout = layout or self.on_device
        x = jax.lax.with_sharding_constraint(x, layout)  # a copy to the host alone does not pin a layout
        equal = divides(layout.spec, x.shape, self._mesh)
        return jax.device_put(x, self.of(layout) if equal else jax.memory.Space.Host)

    def shard_bytes(self, aval) -> int:
        """Bytes of one device's shard of an array in host memory; 0 for an array in device memory."""
        if self.sharding is None:
            return 0
        values = -(-aval.size // shard_factor(self.sharding.spec, self._mesh))
        return values * max(aval.dtype.itemsize, self.itemsize)

    def divides(self, shape: Sequence[int]) -> bool:
        """The layout cuts an array of this shape into equal pieces."""
        assert self.sharding is not None
        return divides(self.sharding.spec, shape, self._mesh)

    @property
    def _mesh(self) -> Mesh:
        assert self.sharding is not None
        assert isinstance(self.sharding.mesh, Mesh)
        return self.sharding.mesh


DEVICE = Placement()
