"""Train a small GPT on real bytes with ZeRO: the Python standard library's sources, or any text.

    python train/gpt.py                                   # 8 simulated devices (or all GPUs), stage 2
    python train/gpt.py --stage 3 --out runs/stage3       # the same losses, params split too
    python train/gpt.py --offload host --out runs/host    # optimizer state in host memory
    python train/gpt.py --stage 3 --offload-params --out runs/infinity   # and params
    python train/gpt.py --offload host --update host --out runs/cpu      # the CPU updates it
    python train/gpt.py --offload disk --out runs/disk    # optimizer state in files
    python train/gpt.py --optimizer muon --out runs/muon  # Muon for the blocks' matrices (docs/muon.md)
    python train/gpt.py --devices 1 --out runs/one        # one device: nothing to share
    python train/gpt.py --resume                          # go on from the last checkpoint
    python train/gpt.py --preset tiny                     # the short form, for CI
    python train/gpt.py --data ~/books --dtype bfloat16 --out runs/books

Many hosts: the same command under srun, mpirun or a Kubernetes indexed job (docs/launch.md), --out on a disk that all
of them see. By hand (on one machine for a try: localhost:1234 and --devices 4):

    python train/gpt.py --coordinator host0:1234 --processes 2 --process-id 0
    python train/gpt.py --coordinator host0:1234 --processes 2 --process-id 1

Measured on two cores of a Xeon with AVX-512 that others used as well, start to end (2026-11; Python 3.11,
jax 0.10.2, flax 0.12.8). Loss is on held-out bytes, in nats per byte; the bigram has 2.459 on the same ones.

    run          devices  time         loss   model states / device  host memory
    default      8        132 to 144 s 1.358  4.70 MB                0.9 GB
    --stage 3    8        169 s        1.358  1.72 MB                0.9 GB
    --devices 1  1        123 s        1.356  13.65 MB               0.8 GB
    tiny         8        11 to 15 s   2.260  0.73 MB                0.6 GB  (the bigram: 2.484)

Stages 2 and 3 print the same losses to the last step; one device leaves them after 100 steps (it sums in
another order). Another Python's library is other text: 3.12 ends at 1.365 in 113 s, its
bigram at 2.442. The presets gpt2-small and gpt2-xl are sized for GPUs and have not been run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository, wherever the shell stands
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax.experimental import multihost_utils
from optax import contrib

import jzero
from jzero.checkpoint import CheckpointDamaged, FolderInUse
from jzero.core.errors import human_bytes
from train import config as flags
from train import data, processes
from train.checkpoints import Checkpoints, check_identity, saved_steps, set_aside
from train.config import PRESETS, Config
from train.facts import facts
from train.figures import figures_of
from train.log import NOT_FINITE, Log
from train.memory import check_fits, in_tiles
from train.model import GPT, sample
from train.stopping import Stopping

# ------------------------------------------------------------------------------------------------------------
# The state and the step: plain Flax, and but for fp16 nothing of jzero in them. Other tools import these two.
# ------------------------------------------------------------------------------------------------------------


class TrainState(train_state.TrainState):
    """With a key; the dropout of step i is drawn from `fold_in(key, i)`, so a resumed run draws the same.

    `scale`: of the loss, in fp16; else None.
    """

    key: jax.Array
    scale: jzero.LossScale | None = None


def create_state(config: Config = PRESETS["default"]) -> TrainState:
    """A new train state: params from `config.seed`, the optimizer's moments zero."""
    return creator(config)()


def creator(config: Config) -> Callable[[], TrainState]:
    """A function that makes the state. Model and optimizer are made here, once: a step compiled for one state that it
    makes takes every other."""
    model, tx = GPT(config.model), optimizer(config)
    half = "float16" in config.model.dtypes.values()

    def create() -> TrainState:
        wide = GPT(dataclasses.replace(config.model, dtype="float32", param_dtype=None))
        params = wide.init(jax.random.key(config.seed), jnp.zeros((1, config.model.seq), jnp.int32))["params"]
        # drawn in fp32: every dtype starts from the same numbers, and masters from these, not from their rounding
        params = jax.tree.map(lambda p: p.astype(config.model.dtypes["param_dtype"]), params)
        return TrainState.create(
            apply_fn=model.apply,
            params=params,
            tx=tx,
            key=jax.random.key(config.seed + 1),
            scale=jzero.LossScale() if half else None,
        )

    return create


def optimizer(config: Config) -> optax.GradientTransformation:
    """Clip by the global norm, then AdamW or Muon under a warm-up and a cosine; only matrices decay.

    fp16 skips overflows. Muon takes the matrices of the blocks, AdamW the rest. Both have one learning rate: Muon's
    updates are scaled to the size that AdamW's have (Liu et al., arXiv:2502.16982).
    """
    o, warmup = config.optim, min(config.optim.warmup, config.steps - 1)
    rate = optax.warmup_cosine_decay_schedule(0.0, o.lr, warmup, config.steps, end_value=o.lr / 50)
    tx = optax.adamw(rate, b2=o.b2, weight_decay=o.weight_decay, mask=is_matrix)
    if o.optimizer == "muon":
        muon = contrib.muon(
            rate, weight_decay=o.weight_decay, consistent_rms=0.2, muon_weight_dimension_numbers=matrices
        )
        tx = optax.partition({"muon": muon, "adamw": tx}, owner)
    chain = optax.chain(optax.clip_by_global_norm(o.clip), tx)
    return optax.apply_if_finite(chain, 10**6) if "float16" in config.model.dtypes.values() else chain


def is_matrix(params: Any) -> Any:
    """True for the kernels of Dense layers. By name: stacked norm scales have two dims as well."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key == "kernel", params)


def owner(params: Any) -> Any:
    """Of every param the optimizer that updates it: "muon" for the kernels of the blocks, else "adamw"."""

    def of(path, _):
        return "muon" if path[0].key.startswith("layer") and path[-1].key == "kernel" else "adamw"

    return jax.tree.map_with_path(of, params)


def matrices(params: Any) -> Any:
    """Which dims of a kernel are its rows and columns; the one before them, if any, is that of the scan over layers."""
    return jax.tree.map(lambda p: contrib.MuonDimensionNumbers(p.ndim - 2, p.ndim - 1), params)


def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update on batch["tokens"], i32[batch, seq + 1]; the metrics hold the mean loss in nats per byte."""
    return updated(state, *gradients(state, batch))


def gradients(state: TrainState, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
    """Of the params, and the metrics; all that is compiled where the update runs outside of the program."""
    rngs = {"dropout": jax.random.fold_in(state.key, state.step)}

    def loss_of(params):
        return state.apply_fn({"params": params}, *windows_of(batch), rngs=rngs)

    if state.scale is None:
        vg = jax.value_and_grad(loss_of)
    else:  # fp16
        vg = jzero.value_and_grad(loss_of, jzero.plan_of(state), scale=state.scale, batch_argnums=())
    loss, grads = vg(state.params)
    return grads, {"loss": loss}


def updated(state: TrainState, grads: Any, metrics: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state after an update; in fp16 gradients that overflow change nothing but the scale of the loss."""
    scale, state = state.scale, state.apply_gradients(grads=grads)
    scales = jax.tree.leaves(getattr(state.opt_state, "moment_scales", None))
    if scales:  # moments in int8
        metrics = {**metrics, NOT_FINITE: jnp.asarray(sum(jnp.sum(~jnp.isfinite(x)) for x in scales))}
    if scale is None:
        return state, metrics
    scale = scale.update(state.opt_state)
    return state.replace(scale=scale), {**metrics, "loss_scale": scale.value, "skipped_steps": scale.skipped}


def eval_step(state: TrainState, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean loss of a batch without dropout."""
    return state.apply_fn({"params": state.params}, *windows_of(batch))


def windows_of(batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Bytes, and after each of them the one to predict."""
    return batch["tokens"][:, :-1], batch["tokens"][:, 1:]


# ------------------------------------------------------------------------------------------------------------
# Before anything is compiled: the sizes fit, the data is there, the folder is free or holds a run to resume.
# ------------------------------------------------------------------------------------------------------------


def prepare(config: Config, corpus: data.Corpus | None = None) -> data.Corpus:
    """The corpus (read where it is not given), once every check has passed.

    Raises:
      ValueError, FileNotFoundError: what is wrong and the flag that mends it.
    """
    flags.check_alone(config)
    jzero.ZeroConfig(**zero_fields(config))
    processes.check_devices(jax.devices())
    flags.check(config, devices=jax.device_count())
    corpus = data.load(config.data) if corpus is None else corpus
    data.check_size(corpus, seq=config.model.seq, batch=config.batch)
    steps = saved_steps(config.out)
    if config.resume and not steps:
        raise ValueError(
            f"--resume: no checkpoint in {config.out}. Pass the run's --out, or leave out --resume."
        )
    if steps and not config.resume and not config.overwrite:
        raise ValueError(
            f"--out {config.out} holds a run that reached step {steps[-1]}. Pass --resume to continue it, "
            "--overwrite to delete it, or another --out."
        )
    if config.resume:
        if config.resume_step is not None and config.resume_step not in steps:
            raise ValueError(f"--resume-step {config.resume_step}: the run in {config.out} has {steps}.")
        check_identity(config.out, first_step(config), flags.identity(config, corpus.fingerprint))
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out {config.out}: {error.strerror}. Pass a folder that can be written."
        ) from None
    return corpus


def zero_fields(config: Config) -> dict[str, Any]:
    """What of a run's config is jzero's."""
    offload = None
    if config.offload is not None or config.offload_params:
        params = "host" if config.offload_params else "device"
        where = {"tier": "disk", "path": files_of(config)} if config.offload == "disk" else {}
        offload = jzero.Offload(params=params, update=config.update, delay=config.delay, **where)
    fields = {"stage": config.stage, "offload": offload, "moment_dtype": config.moment_dtype}
    fields |= {name: getattr(config, name) for name in ("gather_dtype", "reduce_dtype", "update_dtype")}
    return fields if config.master_dtype is None else {**fields, "master_dtype": config.master_dtype}


def files_of(config: Config) -> Path:
    """Where the optimizer's state lives with --offload disk."""
    return config.disk_path if config.disk_path is not None else config.out / "optimizer"


def first_step(config: Config) -> int:
    """The step that a run continues from; 0 for a new one."""
    if not config.resume:
        return 0
    return config.resume_step if config.resume_step is not None else saved_steps(config.out)[-1]


# ------------------------------------------------------------------------------------------------------------
# The run.
# ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run ends with; losses in nats per byte, `losses` and `heldout` as (step, loss).

    `stopped`: by which signal, where it was told to stop before its last step; it has a checkpoint there. `out`: its
    folder.
    """

    out: Path
    state: TrainState
    losses: list[tuple[int, float]]
    heldout: list[tuple[int, float]]
    bigram: float
    text: str
    stopped: signal.Signals | None = None


def train(config: Config, corpus: data.Corpus) -> Result:
    """The run that `config` describes, from step 0 or from the last checkpoint in `config.out`."""
    began = time.perf_counter()
    me, count, m = jax.process_index(), jax.process_count(), config.model

    # -- data: this process's rows of every batch; the bytes that the model and the bigram are both asked for
    sizes = {"seq": m.seq, "batch": config.batch}
    stream = data.batches(corpus.train, **sizes, seed=config.seed, process=me, processes=count)
    windows = data.heldout_windows(corpus.heldout, **sizes, most=config.eval_windows)
    rows = config.batch // count
    bigram = data.bigram_loss(corpus.train, windows)

    # -- the plan and the step, from shapes alone
    config = dataclasses.replace(config, model=dataclasses.replace(m, tiled_loss=in_tiles(config)))
    start = first_step(config)
    log = Log(config.out, start=start, steps=config.steps, tokens=config.batch * m.seq, every=config.log_every)
    create = creator(config)
    log.print(corpus.source)
    log.print(f"{len(corpus.train):,} bytes to train on; {windows[..., 1:].size:,} held-out to evaluate")
    like, step_fn, eval_fn = compiled(config, create, log)
    plan = jzero.plan_of(like)

    # -- state: born sharded, or read shard by shard
    checkpoints, state = first_state(config, corpus, create, like, stream, log)
    step, stopped = start, None
    late = {"seconds": config.step_deadline, "pause_seconds": config.pause_deadline, "folder": config.out}
    on_time = jzero.deadline(step_fn, **late)
    with checkpoints, log, Stopping() as stopping, on_time:
        heldout = [plan.place_batch({"tokens": x[me * rows : (me + 1) * rows]}) for x in windows]

        # -- train
        log.start_clock()
        for step in range(start + 1, config.steps + 1):
            if checkpoints.must_wait(step):
                with log.not_training():
                    checkpoints.wait()
            state, metrics = on_time(state, plan.place_batch(next(stream)))
            log.step(step, metrics)
            last = step == config.steps
            stopped = None if last else stopping.after(step)
            if step % config.eval_every == 0 or last:
                with log.not_training():
                    log.evaluation(step, sum(float(eval_fn(state, x)) for x in heldout) / len(heldout))
            if step % config.save_every == 0 or last or stopped:
                with log.not_training():
                    log.print(f"step {step}/{config.steps}  writing a checkpoint, {size_of(state)}")
                    checkpoints.save(step, state, stream, heldout=log.heldout[-1][1] if log.heldout else None)
            if stopped:
                break

        # -- what came out of it
        with log.waiting("waiting for the checkpoint"):
            checkpoints.wait()
        if stopped:
            log.print(f"stopped by {stopped.name} after step {step}: go on with --resume")
            return Result(config.out, state, log.losses, log.heldout, bigram, "", stopped=stopped)
        text = write_text(config, state)
        log.summary(bigram=bigram, text=text, held=held_line(state), seconds=time.perf_counter() - began)
    return Result(config.out, state, log.losses, log.heldout, bigram, text)


def compiled(config: Config, create: Callable[[], TrainState], log: Log) -> tuple[TrainState, Any, Any]:
    """The state as it will be, without arrays, and the two steps compiled for it: on CPU the machine may be too small.

    Raises:
      MemoryError: it is.
    """
    like = jzero.abstract(create, **zero_fields(config))
    plan, seq = jzero.plan_of(like), config.model.seq + 1
    shapes = {"tokens": jax.ShapeDtypeStruct((config.batch, seq), np.int32)}
    traced = gradients if plan.config.updates_outside else train_step
    estimate = jzero.estimate(plan, tx=like.tx, uses=jzero.param_uses(traced, like, shapes))
    log.print(plan.describe(), estimate)
    check_fits(estimate.params + estimate.opt_state, 0, batch=config.batch)
    blank = plan.place_batch({"tokens": np.zeros((config.batch // jax.process_count(), seq), np.int32)})
    step_fn, program = compiled_step(like, blank)
    stats: Any = program.memory_analysis()
    check_fits(stats.argument_size_in_bytes, stats.temp_size_in_bytes, batch=config.batch)
    log.figures = figures_of(program, plan, estimate)
    log.print(log.figures)
    return like, step_fn, jax.jit(eval_step).lower(like, blank).compile()


def compiled_step(like: TrainState, batch: Any) -> tuple[Callable[..., Any], jax.stages.Compiled]:
    """The step for a state that is not there yet, and the program that it runs: `gradients` alone where the update is
    outside of it."""
    plan = jzero.plan_of(like)
    options = plan.compiler_options  # for XLA:GPU; none elsewhere
    if plan.config.updates_outside:
        program = jax.jit(gradients, compiler_options=options).lower(like, batch).compile()
        return lambda state, batch: updated(state, *program(state, batch)), program
    program = jax.jit(train_step, donate_argnums=0, compiler_options=options).lower(like, batch).compile()
    return program, program


def first_state(
    config: Config,
    corpus: data.Corpus,
    create: Callable[[], TrainState],
    like: TrainState,
    stream: Any,
    log: Log,
) -> tuple[Checkpoints, TrainState]:
    """The run's checkpoints, and its state: new, or that of the last one, `stream` at the batch that comes next."""
    start = log.start
    checkpoints = Checkpoints(
        config.out,
        keep=config.keep,
        identity=flags.identity(config, corpus.fingerprint),
        start=start,
        lose_at_most=config.lose_at_most,
        overwrite=config.overwrite and not config.resume,
    )
    with contextlib.ExitStack() as opened:
        opened.enter_context(checkpoints)
        if config.offload == "disk" and (config.resume or config.overwrite):
            # the state is in the checkpoint, and this run is alone in --out
            for old in files_of(config).glob(f"process-{jax.process_index():05}-of-*"):
                shutil.rmtree(old)
        if not config.resume:
            state = jzero.shard(create, **zero_fields(config))
        else:
            for moved in set_aside(config.out, start) if jax.process_index() == 0 else ():
                log.print(f"moved a later checkpoint to {moved}")
            multihost_utils.sync_global_devices("checkpoints after the one to resume from are set aside")
            with log.waiting(f"reading the checkpoint of step {start}, {size_of(like)}"):
                state = checkpoints.restore(start, like, stream)
        opened.pop_all()  # training closes them
    return checkpoints, state


def write_text(config: Config, state: TrainState) -> str:
    """A sample, on one device: whole params are needed there, as for any use after training."""
    params = jax.tree.map(lambda x: x.addressable_data(0), jzero.unshard(state.params))
    prompt = jnp.asarray(list(config.prompt.encode()), jnp.int32)
    key = jax.random.key(config.seed)
    written = sample(
        GPT(config.model), params, prompt, key, count=config.sample_bytes, temperature=config.temperature
    )
    return config.prompt + bytes(np.asarray(written, np.uint8)).decode(errors="replace")


def size_of(state: TrainState) -> str:
    """The bytes of a state, whole, with what lives outside of the device."""
    return human_bytes(bytes_of(state, state.opt_state))


def bytes_of(tree: Any, opt_state: Any) -> int:
    """The bytes of a tree, whole, with what lives outside of the device of the optimizer state in it."""
    outside = getattr(getattr(opt_state, "master", None), "total", 0)
    return outside + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def held_line(state: TrainState) -> str:
    """Params and optimizer state on this process's first device, beside what a device without the others would hold."""
    arrays = [x for x in jax.tree.leaves((state.params, state.opt_state)) if isinstance(x, jax.Array)]
    mine = jax.local_devices()[0]
    held = sum(s.data.nbytes for x in arrays if x.sharding.memory_kind != "pinned_host"
               for s in x.addressable_shards if s.device == mine)  # fmt: skip
    whole = bytes_of((state.params, state.opt_state), state.opt_state)
    return (
        f"{human_bytes(held)} of params and optimizer state on each of {jax.device_count()} devices; one unsharded "
        f"device would hold {human_bytes(whole)}"
    )


def damaged(error: CheckpointDamaged) -> str:
    """What is wrong with a checkpoint, and the flag that continues from the last good one."""
    remedy = f"\nContinue from there: --resume --resume-step {error.good.name}" if error.good else ""
    return f"error: {error}{remedy}"


def main(args: list[str] | None = None) -> None:
    """The command line. Devices and processes are set up here, before JAX is first used."""
    config = flags.parse(args)
    # XLA:CPU: fewer threads than simulated devices can wait for each other
    os.environ.setdefault("NPROC", "32")
    jax.config.update("jax_num_cpu_devices", config.devices)  # where there are GPUs, they are used instead
    corpus, watch = joined(config)
    with watch:
        try:
            corpus = prepare(config, corpus)
        except CheckpointDamaged as error:
            sys.exit(damaged(error))
        except (ValueError, FileNotFoundError) as error:
            sys.exit(f"error: {error}")
        try:
            stopped = train(config, corpus).stopped
        except CheckpointDamaged as error:
            sys.exit(damaged(error))
        except MemoryError as error:
            sys.exit(f"error: {error}")
        except FolderInUse as error:
            sys.exit(f"error: --out {config.out} is in use. {error}")
    if stopped:  # a code other than 0, so that Kubernetes and docs/launch/slurm.sbatch restart the run
        sys.exit(128 + stopped)


def joined(config: Config) -> tuple[data.Corpus | None, contextlib.AbstractContextManager[Any]]:
    """The data, and the watch over the other processes; nothing of both for a process by itself."""
    given = {"coordinator": config.coordinator, "processes": config.processes}
    try:
        group = processes.find(**given, process_id=config.process_id)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if group is None:
        return None, contextlib.nullcontext()
    corpus = wrong = None
    try:  # what is wrong here, the others are to know: they wait for this process
        flags.check_alone(config)
        corpus = data.load(config.data)
    except (ValueError, OSError) as error:
        wrong = str(error)
    try:
        same = facts(config, "" if corpus is None else corpus.fingerprint)
        times = {"timeout": config.start_timeout, "heartbeat": config.heartbeat}
        return corpus, processes.join(group, same, **times, remedy=lambda: remedy(config), error=wrong)
    except processes.Refused as error:
        sys.exit("\n".join(f"[process {group.me}] {line}" for line in f"error: {error}".splitlines()))


def remedy(config: Config) -> str:
    """What to do after a run of several processes has ended early."""
    steps = saved_steps(config.out)
    if not steps:
        return f"No checkpoint is finished in {config.out}: start all processes again."
    return (
        f"The last finished checkpoint in {config.out} is of step {steps[-1]}: start all again with --resume."
    )


if __name__ == "__main__":
    main()
