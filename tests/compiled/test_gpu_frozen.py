"""A LoRA at stage 3, compiled for GPUs: frozen weights are gathered forward and backward, and never reduced."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from programs import QUICK

import jzero

DIM, RANK, LAYERS, BF16 = 256, 8, 4, jnp.bfloat16
BUCKET = 100_000  # several of them: the order of gathers is in the program
TX = optax.adamw(1e-3)
BASE = LAYERS * 2 * DIM * 4 * DIM * 2


class Lora(nn.Module):
    out: int

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        w = self.param("kernel", init, (x.shape[-1], self.out), BF16)
        a = self.param("lora_a", init, (x.shape[-1], RANK), BF16)
        return x @ w + x @ a @ self.param("lora_b", init, (RANK, self.out), BF16)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + Lora(DIM)(nn.gelu(Lora(4 * DIM)(x))), None


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x, _ = nn.scan(nn.remat(Block, prevent_cse=False), length=LAYERS, **split)(name="layers")(x, None)
        return x


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        kw = {"lora_rank": RANK, "use_bias": False, "param_dtype": BF16, "lora_param_dtype": BF16, "rngs": rngs}
        self.up, self.down = nnx.LoRALinear(DIM, 4 * DIM, **kw), nnx.LoRALinear(4 * DIM, DIM, **kw)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss_of(out):
    return jnp.mean(out.astype(jnp.float32) ** 2)


def labels(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "on" if "lora" in jax.tree_util.keystr(path) else "off", params
    )


def linen_program(mesh, way):
    tx = TX if way == "filter" else optax.multi_transform({"on": TX, "off": optax.set_to_zero()}, labels)
    given = {"trainable": lambda path, leaf: "lora" in path[-1]} if way == "filter" else {}
    model = Net()

    def create():
        params = model.init(jax.random.key(0), jnp.ones((1, DIM), BF16))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    state = jzero.abstract(create, stage=3, mesh=mesh, min_shard_bytes=0, bucket_bytes=BUCKET, **given)

    def step(state, x):
        value, grads = jax.value_and_grad(lambda p: loss_of(state.apply_fn({"params": p}, x)))(state.params)
        return state.apply_gradients(grads=grads), value

    return step, (state,), jzero.plan_of(state), state.tx, 0


def nnx_program(mesh, way):
    def create():
        model = NnxNet(nnx.Rngs(0))
        return model, nnx.Optimizer(model, TX, wrt=nnx.LoRAParam)

    pair = jzero.abstract(create, stage=3, mesh=mesh, min_shard_bytes=0, bucket_bytes=BUCKET)
    plan = jzero.plan_of(pair)
    loss = jzero.gather_on_use(lambda model, x: loss_of(model(x)), plan)

    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, x)
        optimizer.update(model, grads)
        return value

    return jzero.jit(step, plan), tuple(pair), plan, pair[1].tx, None


@pytest.mark.pod
@pytest.mark.default_cases("scan, filter", "nnx, wrt")
@pytest.mark.parametrize(
    ("make", "way"), [(linen_program, "filter"), (linen_program, "optimizer"), (nnx_program, "wrt")],
    ids=["scan, filter", "scan, frozen by the optimizer", "nnx, wrt"],
)  # fmt: skip
def test_frozen_weights_are_gathered_twice_and_never_reduced(make, way):
    pod = jzero.pod("h200", hosts=1, gpus_per_host=8)
    step, state, plan, tx, donate = make(pod.mesh({"data": 8}), way)
    x = jax.ShapeDtypeStruct((512, DIM), BF16, sharding=plan.batch)
    given = {} if donate is None else {"donate_argnums": donate}
    compiled = pod.compile(step, *state, x, compiler_options=QUICK, plan=plan, **given)
    uses = jzero.param_uses(step, *state, x)
    report, estimate = jzero.explain(compiled, plan), jzero.estimate(plan, tx=tx, uses=uses)
    frozen = [x for x in plan.layouts if x.frozen is not None]
    lora = sum(x.size for x in plan.layouts) - sum(x.size for x in frozen)
    assert sum(x.nbytes for x in frozen) == BASE
    assert all(x.stored != x.used for x in frozen)
    sent = {op: sum(c.total_wire_bytes for c in report.collectives if c.op == op and c.phase != "update")
            for op in ("all-gather", "reduce-scatter", "all-reduce")}  # fmt: skip
    once = BASE * 7 / 8
    assert 1.7 * once < sent["all-gather"] < 2.2 * once
    assert sent["reduce-scatter"] + sent["all-reduce"] < 2.2 * 2 * lora
    assert abs(report.wire.total - estimate.wire) < 0.01 * estimate.wire
    assert {c.phase for c in report.collectives if c.op == "all-gather" and c.scope == "gather_weight"} == {
        "forward", "backward"
    }  # fmt: skip
    assert report.memory.params == estimate.params == (BASE + 2 * lora) // 8
    assert report.memory.opt_state < 12 * lora // 8 + 64
    assert not jzero.findings(compiled, plan)
    # neither a whole gradient of the base, nor all of it gathered: a few buckets and the activations
    assert report.memory.temp < BASE / 2 + 40 * 64 * 4 * DIM * LAYERS
