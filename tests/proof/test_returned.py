"""Which result takes the place of which argument: other trees with the names of the params, in any order."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import jzero

DIM = 64


def loss_of(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]).astype(jnp.float32) ** 2)


class Run:
    """A model as a dict, what a step may take with it, and the parts of a step."""

    def __init__(self, mesh, stage=3, dtype=jnp.float32, dim=DIM):
        shapes = {"up": jax.ShapeDtypeStruct((DIM, dim), dtype), "down": jax.ShapeDtypeStruct((dim, DIM), dtype)}
        self.plan = jzero.make_plan(shapes, stage=stage, mesh=mesh, min_shard_bytes=0)
        self.tx = jzero.zero(optax.adam(1e-3), self.plan)
        self.params = self.plan.place({k: jnp.ones(x.shape, dtype) for k, x in shapes.items()})
        self.opt = self.tx.init(self.params)
        self.teacher = jax.tree.map(jnp.copy, self.params)
        specs = {x.keys[0]: self.plan.sharding(x.state) for x in self.plan.layouts}
        self.ema = {k: jax.device_put(jnp.ones(x.shape), specs[k]) for k, x in shapes.items()}
        self.x = jax.device_put(jnp.ones((DIM, DIM), dtype), self.plan.batch)
        self.loss = jzero.gather_on_use(loss_of, self.plan)

    def gradients(self, params, x):
        return jax.grad(self.loss)(params, x)

    def updated(self, params, opt, grads):
        updates, opt = self.tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt

    def averaged(self, ema, params):
        return jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p.astype(e.dtype), ema, params)


def average_comes_back_first(run, params, opt, ema, x):
    params, opt = run.updated(params, opt, run.gradients(params, x))
    return run.averaged(ema, params), params, opt


def average_goes_in_first(run, ema, params, opt, x):
    params, opt = run.updated(params, opt, run.gradients(params, x))
    return params, opt, run.averaged(ema, params)


def average_is_in_the_loss(run, ema, params, opt, x):
    """Every result depends on every argument."""
    params, opt = run.updated(params, opt, run.gradients(params, x + jnp.tanh(x @ ema["up"] @ ema["down"])))
    return run.averaged(ema, params), opt, params


def teacher_goes_in_first(run, teacher, params, opt, x):
    return run.updated(params, opt, run.gradients(params, x + jnp.tanh(x @ teacher["up"] @ teacher["down"])))


def without_names(run, params, opt, x):
    params, opt = run.updated(params, opt, run.gradients(params, x))
    return jax.tree.leaves(params), opt


def count_starts_again(run, params, opt, x):
    params, opt = run.updated(params, opt, run.gradients(params, x))
    return params, jax.tree.map(lambda x: x if x.ndim else jnp.zeros_like(x), opt)


def orthogonal(run, params, opt, x):
    """The new params are made from the old ones by a product."""
    params, opt = run.updated(params, opt, run.gradients(params, x))
    turn = jnp.eye(DIM, dtype=run.x.dtype)
    new = {"up": turn @ params["up"], "down": params["down"] @ turn}
    return {k: jax.lax.with_sharding_constraint(x, run.params[k].sharding) for k, x in new.items()}, opt


def gradients_come_back(run, params, opt, x):
    grads = run.gradients(params, x)
    return grads, run.updated(params, opt, grads)[1]


def found_in(mesh, step, *runs, **options):
    """Findings of a step of one or several runs, by the plan of the first."""
    names = step.__code__.co_varnames[len(runs) : step.__code__.co_argcount]
    given = [getattr(runs[int(name[-1]) if name[-1].isdigit() else 0], name.rstrip("01")) for name in names]
    donated = [i for i, name in enumerate(names) if name not in ("x", "teacher")]
    step = jzero.jit(functools.partial(step, *runs), runs[0].plan, donate_argnums=donated)
    return jzero.findings(step.lower(*given).compile(), runs[0].plan)


CLEAN = (
    average_comes_back_first, average_goes_in_first, average_is_in_the_loss, teacher_goes_in_first, without_names,
    count_starts_again, orthogonal,
)  # fmt: skip


@pytest.mark.parametrize("step", CLEAN, ids=[step.__name__ for step in CLEAN])
@pytest.mark.parametrize(("stage", "dtype"), [(1, jnp.float32), (3, jnp.bfloat16)], ids=["1", "3-masters"])
def test_trees_with_the_names_of_the_params(step, stage, dtype, mesh):
    assert found_in(mesh, step, Run(mesh, stage, dtype)) == ()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["", "masters"])
def test_gradients_in_place_of_the_new_params(dtype, mesh):
    (finding,) = found_in(mesh, gradients_come_back, Run(mesh, 3, dtype))
    assert finding.kind == "not_trained"
    assert "2 of " in finding.text
    assert "['down'][64,64], ['up'][64,64]" in finding.text


def two_models(run, other, params1, opt1, params0, opt0, x):
    grads = [jax.grad(lambda p, r=r: r.loss(p, x))(p) for r, p in ((run, params0), (other, params1))]
    new, old = run.updated(params0, opt0, grads[0]), other.updated(params1, opt1, grads[1])
    return *new, *old


@pytest.mark.parametrize("dim", [DIM, 2 * DIM])
def test_two_models_with_leaves_of_one_name(dim, mesh):
    assert found_in(mesh, two_models, Run(mesh), Run(mesh, dim=dim, stage=1)) == ()
