"""One process of several that train with every feature: `python process_worker.py RANK COUNT PORT PART`.

`CASES[name](hosts)` is a few steps with one feature, each process with its own rows of the batch; `hosts` is the
size of the mesh axis that runs across the processes. The one pytest process of eight devices runs the same functions.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import shutil
import sys
import tempfile
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("NPROC", "32")

import flax.linen as nn
import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from restore_memory import resident

import jzero
from jzero.layout.placement import check_rows, check_same
from jzero.proof.network import what_crosses
from jzero.update.on_host.disk import record

STEPS, ROWS, LARGE = 4, 64, (2048, 16384)
BOTH = ("replica", "data")


class Odd(nn.Module):
    """What 8 does not divide: padded leaves, a kernel that is cut along two dims, a bias of 5."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3))(x.reshape(-1, 2, 2, 6))
        return nn.Dense(models.DIM_OUT)(jnp.tanh(nn.Dense(33)(x.reshape(len(x), -1))))


class Blocks(nn.Module):
    """A block that `jzero.remat` may wrap, between two layers; `[B, 24] -> [B, 6]` by way of `[B, 4, 8]`."""

    block: Any

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32)(x).reshape(-1, 4, 8)
        x = self.block()(x)
        return nn.Dense(models.DIM_OUT)(x.reshape(-1, 32))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8)(nn.gelu(nn.Dense(24)(x)))


class Pair(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(models.DIM_IN, 40, rngs=rngs)
        self.down = nnx.Linear(40, models.DIM_OUT, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Scaled(TrainState):
    scale: Any


def mesh_of(hosts: int, inner: str = "data", outer: str | None = None):
    """All devices on one axis; with `outer` that axis runs across the processes and `inner` within each."""
    devices = np.array(jax.devices())
    if outer is None:
        return jax.sharding.Mesh(devices, (inner,))
    mesh = jax.sharding.Mesh(devices.reshape(hosts, -1), (outer, inner))
    if jax.process_count() > 1:  # told from the devices alone
        assert mesh == jzero.mesh({outer: "hosts", inner: "host"}, devices=devices[::-1].tolist())
        assert what_crosses(mesh, {}).count("cross between hosts") == 1
    return mesh


def batch(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((ROWS, models.DIM_IN), dtype=np.float32)
    return {"x": x, "y": rng.standard_normal((ROWS, models.DIM_OUT), dtype=np.float32)}


def place(plan, whole: dict, split_over_processes: bool = True) -> dict:
    """The batch put together from what each process passes: its own rows, a contiguous part."""
    count, rank = (jax.process_count(), jax.process_index()) if split_over_processes else (1, 0)
    part = len(whole["x"]) // count
    placed = plan.place_batch({k: v[rank * part : (rank + 1) * part] for k, v in whole.items()})
    models.assert_batch_is_split(placed, plan.batch_parts)
    assert {k: v.shape for k, v in placed.items()} == {k: v.shape for k, v in whole.items()}
    for k, x in placed.items():  # each row where the layout says
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), whole[k][shard.index])
    return placed


def create(model, tx=None, dtype=jnp.float32, cls=TrainState, **more):
    """A state of a model; its params are sines, which compile faster than random numbers."""
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.ones((1, models.DIM_IN), dtype)))
    params = jax.tree.map(
        lambda x: jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) / 4, shapes["params"]
    )
    return cls.create(apply_fn=model.apply, params=params, tx=models.adamw() if tx is None else tx, **more)


def small():
    """Two dense layers, AdamW after a clip by the global norm."""
    return create(models.Small())


def random():
    """The same from a random key."""
    return models.create_small(models.adamw())


def odd_state():
    """Leaves that 8 does not divide."""
    return create(Odd())


def result(plan, losses, params, opt_state, **more) -> dict:
    """Losses, what this process holds in bytes, and every whole param as a norm and a projection."""
    arrays = jax.tree.leaves((params, opt_state))
    devices = {s.device.process_index for x in arrays for s in x.addressable_shards}
    assert devices == {jax.process_index()}
    rng = np.random.default_rng(7)
    whole = [np.asarray(x.addressable_data(0), np.float64) for x in jax.tree.leaves(jzero.unshard(params))]
    values = [[float(np.linalg.norm(x)), float(np.sum(x * rng.standard_normal(x.shape)))] for x in whole]
    held = sum(s.data.nbytes for x in arrays for s in x.addressable_shards)
    specs = [str(x.sharding.spec) for x in arrays]
    kinds = sorted({x.sharding.memory_kind for x in arrays})
    return {"losses": losses, "held": held, "params": values, "specs": specs, "kinds": kinds, **more}


def loop(state, step, *, split_over_processes=True, batches=batch):
    """The state after a few steps, each on a batch of which every process brings its rows, and the losses."""
    plan, losses = jzero.plan_of(state), []
    step = jax.jit(step, donate_argnums=0)
    for i in range(STEPS):
        state, loss = step(state, place(plan, batches(i), split_over_processes))
        losses.append(float(loss))
    return state, losses


def plain(state, step=models.train_step, **options) -> dict:
    """The usual step on a sharded TrainState."""
    plan = jzero.plan_of(state)
    state, losses = loop(state, step, **options)
    assert models.specs(state.params) == [plan.sharding(x.stored).spec for x in plan.layouts]
    assert models.specs(state.opt_state) == [s.spec for s in plan.state_shardings(state.opt_state)]
    return result(plan, losses, state.params, state.opt_state)


def stage(number, *, make=small, existing=False, **fields):
    """A stage, born sharded or from a state that lies whole on each process."""

    def run(hosts):
        state = make() if existing else make
        return plain(jzero.shard(state, stage=number, mesh=mesh_of(hosts), min_shard_bytes=0, **fields))

    return run


def hybrid(**fields):
    """Replicas across the processes, sharing within each."""

    def run(hosts):
        mesh = mesh_of(hosts, "data", "replica")
        return plain(jzero.shard(small, mesh=mesh, min_shard_bytes=0, **fields))

    return run


def folder_of(name: str) -> pathlib.Path:
    """A new folder, the same one in all processes."""
    if jax.process_count() == 1:
        return pathlib.Path(tempfile.mkdtemp()) / name
    return pathlib.Path(tempfile.gettempdir()) / f"jzero-process-worker-{sys.argv[3]}-{name}"


@functools.cache
def gradients_of(plan):
    """What leaves the compiled program where the update runs outside."""

    def gradients(state, batch):
        return jax.value_and_grad(lambda p: models.loss_of(state.apply_fn, p, batch))(state.params)

    return jax.jit(gradients)


def outside(number, *, update="host", make=small, **fields):
    """The update on the host, or in files: after two steps the run ends, and one process has not committed the last."""

    def run(hosts):
        more = {"tier": "disk", "path": folder_of(f"{update}-{number}")} if update == "disk" else {"update": update}
        fields_of = fields | {"mesh": mesh_of(hosts), "stage": number, "min_shard_bytes": 0}
        fields_of["offload"] = jzero.Offload(**more)
        state, losses, at = jzero.shard(make, **fields_of), [], 0
        plan, said, ended = jzero.plan_of(state), "", False
        while at < STEPS:
            loss, grads = gradients_of(plan)(state, place(plan, batch(at)))
            state, at = state.apply_gradients(grads=grads), at + 1
            losses[at - 1 :] = [float(loss)]
            if at == 2 and update == "disk" and not ended:
                tier, ended = state.opt_state.master.store.store, True
                like, said = jzero.abstract(make, **fields_of), other_number(more["path"], make, fields_of)
                del state
                tier.close()
                if jax.process_index() == jax.process_count() - 1 > 0:
                    record.invalidate(tier.disk.folder, tier.disk.generation)
                state = jzero.checkpoint.restore(more["path"], like)
                at = int(state.step)
                assert at == (1 if jax.process_count() > 1 else 2)
                plan = jzero.plan_of(state)
        arrays = state.opt_state.master.store.store.leaves()
        whole = [*jax.tree.leaves(state.opt_state), *(x for x in arrays if x is not None)]
        found = result(plan, losses, state.params, whole, said=said)
        if update == "disk":
            mine = state.opt_state.master.store.store.disk.folder
            found["folder"] = mine.name
            shutil.rmtree(mine)
            with contextlib.suppress(OSError):  # the others have not ended
                mine.parent.rmdir()
        return found

    return run


def other_number(path, make, fields) -> str:
    """What is said where another number of processes wrote a folder."""
    copy = path.with_name(f"{path.name}-other-{jax.process_index()}")
    (copy / "process-00000-of-00007").mkdir(parents=True)
    like = jzero.abstract(make, **fields | {"offload": jzero.Offload(tier="disk", path=copy)})
    try:
        jzero.checkpoint.restore(copy, like)
    except ValueError as error:
        return str(error)
    finally:
        shutil.rmtree(copy)
    return ""


def laid_out_again(hosts):
    """A sharded state of odd leaves moved to another stage and mesh, live."""
    state = jzero.shard(odd_state, stage=2, mesh=mesh_of(hosts), min_shard_bytes=0)
    state, first = loop(state, models.train_step)
    mesh = mesh_of(hosts, "data", "replica")
    state = jzero.shard(state, stage=3, mesh=mesh, axis="data", batch_axis=BOTH, min_shard_bytes=0)
    found = plain(state)
    return {**found, "losses": first + found["losses"]}


def odd(number, existing=False):
    def run(hosts):
        state = jzero.shard(
            odd_state() if existing else odd_state, stage=number, mesh=mesh_of(hosts), min_shard_bytes=0
        )
        layouts = jzero.plan_of(state).layouts
        assert any(x.padded for x in layouts)
        assert any(x.several_dims for x in layouts)
        return plain(state)

    return run


def nnx_pair(number, existing):
    def run(hosts):
        def make():
            model = Pair(nnx.Rngs(0))
            return model, nnx.Optimizer(model, models.adamw(), wrt=nnx.Param)

        model, optimizer = jzero.shard(
            make() if existing else make, stage=number, mesh=mesh_of(hosts), min_shard_bytes=0
        )
        plan, losses = jzero.plan_of(optimizer), []

        def loss_fn(model, batch):
            return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

        @nnx.jit
        def step(model, optimizer, batch):
            loss, grads = nnx.value_and_grad(jzero.gather_on_use(loss_fn, plan))(model, batch)
            optimizer.update(model, grads)
            return loss

        for i in range(STEPS):
            losses.append(float(step(model, optimizer, place(plan, batch(i)))))
        params = nnx.as_pure(nnx.state(model, nnx.Param))
        assert models.specs(params) == [x.stored for x in plan.layouts]
        return result(plan, losses, params, nnx.as_pure(nnx.state(optimizer.opt_state)))

    return run


def accumulated(number, reduce, **fields):
    def run(hosts):
        state = jzero.shard(small, stage=number, mesh=mesh_of(hosts), min_shard_bytes=0, **fields)
        plan = jzero.plan_of(state)

        def step(state, batch):
            def loss_fn(params, batch):
                return models.loss_of(state.apply_fn, params, batch)

            vg = jzero.value_and_grad(loss_fn, plan, accumulate=4, reduce=reduce)
            loss, grads = vg(state.params, batch)
            return state.apply_gradients(grads=grads), loss

        return plain(state, step)

    return run


def optax_loop(number):
    """No train state: params, `plan.place` and a wrapped transformation."""

    def run(hosts):
        whole = odd_state().params
        plan = jzero.make_plan(whole, stage=number, mesh=mesh_of(hosts), min_shard_bytes=0)
        tx = jzero.zero(models.adamw(), plan)
        params = plan.place(whole)
        state, losses = jax.jit(tx.init)(params), []
        apply = jzero.gather_on_use(Odd().apply, plan)

        @jax.jit
        def step(params, state, batch):
            loss, grads = jax.value_and_grad(lambda p: models.loss_of(apply, p, batch))(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        for i in range(STEPS):
            params, state, loss = step(params, state, place(plan, batch(i)))
            losses.append(float(loss))
        return result(plan, losses, params, state)

    return run


def overflow(hosts):
    """fp16 with an example that overflows, in the second step, on the last process alone."""
    half = {"dtype": jnp.float16, "param_dtype": jnp.float16}
    model = nn.Sequential([nn.Dense(64, **half), jnp.tanh, nn.Dense(models.DIM_OUT, **half)])
    tx = optax.apply_if_finite(models.adamw(), 10**6)
    make = lambda: create(  # noqa: E731
        model, tx, jnp.float16, cls=Scaled, scale=jzero.LossScale(initial=2.0**10)
    )
    state = jzero.shard(make, stage=2, mesh=mesh_of(hosts), min_shard_bytes=0)
    plan = jzero.plan_of(state)

    def batches(i):
        whole = batch(i)
        whole["y"][-1] *= 1e9 if i == 1 else 1
        return {"x": whole["x"].astype(np.float16), "y": whole["y"]}

    def step(state, batch):
        vg = jzero.value_and_grad(lambda p, b: models.loss_of(state.apply_fn, p, b), plan, scale=state.scale)
        loss, grads = vg(state.params, batch)
        before = state.params
        state = state.apply_gradients(grads=grads)
        moved = sum(
            jnp.sum(a != b) for a, b in zip(*map(jax.tree.leaves, (before, state.params)), strict=True)
        )
        return state.replace(scale=state.scale.update(state.opt_state)), jnp.stack([loss, moved])

    moved, losses = [], []
    step = jax.jit(step)
    for i in range(STEPS):
        state, found = step(state, place(plan, batches(i)))
        losses.append(float(found[0]) if i != 1 else 0.0)
        moved.append(int(found[1]) > 0)
    scale = [float(state.scale.value), int(state.scale.skipped)]
    return result(plan, losses, state.params, state.opt_state, moved=moved, scale=scale)


def rematerialised(**options):
    """Blocks whose input is kept split over `"model"`, which runs within each process, or in host memory."""

    def run(hosts):
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
        shapes = jax.eval_shape(lambda: create(Blocks(Block)).params)
        kept = jzero.remat(Block, jzero.make_plan(shapes, stage=3, mesh=mesh), **options)
        return plain(jzero.shard(lambda: create(Blocks(kept)), stage=3, mesh=mesh, min_shard_bytes=0))

    return run


def model_across(hosts):
    """Tensor parallelism across the processes: each of them holds, and passes, every row."""
    mesh = mesh_of(hosts, "data", "model")
    shapes = jax.eval_shape(small).params
    specs = jax.tree.map(lambda x: jax.P(), shapes)
    specs["Dense_0"]["kernel"], specs["Dense_1"]["kernel"] = jax.P(None, "model"), jax.P("model")
    state = jzero.shard(small, stage=2, mesh=mesh, param_specs=specs, min_shard_bytes=0)
    return plain(state, split_over_processes=False)


def differing(hosts):
    """States made from another seed on each process, and batches that do not divide: what is said."""
    del hosts
    rank, said, mesh = jax.process_index(), {}, mesh_of(0)
    state, other = small(), jax.tree.map(lambda x: x + 0, small())
    kernel = other.params["Dense_0"]["kernel"]
    other.params["Dense_0"]["kernel"] = kernel.at[0, 0].add(1e-3 * rank)
    plan = jzero.make_plan(state.params, stage=2, mesh=mesh)
    shorter = {k: v for k, v in state.params.items() if rank == 0 or k == "Dense_0"}
    outside = jnp.asarray([1.0, 2.0])[min(rank, 1)]

    def scaled(by):
        state = small()
        return state.replace(params=jax.tree.map(lambda x: x * by, state.params))

    last, files = jax.process_count() - 1, folder_of("in the way")
    if rank == last > 0:  # of its own folder in it
        files.mkdir(parents=True)
        (files / f"process-{rank:05}-of-{last + 1:05}").write_text("")

    calls = {
        "disk": lambda: jzero.shard(small, stage=2, mesh=mesh, offload=jzero.Offload(tier="disk", path=files)),
        "shard": lambda: jzero.shard(other, stage=2, mesh=mesh),
        "place": lambda: plan.place(other.params),
        "tree": lambda: check_same({"a": shorter}, where="here"),
        "batch": lambda: plan.place_batch({"x": np.ones((8 // jax.process_count() + 1, 3))}),
        "rows": lambda: plan.place_batch({"x": np.ones((8 * (1 + rank), 3))}),
        "seed": lambda: jzero.shard(lambda: scaled(1 + rank), stage=3, mesh=mesh),
        "constant": lambda: jzero.shard(lambda: scaled(outside), stage=3, mesh=mesh),
    }
    for name, call in calls.items():
        try:
            call()
        except (ValueError, RuntimeError, OSError) as error:
            said[name] = str(error)
    if rank == last:
        said["left"] = sorted(x.name for x in files.iterdir())
        shutil.rmtree(files)
    return said


def alone() -> str:
    """What the first process hears that passes a number of rows which is new to it, and to no other. The last case."""
    try:
        if jax.process_index() == 0:
            check_rows({"x": np.ones(7)}, where="here", seconds=1)
    except ValueError as error:
        return str(error)
    return ""


def born(hosts):
    """Peaks of memory, in bytes: a state of 384 MiB born sharded and, on two processes, made whole on each before."""

    def make():
        params = {"w": jnp.full(LARGE, 0.5)}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    def measured(existing):
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = resident("VmRSS")
        state = jzero.shard(make() if existing else make, stage=3, mesh=mesh_of(hosts))
        held = sum(
            s.data.nbytes for x in jax.block_until_ready(jax.tree.leaves(state)) for s in x.addressable_shards
        )
        return {"peak": resident("VmHWM") - before, "held": held}

    return {name: measured(name == "existing") for name in ["born", "existing"][: 2 if hosts == 2 else 1]}


CASES = {
    **{f"stage {n}": stage(n) for n in range(4)},
    "random": stage(3, make=random),
    "stage 2, existing": stage(2, existing=True),
    "stage 3, existing": stage(3, existing=True),
    "laid out again": laid_out_again,
    "odd, stage 1": odd(1),
    "odd, stage 3": odd(3),
    "odd, stage 2, existing": odd(2, existing=True),
    "NNX, stage 3": nnx_pair(3, False),
    "NNX, stage 2, existing": nnx_pair(2, True),
    "accumulate, step": accumulated(1, "step"),
    "accumulate, microbatch": accumulated(2, "microbatch"),
    "accumulate, stage 3": accumulated(3, "auto"),
    "HSDP, stage 2": hybrid(stage=2, axis="data", batch_axis=BOTH),
    "HSDP or MiCS, stage 3": hybrid(stage=3, axis="data", batch_axis=BOTH),
    "hpZ": hybrid(stage=3, axis=BOTH, param_axis="data"),
    "all at once": hybrid(stage=3, axis=BOTH),
    "model across": model_across,
    "optax, stage 1": optax_loop(1),
    "optax, stage 3": optax_loop(3),
    "offload": stage(2, offload="host"),
    "offload, existing": stage(2, existing=True, offload="host"),
    "moments in 16 bits": stage(2, moment_dtype="bfloat16"),
    "overflow": overflow,
    "outside, host": outside(2),
    "outside, host, stage 3": outside(3, make=odd_state),
    "outside, disk": outside(2, update="disk"),
    "remat": rematerialised(partition="model"),
    "remat, offload": rematerialised(offload="host"),
}


SKIPPED_BY_FOUR = {  # processes, but in the long run: four compile everything four times
    "stage 1", "random", "stage 3, existing", "odd, stage 1", "odd, stage 2, existing", "odd, stage 3",
    "accumulate, microbatch", "NNX, stage 2, existing", "laid out again", "HSDP, stage 2", "all at once",
    "optax, stage 1", "offload, existing", "remat", "outside, host, stage 3",
}  # fmt: skip


def cases_of(count: int, part: str = "first") -> list[str]:
    """The cases that `count` processes run: "default", the few of the default tier; "first"; "rest", all others."""
    if part == "default":
        return ["stage 2", "stage 3", "accumulate, step", "HSDP, stage 2", "outside, disk"]
    return [name for name in CASES if (count < 4 or name not in SKIPPED_BY_FOUR) == (part == "first")]


def main(rank: int, count: int, port: str, part: str) -> None:
    """Join the others, run every case, print a line of JSON."""
    jax.config.update("jax_num_cpu_devices", 8 // count)
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # as in conftest.py
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank, heartbeat_timeout_seconds=20)
    found: dict[str, Any] = {"devices": jax.device_count()}
    if part == "first":
        found |= {"born": born(count), "differing": differing(count)}
    found |= {name: CASES[name](count) for name in cases_of(count, part)}
    found["alone"] = alone()
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
