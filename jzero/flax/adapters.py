"""The kinds of train state that jzero knows: how to take each apart, and put it together again.

Flax is never imported for a state that does not use it: a TrainState is recognized by its fields, an NNX
object by its class once `flax.nnx` is loaded.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax.tree_util import Partial

from jzero.core.errors import is_array
from jzero.core.nnx_modules import is_module, is_module_class, is_variable
from jzero.core.types import PyTree, PyTreeDef
from jzero.layout.given_layouts import Given, metadata_layout
from jzero.layout.leaf_rule import Frozen
from jzero.optim import ZeroState, as_held, is_wrapped, whole_state
from jzero.update.on_host.handles import Handle
from jzero.update.zero_state import inner_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parts:
    """A train state taken apart, its params first.

    Attributes:
      step: the step counter, a number or an array; None for a state without one.
      tx: the optax transformation; None in a part of a state that has none.
      specs: for each param what NNX metadata says of its layout, or None.
      trained: for each param whether the optimizer takes it; None: it takes all.
      trained_tree: the structure in which it takes them; None: that of all params.
    """

    params: PyTree
    opt_state: PyTree
    step: Any
    rest: PyTree
    tx: Any = dataclasses.field(metadata={"static": True})
    apply_fn: Callable[..., Any] | None = dataclasses.field(metadata={"static": True})
    specs: tuple[Given | None, ...] | None = dataclasses.field(default=None, metadata={"static": True})
    trained: tuple[bool, ...] | None = dataclasses.field(default=None, metadata={"static": True})
    trained_tree: PyTreeDef | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def taken(self) -> PyTree:
        """The params that the optimizer takes, in the structure in which it takes them."""
        if self.trained is None or self.trained_tree is None:
            return self.params
        rows = zip(jax.tree.leaves(self.params), self.trained, strict=True)
        return self.trained_tree.unflatten([x for x, t in rows if t])

    def replace(self, **changes: Any) -> Parts:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def is_creator(state: object) -> bool:
    """True for a function that creates a state."""
    return callable(state) and not is_train_state(state) and not is_pair(state) and not hasattr(state, "tx")


def check_state(state: Any, *, where: str) -> None:
    """Raises TypeError unless this is a state or a function that may create one, and says what to pass instead."""
    cls = state if isinstance(state, type) else type(state)
    kind = cls.__name__
    if is_module_class(cls):
        raise _no_pair(kind, where)
    if is_module_class(cls, "flax.linen"):
        raise TypeError(
            f"{where}: {kind} is a model, not a train state: it has neither params nor an optimizer. Pass "
            "TrainState.create(apply_fn=model.apply, params=params, tx=tx), or a function that returns it."
        )
    if callable(state) and not isinstance(state, Partial) and any(map(is_array, jax.tree.leaves(state))):
        raise TypeError(
            f"{where}: {kind} is a model, not a train state. Lay out its params, and wrap the optimizer: "
            "plan = jzero.make_plan(params, ...), params = plan.place(params), tx = jzero.zero(tx, plan)."
        )
    if not (is_train_state(state) or is_pair(state) or is_creator(state)):
        raise _unknown(state, where)


def take_apart(state: Any, *, where: str, values: bool = True) -> Parts:
    """The parts of a state; without `values` handles stay, and nothing is read from files.

    Raises:
      TypeError: a kind that jzero does not know.
    """
    if not (is_train_state(state) or is_pair(state)):
        raise _unknown(state, where)
    parts = _train_state_parts(state) if is_train_state(state) else _pair_parts(*state)
    return whole(parts) if values else parts


def whole(parts: Parts) -> Parts:
    """The parts with arrays in place of handles. The plan of a wrapped optimizer says which params it takes."""
    opt_state, params = whole_state(parts.opt_state, parts.params, parts.tx)
    parts = parts.replace(opt_state=opt_state, params=params)
    if not is_wrapped(parts.tx):
        return parts
    plan = parts.tx.init.plan
    trained = None if plan.trained_tree is None else tuple(x.frozen is not Frozen.APART for x in plan.layouts)
    return parts.replace(trained=trained, trained_tree=plan.trained_tree)


def _no_pair(kind: str, where: str) -> TypeError:
    return TypeError(
        f"{where}: {kind} is not a train state. An NNX model goes with its optimizer, as one pair, the model first: "
        f"{where}((model, optimizer), stage=2), with optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)."
    )


def _unknown(state: Any, where: str) -> TypeError:
    if isinstance(state, (tuple, list)) and is_pair(state[::-1]):
        return _no_pair(type(state).__name__, where)
    return TypeError(
        f"{where}: a state of type {type(state).__name__} is not known. Known are a Flax TrainState (params, tx, "
        "opt_state, replace), a pair (nnx.Module, nnx.Optimizer), and a function without arguments that returns one. "
        "For any other loop: plan = jzero.make_plan(params, ...) and tx = jzero.zero(tx, plan)."
    )


def put_together(state: Any, parts: Parts) -> Any:
    """A state like `state` with other parts; an NNX pair is changed in place."""
    if is_train_state(state):
        return rebuilder(state)(parts)
    model, optimizer = state
    _fill_pair(model, optimizer, parts)
    return state


def rebuilder(state: Any) -> Callable[[Parts], Any]:
    """A function that makes a new state like this one from parts. It holds no arrays of `state`."""
    if is_train_state(state):
        return partial(_train_state_from, jax.tree.map(lambda _: 0, state))
    return _pair_rebuilder(*state)


def is_train_state(state: object) -> bool:
    """True for a Flax TrainState, and for a dataclass with its fields."""
    return all(
        hasattr(state, name) for name in ("params", "opt_state", "tx", "replace")
    ) and dataclasses.is_dataclass(state)


def _rest_fields(state: Any) -> list[str]:
    taken = ("params", "opt_state", "step", "tx", "apply_fn")
    fields = dataclasses.fields(state)
    return [f.name for f in fields if f.name not in taken and f.metadata.get("pytree_node", True)]


def _train_state_parts(state: Any) -> Parts:
    rest = {name: getattr(state, name) for name in _rest_fields(state)}
    apply_fn, params = getattr(state, "apply_fn", None), state.params
    return Parts(params, state.opt_state, getattr(state, "step", None), rest, state.tx, apply_fn)


def _train_state_from(like: Any, parts: Parts) -> Any:
    opt_state = as_held(parts.opt_state, parts.params, parts.tx, step=parts.step)
    changes = dict(parts.rest, params=parts.params, opt_state=opt_state, tx=parts.tx)
    changes |= {"apply_fn": parts.apply_fn} if hasattr(like, "apply_fn") else {}
    changes |= {"step": parts.step} if hasattr(like, "step") else {}
    state = copy.copy(like)  # as jax unflattens it: `replace` runs __init__, which may check for arrays
    for name, value in changes.items():
        object.__setattr__(state, name, value)
    return state


def is_pair(state: object) -> bool:
    """True for (nnx.Module, nnx.Optimizer)."""
    if not isinstance(state, (tuple, list)) or len(state) != 2 or not is_module(state[0]):
        return False
    return isinstance(state[1], sys.modules["flax.nnx"].Optimizer)


def with_optimizer(model: Any) -> Any:
    """A pair of an `nnx.Module` and an optimizer that has no state."""
    import optax
    from flax import nnx

    return model, nnx.Optimizer(model, optax.identity(), wrt=nnx.Param)


def is_nnx_optimizer(x: object) -> bool:
    """True for an `nnx.Optimizer`."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Optimizer)


def param_state(model: Any, optimizer: Any) -> tuple[PyTree, PyTree]:
    """The `nnx.State` of a model's params, frozen ones too, and that of its other Variables which are not trained."""
    from flax import nnx

    params, rest = nnx.state(model, nnx.filterlib.Any(optimizer.wrt, nnx.Param), ...)
    return params, rest


def variables(state: PyTree) -> list[tuple[tuple[Any, ...], Any, Any]]:
    """For every array of an `nnx.State` its Variable's path, the Variable, and the array: it may hold several."""
    found = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_variable)
    return [(path, variable, x) for path, variable in found for x in jax.tree.leaves(variable)]


def _pair_parts(model: Any, optimizer: Any) -> Parts:
    from flax import nnx

    (boxed, rest), own = param_state(model, optimizer), nnx.state(model, optimizer.wrt)
    params, opt_state, flat = nnx.as_pure(boxed), nnx.as_pure(optimizer.opt_state), variables(boxed)
    specs = tuple(metadata_layout(v) for _, v, _ in flat)
    parts = Parts(params, opt_state, nnx.as_pure(optimizer.step), nnx.as_pure(rest), optimizer.tx, None, specs)
    names = {k for k, *_ in variables(own)}
    trained = tuple(k in names for k, *_ in flat)
    if all(trained):
        return parts
    return parts.replace(trained=trained, trained_tree=jax.tree.structure(nnx.as_pure(own)))


def check_no_dict(model: Any, optimizer: Any) -> None:
    """Raises TypeError for trained Variables that hold a dict: Flax's update makes an `nnx.State` of it."""
    from flax import nnx

    own = nnx.state(model, optimizer.wrt)
    rows = {jax.tree_util.keystr(k) for k, v, _ in variables(own) if isinstance(v.get_raw_value(), Mapping)}
    if rows:
        raise TypeError(
            f"jzero: the trained {', '.join(sorted(rows))} of the model holds a dict, of which nnx.Optimizer.update "
            "makes an nnx.State. Hold each array in a Variable of its own: nnx.Dict(a=nnx.Param(...), ...)."
        )


def _fill_pair(model: Any, optimizer: Any, parts: Parts) -> None:
    from flax import nnx

    held = as_held(parts.opt_state, parts.params, parts.tx, step=parts.step)  # may raise: before the pair changes
    boxed, _ = param_state(model, optimizer)
    filled = jax.tree.map(lambda v, x: v.replace(x), boxed, parts.params, is_leaf=is_variable)
    nnx.update(model, filled)  # of Variables: from arrays alone, a dict in one would become an nnx.State
    nnx.update(model, parts.rest)
    optimizer.tx = parts.tx
    optimizer.opt_state = nnx.data(_opt_variables(optimizer.opt_state, held))
    optimizer.step.set_value(parts.step)


def _opt_variables(old: PyTree, new: PyTree) -> PyTree:
    """The new optimizer state in NNX variables: those of the old one where the leaves correspond.

    A variable may hold a tree (the accumulators of SM3), also one without leaves (`optax.MaskedNode`). Handles are not
    arrays, and stand outside of variables.
    """
    from flax import nnx
    from flax.nnx.training.optimizer import OptArray

    def is_handle(x: object) -> bool:
        return isinstance(x, Handle)

    def filled(v: Any, value: Any) -> Any:
        if value is None:  # a frozen param has no moments
            return None
        if isinstance(v, nnx.Variable) and not any(map(is_handle, jax.tree.leaves(value, is_leaf=is_handle))):
            return v.replace(value)
        return jax.tree.map(lambda x: x if is_handle(x) else OptArray(x), value, is_leaf=is_handle)

    old_inner = inner_of(old)
    new_inner = inner_of(new)
    inner = jax.tree.map(filled, old_inner, new_inner, is_leaf=lambda x: isinstance(x, nnx.Variable | Handle))
    if not isinstance(new, ZeroState):
        return inner
    return ZeroState(inner, *(jax.tree.map(OptArray, x) for x in new[1:]))


def _pair_rebuilder(model: Any, optimizer: Any) -> Callable[[Parts], Any]:
    from flax import nnx

    graph, leaves = nnx.split((model, optimizer))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), nnx.as_pure(leaves))

    def rebuild(parts: Parts) -> Any:
        pair = nnx.merge(graph, shapes)
        _fill_pair(*pair, parts)
        return pair

    return rebuild
