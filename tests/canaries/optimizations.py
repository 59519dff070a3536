"""What XLA:GPU must not optimize away, and the options and targets that it takes."""

from __future__ import annotations

import re

from canaries import check, constant, differences
from canaries.imported_names import ROOT
from canaries.programs import PODS, compiled_for, computations, gpu_mesh, topology

MATMUL = re.compile(r" dot\(|__cublas|calls=\S*dot")


@check("core/ordering.py, update/sharded_update.py, gather/ties.py", gpu=True)
def barriers_order():
    """A weight that an optimization_barrier ties to an activation, and that is constrained behind it, is gathered when
    the activation is there; without a barrier XLA gathers it earlier."""
    import jax
    import jax.numpy as jnp

    n, whole = 2048, jax.NamedSharding(gpu_mesh(), jax.P())

    def layers(barrier):
        def fn(x, first, second):
            h = jnp.tanh(x @ jax.lax.with_sharding_constraint(first, whole))
            h, second = jax.lax.optimization_barrier((h, second)) if barrier else (h, second)
            return h @ jax.lax.with_sharding_constraint(second, whole)

        entry = computations(compiled_for(fn, (n, n), (n, n), (n, 2 * n)))["ENTRY"]
        gather = next(
            i for i, x in enumerate(entry) if re.search(rf"f32\[{n},{2 * n}\].* all-gather(-start)?\(", x)
        )
        return gather > next(i for i, x in enumerate(entry) if MATMUL.search(x))

    return differences(
        [("gathered late without a barrier", layers(False), False), ("with one", layers(True), True)]
    )


@check("core/ordering.py, core/made_twice.py, activations/remat.py", gpu=True)
def barriers_keep_apart():
    """Two equal computations are made once, but twice if an optimization_barrier is between their inputs."""
    import jax
    import jax.numpy as jnp

    def fn(barrier):
        def twice(x, w):
            first = jnp.tanh(x @ w)
            again, first = jax.lax.optimization_barrier((x, first)) if barrier else (x, first)
            return first, jnp.tanh(again @ w)

        text = compiled_for(twice, (512, 512), (512, 512))
        return sum(bool(MATMUL.search(x)) for x in computations(text)["ENTRY"])

    without, with_one = fn(False), fn(True)
    return differences([("matmuls without a barrier", without, 1), ("with one", with_one, 2)])


def kept_casts(gpu: str) -> str:
    """What the compare of a 16-bit param with its cast master has become on a GPU."""
    import jax.numpy as jnp

    def where_equal(param, master):
        return jnp.where(master.astype(param.dtype) == param, master, param.astype(master.dtype))

    taken_over = constant("update.sharded_update", "taken_over", where_equal)

    def update(param, master, grad):
        master = taken_over(param, master)
        master = master - 0.1 * grad.astype(master.dtype)
        return master.astype(param.dtype), master

    odd = []
    for dtype, short in (("bfloat16", "bf16"), ("float16", "f16")):
        text = compiled_for(update, *[(512, 512)] * 3, gpu=gpu, dtypes=(dtype, "float32", dtype))
        compares = 0
        for name, lines in computations(text).items():
            made = dict(re.findall(r"%?([\w.\-]+) = (.*)", line)[0] for line in lines)
            for rest in made.values():
                operands = re.match(r"pred\[\S* compare\((.*?)\), direction=(?:EQ|NE)", rest)
                if operands is None or not rest.startswith("pred[64,512]"):
                    continue
                compares += 1
                sides = [made.get(o.split(" ")[-1].lstrip("%"), "") for o in operands[1].split(", ")]
                if not any(s.startswith(f"{short}[") and " convert(" in s for s in sides):
                    odd.append(f"{gpu}: no side of the compare is a cast to {short} (in {name})")
        if not compares:
            odd.append(f"{gpu}: no compare in the program for {dtype}")
    return "; ".join(odd)


@check("update/sharded_update.py (the master follows the param)", gpu=True)
def cast_survives_a100():
    """The compare of a 16-bit param with its cast fp32 master is made of rounded values in spite of
    xla_allow_excess_precision: A100."""
    return kept_casts("a100-80gb")


@check("update/sharded_update.py (the master follows the param)", gpu=True)
def cast_survives_h100():
    """The same: H100."""
    return kept_casts("h100")


@check("update/sharded_update.py (the master follows the param)", gpu=True)
def cast_survives_h200():
    """The same: H200."""
    return kept_casts("h200")


@check("update/sharded_update.py (the master follows the param)", gpu=True)
def cast_survives_b200():
    """The same: B200."""
    return kept_casts("b200")


def halves(divide: bool):
    """A momentum step of fp32 values in two 16-bit halves, which are split as `update/remainder.py` does."""
    import jax
    import jax.numpy as jnp

    def cast(x, dtype):
        return jax.lax.bitcast_convert_type(x, dtype)

    def update(param, rest, grad, moment):
        upper, lower = cast(param, jnp.uint16).astype(jnp.uint32), cast(rest.astype(jnp.int32), jnp.uint32)
        wide = cast((upper << 16) + lower, grad.dtype)
        moment = 0.9 * moment + 0.1 * grad
        bits = cast(wide - 0.01 * (moment + 0.1 * wide), jnp.uint32)
        if divide:
            bits = jax.lax.div(bits, jnp.where((bits & 0xFFFF) > 0xFFFF, jnp.uint32(2), jnp.uint32(1)))
        upper, lower = ((bits + 0x8000) >> 16).astype(jnp.uint16), (bits & 0xFFFF).astype(jnp.uint16)
        return cast(upper, jnp.bfloat16), cast(lower, jnp.int16), moment

    return update


@check("update/remainder.py (computed once)")
def divisions_not_copied():
    """XLA:CPU computes a value anew in each of two kernels that read it, but an integer division once, where it does
    not see that the divisor is 1."""
    import jax

    def copies(divide):
        shapes = [jax.ShapeDtypeStruct((4096,), dtype) for dtype in ("bfloat16", "int16", "float32", "float32")]
        text = jax.jit(halves(divide)).lower(*shapes).compile().as_text()
        found = [lines for lines in computations(text).values() if re.search(r"ROOT \S+ = (bf16|s16|u16)\[", lines[-1])]
        return sum(any(" multiply(" in line for line in lines) for lines in found)

    return differences([("kernels that compute it", copies(False), 2), ("with a division", copies(True), 0)])


@check("update/remainder.py (computed once)", gpu=True)
def halves_of_one_kernel():
    """Both halves of a value come out of one kernel."""
    text = compiled_for(halves(True), *[(512, 512)] * 4, dtypes=("bfloat16", "int16", "float32", "float32"))
    made = re.findall(r"^%\S*fus\S* \(.*\) -> (.*) \{$", text, re.MULTILINE)
    return differences([("16-bit results of kernels", [len(re.findall(r"\b[us]16\[", x)) for x in made], [2])])


@check("core/xla_options.py", gpu=True)
def xla_options():
    """XLA takes the options that jzero passes, and this jaxlib is in the range that core/xla_options.py was tested
    with; an unknown option is an error."""
    import warnings

    from jzero.core.xla_options import compiler_options

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        options = compiler_options(platform="cuda", bucket_bytes=2**20, n=8, gathers=True)
    found = [str(w.message).splitlines()[0] for w in said]
    if not options:
        options = dict.fromkeys(
            re.findall(r'"(xla_gpu_\w+)"', (ROOT / "jzero/core/xla_options.py").read_text()), 4
        )
    compiled_for(lambda x: x * 2, (512, 512), options=options)
    try:
        compiled_for(lambda x: x * 3, (512, 512), options={"xla_gpu_no_such_option": 1})
        found.append("an unknown option is accepted")
    except Exception as error:
        found += (
            [] if "xla_gpu_no_such_option" in str(error) else [f"of an unknown option: {str(error)[:120]}"]
        )
    return "; ".join(found)


@check("proof/pods/", gpu=True)
def pod_targets():
    """The target configs of jzero's pods are parsed, and give devices of those GPUs."""
    names = sorted(file.stem for file in PODS.glob("*.txtpb"))
    kinds = {name: topology(name).devices[0].device_kind for name in names}
    rows = [(name, name.split("-")[0].upper() in kind or kind, True) for name, kind in kinds.items()]
    return differences([("pods", len(names), 4), *rows])


@check("core/one_way.py, comm/gradients.py")
def spread_layouts_are_wrong():
    """Where the layout of a gradient spreads back into a forward pass with a sliced, split weight, the loss is wrong;
    behind `sdy.propagation_barrier` it is right. When the first is mended, `spreads_wrongly` can go."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    constrain, numbers, size = jax.lax.with_sharding_constraint, np.random.default_rng(0), 16
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    layout = {
        spec: jax.NamedSharding(jax.sharding.Mesh(devices, ("a", "b", "m")), jax.P(*spec))
        for spec in ((), (None, "m"), (None, "b"), (("a", "b"),))
    }
    w, v, x = (numbers.normal(size=s).astype(np.float32) for s in ((size, 2 * size), (size, size), (8, size)))

    def loss(v, w, x):
        h = x @ w[:, :size]
        return jnp.mean((h + h @ (v * jnp.mean(v**2, 0))) ** 2)

    def step(behind):
        def run(v, w, x):
            value, grad = jax.value_and_grad(loss)(v, w, x)
            return value, constrain(behind(grad), layout[None, "b"])

        return jax.jit(run)

    args = [jax.device_put(a, layout[s]) for a, s in ((v, ()), (w, (None, "m")), (x, (("a", "b"),)))]
    right = jax.jit(loss)(v, w, x)
    forward_only = constant("core.one_way", "forward_only", lambda x: constrain(x, layout[()]))
    found = [bool(jnp.allclose(step(behind)(*args)[0], right, rtol=1e-3)) for behind in (lambda g: g, forward_only)]
    return differences([("right without it", found[0], False), ("with it", found[1], True)])
