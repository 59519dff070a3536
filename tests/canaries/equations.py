"""Primitives and their params, by which jzero reads a traced function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from canaries import check, constant, differences, lacking
from canaries.jaxpr import equation, matrix, names


@check("core/jaxprs.py, core/graph.py, core/traversal.py")
def equation_fields():
    """An equation has primitive, params, invars, outvars, effects, source_info.name_stack, ctx.manager; a literal has
    val and aval; a traced function has jaxpr and consts."""
    import jax
    import numpy as np
    from jax.extend.core import Literal

    big = np.ones(4, np.float32)
    closed = jax.make_jaxpr(lambda x: x * 2.0 + big)(matrix(4))
    jaxpr, eqn = closed.jaxpr, closed.jaxpr.eqns[0]
    with eqn.ctx.manager:
        rows = [
            ("name", eqn.primitive.name, "mul"),
            ("a constant in an equation", isinstance(eqn.invars[1], Literal), True),
            ("its value", float(eqn.invars[1].val), 2.0),
            ("shape", eqn.invars[1].aval.shape, ()),
            ("result", eqn.outvars[0].aval.shape, (4,)),
            ("effects", bool(eqn.effects), False),
            ("consts", len(closed.consts), len(jaxpr.constvars)),
            (
                "name stack",
                type(eqn.source_info.name_stack + eqn.source_info.name_stack).__name__,
                "NameStack",
            ),
            ("replace", eqn.replace(params={"new": 1}).params, {"new": 1}),
        ]
    return differences(rows)


@check("core/primitives.py, core/traversal.py")
def jit_equation():
    """A call by jax.jit is one equation with a name in INLINE (`jit`), its body in `jaxpr`."""
    import jax

    eqn = equation(jax.jit(lambda x: x * 2), matrix())
    known = eqn.primitive.name in constant("core.primitives", "INLINE", ("jit", "pjit"))
    return differences([("name", known or eqn.primitive.name, True)]) or lacking(
        "params", ["jaxpr"], eqn.params
    )


@check("core/primitives.py, core/regions.py, gather/interpreter.py")
def remat_equation():
    """The equation of jax.checkpoint has a name in REMAT (`remat2`, `checkpoint`), and jaxpr, policy, prevent_cse."""
    import jax

    eqn = equation(jax.checkpoint(lambda x: x * 2, policy=jax.checkpoint_policies.dots_saveable), matrix())
    known = eqn.primitive.name in constant("core.primitives", "REMAT", ("remat2", "remat", "checkpoint"))
    return differences([("name", known or eqn.primitive.name, True)]) or lacking(
        "params", ["jaxpr", "policy", "prevent_cse"], eqn.params
    )


@check("core/regions.py, core/graph.py")
def remat_policy():
    """A checkpoint policy is asked with a primitive, abstract operands and the equation's params, by keyword."""
    import jax
    import jax.numpy as jnp

    asked: dict[str, Any] = {}

    def policy(prim, *args, **params):
        asked[prim.name] = [a.shape for a in args], sorted(params)
        return False

    jax.make_jaxpr(jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.sin(x @ x)), policy=policy)))(matrix())
    shapes, params = asked.get("dot_general", (None, []))
    return differences([("operands of a matmul", shapes, [(4, 4), (4, 4)])]) or lacking(
        "params", ["dimension_numbers"], params
    )


@check("core/primitives.py")
def custom_derivative_equations():
    """jax.custom_jvp and jax.custom_vjp are equations custom_jvp_call and custom_vjp_call with call_jaxpr."""
    import jax

    found = []
    for kind, name in ((jax.custom_jvp, "custom_jvp_call"), (jax.custom_vjp, "custom_vjp_call")):
        fn = kind(lambda x: x * 2)
        if kind is jax.custom_jvp:
            fn.defjvp(lambda p, t: (p[0] * 2, t[0] * 2))
        else:
            fn.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))
        eqn = equation(fn, matrix())
        found += [
            differences([("name", eqn.primitive.name, name)]),
            lacking(name, [constant("core.primitives", "CALLS", {}).get(name, "call_jaxpr")], eqn.params),
        ]
    return "; ".join(filter(None, found))


@check("core/regions.py, gather/loops.py")
def scan_params():
    """A scan has jaxpr, length, reverse, unroll, and either num_consts and num_carry or a tree ft_in that unpacks into
    constants, carry and stacks; its operands have that order."""
    import jax

    w, xs = matrix(3, 3), matrix(5, 2, 3)
    eqn = equation(
        lambda w, h, xs: jax.lax.scan(lambda h, x: (h @ w + x, h), h, xs), w, matrix(2, 3), xs, named=["scan"]
    )
    p = eqn.params
    missing = lacking("params", ["jaxpr", "length", "reverse", "unroll"], p)
    if missing:
        return missing
    if "num_consts" in p:
        counts = p["num_consts"], p["num_carry"]
    elif "ft_in" in p:
        first, second, _ = p["ft_in"].unpack()
        counts = len(first), len(second)
    else:
        return f"neither num_consts nor ft_in in {sorted(p)}"
    shapes = [v.aval.shape for v in eqn.invars]
    rows = [("constants and carry", counts, (1, 1)), ("operands", shapes, [(3, 3), (2, 3), (5, 2, 3)]),
            ("length", p["length"], 5)]  # fmt: skip
    return differences(rows)


@check("core/regions.py")
def while_params():
    """A while loop has cond_jaxpr, body_jaxpr, cond_nconsts, body_nconsts; operands: constants of the condition, of the
    body, then the carry."""
    import jax

    eqn = equation(
        lambda n, w, h: jax.lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] @ w), (0, h)),
        3, matrix(3, 3), matrix(2, 3), named=["while"],
    )  # fmt: skip
    p = eqn.params
    return lacking("params", ["cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts"], p) or differences(
        [("constants", (p["cond_nconsts"], p["body_nconsts"]), (1, 1)),
         ("operands", [v.aval.shape for v in eqn.invars], [(), (3, 3), (), (2, 3)])]
    )  # fmt: skip


@check("core/regions.py, core/graph.py")
def cond_params():
    """The equation of lax.cond and lax.switch is `cond`, with branches; its first operand is the index, an int32."""
    import jax

    eqn = equation(
        lambda i, x: jax.lax.switch(i, [lambda x: x, lambda x: x * 2, lambda x: -x], x),
        1,
        matrix(),
        named=["cond"],
    )
    rows = [("branches", len(eqn.params["branches"]), 3), ("index", str(eqn.invars[0].aval.dtype), "int32")]
    return differences(rows)


@check("core/dims.py, core/products.py, core/graph.py, core/batched.py, gradients/growth.py")
def equation_params():
    """The params of equations by which jzero follows dims: dimension_numbers, permutation, axes, padding_config, ..."""
    import jax.numpy as jnp
    from jax import lax

    x = matrix(4, 6)
    image, kernel = matrix(2, 8, 8, 3), matrix(3, 3, 3, 5)
    table, index = matrix(10, 4), jnp.zeros(3, int)

    def convolution(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def lookup(table, index):
        return jnp.take(table, index, axis=0)

    wanted: list[tuple[str, Callable, tuple, Sequence[str]]] = [
        ("dot_general", jnp.matmul, (x, matrix(6, 2)), ["dimension_numbers"]),
        ("conv_general_dilated", convolution, (image, kernel), ["dimension_numbers", "batch_group_count"]),
        ("gather", lookup, (table, index), ["dimension_numbers", "slice_sizes"]),
        ("transpose", jnp.transpose, (x,), ["permutation"]),
        ("squeeze", lambda x: lax.squeeze(x, (0,)), (matrix(1, 4),), ["dimensions"]),
        ("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (3, 4, 6), (1, 2)), (x,), ["broadcast_dimensions"]),
        ("slice", lambda x: lax.slice(x, (0, 1), (2, 3)), (x,), ["start_indices", "strides"]),
        ("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 6)), (x, 1), ["slice_sizes"]),
        ("pad", lambda x: jnp.pad(x, 1), (x,), ["padding_config"]),
        ("reduce_sum", jnp.sum, (x,), ["axes"]),
        ("argmax", jnp.argmax, (x,), ["axes"]),
        ("cumsum", lambda x: lax.cumsum(x, 1), (x,), ["axis"]),
        ("integer_pow", lambda x: lax.integer_pow(x, 3), (x,), ["y"]),
        ("iota", lambda: lax.iota("int32", 4), (), ["dtype", "shape", "dimension"]),
        ("concatenate", lambda x: lax.concatenate([x, x], 0), (x,), ["dimension"]),
    ]  # fmt: skip
    found = []
    for name, fn, args, params in wanted:
        found.append(lacking(name, params, equation(fn, *args, named=[name]).params))
    dot = equation(jnp.matmul, x, matrix(6, 2)).params["dimension_numbers"]
    conv = equation(convolution, image, kernel, named=["conv_general_dilated"]).params["dimension_numbers"]
    take = equation(lookup, table, index, named=["gather"]).params["dimension_numbers"]
    found.append(differences([
        ("dims of a matmul", dot, (((1,), (0,)), ((), ()))),
        ("dims of a convolution", (conv.lhs_spec[0], conv.out_spec[0]), (0, 0)),
        ("dims of a lookup", (take.collapsed_slice_dims, take.start_index_map, take.operand_batching_dims,
                              take.offset_dims), ((0,), (0,), (), (1,))),
    ]))  # fmt: skip
    return "; ".join(filter(None, found))


@check("core/primitives.py")
def primitive_names():
    """The names of primitives in jzero's tables are those that jax gives to the operations."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.ad_checkpoint import checkpoint_name

    words, x = str.split, matrix()
    unary = words(
        """abs acos acosh asin asinh atan atanh cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor
        is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square tan tanh real imag"""
    )
    binary = words("add atan2 div eq ge gt le lt max min mul ne nextafter pow rem sub")
    rows = [
        (n, names(getattr(lax, n), x.astype("complex64") if n in ("real", "imag") else x), [n]) for n in unary
    ]
    rows += [(n, names(getattr(lax, n), x, x), [n]) for n in binary]
    i = matrix(dtype="int32")
    for lax_name, name in (("bitwise_and", "and"), ("bitwise_or", "or"), ("bitwise_xor", "xor"), ("bitwise_not", "not"),
                           ("population_count", "population_count")):  # fmt: skip
        fn = getattr(lax, lax_name)
        rows.append((lax_name, names(fn, *([i] if name in ("not", "population_count") else [i, i])), [name]))
    rows += [(n, names(getattr(lax, n), i, i), [n])
             for n in ("shift_left", "shift_right_arithmetic", "shift_right_logical")]  # fmt: skip
    linalg, one_device = jnp.linalg, jax.sharding.SingleDeviceSharding(jax.devices()[0])
    others = {
        "select_n": lambda x: lax.select(x > 0, x, x), "clamp": lambda x: lax.clamp(0.0, x, 1.0),
        "convert_element_type": lambda x: x.astype("bfloat16"), "copy": jnp.copy,
        "reduce_precision": lambda x: lax.reduce_precision(x, 8, 7), "name": lambda x: checkpoint_name(x, "a"),
        "reduce_max": jnp.max, "reduce_min": jnp.min, "reduce_prod": jnp.prod, "reduce_and": lambda x: jnp.all(x > 0),
        "reduce_or": lambda x: jnp.any(x > 0), "argmin": jnp.argmin, "reshape": jnp.ravel, "rev": jnp.flip,
        "cholesky": linalg.cholesky, "eigh": linalg.eigh, "svd": linalg.svd, "qr": lambda x: lax.linalg.qr(x),
        "lu": lax.linalg.lu, "householder_product": lambda x: lax.linalg.householder_product(x, x[0]),
        "triangular_solve": lambda x: lax.linalg.triangular_solve(x, x), "fft": jnp.fft.fft, "sort": jnp.sort,
        "top_k": lambda x: lax.top_k(x, 2), "cumsum": jnp.cumsum, "cumprod": jnp.cumprod, "cummax": lax.cummax,
        "cumlogsumexp": lax.cumlogsumexp, "optimization_barrier": lax.optimization_barrier,
        "scatter-add": lambda x: x.at[0].add(1.0),
        "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:1], (0, 0)),
        "sharding_constraint": lambda x: lax.with_sharding_constraint(x, one_device),
    }  # fmt: skip
    found = differences(rows)
    elementwise = [
        *unary,
        *binary,
        "and",
        "or",
        "xor",
        "not",
        "select_n",
        "clamp",
        "convert_element_type",
        "copy",
    ]
    tables = lacking("ELEMENTWISE", elementwise, constant("core.primitives", "ELEMENTWISE", elementwise))
    odd = [f"{n} is {', '.join(got)}" for n, fn in others.items() if n not in (got := names(fn, x))]
    return "; ".join(filter(None, [found, tables, *odd]))
