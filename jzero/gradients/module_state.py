"""State of NNX objects that is not a param, over micro-batches: what a loss does with it.

[Note: state is a carry]
Counts of random keys, batch statistics and whatever else a loss changes in its module go from micro-batch to
micro-batch, as in a plain loop over `plan.micro_batches`. With one reduction after the loop ("step") each device runs
the loop on its own rows. Counts advance on all of them alike; the keys are folded with the number of the device, so
that no two draw the same masks. What depends on the examples (the statistics of BatchNorm) would differ from device to
device: such a loss is reduced in each micro-batch, where XLA computes its statistics over all rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jzero.core import jaxprs
from jzero.core.dependence import data_sources, passed_on
from jzero.core.errors import listing, typed_shape
from jzero.core.random_keys import is_key
from jzero.core.traces import as_written
from jzero.core.types import PyTree
from jzero.gradients.coupling import kinds_of_results
from jzero.gradients.kinds import CONST, Const, Rows
from jzero.layout.leaf_rule import path_name

_SUBJECT = "jzero.value_and_grad: the loss"


@dataclasses.dataclass(frozen=True)
class State:
    """Arrays that a loss reads besides params and arguments, and returns.

    Attributes:
      values: the arrays.
      changed: for each array, whether the loss changes it.
      of_batch: the names of the arrays whose new values depend on the examples.
      new_keys: the names of the random keys that the loss replaces.
      drawn: the names of the arrays whose new values depend on random keys that each device has for itself.
    """

    values: Sequence[Any] = ()
    changed: Sequence[bool] = ()
    of_batch: Sequence[str] = ()
    new_keys: Sequence[str] = ()
    drawn: Sequence[str] = ()

    def replaced(self, values: Sequence[Any]) -> State:
        """The same with other values."""
        return dataclasses.replace(self, values=list(values))

    @property
    def carry(self) -> list[Any]:
        """What goes from micro-batch to micro-batch."""
        return [x for x, c in zip(self.values, self.changed, strict=True) if c]

    def with_carry(self, carry: Sequence[Any]) -> list[Any]:
        """All values, those that change from `carry`."""
        new = iter(carry)
        return [next(new) if c else x for x, c in zip(self.values, self.changed, strict=True)]

    def of_device(self, index: jax.Array) -> list[Any]:
        """All values, with the keys that a device with this number draws from."""
        return [_folded(x, index) if is_key(x) else x for x in self.values]

    @property
    def why_not_step(self) -> str:
        """Why gradients must be reduced in each micro-batch; empty if "step" is possible."""
        if self.of_batch:
            return (
                "changes state of the module based on the examples (batch statistics, as in BatchNorm):\n"
                f"{listing([(n,) for n in self.of_batch])}\nEach device would compute it from its own rows."
            )
        if self.new_keys:
            return (
                f"replaces random keys of the module:\n{listing([(n,) for n in self.new_keys])}\nEach device draws "
                "from its own keys, and would end up with a different one."
            )
        if self.drawn:
            return (
                f"keeps random numbers in the module:\n{listing([(n,) for n in self.drawn])}\nEach device draws its "
                "own, and would end up with different values."
            )
        return ""


def read_state(fn: Callable[..., Any], params: PyTree, args: Any, values: Sequence[Any], paths: Sequence[Any],
               batch: Sequence[bool], keys: Sequence[bool]) -> State:  # fmt: skip
    """What a loss does with the state of its modules, from a trace of it.

    Args:
      fn: `fn(params, args, values) -> (params, values)`, leaves in the order of those that it was given.
      params, args: trees of arrays or ShapeDtypeStructs.
      values: the state, arrays.
      paths: of each of them.
      batch: for each array of `args`, whether it has examples along dim 0.
      keys: for each array of `args`, whether it is a random key that each device has for itself.

    Raises:
      ValueError: the loss changes params, or the shape or dtype of its state.
    """
    arrays, merged = jaxprs.split_arrays((params, args))
    count = len(jaxprs.split_arrays(params)[0])
    names = [path_name(k[1:]) for k in paths]

    def flat(*given):
        p, a = merged(given[: len(arrays)])
        new_params, new = fn(p, a, given[len(arrays) :])
        return [*new_params, *new]

    with as_written():
        jaxpr, consts = jaxprs.trace(flat, *map(_shape, (*arrays, *values)))
    rows = [*[False] * count, *batch, *[False] * len(values)]
    kinds = kinds_of_results(jaxpr, [Rows(0) if r else CONST for r in rows])
    own = [*[False] * count, *keys, *map(is_key, values)]
    draws = data_sources(jaxpr, consts, [frozenset((i,) if k else ()) for i, k in enumerate(own)])[count:]
    same = passed_on(jaxpr, consts)
    _check_params(same[:count])
    _check_types(names, values, [v.aval for v in jaxpr.outvars[count:]])
    changed = [o != len(arrays) + i for i, o in enumerate(same[count:])]
    rows_of_state = list(zip(names, values, changed, kinds[count:], strict=True))
    return State(
        list(values), changed,
        [f"{n} {typed_shape(x)}" for n, x, c, k in rows_of_state if c and not isinstance(k, Const)],
        [n for n, x, c, _ in rows_of_state if c and is_key(x)],
        [n for (n, x, c, _), d in zip(rows_of_state, draws, strict=True) if c and d and not is_key(x)],
    )  # fmt: skip


def _folded(keys: Any, index: jax.Array) -> Any:
    flat = jax.vmap(lambda k: jax.random.fold_in(k, index))(keys.reshape(-1))
    return flat.reshape(keys.shape)


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(np.shape(x), x.dtype)


def _check_params(same: Sequence[int | None]) -> None:
    changed = sum(i != o for i, o in enumerate(same))
    if changed:
        raise ValueError(
            f"{_SUBJECT} sets {changed} of the {len(same)} params that it trains. Over micro-batches only the update "
            "may change a param: set it after the update, or keep what the loss sets in a Variable of another type."
        )


def _check_types(names: Sequence[str], before: Sequence[Any], after: Sequence[Any]) -> None:
    bad = [
        (n, typed_shape(a), f"becomes {typed_shape(b)}")
        for n, a, b in zip(names, before, after, strict=True)
        if (np.shape(a), a.dtype) != (b.shape, b.dtype)
    ]
    if bad:
        raise ValueError(
            f"{_SUBJECT} changes the shape or the dtype of module state, which is carried from micro-batch to "
            f"micro-batch:\n{listing(bad)}\nCreate it with the new shape and dtype, or return it as aux (has_aux=True)."
        )
