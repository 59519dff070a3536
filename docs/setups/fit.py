"""What docs/fit.md presumes: an NNX model with or without remat, and the size of its vocabulary."""

import jax.numpy as jnp
from flax import nnx

vocabulary, width = 256, 64


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, remat, rngs):
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])
        self.run = nnx.remat(Layer.__call__) if remat else Layer.__call__

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.run(layer, x)
        return self.embed.attend(x).astype(jnp.float32)
