"""A program with arrays in pinned host memory, compiled as jzero does it."""

from __future__ import annotations

import json
import re

from canaries import check, differences, once
from canaries.programs import lines_with, plugin

STACK_BYTES, MOMENT_BYTES = 7 * 256 * 512 * 4, 128 * 512 * 4


@once
def host_step():
    """A step with a stack of weights, its gradients and a moment in pinned host memory, by jzero's compile."""
    plugin()
    import jax
    import jax.numpy as jnp

    import jzero

    mesh, space = jzero.pod("h100").mesh({"data": 2, "model": 4}), jax.memory.Space

    def shape(*sizes, spec, kind="pinned_host"):
        sharding = jax.NamedSharding(mesh, jax.P(*spec), memory_kind=kind)
        return jax.ShapeDtypeStruct(sizes, "float32", sharding=sharding)

    def con(x, *spec):
        return jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P(*spec)))

    def step(stack, moment, x):
        @jax.checkpoint
        def layer(h, w):
            w = con(jax.device_put(w, space.Device), "data")
            return jnp.tanh(h @ con(w, None, None)), None

        def loss_fn(stack):
            return jnp.mean(jax.lax.scan(layer, x, stack)[0] ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(stack)
        with jax.named_scope("jzero.update"):
            moment = con(jax.device_put(moment, space.Device) * 0.9 + jnp.sum(x), ("data", "model"))
        return jax.device_put(con(grads, None, "data"), space.Host), jax.device_put(moment, space.Host), loss

    args = shape(7, 512, 512, spec=(None, "data")), shape(1024, 512, spec=(("data", "model"),))
    x = shape(64, 512, spec=(("data", "model"),), kind="device")
    return jzero.pod("h100").compile(step, *args, x, donate_argnums=(0, 1))


@check("core/compile_only.py, core/cuda_plugin.py, proof/pod.py", gpu=True)
def pod_compile():
    """jzero.pod compiles: private calls of jax take its stand-in devices, and the Compiled can be read and not run."""
    compiled = host_step()
    kinds = [s.memory_kind for s in compiled.input_shardings[0]]
    memory = compiled.memory_analysis()
    rows = [
        ("memory kinds", kinds, ["pinned_host", "pinned_host", "device"]),
        ("bytes of arguments on the host", memory.host_argument_size_in_bytes, STACK_BYTES + MOMENT_BYTES),
        ("text", compiled.as_text()[:9], "HloModule"),
        ("shapes", [x.shape for x in compiled.args_info[0]], [(7, 512, 512), (1024, 512), (64, 512)]),
    ]
    return differences(rows)


@check("proof/hlo.py, proof/transfers.py", gpu=True)
def host_memory_space():
    """An array in pinned host memory has S(5) in its layout, and nothing else has."""
    head = host_step().as_text().split("\n", 1)[0]
    parts = re.search(r"entry_computation_layout=\{\((.*?)\)->\((.*?)\)\}, (?:allow|num_|front|repl)", head)
    if parts is None:
        return f"no entry_computation_layout: {head[:160]}"
    hosted = [re.findall(r"\[([\d,]*)\](?:\{([^}]*)\})?", p) for p in parts.groups()]
    arguments, results = ([(dims, "S(5)" in layout) for dims, layout in some] for some in hosted)
    state = [("7,256,512", True), ("128,512", True)]
    rows = [("arguments", arguments, [*state, ("8,512", False)]), ("results", results, [*state, ("", False)])]
    return differences(rows)


@check("proof/transfers.py", gpu=True)
def host_copies():
    """Whole arrays move between host and device by copy-start or copy, slices of a stack by dynamic-slice and
    dynamic-update-slice; a stack in host memory is made by the custom call AllocateBuffer."""
    text = host_step().as_text()
    moment = [
        x for x in lines_with(text, "f32[128,512]") if re.search(r" copy(-start)?\(", x) and "S(5)" in x
    ]
    fetched = [x for x in lines_with(text, "f32[1,256,512]") if " dynamic-slice(" in x]
    written = [x for x in lines_with(text, "f32[7,256,512]{2,1,0:S(5)}") if " dynamic-update-slice(" in x]
    made = lines_with(text, 'custom_call_target="AllocateBuffer"')
    rows = [("copies of the moment", len(moment), 2), ("slices fetched", len(fetched), 2),
            ("slices written", len(written), 1), ("AllocateBuffer", len(made), 1)]  # fmt: skip
    return differences(rows)


@check("proof/transfers.py, proof/lifetimes.py", gpu=True)
def host_bytes_read():
    """From that program jzero reads what crosses PCIe: the stack twice and the moment once to the device, both once to
    the host."""
    import jzero

    found = jzero.explain(host_step()).pcie
    wanted = {"to_device": 2 * STACK_BYTES + MOMENT_BYTES, "to_host": STACK_BYTES + MOMENT_BYTES}
    return differences([("bytes", found, wanted)])


@check("proof/offsets.py", gpu=True)
def slice_offsets():
    """Beside a slice in a loop stands dynamic_slice_config with loop_index, and byte_offset and byte_stride in it or in
    its field `linear`."""
    text = host_step().as_text()
    configs = [json.JSONDecoder().raw_decode(x)[0] for x in text.split('"dynamic_slice_config":')[1:]]
    linear = [c.get("linear", c) for c in configs]
    odd = [c for c, x in zip(configs, linear, strict=True) if not {"byte_offset", "byte_stride"} <= set(x)]
    strides = {abs(int(x["byte_stride"])) for x in linear if "byte_stride" in x}
    return differences(
        [("another form", odd[:1], []), ("a stride of one layer", 256 * 512 * 4 in strides, True)]
    )


@check("core/xla_options.py (HOST_LOOPS), proof/offsets.py", gpu=True)
def backward_slices():
    """From HOST_LOOPS on (jaxlib 0.11.2) a backward loop reads the right slice of a stack in host memory; with an older
    jaxlib jzero refuses such programs."""
    import jaxlib

    from jzero.core.xla_options import HOST_LOOPS
    from jzero.proof.hlo import parse
    from jzero.proof.offsets import wrong_slices

    version = tuple(int(n) for n in re.findall(r"\d+", jaxlib.__version__)[:3])
    wrong, unread = wrong_slices(parse(host_step().as_text()))
    rows = [("wrong slices", wrong, []), ("slices with an index that cannot be computed", unread, [])]
    return differences(rows) if version >= HOST_LOOPS else ""
