"""An optimizer that mixes the dims of a matrix, on whole matrices that have owners.

[Note: rounds]
Each region of the update (`mixing.py`), and each layer of one on a stack of layers, is computed by one device, its
owner. Regions that compute the same on the same shapes, up to the way in which their matrices are split, are dealt
out in rounds of at most one per device: their pieces go to the owners, each owner computes, and the pieces of the
results come back. Rounds follow one another: the matrices of a round are on their way while the round before it is
computed, so at most two rounds are in memory.

[Note: what is left over]
Matrices that do not fill the last round of their shape are dealt out together, each to the device that has least to do
by FLOPs, and each device computes what it owns (`lax.switch`); unless that takes as long as round after round.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jzero.comm.exchange import MatrixExchange, Pieces
from jzero.core import jaxprs
from jzero.core.batched import Classes
from jzero.core.dims import dot_dims
from jzero.core.graph import Graph, Node
from jzero.core.ordering import after
from jzero.core.primitives import MATRIX_OPS
from jzero.core.regions import bodies, switch_with
from jzero.core.regions import rounds as rounds_of
from jzero.core.traversal import traverse
from jzero.layout.explicit import typed_mesh
from jzero.layout.padding import padded, unpadded
from jzero.layout.specs import P, axis_of, axis_size, make_spec, spec_entries
from jzero.sharding import Plan
from jzero.update.mixing import Mixing, Region, Split


@dataclasses.dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix: a region, or one layer of a region on stacks.

    Attributes:
      region: its equations.
      at: the index along every dim that numbers matrices, by class of dims.
      dims: of each value that the region reads or makes, these dims with their classes.
      ins, outs: its pieces, of the values that are split; None for one that every device has.
    """

    region: Region
    at: dict[int, int]
    dims: dict[int, dict[int, int]]
    ins: tuple[Pieces | None, ...]
    outs: tuple[Pieces, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """Matrices for which the same is computed.

    Attributes:
      jaxpr, consts: on whole matrices.
      axes: the mesh axes that the matrices are split over.
      flops: of one matrix, in matmuls.
      matrices: all of them.
    """

    jaxpr: Any
    consts: list[Any]
    axes: tuple[str, ...]
    flops: float
    matrices: list[Matrix]


@dataclasses.dataclass(frozen=True, eq=False)
class Share:
    """Matrices of one kind in a round, and for each the device that owns it; no device has two."""

    kind: Kind
    matrices: list[Matrix]
    owners: list[int]

    def by_device(self, devices: int) -> np.ndarray:
        """For every device the number of its matrix; -1 where it has none."""
        found = np.full(devices, -1, np.int32)
        found[self.owners] = np.arange(len(self.owners))
        return found


Round = list[Share]
WORTH = 0.9  # of the FLOPs of rounds one after the other: so much less for one round of several kinds
DECOMPOSITION = 10  # operations of a decomposition, in matmuls of its size


class Owners:
    """The evaluation of a traced update with its regions on owners: see the notes.

    Attributes:
      mixing: the update and its regions.
      plan: gives mesh and axes.
    """

    def __init__(self, mixing: Mixing, plan: Plan):
        self.mixing, self.graph, self.plan = mixing, mixing.graph, plan

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """The results of the update."""
        env = {**self.graph.known, **dict(zip(self.graph.ins, values, strict=True))}
        for step in self.steps():
            if isinstance(step, Node):
                env.update(zip(step.outs, self._node(step, [env[i] for i in step.ins]), strict=True))
            else:
                self._regions(step, env)
        return [env[o] for o in self.graph.outs]

    def steps(self) -> Iterator[Node | list[Region]]:
        """The nodes outside of regions, each once it can be computed, and regions that can be computed together."""
        inside = {node for region in self.mixing.regions for node in region.nodes}
        done = {*self.graph.ins, *self.graph.known}
        nodes = [node for node in self.graph.nodes if node not in inside]
        regions = list(self.mixing.regions)
        while nodes or regions:
            waiting = []
            for node in nodes:
                if done.issuperset(node.ins):
                    done.update(node.outs)
                    yield node
                else:
                    waiting.append(node)
            ready = [r for r in regions if done.issuperset(r.ins)]
            if not ready and len(waiting) == len(nodes):
                raise RuntimeError(
                    "jzero: regions of the update wait for one another; please report this optimizer"
                )
            if ready:
                yield ready
            done.update(o for r in ready for o in r.outs)
            nodes, regions = waiting, [r for r in regions if r not in ready]

    def _node(self, node: Node, values: list[Any]) -> list[Any]:
        if node not in self.mixing.branches:
            return node.run(values)
        branches = [Owners(m, self.plan) for m in self.mixing.branches[node]]
        with node.scope():
            return switch_with(node.eqn, [lambda *v, b=b: b(v) for b in branches], values[0], values[1:])

    def _regions(self, regions: list[Region], env: dict[int, Any]) -> None:
        """Compute regions, and enter their results in `env`."""
        rows: dict[tuple[int, Matrix], tuple[Any, int]] = {}
        kinds = self.kinds(regions)
        for axes in dict.fromkeys(kind.axes for kind in kinds):
            exchange = MatrixExchange(self.plan, axes)
            run = _Rounds(exchange, env, self.graph.avals, in_order=self.plan.config.offload is None)
            for share, results in run([*rounds([k for k in kinds if k.axes == axes], exchange.devices)]):
                for owner, matrix in zip(share.owners, share.matrices, strict=True):
                    rows.update(((k, matrix), (r, owner)) for k, r in enumerate(results))
        matrices = [m for kind in kinds for m in kind.matrices]
        for region in regions:
            own = [m for m in matrices if m.region is region]
            for k, out in enumerate(region.outs):
                env[out] = self._collected(self.graph.avals[out], own, [rows[k, m] for m in own], k)

    def _collected(self, aval: Any, matrices: list[Matrix], rows: list[tuple[Any, int]], k: int) -> Any:
        """A result of a region, of all its matrices, on its shards."""
        pieces, out = matrices[0].outs[k], matrices[0].region.outs[k]
        dims = matrices[0].dims[out]
        arrays = list({id(r): r for r, _ in rows}.values())
        place = {id(r): i for i, r in enumerate(arrays)}
        sizes = [aval.shape[d] for d in sorted(dims)]

        def collect(*arrays):
            parts = [jnp.reshape(arrays[place[id(r)]][row], pieces.block) for r, row in rows]
            if not dims:
                return parts[0]
            order = sorted(range(len(rows)), key=lambda i: [matrices[i].at[dims[d]] for d in sorted(dims)])
            stacked = jnp.stack([parts[i] for i in order])
            stacked = jnp.reshape(
                stacked, (*sizes, *(b for d, b in enumerate(pieces.block) if d not in dims))
            )
            return jnp.moveaxis(stacked, range(len(sizes)), sorted(dims))

        spec = make_spec(pieces.split)
        shape = [
            s if d in dims else p for d, (s, p) in enumerate(zip(aval.shape, pieces.padded, strict=True))
        ]
        whole = _mapped(self.plan, pieces.axes, collect, [P(pieces.axes)] * len(arrays), spec)(*arrays)
        assert list(whole.shape) == shape
        if tuple(shape) != aval.shape:
            whole = self.plan.constrain(unpadded(whole, aval.shape), spec)
        return whole

    # --- what is computed -----------------------------------------------------------------------------------------

    def kinds(self, regions: Sequence[Region]) -> list[Kind]:
        """The matrices of regions, by what is computed of them."""
        found: dict[Any, Kind] = {}
        for region in regions:
            classes = Classes(self.graph, region.nodes, region.ins, region.outs)
            split = [v for v in (*region.ins, *region.outs) if any(self.mixing.split[v])]
            axes = self._axes(split)
            numbered = self._numbered(classes, region, split)
            single = frozenset(numbered)
            dims = {v: self._dims(classes, v, single) for v in (*region.ins, *region.outs)}
            avals = [self._one(v, dims[v]) for v in region.ins]
            jaxpr, consts = jaxprs.trace(lambda *xs, c=classes, s=single: c.run(s, xs), *avals)
            ins = tuple(
                self._pieces(v, dims[v], axes) if any(self.mixing.split[v]) else None for v in region.ins
            )
            outs = tuple(self._pieces(v, dims[v], axes) for v in region.outs)
            key = str(jaxpr), axes, tuple(map(_constant, consts)), tuple(p is None for p in ins)
            kind = found.setdefault(key, Kind(jaxpr, consts, axes, flops(jaxpr), []))
            for index in np.ndindex(*numbered.values()):
                at = dict(zip(numbered, map(int, index), strict=True))
                kind.matrices.append(Matrix(region, at, dims, ins, outs))
        for kind in found.values():
            kind.matrices.sort(key=lambda m: repr((m.ins, m.outs)))  # alike in one round
        return list(found.values())

    def _axes(self, values: Sequence[int]) -> tuple[str, ...]:
        used = {a for v in values for entry in self.mixing.split[v] for a in entry}
        return tuple(a for a in self.plan.array_mesh.axis_names if a in used)

    def _numbered(self, classes: Classes, region: Region, split: Sequence[int]) -> dict[int, int]:
        """The classes of dims that number the matrices of a region, with their sizes."""
        found: dict[int, int] = {}
        shared: set[int] | None = None
        for v in (*split, *region.outs):
            own = {
                c: self.graph.avals[v].shape[d]
                for d, c in classes.independent(v).items()
                if self.graph.avals[v].shape[d] > 1 and not self.mixing.split[v][d]
            }
            found.update(own)
            shared = set(own) if shared is None else shared & set(own)
        return {c: found[c] for c in sorted(shared or ())}

    def _dims(self, classes: Classes, value: int, single: frozenset[int]) -> dict[int, int]:
        return {
            d: classes.class_of(c)
            for d, c in enumerate(classes.cells[value])
            if classes.class_of(c) in single
        }

    def _one(self, value: int, dims: dict[int, int]) -> jax.ShapeDtypeStruct:
        aval = self.graph.avals[value]
        return jax.ShapeDtypeStruct([1 if d in dims else s for d, s in enumerate(aval.shape)], aval.dtype)

    def _pieces(self, value: int, dims: dict[int, int], axes: tuple[str, ...]) -> Pieces:
        shape, split = self._one(value, dims).shape, self.mixing.split[value]
        if {a for entry in split for a in entry} != set(axes):
            at = max(range(len(shape)), key=lambda d: shape[d])
            split = tuple(axes if d == at else () for d in range(len(shape)))
        return Pieces(tuple(shape), split, axes, tuple(axis_size(self.plan.mesh, [a]) for a in axes))


class _Rounds:
    """Rounds on the values of an update; `in_order`: one after the other."""

    def __init__(
        self, exchange: MatrixExchange, env: dict[int, Any], avals: Sequence[Any], *, in_order: bool
    ):
        self.exchange, self.plan, self.axes, self.env = exchange, exchange.plan, exchange.axes, env
        self.avals, self.in_order = avals, in_order

    def __call__(self, rounds: Sequence[Round]) -> Iterator[tuple[Share, list[Any]]]:
        """The results of every share: rows, of which that of an owner is a piece of its matrix on every device."""
        received: list[list[Any]] = []
        results: list[list[Any]] = []
        for i, now in enumerate(rounds):
            held: list[list[Any]] = []
            if self.in_order:  # one round is under way while another is computed
                held = [*received[i - 1 : i], *results[i - 2 : i - 1]] if i > 1 else received[:i]
            rows, held = self._received(now, held)
            if held:
                received[i - 1] = held[0]
            if len(held) > 1:
                results[i - 2] = held[1]
            received.append(rows)
            if i:
                results.append(self._computed(rounds[i - 1], received[i - 1]))
        results.append(self._computed(rounds[-1], received[-1]))
        for now, rows in zip(rounds, results, strict=True):
            rest = iter(rows)
            for share in now:
                yield share, [next(rest) for _ in share.matrices[0].outs]

    def _received(self, now: Round, held: list[list[Any]]) -> tuple[list[Any], list[list[Any]]]:
        """The pieces that every owner gets, once what is `held` is there; and that."""
        sources = {
            v: p for s in now for m in s.matrices for v, p in zip(m.region.ins, m.ins, strict=True) if p
        }
        dims = {v: m.dims[v] for s in now for m in s.matrices for v in m.region.ins}
        arrays = [self._even(v, p, dims[v]) for v, p in sources.items()]
        flat, tree = jax.tree.flatten(held)

        def send(*operands):
            local, waiting = dict(zip(sources, operands, strict=False)), list(operands[len(sources) :])
            rows = []
            for share in now:
                for k, pieces in enumerate(share.matrices[0].ins):
                    if pieces is not None:
                        parts = [_layer(local[m.region.ins[k]], m, m.region.ins[k]) for m in share.matrices]
                        rows.append(self.exchange.rows_of(parts, share.owners))
            if waiting:
                rows, waiting = after(rows, waiting)
            return [self.exchange(r) for r in rows], waiting

        specs = [make_spec(p.split) for p in sources.values()]
        run = _mapped(self.plan, self.axes, send, [*specs, *[P(self.axes)] * len(flat)], P(self.axes))
        rows, flat = run(*arrays, *flat)
        return rows, tree.unflatten(flat)

    def _even(self, value: int, pieces: Pieces, dims: dict[int, int]) -> Any:
        """A value with a piece of equal size on every device."""
        x, aval, spec = self.env[value], self.avals[value], make_spec(pieces.split)
        shape = tuple(
            s if d in dims else p for d, (s, p) in enumerate(zip(aval.shape, pieces.padded, strict=True))
        )
        return (
            x
            if shape == aval.shape
            else self.plan.constrain(padded(self.plan.constrain(x, spec), shape), spec)
        )

    def _computed(self, now: Round, rows: list[Any]) -> list[Any]:
        """What the owners compute, sent back."""
        common = list(
            dict.fromkeys(
                v for s in now for m in s.matrices for v, p in zip(m.region.ins, m.ins, strict=True) if not p
            )
        )

        def compute(*operands):
            local = dict(zip(common, operands[len(rows) :], strict=True))
            taken = iter(operands[: len(rows)])
            mine = [[next(taken) for p in share.matrices[0].ins if p is not None] for share in now]
            index = jax.lax.axis_index(self.axes)
            runs = [lambda s=s, r=r: self._share(s, r, local, index) for s, r in zip(now, mine, strict=True)]
            if len(runs) == 1:
                outs = runs[0]()
            else:
                outs = _one_of(runs, now, index, self.exchange.devices)
            return [self.exchange(r) for r in outs]

        specs = [*[P(self.axes)] * len(rows), *[P()] * len(common)]
        return _mapped(self.plan, self.axes, compute, specs, P(self.axes))(
            *rows, *(self.env[v] for v in common)
        )

    def _share(self, share: Share, rows: list[Any], local: dict[int, Any], index: Any) -> list[Any]:
        """The results of this device's matrix, as rows for the others."""
        received, values = iter(rows), []
        for k, pieces in enumerate(share.matrices[0].ins):
            if pieces is None:
                values.append(self._own(share, k, local, index))
            else:
                got = next(received)
                values.append(self._by_owner(share, [m.ins[k] for m in share.matrices], "joined", got, index))
        outs = evaluate(share.kind.jaxpr, share.kind.consts, values)
        return [
            self._by_owner(share, [m.outs[k] for m in share.matrices], "rows", out, index)
            for k, out in enumerate(outs)
        ]

    def _own(self, share: Share, k: int, local: dict[int, Any], index: Any) -> Any:
        """What every device has of all matrices, for the one that this device owns."""
        values = [_layer(local[m.region.ins[k]], m, m.region.ins[k]) for m in share.matrices]
        sources = {m.region.ins[k] for m in share.matrices}
        if len(sources) == 1 and not share.matrices[0].dims[sources.pop()]:
            return values[0]
        at = np.maximum(share.by_device(self.exchange.devices), 0)
        return jax.lax.dynamic_index_in_dim(jnp.stack(values), jnp.asarray(at)[index], keepdims=False)

    def _by_owner(self, share: Share, pieces: Sequence[Any], what: str, x: Any, index: Any) -> Any:
        """The pieces of a matrix joined, or its rows; by the way in which this device's matrix is split."""
        ways = list(dict.fromkeys(pieces))
        if len(ways) == 1:
            return getattr(ways[0], what)(x)
        which = np.zeros(self.exchange.devices, np.int32)
        which[share.owners] = [ways.index(p) for p in pieces]
        return jax.lax.select_n(jnp.asarray(which)[index], *(getattr(p, what)(x) for p in ways))


def _one_of(runs: Sequence[Callable[[], list[Any]]], now: Round, index: Any, devices: int) -> list[Any]:
    """Of several shares those that this device has a matrix of; zeros for the others."""
    shapes = [jax.eval_shape(run) for run in runs]
    owned = [tuple(row) for row in np.stack([share.by_device(devices) >= 0 for share in now], 1)]
    programs = list(dict.fromkeys(owned))

    def program(has: tuple[bool, ...]) -> list[Any]:
        outs = []
        for run, shape, own in zip(runs, shapes, has, strict=True):
            outs += run() if own else [jnp.zeros(x.shape, x.dtype) for x in shape]
        return outs

    which = np.asarray([programs.index(has) for has in owned], np.int32)
    return jax.lax.switch(jnp.asarray(which)[index], [functools.partial(program, has) for has in programs])


def rounds(kinds: Sequence[Kind], devices: int) -> list[Round]:
    """Matrices dealt out to their owners: see the notes."""
    full: list[Round] = []
    rest: list[tuple[Kind, list[Matrix]]] = []
    for kind in sorted(kinds, key=lambda k: -k.flops):
        count = len(kind.matrices) // devices * devices
        full += [
            [Share(kind, kind.matrices[i : i + devices], [*range(devices)])] for i in range(0, count, devices)
        ]
        if kind.matrices[count:]:
            rest.append((kind, kind.matrices[count:]))
    together, longest = _balanced(rest, devices)
    if longest < WORTH * sum(kind.flops for kind, _ in rest):
        return [*full, together]
    return [*full, *([Share(kind, some, [*range(len(some))])] for kind, some in rest)]


def _balanced(rest: Sequence[tuple[Kind, list[Matrix]]], devices: int) -> tuple[Round, float]:
    """One round of all of them, each given to the device that has least to do; and what that with most has to do."""
    load = [0.0] * devices
    shares: dict[tuple[int, int], Share] = {}
    count: dict[tuple[int, int], int] = {}
    for k, (kind, matrices) in enumerate(rest):
        for matrix in matrices:
            owner = min(range(devices), key=load.__getitem__)
            load[owner] += kind.flops
            turn = count[k, owner] = count.get((k, owner), -1) + 1
            share = shares.setdefault((k, turn), Share(kind, [], []))
            share.matrices.append(matrix)
            share.owners.append(owner)
    return list(shares.values()), max(load)


def evaluate(jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr."""
    return traverse(jaxpr, consts, values, jaxprs.bind, literal=lambda value: value)


def _mapped(
    plan: Plan, axes: tuple[str, ...], fn: Callable, in_specs: Sequence[PartitionSpec], out_specs
) -> Callable:
    mesh = typed_mesh(plan.array_mesh)
    return jax.shard_map(
        fn, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, axis_names=set(axes), check_vma=False
    )


def _layer(x: Any, matrix: Matrix, value: int) -> Any:
    """The matrix of a stack, of what a device has of the stack; its numbered dims stay, with size 1."""
    for dim, cls in matrix.dims[value].items():
        x = jax.lax.slice_in_dim(x, matrix.at[cls], matrix.at[cls] + 1, axis=dim)
    return x


def _constant(value: Any) -> Any:
    """What says that two constants are the same."""
    if jaxprs.is_tracer(value):
        return id(value)
    value = np.asarray(value)
    return value.shape, str(value.dtype), value.tobytes()


def flops(jaxpr: Any) -> float:
    """Operations of the matmuls of a jaxpr; those of a loop once per round, of branches those of the dearest."""
    total = 0.0
    for node in Graph(jaxpr, [None] * len(jaxpr.constvars)).nodes:
        inner = [flops(body) for body, _ in bodies(node.eqn)[0]]
        if node.name == "dot_general":
            dims = dot_dims(node.eqn)
            summed = math.prod(node.eqn.invars[0].aval.shape[d] for d in dims.contract[0])
            total += 2 * math.prod(node.eqn.outvars[0].aval.shape) * summed
        elif node.name in MATRIX_OPS:
            total += DECOMPOSITION * max(math.prod(v.aval.shape) * v.aval.shape[-1] for v in node.eqn.invars)
        elif inner:
            total += max(inner) * (rounds_of(node.eqn) if node.name == "scan" else 1)
    return total


def on_owners(update: Callable, plan: Plan) -> Callable:
    """`update(grads, state, params, **extra)` of an optax transformation, its regions computed by owners.

    Values are those of the update itself; what it does not mix stays on shards, and an update that mixes nothing is
    called as it is.
    """

    def run(grads, state, params, **extra):
        args = grads, state, params, extra
        arrays, merged = jaxprs.split_arrays(args)
        box: list[Any] = []

        def flat(*arrays):
            grads, state, params, extra = merged(arrays)
            leaves, tree = jax.tree.flatten(update(grads, state, params, **extra))
            box.append((tree, splits_of_results(tree.unflatten(leaves), plan)))
            return leaves

        graph = Graph(*jaxprs.trace(flat, *arrays))
        mixing = Mixing(graph, splits_of_arguments(args, plan), box[0][1])
        if not (mixing.regions or mixing.branches):
            return update(grads, state, params, **extra)
        return box[0][0].unflatten(Owners(mixing, plan)(arrays))

    return run


def _entries(spec: PartitionSpec, x: Any, plan: Plan) -> Split:
    """How an array is split over the axes of ZeRO."""
    entries = spec_entries(spec, np.ndim(x))
    return tuple(tuple(a for a in e if axis_of(a) in plan.config.axes) for e in entries)


def splits_of_arguments(args: tuple[Any, Any, Any, Any], plan: Plan) -> list[Split]:
    """How the arrays of (grads, state, params, extra) are split."""
    grads, state, params, extra = args
    found = [*_of_params(grads, plan), *_of_state(state, plan), *_of_params(params, plan)]
    return found + [((),) * np.ndim(x) for x in jaxprs.split_arrays(extra)[0]]


def splits_of_results(results: tuple[Any, Any], plan: Plan) -> list[Split]:
    """How those of (updates, state) are."""
    return [*_of_params(results[0], plan), *_of_state(results[1], plan)]


def _of_params(tree: Any, plan: Plan) -> list[Split]:
    leaves = plan.tree.flatten_up_to(tree)
    return [
        _entries(x.state, leaf, plan)
        for leaf, x in zip(leaves, plan.layouts, strict=True)
        if leaf is not None
    ]


def _of_state(state: Any, plan: Plan) -> list[Split]:
    rows = zip(jax.tree.leaves(state), plan.state_specs(state), strict=True)
    return [_entries(spec, leaf, plan) for leaf, spec in rows]
