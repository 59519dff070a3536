"""`Offload(tier="disk")`: the numbers of `update="host"`, in files of which a whole step is always there."""

from __future__ import annotations

import errno
import functools
import gc
import os
import shutil

import host_updates as host
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_chains as streamed
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from models import batch, create_state, max_error

import jzero
from jzero.flax import creation
from jzero.update.on_host import file_layout
from jzero.update.on_host.disk import transfers
from jzero.update.on_host.disk.step import DiskStep
from jzero.update.on_host.disk_tier import DiskTier
from jzero.update.on_host.units import Units

SMALL = 64 * 1024  # bytes: leaves are cut into chunks


def disk(path, buffer_bytes=None, **options):
    return jzero.Offload(tier="disk", path=path, buffer_bytes=buffer_bytes, **options)


def tier_of(state):
    return state.opt_state.master.store.store


def dropped(state):
    """Ends a run as a process would that goes on living: nothing is said to the store."""
    tier = tier_of(state)
    del state
    tier.close()
    gc.collect()


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_bitwise_the_numbers_of_the_host(tmp_path, dtype):
    """In one unit, of the same gradients; nothing stays in memory between steps.

    Born unit by unit, initial values are those of other programs: the last bit may differ.
    """
    create = functools.partial(create_state, dtype=dtype)
    for name, state, most in (("born", create, 2e-7), ("existing", create(), 0)):
        want = jzero.shard(state, stage=2, min_shard_bytes=0, offload=host.HOST)
        got = jzero.shard(state, stage=2, min_shard_bytes=0, offload=disk(tmp_path / name))
        plan = jzero.plan_of(want)
        for i in range(3):
            _, grads = host.gradients_of(plan)(want, plan.place_batch(batch(i)))
            want, got = want.apply_gradients(grads=grads), got.apply_gradients(grads=grads)
        assert max_error(got.params, want.params) <= most
        assert all(x is None or x.size == 1 for x in tier_of(got).arrays)
        inside, plain = (jzero.shard(s, stage=2, min_shard_bytes=0) for s in (got, want))
        assert max_error(inside.opt_state, plain.opt_state) <= most


def test_masters_are_born_a_few_at_a_time(tmp_path, monkeypatch):
    """No more of them at once than the buffer could hold, each once, in the order of the files."""
    asked, fresh = [], creation.fresh_held
    monkeypatch.setattr(
        creation, "fresh_held", lambda make, tx, **at: fresh(lambda i: asked.append(list(i)) or make(i), tx, **at)
    )

    def create():
        keys = jax.random.split(jax.random.key(0), 8)
        params = {f"w{i}": jax.random.normal(k, (64, 40)).astype(jnp.bfloat16) for i, k in enumerate(keys)}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))

    got = jzero.shard(create, stage=2, min_shard_bytes=0, offload=disk(tmp_path / "s", 2**15))
    assert asked == [[5, 6, 7], [2, 3, 4], [0, 1]]
    assert max_error(got.params, create().params) == 0
    masters = tier_of(got).leaves()[-8:]
    assert all(jnp.any(m != p) for m, p in zip(masters, jax.tree.leaves(got.params), strict=True))  # wider


@pytest.mark.default_cases("8-columns")
@pytest.mark.filterwarnings("ignore:(?s)jzero.*several params together, too much for one device:UserWarning")  # L-BFGS
@pytest.mark.filterwarnings("ignore:(?s)jzero. Offload.*cannot be added up part by part:UserWarning")
@pytest.mark.parametrize("name", host.CHAINS)
@pytest.mark.parametrize("devices", [8, 5])
def test_any_chain_through_a_small_buffer(tmp_path, name, devices):
    """Leaves in chunks, norms of state that is read twice, single numbers beside the files."""
    params = {**streamed.params_of(), "scalar": jnp.float32(0.5), "large": jnp.ones((640, 128))}
    rng = np.random.default_rng(1)
    grads = [jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype), params) for _ in range(3)]
    want, *_ = host.run_chain(name, params, devices, grads, offload=host.HOST)
    mixes = name in ("muon", "adafactor", "sm3", "lbfgs")  # whole matrices, or all leaves in one loop
    buffer_bytes = 2**24 if mixes else SMALL * 4 * devices
    got, state, _ = host.run_chain(name, params, devices, grads, offload=disk(tmp_path / "s", buffer_bytes))
    assert max_error(got, want) < 1e-6
    store = state.master.store.store.disk
    assert mixes or len(store.units) >= 4
    assert max(u.nbytes for u in store.units) <= buffer_bytes / 4


def test_a_leaf_on_every_device_is_updated_alike_on_all(tmp_path, monkeypatch):
    """A frame is not filled anew before the last of the devices that read it is done, however slow the update."""
    def slow(g):
        return g + 0 * jax.lax.fori_loop(0, 20, lambda _, m: 1e-3 * m @ m.T + g, g)

    computed, ready, run, write = [], [], DiskTier._run, DiskStep.write

    def recorded(*args):
        computed.extend((news := run(*args)).values())
        return news

    def checked(self, index, arrays):
        ready.append(all(x.is_ready() for x in computed))
        write(self, index, arrays)

    monkeypatch.setattr(DiskTier, "_run", recorded)
    tx = optax.chain(optax.stateless(lambda updates, _: jax.tree.map(slow, updates)), optax.adam(1e-2))
    params = {f"w{i}": jnp.ones((128, 128)) for i in range(4)}
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    got = jzero.shard(state, stage=2, min_shard_bytes=2**20, offload=disk(tmp_path / "s"))
    monkeypatch.setattr(DiskStep, "write", checked)
    grads = jax.tree.map(lambda p: jnp.cos(jnp.arange(float(p.size))).reshape(p.shape), params)
    grads = jax.device_put(grads, jzero.plan_of(got).sharding(jax.P()))
    for _ in range(4):
        got = got.apply_gradients(grads=grads)
    for x in jax.tree.leaves(got.params):
        first, *others = (np.asarray(s.data) for s in x.addressable_shards)
        assert len(others) == 7
        assert all(np.array_equal(first, other) for other in others)
    assert ready
    assert all(ready)


def test_numbers_that_need_whole_arrays_are_named(tmp_path, monkeypatch):
    """With their bytes, before the folder is made; and refused where the memory of the host does not hold them."""
    params = {"large": jnp.ones((256, 256)), "small": jnp.ones(64)}
    plan = jzero.make_plan(params, stage=2, min_shard_bytes=0, offload=disk(tmp_path / "s", 2**17))
    tx = jzero.zero(host.numbers(), plan)
    text = r"(?s)numbers of the update .*up to 524.29 kB .*\n +\['large'\], \['large'\] +524.29 kB +dot_general"
    with monkeypatch.context() as patched:
        patched.setattr(file_layout, "available_memory", lambda: 500_000)
        with pytest.raises(MemoryError, match=text):
            tx.init(params)
    assert not (tmp_path / "s").exists()
    with pytest.warns(UserWarning, match=text):
        tx.init(params)


def test_what_cannot_run_from_files_is_refused_before_there_are_any(tmp_path, monkeypatch):
    create = functools.partial(create_state, optax.polyak_sgd(1e-2))
    with pytest.raises(TypeError, match=r"argument: 'value'. Files are laid out.*Pass Offload\(update=\"host\"\)"):
        jzero.shard(create, stage=2, offload=disk(tmp_path / "s"))
    state = jzero.shard(create, stage=2, offload=host.HOST)
    assert int(state.opt_state.master.generation) == 0

    def broken(self, group, *_):
        raise KeyError(group)

    monkeypatch.setattr(Units, "_results", broken)
    with pytest.raises(KeyError):
        jzero.shard(create_state, stage=2, offload=disk(tmp_path / "s"))
    assert not (tmp_path / "s").exists()


@pytest.mark.nightly
def test_sums_of_micro_batches_fit_the_same_files(tmp_path):
    """Gradients in fp32 of params in bf16: units are cut alike, in one file and in chunks."""
    params = {"a": jnp.ones((512, 256), jnp.bfloat16), "b": jnp.ones((64, 64), jnp.bfloat16)}
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), jnp.float32), params)
    tx = optax.adam(1e-2)
    plan = jzero.make_plan(params, stage=2, min_shard_bytes=0, offload=host.HOST)
    wrapped = jzero.zero(tx, plan)
    want, _ = wrapped.update(grads, wrapped.init(plan.place(params)), params)
    for buffer_bytes in (2**21, 2**24):
        offload = disk(tmp_path / str(buffer_bytes), buffer_bytes)
        plan = jzero.make_plan(params, stage=2, min_shard_bytes=0, offload=offload)
        wrapped = jzero.zero(tx, plan)
        got, _ = wrapped.update(grads, wrapped.init(plan.place(params)), params)
        assert max_error(optax.apply_updates(params, got), optax.apply_updates(params, want)) == 0


def test_a_run_goes_on_from_its_folder(tmp_path):
    """After its process is gone; in the step where an error was, the step before is there."""
    fields = {"stage": 3, "min_shard_bytes": 0, "offload": disk(tmp_path / "s", 2**20)}
    create = functools.partial(create_state, dtype=jnp.bfloat16)
    state = host.steps(jzero.shard(create, **fields), 2)
    tier = tier_of(state)
    tier._written = lambda: (_ for _ in ()).throw(OSError("the disk is gone"))
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            host.steps(state, 1)
    dropped(state)
    like = jzero.abstract(create, **fields)
    again = jzero.checkpoint.restore(tmp_path / "s", like)
    assert int(again.step) == int(again.opt_state.master.generation) == 2
    plan = jzero.plan_of(again)
    for i in (2, 3):
        _, grads = host.gradients_of(plan)(again, plan.place_batch(batch(i)))
        again = again.apply_gradients(grads=grads)
    reference = host.steps(jzero.shard(create, **(fields | {"offload": host.HOST})), 2)
    for i in (2, 3):
        _, grads = host.gradients_of(plan)(reference, plan.place_batch(batch(i)))
        reference = reference.apply_gradients(grads=grads)
    assert max_error(again.params, reference.params) < 1e-2


@pytest.mark.nightly
@pytest.mark.parametrize("began", ["born", "placed", "restored"])
def test_a_run_that_began_later_resumes_at_its_step(tmp_path, began):
    """Its folder, and a snapshot of it."""

    def create():
        return create_state().replace(step=3)

    fields = {"stage": 2, "min_shard_bytes": 0}
    offload = disk(tmp_path / "s")
    if began == "restored":
        before = host.steps(jzero.shard(create_state, **fields, offload=host.HOST), 3)
        path = jzero.checkpoint.save(tmp_path / "saved", before)
        state = jzero.checkpoint.restore(path, jzero.abstract(create_state, **fields, offload=offload))
    else:
        state = jzero.shard(create if began == "born" else create(), **fields, offload=offload)
    state = host.steps(state, 2)
    path = jzero.checkpoint.snapshot(tmp_path / "snap", state)
    with pytest.warns(UserWarning, match=r"at step 8, and the files at step 5.*state\.replace\(step=8\)"):
        jzero.checkpoint.snapshot(tmp_path / "set", state.replace(step=state.step + 3))
    dropped(state)
    for options in ({"only": "params"}, {"cast": True}):
        with pytest.raises(ValueError, match=r"is for checkpoints of jzero\.checkpoint\.save"):
            jzero.checkpoint.restore(path, jzero.abstract(create_state, **fields), **options)
    for folder, where in ((tmp_path / "s", offload), (path, disk(tmp_path / "t"))):
        again = jzero.checkpoint.restore(folder, jzero.abstract(create_state, **fields, offload=where))
        assert int(again.step) == 5
        assert int(again.opt_state.master.generation) == 2


def advancing_keys(count):
    """A transformation whose state is an array of keys, each the next one of itself after an update."""
    def update(updates, keys, params=None):
        return updates, jax.vmap(lambda k: jax.random.split(k, 1)[0])(keys)

    return optax.GradientTransformation(lambda _: jax.random.split(jax.random.key(0), count), update)


def test_an_nnx_run_resumes_at_its_step_with_its_random_keys(tmp_path):
    """Also with more keys than a leaf that stays with the user has values: keys always stay there."""
    tx = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), advancing_keys(32), optax.adam(1e-2))

    def create():
        model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        optimizer.step.set_value(optimizer.step.get_value() + 3)
        return model, optimizer

    fields = {"stage": 2, "min_shard_bytes": 0, "offload": disk(tmp_path / "s")}
    model, optimizer = jzero.shard(create, **fields)
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    optimizer.opt_state.master.store.store.close()
    _, again = jzero.checkpoint.restore(tmp_path / "s", jzero.abstract(create, **fields))
    assert int(again.step.get_value()) == int(optimizer.step.get_value()) == 4
    keys = [x.opt_state.inner[0].rng_key.get_value() for x in (again, optimizer)]
    assert keys[0] == keys[1] != jax.random.key(0)
    many = [x.opt_state.inner[1].get_value() for x in (again, optimizer)]
    assert (many[0] == many[1]).all()
    assert (many[0] != jax.random.split(jax.random.key(0), 32)).all()


@pytest.mark.nightly
def test_a_number_in_16_bits_and_a_frozen_param_beside_the_files(tmp_path):
    """The record holds the one; the other has a gradient, which an optimizer that looks at its tree must see."""

    def labels(params):
        return jax.tree.map(lambda p: "frozen" if p.ndim == 1 else "trained", params)

    def create():
        params = {"w": jnp.ones((32, 16)), "scale": jnp.float32(2), "frozen": jnp.ones(16)}
        return TrainState.create(apply_fn=None, params=params, tx=tx)

    trained = optax.sgd(0.25, 0.5, accumulator_dtype=jnp.bfloat16)  # exact in 16 bits
    tx = optax.partition({"trained": trained, "frozen": optax.set_to_zero()}, labels)
    fields, grads = {"stage": 2, "min_shard_bytes": 0}, jax.tree.map(jnp.ones_like, create().params)
    state = jzero.shard(create, **fields, offload=disk(tmp_path / "s"))
    want = create()
    for _ in range(2):
        state, want = state.apply_gradients(grads=grads), want.apply_gradients(grads=grads)
    dropped(state)
    like = jzero.abstract(create, **fields, offload=disk(tmp_path / "s"))
    frozen = like.params | {"frozen": jnp.ones(16)}
    again = jzero.checkpoint.restore(tmp_path / "s", like.replace(params=frozen))
    again, want = again.apply_gradients(grads=grads), want.apply_gradients(grads=grads)
    assert max_error(again.params, want.params) < 1e-6


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_that_was_freed_is_gone_on_with(tmp_path, monkeypatch):
    """The step that failed is tried again by the same state, single numbers and replaced params included."""
    params = {"w": jnp.ones((64, 40)), "scale": jnp.float32(2)}
    grads = jax.tree.map(jnp.ones_like, params)
    tx, found = optax.adam(1e-2), {}
    for name, offload in (("files", disk(tmp_path / "s", SMALL)), ("memory", host.HOST)):
        state = TrainState.create(apply_fn=None, params=params, tx=tx)
        state = jzero.shard(state, stage=2, min_shard_bytes=0, offload=offload).apply_gradients(grads=grads)
        state = state.replace(params=jax.tree.map(lambda p: p + 1, state.params))
        if name == "files":
            for _ in range(2):
                with monkeypatch.context() as patched:
                    patched.setattr(transfers.os, "pwritev", full_disk)
                    with pytest.raises(OSError, match="No space left"):
                        state.apply_gradients(grads=grads)
            assert tier_of(state).disk.generation == 2
        found[name] = state.apply_gradients(grads=grads).apply_gradients(grads=grads)
    assert max_error(found["files"].params, found["memory"].params) == 0
    whole, want = (jzero.shard(s, stage=2, min_shard_bytes=0) for s in (found["files"], found["memory"]))
    assert max_error(whole.opt_state, want.opt_state) == 0


@pytest.mark.nightly
def test_a_late_update_that_a_full_disk_lost_is_named(tmp_path, monkeypatch):
    """Its gradients are gone; the remedy works."""
    fields = {"stage": 2, "min_shard_bytes": 0, "offload": disk(tmp_path / "s", delay=1)}
    state = host.steps(jzero.shard(create_state, **fields), 2)
    state.opt_state.master.store.settled(state.params, jax.tree.leaves(state.opt_state.inner))
    with monkeypatch.context() as patched:
        patched.setattr(transfers.os, "pwritev", full_disk)
        state = host.steps(state, 1)
        with pytest.raises(OSError, match="No space left"):
            host.steps(state, 1)
    with pytest.raises(RuntimeError, match=r"update of generation 2 failed .*gradients are gone.*\(del state\)"):
        host.steps(state, 1)
    del state
    gc.collect()
    again = jzero.checkpoint.restore(tmp_path / "s", jzero.abstract(create_state, **fields))
    assert int(again.step) == 2
    assert int(host.steps(again, 1).opt_state.master.generation) == 3


@pytest.mark.nightly
def test_replaced_params_are_taken_over_from_the_files(tmp_path):
    state = host.steps(jzero.shard(create_state(), stage=2, offload=disk(tmp_path / "s")), 1)
    plan = jzero.plan_of(state)
    zero = jax.tree.map(jnp.zeros_like, host.gradients_of(plan)(state, plan.place_batch(batch()))[1])
    state = state.replace(params=jax.tree.map(jnp.zeros_like, state.params)).apply_gradients(grads=zero)
    assert max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(state.params)) < 0.1


@pytest.mark.nightly
def test_one_step_late_through_files(tmp_path):
    late = jzero.shard(create_state(), stage=2, offload=disk(tmp_path / "s", delay=1))
    want = jzero.shard(create_state(), stage=2, offload=host.LATE)
    assert max_error(host.steps(late, 3).params, host.steps(want, 3).params) == 0


@pytest.mark.nightly
def test_checkpoints_to_and_from_files(tmp_path):
    create = functools.partial(create_state, dtype=jnp.bfloat16)
    fields = {"stage": 2, "min_shard_bytes": 0}
    state = host.steps(jzero.shard(create, **fields, offload=disk(tmp_path / "a")), 2)
    path = jzero.checkpoint.save(tmp_path / "saved", state)
    assert int(state.opt_state.master.generation) == 2
    few = Mesh(np.array(jax.devices()[:4]), ("data",))
    other = jzero.abstract(create, stage=3, mesh=few, min_shard_bytes=0, offload=disk(tmp_path / "b"))
    moved = jzero.checkpoint.restore(path, other)
    back = jzero.checkpoint.restore(path, jzero.abstract(create, **fields))
    a, b = (jzero.unshard(s.params) for s in (moved, back))
    assert max_error(a, b) == 0
    whole = jzero.shard(moved, **fields)
    assert max_error(jax.device_get(whole.opt_state), jax.device_get(back.opt_state)) == 0


class WithAverage(TrainState):
    ema: jax.Array | None = None


@pytest.mark.nightly
def test_a_snapshot_is_gone_on_from_in_another_folder(tmp_path, monkeypatch):
    """The run that it is of goes on beside it, and changes nothing of it."""
    fields = {"stage": 2, "min_shard_bytes": 0}
    create = functools.partial(create_state, dtype=jnp.bfloat16)
    state = host.steps(jzero.shard(create, **fields, offload=disk(tmp_path / "a", delay=1)), 2)
    with monkeypatch.context() as patched:
        patched.setattr(DiskTier, "leaves", None)  # the state may be larger than memory: it is not read
        path = jzero.checkpoint.snapshot(tmp_path / "snap", state)
    later = host.steps(state, 2)
    found = []
    for name in "bc":
        again = jzero.checkpoint.restore(path, jzero.abstract(create, **fields, offload=disk(tmp_path / name)))
        assert int(again.step) == 2
        found.append(host.steps(again, 2).params)
    assert max_error(*found) == 0
    with pytest.warns(UserWarning, match=r"and not these fields:\n.*ema"):
        jzero.checkpoint.snapshot(tmp_path / "ema", WithAverage(**vars(later), ema=jnp.ones(8)))
    with pytest.raises(ValueError, match="not replaced"):
        jzero.checkpoint.snapshot(path, later)
    with pytest.raises(ValueError, match="of generation 2, and"):
        jzero.checkpoint.snapshot(tmp_path / "old", state)
    with pytest.raises(TypeError, match="has no files"):
        jzero.checkpoint.snapshot(tmp_path / "none", jzero.shard(create, **fields))
    assert not (tmp_path / "none").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("delay", [0, 1])
def test_a_snapshot_is_refused_while_the_files_lack_what_was_replaced(tmp_path, delay):
    """A param, and a hyper-parameter; what only came back from a jitted function is no other."""
    tx = optax.chain(optax.add_noise(0.1, 0.5, 3), optax.inject_hyperparams(optax.adam)(learning_rate=1e-2))
    create = functools.partial(create_state, tx=tx, dtype=jnp.bfloat16)
    fields = {"stage": 2, "min_shard_bytes": 0, "offload": disk(tmp_path / "s", delay=delay, buffer_bytes=2**15)}
    state = jzero.shard(create, **fields)
    for i in range(3):
        jzero.checkpoint.snapshot(tmp_path / f"same{i}", state.replace(params=jax.tree.map(jnp.copy, state.params)))
        state = host.steps(state, 1)
    bias = state.params["Dense_0"]["bias"]
    other = jax.tree.map(lambda p: p.at[-1].add(1) if p is bias else p, state.params)
    with pytest.raises(ValueError, match=r"snapshot: 1 array was replaced since the last update.*\n.*Dense_0.*bias"):
        jzero.checkpoint.snapshot(tmp_path / "replaced", state.replace(params=other))
    assert not (tmp_path / "replaced").exists()
    set_rate = jax.tree.map(lambda x: x, state.opt_state)
    set_rate.inner[1].hyperparams["learning_rate"] = state.opt_state.inner[1].hyperparams["learning_rate"] / 2
    with pytest.raises(ValueError, match="learning_rate"):
        jzero.checkpoint.snapshot(tmp_path / "rate", state.replace(opt_state=set_rate))
    after = host.steps(state.replace(params=other, opt_state=set_rate), 1)
    jzero.checkpoint.snapshot(tmp_path / "after", after)


def test_a_folder_in_use_or_of_another_run_is_refused(tmp_path):
    create, fields = functools.partial(create_state, tx=optax.adam(1e-2)), {"stage": 2, "min_shard_bytes": 0}
    offload = disk(tmp_path / "s")
    state = jzero.shard(create, **fields, offload=offload)
    with pytest.raises((ValueError, RuntimeError), match="process-00000-of-00001"):
        jzero.shard(create, **fields, offload=offload)
    like = jzero.abstract(create, **fields, offload=offload)
    with pytest.raises(RuntimeError, match="open"):
        jzero.checkpoint.restore(tmp_path / "s", like)
    dropped(state)
    with pytest.raises(ValueError, match="generation"):
        jzero.shard(create, **fields, offload=offload)
    with pytest.raises(ValueError, match="goes on with"):
        jzero.checkpoint.restore(tmp_path / "s", jzero.abstract(create, **fields))
    few = Mesh(np.array(jax.devices()[:4]), ("data",))
    with pytest.raises(ValueError, match="4"):
        jzero.checkpoint.restore(tmp_path / "s", jzero.abstract(create, **fields, mesh=few, offload=offload))
    kept = jzero.checkpoint.restore(tmp_path / "s", like)
    assert int(kept.step) == 0


@pytest.mark.default_cases("by a kill")
@pytest.mark.parametrize("ended", ["by an error", "by a kill"])
def test_a_run_that_ended_before_its_state_was_born(tmp_path, monkeypatch, ended):
    create, fields = create_state, {"stage": 2, "min_shard_bytes": 0, "offload": disk(tmp_path / "s")}
    folder = tmp_path / "s" / "process-00000-of-00001"

    def commit(self, *_):
        if ended == "by a kill":
            shutil.copytree(folder, tmp_path / "left")
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(DiskStep, "commit", commit)
        with pytest.raises(OSError, match="the disk is full"):
            jzero.shard(create, **fields)
    assert not folder.exists()
    if ended == "by a kill":
        shutil.copytree(tmp_path / "left", folder)
        with pytest.raises(FileNotFoundError, match="Nothing can be restored: remove the folder"):
            jzero.checkpoint.restore(tmp_path / "s", jzero.abstract(create, **fields))
        shutil.rmtree(folder)
    assert int(jzero.shard(create, **fields).opt_state.master.generation) == 0


def test_a_buffer_that_is_too_small_says_so_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="buffer_bytes"):
        jzero.shard(
            create_state(optax.adafactor(1e-2, min_dim_size_to_factor=16)), stage=2, min_shard_bytes=0,
            offload=disk(tmp_path / "s", 4096),
        )  # fmt: skip
    assert not (tmp_path / "s").exists()
