"""`check`: programs that really have a fault, each found; clean programs of every stage, none found.

Compiled for eight H200, scan and unrolled, on every jax that is tested. No GPU is needed.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import jzero
from jzero.proof.check import KINDS, CheckError, Finding, check, findings

pytest.importorskip(
    "jax_plugins.xla_cuda12", reason="compile-only pods need the jax-cuda12-plugin (jzero[pod])"
)

LAYERS, DIM, HEADS, VOCAB, SEQ = 3, 128, 4, 512, 16
KW = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        dense = functools.partial(nn.Dense, use_bias=False, **KW)
        y = nn.LayerNorm(**KW)(x)
        q, k, v = (t.reshape(*t.shape[:2], HEADS, -1) for t in jnp.split(dense(3 * DIM)(y), 3, -1))
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8)
        x = x + dense(DIM)(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))
        return x + dense(DIM)(nn.gelu(dense(4 * DIM)(nn.LayerNorm(**KW)(x)))), None


class Gpt(nn.Module):
    scan: bool
    remat: bool = True
    vocab: int = VOCAB

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocab, DIM, **KW)
        x = embed(tokens)
        block = nn.remat(Block, prevent_cse=not self.scan) if self.remat else Block
        if self.scan:
            stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            x, _ = stack(name="layers")(x, None)
        else:
            for i in range(LAYERS):
                x, _ = block(name=f"block_{i}")(x)
        return embed.attend(nn.LayerNorm(**KW)(x)).astype(jnp.float32)


def create(scan, remat=True, vocab=VOCAB):
    model = Gpt(scan, remat, vocab)
    params = model.init(jax.random.key(0), jnp.zeros((1, SEQ), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(3e-4))


def loss_of(state, params, batch):
    logits = state.apply_fn({"params": params}, batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["tokens"][:, 1:]).mean()


def train_step(state, batch):
    loss, grads = jax.value_and_grad(lambda p: loss_of(state, p, batch))(state.params)
    return state.apply_gradients(grads=grads), loss


def constrained(tree, spec):
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, spec(x)), tree)


def whole(tree, mesh):
    return constrained(tree, lambda x: jax.NamedSharding(mesh, P()))


def state_of(stage, *, scan, remat=True, vocab=VOCAB, mesh=None, **fields):
    mesh = jzero.pod("h200").mesh({"data": 8}) if mesh is None else mesh
    fields = {"min_shard_bytes": 0, **fields}
    state = jzero.abstract(lambda: create(scan, remat, vocab), stage=stage, mesh=mesh, **fields)
    return state, jzero.plan_of(state)


def tokens(size=8, sharding=None):
    return {"tokens": jax.ShapeDtypeStruct((size, SEQ), jnp.int32, sharding=sharding)}


def found_in(state, plan, step=train_step, *, batch=None, donate=0):
    batch = tokens() if batch is None else batch
    program = jzero.pod("h200").compile(step, state, batch, donate_argnums=donate, plan=plan)
    return {f.kind: f for f in findings(program, plan)}


BOTH = pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@BOTH
def test_clean(stage, scan):
    assert found_in(*state_of(stage, scan=scan)) == {}


@BOTH
def test_clean_stage_3_without_remat(scan):
    assert found_in(*state_of(3, scan=scan, remat=False)) == {}


@pytest.mark.parametrize("stage", [2, 3])
@BOTH
def test_clean_large_batch(stage, scan):
    assert found_in(*state_of(stage, scan=scan), batch=tokens(512)) == {}


def tensor_parallel(params):
    """Megatron's layout: column, then row."""

    def spec(path, x):
        name = jax.tree_util.keystr(path)
        column = "Dense_0" in name or "Dense_2" in name
        entries = (None, "model") if column else ("model", None)
        return P(*[None] * (x.ndim - 2), *entries) if "Dense" in name else P()

    return jax.tree_util.tree_map_with_path(spec, params)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@BOTH
def test_clean_with_tensor_parallelism(stage, scan):
    mesh = jzero.pod("h200").mesh({"model": 2, "data": 4})
    specs = tensor_parallel(jax.eval_shape(lambda: create(scan)).params)
    assert found_in(*state_of(stage, scan=scan, mesh=mesh, param_specs=specs)) == {}


@BOTH
def test_clean_with_replicas(scan):
    mesh = jzero.pod("h200").mesh({"replica": 2, "data": 4})
    assert found_in(*state_of(2, scan=scan, mesh=mesh, batch_axis=("replica", "data"))) == {}


@pytest.mark.parametrize("stage", [2, 3])
@BOTH
def test_batch_not_split(stage, scan):
    state, plan = state_of(stage, scan=scan)
    found = found_in(state, plan, batch=tokens(8, plan.sharding(P())))
    finding = found["batch_not_split"]
    assert finding.bytes == 8 * SEQ * 4
    assert "['tokens'][8,16]" in finding.text
    assert "plan.place_batch(batch)" in finding.remedy


def test_batch_split_inside_of_the_step_is_no_fault():
    state, plan = state_of(2, scan=True)

    def step(state, batch):
        return train_step(state, constrained(batch, lambda x: plan.batch))

    assert found_in(state, plan, step, batch=tokens(8, plan.sharding(P()))) == {}


def naive(state):
    """Stage 3 by layouts alone: the plain model on split params."""
    return state.replace(apply_fn=state.apply_fn.fn)


@BOTH
def test_gather_on_use_not_traced_and_activations_moved(scan):
    state, plan = state_of(3, scan=scan)
    found = found_in(naive(state), plan)
    assert set(found) >= {"gather_on_use_not_traced", "activations_moved"}
    assert found["gather_on_use_not_traced"].bytes == pytest.approx(plan.param_bytes, rel=0.01)
    assert "all-to-all" in found["activations_moved"].text
    assert found["activations_moved"].bytes > 0.05 * plan.param_bytes


@BOTH
def test_gradients_all_reduced(scan):
    state, plan = state_of(2, scan=scan)

    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda p: loss_of(state, p, batch))(state.params)
        grads = whole(grads, plan.mesh)
        clean = jax.tree.map(
            lambda g: g / (1 + jnp.sqrt(jnp.sum(g**2))), grads
        )  # a norm of the whole gradient
        return state.apply_gradients(grads=clean), loss

    found = found_in(state, plan, step)
    assert set(found) == {"gradients_all_reduced"}
    assert found["gradients_all_reduced"].bytes >= 0.9 * plan.param_bytes


@pytest.mark.parametrize("stage", [1, 2, 3])
@BOTH
def test_state_whole(stage, scan):
    state, plan = state_of(stage, scan=scan)

    def step(state, batch):
        state, loss = train_step(state, batch)
        return whole(state, plan.mesh), loss

    found = found_in(state, plan, step)
    copies = 12 if stage < 3 else 14
    assert found["state_whole"].bytes == pytest.approx(copies * plan.param_bytes // 2 * 7 // 8, rel=0.01)
    assert "comes back" in found["state_whole"].text


@BOTH
def test_state_not_donated(scan):
    found = found_in(*state_of(2, scan=scan), donate=())
    assert set(found) == {"state_not_donated"}
    assert "donate_argnums=0" in found["state_not_donated"].remedy
    assert found["state_not_donated"].bytes > 0


@BOTH
def test_replicated_leaves(scan):
    found = found_in(*state_of(2, scan=scan, min_shard_bytes=2**20))
    assert "replicated_leaves" in found
    finding = found["replicated_leaves"]
    assert "['Embed_0']['embedding']" in finding.text
    assert "bf16[512,128]" in finding.text
    assert finding.remedy == "pass ZeroConfig(min_shard_bytes=0)."


def test_stack_gathered_before_the_loop():
    state, plan = state_of(3, scan=True)

    def step(state, batch):
        def loss_fn(params):
            return loss_of(naive(state), whole(params, plan.mesh), batch)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    found = found_in(state, plan, step, batch=tokens(512))
    finding = found["stack_gathered_before_loop"]
    stacks = sum(x.nbytes for x in plan.layouts if x.scanned and len(x.shape) == 3)
    assert finding.bytes >= stacks
    assert "gathered_weights_kept" not in found


@BOTH
def test_gathered_weights_kept(scan):
    state, plan = state_of(3, scan=scan, remat=False)

    def step(state, batch):
        def loss_fn(params):
            if scan:
                return loss_of(naive_gathering(state, plan), params, batch)
            return loss_of(naive(state), whole(params, plan.mesh), batch)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    found = found_in(state, plan, step, batch=tokens(512))
    assert found["gathered_weights_kept"].bytes >= 0.5 * plan.param_bytes
    assert "gather_on_use_not_traced" in found


def naive_gathering(state, plan):
    """A constraint in the block, and no remat: what each layer gathers becomes a residual of the scan."""

    class Gathering(Block):
        @nn.compact
        def __call__(self, x, _=None):
            inner = nn.map_variables(Block, "params", lambda p: whole(p, plan.mesh), mutable=True)
            return inner(name="block")(x, None)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(VOCAB, DIM, **KW, name="Embed_0")
            stack = nn.scan(
                Gathering, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
            )
            x, _ = stack(name="layers")(embed(tokens), None)
            return embed.attend(nn.LayerNorm(**KW, name="LayerNorm_0")(x)).astype(jnp.float32)

    def apply(variables, tokens):
        params = dict(variables["params"])
        params["layers"] = {"block": params["layers"]}
        return Model().apply({"params": params}, tokens)

    return state.replace(apply_fn=apply)


@pytest.mark.parametrize(("stage", "scan"), [(0, True), (2, True), (2, False)])
def test_reduction_per_microbatch(stage, scan):
    state, plan = state_of(stage, scan=scan)

    def step(state, batch):
        def add(total, part):
            grads = jax.grad(lambda p: loss_of(state, p, part))(state.params)
            return jax.tree.map(jnp.add, total, grads), None

        parts = jax.tree.map(lambda x: x.reshape(4, -1, SEQ), batch)
        parts = constrained(parts, lambda x: plan.sharding(P(None, "data")))
        grads, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, state.params), parts)
        return state.apply_gradients(grads=grads), 0.0

    finding = found_in(state, plan, step, batch=tokens(32))["reduction_per_microbatch"]
    assert "reduced 4." in finding.text
    assert finding.bytes >= 2 * plan.param_bytes


class Net(nnx.Module):
    def __init__(self, rngs, width):
        self.first, self.norm = nnx.Linear(128, width, rngs=rngs), nnx.BatchNorm(width, rngs=rngs)
        self.second = nnx.Linear(width, 128, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.norm(self.first(x))))


def nnx_found(stage, *, donate=(0, 1), split=True):
    def create():
        model = Net(nnx.Rngs(0), 256)
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @functools.partial(nnx.jit, donate_argnums=donate)
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    pod = jzero.pod("h200")
    pair = jzero.abstract(create, stage=stage, mesh=pod.mesh({"data": 8}), min_shard_bytes=0)
    plan = jzero.plan_of(pair)
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=plan.batch if split else plan.sharding(P()))
    return {f.kind: f for f in findings(pod.compile(step, *pair, x), plan)}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_nnx_clean(stage):
    assert nnx_found(stage) == {}


def test_nnx_faults():
    assert set(nnx_found(2, donate=())) == {"state_not_donated"}
    assert nnx_found(2, split=False)["batch_not_split"].bytes == 64 * 128 * 4


def test_leaves_that_no_dim_divides():
    plan = jzero.make_plan(
        {"odd": jax.ShapeDtypeStruct((129, 131), jnp.float32)},
        stage=2,
        mesh=jzero.pod("h200").mesh({"data": 8}),
    )
    (finding,) = findings(jax.jit(lambda x: x * 2).lower(jnp.ones(8)).compile(), plan)
    assert (finding.kind, finding.bytes) == ("replicated_leaves", 129 * 131 * 4)
    assert finding.remedy.startswith("make a dim of the leaf a multiple of 8")


def test_check_lists_every_finding_and_its_remedy():
    state, plan = state_of(3, scan=True)
    program = jzero.pod("h200").compile(train_step, naive(state), tokens(), plan=plan)
    with pytest.raises(CheckError, match=r"jzero\.check: \d findings; stage 3") as caught:
        check(program, plan)
    found = caught.value.findings
    assert found == findings(program, plan)
    assert [f.kind for f in found] == [k for k in KINDS if k in {f.kind for f in found}]
    for finding in found:
        assert isinstance(finding, Finding)
        assert str(finding) in str(caught.value)
        assert finding.bytes > 0
    assert "Remedy: jax.jit(step, donate_argnums=0)" in str(caught.value)


def test_cpu_programs():
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:8], ("data",))
    state, plan = state_of(2, scan=True, mesh=mesh)
    batch = tokens(8, plan.batch)
    step = jax.jit(train_step, donate_argnums=0)
    assert findings(step.lower(state, batch).compile(), plan) == ()
    kept = findings(jax.jit(train_step).lower(state, tokens(8, plan.sharding(P()))).compile(), plan)
    assert {"batch_not_split", "state_not_donated"} <= {f.kind for f in kept}


def test_bad_input():
    _, plan = state_of(2, scan=True)
    with pytest.raises(TypeError, match=r"needs a compiled program, got function"):
        findings(lambda x: x, plan)
    with pytest.raises(TypeError, match=r"jzero\.check: needs a plan, got int\. Pass jzero\.plan_of"):
        check(jax.jit(lambda x: x).lower(1.0).compile(), 3)
