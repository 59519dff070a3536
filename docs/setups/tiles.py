"""What docs/tiles.md presumes: a trunk and an MLP in NNX, sizes and a batch."""

import jax
import jax.numpy as jnp
from flax import nnx

width, vocabulary = 16, 64


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(width, 64, rngs=rngs), nnx.Linear(64, width, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Trunk(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.mlp = nnx.Embed(vocabulary, width, rngs=rngs), Mlp(rngs)

    def __call__(self, tokens):
        return self.mlp(self.embed(tokens))


Plain, x = Mlp, jnp.ones((8, 12, width))
tokens = jax.random.randint(jax.random.key(0), (16, 12), 0, vocabulary)
batch = {"tokens": tokens, "labels": tokens, "mask": tokens > 3}
