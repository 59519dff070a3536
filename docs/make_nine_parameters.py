"""Writes docs/nine_parameters.md: a model of nine parameters, two devices, one Adam step, stages 0 to 3.

    python docs/make_nine_parameters.py             # two simulated CPU devices, 5 s; no GPU
    python docs/make_nine_parameters.py PATH        # writes the page to PATH instead

Every number of the page is computed here; `tests/docs/test_nine_parameters.py` fails when the page is out of date.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from pathlib import Path

if __name__ == "__main__":  # import jzero from the repository, wherever the shell stands
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import jzero

N, STAGES = 2, (0, 1, 2, 3)
KINDS = ("param", "grad", "m", "v")
LEARNING_RATE, B1, B2, EPS = 0.1, 0.9, 0.999, 1e-8
TOLERANCE = 1e-6  # of a leaf's largest value, against optax.adam on one device
PARAMS = {
    "W1": np.array([[0.5, -0.3], [0.8, 0.2]], np.float32),
    "b1": np.array([0.1, -0.2], np.float32),
    "W2": np.array([[0.7, -0.4]], np.float32),
    "b2": np.array([0.05], np.float32),
}
BATCH = {
    "x": np.array([[1.0, 2.0], [-1.0, 0.5], [0.5, -1.5], [2.0, 1.0]], np.float32),
    "y": np.array([[1.0], [-0.4], [0.3], [0.5]], np.float32),
}
PSI = sum(x.size for x in PARAMS.values())
NAMES = [f"{k}[{','.join(map(str, i))}]" for k, x in PARAMS.items() for i in np.ndindex(x.shape)]
OWNER = {"W1": 0, "b1": 0, "W2": 1, "b2": 1}  # whole tensors to ranks: a layer each


def predict(params, x):
    """The model: two layers with a tanh between."""
    return jnp.tanh(x @ params["W1"].T + params["b1"]) @ params["W2"].T + params["b2"]


def loss_of(apply_fn, params, batch):
    """Squared error, as a mean over the whole batch; a part of the batch gives its part of that mean."""
    return jnp.sum((apply_fn(params, batch["x"]) - batch["y"]) ** 2) / len(BATCH["x"])


def create_state():
    """A plain Flax state with optax.adam."""
    tx = optax.adam(LEARNING_RATE, b1=B1, b2=B2, eps=EPS)
    return TrainState.create(apply_fn=predict, params=jax.tree.map(jnp.asarray, PARAMS), tx=tx)


def train_step(state, batch, pin=lambda grads: grads):
    """A plain step, except that it returns the gradient too: `pin` gives it a layout to be looked at in."""
    grads = jax.grad(lambda p: loss_of(state.apply_fn, p, batch))(state.params)
    return state.apply_gradients(grads=grads), pin(grads)


def by_kind(state, grads):
    """The four trees that a run keeps."""
    return dict(zip(KINDS, (state.params, grads, state.opt_state[0].mu, state.opt_state[0].nu), strict=True))


def one_device():
    """The step without jzero: kind -> element -> value."""
    return {k: elements(tree) for k, tree in by_kind(*jax.jit(train_step)(create_state(), BATCH)).items()}


def elements(tree, device=None) -> dict[str, float]:
    """Every value of a tree by name; with a device, those that stand in that device's own buffers."""
    out = {}
    for name, leaf in tree.items():
        whole = [((slice(None),) * np.ndim(leaf), leaf)]
        for index, data in whole if device is None else buffers(leaf, device):
            starts = [s.start or 0 for s in index]
            for i, value in np.ndenumerate(np.asarray(data)):
                out[f"{name}[{','.join(str(a + b) for a, b in zip(starts, i, strict=True))}]"] = float(value)
    return out


def buffers(array, device):
    """The pieces of an array on one device, each with its place in the whole."""
    return [(s.index, s.data) for s in array.addressable_shards if s.device == device]


@dataclasses.dataclass(frozen=True)
class Run:
    """One step at one stage.

    Attributes:
      plan: the `jzero.Plan`.
      held: for each device, kind -> element -> value, from its live buffers after the step.
      parts: for each device, its part of the gradient, from the examples in its buffers.
      gathers: values that a device sends to gather weights for the forward and for the backward pass.
    """

    plan: jzero.Plan
    held: list[dict[str, dict[str, float]]]
    parts: list[dict[str, float]]
    gathers: tuple[int, int]

    def counts(self, device: int) -> dict[str, int]:
        """Values on one device, by kind."""
        return {k: len(v) for k, v in self.held[device].items()}


def run(stage: int, mesh: Mesh) -> Run:
    """One step through jzero, and what is in the buffers then."""
    state = jzero.shard(create_state(), stage=stage, mesh=mesh, uneven="replicate", min_shard_bytes=0)
    plan = jzero.plan_of(state)
    batch = plan.place_batch(BATCH)

    def pin(grads):
        rows = zip(jax.tree.leaves(grads), plan.layouts, strict=True)
        return jax.tree.unflatten(plan.tree, [plan.constrain(g, x.grad) for g, x in rows])

    step = jax.jit(lambda s, b: train_step(s, b, pin)).lower(state, batch).compile()
    trees = by_kind(*step(state, batch))
    devices = list(mesh.devices.flat)
    held = [{k: elements(tree, d) for k, tree in trees.items()} for d in devices]
    own = [{k: np.asarray(buffers(x, d)[0][1]) for k, x in batch.items()} for d in devices]
    parts = [elements(jax.grad(lambda p, b=b: loss_of(predict, p, b))(PARAMS)) for b in own]
    found = [c for c in jzero.explain(step, plan).collectives if c.scope == "gather_weight"]
    sent = [sum(c.total_wire_bytes for c in found if c.phase == phase) for phase in ("forward", "backward")]
    return Run(plan, held, parts, (sent[0] // 4, sent[1] // 4))


def planned(plan: jzero.Plan) -> dict[str, int]:
    """Values on one device by kind, from the plan alone."""
    count = dict.fromkeys(KINDS, 0)
    for x in plan.layouts:
        for kind, spec in zip(KINDS, (x.stored, x.grad, x.state, x.state), strict=True):
            count[kind] += math.prod(plan.sharding(spec).shard_shape(x.shape))
    return count


def whole_tensors(owner: dict[str, int]) -> list[int]:
    """Values on each device: params and gradients on both, a tensor's moments on its owner alone."""
    return [2 * PSI + 2 * sum(PARAMS[k].size for k in owner if owner[k] == rank) for rank in (0, 1)]


def best_packing() -> list[int]:
    """The most even way to give whole tensors to two ranks."""
    every = (dict(zip(OWNER, ranks, strict=True)) for ranks in itertools.product((0, 1), repeat=len(OWNER)))
    return min((whole_tensors(owner) for owner in every), key=max)


def sends(r: Run) -> list[tuple[str, str, list[list[str]], float]]:
    """What crosses the wire in a step: what, collective, which values of each device, how many it sends."""
    row, cut = r.plan.config.row, {x.keys[0] for x in r.plan.layouts if x.state != x.used}
    whole = [e for e in NAMES if e.split("[")[0] not in cut]
    mine = [[e for e in NAMES if e in h["m"] and e not in whole] for h in r.held]
    ring = (N - 1) / N
    size = ring * (PSI - len(whole))
    rows = [("gradients", "all-reduce", [whole, whole], 2 * ring * len(whole))]
    if row.state:
        rows = [("gradients", "reduce-scatter", mine[::-1], size), *rows]
    if row.params:
        return [(f"weights, {way} pass", "all-gather", mine, size) for way in ("forward", "backward")] + rows
    return [*rows, ("new params", "all-gather", mine, size)] if row.state else rows


def worst(r: Run, reference) -> float:
    """The largest difference from the run on one device, in units of the leaf's largest value."""
    found = 0.0
    for h, kind in itertools.product(r.held, KINDS):
        for e, value in h[kind].items():
            leaf = e.split("[")[0] + "["
            top = max(abs(x) for k, x in reference[kind].items() if k.startswith(leaf))
            found = max(found, abs(value - reference[kind][e]) / top)
    return found


def table(header, rows) -> str:
    """A Markdown table; all but the first column to the right where they hold numbers."""
    cells = [[f"{c:g}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    numbers = [all(c[:1] in "-0123456789." for c in column) for column in zip(*cells, strict=True)]
    rule = ["---:" if right and i else "---" for i, right in enumerate(numbers)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [list(header), rule, *cells])


def number(x: float | None) -> str:
    """Four significant digits; a dot for a value that is not there."""
    return "." if x is None else f"{x:.4g}"


def step_table(reference, parts) -> str:
    """The step on one device."""
    columns = [elements(PARAMS), *parts, *(reference[k] for k in ("grad", "m", "v", "param"))]
    header = [
        "value",
        "start",
        "gradient, device 0's part",
        "device 1's part",
        "sum",
        "m",
        "v",
        "after optax.adam",
    ]
    return table(header, [[e, *(number(c[e]) for c in columns)] for e in NAMES])


def owners(runs) -> dict[str, str]:
    """For each value the devices that hold what a stage splits of it: the same at stages 1 to 3, in every split kind.

    Raises:
      ValueError: the buffers of two stages, or of two kinds, differ in it.
    """
    found = {}
    for e in NAMES:
        held = {
            tuple(d for d in range(N) if e in r.held[d][kind])
            for r in runs
            for kind, split in zip(KINDS, _split(r), strict=True)
            if split
        }
        if len(held) > 1:
            raise ValueError(f"{e} is held differently: {held}")
        found[e] = " and ".join(map(str, held.pop()))
    return found


def _split(r: Run) -> tuple[bool, ...]:
    """Which of `KINDS` the stage splits."""
    row = r.plan.config.row
    return row.params, row.grads, row.state, row.state


def count_table(runs) -> str:
    """Values kept on the two devices together, by kind, and on each."""
    pair, rows = whole_tensors(OWNER), []
    for r in runs:
        one, two = (list(r.counts(d).values()) for d in range(N))
        kinds = [a + b for a, b in zip(one, two, strict=True)]
        rows.append([f"stage {r.plan.config.stage}", *kinds, sum(one), sum(two), f"**{sum(kinds)}**"])
    moments = sum(pair) // 2 - 2 * PSI
    whole = ["whole tensors to ranks", 2 * PSI, 2 * PSI, moments, moments, *pair, f"**{sum(pair)}**"]
    header = ["", "params", "gradients", "m", "v", "device 0", "device 1", "both"]
    return table(header, [rows[0], whole, *rows[1:]])


def layout_table(runs) -> str:
    """How each tensor is shared, and which device has which of its values."""
    layouts, rows = {x.keys[0]: x for x in runs[0].plan.layouts}, []
    own = owners(runs)
    for name in OWNER:
        x = layouts[name]
        shard = runs[0].plan.sharding(x.state).shard_shape(x.shape)
        split = [f"dim {d}" for d in range(len(shard)) if shard[d] != x.shape[d]]
        mine = [" ".join(e for e in NAMES if e.startswith(f"{name}[") and str(d) in own[e]) for d in range(N)]
        rows.append([name, list(x.shape), split[0] if split else f"whole: {x.reason}", *mine])
    return table(["tensor", "shape", "split on (from 0)", "device 0 has", "device 1 has"], rows)


def send_table(runs) -> str:
    """Values that a device sends at each stage, by collective; stages that send the same together."""
    rows, ops = [], ("all-reduce", "reduce-scatter", "all-gather")
    for group, same in itertools.groupby(runs, sends):
        stages = ", ".join(str(r.plan.config.stage) for r in same)
        rows.append([stages, *(total(row for row in group if row[1] == op) for op in ops), total(group)])
    return table(["stage", *ops, "sum"], rows)


def total(rows) -> float:
    """Values that a device sends for some rows of `sends`."""
    return sum(each for *_, each in rows)


def page(mesh: Mesh) -> str:
    """The whole page."""
    reference, runs = one_device(), [run(stage, mesh) for stage in STAGES]
    assert max(worst(r, reference) for r in runs) < TOLERANCE, "not equal to optax: no page"
    examples, own = len(BATCH["x"]), len(BATCH["x"]) // N
    s0, s1, s2, s3 = (sum(sum(r.counts(d).values()) for d in range(N)) for r in runs)
    (p0, p1), best = whole_tensors(OWNER), best_packing()
    both, m0, m1 = p0 + p1, (p0 - 2 * PSI) // 2, (p1 - 2 * PSI) // 2
    longer = number((1 - B1) / math.sqrt(1 - B2))
    ahead, back = runs[3].gathers
    closed = total(sends(runs[3]))
    need = ahead + back + total(row for row in sends(runs[3]) if row[0] == "gradients")
    extra = [s1 - 6 * PSI, s2 - 5 * PSI, s3 - 4 * PSI]  # against b2 split, too
    return f"""\
# Nine parameters on two devices

<!-- Written by `python docs/make_nine_parameters.py`. Change that file, not this one. -->

This model is small enough to print: `W2 tanh(W1 x + b1) + b2` with W1 2x2, b1 2, W2 1x2 and b2 1, in fp32. Two
devices share a batch of {examples} examples and take one step of `optax.adam({LEARNING_RATE})` on the mean squared
error. What a device holds is read from its own buffers after the step.

## The step on one device

{step_table(reference, runs[1].parts)}

Each device's part of the gradient comes from its own {own} examples. The parts add up to the gradient of the batch. m
and v are Adam's two moments. With jzero, at stages 0 to 3, every param, gradient, m and v on either device equals
the value here to {TOLERANCE:g} of its tensor's largest value. (Adam without bias correction would move each param
{longer} times as far.)

## What each device holds

One copy of params, gradient, m and v is 4 x {PSI} = {4 * PSI} values. The table leaves out Adam's step count.
Columns 2 to 5 are for both devices together:

{count_table(runs)}

A tensor that a stage splits is laid out like this:

{layout_table(runs[1:])}

- Stage 0 is plain data parallelism: 4 x {PSI} x {N} = {s0} values.
- Whole tensors to ranks, for comparison, keeps each tensor's moments on one device. One layer per device makes
  {2 * PSI} + 2 x {m0} = {p0} and {2 * PSI} + 2 x {m1} = {p1}, {both} in all. The most even way gives {best[0]} and
  {best[1]}.
- jzero splits every tensor on the first dim divisible by {N}, so both devices hold equally many values. b2's one
  value cannot be split. It stays whole on both (`uneven="replicate"`), and `plan.describe()` says so. That costs
  {extra[0]}, {extra[1]} and {extra[2]} values at stages 1, 2 and 3. So stage 1 keeps {s1} values where whole
  tensors keep {both}, but its fuller device has {s1 // N}, not {p0}.

The script sets `min_shard_bytes=0`, and its step also returns the gradient.

## What each device sends

{send_table(runs)}

The table counts values by collective. In a reduce-scatter a device sends its part of what the other one keeps. In an
all-gather it sends what it keeps itself. An all-reduce is both, with half of the values each time.
In a ring of N devices, each sends 2 (N-1)/N of Psi (all params) at stages 0 to 2, and 3 (N-1)/N at stage 3. A
central server would send (N-1) Psi.

These counts come from formulas. XLA sends a few values less: stage 3's backward pass needs only W2. In the compiled
program a device sends {ahead} values to gather weights forward and {back} backward, so {need:g} of the
{closed:g} values are needed.
"""


def main() -> None:
    """Write the page with two simulated devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", N)
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("nine_parameters.md")
    path.write_text(page(Mesh(np.array(jax.devices()), ("data",))), encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
