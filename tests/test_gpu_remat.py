"""What blocks keep, in the programs compiled for H200: 2 x 4 devices, tensor parallelism on the second axis.

The model is a stack of MLP blocks (Megatron's layout). A block's input is A bytes per device; with `nn.remat` each
block keeps A. Every number is a difference between depths, so that what all layers share cancels out.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import jzero

pytest.importorskip(
    "jax_plugins.xla_cuda12", reason="compile-only pods need the jax-cuda12-plugin (jzero[pod])"
)

DATA, MODEL = 2, 4
DIM, ROWS, SEQ = 256, 16, 2048  # rows of one device
A = ROWS * SEQ * DIM * 2
SHALLOW, DEEP = {True: 12, False: 2}, {True: 48, False: 6}  # in a scan; unrolled
OPTIONS = {
    "nn.remat": None,
    "partition": {"partition": "model"},
    "offload": {"offload": "host"},
    "both": {"partition": "model", "offload": "host"},
}
UNROLLED = pytest.param(False, id="unrolled")
SCAN = pytest.param(True, id="scan")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        kw = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "use_bias": False}
        y = nn.LayerNorm(name="norm", **kw)(x)
        return x + nn.Dense(DIM, name="down", **kw)(nn.gelu(nn.Dense(4 * DIM, name="up", **kw)(y))), None


class Model(nn.Module):
    layers: int
    scan: bool
    block: type

    @nn.compact
    def __call__(self, x):
        if self.scan:
            stack = nn.scan(
                self.block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
            )
            return stack(name="blocks")(x, None)[0]
        for i in range(self.layers):
            x, _ = self.block(name=f"block_{i}")(x)
        return x


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


@functools.cache
def compiled(options, scan, layers, stage=2, policy=None):
    pod = jzero.pod("h200")
    mesh = pod.mesh({"data": DATA, "model": MODEL})
    x = jax.ShapeDtypeStruct((DATA * ROWS, SEQ, DIM), jnp.bfloat16)

    def create(block):
        model = Model(layers, scan, block)
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


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 2, 3])
def test_each_block_of_a_scan_keeps_its_input_divided_by_the_devices_of_the_axis(stage):
    """ZeRO paper, section 6.1: A / m instead of A."""
    saved = per_layer("nn.remat", True, temp, stage=stage) - per_layer("partition", True, temp, stage=stage)
    assert saved == pytest.approx(A * (MODEL - 1) / MODEL, rel=0.02)
    assert per_layer("nn.remat", True, temp, stage=stage) >= A


@pytest.mark.parametrize("options", ["offload", "both"])
@pytest.mark.parametrize(
    ("scan", "stage"),
    [(True, 2), (False, 2), (True, 3), pytest.param(False, 3, marks=pytest.mark.long)],
)
def test_offloaded_inputs_take_host_memory_and_none_of_the_device(scan, stage, options):
    """What still grows on the device are the model states: less than a twentieth of A here."""
    kept = A // MODEL if options == "both" else A
    assert per_layer(options, scan, lambda r: r.memory.host_temp, stage=stage) == pytest.approx(
        kept, rel=0.01
    )
    growth = per_layer(options, scan, temp, stage=stage)
    assert abs(growth) < 0.05 * A
    deep, shallow = (temp(compiled(options, scan, n[scan], stage=stage)) for n in (DEEP, SHALLOW))
    assert deep - shallow < A  # from 12 to 48 layers in a scan


@pytest.mark.parametrize("scan", [SCAN, UNROLLED])
def test_partition_sends_one_gather_of_the_input_more_per_block(scan):
    def sent(report):
        return report.wire.by_axis["model"]

    more = per_layer("partition", scan, sent) - per_layer("nn.remat", scan, sent)
    assert more == pytest.approx(A * (MODEL - 1) / MODEL, rel=0.001)
    assert per_layer("both", scan, sent) == per_layer("partition", scan, sent)
    assert per_layer("offload", scan, sent) == per_layer("nn.remat", scan, sent)


@pytest.mark.parametrize("scan", [SCAN, UNROLLED])
def test_what_is_partitioned_crosses_the_bus_in_parts(scan):
    for options, kept in (("offload", A), ("both", A // MODEL)):
        report = compiled(options, scan, DEEP[scan])
        back = [t for t in report.transfers if t.to == "device"]
        out = [
            t for t in report.transfers if t.to == "host" and t.bytes == kept
        ]  # a scan zeroes its stack first
        assert {t.bytes for t in back} == {kept}
        assert sum(t.trips for t in back) == sum(t.trips for t in out) == DEEP[scan]
        assert all(t.asynchronous for t in out)


def test_named_activations_can_go_to_the_host_as_well():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["none"],
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip
    report = compiled("both", True, SHALLOW[True], policy=policy)
    assert temp(report) == temp(compiled("both", True, SHALLOW[True]))


@pytest.mark.parametrize("scan", [SCAN, pytest.param(False, id="unrolled", marks=pytest.mark.long)])
def test_stage_3_gathers_twice_whatever_the_policy_keeps(scan):
    """Gathered weights are not kept: with them temp would grow by the weights of a layer."""
    everything = jax.checkpoint_policies.everything_saveable
    kept, none = (compiled("partition", scan, DEEP[scan], stage=3, policy=p) for p in (everything, None))
    gathers = [
        sum(
            c.bytes * c.count * c.trips for c in r.collectives if c.op == "all-gather" and c.axes == ("data",)
        )
        for r in (kept, none)
    ]
    assert gathers[0] == pytest.approx(gathers[1], rel=0.02)
    assert gathers[0] >= 1.9 * DEEP[scan] * 8 * DIM**2 * 2 / MODEL
