"""What pages presume (`<!-- setup: block -->`): a block, a mesh with tensor parallelism, the shapes of the params."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class Block(nn.Module):
    """A residual block."""

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(16)(nn.tanh(nn.Dense(32)(x)))


mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
plain, x = Block(), jnp.ones((8, 4, 16))
shapes_of_the_params = jax.eval_shape(plain.init, jax.random.key(0), x)["params"]


def check(block, plan):
    """The gradients are those of the block without remat."""
    params, batch = plan.place(plain.init(jax.random.key(0), x)["params"]), plan.place_batch(x)
    ours, theirs = (
        jax.jit(jax.grad(lambda p, b=b: (b.apply({"params": p}, batch) ** 2).sum()))(params)
        for b in (block, plain)
    )
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: jnp.allclose(a, b, atol=1e-4), ours, theirs)))
