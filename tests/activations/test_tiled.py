"""`tiled`: the numbers of the whole layer, a loop in the program, and layers that mix positions refused."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from models import max_error

import jzero

P = jax.P
ROWS, TIME, DIM = 8, 12, 16


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)) / 2


X, W, POSITIONS = normal(0, ROWS, TIME, DIM), normal(1, DIM, 3 * DIM), jnp.tile(jnp.arange(TIME), (ROWS, 1))
TABLE = normal(4, TIME, DIM)


def rms_norm(x, scale):
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale


def rotary(x, positions):
    angle = positions[..., None] * 100.0 ** (-jnp.arange(DIM // 2) / DIM)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)


def two_of_four_experts(x, router, up):
    """Each token chooses, so the layer is position-wise."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ router), 2)
    gates = (jax.nn.one_hot(chosen, 4) * weights[..., None]).sum(-2)
    return jnp.einsum("bte,btd,edf->btf", gates, x, up)


LAYERS = {
    "mlp": (lambda x, w: jax.nn.gelu(x @ w) @ w.T, X, W),
    "gated": (lambda x, w, v: (jax.nn.silu(x @ w) * (x @ v)) @ w.T, X, W, W * 0.7),
    "norm": (rms_norm, X, jnp.arange(1.0, DIM + 1)),
    "rotary": (rotary, X, POSITIONS),
    "experts": (two_of_four_experts, X, normal(2, DIM, 4), normal(3, 4, DIM, DIM)),
    "cond": (lambda x, w: jax.lax.cond(w.sum() > 0, lambda x: x @ w, lambda x: jnp.sin(x @ w), x), X, W),
    "scan": (lambda x, w: jax.lax.scan(lambda h, _: (jnp.tanh(h @ w @ w.T), None), x, None, length=2)[0], X, W / 4),
    "custom_vjp": (lambda x, w: jax.nn.relu(x @ w), X, W),
}


def has_loop(fn, *args):
    return "scan[" in str(jax.make_jaxpr(fn)(*args))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_tiles_is_the_layer(name):
    fn, *args = LAYERS[name]
    floating = tuple(i for i, x in enumerate(args) if x.dtype == jnp.float32)

    def value_and_grad(fn):
        return jax.jit(jax.value_and_grad(lambda *a: (fn(*a) ** 3).mean(), floating))(*args)

    for n in (3, 12):
        layer = jzero.tiled(fn, tiles=n)
        assert max_error(value_and_grad(layer), value_and_grad(fn)) < 1e-5
    assert has_loop(layer, *args)


def test_another_dim_and_arguments_by_position():
    fn = jzero.tiled(lambda w, x: x @ w, axis=0, tiles=2, argnums=1)
    np.testing.assert_allclose(fn(W, X), X @ W, atol=1e-6)
    np.testing.assert_allclose(jzero.tiled(rotary, tiles=4)(X, positions=POSITIONS), rotary(X, POSITIONS), atol=1e-6)
    turned = jzero.tiled(lambda positions, x: rotary(x, positions), axis=-2, tiles=4)
    np.testing.assert_allclose(turned(POSITIONS, X), rotary(X, POSITIONS), atol=1e-6)
    assert f"f32[{ROWS},{TIME // 4},{DIM}]" in str(jax.make_jaxpr(turned)(POSITIONS, X))


def dropout(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)


def test_dropout_has_another_mask_in_every_tile():
    out = jzero.tiled(dropout, tiles=3)(jnp.ones_like(X), jax.random.key(0))
    tiles = jnp.split(out, 3, axis=1)
    assert 0.4 < out.mean() < 0.6
    assert not any(jnp.array_equal(a, tiles[0]) for a in tiles[1:])


MIXING = {
    "softmax": (lambda x: jax.nn.softmax(x, axis=1), r"reduce_max at .*test_tiled\.py"),
    "mean": (lambda x: x - x.mean(1, keepdims=True), r"reduce_sum at .*test_tiled\.py"),
    "max of all": (lambda x: x / jnp.abs(x).max(), r"reduce_max at"),
    "attention": (lambda x: jnp.einsum("bts,bsd->btd", jnp.einsum("btd,bsd->bts", x, x), x), "position by position"),
    "convolution": (lambda x: jax.lax.conv_general_dilated(
        x, jnp.ones((2, DIM, DIM)), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")), "conv_general_dilated"),
    "cumsum": (lambda x: jnp.cumsum(x, 1), "cumsum"),
    "shift": (lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1], "pad"),
    "reversed": (lambda x: x[:, ::-1], "rev"),
    "loop over time": (lambda x: jax.lax.scan(
        lambda c, r: (c + r, c), jnp.zeros((ROWS, DIM)), x.swapaxes(0, 1))[1].swapaxes(0, 1), "scan"),
    "similarities": (lambda x: jnp.einsum("btd,bsd->bts", x, x), "position by position"),
    "products of pairs": (lambda x: x[:, :, None] * x[:, None], "position by position"),
    "arange": (lambda x: x * jnp.arange(x.shape[1])[:, None], r"iota at .*test_tiled\.py"),
    "table": (lambda x: x + TABLE, r"broadcast_in_dim at .*test_tiled\.py"),
    "number of positions": (lambda x: x / x.shape[1], "it reads how many there are"),
    "exponent": (lambda x: x ** x.shape[1], "it reads how many there are"),
    "constant": (lambda x: x * np.array([1 / x.shape[1]], np.float32), "it reads how many there are"),
    "loop of so many rounds": (lambda x: jax.lax.fori_loop(0, x.shape[1], lambda i, x: jnp.sin(x), x), "how many"),
    "a sum": (lambda x: x.sum(), "reduce_sum"),
    "own key": (lambda x: dropout(x, jax.random.key(0)), "key that is the same for all tiles"),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_positions_or_knows_them_is_refused(name):
    fn, why = MIXING[name]
    with pytest.raises(ValueError, match=rf"jzero\.tiled: .* cannot be computed in tiles along dim 1: .*{why}"):
        jzero.tiled(fn, tiles=3)(X)


@pytest.mark.parametrize(
    "fn", [lambda x, k: jnp.einsum("btd,bsd->bts", x, k), lambda x, k: jax.nn.relu(x[:, :, None] * k[:, None]) + 1]
)
def test_pairs_of_the_positions_of_two_arguments_are_refused(fn):
    """Of those in a tile a tile has all pairs, so that nothing in it is wrong: only what it lacks."""
    with pytest.raises(ValueError, match=r"it computes a number for each pair of positions \(\w+ at .*test_tiled"):
        jzero.tiled(fn, tiles=3)(X, X + 1)


def test_a_weight_that_begins_as_the_input_does_is_not_cut_unseen():
    x, w = normal(5, 4, 6, 4), normal(6, 4, 6)
    with pytest.raises(ValueError, match=r"each pair of positions .*argnums="):
        jzero.tiled(jnp.matmul, tiles=3)(x, w)
    np.testing.assert_allclose(jzero.tiled(jnp.matmul, tiles=3, argnums=0)(x, w), x @ w, atol=1e-6)


def test_a_table_that_is_an_argument_has_to_be_cut():
    """The remedy of the message: positions come in as an argument with the input's dims."""
    with pytest.raises(ValueError, match=r"pass what depends on positions as an argument that is cut: one"):
        jzero.tiled(lambda x, t: x + t, tiles=3)(X, TABLE)
    cut = jzero.tiled(lambda x, t: x + t, tiles=3, argnums=(0, 1))(X, jnp.broadcast_to(TABLE, X.shape))
    np.testing.assert_array_equal(cut, X + TABLE)


def test_bad_input():
    with pytest.raises(ValueError, match=r"jzero\.tiled\(tiles=5\): .* has 12 positions, .* Pass tiles=4, or pad"):
        jzero.tiled(jnp.sin, tiles=5)(X)
    with pytest.raises(TypeError, match=r"jzero\.tiled: 3 is neither a Module class nor a function"):
        jzero.tiled(3)
    with pytest.raises(TypeError, match=r"none there is an array of floating-point numbers"):
        jzero.tiled(jnp.sin)(POSITIONS)
    with pytest.raises(ValueError, match=r"is cut along dim 1, which f32\[16\] lacks"):
        jzero.tiled(jnp.sin)(X[0, 0])
    with pytest.raises(ValueError, match=r"other sizes there: f32\[8,12,16\], f32\[8,3\]\. Leave"):
        jzero.tiled(lambda x, y: x, argnums=(0, 1))(X, normal(7, 8, 3))
    with pytest.raises(TypeError, match=r"is a linen module\. Tile its class: jzero\.tiled\(Dense\)"):
        jzero.tiled(nn.Dense(8))


@jax.custom_vjp
def own_backward(x):
    return x * 2


own_backward.defvjp(lambda x: (x * 2, None), lambda _, g: (g / jnp.abs(g).max(),))


@jax.custom_vjp
def clipped(x):
    return x * 2


clipped.defvjp(lambda x: (x * 2, None), lambda _, g: (jnp.clip(g, -1, 1),))


def test_a_backward_pass_that_mixes_positions_is_refused():
    with pytest.raises(ValueError, match=r"the backward pass of own_backward cannot .*reduce_max"):
        jzero.tiled(own_backward, tiles=3)(X)
    grads = [jax.grad(lambda x, fn=fn: (fn(x) ** 2).sum())(X) for fn in (clipped, jzero.tiled(clipped, tiles=3))]
    np.testing.assert_array_equal(*grads)


class Mlp(nn.Module):
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train=False):
        y = nn.gelu(nn.Dense(4 * DIM)(nn.LayerNorm()(x)))
        return nn.Dense(DIM)(nn.Dropout(self.rate, deterministic=not train)(y))


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.sow("intermediates", "x", x.sum(axis=1))
        return nn.LayerNorm()(x)


def test_a_linen_class():
    """The same params, also from `init`; keys of both kinds; no variables that would be those of one tile."""
    layer = jzero.tiled(Mlp, tiles=3)
    variables = layer().init(jax.random.key(0), X)
    assert max_error(variables, Mlp().init(jax.random.key(0), X)) == 0

    def value_and_grad(model):
        return jax.jit(jax.value_and_grad(lambda v: (model.apply(v, X) ** 3).mean()))(variables)

    assert max_error(value_and_grad(layer()), value_and_grad(Mlp())) < 2e-6
    assert has_loop(lambda v: layer().apply(v, X), variables)
    for key in (jax.random.key(1), jax.random.PRNGKey(1)):
        out = layer(0.5).apply(variables, X, train=True, rngs={"dropout": key})
        assert max_error(out, layer(0.5).apply(variables, X)) > 0.1
    norm = jzero.tiled(Norm, tiles=3)()
    held = norm.init(jax.random.key(0), X)["params"]
    norm.apply({"params": held}, X)
    with pytest.raises(ValueError, match=r"jzero\.tiled: Norm sets variables \(intermediates\)"):
        norm.apply({"params": held}, X, mutable=["intermediates"])


class NnxMlp(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.up, self.down = nnx.Linear(DIM, 4 * DIM, rngs=rngs), nnx.Linear(4 * DIM, DIM, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.gelu(self.up(x))))


class Counting(nnx.Module):
    def __init__(self, rngs):
        self.count = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.count[...] += 1
        return x


def test_an_nnx_class():
    """Its state advances as without tiles: counts of keys; other Variables may not change."""
    layer = jzero.tiled(NnxMlp, tiles=3)

    def value_and_grad(model):
        value, grads = nnx.jit(nnx.value_and_grad(lambda m, x: (m(x) ** 3).mean()))(model, X)
        return value, nnx.to_pure_dict(grads)

    assert isinstance(layer(nnx.Rngs(0)), NnxMlp)
    assert max_error(value_and_grad(layer(nnx.Rngs(0))), value_and_grad(NnxMlp(nnx.Rngs(0)))) < 2e-6
    noisy, plain = layer(nnx.Rngs(0), 0.5), NnxMlp(nnx.Rngs(0), 0.5)
    outs = [noisy(X) for _ in range(2)]
    assert max_error(*outs) > 0.1
    for _ in range(2):
        plain(X)
    assert max_error(*(nnx.to_pure_dict(nnx.state(m, nnx.RngCount)) for m in (noisy, plain))) == 0
    with pytest.raises(ValueError, match=r"jzero\.tiled: Counting changes its Variables when it is called"):
        jzero.tiled(Counting, tiles=3)(nnx.Rngs(0))(X)
    with pytest.raises(TypeError, match=r"takes an NNX object, whose state would not advance. Tile the class"):
        jzero.tiled(lambda x, mlp: mlp(x))(X, plain)


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_are_gathered_once_for_all_tiles(stage):
    """Compiled for 8 H200: as many bytes on the wire as the whole layer under remat, and a fraction of its memory.

    The scale is a vector that stays whole: a tie to it once took the gathered matrices for activations (17 Psi).
    """
    pod, width, tokens = jzero.pod("h200"), 512, 4096
    mesh = pod.mesh({"data": 8})

    def mlp(x, p):
        return jax.nn.gelu(x * p["scale"] @ p["up"]) @ p["down"]

    def create():
        shapes = {"up": (width, 8 * width), "down": (8 * width, width), "scale": (width,)}
        params = {k: jnp.zeros(s, jnp.bfloat16) for k, s in shapes.items()}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    state = jzero.abstract(create, stage=stage, mesh=mesh)
    plan = jzero.plan_of(state)
    x = jax.ShapeDtypeStruct((8, tokens, width), jnp.bfloat16)

    def report(layer):
        def step(state, x):
            def loss(params, x):
                return (layer(x, params).astype(jnp.float32) ** 2).mean()

            return state.apply_gradients(grads=jzero.value_and_grad(loss, plan)(state.params, x)[1])

        program = pod.compile(step, state, x, donate_argnums=0)
        assert not jzero.findings(program, plan)
        return jzero.explain(program, plan)

    whole, tiled = report(jax.checkpoint(mlp)), report(jzero.tiled(mlp, tiles=8))
    assert tiled.wire.total == pytest.approx(whole.wire.total, rel=0.01)
    assert tiled.memory.temp < 0.6 * whole.memory.temp


def test_tiles_are_chosen_by_bytes(monkeypatch):
    """All that the layer computes along the dim, over the bound, rounded up to a divisor."""
    monkeypatch.setattr("jzero.activations.position_wise.TILE_BYTES", 2**14)
    fn = jzero.tiled(lambda x, w: jnp.tanh(x @ w) @ w.T)
    computed = ROWS * TIME * (2 * W.shape[1] + DIM) * 4
    assert -(-computed // 2**14) == 3
    assert "length=3" in str(jax.make_jaxpr(fn)(X, W))
    with pytest.raises(ValueError, match=r"needs 3 tiles, and no number near that divides the 13 positions"):
        fn(jnp.ones((ROWS, 13, DIM)), W)
    assert not has_loop(jzero.tiled(jnp.sin), X[:1, :1])
