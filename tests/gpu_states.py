"""The optimizer state of a plan, without arrays."""

from __future__ import annotations

import jax

MIB = 2**20


BOUND = 64 * MIB


def abstract_state(tx, plan):
    state = jax.eval_shape(tx.init, plan.shapes)
    leaves = zip(jax.tree.leaves(state), plan.state_shardings(state), strict=True)
    return jax.tree.unflatten(
        jax.tree.structure(state), [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in leaves]
    )
