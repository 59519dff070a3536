"""What low precision costs in loss: train/gpt.py at its default size, 1,000 steps, for each policy and several seeds.

    python benchmarks/losses.py                     # about 50 minutes on two idle cores; stopped, it goes on
    python benchmarks/losses.py --only wire --page benchmarks/results/losses.md --picture benchmarks/results/losses.png

A run is `python -m train.gpt` with the flags of its row. Its folder stays in --out, and a run that has ended there is
not repeated. The table has the held-out losses beside those of bf16 params, and how far seeds are apart; the picture
has the training losses of seed 0, and their distance from the baseline.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parents[1]
BASE = "bf16 params"
RECOMMENDED = 0.005
"""The largest relative increase of the held-out loss at which a policy is recommended."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """A row: flags of train/gpt.py beside bf16 params, how many seeds, and the group that --only names."""

    flags: str
    seeds: int = 1
    group: str = "state"


POLICIES = {
    BASE: Policy("", 3),
    "sums in another order": Policy("--devices 4"),
    "masters as remainders": Policy("--master-dtype remainder"),
    "int8 moments": Policy("--moment-dtype int8"),
    "bf16 moments": Policy("--moment-dtype bfloat16", 3),
    "remainders, int8 moments": Policy("--master-dtype remainder --moment-dtype int8", 3),
    "stage 3": Policy("--stage 3", group="wire"),
    "int8 gathers": Policy("--stage 3 --gather-dtype int8", group="wire"),
    "int8 gradients": Policy("--stage 3 --reduce-dtype int8", group="wire"),
    "int8 gathers and gradients": Policy("--stage 3 --gather-dtype int8 --reduce-dtype int8", 3, "wire"),
    "int8 updates": Policy("--update-dtype int8", 3, "wire"),
}


@dataclasses.dataclass(frozen=True)
class Losses:
    """Of one run, in nats per byte: the last held-out loss, and the mean training loss of every 25 steps."""

    heldout: float
    training: list[float]


def run(policy: Policy, seed: int, folder: Path, steps: int) -> Losses:
    """A run that has ended in this folder, or now does.

    Raises RuntimeError, with the end of what it printed, if it fails.
    """
    flags = ["--param-dtype", "bfloat16", *policy.flags.split(), "--seed", str(seed), "--steps", str(steps)]
    command = ["-m", "train.gpt", *flags, "--eval-every", str(steps), "--save-every", str(steps), "--out", str(folder)]
    done = folder / "ended.json"
    if not done.exists() or json.loads(done.read_text()) != flags:
        text = subprocess.run(
            [sys.executable, *command, "--overwrite"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if text.returncode:
            raise RuntimeError(f"python {' '.join(command)}\n{(text.stdout + text.stderr)[-2000:]}")
        done.write_text(json.dumps(flags))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Losses(
        heldout=[row["heldout_loss"] for row in rows if "heldout_loss" in row][-1],
        training=[row["mean_loss"] for row in rows if "mean_loss" in row],
    )


def table(found: dict[str, list[Losses]], steps: int) -> str:
    """Held-out losses, and the mean over seeds of their increase over the baseline with the same seed."""
    base = [x.heldout for x in found[BASE]]
    mean = statistics.mean(base)
    lines = [
        f"`python -m train.gpt --param-dtype bfloat16 --steps {steps}` and the flags of the row, on 8 simulated "
        f"devices, jax {jax.__version__}. Losses are in nats per byte of held-out text, compared seed by seed. The "
        f"seeds of the baseline are {(max(base) - min(base)) / mean:.1%} apart. The row with 4 devices shows what "
        "rounding alone does.\n",
        "| policy | flags | seeds | held-out loss | against the baseline |",
        "|---|---|---|---|---|",
    ]
    for name, losses in found.items():
        values = [x.heldout for x in losses]
        paired = statistics.mean(v / b - 1 for v, b in zip(values, base, strict=False))  # seed by seed
        verdict = "" if name == BASE else f"{paired:+.2%}" + (", not recommended" if paired > RECOMMENDED else "")
        lines.append(
            f"| {name} | {f'`{POLICIES[name].flags}`' if POLICIES[name].flags else ''} | {len(values)} | "
            f"{', '.join(f'{v:.4f}' for v in values)} | {verdict} |"
        )
    return "\n".join(lines)


def draw(found: dict[str, list[Losses]], path: Path, steps: int) -> None:
    """The training losses of seed 0, and below them their distance from the baseline, a mean over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    curves = {name: [np.asarray(x.training) for x in losses] for name, losses in found.items()}
    base = curves[BASE]
    at = np.linspace(0, steps, len(base[0]) + 1)[1:]
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    for name, losses in curves.items():
        style = {"color": "black", "linewidth": 2} if name == BASE else {"linewidth": 1.2}
        above.plot(at, losses[0], label=name, **style)
        below.plot(at, np.mean([x - b for x, b in zip(losses, base, strict=False)], 0), **style)
    above.set(ylabel="loss (nats per byte), seed 0", ylim=(None, float(np.quantile(base[0], 0.9))))
    below.set(xlabel="step", ylabel=f"minus {BASE}, mean over seeds", ylim=(-0.02, 0.02))
    above.legend(frameon=False, fontsize=8)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run the policies that have no result yet, print the table, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", choices=("state", "wire"), help="the baseline and one group of policies")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "losses")
    parser.add_argument("--page", type=Path, help="write the table here too")
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    found: dict[str, list[Losses]] = {}
    for name, policy in POLICIES.items():
        if args.only in (None, policy.group) or name == BASE:
            for seed in range(policy.seeds):
                folder = args.out / f"{name.replace(' ', '-').replace(',', '')}-{seed}"
                found.setdefault(name, []).append(run(policy, seed, folder, args.steps))
                print(f"{name}, seed {seed}: {found[name][-1].heldout:.4f}", flush=True)
    text = table(found, args.steps)
    print(f"\n{text}")
    if args.picture:
        draw(found, args.picture, args.steps)
        text += f"\n\n![Training losses, and their distance from the baseline]({args.picture.name})"
    if args.page:
        ran = f"Printed by `python benchmarks/losses.py`, Python {platform.python_version()}. No GPU has run it."
        args.page.write_text(f"# What low precision costs in loss\n\n{text}\n\n{ran}\n")


if __name__ == "__main__":
    main()
