"""Train train/gpt.py for 300 steps in each precision, and draw the losses beside those of fp32. No GPU is needed.

python docs/make_precision.py            # docs/precision.png, and a table of losses
python docs/make_precision.py --steps 50 --out /tmp/precision.png
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("NPROC", "32")  # XLA:CPU: fewer threads than simulated devices can wait for each other
sys.path[0] = str(Path(__file__).resolve().parents[1])

import jax
import numpy as np

from docs.tiny import TINY, run
from train.config import Optim
from train.model import Model

MEAN = 20  # steps that a point of the curve is the mean of
BF16 = {"dtype": "bfloat16"}
RUNS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # stage, fields of the model, of the run
    "fp32": (2, {}, {}),
    "fp32, another seed": (2, {}, {"seed": 1}),
    "fp32 params, layers in bf16": (3, BF16 | {"param_dtype": "float32"}, {}),
    "bf16 params": (2, BF16, {}),
    "bf16 params, stage 3": (3, BF16, {}),
    "bf16 params, moment_dtype=bf16": (2, BF16, {"moment_dtype": "bfloat16"}),
    "fp16 params, LossScale": (2, {"dtype": "float16"}, {}),
}


def losses(name: str, steps: int) -> np.ndarray:
    """The loss of every step of one run, f64[steps], in nats per byte."""
    stage, model, fields = RUNS[name]
    optim = Optim(lr=3e-3, warmup=50, b2=0.999)
    result = run(steps, stage=stage, model=dataclasses.replace(TINY.model, **model), optim=optim, **fields)
    return np.asarray([loss for _, loss in result.losses])


def smooth(values: np.ndarray) -> np.ndarray:
    """Means over `MEAN` steps."""
    return np.convolve(values, np.ones(MEAN) / MEAN, mode="valid")


def draw(found: dict[str, np.ndarray], path: Path) -> None:
    """The curves, and below them their distance from fp32."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7, 6), sharex=True, layout="constrained", height_ratios=(3, 2)
    )
    steps = np.arange(MEAN, len(found["fp32"]) + 1)
    for name, values in found.items():
        style: dict[str, Any] = {"linewidth": 1.2}
        if name == "fp32":
            style = {"color": "black", "linewidth": 2}
        elif "seed" in name:
            style |= {"color": "#999999", "linestyle": ":"}
        above.plot(steps, smooth(values), label=name, **style)
        if name != "fp32":
            below.plot(steps, smooth(values - found["fp32"]), **style)
    above.set(ylabel="loss (nats per byte)", ylim=(None, float(np.quantile(found["fp32"], 0.9))))
    below.set(xlabel="step", ylabel="minus fp32", ylim=(-0.02, 0.02))
    above.legend(frameon=False, fontsize=8)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run, print the table, write the plot."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("precision.png"))
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    found: dict[str, np.ndarray] = {}
    print(
        f"| run | stage | mean loss of the last {2 * MEAN} steps | largest distance from fp32 |\n|---|---|---|---|"
    )
    for name in RUNS:
        found[name] = losses(name, args.steps)
        apart = np.abs(smooth(found[name] - found["fp32"])).max()
        print(
            f"| {name} | {RUNS[name][0]} | {found[name][-2 * MEAN :].mean():.4f} | {apart:.4f} |", flush=True
        )
    model: Model = TINY.model
    print(
        f"\n{args.steps} steps, {model.layers} layers of width {model.width}; distances are of means over {MEAN} "
        f"steps; jax {jax.__version__}"
    )
    draw(found, args.out)
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
