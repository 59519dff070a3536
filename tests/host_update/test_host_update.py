"""`Offload(update="host")`: the update outside of the program gives the numbers of the plain one, in place."""

from __future__ import annotations

import copy
import functools
import gc
import math
import pickle
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_chains as streamed
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from host_updates import CHAINS, HOST, LATE, gradients_of, make_gradients, run_chain, steps
from jax.sharding import Mesh
from models import batch, create_state, loss_of, max_error, train_step

import jzero
from jzero import offload as offloading
from jzero.layout.specs import shard_factor
from jzero.optim import whole_state
from jzero.update.on_host.handles import Handle

P = jax.P


def handles(opt_state):
    return [
        x for x in jax.tree.leaves(opt_state.inner, is_leaf=lambda x: isinstance(x, Handle)) if isinstance(x, Handle)
    ]


@pytest.mark.default_cases("8-columns", "5-clip")
@pytest.mark.filterwarnings("ignore:(?s)jzero.*several params together, too much for one device:UserWarning")  # L-BFGS
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("devices", [8, 5, 1])
def test_any_chain_gives_the_plain_numbers(name, devices):
    """Norms, a step with NaN, accumulation, noise, matrices with owners, padded leaves on five devices."""
    params = {**streamed.params_of(), "scalar": jnp.float32(0.5)}
    rng = np.random.default_rng(1)
    grads = [jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype), params) for _ in range(4)]
    grads[1] = grads[1] | {"a": grads[1]["a"].at[0, 0].set(np.nan if name == "if finite" else 0)}
    want, plain = params, CHAINS[name]()
    plain_state, update = plain.init(params), jax.jit(plain.update)
    for g in grads:
        updates, plain_state = update(g, plain_state, want)
        want = optax.apply_updates(want, updates)
    got, state, plan = run_chain(name, params, devices, grads, offload=HOST)
    assert max_error(got, want) < (2e-5 if name == "muon" else 1e-6)
    assert [x.sharding.spec for x in jax.tree.leaves(got)] == [x.stored for x in plan.layouts]
    large = [h for h in (*handles(state), *state.master.masters) if h is not None]
    assert sum(h.nbytes for h in large) >= 4 * 64 * 32
    assert all(x.size <= 16 for x in jax.tree.leaves(state))
    store = state.master.store.store
    split = [x for x in store.arrays if x is not None and x.size > 40]
    assert devices == 1 or all(not x.is_fully_replicated for x in split)


def test_a_few_values_are_whole():
    """XLA of jaxlib 0.10 writes a value into shards of unequal size at the wrong place, as L-BFGS's weights."""
    params = {"w": jnp.ones((32, 16))}
    rng = np.random.default_rng(0)
    grads = [{"w": jnp.asarray(rng.standard_normal((32, 16)), jnp.float32)} for _ in range(4)]
    _, state, _ = run_chain("lbfgs", params, 2, grads, offload=HOST)
    tx, plain = CHAINS["lbfgs"](), params
    want = tx.init(plain)
    for g in grads:
        updates, want = tx.update(g, want, plain)
        plain = optax.apply_updates(plain, updates)
    assert max_error(state.inner[0].weights_memory[:3], want[0].weights_memory) < 1e-3


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_a_train_state_as_in_the_program(stage, dtype):
    """Existing and born; the jitted function is traced once, and gradients leave it on their shards."""
    apply = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    for state in (create_state(dtype=dtype), functools.partial(create_state, dtype=dtype)):
        want = jzero.shard(create_state(dtype=dtype), stage=stage, min_shard_bytes=0)
        got = jzero.shard(state, stage=stage, min_shard_bytes=0, offload=HOST)
        plan, grads_fn = jzero.plan_of(got), make_gradients()
        for i in range(4):
            _, grads = grads_fn(got, plan.place_batch(batch(i)))
            want, got = apply(want, grads), got.apply_gradients(grads=grads)
            assert max_error(got.params, want.params) < (1e-6 if dtype == jnp.float32 else 1e-2)
        assert grads_fn._cache_size() == 1
        inside = jzero.shard(got, stage=stage, min_shard_bytes=0)
        assert max_error(inside.opt_state, want.opt_state) < 1e-6
        for g, x in zip(jax.tree.leaves(grads), plan.layouts, strict=True):
            assert x.padded or x.vector or g.sharding.is_equivalent_to(plan.sharding(x.grad), g.ndim), x.name
        assert int(got.opt_state.master.generation) == 4


def test_nnx_as_in_the_program():
    def create():
        model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
        tx = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss(model, x):
        return jnp.mean(model(x) ** 2)

    def train(model, optimizer, x):
        optimizer.update(model, nnx.grad(loss)(model, x))

    plain = create()
    model, optimizer = jzero.shard(create, stage=3, min_shard_bytes=0, offload=HOST)
    plan = jzero.plan_of(optimizer)
    grads_fn = nnx.jit(nnx.grad(jzero.gather_on_use(loss, plan)))
    x = np.random.default_rng(0).standard_normal((16, 64), dtype=np.float32)
    step = nnx.jit(train)
    for _ in range(3):
        step(*plain, x)
        optimizer.update(model, grads_fn(model, plan.place_batch(x)))
    assert max_error(nnx.state(model, nnx.Param), nnx.state(plain[0], nnx.Param)) < 1e-6
    assert float(optax.tree.get(nnx.as_pure(optimizer.opt_state), "learning_rate")) == pytest.approx(1e-2)
    with pytest.raises(TypeError, match=r"Two lines move:\n.*\n.*optimizer\.update"):
        nnx.jit(train)(model, optimizer, plan.place_batch(x))
    jzero.shard((model, optimizer), stage=2, min_shard_bytes=0)
    step(model, optimizer, plan.place_batch(x))
    step(*plain, x)
    assert max_error(nnx.state(model, nnx.Param), nnx.state(plain[0], nnx.Param)) < 1e-6


def test_one_step_late():
    """`delay=1` against gradients that are applied a step later by hand; the first step changes nothing."""
    late = jzero.shard(create_state(), stage=2, min_shard_bytes=0, offload=LATE)
    hand = jzero.shard(create_state(), stage=2, min_shard_bytes=0, offload=HOST)
    plan = jzero.plan_of(late)
    params, pending = hand.params, None
    for i in range(4):
        b = plan.place_batch(batch(i))
        late = late.apply_gradients(grads=gradients_of(plan)(late, b)[1])
        grads = gradients_of(plan)(hand.replace(params=params), b)[1]
        if pending is not None:
            hand = hand.apply_gradients(grads=pending)
            params = hand.params
        pending = grads
        assert max_error(late.params, params) == 0
    # what is resolved has the update that was under way, and its params
    hand = hand.apply_gradients(grads=pending)
    whole = jzero.shard(late, stage=2, min_shard_bytes=0)
    assert max_error(whole.params, hand.params) == 0
    assert max_error(whole.opt_state, jzero.shard(hand, stage=2, min_shard_bytes=0).opt_state) == 0


@pytest.mark.default_cases("f32-donated")
@pytest.mark.parametrize("donated", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_one_step_late_where_a_jitted_function_returns_the_state(dtype, donated):
    """New arrays of equal values are not new params; what the function takes is gone while the update runs."""
    late = jzero.shard(create_state(dtype=dtype), stage=2, min_shard_bytes=0, offload=LATE)
    kept = jzero.shard(create_state(dtype=dtype), stage=2, min_shard_bytes=0, offload=LATE)
    plan, grads_fn = jzero.plan_of(late), make_gradients()
    through = jax.jit(lambda s, b: (s, grads_fn(s, b)[1]), donate_argnums=(0,) if donated else ())
    for i in range(4):
        b = plan.place_batch(batch(i))
        kept = kept.apply_gradients(grads=grads_fn(kept, b)[1])
        late, grads = through(late, b)
        late = late.apply_gradients(grads=grads)
        if donated:
            jax.tree.map(lambda x: x.delete(), grads)
        assert max_error(late.params, kept.params) == 0
    assert max_error(late.params, create_state(dtype=dtype).params) > 1e-3
    late, kept = (jzero.shard(s, stage=2, min_shard_bytes=0) for s in (late, kept))
    assert max_error(late.opt_state, kept.opt_state) == 0


@pytest.mark.default_cases("donated")
@pytest.mark.parametrize("donated", [False, True], ids=["kept", "donated"])
def test_nnx_one_step_late(donated):
    """`nnx.jit` returns a model's params as new arrays at every call."""
    tx = optax.adam(1e-2)

    def create():
        model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def gradients(model, x):
        return nnx.grad(lambda model, x: jnp.mean(model(x) ** 2))(model, x)

    model, optimizer = jzero.shard(create, stage=2, min_shard_bytes=0, offload=LATE)
    grads_fn = nnx.jit(gradients, donate_argnums=(0,) if donated else ())
    plain, pending = create(), None
    opt_state = tx.init(nnx.to_pure_dict(nnx.state(plain[0])))
    x = np.random.default_rng(0).standard_normal((16, 64), dtype=np.float32)
    for _ in range(4):
        optimizer.update(model, grads_fn(model, jzero.plan_of(optimizer).place_batch(x)))
        grads = nnx.to_pure_dict(gradients(plain[0], x))
        if pending is not None:
            params = nnx.to_pure_dict(nnx.state(plain[0]))
            updates, opt_state = tx.update(pending, opt_state, params)
            nnx.update(plain[0], optax.apply_updates(params, updates))
        pending = grads
        assert max_error(nnx.state(model), nnx.state(plain[0])) < 1e-6
    assert max_error(nnx.state(model), nnx.state(create()[0])) > 1e-3


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("jitted", [False, True])
def test_what_the_user_changes_between_late_updates_is_taken_over(jitted, tmp_path):
    """Pruned values, a learning rate: these are the user's, all others have the update that was under way."""
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    params = {"a": jnp.ones((16, 8)), "b": jnp.ones((16, 8), jnp.bfloat16), "s": jnp.float32(1)}
    grads = jax.tree.map(jnp.ones_like, params)
    copied = jax.jit(lambda tree: tree, donate_argnums=0) if jitted else lambda tree: tree
    state = jzero.shard(
        TrainState.create(apply_fn=None, params=params, tx=tx), stage=2, min_shard_bytes=0, offload=LATE
    )
    state = copied(state.apply_gradients(grads=grads))  # 1.0 is handed out, 0.5 under way
    pruned = jax.tree.map(lambda p: p.at[0].set(0) if p.ndim else p, state.params)
    pruned["a"] = pruned["a"].at[1, 0].set(jnp.nan)
    state = state.replace(params=pruned)
    path = jzero.checkpoint.save(tmp_path / "saved", state)
    state = copied(state.apply_gradients(grads=grads))
    want = jax.tree.map(lambda p: np.full(p.shape, 0.5, p.dtype), params)
    want["a"][0], want["b"][0], want["a"][1, 0] = 0, 0, np.nan
    jax.tree.map(np.testing.assert_array_equal, state.params, want)
    like = jzero.abstract(lambda: TrainState.create(apply_fn=None, params=params, tx=tx), stage=2)
    jax.tree.map(np.testing.assert_array_equal, jzero.checkpoint.restore(path, like).params, want)
    state = state.replace(opt_state=optax.tree.set(state.opt_state, learning_rate=jnp.float32(0.25)))
    state = copied(state.apply_gradients(grads=grads))  # with 0.5, before the rate was set
    whole = jzero.shard(state, stage=2)
    for params, change in ((state.params, 0.5), (whole.params, 0.75)):
        expected = jax.tree.map(lambda p: p - np.asarray(change, p.dtype), want)  # noqa: B023
        jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert float(optax.tree.get(whole.opt_state, "learning_rate")) == 0.25


def test_a_late_update_reads_no_array_that_the_user_may_donate():
    """A frozen param that the update of another reads, random keys, keyword arguments."""

    def update(grads, state, params, *, value=0.0, **_):
        key, other = jax.random.split(state)
        scale = value + jax.random.uniform(other) + jnp.sum(params["frozen"])
        return {"w": scale * grads["w"], "frozen": jnp.zeros_like(params["frozen"])}, key

    tx = optax.GradientTransformationExtraArgs(lambda _: jax.random.key(0), update)
    params = {"w": jnp.ones((32, 16)), "frozen": jnp.ones((16, 8))}
    found = {}
    for name, offload in (("late", LATE), ("now", HOST)):
        plan = jzero.make_plan(params, stage=2, min_shard_bytes=0, offload=offload)
        wrapped, given = jzero.zero(tx, plan), plan.place(jax.tree.map(jnp.copy, params))
        state, copied = wrapped.init(given), jax.jit(lambda tree: tree, donate_argnums=0)
        for i in range(4):
            grads, value = jax.tree.map(jnp.ones_like, given), jnp.float32(i)
            updates, state = wrapped.update(grads, state, given, value=value)
            given = optax.apply_updates(given, updates)
            jax.tree.map(lambda x: x.delete(), (grads, value))
            given, state = copied((given, state))
        found[name] = whole_state(state, given, wrapped)[1]
    assert max_error(found["late"], found["now"]) == 0
    assert max_error(found["late"], params) > 1


def test_an_error_of_a_late_update_surfaces_at_the_next(monkeypatch):
    state = steps(jzero.shard(create_state(), stage=2, offload=LATE), 1)
    running = state.opt_state.master.store
    running._pending.result()

    def fail(*args):
        raise OSError("no memory left")

    monkeypatch.setattr(running.store, "write", fail)
    state = steps(state, 1)
    with pytest.raises(OSError, match="no memory left"):
        steps(state, 1)
    monkeypatch.undo()
    with pytest.raises((OSError, RuntimeError), match="no memory left"):
        steps(state, 1)


@pytest.mark.nightly
def test_replaced_params_are_taken_over():
    """Pruned by hand, and returned through a jitted function: the master follows, in values alone."""
    state = steps(jzero.shard(create_state(dtype=jnp.bfloat16), stage=2, offload=HOST), 2)
    want = steps(jzero.shard(create_state(dtype=jnp.bfloat16), stage=2), 0)
    masters = state.opt_state.master.store.store.arrays[-1]
    before = np.asarray(masters)
    same = state.replace(params=jax.jit(lambda p: jax.tree.map(jnp.copy, p))(state.params))
    same.opt_state.master.store._changed(jax.tree.leaves(same.params))
    plan = jzero.plan_of(state)
    zero = jax.tree.map(jnp.zeros_like, gradients_of(plan)(state, plan.place_batch(batch()))[1])
    state = same.apply_gradients(grads=zero)
    after = np.asarray(state.opt_state.master.store.store.arrays[-1])
    assert np.max(np.abs(after - before)) < 0.05  # Adam's momentum and decay alone, nothing rounded to bf16
    assert np.any(after.astype(jnp.bfloat16).astype(np.float32) != after)
    pruned = jax.tree.map(jnp.zeros_like, state.params)
    state = state.replace(params=pruned).apply_gradients(grads=zero)
    assert max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(state.params)) < 0.1
    del want


def test_what_is_overwritten_without_being_read_is_kept():
    """The last gradient: only an inner product reads it, before any group runs."""

    def update(grads, last, params=None):
        return jax.tree.map(lambda g: -(0.1 + optax.tree.vdot(grads, last)) * g, grads), grads

    tx = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)
    params = {"w": jnp.ones((64, 32)), "v": jnp.ones((32, 64))}
    plan = jzero.make_plan(params, stage=2, min_shard_bytes=0, offload=HOST)
    outside, state, last = jzero.zero(tx, plan), None, tx.init(params)
    placed, state = plan.place(params), jzero.zero(tx, plan).init(plan.place(params))
    for i in range(3):
        grads = jax.tree.map(lambda p, i=i: 0.01 * (i + 1) * jnp.ones_like(p), params)
        updates, last = tx.update(grads, last, params)
        params = optax.apply_updates(params, updates)
        updates, state = outside.update(jax.device_get(grads), state, placed)  # numpy gradients, as MPI gives them
        placed = optax.apply_updates(placed, updates)
    assert max_error(placed, params) < 1e-6


def test_an_update_that_fails_before_it_begins_can_be_repeated():
    tx = optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau())
    params = {"w": jnp.ones((64, 32))}
    plan = jzero.make_plan(params, stage=2, min_shard_bytes=0, offload=HOST)
    outside, placed = jzero.zero(tx, plan), plan.place(params)
    state, grads = outside.init(placed), plan.place(params)
    with pytest.raises(TypeError, match="value"):
        outside.update(grads, state, placed)
    updates, _ = outside.update(grads, state, placed, value=jnp.float32(1))
    assert max_error(optax.apply_updates(placed, updates), params) > 0


def test_a_deep_copy_is_refused_and_a_state_of_its_own_is_not():
    """A copied store would have the number of the first: after a jit each state could find the other's masters."""
    state = jzero.shard(create_state(), stage=2, offload=HOST, min_shard_bytes=0)
    for _ in range(2):
        for copied in (lambda: copy.deepcopy(state), lambda: pickle.dumps(state.opt_state)):  # noqa: B023
            with pytest.raises(TypeError, match=r"cannot be copied or pickled.*checkpoint\.save.*jzero\.shard"):
                copied()
        state = steps(state, 1)
    apart = jzero.shard(state, stage=2, min_shard_bytes=0)
    both = [steps(s, 2) for s in (state, apart)]
    assert max_error(both[0].params, both[1].params) < 1e-6


def test_an_older_state_is_refused():
    old = jzero.shard(create_state(), stage=2, offload=HOST)
    new = steps(old, 1)
    with pytest.raises(ValueError, match=r"generation 0.*generation 1.*last update returned"):
        steps(old, 1)
    with pytest.raises(ValueError, match="generation 0"):
        jzero.shard(old, stage=2)
    assert int(steps(new, 3).opt_state.master.generation) == 4


def test_plain_orbax_refuses_and_names_the_remedy(tmp_path):
    state = jzero.shard(create_state(), stage=2, offload=HOST)
    for save in (ocp.PyTreeCheckpointer().save, ocp.StandardCheckpointer().save):
        with pytest.raises(ValueError, match=r"jzero\.checkpoint\.save"):
            save(tmp_path / "plain", state)
    assert not (tmp_path / "plain").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_checkpoints_from_and_to_other_tiers(tmp_path, dtype):
    """Also on fewer devices; what is stored does not tell the tier."""
    outside = steps(jzero.shard(create_state(dtype=dtype), stage=2, min_shard_bytes=0, offload=HOST), 2)
    path = jzero.checkpoint.save(tmp_path / "outside", outside)
    want = steps(outside, 2).params
    few = Mesh(np.array(jax.devices()[:5]), ("data",))
    create = functools.partial(create_state, dtype=dtype)
    for fields in ({"offload": HOST}, {"stage": 3, "mesh": few, "offload": HOST}):
        like = jzero.abstract(create, **{"stage": 2, "min_shard_bytes": 0, **fields})
        got = jzero.checkpoint.restore(path, like)
        if "mesh" not in fields:
            assert max_error(steps(got, 2).params, want) == 0
    inside = jzero.checkpoint.restore(path, jzero.abstract(create, stage=3, min_shard_bytes=0, offload="host"))
    back = jzero.checkpoint.save(tmp_path / "inside", inside)
    again = jzero.checkpoint.restore(back, jzero.abstract(create, stage=2, min_shard_bytes=0, offload=HOST))
    assert max_error(steps(again, 2).params, want) == 0


def test_handles_say_what_is_where():
    state = jzero.shard(create_state(), stage=2, offload=HOST)
    assert "f32[24, 40] on the host" in repr(state.opt_state)
    assert "generation 0" in repr(state.opt_state.master)
    assert "params and their moments" in repr(state.opt_state)
    shapes = jzero.abstract(create_state, stage=2, offload=HOST)
    assert jax.tree.structure(shapes.opt_state.inner) == jax.tree.structure(state.opt_state.inner)
    with pytest.raises(TypeError, match="no handles to arrays"):
        shapes.tx.update(shapes.params, shapes.opt_state, shapes.params)


def test_a_dropped_state_gives_its_memory_back():
    """Also where a jitted function, whose cache knows its structure, lives on."""
    state = jzero.shard(create_state(), stage=2, offload=HOST)
    plan = jzero.plan_of(state)
    grads_fn = gradients_of(plan)
    grads_fn(state, plan.place_batch(batch()))
    store = weakref.ref(state.opt_state.master.store)
    leaves, tree = jax.tree.flatten(state)
    del state
    gc.collect()
    assert store() is None
    lost = tree.unflatten(leaves)
    with pytest.raises(RuntimeError, match="are gone"):
        lost.apply_gradients(grads=lost.params)


@pytest.mark.nightly
def test_a_program_compiled_for_an_abstract_state_runs_on_every_one():
    """It may return the state, also beside the state of another run."""
    fields = {"stage": 2, "min_shard_bytes": 0, "offload": HOST}
    like = jzero.abstract(create_state, **fields)
    plan = jzero.plan_of(like)
    data = plan.place_batch(batch())
    both = jax.jit(lambda s, b: (s, jax.grad(lambda p: loss_of(s.apply_fn, p, b))(s.params)))
    program = both.lower(like, data).compile()
    state = jzero.shard(create_state, **fields)
    state, grads = program(state, data)
    state = state.apply_gradients(grads=grads)
    want = steps(jzero.shard(create_state, **fields), 1)
    assert max_error(state.params, want.params) < 1e-6
    two = steps(want, 1)
    with pytest.raises(ValueError, match=r"is of generation 1, and its masters .* generation 2"):
        program(want, data)[0].apply_gradients(grads=grads)
    for _ in range(2):
        one, grads = program(state, data)
        two, more = program(two, data)  # interleaved
        state, two = one.apply_gradients(grads=grads), two.apply_gradients(grads=more)
    assert [x.opt_state.master.generation for x in (state, two)] == [3, 4]
    alone = jzero.shard(create_state, **fields)
    for _ in range(3):
        alone = alone.apply_gradients(grads=program(alone, data)[1])
    assert max_error(state.params, alone.params) == 0


@pytest.mark.nightly
def test_states_of_one_form_share_their_programs():
    """What a program returns has the store of what it was given, be it traced for another state; donated or not."""
    fields, found = {"stage": 2, "min_shard_bytes": 0, "offload": HOST}, []
    for donated in ((), (0,)):
        traces = []

        def both(s, b, traces=traces):
            traces.append(1)
            return s, jax.grad(lambda p: loss_of(s.apply_fn, p, b))(s.params)

        program, found = jax.jit(both, donate_argnums=donated), []
        for count in (1, 3):
            state = jzero.shard(create_state, **fields)
            data = jzero.plan_of(state).place_batch(batch())
            for _ in range(count):
                state, grads = program(state, data)
                state = state.apply_gradients(grads=grads)
            found.append(state)
        assert [x.opt_state.master.generation for x in found] == [1, 3]
        assert found[0].opt_state.master.store is not found[1].opt_state.master.store
        assert len(traces) == 1
    dropped = weakref.ref(found[0].opt_state.master.store)
    state, _ = program(found.pop(), data)  # keeps both until its stamp is read
    found.clear()
    state.opt_state.master.store.check(state.opt_state.master)
    gc.collect()
    assert dropped() is None


def test_a_broken_update_is_never_gone_on_with(monkeypatch):
    state = steps(jzero.shard(create_state(), stage=2, offload=HOST), 1)
    store = state.opt_state.master.store.store

    def fail(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(store, "write", fail)
        with pytest.raises(KeyboardInterrupt):
            steps(state, 1)
    for use in (lambda: steps(state, 1), lambda: jzero.shard(state, stage=2)):
        with pytest.raises(RuntimeError, match=r"broken off.*Restore a checkpoint"):
            use()


def test_no_fresh_memory_where_something_is_replaced():
    """New state takes the buffers of the old, and new params those of gradients, in what XLA compiled."""
    state = steps(jzero.shard(create_state(dtype=jnp.bfloat16), stage=2, min_shard_bytes=0, offload=HOST), 1)
    (units,) = state.opt_state.master.store.store._units.values()
    programs = list(units.updates())
    assert programs
    for compiled in programs:
        stats = compiled.memory_analysis()
        assert stats.alias_size_in_bytes >= 0.99 * stats.output_size_in_bytes - 4096


@pytest.mark.unit
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stage": 1, "offload": HOST}, "needs stage 2 or 3"),
        ({"stage": 2, "offload": HOST, "updates": "delta"}, 'updates="delta" exclude'),
        ({"stage": 2, "offload": HOST, "master_dtype": None}, "keeps a master"),
    ],
)
def test_configs_that_do_not_go_together(fields, text):
    with pytest.raises(ValueError, match=text):
        jzero.ZeroConfig(**fields)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tier": "disk"}, "needs path="),
        ({"path": "x"}, 'belong to tier="disk"'),
        ({"delay": 1}, "inside of the program nothing is late"),
        ({"update": "host", "in_flight_bytes": 8}, "inside of the program"),
        ({"update": "host", "delay": 2}, "delay"),
        ({"update": "cpu"}, "update"),
    ],
)
def test_options_that_do_not_go_together(options, text):
    with pytest.raises(ValueError, match=text):
        jzero.Offload(**options)


@pytest.mark.parametrize(("offload", "copies"), [(HOST, 1), (LATE, 2)], ids=["now", "late"])
def test_masters_count_where_the_optimizer_keeps_nothing(monkeypatch, offload, copies):
    """Plain SGD of fp32 params: no warning that there is nothing to hold, and what does not fit is refused."""
    create = functools.partial(create_state, optax.sgd(0.1))
    for given in (create, create()):
        plan = jzero.plan_of(jzero.shard(given, stage=2, min_shard_bytes=0, offload=offload))
        masters = 4 * sum(math.prod(x.state_shape) for x in plan.layouts if x.size > 1)
        shards = (8 if shard_factor(x.state, plan.mesh) == 1 else 1 for x in plan.layouts)
        grads = sum(x.nbytes * n for x, n in zip(plan.layouts, shards, strict=True))
        needed = copies * masters + grads
        with monkeypatch.context() as patched:
            patched.setattr(offloading, "available_memory", lambda: needed - 1)  # noqa: B023
            with pytest.raises(MemoryError, match="of host memory"):
                jzero.shard(given, stage=2, min_shard_bytes=0, offload=offload)
            patched.setattr(offloading, "available_memory", lambda: needed)  # noqa: B023
            jzero.shard(given, stage=2, min_shard_bytes=0, offload=offload)


def test_inside_of_jit_it_says_which_lines_move():
    state = jzero.shard(create_state(), stage=2, offload=HOST)
    b = jzero.plan_of(state).place_batch(batch())
    with pytest.raises(TypeError, match=r"Two lines move:\n +grads = .*\n +state = state\.apply_gradients"):
        jax.jit(train_step)(state, b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(state, 1)
