"""`estimate`: bytes per device and on the wire in closed form, from a plan alone."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jzero.comm import comm_of
from jzero.comm.uses import GATHERS, Use, Uses
from jzero.comm.weights import ring
from jzero.core.errors import (
    check_int,
    check_kind,
    check_number,
    check_transformation,
    counted,
    human_bytes,
    nearest,
    table,
    warn,
)
from jzero.core.types import PyTree
from jzero.layout.blocks import blocks_of
from jzero.layout.describe import leaf_bytes
from jzero.layout.gathered import is_in_pieces
from jzero.layout.leaf_rule import Layout
from jzero.layout.specs import shard_factor, spec_axes
from jzero.offload import late_bytes
from jzero.optim import chain_of, init_shapes, unwrap, zero
from jzero.proof.host import host_bytes_of
from jzero.proof.network import seconds_of, what_crosses
from jzero.proof.transformer import Transformer, transformer_of
from jzero.sharding import HOST, Plan, check_plan
from jzero.update.masters import widen_abstract
from jzero.update.owners import exchanged

SHARE_SAID = 0.005  # of Psi: smaller differences get no line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes per device of a run, and what one step sends.

    Attributes:
      params: stored params in device memory.
      grads: reduced gradients there, of trained params; with accumulation the sum of them, in at least fp32.
      opt_state: optimizer state and masters in device memory; with `offload` what stays there: single numbers, keys.
      host: of one device in host memory: optimizer state and masters, `host_params` and `host_grads`. It is pinned,
        except what an update outside of the program keeps there. With `tier="disk"` the buffer's share counts in
        place of the state. With `delay=1` a copy of the params is there too.
      host_params, host_grads: with `Offload(params="host")` the params there, and their gradients, which live there
        during the step; with accumulation the gradients and the sum of them. An update outside of the program has the
        gradients there while it runs.
      updated: bytes of optimizer state and masters that an update outside of the program reads and writes in a step.
      disk: with `tier="disk"`, bytes of the files: two slots, each with all of `updated`.
      activations_host: block inputs of one device there, with a `model` that offloads them.
      in_flight: with `offload`, state from the host that is on the device at once: `plan.in_flight_bytes`, at most
        `host`.
      to_device, to_host: bytes of one device over PCIe in a step. State moves as the update of `tx` streams it: every
        byte once in each direction, and once more what a norm reads; without `tx` once. Params in host memory are
        fetched for each gather, and read and written by the update, which reads the gradients, written by the backward
        pass. Offloaded block inputs go and come back once per micro-batch.
      devices_per_process: devices of the mesh that the process with the most of them has; of a pod, those of a host.
      activations: what the forward pass saves in device memory for the backward pass; 0 without a `model`.
      recomputed: activations that the backward pass makes again instead; bytes written, not held.
      working: what is alive on top of that at the worst moment; 0 without a `model`. One block computed again or the
        logits, and where weights are gathered on use the largest of them (all, where they are kept) with its gradient.
      wire_by_axes: bytes that one device sends in a step, by mesh axes; rings assumed, both directions of a
        link count once.
      psi: bytes of all params, whole.
      n: devices that split the batch.
      mesh: the mesh of the plan.
      assumed: which optimizer state was counted.
      reasons: why `wire` is not the textbook's 2 Psi (3 at stage 3), each with its bytes; empty for params and state
        on different axes, which have other formulas.
    """

    params: int
    grads: int
    opt_state: int
    host: int = 0
    host_params: int = 0
    host_grads: int = 0
    updated: int = 0
    disk: int = 0
    in_flight: int = 0
    to_device: int = 0
    to_host: int = 0
    devices_per_process: int = 1
    activations: int = 0
    activations_host: int = 0
    recomputed: int = 0
    working: int = 0
    wire_by_axes: Mapping[str, int]
    psi: int
    n: int
    mesh: Mesh
    assumed: str
    reasons: tuple[tuple[str, int], ...] = ()

    @property
    def states(self) -> int:
        """Device bytes of the model states: params, gradients, optimizer state."""
        return self.params + self.grads + self.opt_state

    @property
    def total(self) -> int:
        """All device bytes: the model states, state in flight, and what a `model` says of activations."""
        return self.states + self.in_flight + self.activations + self.working

    @property
    def host_per_process(self) -> int:
        """Host memory of one process, in bytes. All of it is pinned unless the update runs outside of the program.

        JAX's limit per process has to allow what is pinned.
        """
        return (self.host + self.activations_host) * self.devices_per_process

    @property
    def host_per_node(self) -> int:
        """Host memory of one node, in bytes, where a node runs one process, as in a pod.

        With one process per GPU it is that of the node's processes together.
        """
        return self.host_per_process

    @property
    def disk_per_node(self) -> int:
        """Bytes of the files of one node, where a node runs one process."""
        return self.disk * self.devices_per_process

    def update_seconds(self, *, pcie: float, memory: float, disk: float) -> float:
        """How long an update outside of the program takes, its copies, arithmetic and files side by side.

        Args:
          pcie: bytes per second of one device, in each direction: gradients come, as many bytes of params go.
          memory: of a node's host memory, reads and writes together: state, gradients and params once each way.
          disk: of a node's disks, reads and writes together.

        Raises:
          TypeError, ValueError: a bandwidth that is not a number above 0.
        """
        _check_bandwidths("update_seconds", pcie=pcie, memory=memory, disk=disk)
        node, files = self.devices_per_process, self.updated if self.disk else 0
        touched = 2 * (self.updated + self.host_grads)
        return max(self.host_grads / pcie, node * touched / memory, node * 2 * files / disk) if self.updated else 0.0

    @property
    def wire(self) -> int:
        """Bytes that one device sends in a step, over all axes."""
        return sum(self.wire_by_axes.values())

    @property
    def wire_psi(self) -> float:
        """`wire` in units of Psi: (N-1)/N x the bytes of all params, N the devices that split the batch."""
        return self.wire / self._unit if self._unit else 0.0

    @property
    def _unit(self) -> float:
        return self.psi * (self.n - 1) / self.n

    def network(self, *, devices_per_host: int | None = None) -> str:
        """A table of what stays inside of a host and what crosses the network.

        One row per axis of the mesh: its size, how many hosts (and slices) a group of devices along it spans, and
        whether its collectives stay within a host, cross between hosts of a slice, or cross between slices. Then one
        row per set of axes that the step sends over, with the bytes that a device sends in a step and those that leave
        a host: a ring over several hosts leaves each of them once, with the bytes that one device sends.

        Args:
          devices_per_host: as in `jzero.mesh`.

        Raises:
          TypeError, ValueError: `devices_per_host`, as in `jzero.mesh`.

        Example:
          >>> import jax, jzero
          >>> plan = jzero.make_plan({"w": jax.ShapeDtypeStruct((64, 64), "bfloat16")}, stage=3)
          >>> print(jzero.estimate(plan).network().splitlines()[0])
          {'data': 8} over 1 host x 8 devices: cpu
        """
        return what_crosses(self.mesh, self.wire_by_axes, devices_per_host=devices_per_host)

    def wire_seconds(
        self, *, within_host: float, between_hosts: float, devices_per_host: int | None = None
    ) -> float:
        """How long a step's collectives take at full links, one after the other and nothing beside them.

        A collective whose groups span hosts takes as long as the slower of its links. Latency is not in it, nor the
        time in which codes are made and read, so small messages and many devices take longer.

        Args:
          within_host: bytes per second that one device sends to others of its host, in one direction (NVLink).
          between_hosts: bytes per second that a host sends to others, in one direction (all of its network cards).
          devices_per_host: as in `jzero.mesh`.

        Raises:
          TypeError, ValueError: `devices_per_host`, as in `jzero.mesh`; a bandwidth that is not a number above 0.
        """
        _check_bandwidths("wire_seconds", within_host=within_host, between_hosts=between_hosts)
        return seconds_of(
            self.mesh, self.wire_by_axes, within_host, between_hosts, devices_per_host=devices_per_host
        )

    def __str__(self) -> str:
        always = ("params", "grads", "opt_state", "total")
        parts = ("params", "grads", "opt_state", "in_flight", "activations", "working", "total", "recomputed")
        rows = [(k, human_bytes(getattr(self, k))) for k in parts if k in always or getattr(self, k)]
        if self.host or self.activations_host:
            on_host = {
                "host": self.host, "  params": self.host_params, "  grads": self.host_grads,
                "activations on the host": self.activations_host,
            }  # fmt: skip
            rows += [(name, human_bytes(size)) for name, size in on_host.items() if size]
            each = f"{human_bytes(self.host_per_process)} ({counted(self.devices_per_process, 'device')})"
            rows += [("  per process", each), ("  per node", human_bytes(self.host_per_node))]
            if self.disk:
                rows += [("disk, two slots", human_bytes(self.disk)), ("  per node", human_bytes(self.disk_per_node))]
                rows += [("disk / step", f"{human_bytes(self.updated)} read, {human_bytes(self.updated)} written")]
            moved = f"{human_bytes(self.to_device)} to device, {human_bytes(self.to_host)} to host"
            rows.append(("pcie / step", moved))
        rows.append(("wire / step", f"{human_bytes(self.wire)} ({self.wire_psi:.2f} Psi)"))
        rows += [(f"  {why}", f"{size / self._unit:+.2f} Psi") for why, size in self.reasons]
        if len(self.wire_by_axes) > 1:
            rows += [(f"  over {axes}", human_bytes(size)) for axes, size in self.wire_by_axes.items()]
        return table(["bytes per device", self.assumed], rows)


def _check_bandwidths(method: str, **bandwidths: float) -> None:
    rule = "a number of bytes per second above 0"
    for name, value in bandwidths.items():
        check_number(value, name, rule, lambda x: x > 0, where=f"jzero.Estimate.{method}")


def estimate(
    plan: Plan,
    *,
    tx: optax.GradientTransformation | None = None,
    accumulate: int | None = None,
    model: Mapping[str, Any] | Transformer | None = None,
    uses: Mapping[str, Sequence[str | Use]] | None = None,
) -> Estimate:
    """Bytes per device and wire bytes of a run, in closed form.

    Args:
      plan: from `make_plan`, or `plan_of(state)`; any stage, any mesh.
      tx: the optimizer, wrapped or plain; its state is counted leaf by leaf from its own shapes. None: two
        moments in the master dtype for every param, as Adam keeps.
      accumulate: micro-batches in a step. None: as many as `param_uses` has found, or 1.
      model: the sizes of a transformer, to count activations as well; without it the model states alone. A mapping
        with `layers`, `width` (features of the residual stream), `heads`, `seq` (tokens in a sequence), `batch=1` (one
        device's sequences in a micro-batch), `vocab=0` (rows of the logits; 0 leaves them out), `ffn=4 * width`
        (features inside of the MLP) and `dtype="bfloat16"` (of the activations). `remat=True`: a block's input is saved
        and the block is computed again in the backward pass; False: all that the backward pass reads is saved.
        `flash=False`: True if attention scores are never stored whole. `partition=1`: devices over which a saved input
        is split, and `offload=False`: True if it waits in host memory, as `jzero.remat(Block, plan, partition=,
        offload=)` does it. `tiled_loss=False`: True where the loss is `jzero.tiled_loss`.
        `mlp_tiles=1`: tiles in which `jzero.tiled` runs the MLP.
      uses: by name of a param (as `plan.describe()` has it), what the model does with it, once for each use:
        `jzero.param_uses(step, state, batch)` reads it from the step. A plan knows shapes and not uses: without it a
        param counts as one matmul in its own dtype. By hand: `"matmul"`, `"lookup"`, `"loss"` for the head of a
        `jzero.tiled_loss`, or `"kept"` for what else the backward pass does not read. A tied embedding,
        `{"['embed']['embedding']": ("lookup", "matmul")}`, is reduced twice, but once at stage 1 and at stage 2 with a
        single bucket; it is gathered three times at stage 3. The gradient of a bf16 param that is used in fp32 is
        reduced in fp32, and that of an fp32 param used in bf16 in bf16.

    Returns:
      An `Estimate`; printing it gives a table.

    Raises:
      TypeError: `plan` is not a plan, `tx` not an optax transformation, `accumulate` not an integer, `uses` or `model`
        not a mapping; or `model` lacks a size or has one that is unknown or of another type.
      ValueError: `accumulate` or a size is below 1; `partition` or `offload` is passed with `remat=False`; `uses` names
        a param that is not in the plan, or an unknown kind of use.

    Cost:
      Memory per leaf of B bytes: B over the devices that its layout names; with accumulation gradients are
      summed in at least fp32. Wire per leaf: reduce-scatter and all-gather (n-1)/n B each, all-reduce
      2 (n-1)/n B. Stages 1 and 2: one reduce-scatter, one all-gather. Stage 3: two all-gathers (one with
      `reshard_after_forward=False`) and one reduce-scatter, each per micro-batch. With replicas the shard of a gradient
      is all-reduced among them.
      PCIe with `offload`: the bytes of every host leaf on the device, once in each direction. With params there, of B
      bytes each: B for each gather, once more for the update, and the gradients' bytes.

    Example:
      >>> import jax, jzero
      >>> plan = jzero.make_plan({"w": jax.ShapeDtypeStruct((1024, 1024), "bfloat16")}, stage=2)
      >>> jzero.estimate(plan).params
      2097152

    References:
      Rajbhandari et al., ZeRO (arXiv:1910.02054), sections 5 and 7.
    """
    check_plan(plan, where="jzero.estimate")
    if tx is not None:
        check_transformation(tx, where="jzero.estimate")
    sizes = transformer_of(model, where="jzero.estimate")
    known = checked_uses(uses, plan, where="jzero.estimate")
    accumulate = known.micro_batches if accumulate is None else accumulate
    check_int(accumulate, "accumulate", where="jzero.estimate", low=1)
    return estimate_with(OptimizerBytes.of(plan, tx), plan, known, sizes, accumulate)


@dataclasses.dataclass(frozen=True)
class OptimizerBytes:
    """What does not depend on the model, which takes a trace of the optimizer to know.

    Attributes:
      tx: the optimizer; None for Adam.
      state, away: bytes of one device's state on the device, and of what lives elsewhere.
      assumed: which state was counted.
      extra: what its matrices cost on the wire, by mesh axes.
    """

    tx: optax.GradientTransformation | None
    state: int
    away: int
    assumed: str
    extra: Mapping[tuple[str, ...], float]

    @classmethod
    def of(cls, plan: Plan, tx: optax.GradientTransformation | None) -> OptimizerBytes:
        """Those of a plan."""
        return cls(tx, *(_adam_bytes(plan) if tx is None else _state_bytes(plan, tx)), _exchanged(plan, tx))


def estimate_with(
    optimizer: OptimizerBytes, plan: Plan, known: Uses, sizes: Transformer | None, accumulate: int
) -> Estimate:
    """`estimate` of arguments that are checked, for a plan whose optimizer has been counted."""
    tx, state, away, extra = optimizer.tx, optimizer.state, optimizer.away, optimizer.extra
    moved = 0 if sizes is None else accumulate * sizes.host
    on_host = host_bytes_of(plan, tx, away, accumulate=accumulate, uses=known)
    here = [x for x in plan.layouts if not plan.lives_on_host(x)]
    counts = collections.Counter(d.process_index for d in plan.mesh.devices.flat)
    config, updated = plan.config, away if plan.config.updates_outside else 0
    options = config.offload_options
    host = options.buffer // max(counts.values()) if options is not None and config.in_files else away
    wire = comm_of(plan).wire_by_axes(accumulate=accumulate, uses=known, in_each=known.reduced_in_each, extra=extra)
    return Estimate(
        params=sum(x.nbytes // shard_factor(x.stored, plan.mesh) for x in here),
        grads=sum(_grad_bytes(x, plan, accumulate, known.reduced_in_each) for x in here if x.frozen is None),
        opt_state=state,
        host=host + on_host.params + on_host.grads + late_bytes(plan),
        host_params=on_host.params,
        host_grads=on_host.grads,
        updated=updated,
        disk=2 * updated if config.in_files else 0,
        in_flight=min(plan.in_flight_bytes, away) if config.streams else 0,
        to_device=on_host.to_device + moved,
        to_host=on_host.to_host + moved,
        devices_per_process=max(counts.values()),
        activations=0 if sizes is None else sizes.saved,
        activations_host=0 if sizes is None else sizes.host,
        recomputed=0 if sizes is None else sizes.recomputed,
        working=0 if sizes is None else sizes.working_with(_head_bytes(plan, sizes)) + gathered_working(plan),
        wire_by_axes=wire,
        reasons=_reasons(plan, known, extra, sum(wire.values())),
        psi=plan.param_bytes,
        n=plan.batch_parts,
        mesh=plan.mesh,
        assumed=optimizer.assumed,
    )


def checked_uses(uses: Mapping[str, Sequence[str | Use]] | None, plan: Plan, *, where: str) -> Uses:
    """Uses by name of a param; empty for None.

    Raises:
      TypeError: `uses` is not a mapping.
      ValueError: a param that is not in the plan, or an unknown kind of use.
    """
    rule = 'a mapping of words by name of a param, such as {"[\'embed\']": ("lookup", "matmul")}'
    check_kind(uses, "uses", Mapping, rule, where=where, optional=True)
    names = [x.name for x in plan.layouts]
    found = Uses()
    found.micro_batches = getattr(uses, "micro_batches", 1)
    found.reduced_in_each = getattr(uses, "reduced_in_each", False)
    for name, some in (uses or {}).items():
        if name not in names:
            raise ValueError(f"{where}: uses= names {name!r}, which is not a param of the plan.{nearest(name, names)}")
        kinds = [getattr(u, "kind", u) for u in some] if isinstance(some, (tuple, list)) else []
        if not kinds or any(not isinstance(k, str) or k not in GATHERS for k in kinds):
            known = " or ".join(map(repr, GATHERS))
            raise ValueError(
                f"{where}: uses[{name!r}] is {some!r}. Pass a word for each use: {known}; or "
                "jzero.param_uses(step, state, batch)."
            )
        found[name] = tuple(u if isinstance(u, Use) else Use(u) for u in some)
    return found


def _reasons(
    plan: Plan, uses: Mapping[str, Sequence[Use]], extra: Mapping[tuple[str, ...], float], total: float
) -> tuple[tuple[str, int], ...]:
    """What takes the wire of a step from the textbook's bytes to `total`, those of this plan and these uses."""
    config, n = plan.config, plan.batch_parts
    other_axes = set(config.param_axes) != set(plan.batch_axes) or any(spec_axes(x.used) for x in plan.layouts)
    if other_axes or n == 1:
        return ()

    def wire(uses: Mapping[str, Sequence[Use]] | None = None) -> int:
        return sum(comm_of(plan).wire_by_axes(uses=uses).values())

    times = 3 if config.row.params and config.reshard_after_forward else 2
    kept = sum(x.nbytes for x in plan.layouts if x.name in plan.kept_gathered) if times == 3 else 0
    spared = sum(x.nbytes for x in plan.layouts if x.frozen is not None)
    plain = {name: [dataclasses.replace(u, dtype=None) for u in some] for name, some in uses.items()}
    whole = times * plan.param_bytes * ring(n)
    sent = [whole, whole - kept * ring(n)]
    sent += [sent[-1] - (1 if config.row.params else 2) * spared * ring(n), wire(), wire(plain), wire(uses)]
    sent += [sent[-1] + sum(extra.values()), total]
    texts = (
        "weights that stay gathered for the backward pass",
        "frozen params: no gradient, no update",
        "leaves that stay whole or are padded, dtypes of the config",
        "lookups, and weights used more than once or forward alone",
        "gradients and gathers in the dtype of compute",
        "matrices of the optimizer, to their owners and back",
        "micro-batches after the first",
    )
    found = [(why, round(b - a)) for why, (a, b) in zip(texts, itertools.pairwise(sent), strict=True)]
    return tuple((why, size) for why, size in found if abs(size) > SHARE_SAID * plan.param_bytes)


def _grad_bytes(x: Layout, plan: Plan, accumulate: int, in_each: bool) -> int:
    itemsize = x.dtype.itemsize if accumulate == 1 else max(4, x.dtype.itemsize)
    summed = x.state if in_each else x.grad
    shape = x.state_shape if summed != x.used else x.shape
    return math.prod(shape) * itemsize // shard_factor(summed, plan.mesh)


def _head_bytes(plan: Plan, sizes: Transformer) -> int:
    """Bytes of the fp32 gradient of a tiled loss's head that are alive at once.

    For a head in pieces: two of them, and the sum of the gradients of the hidden states.
    """
    values = sizes.width * sizes.vocab
    if any(is_in_pieces(x, plan) and math.prod(x.layer_shape) == values for x in plan.layouts):
        return plan.whole_bytes + 4 * sizes.batch * sizes.seq * sizes.width
    return 4 * values


def gathered_working(plan: Plan) -> int:
    """The largest weight that is gathered on use, one layer of a stack, and the largest gradient before it is reduced.

    And the weights that stay gathered for the backward pass.
    """
    layers = {x.name: comm_of(plan).weights.held_bytes(x) for x in plan.layouts}
    dropped = (size for name, size in layers.items() if name not in plan.kept_gathered)
    kept = sum(layers[x.name] * x.layers for x in plan.layouts if x.name in plan.kept_gathered)
    return max(layers.values(), default=0) + max(dropped, default=0) + kept


def planned_state(plan: Plan, tx: optax.GradientTransformation) -> PyTree:
    """The optimizer state as the plan lays it out, a tree of `jax.ShapeDtypeStruct` with shardings."""
    state = init_shapes(zero(tx, plan), plan.shapes)
    rows = zip(jax.tree.leaves(state), plan.state_shardings(state), strict=True)
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x, sharding in rows]
    return jax.tree.unflatten(jax.tree.structure(state), placed)


def _state_bytes(plan: Plan, tx: optax.GradientTransformation) -> tuple[int, int, str]:
    """Bytes of one device's state on the device, and of what lives elsewhere."""
    held = {False: 0, True: 0}
    if plan.config.updates_outside:
        chain = chain_of(unwrap(tx), plan)
        for x, spec, away in zip(chain.leaves, chain.specs, chain.kept, strict=True):
            held[away] += leaf_bytes(x) // shard_factor(spec, plan.mesh)
        return held[False], held[True], "its own optimizer state"
    for x in jax.tree.leaves(planned_state(plan, tx)):
        held[x.sharding.memory_kind == HOST] += leaf_bytes(x) // shard_factor(x.sharding.spec, x.sharding.mesh)
    return held[False], held[True], "its own optimizer state"


def _exchanged(plan: Plan, tx: optax.GradientTransformation | None) -> dict[tuple[str, ...], float]:
    """What the optimizer's matrices cost on their way to their owners and back; nothing where it mixes no dims."""
    if tx is None:
        return {}
    update: Any = zero(tx, plan).update
    try:
        plan = plan.trained
        return exchanged(update.stored_tx, plan, widen_abstract(plan.shapes, plan))
    except Exception as error:  # of the user's transformation
        warn(
            "jzero.estimate: what the optimizer itself sends is not counted: its update wants more than gradients, "
            f"state, params, value=, grad= and value_fn= ({error}).",
        )
        return {}


def _adam_bytes(plan: Plan) -> tuple[int, int, str]:
    held = {False: 0, True: 0}
    for x in (x for x in plan.layouts if x.frozen is None):
        blocks = blocks_of(x, plan)
        per_value = plan.config.adam_bytes(x.dtype, wide=blocks is None)
        scales = 0 if blocks is None else 2 * 4 * math.prod(blocks.scales_shape)
        on_host = plan.config.offload is not None and math.prod(x.shape) > 1
        held[on_host] += (math.prod(x.state_shape) * per_value + scales) // shard_factor(x.state, plan.mesh)
    return held[False], held[True], "two moments per param assumed"
