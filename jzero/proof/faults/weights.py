"""Faults of params: whole where they could be split, gathered too early, or alive for too long.

[Note: a stack split along its scanned dim]
By the user's own layout: the loop then gathers the whole stack for each layer, and reduces its whole gradient.
Those collectives are the consequence, and are not reported again as all-reduced gradients or micro-batches.
"""

from __future__ import annotations

import collections
import math

from jzero.comm import comm_of
from jzero.comm.weights import LOOP_BUCKETS
from jzero.core.errors import counted, human_bytes, listing, typed_shape
from jzero.layout.leaf_rule import Layout, Whole
from jzero.layout.specs import axis_size
from jzero.proof.collectives import Site
from jzero.proof.evidence import REDUCES, Evidence
from jzero.proof.faults.wording import Faults, names_text

SHARE_WHOLE = 0.05
SHARE_SAVED = 0.1


def gather_on_use(e: Evidence) -> Faults:
    """Params that are stored split, with no gather where they are used."""
    weights = [x for x in e.plan.layouts if x.stored != x.used]
    found = any(x in e.split for x in weights)
    if found and not e.has_gathers and (e.module.has_backward or _moves_weights(e)):
        yield (
            f"{counted(len(weights), 'param is', 'params are')} stored split, and no weight is gathered where it is "
            f"used: XLA chooses what to move. {names_text(weights)}",
            sum(x.nbytes for x in weights),
            "loss_fn = jzero.gather_on_use(loss_fn, plan), or the apply_fn of the state that jzero.shard returned. The "
            "plan is that of this state: jzero.plan_of(state), of an NNX pair jzero.plan_of(optimizer).",
        )


def _moves_weights(e: Evidence) -> bool:
    """A weight is gathered, as in an evaluation; an update of an EMA moves none."""
    return any(n in e.weight_sizes for s in e.over_zero_axes("all-gather") for n in s.sizes)


def whole_leaves(e: Evidence) -> Faults:
    """Params that stay whole on every device, where they are more than a few percent of all bytes."""
    if not e.plan.config.row.state:
        return
    same = (x for x in e.plan.layouts if x.stored == x.used)
    whole = [x for x in same if x.reason and x.whole is not Whole.TAKEN]
    size = sum(x.nbytes for x in whole)
    if size <= SHARE_WHOLE * e.plan.param_bytes:
        return
    rows = [(x.name, typed_shape(x), x.reason) for x in sorted(whole, key=lambda x: -x.nbytes)]
    n, padded = axis_size(e.plan.mesh, e.plan.config.axes), all(x.padded for x in whole)
    pad = ', or share its state alone with ZeroConfig(uneven="pad").'  # at stage 3 the param is to be split, too
    ways = {
        Whole.SMALL: "pass ZeroConfig(min_shard_bytes=0).",
        Whole.UNEVEN: f"make a dim of the leaf a multiple of {n} (pad the vocabulary), or share over fewer devices"
        + (". Their state is shared." if padded else "." if e.plan.config.row.params else pad),
        Whole.ONE_DEVICE: "pass a mesh with more than one device on the axis.",
    }
    yield (
        f"{len(whole)} of {len(e.plan.layouts)} params, {100 * size / e.plan.param_bytes:.0f} % of their bytes, stay "
        f"whole on every device{'' if padded else ' with their optimizer state'}:\n{listing(rows)}",
        size,
        " ".join(way for why, way in ways.items() if any(x.whole is why for x in whole)),
    )


def stack_before_loop(e: Evidence) -> Faults:
    """Stacks of layers that are gathered as a whole, before the loop over the layers."""
    if e.split_stacks:
        sites = {(s.computation, s.name): s for some in e.split_stacks.values() for s in some}.values()
        stacks = [x for x in e.plan.layouts if x.name in e.split_stacks]
        yield (
            f"{counted(len(stacks), 'stack of layers is', 'stacks of layers are')} split along the scanned dim by "
            f"their own layout, so that all layers are gathered where one is used: {names_text(stacks)}",
            round(sum(s.wire_bytes * e.trips(s) for s in sites)),
            "leave that dim of the stack out of its layout (None), and jzero splits another one."
            + (
                ' Where it is not a stack (its shape alone was looked at): scan_axes={"path of the param": None}.'
                if any(x.guessed for x in stacks)
                else ""
            ),
        )
        return
    by_size: dict[int, list[Layout]] = collections.defaultdict(list)  # several may be as large
    for x in e.split:
        if x.scanned and x.stored != x.used:
            by_size[e.local(x)].append(x)
    sites = [s for s in e.over_zero_axes("all-gather") if s.phase != "update"]
    rows = [(s, n, dims) for s in sites for n, dims in zip(s.sizes, s.dims, strict=True) if n in by_size]
    found = [x for row in rows for x in _whole_stacks(e, by_size[row[1]], row)]
    if found:
        names = {x.name: x for x in found}
        yield (
            f"{counted(len(names), 'stack of layers is', 'stacks of layers are')} gathered whole, not one layer at a "
            f"time inside the loop: {names_text(list(names.values()))}",
            sum(x.nbytes for x in found),
            "loss_fn = jzero.gather_on_use(loss_fn, plan), and no constraint on the stacked params before the scan; "
            "where the scan stands in another loop, that one in Python.",
        )


def _whole_stacks(e: Evidence, alike: list[Layout], row: tuple[Site, int, tuple[int, ...]]) -> list[Layout]:
    """The stack that a gathered tensor is: of several with as many elements the one of its dims, else the first."""
    s, n, dims = row
    if _is_leaf_or_layer(e, s, dims, n):
        return []
    some = [x for x in alike if len(dims) >= len(x.shape) and x.layers in dims and not _is_slice(e, x, s, dims, n)]
    return [x for x in some if _has_dims(s, dims, x.shape)][:1] or some[:1]


def _has_dims(s: Site, dims: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """True for a tensor of a collective that is an array of this shape, in any order of its dims."""
    parts = s.group_size if s.op == "all-gather" else 1
    mine = sorted(d for d in dims if d > 1)
    cut = ([*shape[:i], d // parts, *shape[i + 1 :]] for i, d in enumerate(shape) if d % parts == 0)
    return any(mine == sorted(d for d in some if d > 1) for some in cut)


def _is_slice(e: Evidence, x: Layout, s: Site, dims: tuple[int, ...], n: int) -> bool:
    """True for a tensor as large as a param whose dims are those of a layer of another one instead."""
    big = [y.shape for y in e.split if y is not x and len(y.shape) > 2]
    layers = ((*shape[:i], *shape[i + 1 :]) for shape in big for i in range(len(shape)))
    found = (math.prod(shape) == n and _has_dims(s, dims, shape) for shape in layers)
    return not _has_dims(s, dims, x.shape) and any(found)


def _is_leaf_or_layer(e: Evidence, s: Site, dims: tuple[int, ...], n: int) -> bool:
    """True for a tensor that may be a param without layers, or one layer of a stack in a loop over its layers."""
    for y in e.split:
        shape = y.layer_shape if y.scanned else y.shape
        if math.prod(shape) == n and _has_dims(s, dims, shape) and (not y.scanned or s.loops[-1:] == (y.layers,)):
            return True
    return False


def weights_saved(e: Evidence) -> Faults:
    """Gathered weights that are alive from the forward to the backward pass."""
    gathered = [x for x in e.split if x.stored != x.used]
    weights = [x for x in gathered if x.name not in e.plan.kept_gathered]
    if not weights:
        return
    gathers = [s for s in e.over_zero_axes("all-gather") if not s.loops]
    stay = sum(e.local(x) * x.dtype.itemsize for x in gathered if x.name in e.plan.kept_gathered)
    saved = sum(e.saved_weights(s) for s in gathers) + _carried(e, gathered) - stay
    if saved > SHARE_SAVED * sum(e.local(x) * x.dtype.itemsize for x in weights):
        yield (
            "weights that the forward pass gathered are still there in the backward pass, which should gather them "
            "again.",
            saved,
            "loss_fn = jzero.gather_on_use(loss_fn, plan); for blocks of your own, jax.checkpoint (nn.remat) around "
            "the gather and its use.",
        )


def weights_in_loop(e: Evidence) -> Faults:
    """Weights that are constant over a loop of the loss, gathered or reduced in every iteration of it.

    Those of a stack move layer by layer, so a leaf that looks like one of its layers is left out.
    """
    if not e.split or e.split_stacks:
        return
    layers = {e.local(x, sliced=True) for x in e.split if x.scanned}
    leaves = {e.local(x): x for x in e.split if not x.scanned and e.local(x) not in layers}
    found: dict[str, Layout] = {}
    iterations, where, excess = set(), set(), 0.0
    for s in e.over_zero_axes("all-gather", *REDUCES):
        sizes, times = s.sizes, e.loss_iterations(s)
        tensors = [(leaves[n], n, dims) for n, dims in zip(sizes, s.dims, strict=True) if n in leaves]
        mine = [x for x, n, dims in tensors if not _is_slice(e, x, s, dims, n)]
        # XLA joins all-reduces to one flat array: whose gradients they are is known where no stack has any
        joined = s.op in REDUCES and not layers and all(len(d) == 1 for d in s.dims) and e.gradients(s) > 0
        if times > 1 and (mine or joined):
            share = 1.0 if joined else sum(map(e.local, mine)) / sum(sizes)
            excess += s.wire_bytes * share * e.trips(s) * (1 - 1 / times)
            found.update((x.name, x) for x in mine)
            iterations.add(times)
            where.add(s.instruction.op_name)
    if excess > SHARE_WHOLE * e.plan.param_bytes:
        named = list(found.values())
        weights = comm_of(e.plan).weights
        lookups = any(use.kind == "lookup" for x in named for use in (e.uses or {}).get(x.name, ()))
        one, several = "weight that every iteration reads is", "weights that every iteration reads are"
        moved = counted(len(named), one, several) if named else several
        yield (
            f"in a loop of {' or '.join(map(str, sorted(iterations)))} iterations {moved} gathered, or the gradient "
            "reduced, in every iteration; once would do. "
            + (names_text(named) if named else "")
            + (f" At {min(where - {''})}." if where - {""} else ""),
            round(excess),
            "rows looked up before the loop, for all iterations at once; where an iteration chooses its own rows, "
            "jax.nn.one_hot(rows, len(table), dtype=table.dtype) @ table."
            if lookups
            else f"one loop in place of a loop in a loop (jnp.where for what the outer one does, not lax.cond); "
            f"no lookup of rows and no wider reduce_dtype in it; beyond "
            f"{human_bytes(weights.loop_bytes)} of such weights a larger bucket_bytes ({LOOP_BUCKETS} buckets are held "
            "whole); jzero.gather_on_use(loss_fn, plan) for a loss that does not call the apply_fn of the state.",
        )


def _carried(e: Evidence, weights: list[Layout]) -> int:
    """Bytes of whole stacks of weights that a loop carries, in the largest loop; recognized by their dims."""
    stacks = {(x.layers, tuple(sorted(x.layer_shape)), e.local(x)) for x in weights if x.scanned}
    loops = [i for _, i in e.module.loops.values()]
    shapes = ([s for s in i.shapes if len(s.dims) > 2] for i in loops)
    # the shard of one stack may look like another one whole: not counted
    shards = {e.plan.sharding(x.stored).shard_shape(x.shape) for x in weights if x.scanned}
    shards = {(dims[0], tuple(sorted(dims[1:]))) for dims in shards}
    keys = ([(s, (s.dims[0], tuple(sorted(s.dims[1:])))) for s in some] for some in shapes)
    whole = ([s for s, key in some if (*key, s.size) in stacks and key not in shards] for some in keys)
    return max((sum(s.nbytes for s in some) for some in whole), default=0)
