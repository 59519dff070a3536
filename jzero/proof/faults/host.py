"""Faults of params in host memory (`Offload(params="host")`): on the device for too long, or waited for."""

from __future__ import annotations

from jzero.core.errors import human_bytes
from jzero.layout.specs import shard_factor
from jzero.proof.evidence import Evidence
from jzero.proof.faults.wording import Faults
from jzero.proof.transfers import GRADIENT, WEIGHT

SHARE_HELD = 0.5  # of the params there: two regions of a small model are nearly as much
BUCKETS_HELD = 8
WEIGHTS_HELD = 8  # of the largest: two layers, which are much of a small model
SHARE_WAITS = 0.02


def weights_on_device(e: Evidence) -> Faults:
    """Fetched shards that are on the device together although each is used by itself."""
    total = hosted_bytes(e)
    if not total:
        return
    buckets = BUCKETS_HELD * e.plan.bucket_bytes // e.plan.n
    largest = max(x.nbytes // x.layers // shard_factor(x.stored, e.plan.mesh) for x in e.plan.layouts)
    room = max(round(SHARE_HELD * total), buckets, WEIGHTS_HELD * largest, e.plan.in_flight_bytes)
    if e.weights_at_once > room:
        yield (
            f"{human_bytes(e.weights_at_once)} of the {human_bytes(total)} of params in host memory are on the device "
            "at once, where each should be there only for its use.",
            e.weights_at_once,
            "loss_fn = jzero.gather_on_use(loss_fn, plan), or the apply_fn of the state that jzero.shard returned, "
            "which fetch each weight where it is used; no jax.device_put of the params, and a smaller bucket_bytes.",
        )


def transfers_waited_for(e: Evidence) -> Faults:
    """Weights or gradients whose copy the program waits for."""
    total = hosted_bytes(e)
    if not total:
        return
    mine = [t for t in e.transfers if t.scope in (WEIGHT, GRADIENT)]
    waits = [t for t in mine if not t.asynchronous]
    size = sum(t.total_bytes for t in waits)
    if size > SHARE_WAITS * sum(t.total_bytes for t in mine):
        kinds = {WEIGHT: "fetches of weights", GRADIENT: "writes of gradients"}
        what = " and ".join(text for scope, text in kinds.items() if any(t.scope == scope for t in waits))
        yield (
            f"the program waits for {len(waits)} {what}, the first is %{waits[0].name}: no compute runs beside them.",
            size,
            "no loop or kernel that reads a param in host memory where it stands: fetch it in the loss, "
            "loss_fn = jzero.gather_on_use(loss_fn, plan), and leave XLA's asynchronous copies on.",
        )


def hosted_bytes(e: Evidence) -> int:
    """Bytes of one device's shards of params in host memory, by plan."""
    hosted = (x for x in e.plan.layouts if e.plan.lives_on_host(x))
    return sum(x.nbytes // shard_factor(x.stored, e.plan.mesh) for x in hosted)
