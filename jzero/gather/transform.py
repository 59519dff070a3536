"""Gather on use: stage 3 for a model that knows nothing of it. `interpreter.py` holds the rule and its notes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.comm import comm_of
from jzero.core import jaxprs
from jzero.core.errors import check_function, warn
from jzero.core.left_behind import StoredValues, left_behind
from jzero.core.nnx_modules import call, has_module, is_module, without_root
from jzero.core.token_loss_rules import has_loss
from jzero.core.traces import as_written, is_as_written, planned
from jzero.core.update_mark import marked_frozen
from jzero.gather.gradients_at_use import is_ordered, reduced_alone
from jzero.gather.host_source import in_device_memory, source_of
from jzero.gather.interpreter import evaluate
from jzero.gather.sharded_weight import Weight
from jzero.gather.walk import Walk, on_shards, plain
from jzero.layout.explicit import explicit_axes, in_auto_mode, result_specs
from jzero.layout.leaf_rule import Frozen, Layout, keyed_shapes
from jzero.layout.mesh import in_shard_map
from jzero.layout.placement import device_type
from jzero.sharding import Plan, check_plan


@dataclasses.dataclass(frozen=True, repr=False)
class GatherOnUse:
    """A function of params that gathers each stored weight where it is used. Equal where function (`==`) and plan are.

    At stage 2 nothing is gathered, but gradients are reduced bucket by bucket ([Note: buckets] in `buckets.py`). At
    stage 1, and for a small model at stage 2, only tied embeddings ([Note: a tied embedding] in `weight_ops.py`) and
    weights that every round of a loop uses (note in `loops.py`) are reduced where they are used; at stage 0 nothing.
    `shard` puts it round `apply_fn` at every stage, so that an eager call with a whole batch is noticed.
    """

    fn: Callable
    plan: Plan

    def __repr__(self):
        name = getattr(self.fn, "__qualname__", type(self.fn).__name__)
        return f"<jzero.gather_on_use: {name}, {self.plan.title}>"

    def __call__(self, *args, **kwargs):
        """Call the function; where params are stored split, each is gathered where it is used."""
        with planned(self.plan):
            return self._call(*args, **kwargs)

    def _call(self, *args, **kwargs):
        params, args, kwargs, fn = self._params_apart(args, kwargs)
        warn_whole_batch(jax.tree.leaves((args, kwargs), is_leaf=is_module), self.plan)
        if not has_module(params):
            return self._on_auto_axes(fn, params, args, kwargs)
        walks = self.plan.config.row.state and not is_as_written()
        config, marks = self.plan.config, self.plan.trained is not self.plan
        if explicit_axes() or walks or marks or config.params_on_host or config.compute_dtype is not None:
            return call(self._on_auto_axes, fn, params, args, kwargs)
        return fn(params, args, kwargs)

    def _on_auto_axes(self, fn, params, args, kwargs):
        """`_evaluate`, under an Explicit mesh on Auto axes: [Note: Explicit axes] in `layout/explicit.py`."""
        trees = params, args, kwargs
        return in_auto_mode(
            self._evaluate, trees, lambda out: result_specs(trees, out, self.plan), self.plan.own_axes, user=fn
        )  # fmt: skip

    def _params_apart(self, args, kwargs) -> tuple[Any, tuple[Any, ...], dict[str, Any], Callable]:
        """The params, the other arguments, and the function as one of these three.

        Params are the first argument, by position or by its name; or the keyword `params` of a function that takes
        something else first, as `__call__` of a Hugging Face model does.

        Raises:
          TypeError: the call has no params.
        """
        try:
            names = list(inspect.signature(self.fn).parameters)
        except (TypeError, ValueError):
            names = []
        first = names[0] if names else ""
        by_name = "params" if "params" in names[1:] and "params" in kwargs else first
        if by_name in kwargs and (by_name == "params" or not args):
            rest = {k: v for k, v in kwargs.items() if k != by_name}
            return kwargs[by_name], args, rest, lambda p, args, kw: self.fn(*args, **kw, **{by_name: p})
        if not args:
            raise TypeError(
                f"jzero.gather_on_use: called without the params. {first or 'They'} must come first, or be passed as "
                f"{first or 'params'}=."
            )
        return args[0], args[1:], kwargs, lambda p, args, kw: self.fn(p, *args, **kw)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the function: `nnx.value_and_grad` resolves keyword arguments by it."""
        return inspect.signature(self.fn)

    def _evaluate(self, fn, params, args, kwargs):
        """`fn(params, args, kwargs)` with the gather rule, where there is something to gather or to reduce."""
        reads = not is_as_written() and self.plan.config.row.state
        if reads and self.plan.config.updates_outside and not in_shard_map():  # which reduces by itself
            leaves, tree = jax.tree.flatten(params)
            layouts = self._layouts(params, required=False)
            params = tree.unflatten(comm_of(self.plan).gradients.where_they_leave(leaves, layouts))
        params = self._marked(params)
        if reads and (self.plan.config.row.params or self._reduces(params)):
            return self.gathering(fn, params, args, kwargs)
        # as it is written a function takes params in device memory, and in the dtype in which it computes
        leaves, tree = jax.tree.flatten(jax.tree.map(in_device_memory, params))
        layouts = self._layouts(params, required=False)
        cast = list(map(self._cast, leaves, layouts))
        given = {id(c): x for c, x in zip(cast, leaves, strict=True) if c is not x}
        out = fn(tree.unflatten(cast), args, kwargs)  # a param that comes back is the param, not its cast
        return jax.tree.map(lambda x: given.get(id(x), x), out) if given else out

    def _marked(self, params) -> Any:
        """The same params, with a mark in the trace on those that the optimizer does not take."""
        if self.plan.trained is self.plan:
            return params
        leaves, tree = jax.tree.flatten(params)
        numbers = {x.keys: i for i, x in enumerate(self.plan.layouts) if x.frozen is Frozen.APART}
        layouts = self._layouts(params, required=False)
        frozen = {i: numbers[y.keys] for i, y in enumerate(layouts) if y is not None and y.keys in numbers}
        known = marked_frozen([leaves[i] for i in frozen], list(frozen.values()), self.plan)
        for i, x in zip(frozen, known, strict=True):
            leaves[i] = x
        return tree.unflatten(leaves)

    def _reduces(self, params) -> bool:
        """True in a trace that reads params of the plan; in a `shard_map` the user reduces the gradients."""
        traced = any(jaxprs.is_tracer(x) for x in jax.tree.leaves(params))
        return traced and not in_shard_map() and any(self._layouts(params, required=False))

    def __getattr__(self, name):
        if name in ("fn", "plan"):  # not set yet: copying, unpickling
            raise AttributeError(name)
        return getattr(self.fn, name)

    def gathering(self, fn, params, args, kwargs):
        """Trace the function, and evaluate it again with the gather rule."""
        leaves, tree = jax.tree.flatten((params, args, kwargs))
        layouts = self._layouts(params) + [None] * (len(leaves) - len(jax.tree.leaves(params)))
        is_array = [isinstance(x, (jax.Array, np.ndarray)) for x in leaves]
        others: list[Any] = []
        out_tree: list[Any] = []
        stored: list[StoredValues] = []

        def on_arrays(*arrays):
            rest = iter(arrays)
            filled = [next(rest) if a else x for a, x in zip(is_array, leaves, strict=True)]
            filled = [self._cast(x, y) for x, y in zip(filled, layouts, strict=True)]
            with as_written():
                outs, outs_tree = jax.tree.flatten(fn(*jax.tree.unflatten(tree, filled)))
            others[:] = [None if _is_output(o) else o for o in outs]
            self._check_no_function(others)
            out_tree[:] = [outs_tree]
            stored[:] = left_behind(self.fn)
            return [*(o for o in outs if _is_output(o)), *(x for place in stored for x in place.values)]

        arrays = [x for x, a in zip(leaves, is_array, strict=True) if a]
        picked = [y for y, a in zip(layouts, is_array, strict=True) if a]
        jaxpr, consts = jaxprs.trace(on_arrays, *map(device_type, arrays))
        losses = has_loss(jaxpr)
        if not comm_of(self.plan).gradients.on_use:
            picked = reduced_alone(self.plan, jaxpr, picked)
            if not any(picked) and not stored and not losses:
                return fn(params, args, kwargs)
        ordered = is_ordered(self.plan, jaxpr, [y is not None for y in picked])
        walk = Walk(self.plan, evaluate, ordered=ordered, losses=losses)
        values = [x if y is None else self._weight(x, y, walk) for x, y in zip(arrays, picked, strict=True)]
        outs = evaluate(walk, jaxpr, consts, on_shards(values, walk), cast=self.plan.config.compute_dtype)
        outs = iter(plain(outs))
        filled = jax.tree.unflatten(out_tree[0], [next(outs) if o is None else o for o in others])
        for place in stored:
            place.put([next(outs) for _ in place.values])
        return filled

    def _weight(self, x, y: Layout, walk: Walk) -> Weight:
        return Weight(
            x, y.stored, y.used, y.grad, source=source_of(x, y), trained=y.frozen is None,
            order=walk.comm.weights.order(y), keeps=y.name in self.plan.kept_gathered,
        )  # fmt: skip

    def _check_no_function(self, outs: Sequence[Any]) -> None:
        """Raises TypeError for a function among the results: its weights no longer exist outside of the trace."""
        if any(callable(o) for o in outs):
            raise TypeError(
                f"jzero.gather_on_use: {getattr(self.fn, '__qualname__', 'the function')} returns a function (curried, "
                "or a bound model), but weights are gathered only while it runs. Pass a function that takes all "
                "arguments at once: apply_fn = lambda params, x: curried(params)(x)."
            )

    def _cast(self, value, layout: Layout | None):
        """`compute_dtype`: a cast at the very start of the traced function, which the walk keeps on the shard."""
        dtype = self.plan.config.compute_dtype
        real = layout is not None and jnp.issubdtype(layout.dtype, jnp.floating)
        return value.astype(dtype) if real and dtype is not None else value

    def _layouts(self, params, *, required: bool = True) -> list[Layout | None]:
        """The layout of each leaf of the first argument: params, Flax variables, or an NNX module taken apart."""
        by_keys = self.plan.by_keys
        shapes = keyed_shapes(params)
        as_named = by_keys.keys() <= {keys for keys, _ in shapes}  # also where a param is called `params` or `states`
        found: list[Layout | None] = []
        for keys, shape in shapes:
            inside = keys[1:] if keys[:1] == ("params",) else without_root(keys)
            x = by_keys.get(keys if as_named else inside) or by_keys.get(keys)
            found.append(x if x is not None and x.shape == shape else None)
        if required and not any(found):
            raise ValueError(
                "jzero.gather_on_use: the first argument holds none of the plan's params (looked for "
                f"{self.plan.layouts[0].name} and {len(self.plan.layouts) - 1} more). Pass a function that takes the "
                "params, Flax variables {'params': params} or the nnx.Module first."
            )
        return found


def _is_output(x) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, int, float, complex, np.generic)) and not isinstance(x, bool)


def gather_on_use(fn: Callable, plan: Plan) -> Callable:
    """The same function, with each stored weight gathered where it is used, dropped, and gathered again backward.

    Args:
      fn: `fn(params, ...)`, a Flax `apply` that takes variables first, or a function of an `nnx.Module`, for
        `nnx.value_and_grad(fn)(model, batch)` or called as it is: what it changes in the module is changed as
        without jzero. Traced once per call; static arguments, dropout keys and mutable collections work.
      plan: from `jzero.make_plan`. At stages 1 and 2 nothing is gathered, but the gradient of a weight that every
        round of a loop uses is reduced once, and at stage 2 gradients are reduced bucket by bucket, where they are
        made. At stage 0 `fn` is called as it is. Under an Explicit mesh its axes are Auto inside of `fn` at every
        stage, and what the results are split over follows from the batch.

    Returns:
      A callable with the signature of `fn`; it compares and hashes by `fn` and the plan.

    Raises:
      TypeError: `fn` is not a function, `plan` not a plan; when called, if the params are missing or `fn` returns a
        function.
      ValueError: when called, if the first argument holds none of the plan's params.

    Cost:
      Per device: `prefetch` + 1 buckets of gathered weights; in a remat region smaller than a bucket, all of it. Wire:
      1 Psi forward, 1 Psi backward for the gathers, 1 Psi for the gradients. With `reshard_after_forward=False` all
      gathered weights stay until the backward pass is done with them, and it gathers none.

    References:
      Rajbhandari et al., ZeRO (arXiv:1910.02054), section 5.3; Zhao et al., PyTorch FSDP (arXiv:2304.11277).
    """
    check_function(fn, "fn", where="jzero.gather_on_use")
    check_plan(plan, where="jzero.gather_on_use")
    if isinstance(fn, GatherOnUse):
        fn = fn.fn
    return GatherOnUse(fn, plan)


def warn_whole_batch(leaves: Sequence[Any], plan: Plan) -> None:
    """Warns where concrete batch arrays are not split over the batch axes: every device would compute all of it."""
    parts = plan.batch_parts
    for x in leaves:
        if jaxprs.is_tracer(x) or not isinstance(x, (jax.Array, np.ndarray)) or np.ndim(x) < 2:
            continue  # vectors may be keys or weights; a batch has a feature dim
        rows = x.sharding.shard_shape(x.shape)[0] if isinstance(x, jax.Array) else x.shape[0]
        if parts > 1 and x.shape[0] % parts == 0 and x.shape[0] and rows * parts > x.shape[0]:
            warn(
                f"jzero: a batch array {x.shape} is not split over batch axes {plan.batch_axes}: each of "
                f"{parts} devices computes all of it. Pass plan.place_batch(batch).",
            )
            return
