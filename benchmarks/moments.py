"""How far 8-bit moments are from exact ones, rounded to nearest and at random: `python benchmarks/moments.py`.

Moving averages of squares (and of values) of normal gradients, 64 blocks of 256 values, 5,000 steps. Printed: the mean
of the stored average over the last 3,000 steps, as a share of that of the same average in fp32, by quantiles over the
values, for gradients of equal sizes and for sizes that differ by a factor of e within a block. Half a minute on a core.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jzero.layout.blocks import Blocks
from jzero.update.int8_moments import decoded, encoded, scale_of

SHAPE, STEPS, FIRST = (64, 256), 5000, 2000
QUANTILES = (0.1, 0.5, 0.9)
BLOCKS = Blocks.of(SHAPE, None, SHAPE[1])


def mean_ratio(decay: float, spread: float, squares: bool, at_random: bool) -> np.ndarray:
    """The mean of the stored average over that of the exact one, for every value."""
    size = jnp.exp(spread * jax.random.normal(jax.random.key(0), SHAPE))
    offset = 0.0 if squares else 0.1

    def step(carry, i):
        codes, scales, exact, totals = carry
        grads = size * (jax.random.normal(jax.random.fold_in(jax.random.key(1), i), SHAPE) + offset)
        term = (1 - decay) * (jnp.square(grads) if squares else grads)
        exact, new = decay * exact + term, decay * decoded(codes, scales, BLOCKS) + term
        scales = scale_of(new, BLOCKS)
        codes = encoded(new, scales, BLOCKS, i.astype(jnp.uint32) if at_random else None)
        counted = jnp.where(i >= FIRST, jnp.stack([decoded(codes, scales, BLOCKS), exact]), 0)
        return (codes, scales, exact, totals + counted), None

    zeros = jnp.zeros(SHAPE)
    start = jnp.zeros(SHAPE, jnp.int8), jnp.zeros(BLOCKS.scales_shape), zeros, jnp.stack([zeros, zeros])
    (*_, totals), _ = jax.jit(lambda: jax.lax.scan(step, start, jnp.arange(STEPS)))()
    return np.asarray(totals[0] / totals[1])


def main() -> None:
    """Print the table."""
    print("average of    decay  sizes    rounding    " + "".join(f"{q:>8.0%}" for q in QUANTILES))
    for squares, decay in ((True, 0.999), (True, 0.95), (False, 0.9)):
        for spread in (0.0, 1.0):
            for at_random in (False, True):
                ratio = np.quantile(mean_ratio(decay, spread, squares, at_random), QUANTILES)
                what = "squares" if squares else "values"
                how = "at random" if at_random else "to nearest"
                sizes = "differ" if spread else "equal"
                print(f"{what:<12}  {decay:<5}  {sizes:<7}  {how:<12}" + "".join(f"{r:8.3f}" for r in ratio))


if __name__ == "__main__":
    main()
