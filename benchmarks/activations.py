"""What blocks keep for the backward pass, and what it costs: device and host memory, wire, PCIe of compiled steps.

    python benchmarks/activations.py                                          # 12, 24, 48 layers in a scan: 4 minutes
    python benchmarks/activations.py --layers unrolled --depth 6 12 --bucket-mib 1
    python benchmarks/activations.py --options nn.remat both --stages 3
    python benchmarks/activations.py --help

Compiled for 8 H200 as a mesh of 2 (data) x 4 (model), Megatron's layout; no GPU is needed. The model is a stack of
transformer blocks alone, bf16, SGD. Temp, host and wire are bytes of one device in one step.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import tyro
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import jzero

OPTIONS = {
    "no remat": None,
    "nn.remat": None,
    "jzero.remat": {},
    "partition": {"partition": "model"},
    "offload": {"offload": "host"},
    "both": {"partition": "model", "offload": "host"},
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What is compiled."""

    stages: Annotated[tuple[int, ...], tyro.conf.arg(help="ZeRO stages")] = (2,)
    layers: Literal["scan", "unrolled"] = "scan"
    depth: tuple[int, ...] = (12, 24, 48)
    options: tuple[str, ...] = tuple(OPTIONS)
    dim: int = 256
    seq: int = 2048
    rows: Annotated[int, tyro.conf.arg(help="sequences per device")] = 8
    bucket_mib: Annotated[int, tyro.conf.arg(help="ZeroConfig(bucket_bytes=): about a block's weights")] = 8


class Block(nn.Module):
    dim: int

    @nn.compact
    def __call__(self, x, _=None):
        kw = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "use_bias": False}
        y = nn.LayerNorm(name="norm_1", **kw)(x)
        q, k, v = (
            nn.Dense(self.dim, name=f"{n}_in", **kw)(y).reshape(*y.shape[:2], self.dim // 64, 64)
            for n in "qkv"
        )
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla").reshape(x.shape)
        x = x + nn.Dense(self.dim, name="attention_out", **kw)(y)
        y = nn.gelu(nn.Dense(4 * self.dim, name="mlp_in", **kw)(nn.LayerNorm(name="norm_2", **kw)(x)))
        return x + nn.Dense(self.dim, name="mlp_out", **kw)(y), None


class Stack(nn.Module):
    block: type
    depth: int
    dim: int
    scan: bool

    @nn.compact
    def __call__(self, x):
        if self.scan:
            blocks = nn.scan(
                self.block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.depth
            )
            return blocks(self.dim, name="blocks")(x, None)[0]
        for i in range(self.depth):
            x, _ = self.block(self.dim, name=f"block_{i}")(x)
        return x


def megatron(params):
    def spec(path, x):
        name = jax.tree_util.keystr(path)
        pair = (None, "model") if "_in" in name else ("model", None)
        return P(*[None] * (x.ndim - 2), *pair) if "kernel" in name else P()

    return jax.tree_util.tree_map_with_path(spec, params)


def train_step(state, x):
    def loss_fn(params):
        return jnp.mean(state.apply_fn({"params": params}, x).astype(jnp.float32) ** 2)

    return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))


def report(config: Config, stage: int, option: str, depth: int):
    """What `explain` says of the compiled step."""
    pod, scan = jzero.pod("h200"), config.layers == "scan"
    mesh = pod.mesh({"data": 2, "model": 4})

    def create(block):
        model = Stack(block, depth, config.dim, scan)
        params = model.init(jax.random.key(0), jnp.zeros((1, 4, config.dim), jnp.bfloat16))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(1e-2))

    params = jax.eval_shape(lambda: create(Block)).params
    fields = {
        "stage": stage,
        "mesh": mesh,
        "param_specs": megatron(params),
        "bucket_bytes": config.bucket_mib * 2**20,
    }
    plan = jzero.make_plan(params, **fields)
    if option == "no remat":
        block = Block
    elif option == "nn.remat":
        block = nn.remat(Block, prevent_cse=not scan)
    else:
        block = jzero.remat(Block, plan, prevent_cse=not scan, **OPTIONS[option])
    state = jzero.abstract(lambda: create(block), **fields)
    x = jax.ShapeDtypeStruct((2 * config.rows, config.seq, config.dim), jnp.bfloat16)
    return jzero.explain(pod.compile(train_step, state, x, donate_argnums=0), plan)


def made_beside_a_fetch(report, size: int) -> str:
    """Bytes that the device makes between start and end of a copy from the host, in block inputs: the least of all."""
    fetches = [t for t in report.transfers if t.to == "device"]
    return f"{min(t.compute_bytes for t in fetches) / size:.1f} A" if fetches else "-"


def main(config: Config) -> None:
    os.environ["JZERO_POD_CACHE"] = "off"  # the seconds of compiling are printed
    size = config.rows * config.seq * config.dim * 2
    print(
        f"A, the input of a block on one device: {size / 1e6:.1f} MB; {config.layers}; jax {jax.__version__}\n"
    )
    print(
        "| stage | blocks | layers | device temp | host temp | wire, model axis | PCIe in + out | made beside a fetch "
        "| compiled in |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for stage in config.stages:
        for option in config.options:
            for depth in config.depth:
                start = time.perf_counter()
                try:
                    r = report(config, stage, option, depth)
                except NotImplementedError as error:
                    print(f"| {stage} | {option} | {depth} | {error} |" + " |" * 5, flush=True)
                    continue
                row = [r.memory.temp, r.memory.host_temp, r.wire.by_axis["model"], r.pcie["to_device"]]
                row = [f"{v / 1e6:.0f}" for v in row]
                pcie = f"{row.pop()} + {r.pcie['to_host'] / 1e6:.0f} MB"
                cells = [stage, option, depth, *(f"{v} MB" for v in row), pcie, made_beside_a_fetch(r, size)]
                print(
                    "| " + " | ".join(map(str, cells)), f"| {time.perf_counter() - start:.0f} s |", flush=True
                )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
