"""The README's table of stages: bytes per device and on the wire, from programs compiled for H200 pods.

    python benchmarks/stages.py            # about 3 minutes on two cores; needs jzero[pod], no GPU

The model and the step are those of tests/programs.py, with 12 unrolled layers: bf16, Flax's `apply_gradients`, remat.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("", "tests")]

import jax
import jaxlib

from jzero.config import STAGES

SIZE = (("layers", 12), ("vocab", 2048))


def main(n: int = 64) -> None:
    from programs import program

    print("| stage | split | states, estimated | states, compiled | temp, compiled | wire / step |")
    print("|---|---|---|---|---|---|")
    kept = [{"kept_gathered_bytes": 10**6 * mb} for mb in (75, 150, 225)]
    for stage, more in [*((s, {}) for s in STAGES), *((3, one) for one in kept), (3, {"reshard_after_forward": False})]:
        row = STAGES[stage]
        fields = {"min_shard_bytes": 16 * 1024, **more}
        made = program(stage=stage, n=n, size=SIZE, quick=False, **fields)
        plan, estimate, report = made.plan, made.estimate, made.report
        assert report.memory is not None
        split = [name for name in ("params", "grads", "state") if getattr(row, name)]
        held = report.memory.arguments / 1e6
        said = (estimate.params + estimate.opt_state) / 1e6
        name = f"{stage}{''.join(f', `{k}={v}`' for k, v in more.items())}"
        print(
            f"| {name} | {', '.join(split) or 'nothing'} | {said:.1f} MB | {held:.1f} MB | "
            f"{report.memory.temp / 1e6:.0f} MB | {report.wire.psi:.2f} Psi |"
        )
    values = plan.param_bytes // 2
    print(
        f"\n{values / 1e6:.0f}M parameters, bf16 with fp32 masters, AdamW, {n} H200; jax {jax.__version__}, "
        f"jaxlib {jaxlib.__version__}. Temp holds gradients and activations."
    )


if __name__ == "__main__":
    main()
