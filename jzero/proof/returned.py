"""Which result of a step takes the place of which argument.

[Note: by values, else by path]
A path does not say it: in `step(teacher, params, opt)` two arguments end in the names of the params, and one of them
comes back. Where jzero has traced the program, a result replaces an argument whose values it keeps: new params are the
old ones plus something, an average is a part of the old one. Gradients keep no values of the params, since these reach
them only through products and sums. Of several results with values of an argument the path says which. New params that
are cast from a master keep the values of that, so the params and the state of an update count as one. A result that
keeps no values (an orthogonal factor, a count that starts again) is matched by its path. Where it would replace a
param, it must also depend on optimizer state; otherwise it is a gradient. In programs without a trace, paths decide
alone.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Mapping, Sequence

import jax

from jzero.core.dependence import data_sources
from jzero.core.jaxprs import opened
from jzero.core.traces import Trace, trace_of
from jzero.flax.donation import NOT_KEPT
from jzero.proof.arguments import GivenArgument, Keys, result_keys
from jzero.proof.hlo import Shape
from jzero.proof.record import TraceRecord, record_of
from jzero.sharding import Plan

Table = Mapping[int, Sequence[int]]
"""By number of an argument the numbers of results that may take its place."""


def replaced_by(
    given: Sequence[GivenArgument],
    compiled: jax.stages.Compiled,
    plan: Plan,
    shapes: Sequence[Shape],
    copies: Collection[int],
) -> dict[int, int]:
    """By number of the argument the number of the result that takes its place; see [Note: by values, else by path].

    Args:
      given: the arguments of the program.
      compiled: the program.
      plan: the plan.
      shapes: of the results.
      copies: numbers of the arguments that are params or copies of them outside of the optimizer state.
    """
    outs = result_keys(compiled)
    if len(outs) != len(shapes):
        return {}
    by_path, found = _named(given, outs, plan, shapes), dict[int, int]()
    trace, record = trace_of(compiled), record_of(compiled)
    if trace is None or record is None:
        _assign(found, by_path)
    else:
        _by_values(found, trace, record, given, by_path, copies)
    return found


def _named(given: Sequence[GivenArgument], outs: Sequence[Keys], plan: Plan, shapes: Sequence[Shape]) -> Table:
    """The results whose paths end as that of an argument does; arguments with long paths come first."""
    by_end: dict[Keys, list[int]] = collections.defaultdict(list)
    for r, keys in enumerate(outs):
        for cut in range(min(3, len(keys))):
            by_end[keys[cut:]].append(r)
    alone = plan.by_keys.get(())  # params that are a bare array have no name, and come back at the top
    if alone is not None:
        sizes = (alone.shape, plan.param_sharding(alone).shard_shape(alone.shape))
        by_end[()] = [r for r, keys in enumerate(outs) if len(keys) < 3 and shapes[r].dims in sizes]
    # a bare tree ends as `state.params` does: it comes later
    rows = sorted(enumerate(x.keys for x in given), key=lambda row: -len(row[1]))
    return {i: (len(keys) > 2 and by_end.get(keys)) or by_end.get(keys[2:], []) for i, keys in rows}


def _by_values(
    found: dict[int, int],
    trace: Trace,
    record: TraceRecord,
    given: Sequence[GivenArgument],
    by_path: Table,
    copies: Collection[int],
) -> None:
    kept = _sources(trace, range(len(given)), NOT_KEPT)
    avals = [v.aval for v in opened(trace.jaxpr)[0].outvars]
    updates = {i: k for k, u in enumerate(record.updates) for i in (*u.params, *u.state) if i is not None}
    by_own = _results_of(kept, {i: i for i in by_path})
    by_update = _results_of(kept, updates)
    for of in (by_own, by_update):
        _assign(found, {i: [r for r in rows if r in of.get(i, ())] for i, rows in by_path.items()}, fewest=True)

    def alike(i: int, r: int) -> bool:
        return (avals[r].shape, avals[r].dtype) == (given[i].shape, given[i].dtype)

    for of in (by_own, by_update):  # the record knows these arguments, whatever their results are called
        _assign(found, {i: [r for r in sorted(of[i]) if alike(i, r)] for i in updates}, fewest=True)
    if not all(i in found for i in copies):
        made = _sources(trace, {i for u in record.updates for i in u.state if i is not None})
        gradients = {r for r, both in enumerate(zip(kept, made, strict=True)) if not any(both)}
        by_path = {i: [r for r in rows if i not in copies or r not in gradients] for i, rows in by_path.items()}
    _assign(found, by_path)


def _assign(found: dict[int, int], table: Table, *, fewest: bool = False) -> None:
    """Each argument gets the first of its results that is free; with `fewest`, first those that have few results."""
    taken = set(found.values())
    for i in sorted(table, key=lambda i: len(table[i])) if fewest else table:
        r = next((r for r in table[i] if r not in taken), None)
        if i not in found and r is not None:
            found[i] = r
            taken.add(r)


def _sources(trace: Trace, arguments: Collection[int], ends: Collection[str] = ()) -> list[frozenset[int]]:
    """For each result those of the arguments whose values are in it; not through equations named in `ends`."""
    jaxpr, consts = opened(trace.jaxpr)
    sources = [frozenset((i,) if i in arguments else ()) for i in range(len(jaxpr.invars))]
    return data_sources(jaxpr, consts, sources, ends)


def _results_of(sources: Iterable[frozenset[int]], groups: Mapping[int, int]) -> dict[int, set[int]]:
    """By argument the results with values of some argument of its group."""
    found: dict[int, set[int]] = collections.defaultdict(set)
    for r, arguments in enumerate(sources):
        for i in arguments & groups.keys():
            found[groups[i]].add(r)
    return {i: found[group] for i, group in groups.items()}
