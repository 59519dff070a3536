"""Faults of the optimizer state: not split, not donated, not on the host, or on the device for too long."""

from __future__ import annotations

from jzero.comm import comm_of
from jzero.core.errors import human_bytes
from jzero.layout.specs import shard_factor
from jzero.layout.state_layouts import FEW
from jzero.proof.evidence import Argument, Evidence
from jzero.proof.faults.wording import COPIES, MOST_NAMES, Faults, are_copies, more_text, names_text

DONATED = 0.9
SHARE_MOVED = 0.05  # of the bytes of all params: norms and statistics are less


def state_whole(e: Evidence) -> Faults:
    """Leaves of the state that come in, or come back, larger than planned."""
    rows = whole_rows(e)
    if rows:
        shown = ", ".join(
            f"{x.name} {how} with {human_bytes(extra)} more" for x, extra, how in rows[:MOST_NAMES]
        )
        yield (
            f"{len(rows)} of {len(e.state)} leaves of the state are not split as planned: {shown}{more_text(rows)}.",
            sum(extra for _, extra, _ in rows),
            "state = jzero.shard(state, plan.config, mesh=mesh) before the step (of any other loop params = "
            "plan.place(params), opt_state = jax.jit(tx.init)(params)), tx = jzero.zero(tx, plan) in it, and "
            "no out_shardings but the plan's." + (f" {COPIES}" if are_copies(e, (x for x, *_ in rows)) else ""),
        )


def whole_rows(e: Evidence) -> list[tuple[Argument, int, str]]:
    """Params and their copies that are not split as planned: the leaf, the bytes too many, where it is seen."""
    rows = []
    for x in e.state:
        planned = x.planned(e.plan)
        extra = max(x.held, x.returned or 0) - planned if planned is not None else 0
        if planned is not None and extra > planned // 100:
            rows.append((x, extra, "comes back" if (x.returned or 0) > planned else "comes in"))
    return rows


def optimizer_moves(e: Evidence) -> Faults:
    """Arrays that the optimizer's own arithmetic moves between the shards: it mixes the dims of a matrix."""
    if not e.plan.config.row.state:
        return
    sites = [s for s, _ in e.sites if e.is_optimizers(s)]
    moved = round(sum(s.wire_bytes * e.trips(s) for s in sites))
    if moved <= SHARE_MOVED * e.plan.param_bytes:
        return
    sizes = {n for s in sites for n in s.sizes}
    mixed = [x for x in e.split if sizes & {x.size, e.local(x), e.local(x, sliced=True)}]
    largest = max((x.nbytes for x in mixed), default=0)
    steps = sorted({s.primitive for s in sites} - {""})
    held = sum(e.plan.config.adam_bytes(x.dtype) * x.size for x in mixed)
    yield (
        f"the arithmetic of the optimizer ({', '.join(steps[:MOST_NAMES])}) moves {human_bytes(moved)} between the "
        f"shards of its state, {moved / e.plan.param_bytes:.1f} times the bytes of all params: it mixes the rows and "
        "columns of a matrix, as Muon and Shampoo do, and XLA gathers the shards for each of these operations"
        + (f". {names_text(mixed)}" if mixed else "."),
        moved,
        f"ZeroConfig(min_shard_bytes={largest + 1}) keeps these params' state whole on every device: nothing moves for "
        f"it, every device computes all of it, and state like Adam's takes up to {human_bytes(held)}; or an optimizer "
        "that works element by element."
        if mixed
        else "an optimizer that works element by element; or stage 0.",
    )


def state_not_donated(e: Evidence) -> Faults:
    """New state beside the old one, whose buffers are not reused."""
    stats = e.compiled.memory_analysis()
    leaves = e.state if e.on_cpu else [x for x in e.state if not x.on_host]
    held = sum(x.held for x in leaves)
    if stats is None or not any(x.layout is not None for x in e.state):
        return
    if not e.module.has_backward and all(x.is_param for x in e.state if x.layout is not None):
        return  # an evaluation, whose nnx.jit gives the model back
    aliased = stats.alias_size_in_bytes
    if aliased < DONATED * held:
        own = [x for x in leaves if not x.donated]
        what = f"{len(own)} of {len(leaves)} leaves are not donated" if own else "donated buffers do not fit"
        yield (
            f"the old state stays beside the new one: {what}, {human_bytes(aliased)} of {human_bytes(held)} are "
            f"used again.{f' {names_text(own)}' if own else ''}",
            held - aliased,
            f"jax.jit(step, {donated_text(leaves)}); nnx.jit, pod.compile and jzero.jit take the same option"
            f"{'' if own else '. Results must be laid out like the arguments'}.",
        )


def donated_text(state: list[Argument]) -> str:
    """The options of `jax.jit` that donate all of a state: `donate_argnums=(0, 1)`."""
    keys = sorted({x.argument for x in state})
    numbers = [int(key) for kind, key in keys if kind == "0"]
    names = [key for kind, key in keys if kind != "0"]
    found = [f"donate_argnums={numbers[0] if len(numbers) == 1 else tuple(numbers)}"] if numbers else []
    return ", ".join(found + ([f"donate_argnames={tuple(names)}"] if names else []))


def state_not_offloaded(e: Evidence) -> Faults:
    """With `offload`, what the plan keeps in host memory and comes in, or comes back, in device memory."""
    if not e.plan.config.streams:
        return
    named = [x for x in e.state if x.in_opt_state]
    leaves = named or [x for x in e.state if x.layout is not None and not x.is_param]
    leaves = [x for x in leaves if x.size > (1 if x.layout else FEW) and x.held and not x.is_key]
    leaves += [x for x in e.state if x.is_param and x.layout and e.plan.lives_on_host(x.layout) and x.held]
    here = [x for x in leaves if not (x.on_host and (x.returned_on_host or e.on_cpu))]
    total, size = sum(x.held for x in leaves), sum(x.held for x in here)
    if size > (0 if named else total // 2):  # other copies of the params (an EMA) stay on the device
        back = sum(x.on_host for x in here)
        what = "params and the optimizer state" if e.plan.config.params_on_host else "optimizer state"
        yield (
            f"{len(here)} of {len(leaves)} leaves of the {what} are in device memory, where the plan keeps "
            f"them in host memory{f' ({back} come in there and do not go back)' if back else ''}. {names_text(here)}",
            size,
            "state = jzero.shard(state, plan.config, mesh=mesh) before the step, tx = jzero.zero(tx, plan) in it, and "
            "no out_shardings or device_put of the state that name device memory.",
        )


def offloaded_copied(e: Evidence) -> Faults:
    """State in host memory whose new values do not take the buffers of the old ones, and temporary host memory.

    The gradients of params there are temporary too, and so are the sums of them over micro-batches.
    """
    hosted = [x for x in e.state if x.on_host]
    stats = e.compiled.memory_analysis()
    if not hosted or stats is None:
        return
    held, copied = sum(x.held for x in hosted), [x for x in hosted if not x.aliased]
    host, summed = comm_of(e.plan).host, 2 if any(t.scope == "microbatch" for t in e.transfers) else 1
    grads = sum(sum(host.held(x, summed)) for x in e.plan.layouts)
    temp = max(0, getattr(stats, "host_temp_size_in_bytes", 0) - grads)
    twice = sum(x.returned or 0 for x in copied if x.returned_on_host)
    if twice + temp > (1 - DONATED) * held:
        texts = []
        if twice:
            texts.append(f"{len(copied)} of {len(hosted)} leaves are not written in place: {names_text(copied)}")
        texts += [f"{human_bytes(temp)} are temporary arrays{', beside gradients' if grads else ''}."] if temp else []
        donated = all(x.donated for x in copied)
        yield (
            f"{human_bytes(twice + temp)} of host memory on top of the {human_bytes(held)} of "
            f"{'params and ' * (grads > 0)}state there. " + " ".join(texts),
            twice + temp,
            "each leaf goes back with its own sharding, and nothing else reads the old state: optax.apply_if_finite in "
            "the chain in place of jzero.select around the step."
            if donated
            else f"jax.jit(step, {donated_text(e.state)}); nnx.jit and jzero.jit take the same option.",
        )


def offloaded_on_device(e: Evidence) -> Faults:
    """More state on the device than `in_flight_bytes`; without `offload`, than half of it or two params' shares."""
    total = sum(x.held for x in e.state if x.on_host)
    sizes = [x.size // shard_factor(x.state, e.plan.mesh) for x in e.plan.layouts]
    if not (total and sum(sizes)):
        return
    if not e.plan.config.streams:
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
