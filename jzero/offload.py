"""Optimizer state and params in host memory: which leaves live there, how they are streamed, and whether they fit."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jzero.core.errors import check_arrays, counted, human_bytes, is_numeric, listing, shown, warn
from jzero.core.ordering import tied
from jzero.core.types import PyTree, PyTreeDef
from jzero.layout.describe import leaf_bytes
from jzero.layout.leaf_rule import path_name
from jzero.layout.placement import memory_kind
from jzero.layout.specs import shard_factor
from jzero.sharding import HOST, Plan
from jzero.stream.placement import DEVICE, Placement
from jzero.stream.schedule import Excess, Schedule
from jzero.stream.streaming import schedule_of, stream

LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
LIMIT_GB = 64  # of pinned memory per process, where the variable does not say otherwise


def placements_of(tree: PyTree, plan: Plan) -> list[Placement]:
    """Where each leaf of an optimizer state lives."""
    return [Placement(s) if s.memory_kind == HOST else DEVICE for s in plan.state_shardings(tree)]


def where_they_lie(arrays: Sequence[Any], specs: Sequence[PartitionSpec], plan: Plan) -> list[Placement]:
    """Where arrays with these layouts are, traced or not; None is left out."""
    return [
        Placement(plan.sharding(spec).with_memory_kind(HOST)) if memory_kind(x) == HOST else DEVICE
        for x, spec in zip(arrays, specs, strict=True)
        if x is not None
    ]


def streamed(
    fn: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    plan: Plan,
    placements: Sequence[Placement],
    out_placements: Callable[[PyTree], Sequence[Placement]],
    *,
    gate: Sequence[int] = (),
) -> Any:
    """`fn(*args)`, streaming what is in host memory; see [Note: streaming] in `streaming.py`.

    Args:
      fn: maps trees in device memory to a tree.
      args: its arguments.
      plan: says how much may be on the device at once.
      placements: of every leaf of `args`.
      out_placements: maps the tree of the results to the placements of its leaves.
      gate: which leaves of `args` must be computed before the first fetch.
    """
    flat, flat_fn, box = _flattened(fn, args)

    def on_excess(excess: list[Excess]) -> None:
        warn_excess(excess, _names(box[0]), plan)

    options = plan.config.offload_options
    assert options is not None
    leaves = stream(
        flat_fn, flat, placements, lambda: out_placements(_numbered(box[0])),
        in_flight_bytes=plan.in_flight_bytes, gate=() if options.prefetch else gate, on_excess=on_excess,
    )  # fmt: skip
    return box[0].unflatten(leaves)


def scheduled(
    fn: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    plan: Plan,
    placements: Sequence[Placement],
    out_placements: Callable[[PyTree], Sequence[Placement]],
    **_: Any,
) -> Schedule:
    """The schedule of `streamed`. It takes the same arguments, which may be abstract."""
    flat, flat_fn, box = _flattened(fn, args)
    return schedule_of(
        flat_fn, flat, placements, lambda: out_placements(_numbered(box[0])), plan.in_flight_bytes
    )


def _flattened(
    fn: Callable[..., PyTree], args: tuple[PyTree, ...]
) -> tuple[list[Any], Callable[..., list[Any]], list[PyTreeDef]]:
    """The leaves of the arguments, the function of these, and a list that gets the tree of its results when it runs."""
    flat, tree = jax.tree.flatten(args)
    box: list[PyTreeDef] = []

    def flat_fn(*leaves):
        results, structure = jax.tree.flatten(fn(*tree.unflatten(leaves)))
        box[:] = [structure]
        return results

    return flat, flat_fn, box


def mapped(
    fn: Callable[..., Any],
    lists: Sequence[Sequence[Any]],
    plan: Plan,
    *,
    scalars: Sequence[Any] = (),
    in_place: bool = False,
) -> list[Any]:
    """`fn(*scalars, *arrays)` for each param, with its array of each list: gradients, or sums of them.

    Args:
      fn: elementwise.
      lists: arrays on the shards of gradients. Those in host memory are streamed, and so is the result.
      plan: says how much may be on the device at once.
      scalars: arguments of every call.
      in_place: results of the dtype of the first list take its place.
    """
    if not any(memory_kind(x) == HOST for xs in lists for x in xs):
        return [fn(*scalars, *row) for row in zip(*lists, strict=True)]
    specs = [x.grad for x in plan.trained.layouts]
    lie = [where_they_lie(xs, specs, plan) for xs in lists]
    of_scalars = [DEVICE] * len(scalars)

    def every(scalars, lists):
        return [fn(*scalars, *row) for row in zip(*lists, strict=True)]

    def out_placements(_):
        hosted = [next((h for h in row if h.sharding is not None), DEVICE) for row in zip(*lie, strict=True)]
        at = [len(of_scalars) + i if in_place and h.sharding is not None else None for i, h in enumerate(lie[0])]
        return [Placement(h.sharding, i) for h, i in zip(hosted, at, strict=True)]

    return streamed(
        every, (list(scalars), [list(xs) for xs in lists]), plan, [*of_scalars, *(h for hs in lie for h in hs)],
        out_placements,
    )  # fmt: skip


def zeros_like_gradients(dtypes: Sequence[np.dtype], plan: Plan) -> list[jax.Array]:
    """Zeros for the sums of gradients, in host memory where the param is."""
    layouts = plan.trained.layouts
    layout = [plan.sharding(x.grad).with_memory_kind(HOST) if plan.lives_on_host(x) else None for x in layouts]
    rows = list(zip(layouts, dtypes, strict=True))
    return stream(
        lambda: [plan.constrain(jax.numpy.zeros(x.shape, dtype), x.grad) for x, dtype in rows], (), (),
        lambda: [Placement(s) for s in layout], in_flight_bytes=plan.in_flight_bytes,
    )  # fmt: skip


def made_streamed(
    fn: Callable[[], list[Any]], layout: Sequence[jax.sharding.NamedSharding], plan: Plan
) -> Callable[[], list[jax.Array]]:
    """A creation function whose results are written to host memory group by group; `layout` says which of them."""
    placements = [Placement(s) if s.memory_kind == HOST else DEVICE for s in layout]
    return lambda: stream(fn, (), (), lambda: placements, in_flight_bytes=plan.in_flight_bytes)


def _numbered(tree: PyTreeDef) -> PyTree:
    return tree.unflatten(range(tree.num_leaves))


def _names(tree: PyTreeDef) -> list[str]:
    return [path_name(k) for k, _ in jax.tree_util.tree_leaves_with_path(_numbered(tree))]


def warn_excess(excess: list[Excess], names: Sequence[str], plan: Plan) -> None:
    """Warns of leaves that are on the device at once although they exceed the bound, and says why."""
    rows = [
        (
            ", ".join(names[j] for j in x.outs[:3]) or "a norm of the state",
            human_bytes(x.nbytes),
            "matrices that go to their owners in one round" if x.because == "shard_map" else x.because,
        )
        for x in excess
    ]
    worst = max(x.nbytes for x in excess)
    warn(
        f"jzero: offload: {counted(len(excess), 'part')} of the optimizer state cannot be divided to fit "
        f"in_flight_bytes={human_bytes(plan.in_flight_bytes)}; up to {human_bytes(worst)} are on the device at once:\n"
        f"{listing([('leaves', 'bytes', 'because of'), *rows])}\n"
        "The step is correct; its peak is higher by as much. An elementwise chain can be divided anywhere.",
    )


def select(pred: Any, new: PyTree, old: PyTree) -> PyTree:
    """`jnp.where(pred, new, old)` for whole trees, with leaves in host memory too.

    Args:
      pred: a boolean scalar; True takes `new`.
      new, old: trees of one structure, shapes and layouts: train states, optimizer states, params.

    Returns:
      A tree like `old`; leaves in host memory stay there.

    Raises:
      TypeError: `pred` is not boolean, or a leaf is not an array or a number.
      ValueError: the trees differ in structure or shapes, or `pred` is not a scalar.

    Cost:
      Leaves in host memory are fetched one by one, from both trees, and written: 3 times their bytes over PCIe. Both
      trees must exist, so the step cannot update the old state in place: twice its host memory. Skipping inside of the
      chain costs nothing: `optax.apply_if_finite(tx, n)` works with offload.

    Example:
      >>> import jax.numpy as jnp, jzero
      >>> jzero.select(jnp.array(False), {"w": jnp.ones(2)}, {"w": jnp.zeros(2)})["w"]
      Array([0., 0.], dtype=float32)
    """
    if not isinstance(pred, bool) and getattr(pred, "dtype", None) != np.bool_:
        raise TypeError(f"jzero.select: pred must be a boolean scalar, not {shown(pred)}.")
    pred = jax.numpy.asarray(pred)
    if pred.shape != ():
        raise ValueError(f"jzero.select: pred must be a scalar, it has the shape {pred.shape}.")
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise ValueError(
            "jzero.select: new and old are not trees of one structure:\n"
            f"  new  {jax.tree.structure(new)}\n  old  {jax.tree.structure(old)}"
        )

    check_arrays((new, old), "new and old", good=is_numeric, where="jzero.select")
    flat = zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(old), strict=True)
    rows = [
        (path_name(k), str(np.shape(a)), str(np.shape(b))) for (k, a), b in flat if np.shape(a) != np.shape(b)
    ]
    if rows:
        raise ValueError(
            f"jzero.select: {counted(len(rows), 'leaf has', 'leaves have')} another shape in new than in old:\n"
            f"{listing([('leaf', 'new', 'old'), *rows])}"
        )

    written: list[Any] = []
    out = []
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
        if HOST not in (memory_kind(a), memory_kind(b)):
            out.append(jax.lax.select_n(pred, b, a))
            continue
        if len(written) > 1:  # one leaf is written while the next is fetched
            a, b, out[written[-2]] = tied(a, b, out[written[-2]])
        a, b = (jax.device_put(x, jax.memory.Space.Device) for x in (a, b))
        written.append(len(out))
        out.append(jax.device_put(jax.lax.select_n(pred, b, a), jax.memory.Space.Host))
    return jax.tree.unflatten(jax.tree.structure(old), out)


def host_bytes(state: PyTree, plan: Plan, masters: Sequence[Any] = ()) -> int:
    """Bytes of an optimizer state, and of params and their gradients, that one device keeps in host memory.

    Args:
      state: abstract; for an update outside of the program the inner state.
      plan: says what lives there.
      masters: for an update outside of the program: abstract, None for a param without one.
    """
    rows = zip(jax.tree.leaves(state), plan.state_specs(state), plan.offloaded(state), strict=True)
    of_state = (leaf_bytes(x) // shard_factor(spec, plan.mesh) for x, spec, hosted in rows if hosted)
    known = [(m, x.state) for m, x in zip(masters, plan.trained.layouts, strict=bool(masters)) if m is not None]
    of_masters = (leaf_bytes(m) // shard_factor(spec, plan.mesh) for m, spec in known)
    return sum(of_state) + sum(of_masters) + param_bytes(plan) + late_bytes(plan) + _grads_outside(plan)


def _grads_outside(plan: Plan) -> int:
    """Bytes of the gradients that one device hands to an update outside of the program, beside those in host memory."""
    if not plan.config.updates_outside:
        return 0
    grads = (x for x in plan.layouts if not plan.lives_on_host(x) and x.frozen is None)
    return sum(x.nbytes // shard_factor(x.state, plan.mesh) for x in grads)


def param_bytes(plan: Plan) -> int:
    """Bytes of params and their gradients that one device keeps in host memory; sums over micro-batches are more."""
    hosted = [x for x in plan.layouts if plan.lives_on_host(x)]
    grads = [x for x in hosted if x.frozen is None]
    rows = [*((x, x.stored) for x in hosted), *((x, x.grad) for x in grads)]
    return sum(x.nbytes // shard_factor(spec, plan.mesh) for x, spec in rows)


def late_bytes(plan: Plan) -> int:
    """Bytes of the copy of its params that one device keeps in host memory for an update that is one step late."""
    if plan.config.offload_options is None or not plan.config.offload_options.delay:
        return 0
    trained = (x for x in plan.layouts if x.frozen is None)
    return sum(math.prod(x.state_shape) * x.dtype.itemsize // shard_factor(x.state, plan.mesh) for x in trained)


_LESS = (
    " Shared by more devices, with fewer moments (lion, adafactor), or with masters and moments on a disk "
    '(Offload(tier="disk", path=...)) it is less.'
)


def check_host_memory(state: PyTree, plan: Plan, masters: Sequence[Any] = ()) -> None:
    """Raises MemoryError, before anything is allocated, if what is offloaded does not fit into host memory.

    Args:
      state, plan, masters: as for `host_bytes`.

    Raises:
      MemoryError: the pinned pool of JAX's GPU client is too small, or the machine's memory is.
    """
    devices, options = local_devices(plan), plan.config.offload_options
    needed = host_bytes(state, plan, masters) * len(devices)
    if not needed:
        warn(
            "jzero: offload has nothing to hold: this optimizer keeps no state but single numbers, and the params need "
            "no master. The run is as without offload.",
        )
        return
    hosted = param_bytes(plan) * len(devices)
    if plan.config.in_files and options is not None:  # masters and moments only pass through the buffer
        needed = hosted + (_grads_outside(plan) + late_bytes(plan)) * len(devices) + options.buffer
    what = f" ({human_bytes(hosted)} of it params and their gradients)" if hosted else ""
    gigabytes = -(-needed * 21 // (20 * 10**9)) + 1  # what jax itself pins, and a twentieth for fragments
    limit = os.environ.get(LIMIT, "")
    allowed = int(limit) if limit.isdigit() else LIMIT_GB
    pinned = plan.config.streams or plan.config.params_on_host
    if pinned and devices and devices[0].platform in ("gpu", "cuda", "rocm") and allowed * 2**30 < needed:
        raise MemoryError(
            f"jzero: offload needs {human_bytes(needed)} of pinned memory in this process{what} "
            f"({counted(len(devices), 'device')}), and JAX allows {human_bytes(allowed * 2**30)}. "
            f"Set it before Python starts: {LIMIT}={gigabytes}"
        )
    free = available_memory()
    if free is not None and needed > free:
        raise MemoryError(
            f"jzero: offload needs {human_bytes(needed)} of host memory in this process{what} "
            f"({counted(len(devices), 'device')}), and {human_bytes(free)} are free."
            + ("" if plan.config.in_files else _LESS)
            + (' Offload(params="device") needs less.' if hosted else "")
        )


def local_devices(plan: Plan) -> list[Any]:
    """The devices of the plan that this process drives."""
    return [d for d in plan.mesh.devices.flat if d.process_index == jax.process_index()]


def available_memory() -> int | None:
    """Bytes of host memory that are free for a new process; None if the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            rows = dict(line.split(":") for line in file)
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


__all__ = ["select"]
