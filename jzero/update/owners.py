"""An optimizer that mixes the dims of a matrix, on whole matrices that have owners.

Each region of the update (`mixing.py`), and each layer of one on a stack of layers, is computed by one device, its
owner, in rounds (`rounds.py`). All else is computed on shards, as it is without regions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jzero.comm.exchange import MatrixExchange
from jzero.core import jaxprs
from jzero.core.errors import human_bytes, warn
from jzero.core.graph import Graph, Node
from jzero.core.regions import switch_with
from jzero.core.splits import Split
from jzero.core.types import Aval, PyTree
from jzero.layout.padding import unpadded
from jzero.layout.specs import P, make_spec, spec_entries
from jzero.sharding import Plan
from jzero.update.extra import with_extra
from jzero.update.matrices import Matrices, Matrix
from jzero.update.mixing import Mixing, Region
from jzero.update.rounds import Result, Round, Rounds, mapped, rounds

MOST = 16  # fp32 arrays of the largest param's size that one region may read and make; SOAP has 13


class Owners:
    """The evaluation of a traced update with its regions on owners.

    Attributes:
      mixing: the update.
      plan: gives mesh and axes.
      regions: those that owners compute; what reads many leaves at once is left to XLA.
    """

    def __init__(self, mixing: Mixing, plan: Plan):
        self.mixing, self.graph, self.plan = mixing, mixing.graph, plan
        self.matrices = Matrices(mixing, plan)
        most = MOST * 4 * max((x.size for x in plan.layouts), default=0)
        self.regions = [r for r in mixing.regions if self._bytes(r) <= most]

    def _bytes(self, region: Region) -> int:
        """Bytes of the whole arrays that a region reads and makes."""
        arrays = [v for v in (*region.ins, *region.outs) if any(self.mixing.split[v])]
        return sum(math.prod(self.graph.avals[v].shape) * self.graph.avals[v].dtype.itemsize for v in arrays)

    def check_sizes(self) -> None:
        """Warns about regions that are too large for one owner, and about matrices that do not fit on a device."""
        large = [self._bytes(r) for r in self.mixing.regions if r not in self.regions]
        if large:
            warn(
                f"jzero: this optimizer computes {human_bytes(max(large))} of arrays of several params together, "
                "too much for one device to own. XLA decides how much it gathers for this, from nothing (L-BFGS) to "
                "all shards in each operation; jzero.explain shows what is sent.",
            )
        limit = device_memory(self.plan.mesh.devices.flat[0])
        if limit is None:
            return
        firsts = [kind.matrices[0] for kind in self.matrices.kinds(self.regions)]
        held = max((self._bytes(m.region) // m.of_region for m in firsts), default=0)
        if held > limit:
            warn(
                f"jzero: a matrix of this optimizer takes {human_bytes(held)} on the device that owns it, "
                f"with all that it is computed from, and a device has {human_bytes(limit)}. Give that param another "
                "optimizer (optax.multi_transform).",
            )

    def __call__(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """The results of the update."""
        env = {**self.graph.known, **dict(zip(self.graph.ins, values, strict=True))}
        for step in self.steps():
            if isinstance(step, Node):
                env.update(zip(step.outs, self._node(step, [env[i] for i in step.ins]), strict=True))
            else:
                self._regions(step, env)
        outs = [(env[o], self.graph.avals[o]) for o in self.graph.outs]  # some may be constants of the update
        return [x if jaxprs.is_tracer(x) or isinstance(x, jax.Array) else jnp.asarray(x, a.dtype) for x, a in outs]

    def steps(self) -> Iterator[Node | list[Region]]:
        """The nodes outside of regions, each once it can be computed, and regions that can be computed together."""
        inside = {node for region in self.regions for node in region.nodes}
        done = {*self.graph.ins, *self.graph.known}
        nodes = [node for node in self.graph.nodes if node not in inside]
        regions = list(self.regions)
        while nodes or regions:
            waiting = []
            for node in nodes:
                if done.issuperset(node.ins):
                    done.update(node.outs)
                    yield node
                else:
                    waiting.append(node)
            ready = [r for r in regions if done.issuperset(r.ins)]
            if not ready and len(waiting) == len(nodes):  # regions that wait for one another: XLA computes them
                left = {*waiting, *(n for r in regions for n in r.nodes)}
                waiting, regions = [n for n in self.graph.nodes if n in left], []
            if ready:
                yield ready
            done.update(o for r in ready for o in r.outs)
            nodes, regions = waiting, [r for r in regions if r not in ready]

    def wire(self) -> dict[tuple[str, ...], float]:
        """Bytes that one device sends for the exchanges, by mesh axes; of branches those of the one that sends most."""
        found: dict[tuple[str, ...], float] = {}
        for step in self.steps():
            if not isinstance(step, Node):
                for exchange, some in self._rounds(step):
                    sent = sum(exchange.wire(now.widths(way)) for now in some for way in ("ins", "outs"))
                    found[exchange.axes] = found.get(exchange.axes, 0.0) + sent
            elif step in self.mixing.branches:
                inner = [Owners(m, self.plan).wire() for m in self.mixing.branches[step]]
                for axes, sent in max(inner, key=lambda w: sum(w.values())).items():
                    found[axes] = found.get(axes, 0.0) + sent
        return found

    def _rounds(self, regions: list[Region]) -> list[tuple[MatrixExchange, list[Round]]]:
        """The rounds of regions, by the axes of their exchange."""
        kinds = self.matrices.kinds(regions)
        exchanges = [MatrixExchange(self.plan, axes) for axes in dict.fromkeys(k.axes for k in kinds)]
        return [(e, rounds([k for k in kinds if k.axes == e.axes], e.devices)) for e in exchanges]

    def _node(self, node: Node, values: list[jax.Array]) -> list[jax.Array]:
        if node not in self.mixing.branches:
            return node.run(values)
        branches = [Owners(m, self.plan) for m in self.mixing.branches[node]]
        with node.scope():
            return switch_with(node.eqn, [lambda *v, b=b: b(v) for b in branches], values[0], values[1:])

    def _regions(self, regions: list[Region], env: dict[int, jax.Array]) -> None:
        """Compute regions, and enter their results in `env`."""
        results: dict[tuple[Matrix, int], Result] = {}
        for exchange, some in self._rounds(regions):
            run = Rounds(exchange, env, self.graph.avals, in_order=not self.plan.config.streams)
            results.update(run(some))
        for region in regions:
            own = list(dict.fromkeys(m for m, _ in results if m.region is region))
            for k, out in enumerate(region.outs):
                env[out] = self._collected(self.graph.avals[out], own, [results[m, k] for m in own], k)

    def _collected(self, aval: Aval, matrices: list[Matrix], results: list[Result], k: int) -> Any:
        """One result of a region on its shards, put together from all of the region's matrices."""
        numbered = matrices[0].dims[matrices[0].region.outs[k]]
        pieces, dims = matrices[0].outs[k], sorted(numbered)
        order = sorted(range(len(matrices)), key=lambda i: [matrices[i].at[numbered[d]] for d in dims])
        results = [results[i] for i in order]
        arrays = list({id(r.rows): r.rows for r in results}.values())
        number = {id(rows): i for i, rows in enumerate(arrays)}

        def collect(*arrays):
            parts = []
            for rows, device, (_, start, size) in results:
                row = jax.lax.slice_in_dim(arrays[number[id(rows)]][device], start, start + size)
                parts.append(jnp.reshape(row, pieces.block))
            if not dims:
                return parts[0]
            stacked = jnp.reshape(jnp.stack(parts), (*(aval.shape[d] for d in dims), *pieces.block))
            stacked = jnp.squeeze(stacked, [len(dims) + d for d in dims])
            return jnp.moveaxis(stacked, range(len(dims)), dims)

        spec = make_spec(pieces.split)
        whole = mapped(self.plan, collect, [P(pieces.axes)] * len(arrays), spec)(*arrays)
        if not aval.shape:
            return self.plan.constrain(whole[0], P())
        return whole if whole.shape == aval.shape else self.plan.constrain(unpadded(whole, aval.shape), spec)


def device_memory(device: Any) -> int | None:
    """Bytes that a device has for arrays; None where it does not say."""
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except (AttributeError, NotImplementedError, RuntimeError):  # compile-only devices
        return None


def on_owners(update: Callable, plan: Plan) -> Callable:
    """`update(grads, state, params, **extra)` of an optax transformation, its regions computed by owners.

    The results are those of `update`. What it does not mix stays on shards, and an update that mixes nothing is called
    as it is. So is one that is given a function (the loss, for a line search), whose matmuls are the model's.
    """

    def run(grads, state, params, **extra):
        if not plan.config.row.state or any(map(callable, extra.values())):
            return update(grads, state, params, **extra)
        mixing, arrays, tree = _traced(update, plan, (grads, state, params, extra))
        if not (mixing.regions or mixing.branches):
            return update(grads, state, params, **extra)
        owners = Owners(mixing, plan)
        owners.check_sizes()
        return tree.unflatten(owners(arrays))

    return run


def exchanged(tx: optax.GradientTransformation, plan: Plan, params: PyTree) -> dict[tuple[str, ...], float]:
    """Bytes that one device sends in an update to bring matrices to their owners and back, by mesh axes.

    Args:
      tx: the transformation as it runs on shards.
      params: shapes and dtypes as `tx` sees them.
    """

    def wire(update):
        found: list[dict[tuple[str, ...], float]] = []

        def abstract(grads, state, params):
            mixing, *_ = _traced(update, plan, (grads, state, params, {}))
            found.append(Owners(mixing, plan).wire())

        jax.eval_shape(abstract, params, jax.eval_shape(tx.init, params), params)
        return found[0]

    return with_extra(wire, tx)


def _traced(update: Callable, plan: Plan, args: tuple[Any, Any, Any, Any]) -> tuple[Mixing, list[jax.Array], Any]:
    """The update as a graph with its regions, its arrays, and the tree of its results."""
    arrays, merged = jaxprs.split_arrays(args)
    box: list[tuple[Any, list[Split]]] = []

    def flat(*arrays):
        grads, state, params, extra = merged(arrays)
        results = update(grads, state, params, **extra)
        leaves, tree = jax.tree.flatten(results)
        box.append((tree, splits_of_results(results, plan)))
        return leaves

    graph = Graph(*jaxprs.trace(flat, *arrays))
    tree, wanted = box[0]
    return Mixing(graph, splits_of_arguments(args, plan), wanted), arrays, tree


def splits_of_arguments(args: tuple[Any, Any, Any, Any], plan: Plan) -> list[Split]:
    """How the arrays of (grads, state, params, extra) are split."""
    grads, state, params, extra = args
    found = [*_of_params(grads, plan), *_of_state(state, plan), *_of_params(params, plan)]
    return found + [((),) * np.ndim(x) for x in jaxprs.split_arrays(extra)[0]]


def splits_of_results(results: tuple[Any, Any], plan: Plan) -> list[Split]:
    """How the arrays of (updates, state) are split."""
    return [*_of_params(results[0], plan), *_of_state(results[1], plan)]


def _of_params(tree: PyTree, plan: Plan) -> list[Split]:
    leaves = plan.tree.flatten_up_to(tree)
    return [
        tuple(spec_entries(x.state, np.ndim(leaf)))
        for leaf, x in zip(leaves, plan.layouts, strict=True)
        if leaf is not None
    ]


def _of_state(state: PyTree, plan: Plan) -> list[Split]:
    rows = zip(jax.tree.leaves(state), plan.state_specs(state), strict=True)
    return [tuple(spec_entries(spec, np.ndim(leaf))) for leaf, spec in rows]
