"""Which params of a state its optimizer takes, as `trainable=`, `wrt=` of an NNX optimizer, or the state tells."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.tree_util import KeyPath

from jzero.core.dependence import sources_of_outputs
from jzero.core.errors import counted, listing, typed_shape, warn
from jzero.core.types import PyTree
from jzero.flax import adapters
from jzero.flax.adapters import Parts
from jzero.flax.conversion import fresh_shapes, outline
from jzero.layout.leaf_rule import path_keys
from jzero.layout.placement import device_type
from jzero.layout.state_layouts import named_by
from jzero.layout.trainable import checked_answers, left_out, trained_by, without
from jzero.optim import is_wrapped

_OVERWRITTEN = "_overwrite_with_gradient"  # `flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT`


def parts_of(state: Any, trainable: Any, *, where: str) -> Parts:
    """The parts of a state, with what its optimizer takes.

    Args:
      state: of a known kind.
      trainable: as `jzero.shard` takes it.
      where: the caller, for the texts.

    Raises:
      TypeError: jzero does not know this kind of state or filter, or the state has scales of fp8 layers.
      ValueError: a filter names no param, a param that the optimizer does not train, or other params than those that
        the state was sharded with.
    """
    parts = adapters.take_apart(state, where=where)
    if adapters.is_pair(state):
        adapters.check_no_dict(*state)
    if isinstance(parts.params, Mapping) and _OVERWRITTEN in parts.params:
        raise TypeError(
            f"{where}: the params hold {_OVERWRITTEN!r} (the scales of Flax's fp8 layers), which a step overwrites "
            "with what comes back as their gradient. jzero does not shard such a state."
        )
    if trainable is None:
        return parts if is_wrapped(parts.tx) or adapters.is_pair(state) else _by_state(parts)
    trained = _by_filter(state, parts, trainable, where)
    if is_wrapped(parts.tx):
        if parts.trained != trained and not (parts.trained is None and all(trained)):
            raise ValueError(
                f"{where}: this state is sharded already, and trainable names other params than it was sharded with. "
                "Leave trainable out, or shard the plain state."
            )
        return parts
    if all(trained) or trained == parts.trained:
        return parts
    given = [t for t, is_taken in zip(trained, parts.trained or [True] * len(trained), strict=True) if is_taken]
    return _of_some(parts, parts.taken, given, trained, where)


def _by_filter(state: Any, parts: Parts, trainable: Any, where: str) -> tuple[bool, ...]:
    """For each param whether the filter names it."""
    if not adapters.is_pair(state) or isinstance(trainable, (bool, dict)):
        trained = trained_by(trainable, parts.params, where=where)
    else:
        trained = _by_nnx_filter(state, trainable, where)
    flat = jax.tree_util.tree_leaves_with_path(parts.params)
    known = parts.trained if parts.trained is not None and not is_wrapped(parts.tx) else [True] * len(flat)
    beyond = [
        (jax.tree_util.keystr(k), typed_shape(x))
        for (k, x), t, is_taken in zip(flat, trained, known, strict=True)
        if t and not is_taken
    ]
    if beyond:
        raise ValueError(
            f"{where}: trainable names {counted(len(beyond), 'param')} that the optimizer does not train:\n"
            f"{listing(beyond)}\nMake the optimizer with the same filter: nnx.Optimizer(model, tx, wrt=...)."
        )
    return tuple(trained)


def _by_nnx_filter(state: Any, trainable: Any, where: str) -> list[bool]:
    from flax import nnx

    boxed, _ = adapters.param_state(*state)
    flat = adapters.variables(boxed)
    try:
        named = nnx.filterlib.to_predicate(trainable)
    except Exception:  # Flax's own error message fails for values that are not filters
        return trained_by(trainable, nnx.as_pure(boxed), where=where)
    if isinstance(trainable, _FUNCTIONS):  # strings, as for a tree, where Flax has numbers for positions in lists
        found = [trainable(path_keys(path), variable) for path, variable, _ in flat]
        _warn_of_numbers(named, flat, found, where)
    else:
        found = [named(tuple(k.key for k in path), variable) for path, variable, _ in flat]
    return checked_answers(found, [(jax.tree_util.keystr(k), x) for k, _, x in flat], where=where)


_FUNCTIONS = types.FunctionType, types.MethodType, functools.partial


def _warn_of_numbers(named: Any, flat: Sequence[tuple[Any, Any, Any]], found: Sequence[Any], where: str) -> None:
    """Warns where a function would name more params if positions in lists were numbers, as in Flax's own paths."""
    for (path, variable, _), answer in zip(flat, found, strict=True):
        keys = tuple(k.key for k in path)
        with contextlib.suppress(TypeError):  # it joins them
            if answer is False and any(isinstance(k, int) for k in keys) and named(keys, variable) is True:
                warn(
                    f"{where}: trainable does not name {path_keys(path)}, and would if positions in lists were "
                    'numbers. A path is a tuple of strings: compare with "1", not with 1.',
                )
                return


def _by_state(parts: Parts) -> Parts:
    """The parts, with only the params that the optimizer state covers, if it does not cover all."""
    got = outline(parts.opt_state)
    if got == outline(fresh_shapes(parts.tx, parts.params)):
        return parts
    at = {_kinds(k): i for i, (k, _) in enumerate(jax.tree_util.tree_leaves_with_path(parts.params))}
    paths = [k for k, _ in jax.tree_util.tree_leaves_with_path(parts.opt_state)]
    found = {next(named_by(_kinds(k), at), None) for k in paths}
    trained = tuple(i in found for i in range(len(at)))
    if all(trained) or not any(trained):
        return parts
    some = _of_some(parts, parts.params, trained, trained, "jzero")
    if got != outline(fresh_shapes(parts.tx, some.taken)):
        return parts
    for other in {tuple(sorted(trained)), tuple(sorted(trained, reverse=True))} - {trained}:
        rest = parts.replace(trained=other, trained_tree=without(parts.params, other))
        if got == outline(fresh_shapes(parts.tx, rest.taken)):
            return parts  # a list of leaves: it may be the state of these params, too, and is refused
    return some


def _of_some(parts: Parts, taken: PyTree, given: Sequence[bool], trained: Sequence[bool], where: str) -> Parts:
    """The parts with an optimizer that takes some of the params.

    Args:
      parts: of a plain state.
      taken: the params that a step hands to the optimizer.
      given: for each of these whether it is trained.
      trained: the same for each param.
      where: the caller, for errors.

    Returns:
      The parts, with the structure of the params that the optimizer state covers. If it covers all params, the leaves
      that are named like frozen ones are dropped.

    Raises:
      ValueError: leaves of a state of all params are computed from frozen and from trained ones.
    """
    forms = [parts.replace(trained=tuple(trained), trained_tree=f(taken, given)) for f in (without, left_out)]
    shapes = [fresh_shapes(parts.tx, form.taken) for form in forms]
    own = jax.tree.structure(parts.opt_state)
    for form, fresh in zip(forms, shapes, strict=True):
        if jax.tree.structure(fresh) == own and outline(fresh) == outline(parts.opt_state):
            return form
    flat = jax.tree_util.tree_leaves_with_path(parts.opt_state)
    by_path = {jax.tree_util.keystr(k): x for k, x in flat}
    wanted, tree = jax.tree_util.tree_flatten_with_path(shapes[0])
    found = [by_path.get(jax.tree_util.keystr(k)) for k, _ in wanted]
    same = [x is not None and np.shape(x) == tuple(w.shape) for x, (_, w) in zip(found, wanted, strict=True)]
    if not all(same) or not _named_apart(taken, given, shapes[0], parts.opt_state):
        return forms[0]  # and the caller refuses a state that is not of its params
    _check_apart(parts.tx, taken, given, {jax.tree_util.keystr(k) for k, _ in wanted}, where)
    return forms[0].replace(opt_state=tree.unflatten(found))


def _named_apart(params: PyTree, trained: Sequence[bool], wanted: PyTree, given: PyTree) -> bool:
    """True if the leaves of a state that is cut to the trained params are known by the names of the params.

    A list over all params is not: its first leaves have the paths that a list over the trained ones has.
    """
    flat = jax.tree_util.tree_leaves_with_path(params)
    named = {_kinds(k): (np.shape(x), t) for (k, x), t in zip(flat, trained, strict=True)}
    kept = {}
    for path, x in jax.tree_util.tree_leaves_with_path(wanted):
        keys = _kinds(path)
        kept[keys] = [is_trained for shape, is_trained in named_by(keys, named) if shape == np.shape(x)]
    if any(found and not any(found) for found in kept.values()):
        return False  # it would be the leaf of a frozen param
    every = {_kinds(k) for k, _ in jax.tree_util.tree_leaves_with_path(given)}
    return all(_names_inside(keys) & named.keys() for keys in every - kept.keys())


def _names_inside(keys: tuple[Any, ...]) -> set[tuple[Any, ...]]:
    """Every run of the keys of a path."""
    return {keys[i:j] for i, j in itertools.combinations(range(len(keys) + 1), 2)}


def _kinds(path: KeyPath) -> tuple[tuple[bool, str], ...]:
    """The keys of a path: a position in a list is not the name of a param that is a number."""
    return tuple(
        (isinstance(k, jax.tree_util.SequenceKey), name) for k, name in zip(path, path_keys(path), strict=False)
    )


def _check_apart(
    tx: optax.GradientTransformation, params: PyTree, trained: Sequence[bool], kept: Collection[str], where: str
) -> None:
    """Raises ValueError if leaves of the state of all params that would be kept depend on frozen ones too."""
    shapes = jax.tree.map(device_type, params)
    flat = jax.tree_util.tree_leaves_with_path(jax.eval_shape(tx.init, shapes))
    sources = sources_of_outputs(lambda params: jax.tree.leaves(tx.init(params)), shapes)
    frozen = {i for i, t in enumerate(trained) if not t}
    mixed = [
        (jax.tree_util.keystr(k), typed_shape(x))
        for (k, x), found in zip(flat, sources, strict=True)
        if jax.tree_util.keystr(k) in kept and found & frozen
    ]
    if mixed:
        raise ValueError(
            f"{where}: the optimizer state is of all params, and {counted(len(mixed), 'leaf', 'leaves')} of it would "
            f"not be the same of the trained ones alone, since tx.init computes it from frozen ones too:\n"
            f"{listing(mixed)}\nMake the state of the trained params: opt_state=tx.init(own), with None in own in "
            "place of each frozen param."
        )
