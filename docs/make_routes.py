"""Prints the table of docs/design.md: who reduces which gradient, and how.

    python docs/make_routes.py             # a second, no GPU
    python docs/make_routes.py --write     # puts it into the page

Each cell is what `GradientReduce.where` and `GradientReduce.route` answer, for 8 devices; `tests/docs/test_routes.py`
fails when the page is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # import jzero from the repository, wherever the shell stands
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import jax
import jax.numpy as jnp
import numpy as np

import jzero
from jzero.comm import comm_of
from jzero.comm.routes import LOOKUP, MATMUL, OTHER, ROUNDS, SPREAD, USE, Maker
from jzero.gather.sharded_weight import Weight

PAGE = Path(__file__).resolve().parent / "design.md"
BEGIN, END = "<!-- routes: python docs/make_routes.py --write -->\n", "<!-- end of routes -->\n"
BUCKET = 64 * 64 * 4  # bytes


class Row(NamedTuple):
    """A kind of use, the shape of the weight, and what of the config it depends on."""

    title: str
    kind: str
    shape: tuple[int, ...] = (64, 64)
    alone: bool = False
    reduce_dtype: str | None = None
    dtype: Any = jnp.float32


ROWS = (
    Row("a matmul, a lookup of rows", MATMUL),
    Row("a matmul, weight larger than 8 buckets", MATMUL, (64, 1024)),
    Row("a matmul, no dim divides", MATMUL, (63, 65)),
    Row("a lookup in a tied table", LOOKUP, alone=True),
    Row("a bias or a scale", SPREAD, (64,)),
    Row("a weight that every round of a loop uses", ROUNDS, alone=True),
    Row("another use", OTHER),
    Row("bf16 weight, `reduce_dtype` fp32: a matmul", MATMUL, reduce_dtype="float32", dtype=jnp.bfloat16),
    Row("the same: a bias or a scale", SPREAD, (64,), reduce_dtype="float32", dtype=jnp.bfloat16),
    Row("fp32 weight, `reduce_dtype` bf16: a matmul", MATMUL, reduce_dtype="bfloat16"),
)  # fmt: skip
COLUMNS = {"stage 1": (1, False), "2, one bucket": (2, False), "2": (2, True), "3": (3, True)}


def cell(row: Row, stage: int, several: bool) -> str:
    """Where the gradient of this use is reduced, and how; a star if jzero makes the gradient itself."""
    bucket = BUCKET if several else 10**9
    others = {f"w{i}": jax.ShapeDtypeStruct((64, 64), row.dtype) for i in range(2)}
    params = {"w": jax.ShapeDtypeStruct(row.shape, row.dtype), **others}
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    plan = jzero.make_plan(params, mesh=mesh, stage=stage, min_shard_bytes=0, bucket_bytes=bucket,
                           reduce_dtype=row.reduce_dtype)  # fmt: skip
    gradients, layout = comm_of(plan).gradients, plan.layouts[0]
    if gradients.where(layout, alone=row.alone) != USE:
        return f"update/{gradients.by_update(layout)}"
    grad = layout.grad if gradients.on_use else layout.state
    weight = Weight(params["w"], layout.stored, layout.used, grad)
    route = gradients.route(weight, Maker(row.kind, np.dtype(row.dtype), examples=row.kind == MATMUL), ordered=several)
    parts = f", in {route.parts} parts" if route.parts > 1 else ""
    return f"{route.where}/{route.by}{'*' if route.made_here else ''}{parts}"


def table() -> str:
    """The table, in Markdown."""
    rows = [[row.title, *(cell(row, *column) for column in COLUMNS.values())] for row in ROWS]
    lines = [["the gradient of", *COLUMNS], ["---"] * (1 + len(COLUMNS)), *rows]
    return "\n".join(f"|{'|'.join(line)}|" for line in lines) + "\n"


def page() -> str:
    """docs/design.md with the table as it is now."""
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page())
    else:
        print(table(), end="")
