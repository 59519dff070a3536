"""Draws docs/pictures/architecture.svg: jzero's packages from top to bottom, and what travels through them.

    python docs/make_architecture.py     # a second or two; needs matplotlib

The packages are the layers of pyproject.toml, which CI checks; what each is for is written here.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PURPOSE = {
    "cli": "jzero plan, explain, verify, export, deepspeed",
    "proof": "pods and compiled programs, read",
    "checkpoint": "save and restore in any layout",
    "flax": "shard: a train state taken apart, laid out, put together",
    "optim": "zero(tx, plan): the optax transformation",
    "deepspeed": "a ds_config.json as settings of jzero",
    "gradients": "value_and_grad: micro-batches, loss scale",
    "update": "one update on shards, in the program or on the host",
    "offload": "which state lives in host memory, and whether it fits",
    "stream": "host arrays through the device in bounded pieces",
    "activations": "remat: what a block keeps",
    "gather": "a weight gathered at its use",
    "comm": "WeightGather, GradientReduce, UpdateGather; transports",
    "sharding": "Plan: where every leaf lives",
    "layout": "shapes to PartitionSpecs; meshes; placement",
    "config": "ZeroConfig; the table of stages",
    "core": "jaxprs, JAX's internals, errors",
}
WAYS = {
    "a state": [
        "TrainState or\nNNX pair", "flax/\ntakes apart", "sharding.py\nplan", "layout/\nplacement",
        "flax/\nputs together",
    ],
    "a weight": [
        "stored shard", "gather/\nfinds its use", "comm/\nWeightGather", "used, then\ndropped or kept",
        "gathered again\nif dropped",
    ],
    "a gradient": [
        "made in the\nbackward pass", "comm/\nGradientReduce", "update/\non shards", "comm/\nUpdateGather", "param",
    ],
}  # fmt: skip
COLORS = ("#CFE3F1", "#F4D9C6", "#CDEBDF")  # as in make_pictures.py
EDGE, ARROW = "#777777", "#D55E00"


def layers() -> list[list[str]]:
    """The packages of each layer, from the top, as CI checks them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = project["tool"]["importlinter"]["contracts"]
    return [[name.strip() for name in row.split("|")] for row in contract["layers"]]


def box(axes, left: float, bottom: float, width: float, color: str) -> None:
    axes.bar(left, 0.8, width=width, bottom=bottom, align="edge", color=color, edgecolor=EDGE, linewidth=0.6)


def draw_layers(axes) -> None:
    """One row for each layer, and the direction of imports."""
    rows = layers()
    for at, names in enumerate(rows):
        bottom, width = len(rows) - at, 10 / len(names)
        for place, name in enumerate(names):
            left = place * width
            box(axes, left, bottom, width - 0.08, "#F5F5F5")
            title = f"{name}/" if (ROOT / "jzero" / name).is_dir() else f"{name}.py"
            axes.text(left + 0.12, bottom + 0.4, title, va="center", weight="bold")
            axes.text(left + 1.45, bottom + 0.4, PURPOSE[name], va="center")
    arrow = {"arrowstyle": "->", "color": ARROW}
    axes.annotate("", xy=(10.25, 1), xytext=(10.25, len(rows) + 0.8), arrowprops=arrow)
    axes.text(10.4, len(rows) / 2 + 1, "imports go down only", rotation=270, va="center")
    axes.set(xlim=(0, 10.7), ylim=(0.9, len(rows) + 1))


def draw_ways(axes) -> None:
    """One row for each thing that travels, from left to right."""
    for row, ((name, steps), color) in enumerate(zip(WAYS.items(), COLORS, strict=True)):
        bottom = 1.1 * (len(WAYS) - row)
        axes.text(0, bottom + 0.4, name, va="center", weight="bold")
        for place, step in enumerate(steps):
            left = 1.25 + place * 1.9
            box(axes, left, bottom, 1.6, color)
            axes.text(left + 0.8, bottom + 0.4, step, ha="center", va="center")
            if place:
                axes.annotate(
                    "",
                    xy=(left, bottom + 0.4),
                    xytext=(left - 0.3, bottom + 0.4),
                    arrowprops={"arrowstyle": "->"},
                )
    axes.set(xlim=(0, 10.7), ylim=(1, 4.2))


def main(path: Path = ROOT / "docs" / "pictures" / "architecture.svg") -> None:
    """Draw both halves into one file, text as text."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "jzero", "font.size": 10})
    sizes = {"height_ratios": [5, 1.7]}
    figure, (top, below) = plt.subplots(2, 1, figsize=(9, 9.5), layout="constrained", gridspec_kw=sizes)
    draw_layers(top)
    draw_ways(below)
    for axes in (top, below):
        axes.axis("off")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
