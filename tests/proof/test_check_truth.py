"""`check` on programs that are easily misjudged: steps that lose their state, evaluations, two models in one step."""

from __future__ import annotations

import copy
import functools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.experimental import io_callback
from mistakes import renamed_derivatives
from models import BATCH, DIM_IN, DIM_OUT, batch, create_small, create_state, loss_of, train_step

import jzero

TX = optax.adam(1e-2)
PLAIN = create_state().apply_fn


def sharded(mesh, stage, create=create_state, **fields):
    state = jzero.shard(create, stage=stage, mesh=mesh, min_shard_bytes=0, **fields)
    return state, jzero.plan_of(state)


def kinds(compiled, plan) -> list[str]:
    return [f.kind for f in jzero.findings(compiled, plan)]


def lowered(fn, *args, **options):
    return jax.jit(fn, **options).lower(*args).compile()


def forgets(state, data):
    return train_step(state, data)[1]


def evaluates(state, data):
    return loss_of(state.apply_fn, state.params, data)


@pytest.mark.default_cases("2")
@pytest.mark.remedy("_not_returned", "return the new state")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_that_does_not_return_its_state(stage, mesh):
    state, plan = sharded(mesh, stage)
    data = plan.place_batch(batch())
    (found,) = jzero.findings(lowered(forgets, state, data, donate_argnums=0), plan)
    assert found.kind == "not_trained"
    assert "nothing of the state comes back" in found.text
    assert "return the new state" in found.remedy

    def keeps_moments(state, data):
        new, loss = train_step(state, data)
        return state.replace(params=new.params, step=new.step, opt_state=None), loss

    (found,) = jzero.findings(lowered(keeps_moments, state, data), plan)[:1]
    assert found.kind == "not_trained"
    assert ".opt_state" in found.text
    assert kinds(lowered(train_step, state, data, donate_argnums=0), plan) == []


@pytest.mark.pod
def test_a_step_for_a_pod_that_neither_returns_nor_donates_its_state():
    """Its program is that of an evaluation; `pod.compile` knows that an update was traced."""
    pod = jzero.pod("h200")
    state = jzero.abstract(lambda: create_small(TX), stage=2, mesh=pod.mesh({"data": 8}), min_shard_bytes=0)
    plan, data = jzero.plan_of(state), jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch())
    assert kinds(pod.compile(forgets, state, data), plan) == ["not_trained"]
    assert kinds(pod.compile(evaluates, state, data), plan) == []


def two_matrices(tx, stage=2, **fields):
    """A step of two matrices for eight H200: its report, its findings and its estimate."""

    def create():
        return TrainState.create(
            apply_fn=lambda v, x: jnp.tanh(x @ v["params"]["up"]) @ v["params"]["down"],
            params={"up": jnp.ones((256, 1024)), "down": jnp.ones((1024, 256))}, tx=tx,
        )  # fmt: skip

    def step(state, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn({"params": p}, x) ** 2))(state.params)
        return state.apply_gradients(grads=grads), loss

    pod, x = jzero.pod("h200"), jax.ShapeDtypeStruct((64, 256), jnp.float32)
    state = jzero.abstract(create, stage=stage, mesh=pod.mesh({"data": 8}), **fields)
    plan = jzero.plan_of(state)
    program = pod.compile(step, state, x, donate_argnums=0)
    found = {f.kind: f for f in jzero.findings(program, plan)}
    return jzero.explain(program, plan), found, jzero.estimate(plan, tx=state.tx)


@pytest.mark.remedy("optimizer_moves", "an optimizer that works element by element; or stage 0.")
@pytest.mark.nightly
@pytest.mark.pod
def test_an_optimizer_that_moves_what_is_no_param():
    def sorts(updates, state, params=None):
        return jax.tree.map(lambda g: jnp.sort(jnp.stack([g, 2 * g, g**2]), axis=1).sum(0), updates), state

    tx = optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), sorts), TX)
    assert set(two_matrices(tx, min_shard_bytes=0)[1]) == {"optimizer_moves"}
    assert two_matrices(tx, stage=0)[1] == two_matrices(TX, min_shard_bytes=0)[1] == {}


@pytest.mark.nightly
@pytest.mark.remedy("optimizer_moves", "keeps these params' state whole on every device")
@pytest.mark.pod
def test_an_optimizer_that_mixes_the_dims_of_a_matrix(monkeypatch):
    """Muon: its exchange is not a fault and in the estimate; what is left to XLA is named, and the remedy helps."""

    compiled = functools.partial(two_matrices, optax.contrib.muon(1e-3))
    report, found, estimate = compiled(min_shard_bytes=0)
    assert found == {}
    assert report.wire.total == pytest.approx(estimate.wire, rel=0.01)
    exchanged = [(c.op, c.phase) for c in report.collectives if c.scope == "exchange"]
    assert set(exchanged) == {("all-to-all", "update")}
    monkeypatch.setattr("jzero.update.owners.MOST", 0)
    with pytest.warns(UserWarning, match="too much for one device to own"):
        report, found, _ = compiled(min_shard_bytes=0)
    wire = report.wire
    assert set(found) == {"optimizer_moves"}
    mixing = wire.total - 2 * wire.psi_bytes  # to one or two of the gathers XLA gives a name of another part, or none
    assert mixing * 0.9 < found["optimizer_moves"].bytes < mixing + wire.psi_bytes
    assert "['down'][1024,256], ['up'][256,1024]." in found["optimizer_moves"].text
    assert "min_shard_bytes=1048577" in found["optimizer_moves"].remedy
    report, found, _ = compiled(min_shard_bytes=1048577)
    assert report.wire.psi == pytest.approx(2, rel=0.02)
    assert "optimizer_moves" not in found


@pytest.mark.parametrize(
    "stage", [2, pytest.param(3, marks=pytest.mark.remedy("gather_on_use", "or the apply_fn of the state"))]
)
def test_an_evaluation(stage, mesh):
    state, plan = sharded(mesh, stage)
    data = plan.place_batch(batch())
    found = kinds(lowered(lambda s, b: loss_of(PLAIN, s.params, b), state, data), plan)
    assert found == (["weights_not_gathered_on_use"] if stage == 3 else [])
    gathered = jzero.gather_on_use(lambda params, b: loss_of(PLAIN, params, b), plan)
    assert kinds(lowered(lambda s, b: gathered(s.params, b), state, data), plan) == []
    assert kinds(lowered(evaluates, state, data), plan) == []


def grads_of(state, data):
    return jax.value_and_grad(lambda params: loss_of(state.apply_fn, params, data))(state.params)


@pytest.mark.default_cases("2-donated0")
@pytest.mark.remedy("_unchanged", "linen: return state.apply_gradients(grads=grads)")
@pytest.mark.parametrize(("stage", "donated"), [(2, (0,)), (3, ())])
def test_a_step_that_never_updates(stage, donated, mesh):
    state, plan = sharded(mesh, stage)
    data = plan.place_batch(batch())

    def found(step):
        program = lowered(step, state, data, donate_argnums=donated)
        every = jzero.findings(program, plan, uses=jzero.param_uses(step, state, data))
        return [f for f in every if f.kind != "state_not_donated"]

    def forgets_to_update(state, data):  # nothing needs the gradients: XLA drops them
        return state, grads_of(state, data)[0]

    def logs_gradients(state, data):
        loss, grads = grads_of(state, data)
        return state.replace(step=state.step + 1), (loss, optax.global_norm(grads))

    for step in (forgets_to_update, logs_gradients):
        (finding,) = found(step)
        assert finding.kind == "not_trained"
        assert "never updates: 10 params come back as they went in. .params['Dense_0']" in finding.text
        assert finding.bytes == sum(x.nbytes // (8 if x.stored != x.used else 1) for x in plan.layouts)
        assert "linen: return state.apply_gradients(grads=grads)" in finding.remedy

    def updates(state, data):
        loss, grads = grads_of(state, data)
        return state.apply_gradients(grads=grads), loss

    program = lowered(forgets_to_update, state, data, donate_argnums=(0,))
    (finding,) = jzero.findings(program, plan)  # nobody says what it reads
    assert finding.kind == "not_trained"
    assert finding.text.endswith("if it only evaluates, pass uses=jzero.param_uses(step, ...).")

    assert found(updates) == []
    for_another = lambda state, data: (state, *grads_of(state, data))  # noqa: E731 - gradients to add up
    assert found(for_another) == []
    assert found(lambda state, data: (state, evaluates(state, data))) == []


@pytest.mark.remedy("_unchanged", "optax: params = optax.apply_updates(params, updates)")
def test_updates_of_optax_that_are_not_applied(mesh):
    state, plan = sharded(mesh, 2)

    def found(apply_updates):
        def step(params, opt_state, data):
            grads = jax.grad(lambda params: loss_of(state.apply_fn, params, data))(params)
            updates, opt_state = state.tx.update(grads, opt_state, params)
            return apply_updates(params, updates), opt_state

        args = state.params, state.opt_state, plan.place_batch(batch())
        return kinds(lowered(step, *args, donate_argnums=(0, 1)), plan)

    assert found(lambda params, updates: params) == ["not_trained"]
    assert found(optax.apply_updates) == []


@pytest.mark.remedy("gradients_zero", "let the loss read its own argument")
def test_a_loss_that_reads_the_params_of_the_state(mesh):
    """On the CPU; `test_check.py` has it on GPUs."""
    state, plan = sharded(mesh, 2)

    def step(state, data):
        grads = jax.grad(lambda params: loss_of(state.apply_fn, state.params, data))(state.params)
        return state.apply_gradients(grads=grads)

    for step, expected in ((step, ["not_trained"]), (train_step, [])):  # noqa: B020
        assert kinds(jzero.jit(step, plan).lower(state, batch()).compile(), plan) == expected


@pytest.mark.remedy("_gradients_not_returned", "return the gradients of all params, and call apply_gradients")
def test_gradients_for_an_update_outside_that_are_not_returned(mesh):
    state, plan = sharded(mesh, 2, offload=jzero.Offload(update="host"))

    def logs_their_norm(state, data):
        loss, grads = grads_of(state, data)
        return loss, optax.global_norm(grads)

    for step, expected in ((logs_their_norm, ["not_trained"]), (grads_of, [])):
        assert kinds(jzero.jit(step, plan).lower(state, batch()).compile(), plan) == expected


@pytest.mark.remedy("state_not_donated", "nnx.jit, pod.compile and jzero.jit take the same option")
@pytest.mark.parametrize("named", [False, True])
def test_the_jit_that_donates(named, mesh):
    state, plan = sharded(mesh, 2)
    args = {"state": state, "batch": plan.place_batch(batch())}

    def found(jitted):
        lowered = jitted.lower(**args) if named else jitted.lower(*args.values())
        return jzero.findings(lowered.compile(), plan)

    (finding,) = found(jax.jit(train_step))
    assert ("donate_argnames=('state',)" if named else "donate_argnums=0") in finding.remedy
    remedy, *_ = finding.remedy.partition("; nnx.jit")
    assert found(eval(remedy, {"jax": jax, "step": train_step})) == ()


@pytest.mark.default_cases("1")
@pytest.mark.remedy("state_whole", "state = jzero.shard(state, plan.config, mesh=mesh)")
@pytest.mark.remedy("state_not_donated", "Results must be laid out like the arguments")
@pytest.mark.parametrize("stage", [1, 3])
def test_out_shardings_of_the_user(stage, mesh):
    state, plan = sharded(mesh, stage)
    data = plan.place_batch(batch())
    whole = {"out_shardings": (plan.sharding(jax.P()), None)}
    assert kinds(lowered(train_step, state, data, donate_argnums=0, **whole), plan) == [
        "state_too_large", "state_not_donated"
    ]  # fmt: skip
    assert kinds(lowered(train_step, state, data, donate_argnums=0), plan) == []


def another(tx=TX, width=40):
    """A model with other layers, of which some have names and shapes of the first."""
    params = create_state().params
    params = {"Dense_0": params["Dense_0"], "Head": {"kernel": jnp.ones((width, 7)), "bias": jnp.zeros(7)}}

    def apply_fn(variables, x):
        p = variables["params"]
        x = jnp.tanh(x @ p["Dense_0"]["kernel"] + p["Dense_0"]["bias"])
        return (x @ p["Head"]["kernel"] + p["Head"]["bias"])[:, :DIM_OUT]

    return TrainState.create(apply_fn=apply_fn, params=params, tx=tx)


@pytest.mark.nightly
@pytest.mark.parametrize("second", [create_state, another])
@pytest.mark.parametrize("stage", [2, 3])
def test_two_models_in_a_step(stage, second, mesh):
    state, plan = sharded(mesh, stage)
    other, other_plan = sharded(mesh, 1, create=second)

    def step(state, other, data):
        state, loss = train_step(state, data)
        other, more = train_step(other, data)
        return state, other, loss + more

    def loses_one(state, other, data):
        state, other, loss = step(state, other, data)
        return state, loss

    data = plan.place_batch(batch())
    both = lowered(step, state, other, data, donate_argnums=(0, 1))
    assert kinds(both, plan) == []
    assert kinds(both, other_plan) == []
    assert jzero.findings(both, plan).in_part["state_too_large"].startswith("beside the params of another model")
    alone = jzero.explain(lowered(train_step, state, data, donate_argnums=0), plan).wire
    size = sum(x.nbytes for p in (plan, other_plan) for x in p.layouts)
    assert jzero.explain(both, plan).wire.psi_bytes == pytest.approx(size * 7 / 8, rel=1e-3)
    assert alone.psi_bytes == pytest.approx(plan.param_bytes * 7 / 8, rel=1e-3)
    lost = lowered(loses_one, state, other, data, donate_argnums=(0, 1))
    assert "not_trained" not in kinds(lost, plan)
    assert jzero.explain(lost, plan).wire.psi_bytes == alone.psi_bytes

    def beside_frozen(state, frozen, data):
        def loss_fn(params):
            return loss_of(PLAIN, params, data) + loss_of(other.apply_fn, frozen["params"], data)

        return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))

    frozen = lowered(beside_frozen, state, {"params": other.params}, data, donate_argnums=0)
    assert jzero.explain(frozen, plan).wire.psi_bytes == alone.psi_bytes
    if second is another:  # of two equal models, results are told apart by nothing
        assert "not_trained" in kinds(lost, other_plan)


@pytest.mark.remedy("_unchanged", "linen: return state.apply_gradients(grads=grads)")
def test_two_models_of_which_one_is_not_updated(mesh):
    """As in a GAN: both states come in and go back."""
    models = [sharded(mesh, 2, create=create) for create in (create_state, another)]
    data = models[0][1].place_batch(batch())

    def found(*trained):
        def step(*args):
            *states, data = args
            new = [train_step(state, data)[0] if k in trained else state for k, state in enumerate(states)]
            return *new, sum(loss_of(state.apply_fn, state.params, data) for state in states)

        program = lowered(step, *(state for state, _ in models), data, donate_argnums=(0, 1))
        return [jzero.findings(program, plan) for _, plan in models]

    for trained in (0, 1):
        of_both = found(trained)
        assert of_both[trained] == ()
        (finding,) = of_both[1 - trained]
        assert finding.kind == "not_trained"
        assert "never updates" in finding.text
        assert not any("beside the params of another model" in f.in_part["not_trained"] for f in of_both)
    assert found(0, 1) == [(), ()]


def test_a_target_network_with_an_equal_plan(mesh):
    """No path says which of both is the plan's."""
    actor, plan = sharded(mesh, 2)
    target, target_plan = sharded(mesh, 2)
    assert plan == target_plan

    def step(actor, target, data):
        return train_step(actor, data)[0], target

    def turned(target, actor, data):
        return step(actor, target, data)[::-1]

    for fn, args in ((step, (actor, target)), (turned, (target, actor))):
        found = jzero.findings(lowered(fn, *args, plan.place_batch(batch()), donate_argnums=(0, 1)), plan)
        assert found == ()
        assert "not whether all params come back as they went in" in found.in_part["not_trained"]


@pytest.mark.default_cases("how1-fp32 adam")
@pytest.mark.parametrize("tx", [TX, optax.sgd(1e-2, 0.9)], ids=["fp32 adam", "bf16 momentum"])
@pytest.mark.parametrize("how", [jzero.jit, functools.partial(jax.jit, donate_argnums=0)])
def test_steps_that_python_repeats_and_a_callback_in_order(how, tx, mesh):
    dtype = jnp.float32 if tx is TX else jnp.bfloat16
    state, plan = sharded(mesh, 2, create=functools.partial(create_state, tx, dtype))

    def step(state, data):
        for _ in range(2):
            state, loss = train_step(state, data)
        io_callback(lambda loss: None, None, loss, ordered=True)  # its token comes before all arguments and results
        return state, loss

    program = how(step).lower(state, plan.place_batch(batch())).compile()
    assert kinds(program, plan) == []
    memory = jzero.explain(program, plan).memory
    assert memory.aliased > 0.99 * (memory.params + memory.opt_state)
    assert memory.opt_state == sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.opt_state))
    lost = jax.jit(lambda state, data: step(state, data)[1]).lower(state, plan.place_batch(batch())).compile()
    assert kinds(lost, plan) == ["not_trained"]
    assert jzero.findings(lost, plan, ignore=("not_trained",)) == ()
    found = jzero.findings(lost, plan)
    assert repr(pickle.loads(pickle.dumps(found))) == repr(copy.deepcopy(found)) == repr(found)
    with pytest.raises(jzero.CheckError) as caught:
        jzero.check(lost, plan)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.nightly
@pytest.mark.pod
@pytest.mark.parametrize("stage", [2, 3])
def test_the_wire_of_two_models_is_compared(stage):
    pod = jzero.pod("h200")
    fields = {"stage": stage, "mesh": pod.mesh({"data": 8}), "min_shard_bytes": 0}

    def create(width):
        def apply_fn(variables, x):
            return jnp.tanh(x @ variables["params"]["in"]) @ variables["params"]["out"]

        params = {"in": jnp.ones((DIM_IN, width)), "out": jnp.ones((width, DIM_OUT))}
        return TrainState.create(apply_fn=apply_fn, params=params, tx=TX)

    state, other = (jzero.abstract(functools.partial(create, width), **fields) for width in (64, 128))
    plan = jzero.plan_of(state)

    def step(state, other, data):
        state, loss = train_step(state, data)
        other, more = train_step(other, data)
        return state, other, loss + more

    def sorts(state, other, data):
        *new, loss = step(state, other, data)
        return *new, loss + jnp.sort(other.opt_state[0].mu["in"], 0)[0].sum()

    data = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch())
    clean, more = (
        jzero.findings(pod.compile(fn, state, other, data, donate_argnums=(0, 1)), plan) for fn in (step, sorts)
    )
    assert clean == ()
    assert clean.notes == ()
    assert "more_than_closed_form" in clean.looked_for
    assert [f.kind for f in more] == ["more_than_closed_form"]


@pytest.mark.nightly
@pytest.mark.pod
@pytest.mark.parametrize("stage", [2, 3])
def test_a_frozen_reference(stage):
    """Preferences: two batches through the model, and through a copy of it that is not trained."""
    mesh = jzero.pod("h200").mesh({"data": 8})
    state = jzero.abstract(create_state, stage=stage, mesh=mesh, min_shard_bytes=0)
    plan = jzero.plan_of(state)

    def step(state, reference, data, more):
        def loss_fn(params):
            gap = loss_of(state.apply_fn, params, data) - loss_of(state.apply_fn, params, more)
            kept = loss_of(state.apply_fn, reference, data) - loss_of(state.apply_fn, reference, more)
            return -jax.nn.log_sigmoid(gap - kept)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    data = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch())
    pod = jzero.pod("h200")
    program = pod.compile(step, state, state.params, data, data, donate_argnums=0)
    assert kinds(program, plan) == (["reduction_per_microbatch"] if stage == 3 else [])  # two calls of the model
    assert "beside a copy of the params" in jzero.findings(program, plan).left_out["more_than_closed_form"]
    if stage == 2:
        assert "state_not_donated" in kinds(pod.compile(step, state, state.params, data, data), plan)


def test_an_average_of_the_params_is_no_other_model(mesh):
    class WithAverage(TrainState):
        average: dict

    def create():
        state = create_state()
        return WithAverage(**vars(state), average=state.params)

    state, plan = sharded(mesh, 2, create=create)

    def step(state, data):
        state, loss = train_step(state, data)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state.average, state.params)
        return state.replace(average=jax.tree.map(lambda a: a, average)), loss

    program = lowered(step, state, plan.place_batch(batch()), donate_argnums=0)
    assert jzero.explain(program, plan).wire.psi_bytes == pytest.approx(plan.param_bytes * 7 / 8, rel=1e-3)


def test_a_jax_that_names_derivatives_otherwise(mesh):
    """`test_blind.py` has it on GPUs. A fault in its program may be as silent as here a program without one."""
    state, plan = sharded(mesh, 2)
    with renamed_derivatives():
        program = jzero.jit(lambda *args: train_step(*args), plan).lower(state, plan.place_batch(batch())).compile()
        (finding,) = jzero.findings(program, plan)
    assert finding.kind == "not_checked"
    assert "this jax names the derivative otherwise than jzero reads" in finding.text
    assert "jvp(" not in program.as_text()
    assert kinds(program, plan) == []  # its trace has the names of then


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(DIM_IN, 64, rngs=rngs), nnx.Linear(64, DIM_OUT, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def pair(mesh, stage, net=Net, tx=TX):
    model = net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    return jzero.shard((model, optimizer), stage=stage, mesh=mesh, min_shard_bytes=0)


def nnx_step(model, optimizer, data):
    def loss_fn(model):
        return jnp.mean((model(data["x"]) - data["y"]) ** 2)

    loss, grads = nnx.value_and_grad(jzero.gather_on_use(loss_fn, jzero.plan_of(optimizer)))(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize("stage", [2, 3])
def test_nnx(stage, mesh):
    model, optimizer = pair(mesh, stage)
    plan = jzero.plan_of(optimizer)
    data = plan.place_batch(batch())
    good = nnx.jit(nnx_step, donate_argnums=(0, 1)).lower(model, optimizer, data).compile()
    assert kinds(good, plan) == []
    (found,) = jzero.findings(lowered(nnx_step, model, optimizer, data), plan)  # plain jax.jit changes copies
    assert found.kind == "not_trained"
    assert "nnx.jit" in found.remedy
    whole = nnx.jit(lambda model, data: model(data["x"])).lower(model, data).compile()
    assert kinds(whole, plan) == (["weights_not_gathered_on_use"] if stage == 3 else [])
    gathered = jzero.gather_on_use(lambda model, data: model(data["x"]), plan)
    assert kinds(nnx.jit(gathered).lower(model, data).compile(), plan) == []


class Normed(nnx.Module):
    """With statistics, and with the typed key of a Dropout."""

    def __init__(self, rngs):
        self.bn, self.up = nnx.BatchNorm(DIM_IN, rngs=rngs), nnx.Linear(DIM_IN, DIM_OUT, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.up(self.bn(x)))


@pytest.mark.remedy("state_not_donated", "nnx.jit, pod.compile and jzero.jit take the same option")
def test_leaves_of_nnx_objects_have_the_paths_of_their_variables(mesh):
    """Flax hands a jitted step lists of arrays."""
    model, optimizer = pair(mesh, 2, Normed)
    plan = jzero.plan_of(optimizer)
    data = plan.place_batch(batch())

    def plain(model, optimizer, data):
        return model, optimizer, nnx_step(model, optimizer, data)

    for jitted in (nnx.jit(nnx_step), jax.jit(plain)):
        (finding,) = jzero.findings(jitted.lower(model, optimizer, data).compile(), plan)
        assert finding.kind == "state_not_donated"
        assert "['bn']['bias'][24], ['bn']['mean'][24], ['bn']['scale'][24] and" in finding.text
    assert kinds(jzero.jit(nnx_step, plan).lower(model, optimizer, data).compile(), plan) == []


@pytest.mark.remedy("_unchanged", "NNX: optimizer.update(model, grads)")
def test_nnx_step_that_never_updates(mesh):
    model, optimizer = pair(mesh, 2)
    plan = jzero.plan_of(optimizer)
    data = plan.place_batch(batch())

    def forgets_to_update(model, optimizer, data):
        return nnx.value_and_grad(lambda model: jnp.mean((model(data["x"]) - data["y"]) ** 2))(model)[0]

    def found(step):
        jitted = nnx.jit(step, donate_argnums=(0, 1))
        program, uses = jitted.lower(model, optimizer, data).compile(), jzero.param_uses(jitted, model, optimizer, data)
        return jzero.findings(program, plan, uses=uses)

    (finding,) = found(forgets_to_update)
    assert finding.kind == "not_trained"
    assert "never updates: 2 params come back as they went in (vectors were not compared)" in finding.text
    assert "NNX: optimizer.update(model, grads)" in finding.remedy
    assert found(nnx_step) == ()  # the same, and the remedy


SGD = optax.sgd(0.1)


@pytest.mark.remedy("_not_returned", "return the new state")
@pytest.mark.remedy("_unchanged", "linen: return state.apply_gradients(grads=grads)")
def test_an_optimizer_without_state(mesh):
    """A TrainState has a `tx` all the same; its params alone do not say that it is to train."""
    state, plan = sharded(mesh, 2, create=functools.partial(create_small, SGD))
    data, donated = plan.place_batch(batch()), {"donate_argnums": 0}
    forgets_to_update = lambda state, data: (state, grads_of(state, data)[0])  # noqa: E731
    loss_only = lambda state, data: grads_of(state, data)[0]  # noqa: E731
    norm_only = lambda state, data: optax.global_norm(grads_of(state, data)[1])  # noqa: E731
    lost = [lowered(forgets, state, data, **donated), lowered(norm_only, state, data),
            jzero.jit(loss_only, plan).lower(state, data).compile()]  # fmt: skip
    unchanged = [lowered(forgets_to_update, state, data, **donated),
                 jzero.jit(forgets_to_update, plan).lower(state, data).compile()]  # fmt: skip
    for programs, text in ((lost, "nothing of the state comes back"), (unchanged, "never updates")):
        for program in programs:
            (finding,) = [f for f in jzero.findings(program, plan) if f.kind != "state_not_donated"]
            assert finding.kind == "not_trained"
            assert text in finding.text
    of_params = lowered(lambda params, data: params, state.params, data, **donated)
    assert kinds(of_params, plan) == ["not_trained"]
    for evaluation in (evaluates, lambda state, data: (state, evaluates(state, data))):
        for program in (lowered(evaluation, state, data), jzero.jit(evaluation, plan).lower(state, data).compile()):
            assert kinds(program, plan) == []
    assert kinds(lowered(train_step, state, data, **donated), plan) == []


@pytest.mark.remedy("_unchanged", "NNX: optimizer.update(model, grads)")
def test_an_nnx_optimizer_without_state(mesh):
    model, optimizer = pair(mesh, 2, tx=SGD)
    plan = jzero.plan_of(optimizer)
    data = plan.place_batch(batch())

    def loss_only(model, optimizer, data):
        return nnx.value_and_grad(lambda model: jnp.mean((model(data["x"]) - data["y"]) ** 2))(model)[0]

    def norm_only(model, optimizer, data):
        return optax.global_norm(nnx.grad(lambda model: jnp.mean((model(data["x"]) - data["y"]) ** 2))(model))

    def found(jitted):
        return {f.kind: f for f in jzero.findings(jitted.lower(model, optimizer, data).compile(), plan)}

    for jitted in (nnx.jit(norm_only), nnx.jit(loss_only, donate_argnums=(0, 1)), jzero.jit(loss_only, plan)):
        assert "never updates" in found(jitted)["not_trained"].text
    assert "nothing of the state comes back" in found(jax.jit(norm_only))["not_trained"].text
    for jit in (nnx.jit, functools.partial(jzero.jit, plan=plan)):
        assert found(jit(lambda model, optimizer, data: model(data["x"]))) == {}
    assert found(nnx.jit(nnx_step, donate_argnums=(0, 1))) == {}


def test_two_nnx_models(mesh):
    first, second = pair(mesh, 2), pair(mesh, 1)

    def step(a, b, c, d, data):
        return nnx_step(a, b, data) + nnx_step(c, d, data)

    plan = jzero.plan_of(first[1])
    data = plan.place_batch(batch())
    program = nnx.jit(step, donate_argnums=(0, 1, 2, 3)).lower(*first, *second, data).compile()
    assert kinds(program, plan) == []
    assert jzero.explain(program.compiled, plan).wire.psi == pytest.approx(3, rel=0.02)  # all-reduces, on the CPU


def test_the_state_that_a_step_takes_is_whole(mesh):
    """The fault itself is still found beside another model."""
    state, plan = sharded(mesh, 2)
    other, _ = sharded(mesh, 2, create=another)
    whole = state.replace(opt_state=jax.device_put(state.opt_state, plan.sharding(jax.P())))

    def step(state, other, data):
        state, loss = train_step(state, data)
        return state, train_step(other, data)[0], loss

    data = plan.place_batch(batch())
    assert "state_too_large" in kinds(lowered(step, whole, other, data, donate_argnums=(0, 1)), plan)
    assert np.shape(data["x"])[0] == BATCH


def test_a_plan_of_another_state_is_refused(mesh):
    """Its Psi would be wrong, and nothing of the state found wrong."""
    state, plan = sharded(mesh, 2)
    data = plan.place_batch(batch())
    program = lowered(train_step, state, data, donate_argnums=0)
    half = jax.sharding.Mesh(np.asarray(jax.devices()[:4]), ("data",))
    deeper = {**state.params, "Dense_9": {"kernel": jnp.ones((8, 8))}}
    wider = jax.tree.map(lambda x: jnp.ones([2 * d for d in x.shape]), state.params)
    for params, where, message in (
        (state.params, half, r"for 8 devices, and the mesh of the plan has 4 \(data=4\)"),
        (deeper, mesh, r"\n  Dense_9/kernel  program: none  plan: \(8, 8\)\n"),
        (wider, mesh, r"Dense_0/bias +program: \(\d+,\) +plan: \(\d+,\)"),
        ({"other": jnp.ones((3, 5))}, mesh, r"other  program: none  plan: \(3, 5\)"),
    ):
        wrong = jzero.make_plan(jax.tree.map(jnp.copy, params), stage=2, mesh=where)
        for call, name in ((jzero.check, "check"), (jzero.findings, "check"), (jzero.explain, "explain")):
            with pytest.raises(ValueError, match=rf"(?s)^jzero\.{name}: .*{message}"):
                call(program, wrong)

    def bare(params, data):
        return jax.grad(lambda p: loss_of(PLAIN, p, data))(params)

    program = lowered(bare, state.params, data)
    jzero.explain(program, plan)
    with pytest.raises(ValueError, match="does not match the params"):
        jzero.explain(program, jzero.make_plan({"other": jnp.ones((3, 5))}, stage=2, mesh=mesh))

    leaves, tree = jax.tree.flatten(state)  # a list of leaves has no names: shapes decide

    def on_leaves(leaves, data):
        return jax.tree.leaves(train_step(jax.tree.unflatten(tree, leaves), data)[0])

    program = lowered(on_leaves, leaves, data, donate_argnums=0)
    assert jzero.explain(program, plan).wire.psi_bytes == pytest.approx(plan.param_bytes * 7 / 8, rel=1e-3)
    with pytest.raises(ValueError, match="does not match the params"):
        jzero.explain(program, jzero.make_plan({"other": jnp.ones((3, 5))}, stage=2, mesh=mesh))

    variables = {"params": state.params}  # a plan of what `model.init` returns
    program = lowered(lambda v, x: jax.grad(lambda v: loss_of(PLAIN, v["params"], x))(v), variables, data)
    of_variables = jzero.make_plan(jax.tree.map(jnp.copy, variables), stage=2, mesh=mesh, min_shard_bytes=0)
    for fits in (plan, of_variables):
        assert jzero.explain(program, fits).wire.psi_bytes == pytest.approx(plan.param_bytes * 7 / 8, rel=1e-3)


def test_a_plan_of_another_nnx_model_is_refused(mesh):
    model, _ = pair(mesh, 2)
    program = nnx.jit(lambda model, data: model(data["x"])).lower(model, batch()).compile()
    with pytest.raises(ValueError, match=r"does not match the params of this program"):
        jzero.explain(program, jzero.make_plan({"other": jnp.ones((3, 5))}, stage=2, mesh=mesh))


class Square(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = (nnx.Linear(64, 64, use_bias=False, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def test_a_plan_with_the_shape_of_one_param_is_refused(mesh):
    """Leaves without names: each param needs one, and those of a model whose update was traced are its own."""

    def refuses(program, shapes, missing):
        plan = jzero.make_plan({k: jnp.ones(s) for k, s in shapes.items()}, stage=2, mesh=mesh, min_shard_bytes=0)
        for call in (jzero.findings, jzero.explain):
            with pytest.raises(ValueError, match="does not match the params of this program") as caught:
                call(program, plan)
            assert re.findall(r"\n  (\w+)  program: none", str(caught.value)) == missing

    model, optimizer = pair(mesh, 2, Square)
    plan, data = jzero.plan_of(optimizer), {"x": jnp.ones((BATCH, 64)), "y": jnp.zeros((BATCH, 64))}
    program = jzero.jit(nnx_step, plan).lower(model, optimizer, data).compile()
    assert kinds(program, plan) == []
    refuses(program, {"w": (64, 64)}, ["w"])
    array = jax.device_put(jnp.ones((64, 128)), plan.sharding(jax.P()))
    refuses(lowered(lambda x: x * 2, array), {"a": (64, 128), "b": (128, 64)}, ["b"])
    refuses(lowered(lambda x, y: x * y, array, array), {"a": (64, 128), "b": (64, 128), "c": (64, 128)}, ["c"])
