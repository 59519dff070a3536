"""Whether `jzero.fit` finds what an exhaustive search finds, and whether compiling agrees.

    python benchmarks/fit.py                       # by closed forms alone: 13 models x 4 pods x 2 batches, 2 hours
    python benchmarks/fit.py --compile 12          # and of 12 sampled cells the choice and the next faster, compiled
    python benchmarks/fit.py --compile 12 --only-sampled    # these alone, about an hour
    python benchmarks/fit.py --models gpt2-xl --pods h100:2

Each line is a cell: the choice, its modelled time beside the best of all options that fit by the closed forms (at most
1.05 is asked for), how many options there are, and what was compiled.
"""

from __future__ import annotations

import dataclasses
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import jzero  # noqa: I001  (before jax)
from jzero.cli.presets import PRESETS
from jzero.proof.fitting.candidates import Candidate, Task
from jzero.proof.fitting.fit import HOST_BYTES, Search
from jzero.proof.fitting.options import Option
from jzero.proof.fitting.rates import GPUS
from jzero.proof.pod import JAX_TAKES
import tyro
from benchmarks.catalogue import ENTRIES, preset_entry


@dataclasses.dataclass(frozen=True)
class Config:
    """What is compared."""

    models: tuple[str, ...] = tuple(ENTRIES)
    """Of `benchmarks/catalogue.py`, or presets of `jzero plan`."""
    pods: tuple[str, ...] = ("a100-80gb:1", "h100:2", "b200:4", "h200:8")
    """GPU and hosts."""
    each: tuple[int, ...] = (1, 8)
    """Examples of a GPU in a step."""
    compile: int = 0
    """Cells to compile."""
    only_sampled: bool = False
    """Leave out the cells that are not compiled."""
    seed: int = 0


class ByClosedForms(Task):
    """Uses the estimate in place of a compiled program."""

    def compiled_bytes(self, option: Option) -> int:
        """As estimated."""
        return self.candidate(option).estimate.total


def main(config: Config) -> None:
    """Prints a line for each cell, and how many agree."""
    cells = [(m, p, n) for m in config.models for p in config.pods for n in config.each]
    sample = set(random.Random(config.seed).sample(range(len(cells)), min(config.compile, len(cells))))
    agree = refuted = 0
    print("model, pod, examples per GPU | choice | ms | ms / best | options | seconds")
    shown = [(k, cell) for k, cell in enumerate(cells) if k in sample or not config.only_sampled]
    for number, cell in shown:
        began, task = time.perf_counter(), task_of(ByClosedForms, *cell)
        limit = JAX_TAKES * task.pod.memory_bytes
        search = searched(task, limit)
        best, every = search.best(), [*(known := task.candidates()), *task.smaller(known, lower_precision=False)]
        fitting = [c for c in every if c.estimate.total <= limit and c.estimate.host_per_node <= HOST_BYTES]
        least = min((c.seconds.total for c in fitting), default=None)
        ratio = best.seconds.total / least if best is not None and least is not None else 1.0
        good = (best is None) == (least is None) and ratio <= 1.05
        agree += good
        row = ["nothing fits", "-", "-"]
        if best is not None:
            row = [str(best.option), f"{1e3 * best.seconds.total:.1f}", f"{ratio:.3f}"]
        row += [str(len(every)), f"{time.perf_counter() - began:.0f}", *([] if good else ["WORSE"])]
        print(" | ".join([f"{cell[0]}, {cell[1]}, {cell[2]}", *row]), flush=True)
        if number in sample:
            refuted += confirmed(cell, limit)
    print(f"{agree} of {len(shown)} cells within 5 % of the exhaustive search", end="")
    print(f"; {len(sample) - refuted} of {len(sample)} confirmed by compiling" if sample else "")


def task_of(kind: type[Task], model: str, pod: str, each: int) -> Task:
    """A cell."""
    (gpu, hosts), entry = pod.split(":"), preset_entry(model) if model in PRESETS else ENTRIES[model]
    machine = jzero.pod(gpu, hosts=int(hosts))
    batch = entry.batch(each * len(machine.devices))
    return kind(entry.create, entry.step, (batch,), machine, GPUS[gpu], entry.sizes)


def searched(task: Task, limit: float) -> Search:
    """The search, run to its end."""
    search = Search(task, limit, HOST_BYTES, 4, lambda text: None, lower_precision=False)
    search.run()
    return search


def confirmed(cell: tuple[str, str, int], limit: float) -> bool:
    """Compiles the choice and the nearest faster one; True if one of them is not as was said."""
    began, search = time.perf_counter(), searched(task_of(Task, *cell), limit)
    found = search.result()
    if found.best is None:
        print("   compiled: nothing fits")
        return False
    said = [f"{found.best.option}: {found.compiled[found.best] / 1e9:.2f} GB of {limit / 1e9:.2f}"]
    wrong = found.compiled[found.best] > limit
    faster = next((c for c in found.refused if c.estimate.host_per_node <= HOST_BYTES), None)
    if faster is not None:
        size = bytes_of(search, faster)
        wrong |= size <= limit
        said.append(f"faster {faster.option}: {size / 1e9:.2f} GB")
    said += ["WRONG"] if wrong else []
    took = time.perf_counter() - began
    print(f"   compiled ({len(found.compiled)} programs, {took:.0f} s): {'; '.join(said)}", flush=True)
    return wrong


def bytes_of(search: Search, c: Candidate) -> int:
    """Compiled bytes of one device."""
    return search.compiled[c] if c in search.compiled else search.task.compiled_bytes(c.option)


if __name__ == "__main__":
    main(tyro.cli(Config))
