"""Cuts an array into chunks, each of which holds the same part of every shard; handles arrays stored with padding.

[Note: padded chunks]
Chunks are cut from the stored array, which is longer than the array that the function sees. The function is computed on
the padding as well, where its values mean nothing. So the padding is overwritten with a neutral value: zero in a chunk
that is stored again, and in one that is reduced to a number a value that does not change the sum, maximum or minimum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jzero.layout.padding import padded, unpadded
from jzero.layout.specs import make_spec, shard_factor, spec_entries


@dataclasses.dataclass(frozen=True)
class Form:
    """How an array is stored.

    Attributes:
      shape: the shape that the function sees.
      stored: the same shape, or a larger one with zeros at the end of dims that nothing divides.
      layout: the layout of both, in device memory.
    """

    shape: tuple[int, ...]
    stored: tuple[int, ...]
    layout: NamedSharding

    @property
    def padded(self) -> bool:
        """True where the two shapes differ."""
        return self.shape != self.stored

    def pad(self, x):
        """An array in its stored shape."""
        if not self.padded:
            return x
        x = padded(jax.lax.with_sharding_constraint(x, self.layout), self.stored)
        return jax.lax.with_sharding_constraint(x, self.layout)

    def cut(self, x):
        """The reverse, of any view of the stored array."""
        x = jnp.reshape(x, self.stored)
        if not self.padded:
            return x
        x = unpadded(jax.lax.with_sharding_constraint(x, self.layout), self.shape)
        return jax.lax.with_sharding_constraint(x, self.layout)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Part of an array seen as `view`.

    Attributes:
      form: of the array.
      view: its stored shape, with a dim that n devices share as two: [n, size/n].
      dims: for each dim of the array, its dims in the view.
      start, shape: where the chunk begins in the view, and its shape.
      layout: of view and chunk, in device memory.
    """

    form: Form
    view: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    layout: NamedSharding

    @property
    def share(self) -> float:
        """The fraction of the array that the chunk holds."""
        return math.prod(self.shape) / math.prod(self.view)

    def of(self, x):
        """The chunk of an array in its stored shape."""
        end = [a + b for a, b in zip(self.start, self.shape, strict=True)]
        return jax.lax.slice(jnp.reshape(x, self.view), self.start, end)

    def filled(self, x, value):
        """A chunk with this value for all padding."""
        if not self.form.padded:
            return x
        inside = []
        for size, stored, dims in zip(self.form.shape, self.form.stored, self.dims, strict=True):
            if size != stored:
                inside.append(sum(self._index(d, dims) for d in dims) < size)
        inside = jax.lax.with_sharding_constraint(jnp.all(jnp.stack(inside), 0), self.layout)
        return jnp.where(inside, x, jnp.asarray(value, x.dtype))

    def _index(self, at: int, dims: tuple[int, ...]):
        """What a dim of the view adds to the index along its dim of the array."""
        steps = math.prod(self.view[d] for d in dims if d > at)
        return steps * (self.start[at] + jax.lax.broadcasted_iota(np.int32, self.shape, at))


def whole_of(chunks: Sequence[Chunk], values: Sequence[jax.Array]):
    """An array in its stored shape from all of its chunks."""
    whole = jnp.zeros(chunks[0].view, values[0].dtype)
    for x, chunk in zip(values, chunks, strict=True):
        whole = jax.lax.dynamic_update_slice(whole, x, chunk.start)
    return jnp.reshape(whole, chunks[0].form.stored)


def chunks_of(form: Form, size: int, limit: int) -> list[Chunk]:
    """The chunks of an array, in the order in which they lie in it.

    Args:
      form: its layout divides every dim of the stored shape.
      size: bytes of one device's shards of all arrays that are cut alike.
      limit: bytes of one chunk of them; a single value may have more.
    """
    mesh = form.layout.mesh
    assert isinstance(mesh, Mesh)
    view: list[int] = []
    entries: list[tuple[str, ...]] = []
    dims: list[tuple[int, ...]] = []
    for dim, axes in zip(form.stored, spec_entries(form.layout.spec, len(form.stored)), strict=True):
        n = shard_factor(make_spec([axes]), mesh)
        dims.append((len(view), len(view) + 1) if n > 1 else (len(view),))
        view += [n, dim // n] if n > 1 else [dim]
        entries += [axes, ()] if n > 1 else [()]
    local = [1 if axes else dim for dim, axes in zip(view, entries, strict=True)]
    per_value = size / math.prod(local)
    layout = NamedSharding(mesh, make_spec(entries), memory_kind="device")

    def boxes(at: int, start: tuple[int, ...], extent: tuple[int, ...]) -> Iterator[Chunk]:
        slice_bytes = math.prod(local[at + 1 :]) * per_value
        rest = view[at + 1 :]
        if at == len(view) or local[at] * slice_bytes <= limit:
            yield chunk((*start, *(0 for _ in view[at:])), (*extent, *view[at:]))
        elif entries[at]:
            yield from boxes(at + 1, (*start, 0), (*extent, view[at]))
        elif slice_bytes <= limit:
            count = math.ceil(view[at] / (limit // slice_bytes))
            length = math.ceil(view[at] / count)
            for i in range(0, view[at], length):
                yield chunk((*start, i, *(0 for _ in rest)), (*extent, min(length, view[at] - i), *rest))
        else:
            for i in range(view[at]):
                yield from boxes(at + 1, (*start, i), (*extent, 1))

    def chunk(start: tuple[int, ...], shape: tuple[int, ...]) -> Chunk:
        return Chunk(form, tuple(view), tuple(dims), start, shape, layout)

    return list(boxes(0, (), ()))
