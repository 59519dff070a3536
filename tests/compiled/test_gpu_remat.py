"""What blocks keep, in the programs compiled for H200: 2 x 4 devices, tensor parallelism on the second axis.

The model is a stack of MLP blocks (Megatron's layout). A block's input is A bytes per device; with `nn.remat` each
block keeps A. Every number is a difference between depths, so that what all layers share cancels out.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxlib
import optax
import pytest
from flax.training.train_state import TrainState
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from programs import MlpBlock, Stack, cached

import jzero
from jzero.core.xla_options import host_loop_limit

pytestmark = pytest.mark.pod

DATA, MODEL = 2, 4
DIM, ROWS, SEQ = (
    256,
    1,
    32768,
)  # rows of one device: with more XLA turns a scan's stack round, docs/activations.md
A = ROWS * SEQ * DIM * 2
# in a scan; unrolled: of fewer than three blocks not all inputs that can be on their way are there
SHALLOW, DEEP = {True: 12, False: 3}, {True: 48, False: 5}
OPTIONS = {
    "nn.remat": None,
    "partition": {"partition": "model"},
    "offload": {"offload": "host"},
    "both": {"partition": "model", "offload": "host"},
}
NIGHTLY = pytest.mark.nightly


class Block(MlpBlock):
    dim: int = DIM
    dtype: Any = jnp.bfloat16
    bias: bool = False


def columns(params):
    def spec(path, x):
        name = jax.tree_util.keystr(path)
        pair = (None, "model") if "up" in name else ("model", None)
        return P(*[None] * (x.ndim - 2), *pair) if "kernel" in name else P()

    return jax.tree_util.tree_map_with_path(spec, params)


def train_step(state, x):
    def loss_fn(params):
        return jnp.mean(state.apply_fn({"params": params}, x).astype(jnp.float32) ** 2)

    return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))


@cached
def compiled(options, scan, layers, stage=2, policy=None):
    if scan and (OPTIONS[options] or {}).get("offload") and host_loop_limit("gpu", "offload"):
        pytest.skip(
            f"offload in a scan is refused with jaxlib {jaxlib.__version__}: see the test of the refusal"
        )
    pod = jzero.pod("h200")
    mesh = pod.mesh({"data": DATA, "model": MODEL})
    x = jax.ShapeDtypeStruct((DATA * ROWS, SEQ, DIM), jnp.bfloat16)

    def create(block):
        model = Stack(block, layers, scan)
        params = model.init(jax.random.key(0), jnp.zeros((1, 1, DIM), jnp.bfloat16))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(1e-2))

    params = jax.eval_shape(lambda: create(Block)).params
    fields = {"stage": stage, "mesh": mesh, "param_specs": columns(params), "bucket_bytes": 2**19}
    plan = jzero.make_plan(params, **fields)
    if OPTIONS[options] is None:
        block = nn.remat(Block, prevent_cse=not scan, policy=policy)
    else:
        block = jzero.remat(Block, plan, prevent_cse=not scan, policy=policy, **OPTIONS[options])
    state = jzero.abstract(lambda: create(block), **fields)
    return jzero.explain(pod.compile(train_step, state, x, donate_argnums=0), plan)


def per_layer(options, scan, measure, **kw):
    """How much a measure of the program grows with each layer."""
    shallow, deep = (compiled(options, scan, n[scan], **kw) for n in (SHALLOW, DEEP))
    return (measure(deep) - measure(shallow)) / (DEEP[scan] - SHALLOW[scan])


def temp(report):
    return report.memory.temp


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [pytest.param(0, marks=NIGHTLY), 2, pytest.param(3, marks=NIGHTLY)])
def test_each_block_of_a_scan_keeps_its_input_divided_by_the_devices_of_the_axis(stage):
    """ZeRO paper, section 6.1: A / m instead of A."""
    saved = per_layer("nn.remat", True, temp, stage=stage) - per_layer("partition", True, temp, stage=stage)
    assert saved == pytest.approx(A * (MODEL - 1) / MODEL, rel=0.02)
    assert per_layer("nn.remat", True, temp, stage=stage) >= A


@pytest.mark.parametrize(
    ("options", "scan", "stage"),
    [
        ("offload", True, 2),
        ("both", True, 2),
        ("both", False, 2),
        ("both", True, 3),
        pytest.param("offload", False, 2, marks=NIGHTLY),
        pytest.param("offload", True, 3, marks=NIGHTLY),
        pytest.param("both", False, 3, marks=NIGHTLY),
    ],
)
def test_offloaded_inputs_take_host_memory_and_none_of_the_device(scan, stage, options):
    """What still grows on the device are the model states: less than a twentieth of A here."""
    kept = A // MODEL if options == "both" else A
    assert per_layer(options, scan, lambda r: r.memory.host_temp, stage=stage) == pytest.approx(
        kept, rel=0.01
    )
    growth = per_layer(options, scan, temp, stage=stage)
    assert abs(growth) < 0.05 * A
    assert growth * (DEEP[scan] - SHALLOW[scan]) < A  # from 12 to 48 layers in a scan


@pytest.mark.nightly
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
def test_partition_sends_one_gather_of_the_input_more_per_block(scan):
    def sent(report):
        return report.wire.by_axis["model"]

    as_before = per_layer("nn.remat", scan, sent)
    assert per_layer("both", scan, sent) - as_before == pytest.approx(A * (MODEL - 1) / MODEL, rel=0.001)
    if scan:
        assert per_layer("partition", scan, sent) == per_layer("both", scan, sent)
        assert per_layer("offload", scan, sent) == as_before


@pytest.mark.parametrize(
    ("options", "scan"),
    [("both", True), ("offload", True), ("both", False), pytest.param("offload", False, marks=NIGHTLY)],
)
def test_each_input_crosses_the_bus_once_each_way(options, scan):
    kept, report = A // MODEL if options == "both" else A, compiled(options, scan, DEEP[scan])
    back = [t for t in report.transfers if t.to == "device"]
    out = [t for t in report.transfers if t.to == "host"]
    assert {t.bytes for t in back} == {t.bytes for t in out} == {kept}  # a scan's stack is allocated, not copied
    assert sum(t.trips for t in back) == sum(t.trips for t in out) == DEEP[scan]
    assert all(t.asynchronous for t in out)


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
def test_a_block_waits_for_its_input(scan):
    """XLA starts the fetch where the input is read: next to nothing is computed beside it."""
    back = [t for t in compiled("both", scan, DEEP[scan]).transfers if t.to == "device"]
    assert sum(t.trips for t in back) == DEEP[scan]
    assert all(t.asynchronous and t.compute_bytes <= 0.05 * A for t in back)


def test_explain_says_where_the_inputs_wait():
    kept = [
        compiled(options, True, 48).activations for options in ("nn.remat", "partition", "offload", "both")
    ]
    assert [a.host for a in kept] == [0, 0, 48 * A, 48 * A // MODEL]
    for a, size in zip(kept, (48 * A, 48 * A // MODEL, 0, 0), strict=True):
        assert size <= a.saved <= size + 3 * A
        assert a.recomputed >= 48 * A


HIDDEN = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["hidden"],
    offload_src="device",
    offload_dst="pinned_host",
)
EVERYTHING = jax.checkpoint_policies.everything_saveable


def test_named_activations_go_to_the_host_beside_the_input():
    """4 A of hidden activations, split over four devices."""
    kept = per_layer("both", True, lambda r: r.memory.host_temp, policy=HIDDEN)
    assert kept == pytest.approx(A + A // MODEL, rel=0.01)
    assert abs(per_layer("both", True, temp, policy=HIDDEN)) < 0.05 * A


@pytest.mark.nightly
@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=NIGHTLY)])
def test_stage_3_gathers_weights_twice_whatever_the_policy_keeps(scan):
    def gathered(report):
        found = [c for c in report.collectives if c.op == "all-gather" and c.axes == ("data",)]
        return sum(c.bytes * c.count * c.trips for c in found)

    weights = 8 * DIM**2 * 2 / MODEL
    for policy in (None, EVERYTHING):
        assert per_layer("partition", scan, gathered, stage=3, policy=policy) == pytest.approx(
            2 * weights, rel=0.02
        )


def offloaded_stack(pod, scan):
    """The plan of a stack of weights, and a step with a policy of the user's own, in a scan or unrolled."""
    plan = jzero.make_plan(
        {"w": jax.ShapeDtypeStruct((6, DIM, DIM), jnp.bfloat16)}, stage=0, mesh=pod.mesh({"data": 8})
    )

    def step(params, x):
        def loss(params):
            @partial(jax.checkpoint, policy=HIDDEN)
            def layer(h, w):
                return jnp.tanh(checkpoint_name(h, "hidden") @ w), None

            if scan:
                x_out, _ = jax.lax.scan(layer, x, params["w"])
            else:
                x_out = reduce(lambda h, w: layer(h, w)[0], params["w"], x)
            return jnp.mean(x_out.astype(jnp.float32) ** 2)

        grads = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads)

    return plan, step


@cached
def findings_of_a_policy(scan=True):
    pod = jzero.pod("h200")
    plan, step = offloaded_stack(pod, scan)
    x = jax.ShapeDtypeStruct((64, DIM), jnp.bfloat16, sharding=plan.batch)
    return jzero.findings(pod.compile(step, plan.shapes, x, donate_argnums=0), plan)


OLD = bool(host_loop_limit("gpu", "offload"))


@pytest.mark.remedy("slices_wrong", "or layers that are not in a scan")
@pytest.mark.skipif(not OLD, reason="jaxlib >= 0.11.2 reads host arrays in backward loops in the right order")
def test_check_finds_what_an_old_jaxlib_makes_of_a_policy_in_a_scan():
    (found,) = [f for f in findings_of_a_policy() if f.kind == "loop_slices_wrong"]
    assert f"begins at byte {5 * 8 * DIM * 2} and goes on by -{8 * DIM * 2}" in found.text
    assert findings_of_a_policy(scan=False) == ()


@pytest.mark.skipif(OLD, reason="jaxlib < 0.11.2 reads host arrays in backward loops in the wrong order")
def test_check_passes_a_policy_in_a_scan():
    assert [f for f in findings_of_a_policy() if f.kind == "loop_slices_wrong"] == []


@pytest.mark.skipif(not OLD, reason="jaxlib >= 0.11.2 takes it: the tests above")
@pytest.mark.parametrize("options", ["offload", "both"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_old_jaxlib_refuses_offload_in_a_scan(options, stage):
    mesh = jzero.pod("h200").mesh({"data": DATA, "model": MODEL})
    plan = jzero.make_plan(
        {"w": jax.ShapeDtypeStruct((6, DIM, DIM), jnp.bfloat16)}, stage=stage, mesh=mesh, bucket_bytes=2**16
    )
    block = jzero.remat(lambda w, x: jnp.tanh(x @ w), plan, argnums=1, prevent_cse=False, **OPTIONS[options])

    def loss(params, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (block(w, x), None), x, params["w"])[0])

    x = jax.ShapeDtypeStruct((DATA, 8, DIM), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="46231"):
        jax.eval_shape(jax.grad(jzero.gather_on_use(loss, plan)), plan.shapes, x)
