"""Frozen params that stay whole at stage 3: `check` names them with their bytes, and its remedy splits them."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jzero
from jzero.proof.faults import frozen
from jzero.proof.hlo import parse

DIM, RANK, LAYERS = 128, 4, 3
TX = optax.adam(1e-3)
BASE = LAYERS * DIM * DIM * 4


def frozen_below(tx):
    """All weights are params, and the optimizer freezes those that are not adapters."""

    def labels(params):
        word = lambda path, _: "trained" if "lora" in jax.tree_util.keystr(path) else "frozen"  # noqa: E731
        return jax.tree_util.tree_map_with_path(word, params)

    return optax.multi_transform({"trained": tx, "frozen": optax.set_to_zero()}, labels)


FROZEN = frozen_below(TX)


class WithBase(TrainState):
    base: dict


def apply_fn(variables, x):
    lora, base = variables["params"]["lora"], variables.get("base") or variables["params"]["base"]
    for i in range(LAYERS):
        x = jnp.tanh(x @ base[f"w{i}"] + x @ lora[f"a{i}"] @ lora[f"b{i}"])
    return x


def adapters():
    some = {f"a{i}": jnp.ones((DIM, RANK)) for i in range(LAYERS)}
    return some | {f"b{i}": jnp.ones((RANK, DIM)) for i in range(LAYERS)}


def weights():
    return {f"w{i}": jnp.ones((DIM, DIM)) for i in range(LAYERS)}


def in_the_state():
    return WithBase.create(apply_fn=apply_fn, params={"lora": adapters()}, tx=TX, base=weights())


def beside_the_state():
    return TrainState.create(apply_fn=apply_fn, params={"lora": adapters()}, tx=TX)


def trained_ones(path, leaf):  # as the remedy has it
    return "lora" in path


def among_the_params(tx=TX):
    return TrainState.create(apply_fn=apply_fn, params={"lora": adapters(), "base": weights()}, tx=tx)


def step(state, batch, base=None):
    base = getattr(state, "base", base)

    def loss_fn(params):
        return jnp.mean(state.apply_fn({"params": params, "base": base}, batch) ** 2)

    return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))


def found_in(create, mesh, stage=3, trainable=None, step=step, rows=64, **arguments):
    state = jzero.abstract(create, stage=stage, mesh=mesh, min_shard_bytes=0, trainable=trainable)
    plan = jzero.plan_of(state)
    whole = {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=plan.sharding(jax.P()))
        for k, x in arguments.items()
    }
    batch = jax.ShapeDtypeStruct((rows, DIM), jnp.float32, sharding=plan.batch)
    args = (state, batch, whole) if whole else (state, batch)
    program = jax.jit(step, donate_argnums=0).lower(*args).compile()
    return jzero.findings(program, plan), jzero.explain(program, plan).memory.arguments


@pytest.mark.default_cases("beside_the_state-arguments1")
@pytest.mark.remedy("frozen_whole", "trainable=lambda path, leaf: 'lora' in path")
@pytest.mark.parametrize(("create", "arguments"), [(in_the_state, {}), (beside_the_state, weights())])
def test_a_base_below_adapters(create, arguments, mesh):
    (finding,), _ = found_in(create, mesh, **arguments)
    assert (finding.kind, finding.bytes) == ("state_too_large", BASE)
    assert (
        "3 arrays that are not trained, 196.61 kB, lie whole on every device, beside 12.29 kB" in finding.text
    )
    assert "['w0'][128,128]" in finding.text
    assert "trainable=lambda path, leaf: 'lora' in path" in finding.remedy
    assert found_in(create, mesh, stage=2, **arguments)[0] == ()  # where all params are whole
    assert found_in(among_the_params, mesh, trainable=trained_ones)[0] == ()


@pytest.mark.parametrize("way", ["the remedy", "by the optimizer"])
def test_the_remedy_splits_them(way, mesh):
    given = (among_the_params, trained_ones) if way == "the remedy" else (lambda: among_the_params(FROZEN), None)
    found, held = found_in(given[0], mesh, trainable=given[1])
    assert found == ()
    assert held < BASE // 8 + 3 * (2 * LAYERS * DIM * RANK * 4) // 8 + 8 * DIM * 4 + 64


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32])
def test_a_base_in_codes(dtype, mesh):
    """Codes of at most 8 bits wherever they come in; wider integers, which may be indices, in the train state."""
    codes = {k: x.astype(dtype) for k, x in weights().items()}
    (finding,), _ = found_in(lambda: in_the_state().replace(base=codes), mesh)
    assert (finding.kind, finding.bytes) == ("state_too_large", BASE * codes["w0"].dtype.itemsize // 4)
    found, _ = found_in(beside_the_state, mesh, **codes)
    assert [f.bytes for f in found] == ([finding.bytes] if dtype == jnp.int8 else [])


@pytest.mark.remedy("not_checked", "Frozen weights: among the params")
@pytest.mark.remedy("not_checked", "a part of the batch: plan.place_batch(batch)")
def test_a_base_with_as_many_rows_as_the_batch(mesh):
    (finding,), _ = found_in(beside_the_state, mesh, rows=DIM, **weights())
    assert (finding.kind, finding.bytes) == ("not_checked", BASE)
    assert "3 whole arrays have as many rows as the batch, and are frozen weights or a part of it" in finding.text
    assert found_in(among_the_params, mesh, trainable=trained_ones, rows=DIM)[0] == ()


@pytest.mark.remedy("frozen_whole", "an argument of the step for each")
def test_a_base_that_the_step_closes_over(mesh, monkeypatch):
    base = {k: np.random.default_rng(i).normal(size=(DIM, DIM)) for i, k in enumerate(weights())}

    def closes_over(state, batch):
        return step(state, batch, base)

    assert frozen.LARGE_CONSTANTS == 64 * 2**20
    assert found_in(beside_the_state, mesh, step=closes_over)[0] == ()  # as large as masks are
    monkeypatch.setattr(frozen, "LARGE_CONSTANTS", BASE - 1)
    (finding,), _ = found_in(beside_the_state, mesh, step=closes_over)
    assert (finding.kind, finding.bytes) == ("state_too_large", BASE)
    assert "3 arrays that the step closes over, 196.61 kB, are constants of the program" in finding.text
    assert "whole on every device: f32[128,128], f32[128,128], f32[128,128]." in finding.text
    assert found_in(among_the_params, mesh, trainable=trained_ones)[0] == ()


def test_clones_of_a_constant_count_once():
    """As XLA names those that it copies into fusions, for the CPU and for GPUs."""
    names = "c.1", "c.1.clone", "c.1.clone.2", "c_2_clone_1"
    lines = [f"  %{name} = f32[8,8]{{1,0}} constant({{...}})" for name in names]
    lines += ["  %mask = pred[8,8] constant({...})", "}"]
    module = parse("\n".join(["HloModule step", "ENTRY %main () -> f32[] {", *lines]))
    found = frozen.constants(types.SimpleNamespace(module=module))
    assert [(x.dtype, x.dims) for x in found] == [("f32", (8, 8))] * 2


class Buffer(nnx.Variable):
    """A weight that is not an `nnx.Param`."""


class Adapted(nnx.Module):
    def __init__(self, rngs, kind):
        layers = [nnx.LoRALinear(DIM, DIM, lora_rank=RANK, use_bias=False, rngs=rngs) for _ in range(LAYERS)]
        for layer in layers:
            layer.kernel = kind(layer.kernel.get_value())
        self.layers = nnx.List(layers)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


@pytest.mark.remedy("frozen_whole", "an nnx.Param, and wrt=nnx.LoRAParam")
def test_nnx(mesh):
    def found(tx, wrt, kind=nnx.Param):
        def create():
            model = Adapted(nnx.Rngs(0), kind)
            return model, nnx.Optimizer(model, tx, wrt=wrt)

        pair = jzero.abstract(create, stage=3, mesh=mesh, min_shard_bytes=0)
        plan = jzero.plan_of(pair)

        def step(model, optimizer, x):
            loss = jzero.gather_on_use(lambda model, x: jnp.mean(model(x) ** 2), plan)
            optimizer.update(model, nnx.grad(loss, argnums=nnx.DiffState(0, wrt))(model, x))

        x = jax.ShapeDtypeStruct((64, DIM), jnp.float32, sharding=plan.batch)
        return jzero.findings(nnx.jit(step, donate_argnums=(0, 1)).lower(*pair, x).compile(), plan)

    (finding,) = found(TX, nnx.LoRAParam, Buffer)
    assert (finding.kind, finding.bytes) == ("state_too_large", BASE)
    assert "an nnx.Param, and wrt=nnx.LoRAParam" in " ".join(finding.remedy.split())
    assert found(TX, nnx.LoRAParam) == found(FROZEN, nnx.Param) == ()
