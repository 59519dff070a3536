"""Train train/gpt.py with AdamW and with Muon, and print their losses. No GPU is needed.

    python docs/make_muon.py --out /tmp/muon.jsonl             # 14 runs of 300 steps: 8 minutes on two busy cores
    python docs/make_muon.py --out /tmp/muon.jsonl --steps 50

Seed 0 is run at each learning rate, the other seeds at the rate at which seed 0 ended lowest, for each optimizer.
What `--out` holds is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path

os.environ.setdefault("NPROC", "32")  # XLA:CPU: fewer threads than simulated devices can wait for each other
sys.path[0] = str(Path(__file__).resolve().parents[1])

import jax
import numpy as np

from benchmarks.resumed import resumed
from docs.tiny import TINY, run

OPTIMIZERS = ("adamw", "muon")
RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2)
SEEDS = (0, 1, 2)


def heldout(optimizer: str, rate: float, seed: int, steps: int) -> float:
    """The held-out loss at the end of a run of the preset `tiny`, in nats per byte."""
    optim = dataclasses.replace(TINY.optim, optimizer=optimizer, lr=rate)
    return run(steps, seed=seed, sample_bytes=1, optim=optim).heldout[-1][1]


def main() -> None:
    """Run what is not there yet, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, required=True, help="a file of JSON lines")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    loss = resumed(args.out, heldout)
    print(f"| optimizer | {' | '.join(f'lr {r:g}' for r in RATES)} | seeds 0, 1, 2 at the best | mean |")
    print("|---|" + "---|" * (len(RATES) + 2))
    for optimizer in OPTIMIZERS:
        tried = [loss(optimizer, rate, 0, args.steps) for rate in RATES]
        best = RATES[int(np.argmin(tried))]
        ends = [loss(optimizer, best, seed, args.steps) for seed in SEEDS]
        cells = " | ".join(f"{x:.3f}" for x in tried)
        print(
            f"| {optimizer} | {cells} | {', '.join(f'{x:.3f}' for x in ends)} | {np.mean(ends):.3f} |",
            flush=True,
        )
    print(f"\nHeld-out loss in nats per byte after {args.steps} steps; jax {jax.__version__}")


if __name__ == "__main__":
    main()
