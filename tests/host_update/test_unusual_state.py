"""State as no optimizer of optax makes it, in every tier: loops, sums of sums, tables, rows, empty leaves, flags.

What a tier cannot cut into chunks it updates whole, or refuses; values are those of plain optax.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from differ.chains import RARE
from jax.sharding import Mesh

import jzero
from jzero.optim import whole_state

TIERS = {
    "stream": lambda folder: jzero.Offload(in_flight_bytes=6000),
    "host": lambda folder: jzero.Offload(update="host"),
    "late": lambda folder: jzero.Offload(update="host", delay=1),
    "disk": lambda folder: jzero.Offload(tier="disk", path=folder / "state", buffer_bytes=2**16),
}
KINDS = [k for k in RARE if k != "last_gradient"]


def params_of():
    rng = np.random.default_rng(0)
    return {"w": jnp.asarray(rng.standard_normal((64, 32)), jnp.float32), "b": jnp.linspace(-1, 1, 24)}


def wrapped(tx, params, offload=None):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    plan = jzero.make_plan(params, stage=2, mesh=mesh, min_shard_bytes=0, offload=offload)
    return plan, jzero.zero(tx, plan)


def trained(tx, params, offload=None, **extra):
    """Params after three updates, a late one included; the state, as it is and whole."""
    plan, ours = wrapped(tx, params, offload)
    late = offload is not None and offload.delay
    placed = plan.place(params)
    state = ours.init(placed)
    for i in range(3 + late):
        grads = plan.place(jax.tree.map(lambda p, i=i: jnp.cos(p + i), params))
        updates, state = ours.update(grads, state, placed, **extra)
        placed = optax.apply_updates(placed, updates)
    return placed, state, whole_state(state, placed, ours)[0]


def plain(tx, params, **extra):
    tx, state = optax.with_extra_args_support(tx), tx.init(params)
    want = params
    for i in range(3):
        updates, state = tx.update(jax.tree.map(lambda p, i=i: jnp.cos(p + i), params), state, want, **extra)
        want = optax.apply_updates(want, updates)
    return want, state


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5)


@pytest.mark.filterwarnings("ignore:(?s)jzero.*too much for one device:UserWarning")
@pytest.mark.filterwarnings("ignore:(?s)jzero. Offload.*cannot be added up part by part:UserWarning")
@pytest.mark.default_cases("in_a_loop-disk", "by_rows-disk", "few_values-disk", "in_a_loop-stream")
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_state_are_those_of_plain_optax(tmp_path, kind, tier):
    tx, params = RARE[kind](optax.sgd(0.1)), params_of()
    got, state, inner = trained(tx, params, TIERS[tier](tmp_path))
    want, want_state = plain(tx, params)
    assert_close(got, want)
    if tier != "late":  # whose state is that of the update under way
        assert_close(inner, want_state)
    own = [x.shape for x in jax.tree.leaves(getattr(state, "inner", state)) if hasattr(x, "nbytes")]
    few = [x.shape for x in jax.tree.leaves(want_state) if x.size <= 16]
    assert [shape for shape in own if np.prod(shape) <= 16] == few


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_an_empty_param_that_the_devices_divide(tmp_path, tier):
    params = {**params_of(), "empty": jnp.zeros((0, 4))}
    got, *_ = trained(optax.adam(1e-2), params, TIERS[tier](tmp_path))
    assert_close(got, plain(optax.adam(1e-2), params)[0])


def by_flag():
    def update(grads, state, params=None, *, late=False, how="up", loss=None, **extra):
        rate = (0.1 if late else 0.2) * (1 if how == "up" else 2) * (1 if loss is None else loss)
        return jax.tree.map(lambda g: -rate * g, grads), state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


@pytest.mark.parametrize("tier", ["host", "late"])
def test_keyword_arguments_that_are_not_arrays(tmp_path, tier):
    params = params_of()
    for extra in ({"late": True, "loss": 0.5}, {"late": False, "how": "down"}):
        got, *_ = trained(by_flag(), params, TIERS[tier](tmp_path), **extra)
        assert_close(got, plain(by_flag(), params, **extra)[0])
    plan, tx = wrapped(by_flag(), params, TIERS[tier](tmp_path))
    placed = plan.place(params)
    state = tx.init(placed)
    with pytest.raises(TypeError, match=r"keyword argument \['value_fn'\] of an update on the host must be an array"):
        tx.update(plan.place(params), state, placed, value_fn=jnp.sum)
    tx.update(plan.place(params), state, placed)  # nothing of it was lost
    assert_close(trained(by_flag(), params, value_fn=jnp.sum)[0], plain(by_flag(), params, value_fn=jnp.sum)[0])


def test_a_hyper_parameter_in_another_dtype():
    params, sgd = params_of(), optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    plan, tx = wrapped(sgd, params, jzero.Offload(update="host"))
    placed = plan.place(params)
    state = tx.init(placed)
    for rate in (np.int32(1), jnp.bfloat16(1), 1):
        state.inner.hyperparams["learning_rate"] = rate
        updates, state = tx.update(placed, state, placed)
        placed = optax.apply_updates(placed, updates)
        assert_close(placed, jax.tree.map(jnp.zeros_like, params))
    state.inner.hyperparams["learning_rate"] = np.float64(0.1)
    tx.update(placed, state, placed)
    state = tx.init(placed)
    state.inner.hyperparams["learning_rate"] = np.complex64(0.1)
    with pytest.raises(TypeError, match="made it in float32, which does not hold every such value"):
        tx.update(placed, state, placed)
    state.inner.hyperparams["learning_rate"] = np.float32(0.1)
    tx.update(placed, state, placed)


@pytest.mark.parametrize("tier", ["stream", "host", "disk"])
def test_state_that_changes_its_dtype_is_refused_by_name(tmp_path, tier):
    def momentum(cast):
        def init(params):
            return jax.tree.map(lambda x: cast(jnp.zeros(x.shape, jnp.bfloat16)), params)

        def update(grads, state, params=None):
            state = jax.tree.map(lambda m, g: 0.9 * m + g, state, grads)
            return state, state

        return optax.GradientTransformation(init, update)

    drifts, params = momentum(lambda x: x), {"w": params_of()["w"]}
    with pytest.raises(TypeError, match=r"the update gives \['w'\] of the optimizer state the dtype float32"):
        trained(drifts, params, TIERS[tier](tmp_path / "drifts"))
    assert_close(trained(drifts, params)[0], plain(drifts, params)[0])
    made_alike = momentum(lambda x: x.astype(jnp.float32))  # the remedy: cast in init
    assert_close(trained(made_alike, params, TIERS[tier](tmp_path))[0], plain(made_alike, params)[0])


def test_one_number_for_all_values_of_a_param():
    tx = optax.GradientTransformation(
        lambda params: (), lambda grads, state, params=None: (jax.tree.map(lambda g: jnp.mean(g), grads), state)
    )
    assert_close(trained(tx, params_of())[0], plain(tx, params_of())[0])
