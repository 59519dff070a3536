"""What a step does with its params, read from its trace: for the closed form of the wire."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jzero.comm.uses import EVALUATED, GATHERS, Use, Uses
from jzero.core.errors import check_arrays, is_argument
from jzero.core.graph import Graph, Node
from jzero.core.primitives import ELEMENTWISE, LOOPS, REDUCING, REMAT
from jzero.core.products import PRODUCTS, gradient_dtype, row_lookup
from jzero.core.regions import bodies, loop_consts, scan_parts
from jzero.core.token_loss_rules import GRADIENTS, LOSS
from jzero.core.traces import Trace, as_written, innermost
from jzero.core.types import Jaxpr, PyTree
from jzero.core.update_mark import FROZEN
from jzero.gather.weight_graph import MOVES, WeightGraph
from jzero.layout.batches import MICRO_SCOPE
from jzero.layout.leaf_rule import Layout
from jzero.layout.specs import split_dims
from jzero.proof.arguments import GivenArgument, arguments_given, find_plan, jitted_fn
from jzero.proof.leaves import layouts_of, roles_of, tree_of_params
from jzero.proof.record import TraceRecord, record
from jzero.sharding import Plan, check_plan

LINEAR = frozenset(
    """
    add add_any sub neg concatenate reshape broadcast_in_dim squeeze slice transpose convert_element_type copy pad rev
    split dynamic_slice reduce_sum gather
    """.split()  # noqa: SIM905 - as in `core/primitives.py`
)
"""The derivative reads no operand."""
STAYS = ELEMENTWISE | REDUCING | {"reshape"}
"""Made from shards where they lie; for a reshape that holds as a rule."""
SAME = ("device_put", FROZEN)
_GRAD = re.compile(r"jvp\(|transpose\(|jzero\.")
_CUT = re.compile(rf"{re.escape(MICRO_SCOPE)}(\d+)")


def param_uses(step: Callable[..., Any], *args: PyTree, plan: Plan | None = None, **kwargs: PyTree) -> Uses:
    """What a train step does with each param: for `estimate(plan, uses=)`, which knows only shapes without it.

    The step is traced as plain Flax would, without jzero's collectives, and nothing is compiled.

    Args:
      step: a train step that takes gradients, jitted or not.
      *args: its arguments; `jax.ShapeDtypeStruct` leaves will do.
      plan: of the params; None: that of the first sharded state among the arguments.
      **kwargs: keyword arguments of the step.

    Returns:
      By name of a param, a `Use` for each place where the forward pass reads it: its `kind` (`"matmul"`, `"lookup"`,
      `"kept"` where the backward pass does not read it, `"loss"` for the head of a `jzero.tiled_loss`, or `"evaluated"`
      in a forward pass outside of `jax.grad`), the `dtype` in which its gradient is made, and of a lookup the `rows` of
      all devices. A weight that is constant over a loop has one use in it. Left out are params that no forward pass
      reads, or only one in a `jax.shard_map`; terms that meet no batch and are computed on shards, such as L2; and what
      reads params that the step has updated. `.micro_batches` is the k of `plan.micro_batches(batch, k)` in the step,
      or of `value_and_grad(accumulate=k)` where each micro-batch reduces its gradients.

    Raises:
      TypeError: `step` is not a function, `plan` is not a plan, no argument has a plan, or an argument is not an array.

    Example:
      >>> import jax, jax.numpy as jnp, jzero
      >>> plan = jzero.make_plan({"w": jax.ShapeDtypeStruct((64, 64), "bfloat16")}, stage=3)
      >>> step = jax.grad(lambda params, x: (x @ params["w"].astype("float32")).sum())
      >>> jzero.param_uses(step, plan.shapes, jnp.ones((8, 64)), plan=plan)
      {"['w']": (Use(kind='kept', dtype=dtype('float32'), rows=0),)}
    """
    plan = find_plan((*args, *kwargs.values())) if plan is None else plan
    check_plan(plan, where="jzero.param_uses")
    assert plan is not None
    jitted = jitted_fn(step, (), (args, kwargs), where="jzero.param_uses")
    if jitted is not step:  # one that the user jitted may have static arguments
        check_arrays((args, kwargs), "the arguments", good=is_argument, where="jzero.param_uses")
    with as_written():
        return uses_in(jitted.trace(*args, **kwargs), plan)


def uses_again(trace: Trace, *plans: Plan) -> list[Uses]:
    """The uses of the params of each plan, from one more trace of the step; raises what the step raises."""
    with as_written():
        stage = trace.again()
        return [uses_in(stage, plan) for plan in plans]


def uses_in(stage: Any, plan: Plan) -> Uses:
    """The uses in what `jax.jit(step).trace(...)` returns, traced under `as_written`."""
    traced = innermost(stage, jax.stages.Traced)
    params = _params_of(arguments_given(traced), plan, record(traced.jaxpr))
    weights, found = [x is not None for x in params], Uses()
    trained = [x is not None and x.frozen is None for x in params]
    split = [None if x is None or plan.lives_on_host(x) else split_dims(x.stored, x.used, x.grad) for x in params]
    for at, uses in sorted(_Region().search(traced.jaxpr.jaxpr, weights, trained, split).items()):
        x = params[at]
        assert x is not None
        found[x.name] = found.get(x.name, ()) + tuple(uses)
    found.micro_batches, found.reduced_in_each = _micro_batches(traced.jaxpr.jaxpr)
    return found


def _without_leading(dims: frozenset[int] | None) -> frozenset[int] | None:
    """Of a layer of a stack."""
    return None if dims is None else frozenset(dim - 1 for dim in dims if dim)


def _micro_batches(jaxpr: Jaxpr) -> tuple[int, bool]:
    """The largest k of a `micro_batch_scope`, 1 without one; and whether `value_and_grad` reduces in each of them."""
    most, in_each, graph = 1, False, Graph(jaxpr, [None] * len(jaxpr.constvars))
    for node in graph.nodes:
        names = _names(node)
        most = max(most, *map(int, _CUT.findall(names)), 1)
        in_each |= "jzero.microbatch" in names
        for k, inside in (_micro_batches(body) for body, _ in bodies(node.eqn)[0]):
            most, in_each = max(most, k), in_each or inside
    return most, in_each


def _params_of(given: Sequence[GivenArgument], plan: Plan, known: TraceRecord) -> list[Layout | None]:
    """The param that each argument is; without an update an NNX state is taken in its order, if that has all params."""
    found = [role.layout if role.is_param else None for role in roles_of(given, plan, known)]
    if known.names(plan):
        return found
    tree = tree_of_params(given, layouts_of(given, plan), plan)
    own = [i for i, x in enumerate(given) if tree is not None and x.keys[: len(tree)] == tree]
    if [given[i].shape for i in own] != [x.shape for x in plan.layouts]:
        return found
    in_order = dict(zip(own, plan.layouts, strict=True))
    return [in_order.get(i) for i in range(len(given))]


class _Graph(WeightGraph):
    """A weight that is fetched from host memory, or marked as frozen, is the same one."""

    def added(self, node: Node) -> None:
        super().added(node)
        if node.name in SAME:
            pairs = [(out, i) for out, i in zip(node.outs, node.ins, strict=True) if i in self.parent]
            self.parent.update(pairs)
            self.split.update((out, self.split[i]) for out, i in pairs if i in self.split)

    def weights_of(self, node: Node) -> list[int]:
        return [] if node.name in SAME else super().weights_of(node)


@dataclasses.dataclass(frozen=True)
class _Region:
    """Where uses are looked for.

    Attributes:
      forward: it is a part of the forward pass; else such parts are looked for, by the names that `jax.grad` gives.
      again: the backward pass computes it again, and gathers again for it.
      outside: it is not in a backward pass; what is not in a forward pass under `jax.grad` evaluates the weights.
    """

    forward: bool = False
    again: bool = False
    outside: bool = True

    def search(
        self,
        jaxpr: Jaxpr,
        weights: Sequence[bool],
        moving: Sequence[bool],
        split: Sequence[frozenset[int] | None],
    ) -> dict[int, list[Use]]:
        """The uses of the weights among the arguments, by position; `moving`: those that depend on trained weights."""
        graph = _Graph(jaxpr, [None] * len(jaxpr.constvars), weights, split)
        found: dict[int, list[Use]] = collections.defaultdict(list)
        at = {value: i for i, value in enumerate(graph.ins)}
        moves = {value for value, m in zip(graph.ins, moving, strict=True) if m}
        data = graph.data()
        for node in graph.nodes:
            moves.update(node.outs if any(i in moves for i in node.ins) else ())
        named = {} if self.forward else {n: _names(n) for n in graph.nodes}
        forward, again = set(graph.nodes) if self.forward else _forward(graph, data, named), set[int]()
        on_shards = _on_shards(graph, forward, data)
        for node in graph.nodes:
            used, under = graph.weights_of(node), node in forward
            if not used:
                continue
            outside = self.outside and not under and not _GRAD.search(named[node])
            inside = dataclasses.replace(self, forward=under, outside=outside)
            if bodies(node.eqn)[0]:
                for value, uses in inside.entered(graph, node, moves, graph.parent).items():
                    found[at[graph.root(value)]] += uses
                if not (under or outside):  # in the backward pass, where a remat region is computed again
                    some = set(used) if node.name in REMAT else graph.inside(node, _in_remat)
                    again |= {at[graph.root(value)] for value in some}
            elif under and node not in on_shards:
                for value in {(graph.root(i), graph.cut(i)): i for i in used}.values():  # a transpose: the same
                    found[at[graph.root(value)]].append(inside.use(graph, node, value, moves))
            elif outside and _evaluates(graph, node, data):
                for value in {graph.root(i): i for i in used}.values():
                    use = Use(EVALUATED, _dtype(graph, node, value), part=graph.part(value))
                    found[at[graph.root(value)]].append(use)
        return {i: [_read(use) if i in again else use for use in uses] for i, uses in found.items()}

    def entered(
        self, graph: WeightGraph, node: Node, moves: set[int], among: Collection[int]
    ) -> dict[int, list[Use]]:
        """The uses of these weights in a region: those of the branch with the most; one for a constant of a loop."""
        inner, skipped = bodies(node.eqn)
        operands, loop = node.ins[skipped:], node.name in LOOPS
        weights, moving = ([i in some for i in operands] for some in (among, moves))
        split = [graph.split.get(i) for i in operands]
        consts = loop_consts(node.eqn) - skipped if loop else 0
        if loop:  # what is carried depends on them after one iteration
            carry = len(operands) - consts if node.name == "while" else scan_parts(node.eqn)[2]
            moving[consts : consts + carry] = [True] * carry
            split[consts + carry :] = [_without_leading(dims) for dims in split[consts + carry :]]
        region = dataclasses.replace(self, again=self.again or node.name in REMAT)
        found = dict[int, list[Use]]()
        for jaxpr, _ in inner:
            some = region.search(jaxpr, weights, moving, split)
            if consts and self.forward:  # one over micro-batches has each use in every iteration
                once = dataclasses.replace(region, again=True).search(jaxpr, weights, moving, split)
                iterations = node.eqn.params.get("length", 0)  # unknown for a `while`
                some |= {at: _strongest(uses, iterations) for at, uses in once.items() if at < consts}
            for at, uses in some.items():
                found[operands[at]] = max(found.get(operands[at], []), uses, key=len)
        parts = {value: graph.part(value) for value in found}
        return {
            value: [dataclasses.replace(use, part=use.part * parts[value]) for use in uses]
            for value, uses in found.items()
        }

    def use(self, graph: WeightGraph, node: Node, value: int, moves: set[int]) -> Use:
        """One use, by an equation without a body."""
        dtype, eqn = _dtype(graph, node, value), node.eqn
        if row_lookup(eqn):
            return Use("lookup", dtype, math.prod(eqn.outvars[0].aval.shape[:-1]), part=graph.part(value))
        if node.name == GRADIENTS:
            kind = "loss"
        else:
            kind = "matmul" if self.is_read(graph, node, value, moves) else "kept"
        return Use(kind, gradient_dtype(eqn, dtype), part=graph.part(value))

    def is_read(self, graph: WeightGraph, node: Node, value: int, moves: set[int]) -> bool:
        """True where the backward pass reads the weight: it is multiplied with what depends on weights."""
        if node.name not in LINEAR:
            return any(i in moves for i in node.ins if i != value and graph.is_floating(i))
        readers = [(n, i) for n in graph.nodes for i in node.outs if i in n.ins]
        plain = [(n, i) for n, i in readers if not bodies(n.eqn)[0] and (self.again or n.name in LINEAR)]
        if any(self.is_read(graph, n, i, moves) for n, i in plain):
            return True
        # `jax.grad` takes what is constant out of a loop, where it is made again all the same
        loops = [row for row in readers if row[0].name in LOOPS]
        found = [u for n, i in loops for some in self.entered(graph, n, moves, {i}).values() for u in some]
        return any(u.kind == "matmul" for u in found)


def _names(node: Node) -> str:
    return " ".join(str(e.source_info.name_stack) for e in (*node.outer, node.eqn))


def _evaluates(graph: WeightGraph, node: Node, data: set[int]) -> bool:
    """True for an equation that marks a forward pass outside of `jax.grad`; what reads vectors is too small."""
    products = (*PRODUCTS, LOSS)
    return row_lookup(node.eqn) or (node.name in products and bool(graph.activations(node, data)))


def _dtype(graph: WeightGraph, node: Node, value: int) -> np.dtype:
    """The dtype in which an equation uses a weight."""
    moved = graph.narrow(node.outs[0]) if node.name in MOVES else None
    return np.dtype(moved or graph.avals[value].dtype)


def _forward(graph: WeightGraph, data: set[int], named: Mapping[Node, str]) -> set[Node]:
    """The nodes of the forward pass, by the names that `jax.grad` gives.

    Nodes that only serve the backward pass are left out. What is constant over a loop may have no name; a loop reads
    it.
    """
    found = set[Node]()
    readers: dict[int, list[Node]] = collections.defaultdict(list)
    for node in reversed(graph.nodes):
        some = [n for out in node.outs for n in readers[out]]
        if "jvp(" in named[node]:
            others = any(n in found or "jvp(" not in named[n] for n in some)
            is_end = not some and any(i in data for i in node.ins)  # a loss that is not returned
            forward = others or is_end or not set(graph.outs).isdisjoint(node.outs)
        else:
            forward = any(n in found for n in some)
        if forward and "transpose(" not in named[node]:
            found.add(node)
        for i in node.ins:
            readers[i].append(node)
    return found


def _on_shards(graph: WeightGraph, forward: set[Node], data: set[int]) -> set[Node]:
    """What XLA computes on the shards of weights: it ends in numbers and meets no batch, as a decay term."""
    found, outs = set[Node](), set(graph.outs)
    readers: dict[int, list[Node]] = collections.defaultdict(list)
    for node in (n for n in reversed(graph.nodes) if n in forward):
        arrays = [i for i in node.outs if graph.avals[i].ndim]
        stays = not arrays or (node.name in STAYS and outs.isdisjoint(arrays))
        stays = stays and not graph.activations(node, data)
        if stays and all(n in found for i in arrays for n in readers[i]):
            found.add(node)
        for i in node.ins:
            readers[i].append(node)
    return found


def _in_remat(jaxpr: Jaxpr, weights: Sequence[bool]) -> set[int]:
    """Positions of the weights that remat regions read, in loops too; they take only what they need."""
    graph = _Graph(jaxpr, [None] * len(jaxpr.constvars), weights)
    found: set[int] = set()
    for node in graph.nodes:
        found |= set(graph.weights_of(node)) if node.name in REMAT else graph.inside(node, _in_remat)
    return graph.positions(found)


def _read(use: Use) -> Use:
    return dataclasses.replace(use, kind="matmul") if use.kind in ("kept", "loss") else use


def _strongest(uses: list[Use], iterations: int) -> list[Use]:
    """The one use that stands for all in a loop, with the rows of all iterations."""
    use = max(uses, key=lambda use: GATHERS[use.kind])
    return [dataclasses.replace(use, rows=use.rows * iterations)]
