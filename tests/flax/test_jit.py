"""`jzero.jit`: batches from a data loader are split, what the step replaces is donated, nothing else."""

from __future__ import annotations

import contextlib
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from models import DIM_IN, create_small, train_step
from models import batch as make_batch

import jzero

TX = optax.adam(1e-2)
X = make_batch()["x"]


def alive(tree) -> bool:
    return not any(x.is_deleted() for x in jax.tree.leaves(tree))


def gone(tree) -> bool:
    return all(x.is_deleted() for x in jax.tree.leaves(tree) if x.size > 64)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_host_batch_is_split_and_the_state_donated(stage, kind, mesh):
    traces = []

    def counted(state, batch):
        traces.append(jax.tree.map(np.shape, batch))
        return train_step(state, batch)

    state = jzero.shard(create_small(TX), stage=stage, mesh=mesh, min_shard_bytes=0)
    train = jzero.jit(counted)
    batch = jax.tree.map(kind, make_batch())
    plain, want = jax.jit(train_step)(create_small(TX), batch)
    compiled = train.lower(state, batch).compile()
    assert [s.spec for s in jax.tree.leaves(compiled.input_shardings[0][1])] == [P("data")] * 2
    before = state
    state, loss = train(state, batch)
    state, _ = train(state, batch)
    assert len(traces) == 1
    assert gone(before.opt_state)
    assert gone(before.params)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    plain, _ = jax.jit(train_step)(plain, batch)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(plain.params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_a_state_passed_by_name_is_donated(mesh):
    state = jzero.shard(create_small(TX), stage=1, mesh=mesh)
    jzero.jit(train_step, jzero.plan_of(state))(state=state, batch=make_batch())
    assert gone(state.opt_state)


def test_an_old_state_is_refused(mesh):
    state = jzero.shard(create_small(TX), stage=1, mesh=mesh)
    train = jzero.jit(train_step, jzero.plan_of(state))
    train(state, make_batch())
    with pytest.raises(RuntimeError, match=r"Array has been deleted.*Go on with the state"):
        train(state, make_batch())


def test_a_plain_state_is_not_trained(mesh):
    """It would be whole on every device, and its loss right."""
    plan = jzero.plan_of(jzero.shard(create_small(TX), stage=2, mesh=mesh))
    with pytest.raises(ValueError, match=r"jzero\.shard\(state, stage=2\)"):
        jzero.jit(train_step, plan)(create_small(TX), make_batch())
    assert np.isfinite(jzero.jit(lambda s, b: train_step(s, b)[1], plan)(create_small(TX), make_batch()))


def test_an_evaluation_keeps_its_state(mesh):
    state = jzero.shard(create_small(TX), stage=2, mesh=mesh)

    def evaluate(state, batch):
        return jnp.mean(state.apply_fn({"params": state.params}, batch))

    def gradients(params, batch):
        return jax.grad(lambda p: jnp.mean(state.apply_fn({"params": p}, batch)))(params)

    plan = jzero.plan_of(state)
    jzero.jit(evaluate, plan)(state, X)
    jzero.jit(gradients, plan)(state.params, X)  # returns a tree like the params
    assert alive(state)


def test_a_step_that_does_not_return_its_state_warns_once(mesh):
    state = jzero.shard(create_small(TX), stage=2, mesh=mesh)
    plan = jzero.plan_of(state)

    def forgets(state, batch):
        return train_step(state, batch)[1]

    train = jzero.jit(forgets, plan)
    with pytest.warns(UserWarning, match=r"does not return it: 1 values come back.*return state, loss") as found:
        train(state, make_batch())
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(state, make_batch())
        jzero.jit(lambda s, b: train_step(s, b)[0].params, plan, donate_argnums=())(state, make_batch())
        jzero.jit(lambda s, b: train_step(s, b)[0].params, plan)(state, make_batch())


def bare(mesh, chain=TX):
    params = {"w": jnp.ones((64, 32)), "b": jnp.zeros(32)}
    plan = jzero.make_plan(params, stage=2, mesh=mesh, min_shard_bytes=0)
    tx = jzero.zero(chain, plan)

    def update(params, opt_state, batch, scale):
        def loss_fn(p):
            return jnp.mean((batch @ p["w"] + p["b"]) ** 2) * scale

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return loss, (optax.apply_updates(params, updates), opt_state)

    params = plan.place(params)
    return plan, update, params, jax.jit(tx.init)(params)


def test_params_and_optimizer_state_of_a_loop_without_flax(mesh):
    plan, update, params, opt_state = bare(mesh)
    batch = np.ones((16, 64), np.float32)
    loss, (params2, state2) = jzero.jit(update, plan)(params, opt_state, batch, 2.0)
    assert gone(params)
    assert gone(opt_state)
    loss, (params3, _) = jzero.jit(update, plan, donate_argnums=1)(params2, state2, batch, scale=2.0)
    assert alive(params2)
    assert gone(state2)
    assert float(loss) < 2 * 64**2
    assert alive(params3)


@pytest.mark.parametrize("rate", [0.1, optax.constant_schedule(0.1)], ids=["no state", "a count"])
def test_params_of_an_optimizer_without_moments_are_donated(rate, mesh):
    plan, update, params, opt_state = bare(mesh, optax.sgd(rate))
    jzero.jit(update, plan)(params, opt_state, np.ones((16, 64), np.float32), 2.0)
    assert gone(params)
    own = plan.place({"w": jnp.ones((64, 32)), "b": jnp.zeros(32)})
    jzero.jit(lambda p, x: (jax.tree.map(jnp.negative, p), x.sum()), plan)(own, np.ones((16, 64), np.float32))
    assert alive(own)  # no update


def test_optimizer_state_that_is_padded_in_every_leaf_is_donated(mesh):
    params = {"w": jnp.ones((11, 13))}
    plan = jzero.make_plan(params, stage=2, mesh=mesh, min_shard_bytes=0)
    tx, params = jzero.zero(TX, plan), plan.place(params)
    opt_state = jax.jit(tx.init)(params)

    def step(params, opt_state):
        updates, opt_state = tx.update(params, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    jzero.jit(step, plan)(params, opt_state)
    assert gone((params, opt_state))


def test_keys_scalars_and_arrays_on_the_mesh_are_left_alone(mesh):
    params = {"w": jnp.ones((64, 32))}
    plan = jzero.make_plan(params, stage=2, mesh=mesh)
    weights = jax.device_put(np.ones(64, np.float32), plan.sharding(P()))
    run = jzero.jit(lambda *args: args, plan)
    given = (params, weights, jax.random.key(0), jax.random.PRNGKey(0), 3, np.float32(2), X, {"mask": None})
    out = run(*given)
    assert out[0]["w"].sharding.is_fully_replicated  # a copy of the params is not a batch
    assert out[1].sharding.is_fully_replicated
    assert out[3].sharding.is_fully_replicated
    assert out[6].sharding.spec == P("data")
    np.testing.assert_array_equal(out[6], X)
    assert run.eval_shape(*given)[6].shape == X.shape
    mixed = run({"x": X, "mask": None, "key": jax.random.key(1), "weights": weights, "n": 3})[0]
    assert mixed["mask"] is None
    assert mixed["x"].sharding.spec == P("data")
    assert mixed["weights"].sharding.is_fully_replicated
    abstract = run.trace(*given[:6], jax.ShapeDtypeStruct(X.shape, X.dtype), {"mask": None})
    shardings = abstract.lower().compile().input_shardings[0]
    assert shardings[6].spec == P("data")


def test_a_batch_with_the_name_and_shape_of_a_param_is_split(mesh):
    """A copy of params has all of them; what may be either is refused, and each remedy works."""
    params = {"x": jnp.ones((64, 32)), "b": jnp.zeros(32)}
    plan = jzero.make_plan(params, stage=2, mesh=mesh, min_shard_bytes=0)
    run = jzero.jit(lambda *args: args, plan, donate_argnums=())
    x, y = np.ones((64, 32), np.float32), np.ones(64, np.float32)
    out = run(params, {"x": x, "y": y}, {"avg": params, "y": y})
    assert [a.sharding.spec for a in jax.tree.leaves(out)] == [P(), P(), *[P("data")] * 2, P(), P(), P("data")]
    with pytest.raises(ValueError, match=r"(?s)argument 1 is on no mesh.*\[1\]\['x'\]  f32\[64,32\].*place_batch"):
        run(params, {"x": x})
    assert run(params, plan.place_batch({"x": x}))[1]["x"].sharding.spec == P("data")
    assert run(params, jax.device_put({"x": x}, plan.sharding(P())))[1]["x"].sharding.spec == P()
    as_list = jzero.make_plan([jnp.ones((64, 32)), jnp.zeros(32)], stage=2, mesh=mesh, min_shard_bytes=0)
    out = jzero.jit(lambda *args: args, as_list, donate_argnums=())([jnp.ones((64, 32)), jnp.zeros(32)], (x, y))
    assert [a.sharding.spec for a in out[1]] == [P("data")] * 2
    one = jzero.make_plan({"x": x}, stage=2, mesh=mesh, min_shard_bytes=0)
    run = jzero.jit(lambda *args: args, one, donate_argnums=())
    assert run(one.place({"x": x}), {"x": x, "y": y})[1]["x"].sharding.spec == P("data")
    with pytest.raises(ValueError, match="it may be params or a batch"):
        run(one.place({"x": x}), {"x": x})


def reference_step(ref, state, batch):
    """A frozen reference of the same form: its outputs are targets."""

    def loss_fn(params):
        out, target = (s.apply_fn({"params": p}, batch["x"]) for s, p in ((state, params), (ref, ref.params)))
        return jnp.mean((out - target - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def finite_step(ref, state, batch):
    """The same; the update is skipped where the loss is not finite."""
    new, loss = reference_step(ref, state, batch)
    return jax.tree.map(lambda a, b: jnp.where(jnp.isfinite(loss), a, b), new, state), loss


def restarted_step(ref, state, batch):
    """The same; one leaf of the result is made from neither."""
    new, loss = reference_step(ref, state, batch)
    return new.replace(step=jnp.zeros((), jnp.int32)), loss


def scanned_step(ref, state, batch):
    """Two steps in a scan, the reference carried along."""

    def body(carry, _):
        ref, state = carry
        state, loss = jax.lax.cond(jnp.sum(ref.step) == 0, reference_step, reference_step, ref, state, batch)
        return (ref, state), loss

    (_, state), losses = jax.lax.scan(body, (ref, state), length=2)
    return state, losses[-1]


@pytest.mark.parametrize("step", [reference_step, finite_step, restarted_step, scanned_step])
@pytest.mark.parametrize("explicit", [False, True])
def test_of_two_states_of_one_form_the_one_that_is_trained_is_donated(step, explicit, mesh):
    types = (jax.sharding.AxisType.Explicit,) if explicit else None
    with jax.set_mesh(jax.make_mesh((8,), ("data",), types)) if explicit else contextlib.nullcontext():
        ref, state = (jzero.shard(create_small(TX), stage=2, min_shard_bytes=0) for _ in range(2))
        train, before = jzero.jit(step, jzero.plan_of(state)), state
        for i in range(2):
            state, loss = train(ref, state, make_batch(i))
        assert alive(ref)
        assert gone(before)
        plain, plain_ref = create_small(TX), create_small(TX)
        for i in range(2):
            plain, want = jax.jit(step)(plain_ref, plain, make_batch(i))
        np.testing.assert_allclose(loss, want, rtol=1e-5)


def test_arguments_that_share_donated_arrays_are_refused(mesh):
    """JAX 0.10 crashes there on the CPU."""
    state = jzero.shard(create_small(TX), stage=2, mesh=mesh, min_shard_bytes=0)
    train = jzero.jit(reference_step, jzero.plan_of(state))
    with pytest.raises(RuntimeError, match=r"arguments 0 and 1 share an array.*jax\.tree\.map\(jnp\.copy, x\)"):
        train(state, state, make_batch())
    train(jax.tree.map(jnp.copy, state), state, make_batch())


def test_a_target_network_is_donated_if_it_is_returned(mesh):
    """By its own step count; with the other way round the arguments, by name and with a static one too."""
    target, online = (jzero.shard(create_small(TX), stage=2, mesh=mesh, min_shard_bytes=0) for _ in range(2))

    def polyak(rate, target, online):
        mix = jax.tree.map(lambda a, b: rate * a + (1 - rate) * b, target.params, online.params)
        return target.replace(params=mix)

    new = jzero.jit(polyak, jzero.plan_of(online), static_argnums=0)(0.5, target, online)
    assert gone(target)
    assert alive(online)
    jzero.jit(polyak, jzero.plan_of(online), static_argnames="rate")(0.5, online=online, target=new)
    assert gone(new)
    assert alive(online)
    both = jzero.shard(create_small(TX), stage=2, mesh=mesh, min_shard_bytes=0)
    jzero.jit(lambda a, b: (b, a), jzero.plan_of(online))(both, online)
    assert gone(both)
    assert gone(online)


def test_params_of_two_networks_are_not_donated_without_being_named(mesh):
    """Both are in every new param, and nothing else tells them apart."""
    plan, update, params, opt_state = bare(mesh)
    target = jax.tree.map(jnp.copy, params)

    def step(target, params, opt_state, batch):
        return update(jax.tree.map(lambda a, b: (a + b) / 2, target, params), opt_state, batch, 1.0)[1]

    batch = np.ones((16, 64), np.float32)
    train = jzero.jit(step, plan)
    with pytest.warns(UserWarning, match=r"arguments 0, 1 have the same.*one such tree.*donate_argnums=") as found:
        new, state = train(target, params, opt_state, batch)
    assert found[0].filename == __file__
    assert len(found) == 1
    assert alive((target, params))
    assert gone(opt_state)
    new2, state = train(target, new, state, batch)  # warns no more
    named = jzero.jit(step, plan, donate_argnums=(1, 2))
    new3, _ = named(target, new2, state, batch)
    assert alive(target)
    assert gone(new2)
    assert alive(new3)


@pytest.mark.parametrize("averaged", [False, True])
def test_gradients_that_are_returned_do_not_replace_a_teacher(averaged, mesh):
    """As many trees in the form of the params go in as come out; of a teacher that is averaged one comes out."""
    plan, update, params, opt_state = bare(mesh)
    teacher = jax.tree.map(jnp.copy, params)

    def step(teacher, params, opt_state, batch):
        def loss_of(params):
            return jnp.mean((batch @ params["w"] - jnp.tanh(batch @ teacher["w"])) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        _, (params, opt_state) = update(params, opt_state, batch, 1.0)
        mean = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, teacher, params)
        return params, opt_state, loss, mean if averaged else grads

    batch = np.ones((16, 64), np.float32)
    jzero.jit(step, plan)(teacher, params, opt_state, batch)
    assert gone((params, opt_state))
    assert gone(teacher) if averaged else alive(teacher)


def pair(mesh, tx=TX):
    model = nnx.Linear(DIM_IN, 64, rngs=nnx.Rngs(0))
    return jzero.shard(
        (model, nnx.Optimizer(model, tx, wrt=nnx.Param)), stage=2, mesh=mesh, min_shard_bytes=0
    )


def nnx_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(batch) ** 2))(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize("options", [{}, {"compiler_options": {"xla_cpu_enable_fast_math": False}}])
def test_an_nnx_pair(options, mesh):
    model, optimizer = pair(mesh)
    plan = jzero.plan_of(optimizer)
    train = jzero.jit(nnx_step, **options)
    old = model.kernel.get_value(), optimizer.opt_state[0].mu["kernel"].get_value()
    losses = [float(train(model, optimizer, X)) for _ in range(3)]
    assert gone(old)
    plain = nnx.Linear(DIM_IN, 64, rngs=nnx.Rngs(0))
    reference = nnx.Optimizer(plain, TX, wrt=nnx.Param)
    assert losses == pytest.approx(
        [float(nnx.jit(nnx_step)(plain, reference, X)) for _ in range(3)], rel=1e-5
    )
    np.testing.assert_allclose(model.kernel.get_value(), plain.kernel.get_value(), atol=2e-6)
    kernel = model.kernel.get_value()
    out = jzero.jit(lambda model, x: model(x), plan, **options)(model, X)
    assert out.sharding.spec[0] == "data"
    assert alive(kernel)
    assert train.lower(model, optimizer, X).compile()
    assert train.eval_shape(model, optimizer, X).shape == ()


@pytest.mark.parametrize("options", [{}, {"compiler_options": {"xla_cpu_enable_fast_math": False}}])
@pytest.mark.parametrize("static", [{"static_argnums": 3}, {"static_argnames": "train"}])
def test_an_nnx_step_with_a_static_argument(static, options, mesh):
    model, optimizer = pair(mesh)

    def step(model, optimizer, batch, train=False):
        return nnx_step(model, optimizer, batch) if train else jnp.mean(model(batch) ** 2)

    step = jzero.jit(step, **static, **options)
    losses = [float(step(model, optimizer, X, train)) for train in (True, False, True, False)]
    losses += [float(step(model, optimizer, X)), float(step(model, optimizer, X, train=True))]
    assert losses[0] > losses[1] == losses[2] > losses[3] == losses[4] == losses[5]


def with_averages(model, optimizer, average, arrays, batch):
    loss = nnx_step(model, optimizer, batch)
    new = nnx.as_pure(nnx.state(model, nnx.Param))
    nnx.update(average, optax.incremental_update(new, nnx.as_pure(nnx.state(average, nnx.Param)), 0.5))
    return optax.incremental_update(new, arrays, 0.5), loss


def test_averages_beside_an_nnx_pair(mesh):
    """A module is changed in place, a tree of arrays returned: both are donated, also by name; and none by accident."""
    model, optimizer = pair(mesh)
    train = jzero.jit(with_averages, jzero.plan_of(optimizer))
    average, arrays = nnx.clone(model), nnx.as_pure(nnx.state(model, nnx.Param))
    with pytest.raises(RuntimeError, match=r"arguments 0 and 2 share an array.*what nnx.clone or nnx.state returned"):
        train(model, optimizer, average, arrays, X)
    average, arrays = jax.tree.map(jnp.copy, (average, arrays))
    told = train.describe(model, optimizer, average, arrays=arrays, batch=X).splitlines()[2:]
    assert [line.split()[2] for line in told] == ["donated"] * 4 + ["kept"]
    assert [line.split("  ")[-1].strip() for line in told[2:]] == [
        "changed in place", "the step returns a new one", "rows of a batch"
    ]  # fmt: skip
    old = average.kernel.get_value(), arrays
    new, _ = train(model, optimizer, average, arrays=arrays, batch=X)
    assert gone(old)
    assert alive((new, jax.tree.leaves(average)))
    np.testing.assert_allclose(new["kernel"], average.kernel.get_value(), atol=1e-6)


def test_what_is_donated_is_told(mesh):
    """Of arrays, of a state whose step draws from `nnx.Rngs`, and where an option says it."""
    state = jzero.shard(create_small(TX), stage=2, mesh=mesh, min_shard_bytes=0)
    plan = jzero.plan_of(state)

    def told(*args, step=reference_step, **options):
        lines = jzero.jit(step, plan, **options).describe(*args).splitlines()[2:]
        return [" ".join(line.split()[2:]) for line in lines]

    batch, other = make_batch(), jax.tree.map(jnp.copy, state)
    assert told(other, state, batch) == [
        "kept no result replaces it", "donated the step returns a new one", "kept rows of a batch"
    ]  # fmt: skip
    assert told(other, state, batch, donate_argnames="ref")[:2] == [
        "donated an option says so", "kept no result replaces it"
    ]  # fmt: skip

    def noisy(state, rngs, batch):
        return train_step(state, batch | {"x": nnx.Dropout(0.5)(batch["x"], rngs=rngs)})

    rngs = nnx.Rngs(0)
    assert told(state, rngs, batch, step=noisy)[:2] == [
        "donated the step returns a new one", "donated changed in place"
    ]  # fmt: skip
    jzero.jit(noisy, plan)(state, rngs, batch)
    assert gone(state)
    assert int(rngs.default.count[...]) == 1


def test_an_argument_that_holds_an_array_twice(mesh):
    state = jzero.shard(create_small(TX), stage=2, mesh=mesh, min_shard_bytes=0)
    both = [state, state]
    with pytest.raises(RuntimeError, match=r"argument 0 holds an array twice \(\[0\].*and \[1\].*jnp.copy"):
        jzero.jit(lambda both, x: [both[1], both[0]], jzero.plan_of(state))(both, X)


def test_xla_gets_the_options_of_the_plan(mesh, monkeypatch):
    plan = jzero.make_plan({"w": jnp.ones((64, 8))}, stage=2, mesh=mesh)
    monkeypatch.setattr(jzero.Plan, "compiler_options", {"xla_no_such_option": 1})
    with pytest.raises(Exception, match="xla_no_such_option"):
        jzero.jit(lambda x: x + 1, plan)(X)
    model = nnx.Linear(DIM_IN, 8, rngs=nnx.Rngs(0))
    with pytest.raises(Exception, match="xla_no_such_option"):
        jzero.jit(lambda model, x: model(x), plan)(model, X)
    with pytest.raises(Exception, match="xla_no_such_option"):
        jzero.jit(lambda model, x: model(x), plan).lower(model, X).compile()


@pytest.mark.pod
def test_a_program_for_a_pod():
    """Donated and split as at a call, with abstract batches."""
    pod = jzero.pod("h200")
    state = jzero.abstract(lambda: create_small(TX), stage=2, mesh=pod.mesh({"data": 8}), min_shard_bytes=0)
    plan, train = jzero.plan_of(state), jzero.jit(train_step, jzero.plan_of(state))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batch())
    program = pod.compile(train, state, abstract)
    assert jzero.findings(program, plan) == ()  # state_not_donated and batch_not_split among them
    assert jzero.explain(program, plan).wire.psi == pytest.approx(2, rel=0.02)


def test_as_a_decorator(mesh):
    state = jzero.shard(create_small(TX), stage=1, mesh=mesh)

    @partial(jzero.jit, plan=jzero.plan_of(state), static_argnames="double")
    def forward(state, batch, *, double):
        """Documented."""
        out = state.apply_fn({"params": state.params}, batch)
        return out * 2 if double else out

    one, two = forward(state, X, double=False), forward(state, X, double=True)
    np.testing.assert_allclose(one * 2, two, rtol=1e-6)
    assert forward.__doc__ == "Documented."
    assert repr(forward).startswith("<jzero.jit: test_as_a_decorator")


@pytest.mark.parametrize("static", [{"static_argnums": 2}, {"static_argnames": "train"}])
@pytest.mark.parametrize("first", [True, False])
def test_a_static_argument_decides_what_is_donated(first, static, mesh):
    """Evaluation and training by one function: only training replaces the state."""

    def step(state, batch, train=False):
        return train_step(state, batch) if train else state.apply_fn({"params": state.params}, batch["x"]).mean()

    step, state = jzero.jit(step, **static), jzero.shard(create_small(TX), stage=1, mesh=mesh)
    for train in (first, not first):
        before = state
        if train:
            state, _ = step(state, make_batch(), train=True)
            assert gone(before.opt_state)
        else:
            step(state, make_batch())
            step(state, make_batch(), False)
            assert alive(state)


def test_the_plan_is_that_of_the_state(mesh):
    state = jzero.shard(create_small(TX), stage=1, mesh=mesh)
    train, batch = jzero.jit(train_step), make_batch()
    four = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    assert repr(train) == "<jzero.jit: train_step, the plan of its state>"
    state, _ = train(state, batch)
    again, _ = train(jzero.shard(state, stage=3, mesh=four, min_shard_bytes=0), batch)
    assert jzero.plan_of(again).n == 4
    assert "donated" in train.describe(again, batch)
    with pytest.raises(ValueError, match="no argument says how to split"):
        train(create_small(TX), batch)
    other = jzero.shard(create_small(TX), stage=2, mesh=mesh)
    with pytest.raises(ValueError, match="arguments of several plans say"):
        jzero.jit(lambda a, b, x: x)(again, other, batch)
    state, _ = jzero.jit(train_step, jzero.plan_of(other))(other, batch)  # the remedy


def test_bad_input(mesh):
    plan = jzero.make_plan({"w": jnp.ones((64, 8))}, stage=2, mesh=mesh)
    with pytest.raises(TypeError, match="jitted already"):
        jzero.jit(jax.jit(train_step), plan)
    with pytest.raises(TypeError, match=r"plan must be a jzero\.Plan"):
        jzero.jit(train_step, 3)
    with pytest.raises(TypeError, match="step must be a function"):
        jzero.jit(3, plan)
    with pytest.raises(
        ValueError, match=r"cannot be split over batch axes.*\n.*\['x'\].*f32\[9,3\](.*\n)+.*jax\.device_put"
    ):
        jzero.jit(lambda b: b, plan)({"x": np.ones((9, 3), np.float32)})
