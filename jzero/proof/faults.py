"""The rules of `check`: one for each kind of fault, from the traces that it leaves in a compiled step.

[Note: what is a fault]
A rule looks for the trace that a fault leaves in the program, measures it in bytes, and stays silent below
a threshold: a false alarm costs more than a small leak. Vectors (biases, norm scales) and leaves that stay
whole are all-reduced by design, and an embedding that is used twice is reduced twice.

[Note: the CPU backend]
It makes an all-reduce of what a GPU reduce-scatters, its choice of collectives is its own, and it has no host
memory apart. So `loop_slices_wrong`, `gradients_all_reduced`, `gathered_weights_kept`, `activations_moved`,
`weights_moved_in_loop`, `offloaded_state_on_device` and `offloaded_state_copied` are not looked for in its programs:
compile for `jzero.pod`. The other kinds show on both.

[Note: a stack split along its scanned dim]
By the user's own layout: the loop then gathers the whole stack for each layer, and reduces its whole gradient.
Those collectives are the consequence, and are not reported again as all-reduced gradients or micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from jzero.comm import comm_of
from jzero.comm.weights import LOOP_BUCKETS
from jzero.core.errors import counted, human_bytes, listing, typed_shape
from jzero.layout.leaf_rule import Layout, Whole
from jzero.layout.specs import axis_size, shard_factor
from jzero.proof.evidence import REDUCES, Argument, Evidence
from jzero.proof.offsets import wrong_slices

SHARE_WHOLE = 0.05
SHARE_MOVED = 0.01
SHARE_GRADS = 0.2
SHARE_KEPT = 0.1
ROUNDS = 1.75
DONATED = 0.9
_FEW = 3


Found = Iterator[tuple[str, int, str]]


def _slices_wrong(e: Evidence) -> Found:
    """Slices in loops that are not those of their index: see [Note: offsets of a slice] in `offsets.py`."""
    found = [] if e.on_cpu else wrong_slices(e.module)
    if found:
        shown = "; ".join(
            f"%{x.name} of {x.array.dtype}[{','.join(map(str, x.array.dims))}]"
            f"{' on the host' if x.array.on_host else ''} begins at byte {x.needed[0]} and goes on by {x.needed[1]} a "
            f"round, XLA wrote {x.written[0]} and {x.written[1]}"
            for x in found[:_FEW]
        )
        yield (
            f"{counted(len(found), 'slice', 'slices')} in a loop will be taken where the index does not point to, and "
            f"the values are wrong: {shown}{_more(found)}.",
            sum(x.bytes * (x.trips or 1) for x in found),
            "jaxlib >= 0.11.2, which needs Python 3.12 (openxla/xla pull request 46231); or layers that are not in a "
            "scan, or no offload in it.",
        )


def _batch_not_split(e: Evidence) -> Found:
    """An argument whose first dim is whole, and along some batch axis no gradient is ever reduced.

    XLA may choose to split another dim of an array that comes without a layout, and the model with it.
    """
    parts = e.plan.batch_parts
    if parts == 1 or not e.module.has_backward:
        return
    whole = [x for x in e.batch if x.rows * parts > x.shape[0] > 1]
    shard = _elements(e) // axis_size(e.plan.mesh, e.plan.config.axes)  # what is reduced over a replica axis
    unreduced = [a for a in e.plan.batch_axes if e.plan.mesh.shape[a] > 1 and 2 * _reduced(e, a) < shard]
    if whole and unreduced:
        yield (
            f"no gradient is reduced over {_axes(unreduced)}, and {len(whole)} of {len(e.batch)} batch "
            f"arrays are not split over batch axes {_axes(e.plan.batch_axes)} ({parts} parts): every device "
            f"computes all examples, or a part of the model for all of them. {_names(whole)}",
            sum(x.held for x in whole),
            "plan.place_batch(batch), or a batch of jax.ShapeDtypeStruct(shape, dtype, sharding=plan.batch).",
        )


def _gather_on_use(e: Evidence) -> Found:
    weights = [x for x in e.split if x.stored != x.used]
    if weights and e.module.has_backward and not e.has_gathers:
        yield (
            f"{counted(len(weights), 'param is', 'params are')} stored split, and no weight is gathered where it is "
            f"used: XLA chooses what to move. {_names(weights)}",
            sum(x.nbytes for x in weights),
            "loss_fn = jzero.gather_on_use(loss_fn, plan), or the apply_fn of the state that jzero.shard returned.",
        )


def _grads_all_reduced(e: Evidence) -> Found:
    if e.on_cpu or e.split_stacks or not e.plan.config.row.grads or not e.split:
        return
    if next(_weights_moved_in_loop(e), None):
        return
    sites = [s for s in e.over_zero_axes("all-reduce") if not s.sliced and s.phase != "forward"]
    rows = [(s, sum(e.parts(s)) * e.trips(s)) for s in sites]
    others = [x for x in e.plan.layouts if x not in e.split]
    allowed = sum(e.local(x) * (1 if x.vector else 2) for x in others)
    smallest = min(e.local(x, sliced=True) for x in e.split)
    total = sum(n for _, n in rows) - allowed
    if total > SHARE_GRADS * _elements(e) and any(sum(e.parts(s)) >= smallest for s, _ in rows):
        yield (
            f"gradients are all-reduced over {_axes(e.plan.config.axes)} where a reduce-scatter was planned: "
            f"{100 * total / _elements(e):.0f} % of the values of {len(e.split)} split params, whole on every device "
            "and sent twice.",
            round(sum(s.bytes * e.trips(s) for s in sites)),
            "hand the gradients to tx.update as jax.grad gives them: no with_sharding_constraint, pmean or output of "
            "the whole gradient (return optax.global_norm(grads) instead).",
        )


def _state_whole(e: Evidence) -> Found:
    rows = []
    for x in e.state:
        planned = x.planned(e.plan)
        extra = max(x.held, x.returned or 0) - planned if planned is not None else 0
        if planned is not None and extra > planned // 100:
            rows.append((x, extra, "comes back" if (x.returned or 0) > planned else "comes in"))
    if rows:
        shown = ", ".join(f"{x.name} {how} with {human_bytes(extra)} more" for x, extra, how in rows[:_FEW])
        yield (
            f"{len(rows)} of {len(e.state)} leaves of the state are not split as planned: {shown}{_more(rows)}.",
            sum(extra for _, extra, _ in rows),
            "state = jzero.shard(state, plan.config, mesh=mesh) before the step, tx = jzero.zero(tx, plan) in it, and "
            "no out_shardings but the plan's.",
        )


def _state_not_donated(e: Evidence) -> Found:
    stats = e.compiled.memory_analysis()
    leaves = e.state if e.on_cpu else [x for x in e.state if not x.on_host]
    held = sum(x.held for x in leaves)
    if stats is None or not any(x.layout is not None for x in e.state):
        return
    aliased = stats.alias_size_in_bytes
    if aliased < DONATED * held:
        kept = [x for x in leaves if not x.donated]
        what = (
            f"{len(kept)} of {len(leaves)} leaves are not donated" if kept else "donated buffers do not fit"
        )
        yield (
            f"the old state stays beside the new one: {what}, {human_bytes(aliased)} of {human_bytes(held)} are "
            "used again.",
            held - aliased,
            "jax.jit(step, donate_argnums=0)"
            + ("." if kept else ", and results laid out like the arguments."),
        )


def _state_not_offloaded(e: Evidence) -> Found:
    """With `offload`, leaves of the optimizer state that come in, or come back, in device memory."""
    if e.plan.config.offload is None:
        return
    named = [x for x in e.state if x.in_opt_state]
    leaves = named or [x for x in e.state if x.layout is not None and not x.is_param]
    leaves = [x for x in leaves if math.prod(x.shape) > 1 and x.held]
    here = [x for x in leaves if not (x.on_host and (x.returned_on_host or e.on_cpu))]
    total, size = sum(x.held for x in leaves), sum(x.held for x in here)
    if size > (0 if named else total // 2):  # other copies of the params (an EMA) stay on the device
        back = sum(x.on_host for x in here)
        yield (
            f"{len(here)} of {len(leaves)} leaves of the optimizer state are in device memory, where the plan keeps "
            f"them in host memory{f' ({back} come in there and do not go back)' if back else ''}. {_names(here)}",
            size,
            "state = jzero.shard(state, plan.config, mesh=mesh) before the step, tx = jzero.zero(tx, plan) in it, and "
            "no out_shardings or device_put of the state that name device memory.",
        )


def _offloaded_copied(e: Evidence) -> Found:
    """State in host memory whose new values do not take the buffers of the old ones, and temporary host memory."""
    hosted = [x for x in e.state if x.on_host]
    stats = e.compiled.memory_analysis()
    if e.on_cpu or not hosted or stats is None:
        return
    held, kept = sum(x.held for x in hosted), [x for x in hosted if not x.aliased]
    temp = getattr(stats, "host_temp_size_in_bytes", 0)
    twice = sum(x.returned or 0 for x in kept if x.returned_on_host)
    if twice + temp > (1 - DONATED) * held:
        parts = (
            [f"{len(kept)} of {len(hosted)} leaves are not written in place: {_names(kept)}"] if twice else []
        )
        parts += [f"{human_bytes(temp)} are temporary arrays."] if temp else []
        donated = all(x.donated for x in kept)
        yield (
            f"{human_bytes(twice + temp)} of host memory on top of the {human_bytes(held)} of state there. "
            + " ".join(parts),
            twice + temp,
            "each leaf goes back with its own sharding, and nothing else reads the old state: optax.apply_if_finite in "
            "the chain in place of jzero.select round the step."
            if donated
            else "jax.jit(step, donate_argnums=0).",
        )


def _offloaded_on_device(e: Evidence) -> Found:
    """Without `plan.config.offload`: more than half, or than two params' share, whichever is more."""
    total = sum(x.held for x in e.state if x.on_host)
    sizes = [x.size // shard_factor(x.state, e.plan.mesh) for x in e.plan.layouts]
    if not (total and sum(sizes)):
        return
    if e.plan.config.offload is None:
        bound = round(total * max(0.5, 2 * max(sizes) / sum(sizes)))
        room, why = bound, "would do: the scheduler fetches as early as it can"
        remedy = (
            "fetch leaf by leaf, and tie each fetch to the result of a leaf before it: the next leaf and that result "
            'through one jax.lax.optimization_barrier, both outputs used; or jzero.shard(..., offload="host").'
        )
    else:
        bound = e.plan.in_flight_bytes
        room, why = bound + e.largest_transfer, "were asked for (in_flight_bytes)"
        remedy = (
            "tx = jzero.zero(tx, plan) in the step, which streams the state, and no device_put of it; a chain that "
            "cannot be cut is named in a warning when the step is traced."
        )
    if e.fetched_at_once > room:
        yield (
            f"{human_bytes(e.fetched_at_once)} of the {human_bytes(total)} of state in host memory are on the device "
            f"at once, and {human_bytes(bound)} {why}.",
            e.fetched_at_once,
            remedy,
        )


def _whole_leaves(e: Evidence) -> Found:
    if not e.plan.config.row.state:
        return
    kept = (x for x in e.plan.layouts if x.stored == x.used)
    whole = [x for x in kept if x.reason and x.whole is not Whole.TAKEN]
    size = sum(x.nbytes for x in whole)
    if size <= SHARE_WHOLE * e.plan.param_bytes:
        return
    rows = [(x.name, typed_shape(x), x.reason) for x in sorted(whole, key=lambda x: -x.nbytes)]
    n, padded = axis_size(e.plan.mesh, e.plan.config.axes), all(x.padded for x in whole)
    ways = {
        Whole.SMALL: "pass ZeroConfig(min_shard_bytes=0).",
        Whole.UNEVEN: f"make a dim of the leaf a multiple of {n} (pad the vocabulary), or share over fewer devices"
        + (
            ". Their state is shared."
            if padded
            else ', or share its state alone with ZeroConfig(uneven="pad").'
        ),
        Whole.ONE_DEVICE: "pass a mesh with more than one device on the axis.",
    }
    yield (
        f"{len(whole)} of {len(e.plan.layouts)} params, {100 * size / e.plan.param_bytes:.0f} % of their bytes, stay "
        f"whole on every device{'' if padded else ' with their optimizer state'}:\n{listing(rows)}",
        size,
        " ".join(way for why, way in ways.items() if any(x.whole is why for x in whole)),
    )


def _stack_before_loop(e: Evidence) -> Found:
    if e.split_stacks:
        sites = {(s.computation, s.name): s for some in e.split_stacks.values() for s in some}.values()
        stacks = [x for x in e.plan.layouts if x.name in e.split_stacks]
        yield (
            f"{counted(len(stacks), 'stack of layers is', 'stacks of layers are')} split along the scanned dim by "
            f"their own layout, so that all layers are gathered where one is used: {_names(stacks)}",
            round(sum(s.wire_bytes * e.trips(s) for s in sites)),
            "leave that dim of the stack out of its layout (None), and jzero splits another one."
            + (
                ' Where it is no stack (its shape alone was looked at): scan_axes={"path of the param": None}.'
                if any(x.guessed for x in stacks)
                else ""
            ),
        )
        return
    stacks = {e.local(x): x for x in e.split if x.scanned and x.stored != x.used}
    sites = [s for s in e.over_zero_axes("all-gather") if s.phase != "update"]
    parts = [(n, dims) for s in sites for n, dims in zip(e.parts(s), e.dims(s), strict=True) if n in stacks]
    found = [n for n, d in parts if len(d) >= len(stacks[n].shape) and stacks[n].layers in d]
    if found:
        names = {stacks[n].name: stacks[n] for n in found}
        yield (
            f"{counted(len(names), 'stack of layers is', 'stacks of layers are')} gathered whole, not one layer at a "
            f"time inside the loop: {_names(list(names.values()))}",
            sum(stacks[n].nbytes for n in found),
            "loss_fn = jzero.gather_on_use(loss_fn, plan), and no constraint on the stacked params before the scan.",
        )


def _weights_kept(e: Evidence) -> Found:
    weights = [x for x in e.split if x.stored != x.used]
    if e.on_cpu or not weights or e.plan.config.keeps_gathered or next(_stack_before_loop(e), None):
        return
    gathers = [s for s in e.over_zero_axes("all-gather") if not s.loops]
    kept = sum(e.kept(s) for s in gathers) + _carried(e, weights)
    if kept > SHARE_KEPT * sum(e.local(x) * x.dtype.itemsize for x in weights):
        yield (
            "weights that the forward pass gathered are still there in the backward pass, which should gather them "
            "again.",
            kept,
            "loss_fn = jzero.gather_on_use(loss_fn, plan); for blocks of your own, jax.checkpoint (nn.remat) round "
            "the gather and its use.",
        )


def _carried(e: Evidence, weights: list[Layout]) -> int:
    """Bytes of whole stacks of weights that a loop carries, the largest loop's; told by their dims."""
    stacks = {(x.layers, tuple(sorted(x.layer_shape)), e.local(x)) for x in weights if x.scanned}
    computations = e.module.computations.values()
    homes = [c for c in computations if any(" while(" in line for line in c.lines)]
    loops = [i for c in homes for i in c.schedule if i.opcode == "while"]
    shapes = ([s for s in i.shapes if len(s.dims) > 2] for i in loops)
    # the shard of one stack may look like another one whole: not counted
    shards = {e.plan.sharding(x.stored).shard_shape(x.shape) for x in weights if x.scanned}
    shards = {(dims[0], tuple(sorted(dims[1:]))) for dims in shards}
    keys = ([(s, (s.dims[0], tuple(sorted(s.dims[1:])))) for s in some] for some in shapes)
    whole = ([s for s, key in some if (*key, s.size) in stacks and key not in shards] for some in keys)
    return max((sum(s.nbytes for s in some) for some in whole), default=0)


def _activations_moved(e: Evidence) -> Found:
    if e.on_cpu or e.split_stacks:
        return
    sites = list(e.over_zero_axes("all-to-all", "ragged-all-to-all", "collective-permute"))
    least = min(e.weight_sizes, default=0)  # a vector is a statistic: BatchNorm over the whole batch
    forward = [s for s in e.over_zero_axes(*REDUCES) if s.phase == "forward" and sum(e.parts(s)) >= least]
    sites = [s for s in sites if s.phase != "update"] + forward
    moved = round(sum(s.wire_bytes * e.trips(s) for s in sites))
    if moved > SHARE_MOVED * e.plan.param_bytes:
        ops = sorted({s.op for s in sites})
        yield (
            f"activations move between the devices of {_axes(e.plan.config.axes)} ({', '.join(ops)}) where "
            f"{'weights should' if e.plan.config.row.params else 'nothing should'}; the bytes grow with the batch.",
            moved,
            ("loss_fn = jzero.gather_on_use(loss_fn, plan), with " if e.plan.config.row.params else "")
            + "a batch from plan.place_batch(batch), and params held by plan.constrain(param, layout.stored).",
        )


def _weights_moved_in_loop(e: Evidence) -> Found:
    """Weights that are constant over a loop of the loss, gathered or reduced in every round of it.

    Those of a stack are moved layer by layer in it: a leaf that looks like one of its layers is not told apart.
    """
    if e.on_cpu or not e.split or next(_gather_on_use(e), None):  # XLA chooses what to move
        return
    layers = {e.local(x, sliced=True) for x in e.split if x.scanned}
    leaves = {e.local(x): x for x in e.split if not x.scanned and e.local(x) not in layers}
    found: dict[str, Layout] = {}
    rounds, excess = set(), 0.0
    for s in e.over_zero_axes("all-gather", *REDUCES):
        parts, times = e.parts(s), e.rounds_of_loss(s)
        mine = [leaves[n] for n in parts if n in leaves]
        # XLA joins all-reduces to one flat array: whose gradients they are is known where no stack has any
        joined = s.op in REDUCES and not layers and e.gradients(s) > 0
        if times > 1 and (mine or joined):
            share = 1.0 if joined else sum(map(e.local, mine)) / sum(parts)
            excess += s.wire_bytes * share * e.trips(s) * (1 - 1 / times)
            found.update((x.name, x) for x in mine)
            rounds.add(times)
    if excess > SHARE_WHOLE * e.plan.param_bytes:
        named = list(found.values())
        weights = comm_of(e.plan).weights
        yield (
            f"in a loop of {' or '.join(map(str, sorted(rounds)))} rounds "
            f"{counted(len(named), 'weight', 'weights') if named else 'weights'} that every round reads are gathered, "
            "or have their gradients reduced, in every round; once would do. " + (_names(named) if named else ""),
            round(excess),
            f"one loop in place of a loop in a loop; no lookup of rows and no wider reduce_dtype in it; beyond "
            f"{human_bytes(weights.loop_bytes)} of such weights a larger bucket_bytes ({LOOP_BUCKETS} buckets are held "
            "whole); jzero.gather_on_use(loss_fn, plan) for a loss that does not call the apply_fn of the state.",
        )


def _reduction_per_microbatch(e: Evidence) -> Found:
    if next(_weights_moved_in_loop(e), None):
        return
    sites = (s for s in e.over_zero_axes(*REDUCES) if s.scope != "microbatch")  # asked for, in value_and_grad
    rows = [(s, e.gradients(s) * e.trips(s)) for s in sites]
    rounds = sum(n for _, n in rows) / _elements(e) if e.split else 0
    if rounds >= ROUNDS and not e.split_stacks:
        sent = sum(s.wire_bytes * e.trips(s) for s, n in rows if n)
        yield (
            f"every gradient is reduced {rounds:.1f} times in a step, once per micro-batch, where once after "
            "their sum would do.",
            round(sent * (1 - 1 / rounds)),
            'jzero.value_and_grad(loss_fn, plan, accumulate=k, reduce="step"): local gradients are summed, and reduced '
            "once after the loop.",
        )


KINDS: dict[str, Callable[[Evidence], Found]] = {
    "loop_slices_wrong": _slices_wrong,
    "batch_not_split": _batch_not_split,
    "gather_on_use_not_traced": _gather_on_use,
    "gradients_all_reduced": _grads_all_reduced,
    "state_whole": _state_whole,
    "state_not_donated": _state_not_donated,
    "state_not_offloaded": _state_not_offloaded,
    "offloaded_state_copied": _offloaded_copied,
    "offloaded_state_on_device": _offloaded_on_device,
    "replicated_leaves": _whole_leaves,
    "stack_gathered_before_loop": _stack_before_loop,
    "gathered_weights_kept": _weights_kept,
    "activations_moved": _activations_moved,
    "weights_moved_in_loop": _weights_moved_in_loop,
    "reduction_per_microbatch": _reduction_per_microbatch,
}


def _elements(e: Evidence) -> int:
    """Elements of all split params as a device uses them."""
    return sum(e.local(x) for x in e.split)


def _reduced(e: Evidence, axis: str) -> float:
    """Elements of gradients reduced along a mesh axis in a step."""
    zero = axis in e.plan.config.axes  # over a replica axis shards are reduced, of any size
    rows = [s for s, axes in e.sites if s.op in REDUCES and axis in axes and s.phase != "forward"]
    return sum((e.gradients(s) if zero else sum(e.parts(s))) * e.trips(s) for s in rows)


def _axes(axes: Iterable[str]) -> str:
    return ", ".join(map(repr, axes))


def _names(leaves: list[Argument] | list[Layout]) -> str:
    shown = ", ".join(f"{x.name}[{','.join(map(str, x.shape))}]" for x in leaves[:_FEW])
    return f"{shown}{_more(leaves)}."


def _more(rows) -> str:
    return f" and {len(rows) - _FEW} more" if len(rows) > _FEW else ""
