"""The subjects of `fuzz.py`: every public function with a valid call, and what is not wrong for its arguments."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from fuzz import Subject
from jax.sharding import Mesh, PartitionSpec

import jzero
from jzero import checkpoint, deepspeed

# what is public and made by jzero alone, or has no arguments
MADE = ("CheckError", "Estimate", "Finding", "Plan", "Pod", "ProofError", "ZeroState")
COUNT, FLAG, AXES = "int huge", "bool", "word words"
NUMBER = "int float scalar huge"  # a finite one above 0
CALLED = "function class mesh"  # a Mesh is a decorator
DTYPE = "class word function"  # jnp.dtype(int) is one; most words and classes are refused
CONFIG = {"stage": "int zero", "axis": AXES, "batch_axis": f"none {AXES}", "param_axis": f"none {AXES}",
          "master_dtype": f"none {DTYPE}", "compute_dtype": f"none {DTYPE}", "reduce_dtype": f"none {DTYPE}",
          "gather_dtype": f"none {DTYPE} dict",
          "moment_dtype": f"none {DTYPE}", "quantize_block": "", "updates": "", "offload": "none", "uneven": "",
          "min_shard_bytes": f"zero {COUNT}", "bucket_bytes": f"none {COUNT}", "prefetch": COUNT,
          "reshard_after_forward": FLAG, "logical_axis_rules": ""}  # fmt: skip
BATCH = {"x": np.ones((16, 16), np.float32)}


@functools.cache
def made() -> dict[str, Any]:
    """What the valid calls need."""
    params = {"w": jnp.ones((16, 8)), "b": jnp.ones(8)}
    mesh = Mesh(np.array(jax.devices()), ("data",))
    plan = jzero.make_plan(params, stage=2, mesh=mesh, min_shard_bytes=0)
    tx = optax.adam(1e-3)
    state = TrainState.create(apply_fn=_model, params=params, tx=tx)
    return {
        "params": params, "mesh": mesh, "plan": plan, "tx": tx, "state": state, "zero": jzero.zero(tx, plan),
        "plan_3": jzero.make_plan(params, stage=3, mesh=mesh, min_shard_bytes=0),
        "pod": jzero.Pod("h200", 1, 8, 2**30, tuple(jax.devices())), "opt_state": tx.init(params),
        "sharded": jzero.shard(state, stage=2, mesh=mesh),
        "compiled": jax.jit(lambda p: p["w"] + p["b"]).lower(params).compile(),
    }  # fmt: skip


def _model(variables, x):
    return x @ variables["params"]["w"] + variables["params"]["b"]


def _loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"]) ** 2)


def _mean(params, batch):
    return jnp.mean(params["w"])


def _first(state):
    return state


def subjects() -> list[Subject]:
    """All of them."""
    return [*_configs(), *_states(), *_plans(), *_steps(), *_proof(), *_checkpoints()]


def _configs() -> list[Subject]:
    defaults = jzero.ZeroConfig()
    factors = {"initial": 2.0**16, "growth_interval": 10, "growth": 2.0, "backoff": 0.5, "hysteresis": 1,
               "minimum": 1.0, "maximum": 2.0**24}  # fmt: skip
    sizes = {"layers": 2, "width": 64, "heads": 4, "seq": 128, "batch": 1, "vocab": 0, "ffn": None, "dtype": "bfloat16",
             "remat": True, "flash": False, "partition": 1, "offload": False, "tiled_loss": False,
             "mlp_tiles": 1}  # fmt: skip
    source = {"source": {"zero_optimization": {"stage": 2}}, "world": None, "auto": None}
    read = {"source": "dict", "world": f"none {COUNT}", "auto": "none dict"}
    scales = dict.fromkeys(("initial", "growth", "minimum", "maximum"), NUMBER)
    return [
        Subject("jzero.ZeroConfig", jzero.ZeroConfig, {k: getattr(defaults, k) for k in CONFIG}, CONFIG),
        Subject("jzero.ZeroConfig.master_for", defaults.master_for, {"dtype": "float32"}, {"dtype": DTYPE}),
        Subject("jzero.ZeroConfig.adam_bytes", defaults.adam_bytes, {"dtype": "float32"}, {"dtype": DTYPE}),
        Subject("jzero.Offload", jzero.Offload,
                {"tier": "host", "update": "device", "in_flight_bytes": None, "prefetch": False, "delay": 0},
                {"in_flight_bytes": f"none {COUNT}", "prefetch": FLAG, "delay": "zero"}),
        Subject("jzero.LossScale", jzero.LossScale, factors,
                {**scales, "growth_interval": COUNT, "hysteresis": COUNT}),
        Subject("jzero.LossScale.update", jzero.LossScale().update, {"after": jnp.bool_(True)}, {"after": "bool"}),
        Subject("jzero.estimate(model=)", lambda **sizes: jzero.estimate(made()["plan"], model=sizes), sizes,
                {**dict.fromkeys(sizes, COUNT), "vocab": f"zero {COUNT}", "ffn": f"none {COUNT}", "dtype": DTYPE,
                 "remat": FLAG, "flash": FLAG, "offload": FLAG, "tiled_loss": FLAG}),
        Subject("jzero.deepspeed.read", deepspeed.read, source, read),
    ]  # fmt: skip


def _states() -> list[Subject]:
    m = made()
    fields = {"config": None, "mesh": m["mesh"], "param_specs": None, "scan_axes": {}}
    legal = {"config": "none", "mesh": "none", "param_specs": "none", "scan_axes": "none dict"}
    loose = {"stage": 1, "min_shard_bytes": 0, "axis": "data"}
    loose_legal = {k: CONFIG[k] for k in loose}
    tree = {"tree": m["params"], "tx": None}
    return [
        Subject("jzero.shard", jzero.shard, {"state": m["state"], **fields, **loose}, legal | loose_legal, heavy=True),
        Subject("jzero.abstract", jzero.abstract, {"state": m["state"], **fields, **loose}, legal | loose_legal,
                heavy=True),
        Subject("jzero.make_plan", jzero.make_plan, {"params": m["params"], **fields, **loose},
                {"params": "shape array scalar", **legal, **loose_legal}),
        Subject("jzero.plan_of", jzero.plan_of, {"state": m["sharded"]}, {}),
        Subject("jzero.unshard", jzero.unshard, tree, {"tree": "any", "tx": "none"}),
        Subject("jzero.unshard", jzero.unshard, {"tree": m["sharded"].opt_state, "tx": m["sharded"].tx},
                {"tx": "none"}),
    ]  # fmt: skip


def _plans() -> list[Subject]:
    m = made()
    plan, state, params = m["plan"], {"state": m["opt_state"]}, m["params"]
    spec = PartitionSpec("data")
    arrays = "array scalar shape none list dict"
    return [
        Subject("plan.kind_of", plan.kind_of, {"path": "[0][0].params['w']"}, {"path": "word"}),
        Subject("plan.sharding", plan.sharding, {"spec": spec}, {}),
        Subject("plan.lives_on_host", plan.lives_on_host, {"x": plan.layouts[0]}, {}),
        Subject("plan.param_sharding", plan.param_sharding, {"x": plan.layouts[0]}, {}),
        Subject("plan.constrain", plan.constrain, {"x": jnp.ones(8), "spec": spec}, {"x": "array scalar"}),
        Subject("plan.match", functools.partial(plan.match, where="plan.match"), {"params": params}, {}),
        Subject("plan.place", plan.place, {"tree": params}, {}),
        Subject("plan.place_batch", plan.place_batch, {"batch": BATCH},
                {"batch": "bool int float zero negative nan inf huge array scalar none list dict"}),
        Subject("plan.micro_batches", plan.micro_batches, {"batch": BATCH, "k": 1}, {"batch": "array none list dict"}),
        *(Subject(f"plan.{name}", getattr(plan, name), state, {"state": arrays})
          for name in ("state_specs", "state_shardings", "state_forms", "offloaded")),
        *(Subject(f"plan.{name}", getattr(plan, name), {"tree": params}, {"tree": "any"})
          for name in ("copy_specs", "copies")),
        Subject("plan.describe", plan.describe, {"tx": m["tx"]}, {"tx": "none"}),
    ]  # fmt: skip


def _steps() -> list[Subject]:
    m = made()
    plan, params, tree = m["plan"], m["params"], {"a": jnp.ones(3)}
    positions = "int list huge"
    grads = jax.tree.map(jnp.ones_like, params)
    update, grad = m["zero"].update, jzero.value_and_grad(_mean, plan, accumulate=2)
    jitted = jzero.jit(_mean, plan)
    return [
        Subject("jzero.zero", jzero.zero, {"tx": m["tx"], "plan": plan}, {}),
        Subject("jzero.zero.init", lambda params: m["zero"].init(params), {"params": params}, {}),
        Subject("jzero.zero.update", lambda grads, state, params: update(grads, state, params),
                {"grads": grads, "state": m["zero"].init(params), "params": params}, {}),
        Subject("jzero.select", jzero.select, {"pred": True, "new": tree, "old": tree}, {"pred": "bool"}),
        Subject("jzero.gather_on_use", jzero.gather_on_use, {"fn": _loss, "plan": plan}, {"fn": CALLED}),
        Subject("jzero.gather_on_use", lambda params: jzero.gather_on_use(_mean, m["plan_3"])(params, None),
                {"params": params}, {}),
        Subject("jzero.jit", jzero.jit, {"step": _loss, "plan": plan}, {"step": CALLED}),
        Subject("jzero.jit", lambda params, batch: jitted(params, batch), {"params": params, "batch": BATCH},
                # numbers and arrays are arguments of the step, which may take any
                dict.fromkeys(("params", "batch"), f"array zero negative nan inf {NUMBER}"), heavy=True),
        Subject("jzero.value_and_grad", jzero.value_and_grad,
                {"loss_fn": _loss, "plan": plan, "accumulate": 2, "has_aux": False, "batch_argnums": 1,
                 "rng_argnums": (), "weight": None, "reduce": "auto", "coupled": "refuse", "scale": None},
                {"loss_fn": CALLED, "accumulate": COUNT, "has_aux": FLAG, "batch_argnums": positions,
                 "rng_argnums": positions, "weight": f"none {CALLED}", "scale": f"none shape {NUMBER}"}),
        Subject("jzero.value_and_grad", lambda params, batch: grad(params, batch),
                {"params": params, "batch": BATCH}, {"batch": "array"}, heavy=True),
        Subject("jzero.tiled_loss", jzero.tiled_loss,
                {"hidden": jnp.ones((2, 3, 8)), "head": jnp.ones((8, 5)), "labels": jnp.zeros((2, 3), jnp.int32),
                 "where": None, "bias": None, "label_smoothing": 0.0, "z_loss": 0.0, "soft_cap": None,
                 "reduction": "mean", "tiles": None, "recompute": None, "plan": plan},
                {"where": f"none array zero negative nan inf bool {NUMBER}", "bias": "none",
                 "label_smoothing": "zero", "z_loss": f"zero {NUMBER}", "soft_cap": f"none {NUMBER}",
                 "tiles": f"none {COUNT}", "recompute": f"none {FLAG}", "plan": "none"}),
        Subject("jzero.deadline", jzero.deadline,
                {"step": jnp.sin, "seconds": None, "compile_seconds": 9.0, "pause_seconds": 9.0, "folder": None},
                {"step": CALLED, "seconds": f"none {NUMBER}", "compile_seconds": NUMBER, "pause_seconds": NUMBER,
                 "folder": "none"}),
        Subject("jzero.tiled", jzero.tiled, {"fn": jnp.sin, "axis": 1, "tiles": None, "argnums": None},
                {"fn": CALLED, "axis": "int zero", "tiles": f"none {COUNT}", "argnums": f"none zero {positions}"}),
        Subject("jzero.remat", jzero.remat,
                {"subject": _loss, "plan": plan, "partition": None, "offload": None, "policy": None, "dim": 1,
                 "argnums": None, "prevent_cse": True, "static_argnums": ()},
                {"subject": "function mesh", "partition": "none", "offload": "none",
                 "policy": f"none {CALLED}", "dim": f"zero negative {COUNT}",
                 "argnums": f"none zero negative list {COUNT}", "prevent_cse": FLAG,
                 "static_argnums": f"zero negative list {COUNT}"}),
    ]  # fmt: skip


def _proof() -> list[Subject]:
    m = made()
    plan, compiled = m["plan"], m["compiled"]
    return [
        Subject("jzero.mesh", lambda axes, **more: jzero.mesh(axes, **more),
                {"axes": {"data": 8}, "devices": None, "pod": None, "devices_per_host": None, "model": 1},
                {"axes": "none", "devices": "none", "pod": "none", "devices_per_host": f"none {COUNT}",
                 "model": COUNT}),
        Subject("jzero.Estimate.network", jzero.estimate(plan).network,
                {"devices_per_host": None}, {"devices_per_host": f"none {COUNT}"}),
        Subject("jzero.Estimate.wire_seconds", jzero.estimate(plan).wire_seconds,
                {"within_host": 4.5e11, "between_hosts": 4e11, "devices_per_host": None},
                {"within_host": "zero negative", "between_hosts": "zero negative",
                 "devices_per_host": f"none {COUNT}"}),
        Subject("jzero.estimate", jzero.estimate,
                {"plan": plan, "tx": m["tx"], "accumulate": 1, "model": None, "uses": None},
                {"tx": "none", "accumulate": COUNT, "model": "none", "uses": "none"}),
        Subject("jzero.param_uses", lambda step, state, **more: jzero.param_uses(step, state, **more),
                {"step": _first, "state": m["sharded"], "plan": plan}, {"state": "any", "plan": "none"}),
        Subject("jzero.check", jzero.check, {"compiled": compiled, "plan": plan, "uses": None}, {"uses": "none"}),
        Subject("jzero.findings", jzero.findings, {"compiled": compiled, "plan": plan, "uses": None}, {"uses": "none"}),
        Subject("jzero.explain", jzero.explain, {"compiled": compiled, "plan": plan}, {"plan": "none"}),
        Subject("jzero.write_html", jzero.write_html,
                {"path": "a.html", "compiled": compiled, "plan": plan, "title": ""},
                {"path": "word", "title": "word"}, heavy=True, runs=False),
        Subject("jzero.pod", jzero.pod, {"gpu": "h200", "hosts": 1, "gpus_per_host": 8},
                {"hosts": "int", "gpus_per_host": "int"}, heavy=True, runs=False),
        Subject("jzero.fit", lambda create_state, step, batch, **more: jzero.fit(create_state, step, batch, **more),
                {"create_state": _first, "step": _first, "batch": BATCH, "pod": m["pod"], "memory_bytes": None,
                 "host_bytes": 10**12, "rates": None, "lower_precision": False, "model": None, "trainable": None,
                 "compiles": 4, "say": None},
                {"create_state": CALLED, "step": CALLED, "batch": "any", "memory_bytes": f"none {COUNT}",
                 "host_bytes": f"zero {COUNT}", "rates": "none", "lower_precision": FLAG, "model": "none",
                 "trainable": "any", "compiles": COUNT, "say": f"none {CALLED}"}, heavy=True, runs=False),
        Subject("pod.mesh", m["pod"].mesh, {"axes": {"data": 8}}, {}),
        Subject("pod.compile", lambda fn, state, **more: m["pod"].compile(fn, state, **more),
                {"fn": _first, "state": m["sharded"], "donate_argnums": (), "compiler_options": None, "plan": None,
                 "buffers": False},
                {"fn": "any", "state": "any", "donate_argnums": "zero list none int", "compiler_options": "none",
                 "plan": "none", "buffers": FLAG}, heavy=True, runs=False),
    ]  # fmt: skip


def _checkpoints() -> list[Subject]:
    m = made()
    group: Any = {"group": "checkpoint", "heavy": True, "runs": False}
    state, path, saved = m["sharded"], "word", "nothing/there"
    return [
        Subject("jzero.checkpoint.save", checkpoint.save, {"path": "a", "state": state, "tx": None, "custom": None},
                {"path": path, "state": "dict", "tx": "none", "custom": "any"}, **group),
        Subject("jzero.checkpoint.save_async", checkpoint.save_async,
                {"path": "a", "state": state, "tx": None, "custom": None},
                {"path": path, "state": "dict", "tx": "none", "custom": "any"}, **group),
        Subject("jzero.checkpoint.snapshot", checkpoint.snapshot, {"path": "a", "state": state}, {"path": path},
                **group),
        Subject("jzero.checkpoint.restore", checkpoint.restore,
                {"path": saved, "like": state, "tx": None, "cast": False, "only": None},
                {"path": path, "tx": "none", "cast": FLAG, "only": "none"}, **group),
        *(Subject(f"jzero.checkpoint.{name}", getattr(checkpoint, name), {"path": saved}, {"path": path}, **group)
          for name in ("verify", "custom")),
        Subject("jzero.checkpoint.export", checkpoint.export,
                {"path": saved, "file": "a.safetensors", "dtype": None, "max_file_bytes": 1000, "names": None,
                 "include": (), "progress": None},
                {"path": path, "file": path, "dtype": f"none {DTYPE}", "max_file_bytes": COUNT,
                 "names": f"none {CALLED} dict", "include": "list words", "progress": f"none {CALLED}"},
                **group),
        Subject("jzero.checkpoint.load_safetensors", checkpoint.load_safetensors,
                {"files": saved, "state": state, "names": None, "ignore": (), "cast": False},
                {"files": path, "names": f"none {CALLED} dict", "ignore": "list words", "cast": FLAG}, **group),
        Subject("jzero.checkpoint.Steps", checkpoint.Steps,
                {"folder": "a", "keep": 3, "best": None, "mode": "min", "write": False},
                {"folder": path, "keep": COUNT, "best": "none word", "write": FLAG}, **group),
    ]  # fmt: skip
