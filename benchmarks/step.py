"""What jzero costs: a train step with it against the same step sharded by hand, timed in turns; writes a dated page.

    python benchmarks/step.py                            # 8 simulated devices or all GPUs: 11 minutes, two busy cores
    python benchmarks/step.py --sizes tiny --forms scan  # part of it: 2 minutes there
    python benchmarks/step.py --sizes small --stages 2 --muon
    python benchmarks/step.py --sizes medium --forms scan --stages 2 3 --policies
    python benchmarks/step.py --help

Writes `<out>/<date>-<backend>.md` with a plot beside it; needs jzero[train]. Each pair of programs is timed in
alternating rounds, and a round gives one ratio: the two take turns of 10 ms or of one step, and swap who goes
first each time, so that what others do on the machine meets both. The interval is a bootstrap of the median
ratio. All programs of a model are built first and timed in the same rounds.

[Note: by hand]
Stage 0: plain Flax, state whole on each device, batch split. Stages 1 and 2: `in_shardings` and `out_shardings` with
split moments, and a constraint on the gradients (whole at 1, split at 2). Stage 3: params split as well, XLA
decides where to gather. Which dim is split, and from which size on, is jzero's rule in both, so that the
programs differ and not the choice.

Of unrolled layers XLA gathers a weight once and keeps it to the end of the backward pass: 2 Psi, and the peak of stage
2. That is `reshard_after_forward=False`, the row "3, kept". Stage 3 drops what it gathered, and has to be compared with
what drops as well: a constraint and a `jax.checkpoint` whose policy saves all but the gathered weights. In a scan XLA
gathers twice by itself. Rows without a goal compare what is not the same: "3 / kept", with the program that keeps; "3,
kept / first", with one that gathers all weights before the model begins.

Muon (`--muon`): stage 2 by hand, each matrix gathered once before Newton-Schulz, which every device computes for all of
them; and plain data parallelism, where nothing has to be gathered. Neither has a goal.

Policies (`--policies`): bf16 params; stage 2 with smaller state against fp32 masters and moments, stage 3 with int8
codes on the wire against 16 bits. Rounding and quantizing are arithmetic, which a CPU pays for, and its wire costs
nothing; on a GPU the update is bound by memory (docs/mixed_precision.md), and codes pay where the wire is slow
(docs/quantized.md).
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("NPROC", "32")  # XLA:CPU: fewer threads than simulated devices can wait for each other
sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax.training.train_state import TrainState
from hand import MIN_SHARD_BYTES, P, by_hand, gathering_matrices, train_step
from jax.sharding import Mesh, NamedSharding
from optax import contrib
from step_page import MEDIAN, UPPER, write

import jzero
from jzero.proof.hlo import parse
from train.gpt import matrices, owner
from train.model import GPT, Model

SIZES = {
    "tiny": (Model(width=64, layers=2, heads=1, seq=32), 16),
    "small": (Model(width=128, layers=4, heads=2, seq=64), 16),
    "medium": (Model(width=256, layers=4, heads=4, seq=64), 8),
}
"""Model and batch, in sequences over all devices."""
POLICIES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "bf16 moments": {"moment_dtype": "bfloat16"},
        "int8 moments": {"moment_dtype": "int8"},
        "int8 updates": {"update_dtype": "int8"},
        "remainders": {"master_dtype": "remainder"},
        "remainders, int8 moments": {"master_dtype": "remainder", "moment_dtype": "int8"},
    },
    3: {
        "int8 gathers": {"gather_dtype": "int8"},
        "int8 gradients": {"reduce_dtype": "int8"},
        "int8 gathers and gradients": {"gather_dtype": "int8", "reduce_dtype": "int8"},
    },
}
"""Fields of `ZeroConfig`, by stage, that make the state or what is sent smaller."""
TURN = 0.01
"""Seconds after which the two programs of a pair change places, at the earliest."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What to time and where to write it."""

    sizes: tuple[Literal["tiny", "small", "medium"], ...] = ("tiny", "small", "medium")
    """Models, see SIZES."""
    forms: tuple[Literal["unrolled", "scan"], ...] = ("unrolled", "scan")
    """Layers one after another, or one stacked layer in a loop."""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages."""
    muon: bool = False
    """Also stage 2 with Muon: against Muon by hand on gathered matrices, and with a replicated state."""
    policies: bool = False
    """Also smaller optimizer state at stage 2, and codes on the wire at stage 3; bf16 params."""
    rounds: int = 20
    """Alternating rounds; each gives one ratio."""
    seconds: float = 0.1
    """The least that a round takes for each program: as many steps as that needs."""
    devices: int = 8
    """Simulated CPU devices where there is no GPU; with GPUs all of them are used."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of params and compute. The CPU widens 16-bit arithmetic, so a time there says little."""
    out: Path = Path(__file__).parent / "results"
    """Folder of the page."""
    date: str = dataclasses.field(default_factory=lambda: datetime.date.today().isoformat())
    """Of the page."""


def creator(model: Model, *, muon: bool = False) -> Callable[[], TrainState]:
    """A function that creates the state; model and optimizer are made once, so that all its states are alike."""
    gpt, tx = GPT(model), optax.adamw(1e-3)
    if muon:
        of_blocks = contrib.muon(1e-3, consistent_rms=0.2, muon_weight_dimension_numbers=matrices)
        tx = optax.partition({"muon": of_blocks, "adamw": tx}, owner)
    tx = optax.chain(optax.clip_by_global_norm(1.0), tx)

    def create() -> TrainState:
        params = gpt.init(jax.random.key(0), jnp.zeros((1, model.seq), jnp.int32))["params"]
        return TrainState.create(apply_fn=gpt.apply, params=params, tx=tx)

    return create


# ------------------------------------------------------------------------------------------------------------
# Programs: built with their costs, then timed in turns.
# ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Program:
    """A compiled step with its state, what it took to build, and what is in it."""

    run: Callable
    state: Any
    batch: Any
    lower_seconds: float
    compile_seconds: float
    opcodes: collections.Counter
    lines: collections.Counter
    report: Any
    losses: list[float] = dataclasses.field(default_factory=list)
    steps: int = 1

    def time(self) -> float:
        """Seconds that `steps` steps take."""
        start = time.perf_counter()
        for _ in range(self.steps):
            self.state, loss = self.run(self.state, self.batch)
        jax.block_until_ready((self.state, loss))
        return time.perf_counter() - start

    def warm_up(self) -> None:
        """Three steps, whose losses are kept; then as many steps a turn as `TURN` takes."""
        for _ in range(3):
            self.state, loss = self.run(self.state, self.batch)
            self.losses.append(float(loss))
        self.steps = max(1, math.ceil(TURN / min(self.time(), self.time())))

    def twin(self) -> Program:
        """The same executable over a state of its own."""
        return dataclasses.replace(self, state=jax.tree.map(jnp.copy, self.state), losses=[])


def build(made: tuple[Any, Callable, dict[str, Any]], batch: Any) -> Program:
    """Trace three times (the least counts; the first also traces what JAX itself keeps), compile once."""
    state, step, shardings = made
    times = []
    for _ in range(3):
        jitted = jax.jit(lambda *args: step(*args), donate_argnums=0, **shardings)  # new: nothing is cached
        start = time.perf_counter()
        lowered = jitted.lower(state, batch)
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    text = compiled.as_text()
    module = parse(text)
    opcodes = collections.Counter(i.opcode for c in module.computations.values() for i in c.schedule)
    return Program(
        compiled, state, batch, min(times), seconds, opcodes, bare_lines(text), jzero.explain(compiled)
    )


def bare_lines(text: str) -> collections.Counter:
    """The lines of all computations, in any order, without the names, channels and metadata that tell no work."""
    text = text[text.index("\n%") :]
    return collections.Counter(
        re.sub(
            r"%[\w.\-]+|[\w.\-]+: (?=\w+\[|\()|, channel_id=\d+|, metadata=\{[^}]*\}", "", text
        ).splitlines()
    )


def batch_of(model: Model, rows: int, mesh: Mesh) -> dict[str, jax.Array]:
    """Random tokens, split over the devices."""
    tokens = np.random.default_rng(0).integers(0, 256, (rows, model.seq + 1), np.int32)
    return {"tokens": jax.device_put(tokens, NamedSharding(mesh, P("data")))}


def programs(model: Model, rows: int, stages: Sequence[int]) -> dict[str, Program]:
    """Every program of one model, by name: `one device`, `hand 0`, `jzero 0`, ..."""
    mesh, create = Mesh(np.array(jax.devices()), ("data",)), creator(model)
    batch = batch_of(model, rows, mesh)
    alone = jax.device_put(batch, jax.devices()[0])
    found = {"one device": build((jax.jit(create)(), train_step, {}), alone)}

    def ours(stage: int, **fields: Any) -> Program:
        state = jzero.shard(create, stage=stage, mesh=mesh, min_shard_bytes=MIN_SHARD_BYTES, **fields)
        return build((state, train_step, {}), batch)

    for stage in sorted({0, *stages}):
        found[f"hand {stage}"] = build(by_hand(stage, create, mesh), batch)
        if stage in stages:
            found[f"jzero {stage}"] = ours(stage)
    if 3 in stages:
        found["jzero 3, kept"] = ours(3, reshard_after_forward=False)
        for how in ("first",) if model.scan else ("first", "twice"):
            found[f"hand 3, {how}"] = build(by_hand(3, create, mesh, gathered=how), batch)
    return found


def with_muon(model: Model, rows: int) -> list[tuple[str, bool, tuple[Program, Program]]]:
    """Stage 2 with Muon, against two written by hand: see the note."""
    mesh, create = Mesh(np.array(jax.devices()), ("data",)), creator(model, muon=True)
    batch = batch_of(model, rows, mesh)
    state = jzero.shard(create, stage=2, mesh=mesh, min_shard_bytes=MIN_SHARD_BYTES)
    ours = build((state, train_step, {}), batch)
    state, step, shardings = by_hand(2, create, mesh)
    gathered = build((state, gathering_matrices(step, mesh), shardings), batch)
    replicated = build(by_hand(0, create, mesh), batch)
    return [
        ("2, Muon / by hand", False, (ours, gathered)),
        ("2, Muon / replicated", False, (ours, replicated)),
    ]


def with_policies(model: Model, rows: int, stages: Sequence[int]) -> list[tuple[str, bool, tuple[Program, Program]]]:
    """Each of `POLICIES` against the same stage without it."""
    mesh, create = Mesh(np.array(jax.devices()), ("data",)), creator(dataclasses.replace(model, dtype="bfloat16"))
    batch = batch_of(model, rows, mesh)

    def stored(stage: int, **fields: Any) -> Program:
        state = jzero.shard(create, stage=stage, mesh=mesh, min_shard_bytes=MIN_SHARD_BYTES, **fields)
        return build((state, train_step, {}), batch)

    found = []
    for stage in sorted({*stages} & {*POLICIES}):
        wide = stored(stage)
        for name, fields in POLICIES[stage].items():
            found.append((f"{stage}, {name} / without", False, (stored(stage, **fields), wide)))
    return found


@dataclasses.dataclass(frozen=True)
class Pair:
    """One comparison: `seconds` of the two programs per step, f64[rounds] each; `goal`: of jzero with its equal."""

    model: str
    label: str
    programs: tuple[Program, Program]
    seconds: tuple[np.ndarray, np.ndarray]
    goal: bool = True

    @property
    def ratios(self) -> np.ndarray:
        """First over second, one per round."""
        return self.seconds[0] / self.seconds[1]

    @property
    def ms(self) -> tuple[float, float]:
        """Medians, in milliseconds."""
        return float(np.median(self.seconds[0]) * 1e3), float(np.median(self.seconds[1]) * 1e3)

    @functools.cached_property
    def summary(self) -> tuple[float, float, float]:
        """Median ratio and the ends of its interval."""
        return (float(np.median(self.ratios)), *bootstrap(self.ratios))

    @property
    def met(self) -> bool:
        """Whether the goal is met: one program cannot be slower than itself, else by the ratio."""
        median, _, upper = self.summary
        return self.same or (median <= MEDIAN and upper <= UPPER)

    @property
    def same(self) -> bool:
        """Whether both programs are made of the same instructions, names, channels and order aside."""
        a, b = self.programs
        return a.lines == b.lines

    @property
    def loss_difference(self) -> float:
        """Largest relative difference of the losses of the first three steps."""
        a, b = (np.array(p.losses) for p in self.programs)
        return float(np.max(np.abs(a - b) / np.abs(b)))


def bootstrap(values: np.ndarray, *, level: float = 0.95, draws: int = 10_000) -> tuple[float, float]:
    """The interval of the median at `level`, from medians of resampled values; the same draws every time."""
    picks = np.random.default_rng(0).choice(np.asarray(values), (draws, len(values)))
    low, high = np.quantile(np.median(picks, axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def pairs_of(
    found: dict[str, Program], stages: Sequence[int]
) -> list[tuple[str, bool, tuple[Program, Program]]]:
    """What is compared with what: label, whether it has a goal, first and second."""
    plain = found["hand 0"]
    pairs = [
        ("the same program twice", False, (plain.twin(), plain.twin())),
        ("plain Flax, all devices / one", False, (plain, found["one device"])),
    ]
    pairs += [(str(s), True, (found[f"jzero {s}"], found[f"hand {s}"])) for s in stages if s < 3]
    if 3 not in stages:
        return pairs
    dropped, kept, by_hand = found["jzero 3"], found["jzero 3, kept"], found["hand 3"]
    if "hand 3, twice" in found:
        pairs += [("3", True, (dropped, found["hand 3, twice"])), ("3, kept", True, (kept, by_hand))]
        pairs += [("3 / kept", False, (dropped, by_hand))]
    else:
        pairs += [("3", True, (dropped, by_hand))]
    return [*pairs, ("3, kept / first", False, (kept, found["hand 3, first"]))]


def measure(config: Config) -> list[Pair]:
    """Builds and times all pairs."""
    done = []
    for size in config.sizes:
        for form in config.forms:
            model, rows = SIZES[size]
            model = dataclasses.replace(model, scan=form == "scan", dtype=config.dtype)
            pairs = pairs_of(programs(model, rows, config.stages), config.stages)
            pairs += with_muon(model, rows) if config.muon else []
            pairs += with_policies(model, rows, config.stages) if config.policies else []
            for program in {id(p): p for *_, both in pairs for p in both}.values():
                program.warm_up()
            times = in_turns([both for *_, both in pairs], config)
            for (label, goal, both), seconds in zip(pairs, times, strict=True):
                done.append(Pair(f"{size}, {form}", label, both, seconds, goal))
                print(f"{done[-1].model:17} {label:30} {done[-1].summary[0]:.3f}", flush=True)
    return done


def in_turns(pairs: Sequence[Sequence[Program]], config: Config) -> list[tuple[np.ndarray, np.ndarray]]:
    """Seconds per step of both programs of each pair, f64[rounds]."""
    seconds = np.zeros((len(pairs), 2, config.rounds))
    for i in range(config.rounds):
        for k, pair in enumerate(pairs):
            seconds[k, :, i] = one_round(pair, i, config.seconds)
    return [(a, b) for a, b in seconds]


def one_round(pair: Sequence[Program], first: int, seconds: float) -> list[float]:
    """Seconds per step of both; turns until each had its `seconds`, the order swapped from turn to turn."""
    spent, turns = [0.0, 0.0], 0
    while not turns or min(spent) < seconds:
        for side in (0, 1) if (first + turns) % 2 == 0 else (1, 0):
            spent[side] += pair[side].time()
        turns += 1
    return [s / turns / p.steps for s, p in zip(spent, pair, strict=True)]


def main(args: Sequence[str] | None = None) -> Path:
    """The command line: devices are set up here, before JAX is first used."""
    began, flags = time.perf_counter(), list(sys.argv[1:] if args is None else args)
    config = tyro.cli(Config, args=flags)
    warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
    jax.config.update("jax_num_cpu_devices", config.devices)  # where there are GPUs, they are used instead
    # steps in flight together starve each other of threads on two cores, and XLA then aborts the process
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    pairs = measure(config)
    path = write(config, pairs, whole_below=MIN_SHARD_BYTES, flags=flags, seconds=time.perf_counter() - began)
    print(path)
    return path


if __name__ == "__main__":
    main()
