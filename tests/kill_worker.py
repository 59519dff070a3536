"""One process of train/gpt.py that writes down what it sees: `python kill_worker.py LOG FLAGS...`.

A line of JSON in LOG for each step (the rows of its batch), for each state that is saved and for each that is restored.
The digest of a state is a sum over its elements of a hash of place and bits: that of all processes together does not
depend on how the state lies, and changes with any bit of any element.
"""

from __future__ import annotations

import json
import sys
import zlib

import jax
import numpy as np
from layouts import logical_shapes

from train import data, gpt
from train.checkpoints import Checkpoints
from train.log import Log


def digest(state) -> int:
    """Of the elements that this process holds, each once over all processes; padding is left out."""
    leaves = jax.tree.leaves((state.params, state.opt_state))
    shapes = [x.shape for x in jax.tree.leaves(state.params)] + logical_shapes(state)
    more = [state.step, jax.random.key_data(state.key)]
    total = np.uint64(0)
    with np.errstate(over="ignore"):
        for i, (x, shape) in enumerate(
            zip([*leaves, *more], [*shapes, *(x.shape for x in more)], strict=True)
        ):
            for shard in x.addressable_shards:
                if shard.replica_id == 0:
                    total += _of(i, np.asarray(shard.data), shard.index, shape)
    return int(total)


def _of(leaf: int, values: np.ndarray, index: tuple[slice, ...], shape: tuple[int, ...]) -> np.uint64:
    starts = [s.start or 0 for s in index]
    inside = tuple(
        slice(0, max(0, min(n, full - at))) for n, full, at in zip(values.shape, shape, starts, strict=True)
    )
    values = values[inside]
    where = np.zeros(values.shape, np.uint64)
    for dim, (n, at) in enumerate(zip(values.shape, starts, strict=True)):
        line = np.arange(at, at + n, dtype=np.uint64) * np.uint64(int(np.prod(shape[dim + 1 :], dtype=int)))
        where += line.reshape([-1 if d == dim else 1 for d in range(values.ndim)])
    bits = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}").astype(np.uint64)
    h = (bits ^ (where * np.uint64(0x9E3779B97F4A7C15))) + np.uint64(leaf * 0x1000193 + 1)
    for shift in (31, 29):
        h = (h ^ (h >> np.uint64(shift))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.sum(h, dtype=np.uint64)


def main(log: str, args: list[str]) -> None:
    """Runs train/gpt.py with these flags and its eyes open."""
    file = open(log, "a", buffering=1)  # noqa: SIM115  (until the process ends, or is killed)
    tell = lambda **what: file.write(json.dumps(what) + "\n")  # noqa: E731
    batches, step, save, restore = data.batches, Log.step, Checkpoints.save, Checkpoints.restore
    rows: list[int] = []

    class Stream:
        def __init__(self, stream):
            self.inner, self.get_state, self.set_state = stream, stream.get_state, stream.set_state

        def __next__(self):
            batch = next(self.inner)
            rows[:] = [zlib.crc32(row.tobytes()) for row in batch["tokens"]]
            return batch

    def saving(self, number, state, *given, **more):
        tell(saved=number, digest=digest(state))
        save(self, number, state, *given, **more)

    def restoring(self, number, *given):
        state = restore(self, number, *given)
        tell(restored=number, digest=digest(state))
        return state

    def stepping(self, number, metrics):
        step(self, number, metrics)
        tell(step=number, rows=rows)

    data.batches = lambda *a, **k: Stream(batches(*a, **k))  # type: ignore[assignment]
    Log.step, Checkpoints.save, Checkpoints.restore = stepping, saving, restoring  # type: ignore[method-assign]
    gpt.main(args)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
