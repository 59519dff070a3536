"""How long a step's collectives take at full links, with and without codes of 8 bits: `python benchmarks/wire_time.py`.

From `jzero.estimate` alone, in a minute: nothing is compiled, and no GPU is needed. What it takes to make and read the
codes is not in it.
"""

from __future__ import annotations

import argparse

import jax

import jzero
from jzero.cli.presets import PRESETS, creator

ROWS = {
    "16 bits": {},
    "weights": {"gather_dtype": "int8"},
    "weights and gradients": {"gather_dtype": "int8", "reduce_dtype": "int8"},
}


def milliseconds(params, hosts: int, fields: dict[str, str], within_host: float, between_hosts: float) -> float:
    """At stage 3 on hosts of eight H200; bandwidths in bytes per second."""
    mesh = jzero.pod("h200", hosts=hosts).mesh({"data": 8 * hosts})
    plan = jzero.make_plan(params, stage=3, mesh=mesh, scan_axes=None, **fields)
    return 1000 * jzero.estimate(plan).wire_seconds(within_host=within_host, between_hosts=between_hosts)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="gpt-7.5b", choices=PRESETS)
    parser.add_argument("--within-host", type=float, default=450.0, help="GB/s of a GPU")
    parser.add_argument("--between-hosts", type=float, nargs="+", default=[400.0, 50.0], help="GB/s of a host")
    args = parser.parse_args()
    params = jax.eval_shape(creator(PRESETS[args.preset], seq=1024)).params
    print("| GPUs | GB/s between hosts | " + " | ".join(f"{name}, ms" for name in ROWS) + " |")
    print("|---" * (2 + len(ROWS)) + "|")
    for hosts in (1, 2, 4, 8, 16, 32, 64):
        for between in args.between_hosts if hosts > 1 else args.between_hosts[:1]:
            times = [milliseconds(params, hosts, f, 1e9 * args.within_host, 1e9 * between) for f in ROWS.values()]
            cells = " | ".join(f"{t:.0f}" for t in times)
            print(f"| {8 * hosts} | {'-' if hosts == 1 else f'{between:g}'} | {cells} |", flush=True)
    print(f"\n{args.preset}, stage 3, bf16 params; {args.within_host:g} GB/s of a GPU within a host.")


if __name__ == "__main__":
    main()
