"""Weak scaling by compile: one GPT, one sequence per device, compiled for 8 to 4096 H200; docs/scaling.md and its plot.

    python benchmarks/scaling.py --out runs/scaling.json --plot docs/scaling.png       # all; no GPU
    python benchmarks/scaling.py --kinds hpZ --devices 8 64        # some of them

Every cell is compiled in a process of its own, so that the peak of its memory is its own. The model and the step are
those of `benchmarks/peak.py`: bf16 params, fp32 masters, AdamW, blocks under `nn.remat`; 36 of them in a scan, or with
`--size gpt` and `tied` 8 small unrolled ones, with logits of a matrix of their own or of the embedding. "off" is
relative to the closed form, `jzero.estimate`. Bytes on the wire are what one device sends in a step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(Path(__file__).parents[1])]

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jzero
from benchmarks import peak

BOTH = ("replica", "data")
KINDS = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "HSDP": {"stage": 3, "axis": "data", "batch_axis": BOTH},
    "hpZ": {"stage": 3, "axis": BOTH, "param_axis": "data"},
}
SIZES = {
    "7.5b": {"depth": 36, "dim": 4096, "heads": 32, "vocab": 50304, "seq": 1024, "scan": True},
    "gpt": {"depth": 8, "dim": 2048, "heads": 16, "vocab": 50304, "seq": 1024},
    "tied": {"depth": 8, "dim": 2048, "heads": 16, "vocab": 50304, "seq": 1024},
    "tiny": {"depth": 2, "dim": 1024, "heads": 8, "vocab": 512, "seq": 16},
}
TIED = ("7.5b", "tied")
DEVICES = (8, 64, 512, 4096)


class Gpt(peak.Gpt):
    """Its logits have a matrix of their own."""

    @nn.compact
    def __call__(self, tokens):
        positions = self.param("positions", nn.initializers.normal(0.02), (self.seq, self.dim), jnp.bfloat16)
        x = nn.Embed(self.vocab, self.dim, **peak.BF16)(tokens) + positions
        block = nn.remat(peak.Block, prevent_cse=not self.scan)
        for i in range(self.depth):
            x, _ = block(self.heads, self.kernels, self.experts, name=f"block_{i}")(x)
        return nn.Dense(self.vocab, use_bias=False, **peak.BF16, name="head")(nn.LayerNorm(**peak.BF16)(x))


def measure(kind: str, n: int, size: str = "7.5b") -> dict:
    """Compiles one cell here: bytes per device, bytes on the wire by axes, collectives, and the closed form of each."""
    pod = jzero.pod("h200", hosts=n // 8, gpus_per_host=8)
    axes = {"replica": "hosts", "data": "host"} if kind in ("HSDP", "hpZ") else {"data": -1}
    model = (peak.Gpt if size in TIED else Gpt)(**{"scan": False} | SIZES[size], kernels="2d")
    create = lambda: peak.create(model, optax.adamw(3e-4))  # noqa: E731
    start = time.perf_counter()
    state = jzero.abstract(create, mesh=jzero.mesh(axes, pod=pod), **KINDS[kind])
    plan = jzero.plan_of(state)
    step = jax.jit(peak.train_step, donate_argnums=0)
    traced = time.perf_counter()
    program = pod.compile(step, state, model.batch(n))
    compiled = time.perf_counter()
    report = jzero.explain(program, plan)
    estimate = jzero.estimate(plan, tx=state.tx, uses=uses(size))
    batch = 2 * 4 * model.seq
    collectives = [c for c in report.collectives if c.group_size > 1]
    held = report.memory
    return {
        "kind": kind, "n": n, "params": plan.param_bytes // 2,
        "states": held.arguments - batch, "states_closed": estimate.params + estimate.opt_state,
        "temp": held.temp, "grads_closed": estimate.grads,
        "wire": dict(report.wire.by_axis), "wire_closed": dict(estimate.wire_by_axes),
        "large": sum(c.count * c.trips for c in collectives if c.bytes >= 2**20),
        "all": sum(c.count * c.trips for c in collectives),
        "ops": {op: sum(c.count * c.trips for c in collectives if c.op == op) for op in report.wire.by_op},
        "whole": sum(bool(x.reason) for x in plan.layouts), "min_shard_bytes": plan.min_shard_bytes,
        "findings": [f.kind for f in jzero.findings(program, plan)],
        "text": len(program.as_text() or ""),
        "plan_s": traced - start, "compile_s": compiled - traced,
        "explain_s": time.perf_counter() - compiled, "peak_rss": _peak(),
    }  # fmt: skip


def uses(size: str) -> dict[str, tuple[str, ...]]:
    """What the model does with its embedding, for the closed form of the wire."""
    return {"['Embed_0']['embedding']": ("lookup", "matmul") if size in TIED else ("lookup",)}


def _peak() -> int:
    """Most memory this process has had, in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1])


def off(found: float, closed: float) -> float:
    """By how much what was found is over the closed form, relative to it."""
    return found / closed - 1 if closed else 0.0


def in_process(kind: str, n: int, size: str) -> dict:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--cell", kind, str(n), size]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"kind": kind, "n": n, "error": f"exit {done.returncode}: {done.stderr.strip()[-300:]}"}
    return json.loads(done.stdout.splitlines()[-1])


def line(cell: dict) -> str:
    """One row of the table."""
    if "error" in cell:
        return f"| {cell['kind']} | {cell['n']} | {cell['error'].splitlines()[-1]} |"
    wire, closed = sum(cell["wire"].values()), sum(cell["wire_closed"].values())
    by_axis = ", ".join(
        f"{axes} {cell['wire'].get(axes, 0) / 1e6:.1f} ({off(cell['wire'].get(axes, 0), size):+.1%})"
        for axes, size in cell["wire_closed"].items()
        if size > 0.01 * closed
    )
    states = f"{cell['states'] / 1e6:.1f} | {off(cell['states'], cell['states_closed']):+.2%}"
    return (
        f"| {cell['kind']} | {cell['n']} | {states} | "
        f"{cell['temp'] / 1e6:.0f} | {wire / 1e6:.1f} | {off(wire, closed):+.2%} | {by_axis} | {cell['large']} + "
        f"{cell['all'] - cell['large']} | {cell['compile_s']:.0f} | {cell['peak_rss'] / 1e9:.2f} |"
    )


HEADER = (
    "| | devices | states, MB | off | temp, MB | wire, MB | off | by axes (off) | collectives | "
    "compile, s | RAM, GB |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def plot(cells: list[dict], path: Path) -> None:
    """States, wire, compile time and memory over the number of devices; closed forms as lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7), constrained_layout=True)
    panels = (
        ("params and optimizer state per device", "GB", lambda c: c["states"] / 1e9,
         lambda c: c["states_closed"] / 1e9),
        ("sent by one device in a step", "GB", lambda c: sum(c["wire"].values()) / 1e9,
         lambda c: sum(c["wire_closed"].values()) / 1e9),
        ("trace and compile, two busy cores", "s", lambda c: c["compile_s"], None),
        ("peak memory of the compiling process", "GB", lambda c: c["peak_rss"] / 1e9, None),
    )  # fmt: skip
    for panel, (title, unit, value, closed) in zip(axes.flat, panels, strict=True):
        for i, kind in enumerate(KINDS):
            mine = sorted((c for c in cells if c["kind"] == kind and "error" not in c), key=lambda c: c["n"])
            ns = [c["n"] for c in mine]
            # rings of growing size: one that lies on another does not hide it
            style = {"marker": "o", "markersize": 4 + 2 * i, "fillstyle": "none", "markeredgewidth": 1.5}
            line = "none" if closed else "-"
            panel.plot(ns, [value(c) for c in mine], color=f"C{i}", label=kind, linestyle=line, **style)
            if closed:
                panel.plot(ns, [closed(c) for c in mine], "-", color=f"C{i}", linewidth=1)
        panel.set(
            title=title + (" (line: closed form)" if closed else ""),
            xlabel="devices",
            ylabel=unit,
            xscale="log",
        )
        panel.set_xticks(DEVICES, [str(n) for n in DEVICES])
        panel.margins(y=0.1)
        panel.set_ylim(bottom=0)
    axes[0, 0].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    os.environ["JZERO_POD_CACHE"] = "off"  # the seconds of compiling are printed
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--devices", type=int, nargs="+", default=list(DEVICES))
    parser.add_argument("--size", default="7.5b", choices=list(SIZES))
    parser.add_argument(
        "--out", type=Path, help="JSON file of what was measured; cells that it has are not run again"
    )
    parser.add_argument("--plot", type=Path, help="where to put the plot")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(measure(args.cell[0], int(args.cell[1]), args.cell[2])))
        return
    cells = json.loads(args.out.read_text()) if args.out and args.out.exists() else []
    print(HEADER)
    for n in args.devices:
        for kind in args.kinds:
            cell = next((c for c in cells if (c["kind"], c["n"]) == (kind, n)), None)
            if cell is None:
                cell = in_process(kind, n, args.size)
                cells.append(cell)
                if args.out:
                    args.out.parent.mkdir(parents=True, exist_ok=True)
                    args.out.write_text(json.dumps(cells, indent=1))
            print(line(cell), flush=True)
    if args.plot:
        plot(cells, args.plot)


if __name__ == "__main__":
    main()
