"""How much of the time that collectives take runs beside arithmetic: a model of the compiled schedule, at stated rates.

[Note: what is modelled]
One stream computes, in the order of the schedule. An instruction takes as long as its matmuls need at the rate that
matmuls reach (a stated part of the data sheet's), or as long as writing its output and reading it once takes, whichever
is longer. An update in place writes only its slice, and what jaxlib 0.12 puts on a stream of its own (`fusion-start`)
takes no time. These times err on the short side, so the model rather understates what is hidden.

There are two links, one within a host and one between hosts. Each carries one collective at a time, at full rate, from
its start or as soon as the link is free. At a `-done` the program waits until that collective has finished. If XLA has
left a collective synchronous, the program waits for all of it.

A collective is *hidden* for the part of its time on the link during which the program computes. Collectives in flight
together queue for their link, so the same computation cannot hide two of them at once. The model has no latency and no
kernel launches, and every loop starts with free links. No GPU has timed it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import Mesh

from jzero.layout.topology import hosts_of
from jzero.proof.collectives import Site
from jzero.proof.fitting.rates import GPUS, Rates
from jzero.proof.hlo import Computation, Instruction, Module
from jzero.proof.places import computes, output_bytes
from jzero.proof.records import Overlap

UPDATE, COPIES = "dynamic-update-slice", ("bitcast", "copy", "convert", "reshape", "transpose")
Key = tuple[str, str]
"""A computation and an instruction in it."""
_DOT = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_CALL = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


@dataclasses.dataclass(frozen=True)
class Waits:
    """Of one execution of a collective, in seconds.

    Attributes:
      wire: that it takes.
      waits: of these, those in which the program waits.
    """

    wire: float
    waits: float

    @property
    def hidden(self) -> float:
        """The part of it in which the program computes."""
        return 1 - self.waits / self.wire if self.wire else 1.0


def rates_of_kind(device_kind: str) -> tuple[str, Rates] | None:
    """A GPU of the table and its rates, by the name that its devices have; None for other devices."""
    words = re.split(r"[^a-z0-9]+", device_kind.lower())
    return next(((name, rates) for name, rates in GPUS.items() if name.partition("-")[0] in words), None)


def waits_of(
    module: Module, sites: Iterable[Site], hosts: Sequence[int], rates: Rates
) -> tuple[dict[Key, Waits], float]:
    """What each collective takes, and how much of it the program waits; and what a whole step waits, in seconds.

    Args:
      module: a scheduled program.
      sites: its collectives.
      hosts: of each device, in the order of the groups.
      rates: of the machine.
    """
    found = _Timeline(module, sites, hosts, rates)
    return found.found, found.waited


def _behind_copies(body: Computation, i: Instruction) -> Instruction:
    while i.opcode in COPIES and i.operands[0] in body.instructions:
        i = body.instructions[i.operands[0]]
    return i


def _slice_bytes(home: Computation, i: Instruction) -> int:
    """What an update in place writes: the smaller of its slice and the array."""
    new = home.instructions.get(i.operands[1])
    return i.nbytes if new is None else min(new.nbytes, i.nbytes)


def key_of(site: Site) -> Key:
    """Of a collective."""
    return site.place.computation.name, site.name


class _Timeline:
    def __init__(self, module: Module, sites: Iterable[Site], hosts: Sequence[int], rates: Rates) -> None:
        self.module, self.hosts, self.rates = module, hosts, rates
        self.sites = dict[Key, tuple[Site, Instruction, Key]]()
        for s in sites:
            home, start = s.place.pair or (s.place.computation, s.instruction)
            self.sites[home.name, start.name] = s, home.done(start), key_of(s)
        self.found = dict[Key, Waits]()
        self.waited = self.run(module.computations[module.entry])[1]

    @functools.cache  # noqa: B019 - a timeline lives as long as one call
    def run(self, home: Computation) -> tuple[float, float]:
        """Seconds of one execution of a computation, and those of them in which it waits for collectives."""
        now, inside, free, ends = 0.0, 0.0, dict[bool, float](), dict[str, float]()
        sent, idle = list[tuple[float, float, Key]](), list[tuple[float, float]]()
        for i in home.schedule:
            until, each, times = now, (0.0, 0.0), 1
            if (home.name, i.name) in self.sites:
                site, done, key = self.sites[home.name, i.name]
                wire, between = self.wire(site)
                begin = max(now, free.get(between, 0.0))
                end = free[between] = begin + wire
                sent.append((begin, end, key))
                if site.asynchronous is False:
                    until = end
                else:
                    ends[done.name if done is not i else i.name] = end
            elif i.name in ends:
                until = ends.pop(i.name)
            elif i.opcode == "while":
                each, times = self.run(self.module.computations[i.callees("body")[0]]), i.trips or 1
            elif i.opcode in ("call", "conditional"):
                branches = (self.module.computations[c] for c in i.callees() if c in self.module.computations)
                each = max(map(self.run, branches), default=each)
            else:
                each = self.work(home, i), 0.0
            if until > now:
                idle.append((now, until))
            now, inside = max(now, until) + times * each[0], inside + times * each[1]
        if (last := max(ends.values(), default=now)) > now:  # whose done is in the next round of a loop
            idle.append((now, last))
            now = last
        for begin, end, key in sent:
            exposed = sum(max(0.0, min(end, b) - max(begin, a)) for a, b in idle)
            self.found[key] = Waits(end - begin, exposed)
        return now, inside + sum(b - a for a, b in idle)

    def wire(self, site: Site) -> tuple[float, bool]:
        """Seconds at a full link, and whether that is the one between hosts."""
        on = [{self.hosts[p] for p in group} for group in site.groups]
        leaving = max(map(len, on), default=1) > 1
        within = site.wire_bytes / self.rates.within_host
        if not leaving:
            return within, False
        groups = max(sum(h in some for some in on if len(some) > 1) for h in set(self.hosts))
        return max(within, groups * site.wire_bytes / self.rates.between_hosts), True

    def work(self, home: Computation, i: Instruction) -> float:
        """Seconds of arithmetic, or of the memory that it writes."""
        if not computes(home, i):
            return 0.0
        flops = self.flops(home, i) / (self.rates.flops * self.rates.reached)
        return max(flops, 2 * self.written(home, i) / self.rates.memory)

    def written(self, home: Computation, i: Instruction) -> int:
        """Bytes that an instruction writes in the time of the stream."""
        if i.opcode.endswith("-start"):
            return 0
        body = self.module.body(i)
        if body is None:
            return _slice_bytes(home, i) if i.opcode == UPDATE else output_bytes(home, i)
        roots = [_behind_copies(body, x) for x in body.outputs]
        return sum(_slice_bytes(body, x) if x.opcode == UPDATE else x.nbytes for x in roots)

    def flops(self, home: Computation, i: Instruction) -> int:
        """Of the matmuls in it."""
        contracted = None
        if i.opcode == "dot":
            contracted = _DOT.search(i.attrs)
        elif i.opcode == "custom-call" and i.operands:
            contracted = _CALL.search(i.attrs)
        elif (body := self.module.body(i)) is not None:
            return sum(self.flops(body, x) for x in body.schedule)
        if contracted is None or i.operands[0] not in home.instructions:
            return 0
        dims = home.instructions[i.operands[0]].shapes[0].dims
        each = math.prod(dims[int(d.strip(' "'))] for d in contracted[1].split(",") if d.strip(' "'))
        return 2 * each * i.shapes[0].size


def overlap_on(
    mesh: Mesh | None, module: Module, sites: Sequence[Site]
) -> tuple[Overlap | None, Mapping[Key, Waits]]:
    """What hides behind arithmetic, and what is waited for; nothing on devices whose rates are not known."""
    devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else []
    known = rates_of_kind(devices[0].device_kind) if devices else None
    if known is None:
        return None, {}
    hosts = [x.slice * len(devices) + x.host for x in hosts_of(devices)]
    waits, total = waits_of(module, sites, hosts, known[1])
    return _overlap_of(waits, total, sites, *known), waits


def _overlap_of(
    found: Mapping[Key, Waits], waited: float, sites: Iterable[Site], gpu: str, rates: Rates
) -> Overlap | None:
    """Of a whole step; None where nothing is sent."""
    rows = [(s, found[key_of(s)]) for s in sites]
    total = sum(s.wire_bytes * s.trips for s, _ in rows)
    if not total:
        return None
    hidden = sum(s.wire_bytes * s.trips * w.hidden for s, w in rows)
    said = (
        f"{gpu}: {rates.reached:g} x {rates.flops / 1e12:.0f} TFLOP/s, {rates.memory / 1e12:.3g} TB/s, links "
        f"{rates.within_host / 1e9:.0f} and {rates.between_hosts / 1e9:.0f} GB/s"
    )
    return Overlap(hidden / total, waited, said)
