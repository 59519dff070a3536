"""`jzero.remat` on simulated devices: the same numbers with every option, and what is kept of a block's input."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from models import assert_batch_is_split, max_error
from programs import MlpBlock, Stack

import jzero
from jzero.core import xla_options

DIM, SEQ, BATCH, LAYERS = 24, 6, 8, 3
HOST = jax.memory.Space.Host
policies = jax.checkpoint_policies
offload_names = policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["hidden"],
    offload_src="device",
    offload_dst="pinned_host",
)
OPTIONS = {
    "plain": {},
    "partition": {"partition": "model"},
    "offload": {"offload": "host"},
    "both": {"partition": ("model",), "offload": "host"},
    "the last dim": {"partition": "model", "dim": -1},
    "dots are kept": {"partition": "model", "offload": "host", "policy": policies.dots_saveable},
    "a name is kept": {"offload": "host", "policy": policies.save_only_these_names("hidden")},
    "a name is offloaded": {"partition": "model", "policy": offload_names},
    "all is kept": {"partition": "model", "policy": policies.everything_saveable},
}


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


class Block(MlpBlock):
    dim: int = DIM
    wider: int = 2


def Model(block, scan=False):
    return Stack(block, LAYERS, scan)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(DIM, 2 * DIM, rngs=rngs), nnx.Linear(2 * DIM, DIM, rngs=rngs)

    def __call__(self, x):
        return x + self.down(checkpoint_name(nnx.gelu(self.up(x)), "hidden"))


class NnxModel(nnx.Module):
    def __init__(self, block, rngs):
        self.blocks = nnx.List([block(rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def block_fn(params, x):
    return x + checkpoint_name(jnp.tanh(x @ params["up"]), "hidden") @ params["down"]


def inputs(shape=(BATCH, SEQ, DIM)):
    return jax.random.normal(jax.random.key(1), shape)


def linen_params(scan):
    return Model(Block, scan).init(jax.random.key(0), inputs())["params"]


def fn_params():
    up, down = (jax.random.normal(jax.random.key(i), (LAYERS, DIM, DIM)) / 5 for i in range(2))
    return {"up": up, "down": down}


def plan_for(params, mesh, stage=0, **fields):
    return jzero.make_plan(params, stage=stage, mesh=mesh, min_shard_bytes=0, **fields)


def linen(plan, scan, options):
    block = Block if options is None else jzero.remat(Block, plan, prevent_cse=not scan, **options)
    model = Model(block, scan)
    return lambda p, x: jnp.mean(model.apply({"params": p}, x) ** 2)


def functions(plan, scan, options):
    fn = block_fn if options is None else jzero.remat(block_fn, plan, prevent_cse=not scan, **options)

    def loss(params, x):
        if scan:
            x, _ = jax.lax.scan(lambda x, p: (fn(p, x), None), x, params)
        else:
            for i in range(LAYERS):
                x = fn(jax.tree.map(lambda a, i=i: a[i], params), x)
        return jnp.mean(x**2)

    return loss


@pytest.mark.default_cases("linen-scan-partition", "functions-unrolled-offload", "functions-scan-both")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
@pytest.mark.parametrize("make", [linen, functions])
def test_values_and_gradients_are_those_without(make, scan, options, mesh):
    """fp32, same mesh: to 2e-6 of the largest value of each gradient."""
    params = linen_params(scan) if make is linen else fn_params()
    plan = plan_for(params, mesh)
    params, x = plan.place(params), plan.place_batch(inputs())
    expected = jax.jit(jax.value_and_grad(make(plan, scan, None), argnums=(0, 1)))(params, x)
    found = jax.jit(jax.value_and_grad(make(plan, scan, OPTIONS[options]), argnums=(0, 1)))(params, x)
    assert max_error(found, expected) < 2e-6


@pytest.mark.parametrize("options", ["plain", "both", "a name is offloaded"])
def test_nnx_values_and_gradients_are_those_without(options, mesh):
    def model(remat):
        block = NnxBlock
        if remat:
            block = jzero.remat(NnxBlock, plan, **OPTIONS[options])
        return NnxModel(block, nnx.Rngs(0))

    plan = plan_for(nnx.state(NnxModel(NnxBlock, nnx.Rngs(0)), nnx.Param), mesh)
    grad = nnx.jit(nnx.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2)))
    x = plan.place_batch(inputs())
    assert isinstance(model(True).blocks[0], NnxBlock)
    assert max_error(grad(model(True), x), grad(model(False), x)) < 2e-6


def test_a_function_of_an_nnx_module_under_nnx_scan(mesh):
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def blocks(key):
        return NnxBlock(nnx.Rngs(key))

    stack = blocks(jax.random.split(jax.random.key(0), LAYERS))
    plan = plan_for(nnx.state(stack, nnx.Param), mesh)

    def loss(remat, stack, x):
        def call(block, x):
            return block(x)

        call = (
            jzero.remat(call, plan, partition="model", offload="host", prevent_cse=False) if remat else call
        )
        y = nnx.scan(lambda x, b: call(b, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, stack)
        return jnp.mean(y**2)

    x = plan.place_batch(inputs())
    found, expected = (nnx.jit(nnx.value_and_grad(partial(loss, r)))(stack, x) for r in (True, False))
    assert max_error(found, expected) < 2e-6


@pytest.mark.default_cases("2-unrolled")
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_at_every_stage_equals_the_plain_one(stage, scan, mesh):
    """Three steps of SGD with momentum, tensor parallelism on the other axis: params to 2e-6."""
    params = linen_params(scan)
    plan = plan_for(params, mesh, stage, param_specs=columns(params))
    block = jzero.remat(Block, plan, prevent_cse=not scan, **OPTIONS["both"])

    def create(block):
        tx = optax.sgd(0.1, momentum=0.9)
        return TrainState.create(apply_fn=Model(block, scan).apply, params=linen_params(scan), tx=tx)

    @jax.jit
    def step(state, x):
        grads = jax.grad(lambda p: jnp.mean(state.apply_fn({"params": p}, x) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    plain = create(Block)
    fields = {"min_shard_bytes": 0, "bucket_bytes": 4096, "param_specs": columns(params)}
    state = jzero.shard(create(block), stage=stage, mesh=mesh, **fields)
    x = plan.place_batch(inputs())
    assert_batch_is_split(x, 4)
    for _ in range(3):
        plain, state = step(plain, inputs()), step(state, x)
    assert max_error(state.params, plain.params) < 2e-6


def columns(params):
    def spec(path, x):
        name = jax.tree_util.keystr(path)
        pair = (None, "model") if "up" in name else ("model", None)
        return P(*[None] * (x.ndim - 2), *pair) if "kernel" in name else P()

    return jax.tree_util.tree_map_with_path(spec, params)


@pytest.mark.parametrize("reduce", ["step", "microbatch"])
def test_with_micro_batches(reduce, mesh):
    """In the `shard_map` of reduce="step" the other mesh axes stay automatic."""
    params = fn_params()
    plan = plan_for(params, mesh, 2)
    loss = functions(plan, True, OPTIONS["both"])
    vg = jzero.value_and_grad(loss, plan, accumulate=2, reduce=reduce)
    found = jax.jit(vg)(plan.place(params), plan.place_batch(inputs()))
    expected = jax.value_and_grad(functions(plan, True, None))(params, inputs())
    assert max_error(found, expected) < 2e-6


def towers(wrap):
    """The second block's result is no part of the loss."""
    block = wrap(block_fn)

    def run(params, x):
        y = block(jax.tree.map(lambda a: a[0], params), x)
        return jnp.mean(y**2), block(jax.tree.map(lambda a: a[1], params), y)

    return run


def first_carry(wrap):
    """The first array in the carry of the scan is no part of the loss."""
    block = wrap(lambda p, x: (jnp.sin(x), block_fn(p, x)))

    def run(params, x):
        (unused, y), _ = jax.lax.scan(lambda c, p: (block(p, c[1]), None), (jnp.zeros_like(x), x), params)
        return jnp.mean(y**2), unused

    return run


def branches(wrap):
    """Blocks in a branch, and between blocks of another kind."""
    block = wrap(block_fn)

    def run(params, x):
        first, second, third = (jax.tree.map(lambda a, i=i: a[i], params) for i in range(3))
        x = jax.lax.cond(jnp.sum(x) < 1e9, lambda x: block(second, block(first, x)), lambda x: x, x)
        y = block(third, x[:, :2])
        return jnp.mean(block(first, x) ** 2) + jnp.mean(y**2), x

    return run


@pytest.mark.parametrize("model", [towers, first_carry, branches])
@pytest.mark.parametrize("stage", [2, 3])
def test_inputs_come_back_whatever_the_loss_reads(model, stage, mesh):
    params = fn_params()
    plan = plan_for(params, mesh, stage, bucket_bytes=2048)
    ours = model(lambda fn: jzero.remat(fn, plan, partition="model", offload="host", argnums=1))
    ours = jzero.gather_on_use(ours, plan)
    found = jax.jit(jax.grad(lambda p, x: ours(p, x)[0], argnums=(0, 1)))
    expected = jax.grad(lambda p, x: model(lambda fn: fn)(p, x)[0], argnums=(0, 1))(params, inputs())
    assert max_error(found(plan.place(params), plan.place_batch(inputs())), expected) < 2e-6


# --- what is kept -----------------------------------------------------------------------------------------------


def kept(fn, params, x):
    """What the backward pass keeps, as arrays."""
    return [a for a in jax.tree.leaves(jax.vjp(fn, params, x)[1]) if isinstance(a, jax.Array) and a.ndim]


def of_inputs(arrays):
    found = [a for a in arrays if a.shape == (BATCH, SEQ, DIM)]
    return [(a.sharding.spec, a.sharding.memory_kind) for a in found]


WHOLE, SPLIT = P("data"), P("data", "model")


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ("plain", (WHOLE, "device")),
        ("partition", (SPLIT, "device")),
        ("offload", (WHOLE, "pinned_host")),
        ("both", (SPLIT, "pinned_host")),
    ],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_block_keeps_its_input_as_told_and_nothing_else(stage, options, layout, mesh):
    params = linen_params(False)
    plan = plan_for(params, mesh, stage)
    fn = jzero.gather_on_use(linen(plan, False, OPTIONS[options]), plan)
    arrays = kept(fn, plan.place(params), plan.place_batch(inputs()))
    assert of_inputs(arrays) == [layout] * LAYERS + [(WHOLE, "device")]  # the last one of the loss
    assert not [a for a in arrays if a.shape == (BATCH, SEQ, 2 * DIM)]


@pytest.mark.parametrize(
    ("options", "kinds"), [("a name is kept", ["device"]), ("a name is offloaded", ["pinned_host"])]
)
def test_named_activations_are_kept_beside_the_input(options, kinds, mesh):
    params = linen_params(False)
    plan = plan_for(params, mesh, 3)
    fn = jzero.gather_on_use(linen(plan, False, OPTIONS[options]), plan)
    arrays = kept(fn, plan.place(params), plan.place_batch(inputs()))
    hidden = [a.sharding.memory_kind for a in arrays if a.shape == (BATCH, SEQ, 2 * DIM)]
    assert hidden == kinds * LAYERS


@pytest.mark.parametrize("options", OPTIONS)
def test_gathered_weights_are_never_kept(options, mesh):
    params = linen_params(False)
    plan = plan_for(params, mesh, 3)
    fn = jzero.gather_on_use(linen(plan, False, OPTIONS[options]), plan)
    arrays = kept(fn, plan.place(params), plan.place_batch(inputs()))
    sizes = {x.size for x in plan.layouts if len(x.shape) == 2}
    weights = [a for a in arrays if a.size in sizes and a.ndim == 2]
    assert len(weights) >= 2 * LAYERS - 1  # the shards
    assert not [a.shape for a in weights if a.sharding.is_fully_replicated]


def test_in_a_scan_the_stack_is_kept_as_told(mesh):
    params = fn_params()
    plan = plan_for(params, mesh)
    jaxpr = jax.make_jaxpr(
        lambda p, x: jax.tree.leaves(jax.vjp(functions(plan, True, OPTIONS["both"]), p, x)[1])
    )(params, inputs())
    stacks = [a for a in jaxpr.out_avals if a.shape == (LAYERS, BATCH, SEQ, DIM)]
    assert [a.memory_space for a in stacks] == [HOST]


@pytest.mark.parametrize("stage", [0, 3])
def test_nothing_is_computed_in_host_memory(stage, mesh):
    """JAX rounds what a region keeps and also reads; XLA would do that on the host."""
    plan = plan_for(fn_params(), mesh, stage)
    loss = jzero.gather_on_use(functions(plan, False, OPTIONS["offload"]), plan)
    text = str(jax.make_jaxpr(jax.grad(loss))(fn_params(), plan.place_batch(inputs())))
    assert (text.count("name=jzero_store"), text.count("reduce_precision")) == (LAYERS, 0)


def test_an_outer_region_keeps_nothing_of_the_inner_one(mesh):
    plan = plan_for(fn_params(), mesh)
    loss = jax.checkpoint(functions(plan, False, OPTIONS["offload"]))
    arrays = kept(loss, plan.place(fn_params()), plan.place_batch(inputs()))
    assert of_inputs(arrays) == [(WHOLE, "device")]  # its own input


def test_forward_mode_and_vmap(mesh):
    params, x = fn_params(), inputs()
    plan = plan_for(params, mesh)
    for fn in (linearized, mapped):
        found, expected = (fn(functions(plan, False, o), params, x) for o in (OPTIONS["both"], None))
        assert max_error(found, expected) < 2e-6


def linearized(loss, params, x):
    return jax.jit(lambda x: jax.jvp(partial(loss, params), (x,), (x,)))(x)


def mapped(loss, params, x):
    return jax.jit(jax.vmap(jax.grad(loss, argnums=1), in_axes=(None, 0)))(params, jnp.stack([x, 2 * x]))


def test_second_derivatives(mesh):
    """With `offload` JAX's transpose of a copy to the host is not there (nor for its own policies)."""
    params, x = fn_params(), inputs()
    plan = plan_for(params, mesh)

    def second(options):
        loss = functions(plan, False, options)
        return jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(loss, 1)(params, x) ** 2)))(x)

    assert max_error(second(OPTIONS["partition"]), second(None)) < 2e-5


# --- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "fields", "message"),
    [
        (ValueError, {"partition": "modle"}, "the mesh {'data': 4, 'model': 2} has no axis 'modle'. Did you mean 'mod"),
        (ValueError, {"partition": "data"}, "'data' splits the batch already"),
        (ValueError, {"partition": ("model", "model")}, "name each axis once"),
        (ValueError, {"offload": "disk"}, "offload must be one of 'host' or None"),
        (TypeError, {"policy": "dots"}, "jax.checkpoint_policies"),
        (TypeError, {"dim": True}, "dim must be an integer"),
        (TypeError, {"argnums": 1.0}, "argnums"),
    ],
)  # fmt: skip
def test_bad_arguments(error, fields, message, mesh):
    with pytest.raises(error) as caught:
        jzero.remat(Block, plan_for(fn_params(), mesh), **fields)
    assert message in str(caught.value)


def test_subjects_and_plans_of_the_wrong_kind(mesh):
    plan = plan_for(fn_params(), mesh)
    with pytest.raises(TypeError, match="neither a Module class nor a function"):
        jzero.remat(Block(), plan, partition="model")
    with pytest.raises(TypeError, match="neither a Module class nor a function"):
        jzero.remat(int, plan)
    with pytest.raises(TypeError, match=r"plan must be a jzero.Plan, not Mesh"):
        jzero.remat(Block, mesh)


@pytest.mark.parametrize(
    ("shape", "fields", "message"),
    [
        ((BATCH, 7, DIM), {}, "'model' (2 devices) cannot split dim 1 of the block's input f32[8,7,24]: 7 = 3 x 2 + 1"),
        ((BATCH, 7, DIM), {"dim": 3}, "it has 3 dims"),
        ((BATCH, SEQ, DIM), {"argnums": 2}, "argnums=(2,), and of its 2 positional arguments 1 are"),
        ((BATCH, SEQ, DIM), {"argnums": ()}, "argnums=(), and of its 2 positional arguments 1 are"),
    ],
)  # fmt: skip
def test_inputs_that_cannot_be_split(shape, fields, message, mesh):
    params = fn_params()
    fn = jzero.remat(block_fn, plan_for(params, mesh), partition="model", **fields)
    layer = jax.tree.map(lambda a: a[0], params)
    if "argnums" not in fields:  # no error where nothing is kept: `init` with a short sequence, decoding
        assert fn(layer, inputs(shape)).shape == shape
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.grad(lambda x: fn(layer, x).sum())(inputs(shape))


def test_a_param_is_not_taken_for_the_input(mesh):
    params = {"w": jnp.eye(DIM)}
    plan = plan_for(params, mesh, 3)
    fn = jzero.remat(lambda w, x: x @ w, plan, offload="host")
    with pytest.raises(ValueError, match="a param of shape"):
        jzero.gather_on_use(lambda p, x: fn(p["w"], x).sum(), plan)(params, plan.place_batch(inputs()))
    right = jzero.remat(lambda w, x: x @ w, plan, offload="host", argnums=1)
    loss = jzero.gather_on_use(lambda p, x: right(p["w"], x).sum(), plan)
    arrays = kept(loss, plan.place(params), plan.place_batch(inputs()))
    assert of_inputs(arrays) == [(WHOLE, "pinned_host")]


def test_a_platform_without_pinned_memory(mesh):
    class Device:
        platform = "toy"

        def __init__(self, id):
            self.id, self.process_index = id, 0

        def addressable_memories(self):
            return [type("Memory", (), {"kind": "device"})]

    toy = Mesh(np.array([Device(i) for i in range(8)], dtype=object).reshape(4, 2), ("data", "model"))
    plan = plan_for(fn_params(), toy)
    with pytest.raises(
        ValueError, match=r"jzero.remat\(offload='host'\): devices of platform 'toy' have no pinned_host"
    ):
        jzero.remat(Block, plan, offload="host")
    jzero.remat(Block, plan, partition="model")


# --- XLA of old jaxlibs reads a host array backwards in the wrong order -------------------------------------------


@pytest.fixture
def old_gpu(monkeypatch):
    """CPU devices that pass for GPUs, with the oldest jaxlib."""
    monkeypatch.setattr(xla_options, "GPUS", ("cpu",))
    monkeypatch.setattr(xla_options.jaxlib, "__version__", "0.11.1")


def traced_grad(loss, plan):
    return jax.make_jaxpr(jax.grad(loss))(plan.place(fn_params()), plan.place_batch(inputs()))


REFUSED = r'jzero.remat\(offload="host"\) inside of a loop .* jaxlib 0.11.1.* 46231.*jaxlib >= 0.11.2 \(Python 3.12\)'


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("options", ["offload", "both"])
def test_offload_in_a_scan_is_refused_where_xla_gets_it_wrong(options, stage, mesh, old_gpu):
    plan = plan_for(fn_params(), mesh, stage, bucket_bytes=2048)
    given = OPTIONS[options]
    for wrap in (lambda loss: loss, lambda loss: jzero.gather_on_use(loss, plan)):
        loss = wrap(functions(plan, True, given))
        with pytest.raises(NotImplementedError, match=REFUSED):
            traced_grad(loss, plan)
        jax.eval_shape(loss, fn_params(), inputs())  # nothing is kept without a gradient
        traced_grad(wrap(functions(plan, False, given)), plan)
        traced_grad(wrap(functions(plan, True, OPTIONS["partition"])), plan)


def test_a_linen_scan_is_refused_as_well(mesh, old_gpu):
    params = linen_params(True)
    plan = plan_for(params, mesh)
    with pytest.raises(NotImplementedError, match=REFUSED):
        jax.make_jaxpr(jax.grad(linen(plan, True, OPTIONS["offload"])))(params, inputs())


def test_a_loop_over_micro_batches_keeps_nothing(mesh, old_gpu):
    plan = plan_for(fn_params(), mesh, 2, bucket_bytes=2048)
    loss = functions(plan, False, OPTIONS["offload"])
    for reduce in ("step", "microbatch"):
        vg = jzero.value_and_grad(loss, plan, accumulate=2, reduce=reduce)
        jax.make_jaxpr(vg)(plan.place(fn_params()), plan.place_batch(inputs((2 * BATCH, SEQ, DIM))))


def test_a_block_that_was_traced_before_its_scan_is_refused(mesh, old_gpu):
    plan = plan_for(fn_params(), mesh, 3, bucket_bytes=2048)
    block = jax.jit(jzero.remat(block_fn, plan, **OPTIONS["offload"], argnums=1))

    def loss(params, x):
        x = block(jax.tree.map(lambda a: a[0], params), x)
        return jnp.mean(jax.lax.scan(lambda x, p: (block(p, x), None), x, params)[0] ** 2)

    with pytest.raises(NotImplementedError, match=REFUSED):
        traced_grad(jzero.gather_on_use(loss, plan), plan)


@pytest.mark.parametrize(("version", "wrong"), [("0.11.1", True), ("0.11.2", False), ("0.12.0.1", False)])
def test_only_gpus_with_an_old_jaxlib(version, wrong, monkeypatch):
    monkeypatch.setattr(xla_options.jaxlib, "__version__", version)
    assert bool(xla_options.host_loop_limit("gpu", "here")) == wrong
    assert not xla_options.host_loop_limit("cpu", "here")
    assert not xla_options.host_loop_limit("tpu", "here")


@pytest.mark.parametrize(
    ("given", "flags", "level", "warned"),
    [
        ({}, "", "UNKNOWN", ""),
        ({"optimization_level": "O1"}, "", "UNKNOWN", "optimization_level=O1"),
        ({}, "", "O2", "optimization_level=O2"),
        ({}, f"--{xla_options.PIPELINED}=true", "O0", xla_options.PIPELINED),
        ({xla_options.PIPELINED: True}, "", "UNKNOWN", xla_options.PIPELINED),
        ({"optimization_level": "O0"}, "", "O1", ""),
        ({"optimization_level": 9}, "", "O1", ""),
        ({"optimization_level": 29}, "", "UNKNOWN", "optimization_level=29"),
    ],
)
def test_copies_that_xla_may_pipeline(given, flags, level, warned, monkeypatch, recwarn):
    monkeypatch.setenv("XLA_FLAGS", flags)
    before = jax.config.jax_optimization_level
    jax.config.update("jax_optimization_level", level)
    try:
        for platform in ("cpu", "gpu"):
            assert not recwarn.list
            xla_options.warn_of_pipelined_offload(platform, "state", given)
    finally:
        jax.config.update("jax_optimization_level", before)
    assert [warned in str(w.message) for w in recwarn.list] == ([True] if warned else [])


def test_offload_that_xla_may_pipeline_is_warned_of(mesh, monkeypatch):
    """In a plan, in the options of a jitted step, and where a block's input is kept."""
    monkeypatch.setattr(xla_options, "GPUS", ("cpu",))
    plan = plan_for(fn_params(), mesh, 2, offload=jzero.Offload(tier="host"))
    step = jzero.jit(lambda params, x: params, plan, compiler_options={"optimization_level": "O1"})
    with pytest.warns(UserWarning, match="state is in host memory, and optimization_level=O1"):
        step.lower(jax.tree.map(jnp.asarray, fn_params()), inputs())
    monkeypatch.setenv("XLA_FLAGS", f"--{xla_options.PIPELINED}=true")
    with pytest.warns(UserWarning, match=f"state is in host memory, and {xla_options.PIPELINED}"):
        plan_for(fn_params(), mesh, 2, offload=jzero.Offload(tier="host"))
    block = jzero.remat(block_fn, plan, offload="host", argnums=1)
    with pytest.warns(UserWarning, match="a block's input is in host memory"):
        jax.eval_shape(jax.grad(lambda p, x: jnp.sum(block(p, x))), jax.tree.map(lambda a: a[0], fn_params()), inputs())
