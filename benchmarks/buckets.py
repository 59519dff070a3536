"""What `bucket_bytes` and the XLA options of a plan do: peak, number and size of collectives, share beside compute.

    python benchmarks/buckets.py                             # about 8 minutes on two cores, no GPU
    python benchmarks/buckets.py --stages 2 --buckets 64     # MiB

The GPT of benchmarks/peak.py with 12 layers (d 4096, vocabulary 50304, 1024 tokens per device) for 64 H100. "hidden":
the part of all bytes on the wire that travels beside arithmetic, and "waits" what a step waits for the others, by the
model of `jzero/proof/timeline.py` at the data sheet's rates; no GPU has timed it. "asynchronous": bytes of
reduce-scatters and all-gathers with any instruction that computes between start and done, however small. With `--clip`
the chain begins with `clip_by_global_norm`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

import jax
import peak

MIB = 2**20


def measure(model, stage: int, hosts: int, bucket: int, options: bool, clip: bool, xla: Sequence[str] = ()):
    """The report of the step compiled for H100; `xla`: more options, each "name=value"."""
    own = (*(["plan"] if options else []), *xla)
    return peak.compiled(model, stage, hosts, clip, own, bucket_bytes=bucket)[2]


def row(report) -> tuple[int, float, float]:
    """Reduce-scatters and all-gathers in a step, MiB of the largest, share of their bytes that is asynchronous."""
    moved = [c for c in report.collectives if c.op in ("reduce-scatter", "all-gather")]
    total = sum(c.wire_bytes * c.count * c.trips for c in moved)
    beside = sum(c.wire_bytes * c.count * c.trips for c in moved if c.overlapped)
    return sum(c.count * c.trips for c in moved), max(c.bytes for c in moved) / MIB, beside / total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--layers", nargs="+", default=["unrolled", "scan"], choices=["unrolled", "scan"])
    parser.add_argument("--buckets", type=int, nargs="+", default=[16, 32, 64, 256, 4096], help="MiB")
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--seq", type=int, default=1024, help="tokens per device")
    parser.add_argument("--hosts", type=int, default=8, help="of 8 H100 each")
    parser.add_argument("--clip", action="store_true", help="clip_by_global_norm before AdamW")
    parser.add_argument("--xla", nargs="+", default=[], help="more XLA options, each name=value")
    parser.add_argument("--only-options", action="store_true", help="not without the XLA options")
    args = parser.parse_args()
    columns = "stage, layers, bucket, XLA options, peak, wire, collectives, largest, asynchronous, hidden, waits"
    print(f"| {' | '.join(columns.split(', '))} |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for stage in args.stages:
        for layers in args.layers:
            model = peak.Gpt(args.depth, args.dim, args.heads, 50304, args.seq, layers == "scan", "2d")
            for bucket in args.buckets:
                for options in [True] if args.only_options else [False, True]:
                    report = measure(model, stage, args.hosts, bucket * MIB, options, args.clip, args.xla)
                    count, largest, beside = row(report)
                    print(
                        f"| {stage} | {layers} | {bucket} MiB | {'yes' if options else 'no'} | "
                        f"{report.memory.total / 1e9:.2f} GB | {report.wire.psi:.3f} Psi | {count} | "
                        f"{largest:.0f} MiB | {beside:.1%} | {report.overlap.hidden:.1%} | "
                        f"{1e3 * report.overlap.waits:.1f} ms |",
                        flush=True,
                    )
    given = ", ".join([f"{8 * args.hosts} H100, d {args.dim}, {args.depth} layers, {args.seq} tokens", *args.xla])
    print(f"\n{given}; jax {jax.__version__}.")


if __name__ == "__main__":
    main()
