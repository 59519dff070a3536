"""Compiling for a pod that is not there: the GPUs it knows, meshes, arguments, host memory, errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from jzero.core import compile_only, cuda_plugin
from jzero.proof.pod import gpus, pod

SIZE = 256
PLAIN_TOPOLOGY = (
    "import jzero; from importlib.resources import files; from jax.experimental.topologies import get_topology_desc; "
    "config = files('jzero.proof').joinpath('pods', 'h100.txtpb').read_text(); "
    "assert len(get_topology_desc(platform='cuda', target_config=config, topology='1x1x4').devices) == 4; "
)


def leaf(mesh, *spec, shape=(SIZE, SIZE), dtype=jnp.float32, kind: str | None = "device"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec), memory_kind=kind))


def stats(compiled) -> Any:
    """Its memory, per device."""
    return compiled.memory_analysis()


def double(x):
    return x * 2


@pytest.fixture(scope="module")
def target():
    return pod("h200")


@pytest.mark.pod
@pytest.mark.parametrize("gpu", gpus())
def test_every_gpu_compiles_a_matmul_and_a_reduction(gpu):
    small = pod(gpu, hosts=2, gpus_per_host=4)
    mesh = small.mesh({"data": 8})
    compiled = small.compile(lambda w, x: (x @ w).sum(), leaf(mesh), leaf(mesh, "data"))
    assert "all-reduce" in (compiled.as_text() or "")
    assert stats(compiled).argument_size_in_bytes == SIZE * SIZE * 4 * 9 // 8


@pytest.mark.pod
@pytest.mark.parametrize(
    ("gpu", "memory"),
    [("a100-80gb", 85100068864), ("b200", 191514411008), ("h100", 84942979072), ("h200", 151397597184)],
)
def test_memory_of_one_gpu(gpu, memory):
    assert pod(gpu).memory_bytes == memory


def test_gpus_are_listed():
    assert gpus() == ("a100-80gb", "b200", "h100", "h200")


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        ("h20", "unknown gpu 'h20'. Did you mean 'h200'? Known: a100-80gb, b200, h100, h200."),
        ("A100", "unknown gpu 'A100'. Did you mean 'a100-80gb'? Known: a100-80gb, b200, h100, h200."),
        ("tpu-v5", "unknown gpu 'tpu-v5'. Known: a100-80gb, b200, h100, h200."),
    ],
)
def test_unknown_gpu(gpu, message):
    with pytest.raises(ValueError, match=re.escape(f"jzero.pod: {message}")):
        pod(gpu)


@pytest.mark.parametrize("bad", [True, 1.0, "8"])
def test_counts_are_ints(bad):
    with pytest.raises(TypeError, match=re.escape(f"jzero.pod(hosts={bad!r}): hosts must be an integer from 1 to")):
        pod("h200", hosts=bad)
    with pytest.raises(TypeError, match="gpu must be a name such as 'h200', not int"):
        pod(200)  # type: ignore[arg-type]


def test_a_pod_has_a_gpu():
    with pytest.raises(ValueError, match="gpus_per_host must be an integer from 1 to"):
        pod("h200", gpus_per_host=0)


@pytest.mark.pod
def test_same_pod_same_mesh():
    mesh = pod("h100", hosts=2).mesh({"replica": 2, "data": 8})
    assert mesh == pod("h100", hosts=2).mesh({"replica": 2, "data": 8})
    assert mesh != pod("h200", hosts=2).mesh({"replica": 2, "data": 8})
    assert dict(mesh.shape) == {"replica": 2, "data": 8}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert [d.id for d in mesh.devices.flat] == list(range(16))


@pytest.mark.pod
def test_mesh_sizes_must_multiply_to_the_devices(target):
    message = "pod.mesh: 2 (replica) x 8 (data) = 16 devices, but this pod has 1 host x 8 h200 = 8."
    with pytest.raises(ValueError, match=re.escape(message)):
        target.mesh({"replica": 2, "data": 8})
    with pytest.raises(TypeError, match="the size of axis 'data' must be an int, got True"):
        target.mesh({"data": True})


@pytest.mark.pod
def test_host_memory_survives(target):
    mesh = target.mesh({"data": 8})
    here, there = NamedSharding(mesh, P("data")), NamedSharding(mesh, P("data"), memory_kind="pinned_host")

    def step(weight, moment):
        moment = 0.9 * jax.device_put(moment, here) + 1
        return weight - moment, jax.device_put(moment, there)

    weight, moment = leaf(mesh, "data"), leaf(mesh, "data", kind="pinned_host")
    compiled = target.compile(step, weight, moment, donate_argnums=(0, 1))
    memory, shard = compiled.memory_analysis(), SIZE * SIZE * 4 // 8
    assert memory.argument_size_in_bytes == memory.host_argument_size_in_bytes == shard
    assert memory.alias_size_in_bytes == memory.host_alias_size_in_bytes == shard
    assert memory.host_output_size_in_bytes == shard
    assert compiled.input_shardings[0][1].memory_kind == "pinned_host"
    assert [s.memory_kind for s in compiled.output_shardings] == ["device", "pinned_host"]


def without_sources(text):
    """A program without the tables and attributes that say which Python line it comes from."""
    text = re.sub(r"\nFileNames\n.*?\n\n(?=[%E])", "\n", text, flags=re.DOTALL)
    text = re.sub(r" ?stack_frame_id=\d+", "", text)
    return re.sub(r'fingerprint_before_lhs="\w+"', "", text)


@pytest.mark.pod
def test_same_program_as_by_jax_alone(target):
    """Through `PodDevice`s XLA gets what it gets from jax's own compile-only devices."""
    ours = target.mesh({"data": 8})
    theirs = Mesh(np.array([d.target for d in target.devices]), ("data",), axis_types=(AxisType.Auto,))

    def args(mesh):
        kinds = {"kind": None}
        return leaf(mesh, "data", **kinds), leaf(mesh, "data", shape=(16, SIZE), **kinds)

    def loss(w, x):
        return (jnp.tanh(x @ w) ** 2).mean()

    mine = target.compile(jax.jit(jax.grad(loss), donate_argnums=0), *args(ours))
    plain = jax.jit(jax.grad(loss), donate_argnums=0).lower(*args(theirs)).compile()
    assert without_sources(mine.as_text()) == without_sources(plain.as_text())
    theirs = plain.memory_analysis()
    for name, size in vars(mine.memory_analysis()).items():
        assert size == getattr(theirs, name, 0), name


@pytest.mark.pod
def test_jitted_function_keeps_its_options(target):
    mesh = target.mesh({"data": 8})
    jitted = jax.jit(lambda x, n: x * n, donate_argnums=0, static_argnums=1)
    compiled = target.compile(jitted, leaf(mesh, "data"), 3)
    assert compiled.memory_analysis().alias_size_in_bytes == SIZE * SIZE * 4 // 8
    assert compiled.args_info[0][0].donated
    with pytest.raises(ValueError, match="fn is jitted already; give donate_argnums to its own jit"):
        target.compile(jitted, leaf(mesh, "data"), 3, donate_argnums=0)


@pytest.mark.pod
def test_keyword_arguments_and_compiler_options(target):
    mesh = target.mesh({"data": 8})
    options = {"xla_gpu_enable_latency_hiding_scheduler": False}
    compiled = target.compile(
        lambda x, *, y: x + y, leaf(mesh, "data"), y=leaf(mesh, "data"), compiler_options=options
    )
    assert set(compiled.input_shardings[1]) == {"y"}
    with pytest.raises(Exception, match="xla_no_such_option"):
        target.compile(double, leaf(mesh, "data"), compiler_options={"xla_no_such_option": 1})


@pytest.mark.pod
def test_the_program_cannot_be_run(target):
    compiled = target.compile(double, leaf(target.mesh({"data": 8}), "data"))
    assert isinstance(compiled, jax.stages.Compiled)
    with pytest.raises(NotImplementedError, match="read this program, do not run it"):
        compiled(np.zeros((SIZE, SIZE), np.float32))


@pytest.mark.pod
def test_leaves_without_a_sharding_follow_the_plan(target):
    mesh = target.mesh({"data": 8})
    plan = jzero.make_plan({"w": jax.ShapeDtypeStruct((8, 8), "float32")}, mesh=mesh)
    batch = {"x": jax.ShapeDtypeStruct((16, 4), jnp.float32), "y": np.zeros((8,), np.int32)}
    own = leaf(mesh, None, "data", shape=(3, 8))

    def step(batch, scale, key, old_key, own):
        noise = jax.random.normal(key, (4,)) + jax.random.normal(old_key, (4,))
        return batch["x"] * scale + noise, batch["y"] + 1, own

    keys = jax.random.key(0), jax.random.PRNGKey(0)
    (given, *rest), _ = target.compile(step, batch, jnp.float32(2), *keys, own, plan=plan).input_shardings
    assert given == {"x": plan.batch, "y": plan.batch}
    assert [s.spec for s in rest] == [P(), P(), P(), P(None, "data")]


@pytest.mark.pod
def test_batch_that_the_mesh_does_not_divide(target):
    plan = jzero.make_plan({"w": jax.ShapeDtypeStruct((8, 8), "float32")}, mesh=target.mesh({"data": 8}))
    tokens = {"tokens": jax.ShapeDtypeStruct((12, 3), jnp.int32)}
    with pytest.raises(ValueError, match="must be a multiple of the devices along its axes") as caught:
        target.compile(lambda b, s: b, tokens, 1, plan=plan)
    assert "1 of 2 leaves have no sharding that plan.batch can give:" in str(caught.value)
    assert "args[0]['tokens']  i32[12,3]  " in str(caught.value)


@pytest.mark.pod
def test_leaves_on_other_devices_are_named(target):
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("data",))
    with pytest.raises(
        ValueError, match=r"1 of 1 leaves are not laid out on this pod:\n  args\[0\]\['w'\]  f32"
    ):
        target.compile(lambda t: t, {"w": leaf(mesh, kind=None)})


@pytest.mark.pod
def test_nothing_says_on_which_mesh(target):
    with pytest.raises(ValueError, match="no argument and no output is laid out on this pod's mesh"):
        target.compile(double, jax.ShapeDtypeStruct((8,), jnp.float32))
    with pytest.raises(TypeError, match="fn must be a function, not int"):
        target.compile(3)


@pytest.mark.pod
def test_cudnn_attention_names_the_remedy(target):
    mesh = target.mesh({"data": 8})
    q = leaf(mesh, "data", shape=(8, 128, 4, 64), dtype=jnp.bfloat16)

    def attend(implementation):
        return lambda q: jax.nn.dot_product_attention(q, q, q, implementation=implementation)

    with pytest.raises(NotImplementedError, match=r'dot_product_attention\(.*implementation="xla"'):
        target.compile(attend("cudnn"), q)
    target.compile(attend("xla"), q)


@pytest.mark.pod
def test_nnx_jit(target):
    nnx = pytest.importorskip("flax.nnx")
    mesh = target.mesh({"data": 8})

    @nnx.jit
    def scaled(x):
        return x * 2

    assert (
        target.compile(scaled, leaf(mesh, "data")).memory_analysis().argument_size_in_bytes
        == SIZE * SIZE * 4 // 8
    )


@pytest.mark.pod
def test_a_thousand_gpus_need_no_thousand_cpu_devices():
    large = pod("h100", hosts=128)
    mesh = large.mesh({"data": 1024})
    compiled = large.compile(lambda x: x.sum(), leaf(mesh, "data", shape=(1024, 8)))
    assert "num_partitions=1024" in (compiled.as_text() or "")


def test_without_a_plugin(monkeypatch):
    def missing(*_, **__):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    monkeypatch.setattr(cuda_plugin, "NAMES", ("jax_plugins.no_such_plugin",))
    with pytest.raises(
        ImportError, match=r'has no CUDA plugin here(.|\n)*pip install "jzero\[pod\]"'
    ) as caught:
        pod("h200", hosts=1009)  # which no other test has made before
    assert f"jax-cuda12-plugin=={jax.__version__}" in str(caught.value)


def test_a_plugin_that_does_not_start(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("symbol not found")

    monkeypatch.setattr(topologies, "get_topology_desc", broken)
    with pytest.raises(RuntimeError, match=r"does not start(.|\n)*JAX_PLATFORMS=cpu"):
        pod("h200", hosts=1013)


@pytest.mark.pod
def test_without_ptxas(target, monkeypatch):
    def no_ptxas(*_):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: No PTX compilation provider is available.")

    monkeypatch.setenv("JZERO_POD_CACHE", "off")
    monkeypatch.setattr(compile_only.compiler, "backend_compile_and_load", no_ptxas)
    with pytest.raises(ImportError, match=r'no ptxas(.|\n)*pip install "jzero\[pod\]"'):
        target.compile(double, leaf(target.mesh({"data": 8}), "data"))


@pytest.mark.pod
@pytest.mark.parametrize(
    "before", ["", "import jax; jax.devices(); ", "import jzero, jax; jax.devices(); ", PLAIN_TOPOLOGY]
)
def test_starts_without_jax_platforms(before):
    """The plugin refuses to start without cuDNN unless it is told not to ask: `pod` tells it, and so does plain JAX."""
    code = before + "from jzero.proof.pod import pod; import os; assert len(pod('h200').devices) == 8; "
    code += "assert 'JAX_SKIP_CUDA_CONSTRAINTS_CHECK' not in os.environ"
    done = subprocess.run(
        [sys.executable, "-c", code], env=free(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    if not before.startswith("import jax"):  # what jax says before jzero is imported is not ours to keep
        assert done.stderr == ""


@pytest.mark.pod
@pytest.mark.skipif(cuda_plugin.has_driver(), reason="with a CUDA driver jax starts its plugin")
def test_a_program_that_asks_for_no_pod_does_not_see_the_plugin():
    """Nothing is printed, and neither of its libraries is loaded; asked for, the platform is there to be refused."""
    code = "import jzero, jax, sys; assert jax.devices()[0].platform == 'cpu'; "
    code += "assert not any('xla_cuda_plugin' in line for line in open('/proc/self/maps'))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=free(), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    asked = {**free(), "JAX_PLATFORMS": "cuda"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=asked, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert "Exception when calling jax_plugins.xla_cuda1" in done.stderr  # jax has tried, and says so


def free() -> dict[str, str]:
    """The environment of a user who has set nothing of jax."""
    return {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", cuda_plugin.SKIP_CHECK)}
