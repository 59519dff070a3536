"""Programs that the checks read, each compiled once: for eight CPU devices, and for eight GPUs that are not there."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

from canaries import NotLookedAt, once

PODS = Path(__file__).resolve().parents[2] / "jzero" / "proof" / "pods"

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


def step_of(mesh):
    """A train step with a remat scan over a stack, a matrix in a loop, an unrolled matrix, and exchanges."""
    import jax
    import jax.numpy as jnp

    def con(x, *spec):
        return jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P(*spec)))

    def exchange(x):
        x = jax.lax.all_to_all(x, "model", 1, 0, tiled=True)
        return jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])

    @jax.checkpoint
    def layer(h, w):
        return jnp.tanh(h @ con(w, None, None)), None

    def loss_fn(params, x):
        h, _ = jax.lax.scan(layer, x, params["stack"])
        h = jnp.tanh(h @ con(params["single"], None, None))
        h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ con(params["looped"], None, None)), None), h, length=5)
        return jnp.mean(h**2)

    def step(params, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        grads["looped"] = con(con(grads["looped"], None, None), ("data", "model"))
        grads["single"] = con(con(grads["single"], None, None), "data")
        with jax.named_scope("jzero.update"):
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        rows, both = jax.P(("data", "model")), jax.P("data", "model")
        return params, loss, jax.shard_map(exchange, mesh=mesh, in_specs=rows, out_specs=both)(x)

    return step


def lowered_step(mesh):
    import jax

    def shape(*sizes, spec):
        return jax.ShapeDtypeStruct(sizes, "float32", sharding=jax.NamedSharding(mesh, jax.P(*spec)))

    n = 512
    params = {"stack": shape(7, n, n, spec=(None, "data", "model")), "single": shape(n, n, spec=("data",)),
              "looped": shape(n, n, spec=(("data", "model"),))}  # fmt: skip
    x = shape(64, n, spec=(("data", "model"),))
    return jax.jit(step_of(mesh), donate_argnums=0).lower(params, x)


@once
def cpu_lowered():
    import jax

    kinds = (jax.sharding.AxisType.Auto,) * 2
    return lowered_step(jax.make_mesh((2, 4), ("data", "model"), axis_types=kinds))


@once
def cpu_step():
    return cpu_lowered().compile()


def plugin() -> str:
    """The installed CUDA plugin."""
    found = [p for p in PLUGINS if importlib.util.find_spec(p.split(".")[0]) and importlib.util.find_spec(p)]
    if not found:
        raise NotLookedAt("no CUDA plugin is installed (extra pod)")
    return found[0]


@functools.cache
def topology(gpu: str, hosts: int = 1) -> Any:
    """Compile-only devices by jax alone: 8 GPUs per host."""
    from jax.experimental import topologies

    name = plugin()
    config = (PODS / f"{gpu}.txtpb").read_text()
    wanted = {"platform": "cuda", "target_config": config, "topology": f"1x{hosts}x8"}
    try:
        return topologies.get_topology_desc(**wanted)
    except NotImplementedError:  # jax has not started the plugin
        importlib.import_module(name).initialize()
        return topologies.get_topology_desc(**wanted)


def gpu_mesh(gpu: str = "h100"):
    import numpy as np
    from jax.sharding import Mesh

    return Mesh(np.array(topology(gpu).devices, dtype=object).reshape(2, 4), ("data", "model"))


@once
def gpu_step():
    return lowered_step(gpu_mesh()).compile()


@once
def gpu_text() -> str:
    return gpu_step().as_text()


def compiled_for(fn, *shapes, gpu: str = "h100", dtypes=(), options=None, split=("data", "model")) -> str:
    """The optimized text of a function of matrices whose rows are split."""
    import jax

    sharding = jax.NamedSharding(gpu_mesh(gpu), jax.P(split))
    dtypes = dtypes or ("float32",) * len(shapes)
    args = [jax.ShapeDtypeStruct(s, d, sharding=sharding) for s, d in zip(shapes, dtypes, strict=True)]
    return jax.jit(fn).lower(*args).compile(compiler_options=options).as_text()


def op_names(text: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r'\bop_name="((?:[^"\\]|\\.)*)"', text)))


def lines_with(text: str, part: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if part in line]


def computations(text: str) -> dict[str, list[str]]:
    """Lines by computation; `ENTRY` is the one that runs."""
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        if line[:1] in ("%", "E") and line.endswith("{"):
            name = "ENTRY" if line.startswith("ENTRY") else line.split(" ", 1)[0].lstrip("%")
            current = found.setdefault(name, [])
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    return found
