"""Does a loss keep its examples apart? Checked on its jaxpr, so that micro-batches do not silently change the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero.core import jaxprs
from jzero.core.errors import listing, warn
from jzero.core.primitives import DRAWS
from jzero.core.types import PyTree
from jzero.gradients.coupling import kinds_of_results, kinds_with_statistics
from jzero.gradients.growth import MIXED, Growth, growths
from jzero.gradients.kinds import CONST, Kind, Ratio, Rows, Total, Unknown, couples
from jzero.gradients.means import SUM, WEIGHTED, refuse_aux, warn_of_aux, way_of_aux
from jzero.gradients.module_state import State, is_key
from jzero.gradients.random_draws import Sources, Unmatched, shared_draws

_SUBJECT = "jzero.value_and_grad: the loss"
MICRO_BATCH, DEVICE = "micro-batch", "device"
ALLOWED, STATISTICS = "allowed", "statistics"
"""Why a loss may couple examples: the user says so, or its module keeps statistics of the batch."""


@dataclasses.dataclass(frozen=True)
class _Input:
    """An array that a loss is called with.

    Attributes:
      name: of where it comes from.
      in_batch: it has examples along dim 0.
      own: the parts of the batch each of which has an array of its own.
    """

    name: str
    in_batch: bool = False
    own: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss as it is called on one micro-batch, to be checked before any of them runs.

    Attributes:
      fn: `fn(params, args, values) -> (loss, (aux, values))`, the values those of `state`.
      params, args: arrays or ShapeDtypeStructs, batch leaves with the rows of a micro-batch.
      state: of NNX objects.
      batch: positions in `args` whose leaves have examples along dim 0.
      rngs: positions in `args` of keys, one for each part of the batch.
      weight: `weight(*batch arguments)`, what the mean of a micro-batch divides by; None: they count alike.
      parts: what the parts of the batch are: micro-batches, each device's rows, or both.
    """

    fn: Callable[..., Any]
    params: PyTree
    args: Sequence[Any]
    state: State
    batch: Sequence[int]
    rngs: Sequence[int]
    weight: Callable[..., Any] | None
    parts: frozenset[str]

    @property
    def weighted(self) -> bool:
        """Micro-batches are weighted."""
        return self.weight is not None

    def check(self, *, coupled: str) -> list[str]:
        """For the loss and each leaf of aux what its micro-batches add up to. Raises if they would change the loss.

        Args:
          coupled: `ALLOWED`; `STATISTICS`: a loss may couple examples by the statistics that its module keeps; empty:
            neither.

        Raises:
          ValueError: the loss couples examples, is a ratio of sums and not weighted, or a mean of all examples and
            weighted by their values, neither a mean nor a sum, or draws random numbers of a key that all parts share;
            or aux has one value per example, a bool, or an int that is not a sum over examples.
        """
        arrays, merged = jaxprs.split_arrays((self.params, tuple(self.args), list(self.state.values)))
        inputs = self._inputs()
        examples = next(x.shape[0] for x, i in zip(arrays, inputs, strict=True) if i.in_batch)
        aux_types: list[tuple[str, Any]] = []

        def flat(*arrays):
            loss, (aux, values) = self.fn(*merged(arrays))
            leaves = jax.tree_util.tree_leaves_with_path(aux)
            aux_types[:] = [(jax.tree_util.keystr(k), jax.typeof(x)) for k, x in leaves]
            return [loss, *(x for _, x in leaves), *values]

        def traced(times: int):
            rows = zip(arrays, inputs, strict=True)
            shapes = [(times * x.shape[0], *x.shape[1:]) if i.in_batch else x.shape for x, i in rows]
            typed = [jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(shapes, arrays, strict=True)]
            return jaxprs.trace(flat, *typed), list(aux_types)

        (small, types), (large, longer) = traced(1), (None, None)
        try:
            pair = ((small, types), traced(2)) if examples > 1 else (traced(2), traced(4))
        except Exception:  # raised by the user's function: it works with one batch size only
            pass
        else:
            (small, types), (large, longer) = pair
        refuse_aux(types, longer, examples)
        rows: list[Kind] = [Rows(0) if i.in_batch else CONST for i in inputs]
        state = [len(types) + 1 + i for i, c in enumerate(self.state.changed) if c]
        statistics = coupled == STATISTICS
        kinds = kinds_with_statistics(small[0], rows, state) if statistics else kinds_of_results(small[0], rows)
        # one part is the whole batch: nothing to couple it with; a single example looks like a dim of size 1
        matters = bool(self.parts) and coupled != ALLOWED and (examples > 1 or large is not None)
        if matters:
            _refuse(kinds[0], self.weighted)
        grown: list[Growth] = [None] * (len(types) + 1)
        if large is not None:
            self._refuse_shared_draws(small[0], large[0], inputs)
            grown = growths(small, large)[: len(types) + 1]
        of_loss = SUM if self._is_sum(grown[0], coupled) else WEIGHTED
        aux = list(zip(types, kinds[1:], grown[1:], strict=False))
        if matters:
            warn_of_aux(aux, weighted=self.weighted)
            if isinstance(kinds[0], Total) and grown[0] == 1.0 and self._weight_varies():
                raise ValueError(
                    f"{_SUBJECT} divides by the same number for every batch, and weight= is for a mean that divides by "
                    "what weight returns (the tokens that are not padding). Leave weight out: the mean of such "
                    "micro-batches is that of the whole batch."
                )
        return [of_loss, *(way_of_aux(*row, weighted=self.weighted) for row in aux)]

    def _weight_varies(self) -> bool:
        """True if `weight` reads the values of the batch, not only its shapes."""
        weight = self.weight
        if weight is None:
            return False
        arrays, merged = jaxprs.split_arrays(tuple(self.args[i] for i in self.batch))
        typed = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        jaxpr, _ = jaxprs.trace(lambda *xs: [jnp.asarray(weight(*merged(xs)))], *typed)
        return kinds_of_results(jaxpr, [Rows(0)] * len(arrays)) != [CONST]

    def _inputs(self) -> list[_Input]:
        """What each array that the loss is called with is: those of params, then of `args`, then of the module."""
        found = [_Input("params") for _ in jaxprs.split_arrays(self.params)[0]]
        for i, arg in enumerate(self.args):
            own = self.parts if i in (*self.batch, *self.rngs) else frozenset()
            found += [_Input(f"argument {i + 1}", i in self.batch, own) for _ in jaxprs.split_arrays(arg)[0]]
        for x, changed in zip(self.state.values, self.state.changed, strict=True):
            own = frozenset(p for p, has in ((MICRO_BATCH, changed), (DEVICE, is_key(x))) if has)
            found.append(_Input("the module", own=own))
        return found

    def _refuse_shared_draws(self, small, large, inputs: Sequence[_Input]) -> None:
        """Raises ValueError for random numbers of a key that all parts share, in the traces of two batch sizes."""

        def differs(sources: Sources) -> bool:
            return self.parts <= set().union(*(inputs[i].own for i in sources))

        try:
            drawn = shared_draws(small, large, differs)
        except Unmatched as at:
            drawn = []
            if any(eqn.primitive.name in DRAWS for eqn in jaxprs.every_equation(small)):
                warn(
                    f"{_SUBJECT} has other equations for a larger batch ({at}), so it could not be checked for "
                    "random numbers that are the same for all parts of the batch.",
                )
        _refuse_draws(drawn, [i.name for i in inputs])

    def _is_sum(self, grown: Growth, coupled: str) -> bool:
        """Whether the loss is a sum over examples; raises ValueError if it is neither a sum nor a mean."""
        if grown == 2.0 and not self.weighted:
            return True
        accepted = coupled == ALLOWED or (coupled == STATISTICS and grown is None)
        if grown != 1.0 and not accepted and (grown or not self.weighted):
            what = {
                2.0: "is a sum over examples, and weight= is for means",
                MIXED: "adds up what grows with the batch (a sum over examples) and what does not (an L2 term, a mean)",
                None: "is neither a mean over examples nor a sum of them, as far as jzero can tell from its trace",
            }.get(grown, f"becomes {grown} times as large when a batch has every example twice")
            raise ValueError(
                f"{_SUBJECT} {what}. Micro-batches of a mean are averaged, those of a sum are summed. Divide the sum "
                "by the number of examples; for a mean over something else pass weight=lambda batch: ..., the number "
                "that it divides by (1.0 if micro-batches count alike). Or take the whole batch at once: accumulate=1 "
                'and reduce="microbatch".'
            )
        return False


def _refuse_draws(drawn: Sequence[tuple[str, frozenset[int]]], names: Sequence[str]) -> None:
    if not drawn:
        return
    rows = [
        (place, " and ".join(sorted({names[i] for i in sources})) or "a key that the loss closes over or makes itself")
        for place, sources in drawn
    ]
    raise ValueError(
        f"{_SUBJECT} draws random numbers for each example from a key that is the same for all parts of the batch, "
        f"so all parts would get the same numbers:\n{listing([('drawn at', 'key from'), *rows])}\nPass the key as an "
        "argument of the loss and name its position: rng_argnums=2 for loss(params, batch, key). An NNX module draws "
        "from nnx.Rngs, whose counts advance."
    )


def _refuse(kind: Kind, weighted: bool) -> None:
    if isinstance(kind, Rows) or couples(kind):
        where = getattr(kind, "where", "at its end")
        raise ValueError(
            f"{_SUBJECT} couples examples ({where}): on micro-batches, or on one device's part of them, it differs "
            "from the loss of the whole batch. BatchNorm and contrastive losses do this. Use accumulate=1, or "
            'coupled="allow" to take the loss of each micro-batch as it is.'
        )
    if isinstance(kind, Ratio) and not weighted:
        raise ValueError(
            f"{_SUBJECT} is a sum over examples divided by another (a mean over tokens that are not padding): the mean "
            "of such means is not the mean of all. Pass weight=lambda batch: batch['mask'].sum(), what it divides by."
        )
    if isinstance(kind, Unknown):
        warn(
            f"{_SUBJECT} could not be checked for examples that depend on each other ({kind.where}). Micro-batches "
            "give the right gradients only if no example depends on another.",
        )
