"""Write docs/paper_table.md: Table 1 of the ZeRO paper, from programs that jzero built and XLA compiled.

    python docs/make_paper_table.py            # about 1 minute on two cores; needs jzero[pod], no GPU

Every cell compiles `state.apply_gradients(grads=grads)` for that many H100 and reads the bytes of its
arguments on one device: bf16 params and gradients, fp32 masters and the two moments of Adam.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jzero

PAGE = Path(__file__).with_name("paper_table.md")
DEVICES = (1, 4, 16, 64, 256, 1024)
STAGES = (1, 2, 3)
# model -> devices -> gigabytes per device at stages 1, 2, 3, as printed in the paper (arXiv:1910.02054, Table 1)
PAPER = {
    "7.5B": {
        1: ("120", "120", "120"),
        4: ("52.5", "41.3", "30"),
        16: ("35.6", "21.6", "7.5"),
        64: ("31.4", "16.6", "1.88"),
        256: ("30.4", "15.4", "0.47"),
        1024: ("30.1", "15.1", "0.12"),
    },
    "128B": {
        1: ("2048", "2048", "2048"),
        4: ("896", "704", "512"),
        16: ("608", "368", "128"),
        64: ("536", "284", "32"),
        256: ("518", "263", "8"),
        1024: ("513", "257", "2"),
    },
    "1T": {
        1: ("16000", "16000", "16000"),
        4: ("7000", "5500", "4000"),
        16: ("4750", "2875", "1000"),
        64: ("4187", "2218", "250"),
        256: ("4046", "2054", "62.5"),
        1024: ("4011", "2013", "15.6"),
    },
}
SIZES = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}


def shapes(model: str) -> dict[str, tuple[int, int]]:
    """A few large matrices with as many parameters as the model, to 6 digits; 1024 divides their first dim."""
    width = round(SIZES[model] / (4 * 4096))
    return {f"w{i}": (4096, width) for i in range(4)}


def cell(model: str, n: int, stage: int) -> tuple[float, float]:
    """Gigabytes per device of params, gradients and optimizer state: compiled, and by `jzero.estimate`."""
    pod = jzero.pod("h100", hosts=max(1, n // 8), gpus_per_host=min(n, 8))

    def create():
        params = {k: jnp.zeros(s, jnp.bfloat16) for k, s in shapes(model).items()}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-4))

    state = jzero.abstract(create, stage=stage, mesh=pod.mesh({"data": n}))
    plan = jzero.plan_of(state)
    grads = {
        x.keys[0]: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=plan.sharding(x.grad))
        for x in plan.layouts
    }
    compiled = pod.compile(lambda s, g: s.apply_gradients(grads=g), state, grads, donate_argnums=0)
    memory = jzero.explain(compiled, plan).memory
    assert memory is not None
    return memory.arguments / 1e9, jzero.estimate(plan, tx=state.tx).total / 1e9


def agrees(value: float, printed: str) -> bool:
    """True where a value is the printed one, rounded or cut: the paper does both."""
    unit = 10.0 ** -len(printed.partition(".")[2])
    return -1e-4 * value - unit / 2 <= value - float(printed) < unit + 1e-4 * value


def page() -> str:
    """The whole page."""
    lines = [
        "# Table 1 of the ZeRO paper, compiled",
        "",
        "<!-- Written by `python docs/make_paper_table.py`. Change that file, not this one. -->",
        "",
        "Gigabytes (1e9 bytes) of params, gradients and optimizer state per device, compiled for H100: bf16 params and",
        "gradients, fp32 masters and Adam's two moments. In brackets the paper's figures (arXiv:1910.02054), some",
        "rounded, some truncated. `jzero.estimate` gives the same bytes to 1e-6.",
    ]
    for model, rows in PAPER.items():
        lines += ["", f"## {model}", "", "| devices | stage 1 | stage 2 | stage 3 |", "|---:|---:|---:|---:|"]
        for n, printed in rows.items():
            values = [cell(model, n, stage)[0] for stage in STAGES]
            cells = [
                f"{v:.4g} ({p})" if v < 1e4 else f"{v:.0f} ({p})"
                for v, p in zip(values, printed, strict=True)
            ]
            lines.append(f"| {n} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE.read_text())
