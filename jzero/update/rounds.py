"""Matrices in rounds: pieces to their owners, the computation, and pieces of the results back.

[Note: rounds]
Matrices with the same computation and shapes, however they are split, are dealt out in rounds of one per device: their
pieces go to the owners, each owner computes, and the pieces of the results come back.
The matrices of a round are on their way while the round before it is computed, so at most two rounds are in memory.

[Note: what is left over]
Matrices that do not fill the last round of their kind share one round if that takes less than 0.9 of the FLOPs of one
round per kind. Each goes to the device with the least to do so far, and each device computes what it owns
(`lax.switch`). A row of the exchange is then as long as the pieces that the busiest owner gets.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jzero.comm.exchange import MatrixExchange, Pieces
from jzero.core.ordering import after
from jzero.layout.explicit import typed_mesh
from jzero.layout.padding import padded
from jzero.layout.specs import P, make_spec
from jzero.sharding import Plan
from jzero.update.matrices import Kind, Matrix

WORTH = 0.9  # one round of several kinds must take less than this part of the FLOPs of one per kind


@dataclasses.dataclass(frozen=True, eq=False)
class Round:
    """Matrices that are exchanged together.

    Attributes:
      owned: by device the matrices that it owns, each with its kind.
    """

    owned: list[list[tuple[Kind, Matrix]]]

    def kinds(self, device: int) -> tuple[Kind, ...]:
        """What a device computes."""
        return tuple(kind for kind, _ in self.owned[device])

    @property
    def matrices(self) -> list[Matrix]:
        """All of them."""
        return [matrix for own in self.owned for _, matrix in own]

    @property
    def programs(self) -> list[tuple[Kind, ...]]:
        """The different programs. If all devices that own a matrix run the same one, the others run it too."""
        found = list(dict.fromkeys(self.kinds(d) for d in range(len(self.owned))))
        some = [p for p in found if p]
        return some if len(some) == 1 else found

    def program_of(self, device: int) -> int:
        """The index in `programs` of the one that a device runs."""
        return self.programs.index(self.kinds(device)) if len(self.programs) > 1 else 0

    def places(self, device: int, which: str) -> dict[tuple[int, int], Slot]:
        """Where the values of a device's matrices are in its rows, by (matrix, value); `which`: "ins" or "outs"."""
        found: dict[tuple[int, int], Slot] = {}
        ends: dict[np.dtype, int] = {}
        for i, kind in enumerate(self.kinds(device)):
            for k, part in enumerate(getattr(kind, which)):
                if part is not None:
                    start = ends.get(part.dtype, 0)
                    found[i, k] = Slot(part.dtype, start, part.size)
                    ends[part.dtype] = start + part.size
        return found

    def widths(self, which: str) -> dict[np.dtype, int]:
        """By dtype the length of a row of the exchange."""
        found: dict[np.dtype, int] = {}
        for device in range(len(self.owned)):
            for place in self.places(device, which).values():
                found[place.dtype] = max(found.get(place.dtype, 0), place.start + place.size)
        return found


class Slot(NamedTuple):
    """Where a piece is in a row of the exchange of its dtype."""

    dtype: np.dtype
    start: int
    size: int


class Result(NamedTuple):
    """A result of a region on one matrix: pieces of it, one on every device, in rows of an exchange."""

    rows: Any
    device: int
    place: Slot


class Rounds:
    """Rounds on the values of an update; `in_order`: one after the other."""

    def __init__(
        self, exchange: MatrixExchange, env: dict[int, Any], avals: Sequence[Any], *, in_order: bool
    ):
        self.exchange, self.plan, self.axes, self.env = exchange, exchange.plan, exchange.axes, env
        self.avals, self.in_order = avals, in_order

    def __call__(self, rounds: Sequence[Round]) -> dict[tuple[Matrix, int], Result]:
        """The results, by matrix and number of the result."""
        received: list[Any] = []
        sent: list[Any] = []
        for i, now in enumerate(rounds):
            held: list[Any] = []
            if self.in_order:  # one round is under way while another is computed
                held = [*received[i - 1 : i], *sent[i - 2 : i - 1]] if i > 1 else received[:i]
            rows, held = self._received(now, held)
            if held:
                received[i - 1] = held[0]
            if len(held) > 1:
                sent[i - 2] = held[1]
            received.append(rows)
            if i:
                sent.append(self._computed(rounds[i - 1], received[i - 1]))
        sent.append(self._computed(rounds[-1], received[-1]))
        return {
            (matrix, k): Result(rows[place.dtype], device, place)
            for now, rows in zip(rounds, sent, strict=True)
            for device, own in enumerate(now.owned)
            for (i, k), place in now.places(device, "outs").items()
            for matrix in [own[i][1]]
        }

    def _received(self, now: Round, held: list[Any]) -> tuple[dict[np.dtype, Any], list[Any]]:
        """The pieces that every owner gets, by dtype, sent only once `held` is there; and `held`."""
        sources = {
            v: (p, m.dims[v]) for m in now.matrices for v, p in zip(m.region.ins, m.ins, strict=True) if p
        }
        arrays = [self._even(v, *of) for v, of in sources.items()]
        flat, tree = jax.tree.flatten(held)
        widths = now.widths("ins")

        def send(*operands):
            local, waiting = dict(zip(sources, operands, strict=False)), list(operands[len(sources) :])
            rows = list(self._rows(now, local, widths))
            if waiting:
                rows, waiting = after(rows, waiting)
            return [self.exchange(r) for r in rows], waiting

        specs = [make_spec(p.split) for p, _ in sources.values()]
        rows, flat = self._mapped(send, [*specs, *[P(self.axes)] * len(flat)])(*arrays, *flat)
        return dict(zip(widths, rows, strict=True)), tree.unflatten(flat)

    def _rows(self, now: Round, local: dict[int, Any], widths: dict[np.dtype, int]) -> Iterator[Any]:
        """By dtype, a row for every owner: this device's pieces of the matrices that the owner gets."""
        for dtype, width in widths.items():
            rows = []
            for device, own in enumerate(now.owned):
                row = [
                    jnp.reshape(layer(local[own[i][1].region.ins[k]], own[i][1], own[i][1].region.ins[k]), -1)
                    for (i, k), place in now.places(device, "ins").items()
                    if place.dtype == dtype
                ]
                rows.append(_filled(row, (width,), dtype))
            yield jnp.stack(rows)

    def _even(self, value: int, pieces: Pieces, dims: dict[int, int]) -> Any:
        """A value with a piece of equal size on every device."""
        x, aval, spec = self.env[value], self.avals[value], make_spec(pieces.split)
        rows = enumerate(zip(aval.shape, pieces.padded, strict=True))
        shape = tuple(s if d in dims else p for d, (s, p) in rows)
        if shape == aval.shape:
            return x
        return self.plan.constrain(padded(self.plan.constrain(x, spec), shape), spec)

    def _computed(self, now: Round, rows: dict[np.dtype, Any]) -> dict[np.dtype, Any]:
        """What the owners compute, sent back, by dtype."""
        pairs = [(v, p) for m in now.matrices for v, p in zip(m.region.ins, m.ins, strict=True)]
        common = list(dict.fromkeys(v for v, p in pairs if p is None))
        widths = now.widths("outs")

        def compute(*operands):
            received = dict(zip(rows, operands, strict=False))
            local = dict(zip(common, operands[len(rows) :], strict=True))
            index = jax.lax.axis_index(self.axes)
            programs = [
                functools.partial(self._program, now, p, received, local, index)
                for p in range(len(now.programs))
            ]
            if len(programs) == 1:
                outs = programs[0]()
            else:
                which = np.asarray([now.program_of(d) for d in range(self.exchange.devices)], np.int32)
                outs = jax.lax.switch(jnp.asarray(which)[index], programs)
            return [self.exchange(outs[dtype]) for dtype in widths]

        run = self._mapped(compute, [*[P(self.axes)] * len(rows), *[P()] * len(common)])
        return dict(zip(widths, run(*rows.values(), *(self.env[v] for v in common)), strict=True))

    def _program(
        self, now: Round, number: int, received, local: dict[int, Any], index: jax.Array
    ) -> dict[np.dtype, Any]:
        """What one program makes of its rows, as rows."""
        devices = [d for d in range(self.exchange.devices) if now.owned[d] and now.program_of(d) == number]
        rows: dict[np.dtype, list[Any]] = {dtype: [] for dtype in now.widths("outs")}
        for i, kind in enumerate(now.programs[number]):
            own = {d: now.owned[d][i][1] for d in devices}
            places, values = now.places(devices[0], "ins"), []
            for k, part in enumerate(kind.ins):
                if part is None:
                    values.append(self._common(own, k, local, index))
                else:
                    dtype, start, size = places[i, k]
                    got = jax.lax.slice_in_dim(received[dtype], start, start + size, axis=1)
                    pieces = {d: p for d, m in own.items() if (p := m.ins[k])}
                    values.append(self._by_owner(pieces, "joined", got, index))
            for k, (part, out) in enumerate(zip(kind.outs, kind.run(values), strict=True)):
                pieces = {d: m.outs[k] for d, m in own.items()}
                rows[part.dtype].append(self._by_owner(pieces, "rows", out, index))
        widths = now.widths("outs")
        return {t: _filled(row, (self.exchange.devices, widths[t]), t) for t, row in rows.items()}

    def _common(self, own: dict[int, Matrix], k: int, local: dict[int, Any], index: jax.Array) -> Any:
        """An operand that every device has whole, for the matrix that this device owns."""
        values = [layer(local[m.region.ins[k]], m, m.region.ins[k]) for m in own.values()]
        sources = {m.region.ins[k] for m in own.values()}
        if len(sources) == 1 and not next(iter(own.values())).dims[sources.pop()]:
            return values[0]
        return jax.lax.dynamic_index_in_dim(
            jnp.stack(values), self._choice(own, range(len(own)), index), keepdims=False
        )

    def _by_owner(self, pieces: dict[int, Pieces], what: str, x: jax.Array, index: jax.Array) -> jax.Array:
        """`Pieces.joined` or `Pieces.rows` of `x`, for the way in which this device's matrix is split."""
        ways = list(dict.fromkeys(pieces.values()))
        if len(ways) == 1:
            return getattr(ways[0], what)(x)
        which = self._choice(pieces, [ways.index(p) for p in pieces.values()], index)
        return jax.lax.select_n(which, *(getattr(p, what)(x) for p in ways))

    def _choice(self, devices: Iterable[int], numbers: Sequence[int], index: jax.Array) -> Any:
        """The number that belongs to this device; 0 where none does."""
        found = np.zeros(self.exchange.devices, np.int32)
        found[list(devices)] = numbers
        return jnp.asarray(found)[index]

    def _mapped(self, fn: Callable, in_specs: Sequence[PartitionSpec]) -> Callable:
        return mapped(self.plan, fn, in_specs, P(self.axes))


def _filled(parts: list[Any], shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Parts concatenated along the last dim, then zeros up to its size."""
    missing = shape[-1] - sum(p.shape[-1] for p in parts)
    rest = [jnp.zeros((*shape[:-1], missing), dtype)] if missing else []
    return jnp.concatenate([*parts, *rest], axis=-1)


def rounds(kinds: Sequence[Kind], devices: int) -> list[Round]:
    """Matrices dealt out to their owners: see the notes."""
    full: list[Round] = []
    rest: list[tuple[Kind, list[Matrix]]] = []
    for kind in sorted(kinds, key=lambda k: -k.flops):
        count = len(kind.matrices) // devices * devices
        full += [_round(kind, kind.matrices[i : i + devices], devices) for i in range(0, count, devices)]
        if kind.matrices[count:]:
            rest.append((kind, kind.matrices[count:]))
    mixed = balanced(rest, devices)
    longest = max(sum(kind.flops for kind in mixed.kinds(d)) for d in range(devices))
    if longest < WORTH * sum(kind.flops for kind, _ in rest):
        return [*full, mixed]
    return [*full, *(_round(kind, some, devices) for kind, some in rest)]


def _round(kind: Kind, matrices: Sequence[Matrix], devices: int) -> Round:
    return Round([[(kind, matrices[d])] if d < len(matrices) else [] for d in range(devices)])


def balanced(rest: Sequence[tuple[Kind, list[Matrix]]], devices: int) -> Round:
    """One round of matrices, each given to the device that has least to do."""
    load = [0.0] * devices
    owned: list[list[tuple[Kind, Matrix]]] = [[] for _ in range(devices)]
    for kind, matrices in rest:
        for matrix in matrices:
            owner = min(range(devices), key=load.__getitem__)
            load[owner] += kind.flops
            owned[owner].append((kind, matrix))
    return Round(owned)


def mapped(plan: Plan, fn: Callable, in_specs: Sequence[PartitionSpec], out_specs) -> Callable:
    """`jax.shard_map` over all axes: XLA puts no collective of its own into what only some devices compute."""
    mesh = typed_mesh(plan.array_mesh)
    return jax.shard_map(fn, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False)


def layer(x: jax.Array, matrix: Matrix, value: int) -> jax.Array:
    """One matrix, from the part of a stack that a device has; the dims that number matrices stay, with size 1."""
    for dim, cls in matrix.dims[value].items():
        x = jax.lax.slice_in_dim(x, matrix.at[cls], matrix.at[cls] + 1, axis=dim)
    return x
