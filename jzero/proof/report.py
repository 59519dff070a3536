"""`explain`: what a compiled step sends and holds, as a `Report` to compute with and a table to read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax
from jax.sharding import Mesh, NamedSharding

from jzero.core.errors import ProofError, counted
from jzero.core.traces import innermost
from jzero.layout.specs import whole_mesh
from jzero.proof import tables
from jzero.proof.activations import Activations, find_activations
from jzero.proof.arguments import GivenArgument, arguments_given
from jzero.proof.collectives import Site
from jzero.proof.groups import axes_of
from jzero.proof.hlo import parse
from jzero.proof.leaves import kinds_of, roles_of
from jzero.proof.models import check_plan_fits, other_trained_params
from jzero.proof.record import record_of
from jzero.proof.records import Collective, Memory, Overlap, Wire
from jzero.proof.timeline import Key, Waits, key_of, overlap_on
from jzero.proof.transfers import Transfer, find_transfers
from jzero.proof.unread import read, unknown_calls
from jzero.sharding import Plan, check_plan


@dataclasses.dataclass(frozen=True)
class Report:
    """What `explain` found; `print` shows it as a table.

    Attributes:
      collectives: the largest traffic first.
      transfers: what moves between pinned host memory and the device, in the order of the schedule: each with `to`
        (`device` or `host`), `bytes` of one execution, `trips`, `asynchronous`, `phase`.
      memory: bytes per device; None if the backend does not report it.
      wire: totals.
      devices: number of devices of the program.
      mesh_shape: axis sizes by name, None where neither the plan nor the program has a mesh.
      unknown_calls: targets of custom calls that jzero does not know to stay on one device, and how often
        each stands in the program; what they send is not counted.
      activations: bytes of one device that the forward pass saves for the backward pass in device memory (`saved`) and
        in host memory (`host`), and that are made again there (`recomputed`); None without a backward pass.
      overlap: how much of the wire hides behind arithmetic, by a model of the schedule at the rates of these GPUs; None
        on devices whose rates are not known, and where nothing is sent.
    """

    collectives: tuple[Collective, ...]
    transfers: tuple[Transfer, ...]
    memory: Memory | None
    wire: Wire
    devices: int
    mesh_shape: Mapping[str, int] | None
    activations: Activations | None = None
    unknown_calls: Mapping[str, int] = dataclasses.field(default_factory=dict)
    overlap: Overlap | None = None

    @property
    def is_lower_bound(self) -> bool:
        """True where a collective is in a loop whose trip count XLA does not know: it is counted once."""
        return any(0 in c.loops for c in self.collectives)

    @property
    def is_upper_bound(self) -> bool:
        """True where a collective is in a branch of a conditional: it is counted, whether or not a step takes it."""
        return any(c.in_branch for c in self.collectives)

    @property
    def pcie(self) -> dict[str, int]:
        """Bytes of one device over PCIe in a step, loops counted: `{"to_device": ..., "to_host": ...}`."""
        return {
            f"to_{to}": sum(t.total_bytes for t in self.transfers if t.to == to) for to in ("device", "host")
        }

    def __str__(self) -> str:
        return tables.render(self)


def explain(compiled: jax.stages.Compiled, plan: Plan | None = None) -> Report:
    """What XLA made of a step: each collective, its bytes and its place, and the memory per device.

    Args:
      compiled: `jax.jit(step).lower(*args).compile()` on any backend, or what `pod.compile` returns.
      plan: a `jzero.Plan`; adds multiples of Psi and the bytes of params and optimizer state. Its mesh names the axes.

    Returns:
      A `Report`.

    Raises:
      TypeError: `compiled` has no text of a compiled program, or `plan` is not a plan.
      ValueError: a plan of other params than the program's, or of another number of devices.
      ProofError: parts of the program that jzero cannot read, each by name: a collective, a notation of replica groups
        or a memory space that it does not know.

    Cost:
      No device memory. A program of 10 MB takes 1.6 s on one core, three quarters of it jax's `as_text`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> report = explain(jax.jit(lambda x: x * 2).lower(jnp.ones(8)).compile())
      >>> report.wire.total, report.memory.arguments
      (0, 32)
    """
    check_plan(plan, where="jzero.explain", optional=True)
    compiled = innermost(compiled, jax.stages.Compiled)
    module = parse(text_of(compiled))
    given, psi, by_kind = arguments_given(compiled), None, None
    if plan is not None:
        trains = module.has_backward
        check_plan_fits(compiled, given, plan, devices=module.partitions, trains=trains, where="jzero.explain")
        known = record_of(compiled)
        recorded, roles = known is not None and known.names(plan), roles_of(given, plan, known)
        by_kind = argument_bytes(given, kinds_of(roles, recorded=recorded))
        if recorded:
            others = sum(x.size for x, role in zip(given, roles, strict=True) if role.is_others_param)
        else:
            others = sum(other_trained_params(given, compiled, plan).values())
        psi = _psi_bytes(plan, others)
    mesh = _mesh(compiled, plan)
    mesh_shape = None if mesh is None else dict(mesh.shape)
    sites, failed = read(module)
    if failed:
        raise ProofError(
            f"jzero.explain: {counted(len(failed), 'part')} of this program cannot be read, so its bytes are not "
            "known: " + "; ".join(failed)
        )
    overlap, waits = overlap_on(mesh, module, sites)
    collectives = _grouped(sites, mesh_shape, module.entry, waits)
    transfers = find_transfers(module)
    return Report(
        collectives=collectives,
        transfers=transfers,
        memory=memory_of(compiled, given, by_kind),
        wire=_wire(collectives, psi),
        devices=module.partitions,
        mesh_shape=mesh_shape,
        activations=find_activations(module, transfers),
        unknown_calls=unknown_calls(module),
        overlap=overlap,
    )


def text_of(compiled: jax.stages.Compiled) -> str:
    """The text of a compiled program.

    Raises:
      TypeError: not a compiled program, or one without HLO text; says what to pass.
    """
    remedy = "Pass jax.jit(step).lower(*args).compile(), or what pod.compile(step, *args) returns."
    if not isinstance(compiled, jax.stages.Compiled):
        raise TypeError(f"jzero: needs a compiled program, got {type(compiled).__name__}.\n{remedy}")
    text = compiled.as_text()
    if not text or not text.startswith("HloModule"):
        raise TypeError(
            f"jzero: this compiled program has no HLO text (a backend that keeps none?).\n{remedy}"
        )
    return text


def _mesh(compiled: jax.stages.Compiled, plan: Plan | None) -> Mesh | None:
    """From the plan, else from the first NamedSharding of an argument or a result."""
    if plan is not None:
        return plan.mesh
    leaves = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return next((whole_mesh(s.mesh) for s in leaves if isinstance(s, NamedSharding)), None)


def _grouped(
    sites: Iterable[Site], mesh_shape: Mapping[str, int] | None, entry: str, waits: Mapping[Key, Waits]
) -> tuple[Collective, ...]:
    """Equal sites of one computation as one row, the largest traffic first."""
    rows: dict[tuple, list[Site]] = {}
    for s in sites:
        shown = (s.op, s.dtype, s.bytes, s.wire_bytes, s.group_size, s.loops, s.place.in_branch, s.phase, s.scope)
        key = (*shown, s.asynchronous, s.compute_ops > 0, s.sliced, s.tensors, s.computation, s.groups)
        rows.setdefault(key, []).append(s)
    found = []
    for same in rows.values():
        axes = axes_of(same[0].groups, mesh_shape) if mesh_shape else ()
        found.append(_collective(same, axes, entry, [waits[k] for k in map(key_of, same) if k in waits]))
    return tuple(sorted(found, key=lambda c: -c.total_wire_bytes))


def _collective(same: list[Site], axes: tuple[str, ...], entry: str, waits: Sequence[Waits]) -> Collective:
    s = same[0]
    return Collective(
        op=s.op, count=len(same), dtype=s.dtype, bytes=s.bytes, wire_bytes=s.wire_bytes, axes=axes,
        group_size=s.group_size, loops=s.loops, phase=s.phase, scope=s.scope, asynchronous=s.asynchronous,
        compute_ops=sum(x.compute_ops for x in same), compute_bytes=sum(x.compute_bytes for x in same),
        sliced=s.sliced, parts=s.tensors, computation="entry" if s.computation == entry else s.computation,
        names=tuple(x.name for x in same), in_branch=s.place.in_branch,
        hidden=sum(w.hidden for w in waits) / len(waits) if waits else None,
    )  # fmt: skip


def _psi_bytes(plan: Plan, others: int) -> int:
    """One Psi of all models that the step trains; params of another one count with the average itemsize of the plan's.

    `others`: elements of the params of other models.
    """
    devices = plan.batch_parts
    elements = sum(x.size for x in plan.layouts)
    return round(plan.param_bytes * (1 + others / elements) * (devices - 1) / devices)


def argument_bytes(given: Sequence[GivenArgument], kinds: Sequence[str]) -> dict[str, int]:
    """Device bytes of the arguments by kind (`params`, `opt_state`, `rest`), without those in host memory."""
    totals = {"params": 0, "opt_state": 0, "rest": 0}
    for x, kind in zip(given, kinds, strict=True):
        totals[kind] += 0 if x.on_host else x.held
    return totals


def _wire(collectives: Iterable[Collective], psi_bytes: int | None) -> Wire:
    by_op: dict[str, int] = {}
    by_axis: dict[str, int] = {}
    by_phase: dict[str, int] = {}
    for c in collectives:
        for table, key in ((by_op, c.op), (by_axis, "+".join(c.axes) or "?"), (by_phase, c.phase or "?")):
            table[key] = table.get(key, 0) + c.total_wire_bytes
    return Wire(by_op, by_axis, by_phase, psi_bytes)


def memory_of(
    compiled: jax.stages.Compiled, given: Sequence[GivenArgument] = (), by_kind: dict[str, int] | None = None
) -> Memory | None:
    """The memory of a program; None if the backend does not report it.

    `given`, `by_kind`: its arguments, and what `argument_bytes` returns for them.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    names = ("argument", "output", "alias", "temp")
    device = [getattr(stats, f"{n}_size_in_bytes", 0) for n in names]
    host = [getattr(stats, f"host_{n}_size_in_bytes", 0) for n in names]
    on_cpu = any(d.platform == "cpu" for x in given if x.sharding is not None for d in x.sharding.device_set)
    return Memory(
        arguments=device[0], outputs=device[1], aliased=device[2], temp=device[3],
        host_arguments=host[0], host_outputs=host[1], host_aliased=host[2], host_temp=host[3],
        peak=None if on_cpu else getattr(stats, "peak_memory_in_bytes", None) or None, **(by_kind or {}),
    )  # fmt: skip
