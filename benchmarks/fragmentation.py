"""Where XLA put every buffer of a compiled train step: how many allocations it needs, what is lost between them.

    python benchmarks/fragmentation.py               # stages 1 to 3, unrolled and scanned layers, for 8 H200; no GPU
    python benchmarks/fragmentation.py --stages 2 --layers unrolled

XLA writes its buffer assignment beside a program that it compiles: for every allocation the values that lie in it, with
their offsets, and for every value the part of the schedule in which it is alive. Nothing is placed while a step runs.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import re
import sys
import tempfile
from pathlib import Path

if not __package__:  # run as a script: import from the repository
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jzero
from train.model import GPT, Model

ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (?:page \d+, )?(.*):$")  # pages: jaxlib 0.12
VALUE = re.compile(r"^ value: <\d+ (\S+)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)")
ALIVE = re.compile(r"^    (\S+?)(\{[\d,]*\})?:(\d+)-(\d+)$")


@dataclasses.dataclass(frozen=True)
class Allocation:
    """One block of device memory.

    Attributes:
      size: bytes.
      kind: what XLA calls it: `parameter ...`, `preallocated-temp`, `constant`, `thread-local`.
      values: (name, size, offset) of all that lies in it, at one time or another.
    """

    size: int
    kind: str
    values: list[tuple[str, int, int]]


def assignment(text: str) -> list[Allocation]:
    """The allocations in the text that XLA writes."""
    found: list[Allocation] = []
    for line in text.splitlines():
        if head := ALLOCATION.match(line):
            found.append(Allocation(int(head[1]), head[2], []))
        elif (value := VALUE.match(line)) and found:
            found[-1].values.append((value[1], int(value[2]), int(value[3])))
        elif line and not line.startswith((" ", "allocation")) and found:
            break  # what follows lists the values again
    return found


def most_alive(temp: Allocation, ranges: str) -> int:
    """Most bytes of an allocation that are in use at one moment of the schedule."""
    times = {m[1] + (m[2] or ""): (int(m[3]), int(m[4])) for m in map(ALIVE.match, ranges.splitlines()) if m}
    events: dict[int, list[tuple[int, int, bool]]] = collections.defaultdict(list)
    for name, size, offset in temp.values:
        first, last = times.get(name, times.get(name + "{}", (0, -1)))
        if last >= first:
            events[first].append((offset, size, True))
            events[last + 1].append((offset, size, False))
    held: collections.Counter[tuple[int, int]] = collections.Counter()
    most = 0
    for moment in sorted(events):
        for offset, size, begins in events[moment]:
            held[offset, size] += 1 if begins else -1
        most = max(most, _covered(span for span, count in held.items() if count > 0))
    return most


def _covered(spans) -> int:
    """Bytes in any of these (offset, size)."""
    total, end = 0, 0
    for offset, size in sorted(spans):
        total += max(0, offset + size - max(end, offset))
        end = max(end, offset + size)
    return total


def compiled(stage: int, scan: bool, folder: str, *, donate: bool = True):
    """(the compiled step of a small GPT, its plan); XLA's files are in `folder`."""
    config = Model(width=1024, layers=8, heads=8, seq=1024, dtype="bfloat16", remat=True, scan=scan)
    model = GPT(config)

    def create():
        params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def step(state, tokens):
        def loss_of(params):
            logits = state.apply_fn({"params": params}, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    pod = jzero.pod("h200", hosts=1, gpus_per_host=8)
    state = jzero.abstract(create, stage=stage, mesh=pod.mesh({"data": 8}))
    tokens = jax.ShapeDtypeStruct((8, config.seq + 1), jnp.int32)
    options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
    jitted = jax.jit(step, donate_argnums=0 if donate else ())
    return pod.compile(jitted, state, tokens, compiler_options=options), jzero.plan_of(state)


def row(stage: int, scan: bool, *, donate: bool = True) -> str:
    """One line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        compiled(stage, scan, folder, donate=donate)
        text = next(Path(folder).glob("*buffer-assignment.txt")).read_text()
        ranges = next(Path(folder).glob("*live-range.txt")).read_text()
    found = [a for a in assignment(text) if a.kind != "thread-local"]
    given = [a for a in found if a.kind.startswith("parameter")]
    reused = [a for a in given if "maybe-live-out" in a.kind]
    temps = [a for a in found if "temp" in a.kind]
    results = [a for a in found if a not in given and "maybe-live-out" in a.kind]
    assert len(temps) == 1, [a.kind for a in temps]
    temp, alive = temps[0], most_alive(temps[0], ranges)
    values = [v for v in temp.values if v[1]]
    lodgers = sum(size for a in reused for _, size, _ in a.values[1:] if size >= 2**16)
    form = "scan" if scan else "unrolled"
    return (
        f"| {stage} | {form} | {'yes' if donate else 'no'} | {len(given)}, {_mb(given)} | {len(results)}, "
        f"{_mb(results)} | {temp.size / 1e6:.1f} MB | {len(values)}, {sum(v[1] for v in values) / 1e6:.0f} MB | "
        f"{100 * (temp.size / alive - 1):.2f} % | {lodgers / 1e6:.0f} MB |"
    )


def _mb(allocations: list[Allocation]) -> str:
    return f"{sum(a.size for a in allocations) / 1e6:.1f} MB"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stages", default="1,2,3")
    parser.add_argument("--layers", default="unrolled,scan")
    args = parser.parse_args()
    print(
        "| stage | layers | donated | arguments | new results | temp | buffers that share it | lost at the peak "
        "| written to donated arguments |\n|---|---|---|---|---|---|---|---|---|"
    )
    for form in args.layers.split(","):
        for stage in map(int, args.stages.split(",")):
            print(row(stage, form == "scan"), flush=True)
    print(row(2, False, donate=False))
    print(f"\n8 layers of width 1024, 1024 tokens per device, 8 H200; jax {jax.__version__}")


if __name__ == "__main__":
    main()
