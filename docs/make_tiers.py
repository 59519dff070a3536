"""Draws docs/pictures/tiers.svg, where each setting of `Offload` keeps what, and prints the table of docs/offload.md.

    python docs/make_tiers.py     # a few seconds, no GPU; needs matplotlib

The figures are the closed form's, `jzero.estimate`: bytes per parameter for bf16 params and Adam with an fp32 master.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # import jzero from the repository, wherever the shell stands
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jzero

N, SHAPES = 8, [(1024, 1024)] * 8
DISK: dict[str, Any] = {"tier": "disk", "path": "state"}
SETTINGS = {
    "no offload": None,
    '"host"': {},
    'update="host"': {"update": "host"},
    'tier="disk"': DISK,
    'params="host"': {"params": "host"},
    'params="host",\nupdate="host"': {"params": "host", "update": "host"},
    'params="host",\ntier="disk"': {"params": "host", **DISK},
}
ARROW = {"arrowstyle": "->", "color": "#D55E00"}
TIERS = {"device": "#CFE3F1", "host": "#CDEBDF", "disk": "#F4D9C6"}  # as in make_pictures.py


def estimated(options: dict[str, Any] | None) -> jzero.Estimate:
    """The closed form of one setting at stage 3."""

    def create():
        params = {f"w{i}": jnp.zeros(s, jnp.bfloat16) for i, s in enumerate(SHAPES)}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

    offload = None if options is None else jzero.Offload(**options)
    mesh = jax.make_mesh((N,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jzero.estimate(jzero.plan_of(jzero.abstract(create, stage=3, mesh=mesh, offload=offload)))


def held(options: dict[str, Any] | None) -> dict[str, str]:
    """What each tier keeps, in words."""
    given = options or {}
    disk, outside = given.get("tier") == "disk", given.get("tier") == "disk" or "update" in given
    state = "device" if options is None else "disk" if disk else "host"
    names = {tier: list[str]() for tier in TIERS}
    names[given.get("params", "device")] += ["params", "gradients"]
    names[state] += ["masters", "moments"]
    if outside and "params" not in given:
        names["host"].insert(0, "gradients")
    if "params" in given:
        names["device"] += ["weights in use"]
    if disk:
        names["host"] += ["buffer, 1 GiB"]
        names["disk"] += ["(two slots)"]
    return {tier: "\n".join(found) for tier, found in names.items()}


def row(options: dict[str, Any] | None) -> dict[str, float]:
    """Bytes per parameter: on the tiers, and in a step."""
    e = estimated(options)
    buffer = 2**30 if (options or {}).get("tier") == "disk" else 0  # of the one process
    share = e.psi // 2  # parameters; estimates are those of one device
    found = {
        "device": e.states * N, "host": e.host * N - buffer, "disk": e.disk * N,
        "to device": e.to_device * N, "to host": e.to_host * N, "from disk": e.updated * N if e.disk else 0,
    }  # fmt: skip
    return {name: round(nbytes / share, 2) for name, nbytes in found.items()}


def table(rows: dict[str, dict[str, float]]) -> str:
    """In markdown."""
    lines = ["| `Offload(...)` | " + " | ".join(next(iter(rows.values()))) + " |", "|---" * 7 + "|"]
    for name, found in rows.items():
        cells = [f"{x:g}" if x else "" for x in found.values()]
        lines.append(f"| {name.replace(chr(10), ' ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: dict[str, dict[str, float]], path: Path) -> None:
    """A column for each setting, a row for each tier, and what travels between them in a step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "jzero", "font.size": 9})
    figure, axes = plt.subplots(figsize=(11, 5), layout="constrained")
    for at, (name, found) in enumerate(rows.items()):
        axes.text(at + 0.43, 3.75, name, ha="center", va="center", weight="bold")
        for level, (tier, color) in enumerate(reversed(TIERS.items())):
            text = held(SETTINGS[name])[tier]
            axes.bar(at, 0.9, width=0.86, bottom=level * 1.2, align="edge", color=color if text else "white",
                     edgecolor="#777777", linewidth=0.6)  # fmt: skip
            label = f"{text}\n{found[tier]:g}" if found[tier] else text
            axes.text(at + 0.43, level * 1.2 + 0.45, label, ha="center", va="center")
        for bottom, down, up in ((2.1, found["to host"], found["to device"]),
                                 (0.9, found["from disk"], found["from disk"])):  # fmt: skip
            if down or up:
                axes.annotate("", xy=(at + 0.3, bottom), xytext=(at + 0.3, bottom + 0.3), arrowprops=ARROW)
                axes.annotate("", xy=(at + 0.56, bottom + 0.3), xytext=(at + 0.56, bottom), arrowprops=ARROW)
                axes.text(at + 0.26, bottom + 0.15, f"{down:g}", ha="right", va="center")
                axes.text(at + 0.6, bottom + 0.15, f"{up:g}", ha="left", va="center")
    for level, tier in enumerate(reversed(TIERS)):
        axes.text(-0.1, level * 1.2 + 0.45, tier, ha="right", va="center", weight="bold")
    axes.set(xlim=(-0.6, len(rows)), ylim=(-0.05, 4))
    axes.axis("off")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", N)
    rows = {name: row(options) for name, options in SETTINGS.items()}
    draw(rows, Path(__file__).with_name("pictures") / "tiers.svg")
    print(table(rows))


if __name__ == "__main__":
    main()
