"""What jzero does in a trace: binds equations again, adds primitives, asks where it is."""

from __future__ import annotations

from typing import Any

from canaries import check, differences, lacking
from canaries.jaxpr import equation, matrix


@check("core/jaxprs.py, core/products.py")
def bind_again():
    """eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params)) evaluates any equation: a call, a scan, a
    while loop, a cond, a remat region, custom derivatives."""
    import jax
    import jax.numpy as jnp

    def everything(x):
        x = jax.jit(jnp.sin)(x)
        x = jax.lax.scan(lambda h, w: (h @ w, None), x, jnp.stack([x, x]))[0]
        x = jax.lax.fori_loop(0, 3, lambda _, h: h * 0.5, x)
        x = jax.lax.while_loop(lambda h: jnp.sum(h) > 1e6, lambda h: h * 0.5, x)
        x = jax.lax.cond(jnp.sum(x) > 0, jnp.cos, jnp.sin, x)
        x = jax.checkpoint(jnp.tanh)(x)
        return jax.nn.relu(jax.nn.gelu(x))

    def run(closed, *args):
        env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(closed.jaxpr.invars, args, strict=True))
        for eqn in closed.jaxpr.eqns:
            values = [a.val if hasattr(a, "val") else env[a] for a in eqn.invars]
            out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
            env.update(zip(eqn.outvars, out if eqn.primitive.multiple_results else [out], strict=True))
        return env[closed.jaxpr.outvars[0]]

    x = matrix() * 0.3
    closed = jax.make_jaxpr(everything)(x)
    got, wanted = jax.jit(lambda x: run(closed, x))(x), jax.jit(everything)(x)
    return "" if jnp.allclose(got, wanted) else f"other values: {got.ravel()[:3]}, not {wanted.ravel()[:3]}"


@check("core/left_behind.py")
def trace_of_a_tracer():
    """Inside of jax.make_jaxpr a new value has the current trace as `_trace`, an argument of an outer trace has not."""
    import jax
    from jax._src.core import trace_ctx

    seen: list[bool] = []

    def outer(x):
        def inner(y):
            seen[:] = [(v + 1)._trace is trace_ctx.trace for v in (y, x)] + [x._trace is trace_ctx.trace]
            return y

        jax.make_jaxpr(inner)(x)
        return x

    jax.make_jaxpr(outer)(matrix())
    return differences([("of the current trace", seen, [True, True, False])])


@check("core/jaxprs.py")
def trace_classes():
    """The current trace is an EvalTrace outside of traces; in a loop's body one with frame.debug_info.traced_for
    `scan`, `fori_loop` or `while_body`, reached by parent_trace; with gradients taken inside, behind a JVPTrace or
    LinearizeTrace."""
    import jax
    import jax.numpy as jnp
    from jax._src.core import EvalTrace, trace_ctx

    seen: dict[str, list[str]] = {}

    def note(where):
        trace, rows = trace_ctx.trace, []
        while trace is not None:
            info = getattr(getattr(trace, "frame", None), "debug_info", None)
            rows.append(info.traced_for if info is not None else type(trace).__name__)
            trace = getattr(trace, "parent_trace", None)
        seen.setdefault(where, rows)

    def scanned(where, inner=lambda h, note: note() or h):
        return lambda x: jnp.sum(
            jax.lax.scan(lambda h, _: (inner(h, lambda: note(where)), None), x, length=2)[0]
        )

    def gradient_inside(h, note):
        return jax.grad(lambda h: note() or jnp.sum(jnp.sin(h)))(h)

    x, outside = matrix(2), isinstance(trace_ctx.trace, EvalTrace)
    jax.jit(lambda x: note("jit") or x).trace(x)
    jax.jit(scanned("scan")).trace(x)
    jax.jit(jax.grad(scanned("grad of scan"))).trace(x)
    jax.jit(scanned("grad in scan", gradient_inside)).trace(x)
    jax.jit(lambda x: jax.lax.fori_loop(0, x.astype(int)[0], lambda _, h: note("fori") or h, x)).trace(x)
    jax.jit(lambda x: jax.lax.while_loop(lambda h: h[0] < 3, lambda h: note("while") or h + 1, x)).trace(x)
    loops, gradients = ("scan", "fori_loop", "while_body"), ("JVPTrace", "LinearizeTrace")

    def first(where):
        found = next((r for r in seen.get(where, ()) if r in (*loops, *gradients)), None)
        return "gradient" if found in gradients else found

    wanted = {"jit": None, "scan": "scan", "grad of scan": "scan", "grad in scan": "gradient", "fori": "fori_loop",
              "while": "while_body"}  # fmt: skip
    rows = [("outside of traces", outside, True)] + [(k, first(k), v) for k, v in wanted.items()]
    rows.append(("grad in scan, further out", "scan" in seen.get("grad in scan", ()), True))
    return differences(rows)


@check("core/jaxprs.py")
def name_stacks():
    """source_info_util: current_name_stack() + an equation's stack, under user_context, names what is bound again;
    summarize gives the user's file and line."""
    import jax
    import jax.numpy as jnp
    from jax._src import source_info_util

    def named(x):
        with jax.named_scope("first"):
            return jnp.sin(x)

    eqn = jax.make_jaxpr(named)(matrix()).jaxpr.eqns[0]

    def again(x):
        with jax.named_scope("second"):
            stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
            with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack):
                return eqn.primitive.bind(x, **eqn.params)

    text = jax.jit(again).lower(matrix()).as_text(debug_info=True)
    place = source_info_util.summarize(eqn.source_info)
    rows = [("names", "second/first/sin" in text, True), ("place", "tracing.py:" in place or place, True)]
    return differences(rows)


@check("core/linear.py, core/carriers.py, core/block_input.py")
def own_primitives():
    """A primitive of jzero's own gets its rules by def_impl, def_abstract_eval, ad.primitive_jvps,
    batching.primitive_batchers and mlir.register_lowering; tangents may be ad.Zero of to_tangent_aval()."""
    import jax
    import jax.numpy as jnp
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir

    p = Primitive("canary_carried")
    p.def_impl(lambda value, carrier: value)
    p.def_abstract_eval(lambda value, carrier: value)
    ad.primitive_jvps[p] = lambda primals, tangents: (p.bind(*primals), tangents[1])
    batching.primitive_batchers[p] = lambda args, dims: (
        p.bind(*(batching.bdim_at_front(x, d, 3) for x, d in zip(args, dims, strict=True))), 0
    )  # fmt: skip
    mlir.register_lowering(p, mlir.lower_fun(lambda value, carrier: value, multiple_results=False))
    zero = ad.Zero(jax.typeof(matrix(3)).to_tangent_aval())
    x = jnp.arange(3.0)
    gradient = jax.jit(jax.grad(lambda c: jnp.sum(p.bind(x, c) * x)))(x)
    rows = [("value", jax.jit(p.bind)(x, x + 1).tolist(), x.tolist()), ("gradient", gradient.tolist(), x.tolist()),
            ("vmap", jax.vmap(p.bind)(x, x + 1).tolist(), x.tolist()),
            ("a zero tangent", ad.instantiate_zeros(zero).tolist(), [0.0] * 3)]  # fmt: skip
    return differences(rows)


@check("core/block_input.py")
def remat_rule():
    """pe.partial_eval_jaxpr_custom_rules: a rule gets (saveable, unknown, instantiated, eqn) and returns both
    equations, which results are unknown and kept, and residuals; equations have replace, Var takes an aval."""
    import jax
    import jax.numpy as jnp
    from jax.extend.core import Primitive, Var
    from jax.interpreters import ad, mlir
    from jax.interpreters import partial_eval as pe

    p, asked = Primitive("canary_marked"), []
    p.def_impl(lambda x: x)
    p.def_abstract_eval(lambda x: x)
    ad.primitive_jvps[p] = lambda primals, tangents: (p.bind(*primals), tangents[0])
    mlir.register_lowering(p, mlir.lower_fun(lambda x: x, multiple_results=False))

    def rule(saveable, unknown, instantiated, eqn):
        asked.append((list(unknown), list(instantiated), saveable(p, eqn.invars[0].aval, **eqn.params)))
        aval = eqn.invars[0].aval
        kept = Var(aval)
        store = jax.make_jaxpr(jax.jit(lambda x: (x, x * 2)))(aval).eqns[0]
        load = jax.make_jaxpr(jax.jit(jnp.cos))(aval).eqns[0]
        known = store.replace(invars=eqn.invars, outvars=[eqn.outvars[0], kept], source_info=eqn.source_info)
        staged = load.replace(invars=[kept], outvars=[eqn.outvars[0]], source_info=eqn.source_info)
        return known, staged, [False], [True], [kept]

    pe.partial_eval_jaxpr_custom_rules[p] = rule
    policy = lambda prim, *_, **__: prim.name == "canary_marked"  # noqa: E731
    fn = jax.checkpoint(lambda x: jnp.sum(jnp.sin(p.bind(x))), policy=policy)
    x = jnp.ones(3)
    rows = [("asked", asked[:1] if jax.make_jaxpr(jax.grad(fn))(x) else None, [([False], [True], True)]),
            ("the second run reads what the rule gives",
             bool(jnp.allclose(jax.grad(fn)(x), jnp.cos(jnp.cos(2 * x)))), True)]  # fmt: skip
    return differences(rows)


@check("layout/placement.py, core/block_input.py, comm/host.py")
def memory_spaces():
    """In a trace jax.device_put(x, jax.memory.Space.Host) gives an aval with that memory_space, and update() makes
    one; devices name their memories by `kind`, and have pinned_host."""
    import jax

    space = jax.memory.Space
    traced = jax.make_jaxpr(lambda x: jax.device_put(x, space.Host))(matrix()).jaxpr.outvars[0].aval
    there = jax.typeof(matrix()).update(memory_space=space.Host)
    kinds = [m.kind for m in jax.devices()[0].addressable_memories()]
    rows = [("device_put", traced.memory_space, space.Host), ("update", there.memory_space, space.Host),
            ("pinned_host", "pinned_host" in kinds or kinds, True)]  # fmt: skip
    return differences(rows)


@check("layout/explicit.py, core/jaxprs.py, gather/")
def mesh_types():
    """In jax.set_mesh of Explicit axes the abstract mesh says so; in a shard_map its axes are Manual; an AbstractMesh
    has are_all_axes_auto; auto_axes makes axes Auto; equations name theirs in `sharding` or
    `out_sharding`."""
    import jax
    import jax.numpy as jnp

    kinds = jax.sharding.AxisType
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kinds.Explicit,))
    auto = jax.make_mesh((8,), ("data",), axis_types=(kinds.Auto,))
    seen: dict[str, Any] = {}

    def note(where):
        def fn(x):
            seen[where] = jax.sharding.get_abstract_mesh().axis_types
            return x

        return fn

    spec = jax.P("data")
    with jax.set_mesh(mesh):
        x = jax.device_put(matrix(8), jax.NamedSharding(mesh, spec))
        jax.jit(note("set_mesh")).trace(x)
        jax.jit(jax.sharding.auto_axes(note("auto_axes"), out_sharding=spec)).trace(x)
        typed = jax.typeof(x).sharding.spec
    jax.jit(jax.shard_map(note("shard_map"), mesh=auto, in_specs=spec, out_specs=spec)).trace(matrix(8))
    named = equation(lambda x: jax.lax.with_sharding_constraint(x, jax.NamedSharding(auto, spec)), matrix(8))
    rows = [(k, seen.get(k), (v,)) for k, v in
            (("set_mesh", kinds.Explicit), ("auto_axes", kinds.Auto), ("shard_map", kinds.Manual))]  # fmt: skip
    rows += [
        ("the type of an array", typed, spec),
        ("param of a constraint", named.params["sharding"].spec, spec),
    ]
    rows += [
        ("Auto", auto.abstract_mesh.are_all_axes_auto, True),
        ("Explicit", mesh.abstract_mesh.are_all_axes_auto, False),
    ]
    broadcast = equation(lambda x: jnp.broadcast_to(x, (3, 8)), matrix(8), named=["broadcast_in_dim"])
    product = equation(jnp.matmul, matrix(), matrix())
    return "; ".join(filter(None, [
        differences(rows), lacking("broadcast_in_dim", ["sharding"], broadcast.params),
        lacking("dot_general", ["out_sharding"], product.params),
    ]))  # fmt: skip
