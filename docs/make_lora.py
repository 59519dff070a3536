"""Print the table of docs/lora.md: bytes of a LoRA on Llama-3, per device and on the wire. No GPU is needed.

    python docs/make_lora.py           # 10 s; rewrites the table of docs/lora.md; needs jzero[pod]

Shapes of the published models, bf16; LoRA on all seven projections of each layer; AdamW with fp32 masters. The bytes
are those of `jzero.estimate`, which tests compare with compiled programs (tests/compiled/test_gpu_frozen.py).
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jzero  # before jax, whose import is noisy where the compile-only plugin is installed

# ruff: noqa: I001
import jax
import optax

from jzero.cli.presets import PRESETS

PAGE = Path(__file__).with_name("lora.md")
TABLE = re.compile(r"^\| model \|.*?(?=\n\n)", re.DOTALL | re.MULTILINE)
RANK = 16
HEADER = ("model", "H100", "trained", "stage", "params", "grads", "state", "in all", "wire / step", "Psi")


def shapes(name: str, rank: int) -> dict:
    """The params of a preset, layers stacked for a scan, with adapters of a rank; 0: none."""
    m = PRESETS[name]
    kv = m.kv_heads * m.width // m.heads
    kernels = {
        "q": (m.width, m.width), "k": (m.width, kv), "v": (m.width, kv), "o": (m.width, m.width),
        "gate": (m.width, m.ffn), "up": (m.width, m.ffn), "down": (m.ffn, m.width),
    }  # fmt: skip

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, "bfloat16")

    def dense(n, k):
        lora = {"lora_a": array(m.layers, n, rank), "lora_b": array(m.layers, rank, k)} if rank else {}
        return {"kernel": array(m.layers, n, k), **lora}

    layers = {k: dense(*v) for k, v in kernels.items()} | {n: array(m.layers, m.width) for n in ("norm_1", "norm_2")}
    return {
        "embed": array(m.vocab, m.width), "layers": layers, "norm": array(m.width), "head": array(m.width, m.vocab)
    }  # fmt: skip


def is_lora(path: tuple[str, ...], leaf) -> bool:
    """The filter."""
    return path[-1].startswith("lora")


def row(name: str, hosts: int, stage: int, rank: int) -> list[str]:
    """One row of the table."""
    pod = jzero.pod("h100", hosts=hosts, gpus_per_host=8)
    plan = jzero.make_plan(
        shapes(name, rank), stage=stage, mesh=pod.mesh({"data": 8 * hosts}), scan_axes={"layers": 0},
        trainable=is_lora if rank else None,
    )  # fmt: skip
    found = jzero.estimate(plan, tx=optax.adamw(1e-4), uses={"['embed']": ("lookup",)})
    trained = sum(x.size for x in plan.layouts if x.frozen is None)
    sizes = (found.params, found.grads, found.opt_state, found.states, found.wire)
    cells = [f"{size / 1e9:.2f} GB" for size in sizes]
    what = f"LoRA, {trained / 1e6:.0f} M" if rank else "all"
    return [name, str(8 * hosts), what, str(stage), *cells, f"{found.wire_psi:.2f}"]


def table() -> str:
    """All rows, as markdown."""
    rows = [
        row(name, hosts, stage, rank)
        for name in ("llama3-8b", "llama3-70b")
        for hosts in (1, 8)
        for stage, rank in ((3, 0), (1, RANK), (2, RANK), (3, RANK))
    ]
    lines = [HEADER, ["---"] * len(HEADER), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    made = table()
    print(made)
    PAGE.write_text(TABLE.sub(lambda _: made, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
