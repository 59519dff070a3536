"""What a run can be told: dataclasses that tyro turns into flags, presets, checks before any compile."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jzero.core.errors import division
from train.model import Model


@dataclasses.dataclass(frozen=True)
class Optim:
    """AdamW or Muon with warm-up, cosine decay and clipping by the global norm."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """Of the matrices of the blocks; embedding, head and vectors have AdamW."""
    lr: float = 3e-3
    """Peak learning rate."""
    warmup: int = 50
    """Steps to the peak; after it a cosine to a fiftieth of it at the last step."""
    b2: float = 0.99
    """Decay of the second moment."""
    weight_decay: float = 0.1
    """On matrices; norms and embeddings have none."""
    clip: float = 1.0
    """Largest global norm of the gradient."""


@dataclasses.dataclass(frozen=True)
class Config:
    """A run of train/gpt.py."""

    preset: Literal["default", "tiny", "gpt2-small", "gpt2-xl"] = "default"
    """Where the defaults of all other flags come from."""
    stage: int = 2
    """ZeRO stage: 0 (plain data parallelism), 1, 2 or 3."""
    offload: Literal["host", "disk"] | None = None
    """host: optimizer state in pinned host memory, streamed through the device. disk: in files, updated by the CPU; a
    resumed run fills them from its checkpoint."""
    update: Literal["device", "host"] = "device"
    """host: with --offload host, the CPU updates the state outside of the compiled program. Stages 2 and 3."""
    delay: int = 0
    """1: an update of the CPU runs beside the next step, and params are one step late. A resumed run
    begins with params that are not, so its losses differ from those of one that never stopped."""
    disk_path: Path | None = None
    """With --offload disk: the folder of the files, on a disk of this machine; optimizer/ in --out where left out."""
    offload_params: bool = False
    """Params and their gradients in pinned host memory too, fetched where they are used; with --stage 3 alone. Implies
    --offload host."""
    master_dtype: Literal["remainder"] | None = None
    """remainder: with --param-dtype bfloat16, masters are stored as the 16 bits that the params lack."""
    moment_dtype: Literal["int8", "bfloat16", "float32"] | None = None
    """Of AdamW's stored moments; that of the params (or of their masters) where left out."""
    gather_dtype: Literal["int8", "float8_e4m3fn"] | None = None
    """Of weights on the wire, at stage 3; that of the params where left out."""
    reduce_dtype: Literal["int4", "int8", "bfloat16", "float32"] | None = None
    """Of gradients on the wire, at stages 2 and 3; that of the params where left out."""
    update_dtype: Literal["int8"] | None = None
    """int8: with --param-dtype bfloat16, at stages 1 and 2, what an update adds to params is sent in 8 bits."""
    steps: int = 1000
    """Optimizer steps; the learning rate reaches its end there."""
    batch: int = 32
    """Windows in a batch, over all devices and processes."""
    data: str | None = None
    """A text file or a folder of text; the Python standard library's sources where left out."""
    out: Path = Path("runs/gpt")
    """Folder of the run: metrics.jsonl, loss.png, step.png, sample.txt, tensorboard/, checkpoints/."""
    resume: bool = False
    """Continue the run in --out from its last checkpoint, as if it had not stopped."""
    resume_step: int | None = None
    """Continue from the checkpoint of this step instead; later ones are moved to set_aside/."""
    overwrite: bool = False
    """Delete the run that --out holds."""
    seed: int = 0
    """Of the initial params, the order of the data, dropout and the sample."""
    log_every: int = 25
    """Steps between two lines of metrics."""
    eval_every: int = 250
    """Steps between two held-out losses."""
    eval_windows: int = 1024
    """Held-out windows, evenly spaced; the bigram model is asked for the same bytes."""
    save_every: int = 250
    """Steps between two checkpoints."""
    lose_at_most: int | None = None
    """Steps that are lost at most when the run is killed: training waits for a checkpoint that is being written before
    it goes further. At least --save-every, which is a wait for each. Left out: twice --save-every."""
    keep: int = 2
    """Of the last checkpoints; the one with the lowest held-out loss is kept too."""
    sample_bytes: int = 400
    """Bytes of text to write at the end."""
    prompt: str = "def "
    """What that text starts with."""
    temperature: float = 0.7
    """Divides the logits of the sample."""
    devices: int = 8
    """Simulated CPU devices in this process where there is no GPU; with GPUs all of them are used."""
    coordinator: str | None = None
    """host:port of process 0, for a run of several processes (or JAX_COORDINATOR_ADDRESS)."""
    processes: int | None = None
    """Number of processes (or JAX_NUM_PROCESSES)."""
    process_id: int | None = None
    """Which one this is, from 0 (or JAX_PROCESS_ID). Under srun and mpirun none of the three is needed."""
    start_timeout: float = 300
    """Seconds that the processes wait for each other at the start."""
    heartbeat: int = 30
    """Seconds without a sign of a process after which the others end."""
    step_deadline: float | None = None
    """Seconds that a step may take before all processes say what they are doing and end with status 75; ten times the
    median of the last steps, and at least 60, if omitted."""
    pause_deadline: float = 1800
    """The same for the time between two steps: data, evaluation, checkpoints."""
    model: Annotated[Model, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Model)
    optim: Annotated[Optim, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Optim)


PRESETS = {
    "default": Config(),
    "tiny": Config(
        preset="tiny",
        steps=200,
        batch=16,
        out=Path("runs/tiny"),
        eval_every=100,
        eval_windows=256,
        save_every=100,
        sample_bytes=80,
        model=Model(width=64, layers=2, heads=1, seq=32),
        optim=Optim(lr=1e-2, warmup=20),
    ),
    "gpt2-small": Config(
        preset="gpt2-small",
        steps=20_000,
        batch=128,
        out=Path("runs/gpt2-small"),
        eval_every=1000,
        save_every=1000,
        model=Model(width=768, layers=12, heads=12, seq=1024, dtype="bfloat16", remat=True),
        optim=Optim(lr=6e-4, warmup=1000, b2=0.95),
    ),
    "gpt2-xl": Config(
        preset="gpt2-xl",
        stage=3,
        steps=50_000,
        batch=512,
        out=Path("runs/gpt2-xl"),
        eval_every=1000,
        save_every=1000,
        model=Model(width=1600, layers=48, heads=25, seq=1024, dtype="bfloat16", remat=True, scan=True),
        optim=Optim(lr=2e-4, warmup=2000, b2=0.95),
    ),
}


def parse(args: list[str] | None = None) -> Config:
    """The config that a command line means: a preset, then its flags on top."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="default")
    preset = first.parse_known_args(args)[0].preset
    flat = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    return tyro.cli(Config, args=args, default=PRESETS.get(preset, PRESETS["default"]), config=flat)


def check(config: Config, *, devices: int) -> None:
    """Refuses what cannot run.

    Raises:
      ValueError: sizes that do not fit the devices or each other; a schedule without steps.
    """
    if config.batch % devices or config.batch < 1:
        each, rest = divmod(config.batch, devices)
        near = f"{each * devices} or {(each + 1) * devices}" if each > 0 else f"{devices}"
        raise ValueError(
            f"--batch {config.batch}: {devices} devices cannot split {config.batch} windows evenly "
            f"({config.batch} = {each} x {devices} + {rest}). Pass --batch {near}."
        )
    check_alone(config)


def check_alone(config: Config) -> None:
    """As `check`, as far as a process knows it before it has met the others.

    Raises:
      ValueError: as for `check`.
    """
    m = config.model
    for name in ("width", "heads"):
        if getattr(m, name) < 1:
            raise ValueError(f"--{name} {getattr(m, name)}: must be at least 1.")
    if m.width % m.heads:
        good = [h for h in range(1, m.width + 1) if m.width % (2 * h) == 0]
        near = f"--heads {min(good, key=lambda h: abs(h - m.heads))}, or " if good else ""
        raise ValueError(
            f"--width {m.width} --heads {m.heads}: {m.heads} heads cannot split {m.width} features evenly "
            f"({division(m.width, m.heads)}). Pass {near}another --width."
        )
    if (m.width // m.heads) % 2:
        raise ValueError(
            f"--width {m.width} --heads {m.heads}: rotary positions need an even number of features per "
            f"head, not {m.width}/{m.heads}."
        )
    if config.offload_params and config.stage != 3:
        raise ValueError(
            f"--offload-params: needs stage 3; at stage {config.stage} the model reads whole params on the device. "
            "Pass --stage 3, or --offload host for the optimizer state alone."
        )
    _check_offload(config)
    if not config.prompt:
        raise ValueError("--prompt: must not be empty; the sample needs a byte to start from.")
    if config.resume_step is not None and not config.resume:
        raise ValueError("--resume-step: pass --resume with it.")
    for name in ("steps", "devices", "log_every", "eval_every", "save_every", "keep", "eval_windows"):
        if getattr(config, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(config, name)}: must be at least 1.")
    o = config.optim
    for name, value, good, text in (
        ("lr", o.lr, o.lr > 0, "more than 0"),
        ("warmup", o.warmup, o.warmup >= 0, "at least 0"),
        ("b2", o.b2, 0 <= o.b2 < 1, "at least 0 and less than 1"),
        ("weight-decay", o.weight_decay, o.weight_decay >= 0, "at least 0"),
        ("clip", o.clip, o.clip > 0, "more than 0"),
        ("dropout", m.dropout, 0 <= m.dropout < 1, "at least 0 and less than 1"),
        ("temperature", config.temperature, config.temperature > 0, "more than 0"),
    ):
        if not good:  # NaN fails every comparison
            raise ValueError(f"--{name} {value:g}: must be {text}.")
    if config.lose_at_most is not None and config.lose_at_most < config.save_every:
        raise ValueError(
            f"--lose-at-most {config.lose_at_most}: there is a checkpoint every {config.save_every} steps only. Pass "
            f"--save-every {config.lose_at_most}, or --lose-at-most {config.save_every} or more."
        )
    for name, seconds in (("step-deadline", config.step_deadline), ("pause-deadline", config.pause_deadline)):
        if seconds is not None and not seconds > 0:
            raise ValueError(f"--{name} {seconds:g}: must be more than 0 seconds.")
    if config.heartbeat < 5 or config.start_timeout <= 0:
        raise ValueError(
            f"--heartbeat {config.heartbeat} --start-timeout {config.start_timeout:g}: a heartbeat of at least 5 s, "
            "since a busy host answers late; and more than 0 s to start."
        )


def identity(config: Config, fingerprint: str) -> dict[str, Any]:
    """What must not change when a run is resumed: model, optimizer, batches, data."""
    fixed = {name: getattr(config, name) for name in ("steps", "batch", "seed")}
    model = {k: v for k, v in dataclasses.asdict(config.model).items() if k != "tiled_loss"}  # the same loss
    parts = model | dataclasses.asdict(config.optim)
    return parts | fixed | {"data": fingerprint}


def _check_offload(config: Config) -> None:
    outside = config.update == "host" or config.offload == "disk"
    if config.update == "host" and config.offload is None and not config.offload_params:
        raise ValueError("--update host: belongs to --offload host.")
    if config.delay and not outside:
        raise ValueError("--delay: belongs to --update host or --offload disk.")
    if config.disk_path is not None and config.offload != "disk":
        raise ValueError("--disk-path: belongs to --offload disk.")
    if outside and config.stage < 2:
        flag = "--offload disk" if config.offload == "disk" else "--update host"
        raise ValueError(f"{flag}: needs stage 2 or 3; at stage {config.stage} gradients leave the program whole.")
