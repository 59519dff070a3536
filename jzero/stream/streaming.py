"""A function of arrays in host memory, evaluated so that a stated number of their bytes is on the device at once.

[Note: streaming]
XLA schedules copies as early as it can. A function that fetches the whole state, updates it and writes it back has all
of it on the device at once. So the function is divided into groups (`schedule.py`), and a barrier makes the fetches of
group i wait for what group i-2 wrote: while one group is updated, the one before it is written and the next one is
fetched. In the program compiled for an H200 a barrier over arrays in host memory costs nothing: it moves no bytes, and
the buffers stay in place.

[Note: two lanes]
The bus goes both ways at once, and XLA's scheduler, left alone, runs all writes of a group and then all fetches of the
next. So array n of group i+1 is fetched after array n-1 of group i has been written, and array n of group i is written
after array n-1 of group i+1 has been fetched: fetch n and write n are all that can run, and they run beside each other.
Of two chunks of one array the second is fetched before the first is written.
Where two groups together are above the bound, since one cannot be cut, the first is written before the next is fetched.

[Note: a result in the buffer of a gradient]
A result on the device that is made of chunks (the difference for a param without master) fills the buffer of a
gradient; otherwise there would be one more such array than without offload. A chunk of it is written as soon as it is
computed, so the gradient must be dead by then: everything that reads it is computed in the same group. A gradient that
other leaves read, or that is a result itself, keeps its buffer. So equal shapes and dtypes are not enough: layers look
alike.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.core import jaxprs
from jzero.core.graph import FlatFunction, on_chunk
from jzero.core.ordering import after, tied
from jzero.core.primitives import REDUCTIONS
from jzero.core.types import Shaped
from jzero.stream.chunks import Chunk, Form
from jzero.stream.placement import Placement
from jzero.stream.schedule import Excess, Group, Schedule


def stream(
    fn: Callable[..., Sequence[jax.Array]],
    args: Sequence[jax.Array],
    placements: Sequence[Placement],
    out_placements: Callable[[], Sequence[Placement]],
    *,
    in_flight_bytes: int,
    gate: Sequence[int] = (),
    on_excess: Callable[[list[Excess]], None] = lambda excess: None,
) -> list[jax.Array]:
    """The results of `fn`, with its host arguments fetched group by group and its host results written back.

    Args:
      fn: a function of flat arrays, all in device memory, to a flat list.
      args: its arguments; those with a placement in host memory lie there.
      placements: where they live.
      out_placements: where the results live; called once `fn` has been traced.
      in_flight_bytes: bytes of host arrays, of one device, that may be on the device at once.
      gate: arguments that must be there before the first fetch.
      on_excess: called with what does not fit, before anything is computed.

    Returns:
      The results, each in its placement. See [Note: streaming].
    """
    if args and not any(jaxprs.is_tracer(a) for a in args):
        run = functools.partial(_stream, fn, placements, out_placements, in_flight_bytes, gate, on_excess)
        return jax.jit(lambda *flat: run(flat))(*args)
    return _stream(fn, placements, out_placements, in_flight_bytes, gate, on_excess, args)


def schedule_of(
    fn: Callable[..., Sequence[jax.Array]],
    args: Sequence[Shaped],
    placements: Sequence[Placement],
    out_placements: Callable[[], Sequence[Placement]],
    in_flight_bytes: int,
) -> Schedule:
    """How `stream` divides a function; the arguments may be abstract."""
    graph = FlatFunction(fn, [_on_device(a, h) for a, h in zip(args, placements, strict=True)])
    return Schedule(graph, placements, out_placements(), in_flight_bytes)


def computed(
    schedule: Schedule, group: Group, known: Mapping[int, jax.Array], sources: Mapping[int, jax.Array]
) -> list[jax.Array]:
    """The results of one group, or their chunks, for values of what it reads; inside of a trace."""
    run = _Run(schedule, [known.get(n) for n in schedule.graph.ins], ())
    run.values.update(known)
    return run.computed(group, dict(sources))


def _stream(fn, placements, out_placements, in_flight_bytes, gate, on_excess, args) -> list[jax.Array]:
    schedule = schedule_of(fn, args, placements, out_placements, in_flight_bytes)
    if schedule.excess:
        on_excess(schedule.excess)
    return _Run(schedule, args, gate).results()


def _on_device(arg, placement: Placement):
    if placement.sharding is None:
        return arg
    return jax.ShapeDtypeStruct(np.shape(arg), arg.dtype, sharding=placement.on_device)


class _Run:
    """One evaluation: the values that are known, the host arrays as they are after the last write, and the ties."""

    def __init__(self, schedule: Schedule, args: Sequence[Any], gate: Sequence[int]):
        self.schedule, self.graph = schedule, schedule.graph
        self.values: dict[int, jax.Array] = dict(self.graph.known)
        self.host: dict[int, jax.Array] = {}
        for number, arg in zip(self.graph.ins, args, strict=True):
            (self.values if schedule.placements[number].sharding is None else self.host)[number] = arg
        self.gate = [self.graph.ins[i] for i in gate]
        reads = self.graph.reads(self.gate)
        self.readers = {s: {v for v in self.graph.outs if s in reads.get(v, ())} for s in self.gate}
        self.written: dict[int, jax.Array] = {}  # results of groups: in their placement, as far as chunks have come
        self.wrote: list[tuple[int, ...]] = []  # for every group that ran, its results
        self.filled: dict[int, int] = {}  # arguments whose buffer is filled, by chunks, with a result
        self.forms: dict[int, Form] = {}  # of results that are made of chunks
        self.padded: dict[tuple[int, tuple[int, ...]], jax.Array] = {}  # by stored shape

    def results(self) -> list[jax.Array]:
        """All results, each in its placement."""
        groups = [*self.schedule.first, *self.schedule.scalars, *self.schedule.groups]
        env = self._exchange(None, [], groups[0]) if groups else {}
        for group, later in itertools.zip_longest(groups, groups[1:]):
            outs = self.computed(group, env)
            env = self._exchange(group, outs, later)
            self.wrote.append(group.values)
        return [
            self._result(v, h) for v, h in zip(self.graph.outs, self.schedule.out_placements, strict=True)
        ]

    def _result(self, value: int, placement: Placement):
        if value in self.written:
            result, form = self.written[value], self.forms.get(value)
            shape = self.graph.avals[value].shape
            return form.cut(result) if form is not None and shape != form.stored else result.reshape(shape)
        if value in self.host:
            return self.host[value] if placement.sharding else self._fetch(value, None)
        return placement.take(self._evaluate(value, self.values))

    def computed(self, group: Group, env: dict[int, jax.Array]) -> list[jax.Array]:
        """The results of a group, or their chunks, on the device."""
        tie = None if group.sources else _Tie(self, 2)
        if group.chunk is None:
            return [self._evaluate(v, env, tie) for v in group.values]
        return [self._chunk(v, env, group.chunk, tie) for v in group.values]

    def _exchange(self, group: Group | None, outs: list[jax.Array], later: Group | None) -> dict[int, jax.Array]:
        """Write the results of one group and fetch the arguments of the next: see [Note: two lanes]."""
        values = group.values if group else ()
        both = [g.nbytes for g in (group, later) if g is not None]
        alone = len(both) > 1 and sum(both) > self.schedule.in_flight_bytes
        hosted = []
        for v, x in zip(values, outs, strict=True):
            if alone or self.schedule.placement_of(v).sharding is None:
                with jax.named_scope("jzero.write_back"):
                    self._write(v, x, group)
            else:
                hosted.append((v, x))
        sources = () if later is None else later.sources
        self._wait_for(sources, _Tie(self, 1))
        if alone and values:
            self._wait_for(sources, _Tie(self, 0, values))
        # within one array, a chunk is fetched before the previous chunk is written: otherwise XLA copies the array
        placements = [self.schedule.placement_of(v) for v in values]
        lag = int(any(h.replaces is not None and self.graph.ins[h.replaces] in sources for h in placements))
        env: dict[int, jax.Array] = {}
        for n in range(max(len(hosted), len(sources))):
            if n < len(sources):
                with jax.named_scope("jzero.fetch"):
                    if 0 <= n - 1 - lag < len(hosted):
                        self._wait_for(sources[n : n + 1], _Tie(self, 0, [hosted[n - 1 - lag][0]]))
                    env[sources[n]] = self._fetch(sources[n], later.chunk if later else None)
                    if sources[n] in self.schedule.resident:
                        self.values[sources[n]] = env[sources[n]]
            if n < len(hosted):
                value, out = hosted[n]
                with jax.named_scope("jzero.write_back"):
                    if 0 <= n - 1 + lag < len(sources):
                        before = sources[n - 1 + lag]
                        out, env[before] = tied(out, env[before])
                    self._write(value, out, group)
        return env

    def _wait_for(self, sources: Sequence[int], tie: _Tie) -> None:
        """Makes whole host arguments wait for the tie: a slice taken before the barrier would be fetched before it."""
        places = [(self.host, s) if s not in self.filled else (self.written, self.filled[s]) for s in sources]
        waiting = tie.after([store[key] for store, key in places])
        for (store, key), x in zip(places, waiting, strict=True):
            store[key] = x

    def _fetch(self, source: int, chunk: Chunk | None):
        """A host argument, or its chunk as it is now, on the device."""
        at = self.filled.get(source)
        x = self.host[source] if at is None else self.written[at]
        placement = self.schedule.placements[source]
        if chunk is None:
            return placement.fetch(x)
        return jax.device_put(chunk.of(self._viewed(x, chunk, placement)), chunk.layout)

    def _viewed(self, x, chunk: Chunk, placement: Placement):
        """A host array in the shape that chunks are cut from; pinned, since XLA might split it along another dim."""
        return jax.lax.with_sharding_constraint(jnp.reshape(x, chunk.view), placement.of(chunk.layout))

    def _evaluate(self, value: int, env: dict[int, jax.Array], tie: _Tie | None = None, *, keep: bool = False):
        """A whole value. Single numbers, and values that read no host argument, are kept for other groups.

        With a `tie`, the operations that begin here wait for it, and large results are kept only with `keep`.
        """
        begun: set[int] = set()
        for node in self.graph.needed(value, lambda v: v in env or v in self.values):
            operands = [env[i] if i in env else self.values[i] for i in node.ins]
            large = not self.graph.is_small(node.outs[0])
            if tie is not None and large and not begun.intersection(node.ins):
                operands = tie.after(operands)
            begun.update(node.outs if large else ())
            for out, result in zip(node.outs, node.run(operands), strict=True):
                everywhere = self.graph.is_small(out) or keep or not (self.schedule.reads.get(out) or tie)
                (self.values if everywhere else env)[out] = result
        return env[value] if value in env else self.values[value]

    def _chunk(self, value: int, env: dict[int, jax.Array], chunk: Chunk, tie: _Tie | None):
        """A chunk of a value, or the part of a single number that comes from that chunk."""
        if self.graph.is_small(value):
            node = self.graph.makers[value]
            reduce, _, neutral = REDUCTIONS[node.name]
            part = self._chunk(node.ins[0], env, chunk, tie)
            if self.graph.avals[node.ins[0]].shape != chunk.form.stored:
                part = chunk.filled(part, neutral(part.dtype))
            return reduce(part)

        def operand(v: int):
            if v not in env:
                at = self.filled.get(v)
                whole = self._stored(v, chunk.form, tie) if at is None else self.written[at]
                whole = whole if tie is None else tie.after([whole])[0]
                if self.graph.is_small(v):
                    return whole
                env[v] = chunk.of(whole)
            return env[v]

        def given(v: int) -> bool:
            return v in env or not self.schedule.made_by_chunks(v, chunk.form)

        for node in self.graph.needed(value, given):
            operands = [operand(i) for i in node.ins]
            if node.name == "pad":
                results = [chunk.filled(*operands)]
            elif node.name == "slice":
                results = operands
            else:
                results = on_chunk(node, operands, chunk.shape)
            env.update(zip(node.outs, results, strict=True))
        return operand(value)

    def _stored(self, value: int, form: Form, tie: _Tie | None):
        """A whole value that chunks are cut from, in its stored shape; computed once for all chunks."""
        if not form.padded or self.graph.avals[value].shape != form.shape:
            return self._evaluate(value, {}, tie, keep=True)
        key = value, form.stored  # one value may be stored padded (a master) and as it is (its param)
        if key not in self.padded:
            self.padded[key] = form.pad(self._evaluate(value, {}, tie, keep=True))
        return self.padded[key]

    def _write(self, value: int, out, group: Group | None) -> None:
        assert group is not None
        placement, chunk = self.schedule.placement_of(value), group.chunk
        if self.graph.is_small(value):
            if chunk is not None and value in self.values:
                out = REDUCTIONS[self.graph.makers[value].name][1](self.values[value], out)
            self.values[value] = out
        elif chunk is None:
            self.written[value] = placement.take(out)
        else:
            out = placement.take(jax.lax.with_sharding_constraint(out, chunk.layout), chunk.layout)
            self.forms[value] = chunk.form
            self.written[value] = jax.lax.dynamic_update_slice(self._buffer(value, group, chunk), out, chunk.start)

    def _buffer(self, value: int, group: Group, chunk: Chunk):
        """What the chunks of a result fill: the array that it replaces, a gradient of its type, or a new one.

        See [Note: a result in the buffer of a gradient].
        """
        if value in self.written:
            return self.written[value]
        placement, aval = self.schedule.placement_of(value), self.graph.avals[value]
        if placement.replaces is not None:
            source = self.graph.ins[placement.replaces]
            self.filled[source] = value
            return self._viewed(self.host[source], chunk, placement)
        for source in self.gate:
            same = self.graph.avals[source]
            alike = (same.shape, same.dtype) == (aval.shape, aval.dtype)
            dead = self.readers[source] <= set(group.values)
            if alike and dead and source in self.values and source not in self.filled:
                self.filled[source] = value
                return jnp.reshape(self._stored(source, chunk.form, None), chunk.view)
        new = jnp.zeros(chunk.view, aval.dtype)
        new = jax.lax.with_sharding_constraint(new, chunk.layout)
        return placement.take(new, chunk.layout)  # XLA makes that an allocation on the host


class _Tie:
    """Makes arrays wait for the results `values` to be written, or for the results of an earlier group.

    `back`: which one, 1 for the last group that ran. If fewer groups have run, the arrays wait for the gate.
    """

    def __init__(self, run: _Run, back: int, values: Sequence[int] = ()):
        self.run = run
        self.waits_for = values or (run.gate if len(run.wrote) < back else run.wrote[-back])

    def after(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """The same arrays, available only once what they wait for is."""
        if not self.waits_for or not arrays:
            return arrays
        run = self.run
        places = (run.written, run.host, run.values)
        stores = [next(store for store in places if v in store) for v in self.waits_for]
        others = [store[v] for store, v in zip(stores, self.waits_for, strict=True)]
        arrays, others = after(arrays, others)
        for store, v, other in zip(stores, self.waits_for, others, strict=True):
            store[v] = other  # both results are used, or XLA drops the barrier
        return arrays
