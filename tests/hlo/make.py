"""Compiles the small programs whose texts the tests of `jzero.proof` read, and stores the texts here.

    JAX_PLATFORMS=cpu python tests/hlo/make.py            # once with the oldest jax, once with the newest

writes `<program>.<cpu|h200>.jax<version>.txt.gz` for the jax it runs on, of all programs or of those that are
named: 10 s on two cores, no GPU. The programs are plain JAX, without jzero's own layouts, so that the texts change
only when XLA does. Each function says what its program holds; `tests/proof/test_hlo.py` states, by hand, what must
be found in it.
"""

from __future__ import annotations

import gzip
import os
import pathlib
import sys
from functools import partial

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

HERE = pathlib.Path(__file__).parent
LAYERS, WIDTH = 6, 256


def leaf(mesh, shape, spec, dtype=jnp.float32, memory_kind="device"):
    """An abstract array on the mesh."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec, memory_kind=memory_kind))


def keep(mesh, x, *spec):
    """Constrain `x` to a layout."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def scan_stage3(mesh):
    """Six scanned layers under remat; each is gathered (bf16) in the forward and in the backward loop."""

    def step(weights, x):
        def loss(weights):
            def layer(h, w):
                return jnp.tanh(h @ keep(mesh, w.astype(jnp.bfloat16))), None

            h, _ = jax.lax.scan(jax.checkpoint(layer), x, weights)
            return (h.astype(jnp.float32) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(weights)
        with jax.named_scope("jzero.update"):
            return weights - 0.1 * keep(mesh, grads, None, "data"), value

    weights = leaf(mesh, (LAYERS, WIDTH, WIDTH), P(None, "data"))
    return step, (weights, leaf(mesh, (mesh.size * 4, WIDTH), P("data"), jnp.bfloat16)), (0,)


def unrolled_stage2(mesh):
    """Three whole bf16 weights: gradients reduce-scattered, an fp32 master split, new weights gathered."""

    def step(params, master, x):
        def loss(params):
            h = x
            for w in params:
                h = jnp.tanh(h @ w)
            return (h.astype(jnp.float32) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        with jax.named_scope("jzero.reduce_grads"):
            grads = [keep(mesh, g, "data") for g in grads]
        with jax.named_scope("jzero.update"):
            master = [
                keep(mesh, m - 0.1 * g.astype(jnp.float32), "data")
                for m, g in zip(master, grads, strict=True)
            ]
        with jax.named_scope("jzero.gather_params"):
            params = [keep(mesh, keep(mesh, m.astype(jnp.bfloat16), "data")) for m in master]
        return params, master, value

    shapes = [(WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH), (WIDTH, WIDTH)]
    params = [leaf(mesh, s, P(), jnp.bfloat16) for s in shapes]
    master = [leaf(mesh, s, P("data")) for s in shapes]
    return step, (params, master, leaf(mesh, (mesh.size * 4, WIDTH), P("data"), jnp.bfloat16)), (0, 1)


def accumulate(mesh):
    """Four micro-batches, each with three scanned layers: loops in loops, a reduction in the inner one."""

    def step(weights, batches):
        def loss(weights, x):
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)
            return (h**2).mean()

        def micro(total, x):
            return keep(
                mesh, total + keep(mesh, jax.grad(loss)(weights, x), None, "data"), None, "data"
            ), None

        total, _ = jax.lax.scan(micro, keep(mesh, jnp.zeros_like(weights), None, "data"), batches)
        return weights - 0.1 * total

    batches = leaf(mesh, (4, mesh.size * 4, WIDTH), P(None, "data"))
    return step, (leaf(mesh, (3, WIDTH, WIDTH), P()), batches), (0,)


def two_axes(mesh):
    """Tensor parallelism over `model`, a gradient all-reduce over `data`, both in one step."""

    def step(w1, w2, x):
        def loss(w1, w2):
            return ((keep(mesh, jnp.tanh(x @ w1) @ w2, "data")) ** 2).mean()

        g1, g2 = jax.grad(loss, (0, 1))(w1, w2)
        return w1 - 0.1 * g1, w2 - 0.1 * g2

    w1 = leaf(mesh, (WIDTH, 4 * WIDTH), P(None, "model"))
    w2 = leaf(mesh, (4 * WIDTH, WIDTH), P("model", None))
    return step, (w1, w2, leaf(mesh, (mesh.shape["data"] * 4, WIDTH), P("data"))), (0, 1)


def manual(mesh):
    """One of each collective, written by hand in `shard_map` over named axes."""

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=P(("data", "model")),
        out_specs=P(("data", "model")),
        check_vma=False,
    )
    def ops(x):
        x = jax.lax.psum_scatter(jnp.tanh(x), "data", scatter_dimension=0, tiled=True)
        x = jax.lax.all_gather(jnp.sin(x), "model", axis=0, tiled=True)
        x = jax.lax.all_to_all(jnp.tanh(x), "data", 1, 0, tiled=True)
        x = jax.lax.ppermute(jnp.sin(x), "model", [(i, (i + 1) % 2) for i in range(2)])
        x = jnp.tanh(x) + jax.lax.psum(jnp.cos(x), ("data", "model"))
        return jax.lax.pmax(x, "data")

    return ops, (leaf(mesh, (mesh.size * 64, WIDTH), P(("data", "model"))),), ()


def host_moments(mesh):
    """A moment that lives in pinned host memory and comes to the device for the update."""

    def step(weight, moment, grad):
        here, there = (NamedSharding(mesh, P("data"), memory_kind=k) for k in ("device", "pinned_host"))
        moment = 0.9 * jax.device_put(moment, here) + grad
        return weight - 0.1 * moment, jax.device_put(moment, there)

    args = [leaf(mesh, (WIDTH, WIDTH), P("data"), memory_kind=k) for k in ("device", "pinned_host", "device")]
    return step, tuple(args), (0, 1)


def host_scan(mesh):
    """Six scanned layers; their inputs go to the host in one loop and come back in the other, last one first."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def step(weights, x):
        def loss(weights):
            @partial(jax.checkpoint, policy=policy)
            def layer(h, w):
                h = checkpoint_name(h, "x")
                return jnp.tanh(jnp.sin(h) @ w), None

            h, _ = jax.lax.scan(layer, x, weights)
            return (h.astype(jnp.float32) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * grads.astype(weights.dtype), value

    weights = leaf(mesh, (LAYERS, WIDTH, WIDTH), P(), jnp.bfloat16)
    return step, (weights, leaf(mesh, (mesh.size * 4, WIDTH), P("data"), jnp.bfloat16)), (0,)


ONE, TWO = {"data": 8}, {"data": 4, "model": 2}
PROGRAMS = {
    "scan_stage3": (scan_stage3, {"data": 64}, {}),
    "unrolled_stage2": (unrolled_stage2, ONE, {}),
    "unrolled_stage2_async": (
        unrolled_stage2,
        ONE,
        {"xla_gpu_reduce_scatter_combine_threshold_bytes": "1024"},
    ),
    "accumulate": (accumulate, ONE, {}),
    "two_axes": (two_axes, TWO, {}),
    "manual": (manual, TWO, {}),
    "host_moments": (host_moments, ONE, {}),
    "host_scan": (host_scan, ONE, {}),
}


def on_pod(program, axes, options):
    """Text of a program compiled for an H200 pod."""
    from jzero.proof.pod import pod

    size = int(np.prod(list(axes.values())))
    target = pod("h200", hosts=size // 8)
    fn, args, donate = program(target.mesh(axes))
    return target.compile(fn, *args, donate_argnums=donate, compiler_options=options).as_text()


def on_cpu(program, axes):
    """Text of a program compiled for the CPU backend."""
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))]).reshape(tuple(axes.values()))
    mesh = Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    fn, args, donate = program(mesh)
    return jax.jit(fn, donate_argnums=donate).lower(*args).compile().as_text()


def store(name: str, text: str | None) -> None:
    """Write one text, gzipped without a date so that the same text gives the same file."""
    assert text
    path = HERE / f"{name}.jax{jax.__version__}.txt.gz"
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{path.name:60} {len(text):>8} chars {path.stat().st_size:>7} bytes")


def main() -> None:
    """Compile and store all of them."""
    jax.config.update("jax_num_cpu_devices", 8)
    for name in sys.argv[1:] or PROGRAMS:
        program, axes, options = PROGRAMS[name]
        store(f"{name}.h200", on_pod(program, axes, options))
        if np.prod(list(axes.values())) <= 8 and not options and not name.startswith("host"):
            store(f"{name}.cpu", on_cpu(program, axes))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent.parent))
    main()
