"""What the tests of units on a disk share: units of odd sizes, and values that say which generation they are of."""

from __future__ import annotations

import numpy as np

from jzero.update.on_host.disk import DiskStore, FileUnit

UNITS = (
    FileUnit("embed", (((257, 17), "float32"), ((257, 17), "bfloat16"), ((), "int32"))),
    FileUnit(
        "blocks", (((3, 1001), "float32"), ((0, 4), "float32"), ((5,), "uint8"), ((7,), "float8_e4m3fn"))
    ),
    FileUnit("norm", (((13,), "float64"), ((1,), "bool"))),
    FileUnit("head", (((9000,), "bfloat16"), ((4096,), "uint8"), ((11, 2), "int16"))),
)


def values(index: int, generation: int, units=UNITS) -> list[np.ndarray]:
    """Arrays whose every byte depends on unit and generation (and is a valid bool)."""
    rng = np.random.default_rng([index, generation])
    found = []
    for shape, dtype in units[index].arrays:
        width = np.dtype(dtype).itemsize
        high = 2 if dtype == "bool" else 256
        data = rng.integers(0, high, int(np.prod(shape)) * width, np.uint8)
        found.append(data.view(dtype).reshape(shape))
    return found


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    """Equal to the bit, types and shapes included."""
    return len(a) == len(b) and all(
        (x.shape, x.dtype, x.tobytes()) == (y.shape, y.dtype, y.tobytes()) for x, y in zip(a, b, strict=True)
    )


def advance(store: DiskStore, *, read: bool = True) -> None:
    """One step: reads all units, compares them with their generation, and writes those of the next."""
    g, order = store.generation, range(len(store.units))
    with store.begin() as step:
        if read and g:
            step.read_ahead(order)
        for i in order:
            new = values(i, g + 1, store.units)
            if read and g:
                arrays = step.read(i)
                assert same(arrays, values(i, g, store.units)), f"unit {i} is not of generation {g}"
                for a, x in zip(arrays, new, strict=True):
                    a[...] = x
                new = arrays
            step.write(i, new)
        step.commit(str(g + 1).encode())


def check_whole(store: DiskStore) -> None:
    """Every unit is of the store's generation."""
    assert store.extra == (str(store.generation).encode() if store.generation else b"")
    if store.generation:
        with store.begin() as step:
            step.read_ahead(range(len(store.units)))
            for i in range(len(store.units)):
                assert same(step.read(i), values(i, store.generation, store.units)), i
                step.release(i)
