"""An update as a graph.

[Note: a division is a product]
XLA:CPU does not repeat a division in each loop that reads its result: it writes the result to memory, fresh each time.
After `clip_by_global_norm` that is a gradient in fp32, and costs more than the rest of AdamW (0.20 G params/s with it,
0.60 without). So what is divided by a single number is multiplied by its inverse, in 32 bits or more; the last bit may
differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jzero.core.graph import FlatFunction, Node


class _Product(Node):
    """A division by a single number: see [Note: a division is a product]."""

    def run(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        with self.scope():
            return [values[0] * (1 / values[1])]


class UpdateGraph(FlatFunction):
    """An update as a graph."""

    def _node(self, node: Node) -> None:
        if node.name == "div" and self._is_number(node.ins[1]) and not self.is_small(node.ins[0]):
            dtype = self.avals[node.outs[0]].dtype
            if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 4:
                node = _Product(node.eqn, node.ins, node.outs, node.outer)
        super()._node(node)

    def _is_number(self, value: int) -> bool:
        """True for a single number, and for an array of copies of one."""
        maker = self.makers.get(value)
        copied = maker is not None and maker.name == "broadcast_in_dim" and self.is_small(maker.ins[0])
        return copied or self.is_small(value)
