"""`jzero.deepspeed.read`: every key of DeepSpeed has a fate; units, hybrids, scales and batches are DeepSpeed's."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import string
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from models import BATCH, Small, batch, create_small, loss_of, max_error

import jzero
from jzero.__main__ import main
from jzero.deepspeed import KEYS, FromDeepSpeed, read
from jzero.deepspeed.keys import ALIASES, FATES, MAPPED, SECTIONS, TABLE, keys_of

# All names that DeepSpeed 0.19.6 (commit edaa722, 2026-08-22) reads from a ds_config.json, written down from the
# fields (with their aliases) of runtime/zero/config.py, runtime/zero/offload_config.py and runtime/precision_config.py,
# and the constants of runtime/constants.py, runtime/config.py, runtime/activation_checkpointing/config.py,
# runtime/model_checkpointing/constants.py, and the sections' own modules. Sections marked * are one key.
TOP = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
sparse_attention* zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print sparse_gradients amp*
gradient_clipping graph_harvesting communication_data_type seq_parallel_communication_data_type prescale_gradients
gradient_predivide_factor gradient_allreduce_op disable_allgather dump_state vocabulary_size wall_clock_breakdown
memory_breakdown eigenvalue* progressive_layer_drop* dataloader_drop_last use_data_before_expert_parallelism log_level
pipeline* hybrid_engine* comms_logger* tensorboard* wandb* csv_monitor* comet* flops_profiler* autotuning* elasticity*
compression_training* quantize_training* aio* nebula* datastates_ckpt* weight_quantization* compile* timers*
tensor_parallel* expert_parallel* data_efficiency* curriculum_learning* sequence_parallel_size data_parallel_size
allgather_size
"""
NESTED = {
    "zero_optimization": """
stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint zenflow* sub_group_size cpu_offload_param
cpu_offload_use_pin_memory cpu_offload prefetch_bucket_size stage3_prefetch_bucket_size param_persistence_threshold
stage3_param_persistence_threshold model_persistence_threshold stage3_model_persistence_threshold max_live_parameters
stage3_max_live_parameters max_reuse_distance stage3_max_reuse_distance gather_16bit_weights_on_model_save
stage3_gather_16bit_weights_on_model_save module_granularity_threshold stage3_module_granularity_threshold
use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params allgather_sequential stage3_allgather_sequential
stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients
zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients
zeropp_loco_param* mics_shard_size mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint
override_module_apply log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module*
""",
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "zero_optimization.offload_optimizer": """
device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload cpuadam_cores_perc
""",
    "fp16": """
enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale
fp16_master_weights_and_grads
""",
    "bf16": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "activation_checkpointing": """
partition_activations number_checkpoints contiguous_memory_optimization cpu_checkpointing profile
synchronize_checkpoint_boundary
""",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype",
    "optimizer": "type params* legacy_fusion",
    "scheduler": "type params*",
    "checkpoint": "tag_validation load_universal use_node_local_storage parallel_write checkpoint_serialization writer",
}
NAMES = [n.rstrip("*") for n in TOP.split()] + [
    f"{section}.{n.rstrip('*')}" for section, names in NESTED.items() for n in names.split()
]

WITH_ALL = {  # what makes every mapped key matter
    "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0, "communication_data_type": "fp32",
    "zero_optimization": {
        "stage": 3, "reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": 2000,
        "stage3_param_persistence_threshold": 10, "offload_optimizer": {"device": "cpu"},
        "zero_hpz_partition_size": 4, "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
}  # fmt: skip

SAMPLES = {
    "bool": True,
    "int": 1,
    "number": 0.5,
    "str": "fp16",
    "dict": {"enabled": True},
    "list": ["x"],
    "any": 1,
}


def nested(name, value):
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def rows(found, which=("mapped", "not_needed", "not_supported")):
    return {row.key: row for name in which for row in getattr(found, name)}


def zero(**fields):
    return read({"zero_optimization": fields}, world=8)


@pytest.mark.unit
def test_every_name_of_deepspeed_is_known_and_no_other():
    assert len(set(NAMES)) == len(NAMES)
    assert set(NAMES) == set(KEYS) | {n for n in ALIASES if n not in SECTIONS | {"bfloat16"}}
    assert set(NESTED) == SECTIONS
    assert ALIASES["bfloat16"] == "bf16"


ARGUMENTS = {
    name: key
    for section, types in TABLE["types"].items()
    for kind in types
    for name, key in keys_of({f"{section}.type": kind}).items()
    if name not in KEYS
}
FIELDS = {
    "config": jzero.ZeroConfig, "offload": jzero.Offload, "scale": jzero.LossScale, "result": FromDeepSpeed,
}  # fmt: skip
FACTS = {  # what a sentence or a line of the table may name
    *(field.name for kind in (jzero.ZeroConfig, FromDeepSpeed) for field in dataclasses.fields(kind)),
    *TABLE["script"]["facts"], "value", "size", "dtype", "axes",
}  # fmt: skip


@pytest.mark.unit
@pytest.mark.parametrize("key", [*KEYS.values(), *ARGUMENTS.values()], ids=lambda key: key.name)
def test_a_row_of_the_table_names_what_there_is(key):
    """Kinds, columns, conditions, fields and facts: a misspelt one would be found when a file has the key."""
    assert key.kind in {*SAMPLES, "betas"}
    assert key.fate in FATES
    assert set(key.columns) <= {*TABLE["columns"], "default"}
    assert set(key["needs"]) <= set(TABLE["conditions"])
    assert key["translate"] in {"", *TABLE["translate"]}
    for target in (key["field"], *(name for name in key["sets"] if name not in TABLE["script"]["facts"])):
        group, _, field = target.rpartition(".")
        assert not target or group == "remat" or hasattr(FIELDS[group], field), target
    for text in (key["says"], key["when_off"], key["auto"], key["note"], *(text for _, text in key["cases"])):
        assert {re.split(r"\W", name)[0] for _, name, _, _ in string.Formatter().parse(text) if name} <= FACTS, text


@pytest.mark.unit
def test_the_rules_of_the_table_name_keys():
    for other, values, fate, text in TABLE["conditions"].values():
        assert other in KEYS
        assert values
        assert fate in FATES
        assert text
    for wanted, text in TABLE["conflicts"]:
        assert set(wanted) <= set(KEYS)
        assert text
    assert set(TABLE["trainer"]) <= {*KEYS, *ARGUMENTS}
    for fact, line in TABLE["script"]["lines"]:
        assert fact in FACTS | {"config"}
        assert {name for _, name, _, _ in string.Formatter().parse(line) if name} <= FACTS


@pytest.mark.unit
@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_in_one_list_with_a_reason(name):
    key = KEYS[ALIASES.get(name, name)]
    value = {"optimizer.type": "Adam", "scheduler.type": "OneCycle"}.get(name, SAMPLES[key.kind])
    value = "cpu" if name.endswith("device") else "mean" if name == "gradient_allreduce_op" else value
    if name == "bf16.bf16_optimizer_states":
        value = False
    found = read(nested(name, value), world=1)
    lists = [which for which in ("mapped", "not_needed", "not_supported") for row in getattr(found, which)]
    assert len(lists) == 1
    assert len(next(iter(rows(found).values())).text) > 5


@pytest.mark.unit
@pytest.mark.parametrize(
    "name", [n for n, k in KEYS.items() if k.fate == MAPPED and not n.endswith("params")]
)
def test_what_the_catalogue_calls_mapped_is_mapped(name):
    config = json.loads(json.dumps(WITH_ALL))
    section = name.split(".")[0]
    if section == "fp16":
        static = name == "fp16.loss_scale"
        config["fp16"] = {
            "enabled": True, "loss_scale": 128 if static else 0, "initial_scale_power": 8, "loss_scale_window": 5,
            "hysteresis": 3, "min_loss_scale": 2, "fp16_master_weights_and_grads": True,
        }  # fmt: skip
    elif section == "bf16":
        flags = ("enabled", "check_grad_overflow", "bf16_master_weights_and_grads", "bf16_optimizer_states")
        config["bf16"] = dict.fromkeys(flags, True)
    elif section == "torch_autocast":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif section == "data_types":
        config["data_types"] = {"param_dtype": "bf16"}
    elif name == "zero_optimization.cpu_offload":
        config["zero_optimization"] |= {"cpu_offload": True, "offload_optimizer": {}}
    elif name == "zero_optimization.cpu_offload_param":
        config["zero_optimization"] |= {"cpu_offload_param": True, "offload_param": {}}
    elif name.endswith(("nvme_path", "offload_param.device")):
        config["zero_optimization"] |= {
            "offload_optimizer": {"device": "nvme", "nvme_path": "/local"}, "offload_param": {"device": "cpu"},
        }  # fmt: skip
    elif name == "zero_optimization.mics_shard_size":
        config["zero_optimization"] |= {"mics_shard_size": 4, "zero_hpz_partition_size": 1}
    elif name.endswith("prefetch_bucket_size"):
        config["zero_optimization"]["stage3_prefetch_bucket_size"] = 500
    found = read(config, world=8)
    assert name in rows(found, ["mapped"]), rows(found)[name]


@pytest.mark.unit
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages_and_units(stage):
    config = {
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": 5e5, "stage3_prefetch_bucket_size": 2e5,
            "stage3_param_persistence_threshold": 1e4,
        },
    }  # fmt: skip
    for enabled, size in ((True, 2), (False, 4)):
        found = read({**config, "bf16": {"enabled": enabled}}, world=8)
        expected: dict = {"stage": stage}
        if stage == 2:
            expected["bucket_bytes"] = 500_000 * size
        if stage == 3:
            expected |= {"bucket_bytes": 200_000 * size, "min_shard_bytes": 10_000 * size}
        assert found.config == jzero.ZeroConfig(**expected)
        assert found.param_dtype == ("bfloat16" if enabled else None)
    assert len(rows(found)) == 5


@pytest.mark.unit
def test_no_zero_optimization_is_stage_0_and_true_is_stage_1():
    assert read({}).config.stage == 0
    assert "stage 0" in " ".join(read({}).notes)
    assert read({"zero_optimization": True}).config.stage == 1


@pytest.mark.unit
def test_offload():
    found = zero(stage=2, offload_optimizer={"device": "cpu", "pin_memory": True})
    assert found.config == jzero.ZeroConfig(stage=2, offload="host")
    assert "updated on the device; DeepSpeed updates it on the CPU" in (
        rows(found)["zero_optimization.offload_optimizer.device"].text
    )
    assert zero(stage=2, cpu_offload=True).config == found.config
    assert zero(stage=2, offload_optimizer={"device": "none"}).config.offload is None
    assert zero(stage=0, offload_optimizer={"device": "cpu"}).config.offload is None
    text = rows(found)["zero_optimization.offload_optimizer.pin_memory"].text
    assert text == "host memory is always pinned"
    partly = zero(stage=3, offload_optimizer={"device": "cpu", "ratio": 0.5, "pin_memory": False})
    assert {r.key.split(".")[-1] for r in partly.not_supported} == {"ratio", "pin_memory"}
    on_host = jzero.Offload(params="host")
    assert zero(stage=3, offload_param={"device": "cpu"}).config.offload == on_host
    assert zero(stage=3, cpu_offload_param=True).config.offload == on_host
    line = 'config = jzero.ZeroConfig(stage=3, offload=jzero.Offload(params="host"))'
    assert line in zero(stage=3, offload_param={"device": "cpu"}).code
    assert zero(stage=2, offload_param={"device": "cpu"}).config.offload is None
    nvme = {"device": "nvme", "nvme_path": "/local"}
    found = zero(stage=3, offload_optimizer=nvme, offload_param={"device": "cpu"})
    assert found.config.offload == jzero.Offload(tier="disk", path="/local", params="host")
    assert not found.not_supported
    with pytest.raises(ValueError, match=r"nvme_path must say in which folder"):
        zero(stage=3, offload_optimizer={"device": "nvme"})
    with pytest.raises(ValueError, match=r"needs stage 2 or 3"):
        zero(stage=1, offload_optimizer=nvme)
    with pytest.raises(ValueError, match=r'no tier on a disk. Say "cpu"'):
        zero(stage=3, offload_param=nvme)
    with pytest.raises(ValueError, match=r"cpu_offload is true: and .*device"):
        zero(stage=2, cpu_offload=True, offload_optimizer={"device": "cpu"})
    with pytest.raises(ValueError, match="Did you mean 'cpu'"):
        zero(stage=2, offload_optimizer={"device": "cpus"})


@pytest.mark.unit
@pytest.mark.parametrize("name", ["zero_hpz_partition_size", "mics_shard_size"])
def test_hybrids_lay_states_out_as_they_do(name):
    found = zero(stage=3, **{name: 4})
    assert found.mesh_axes == {"replica": 2, "data": 4}
    plan = jzero.make_plan({"w": jnp.ones((16, 8))}, found.config, mesh=jzero.mesh(found.mesh_axes))
    assert plan.layouts[0].stored == jax.P("data")
    both = jax.P(("data", "replica")) if name == "zero_hpz_partition_size" else jax.P("data")
    assert plan.layouts[0].state == both
    assert set(plan.batch_axes) == {"replica", "data"}
    assert "jzero.mesh" in rows(found)[f"zero_optimization.{name}"].text
    with pytest.raises(ValueError, match=r"8 devices = 2 x 3 \+ 2.*world="):
        zero(stage=3, **{name: 3})
    assert zero(stage=2, **{name: 4}).mesh_axes is None


@pytest.mark.unit
def test_hybrids_switched_off_and_both():
    found = zero(stage=3, zero_hpz_partition_size=1, mics_shard_size=-1)
    assert found.config == jzero.ZeroConfig(stage=3)
    with pytest.raises(ValueError, match="keep one of the two"):
        zero(stage=3, zero_hpz_partition_size=4, mics_shard_size=4)


@pytest.mark.unit
def test_fp16_is_a_loss_scale():
    found = read(
        {
            "fp16": {
                "enabled": True,
                "initial_scale_power": 12,
                "loss_scale_window": 50,
                "hysteresis": 3,
                "min_loss_scale": 4,
            }
        }
    )
    scale = found.loss_scale
    assert isinstance(scale, jzero.LossScale)
    assert float(scale.value) == 4096.0
    assert (scale.growth_interval, scale.hysteresis, scale.minimum) == (50, 3, 4.0)
    assert (scale.growth, scale.backoff) == (2.0, 0.5)
    usual = read({"fp16": {"enabled": True}}).loss_scale
    assert isinstance(usual, jzero.LossScale)
    assert (usual.initial, usual.growth_interval, usual.hysteresis, usual.minimum) == (65536.0, 1000, 2, 1.0)
    large = read({"fp16": {"enabled": True, "initial_scale_power": 32}}).loss_scale
    assert isinstance(large, jzero.LossScale)
    assert large.initial == large.maximum == 2.0**32
    assert read({"fp16": {"enabled": True, "loss_scale": 128}}).loss_scale == 128.0
    off = read({"fp16": {"enabled": False, "hysteresis": 2}})
    assert off.loss_scale is None
    assert off.param_dtype is None
    assert len(off.not_needed) == 2
    again = read({"fp16": {"enabled": True, "consecutive_hysteresis": True}})
    assert [r.key for r in again.not_supported] == ["fp16.consecutive_hysteresis"]


@pytest.mark.unit
def test_16_bit_masters_and_moments():
    half = {"enabled": True, "bf16_master_weights_and_grads": True}
    config = read({"bf16": half}).config
    assert (config.master_dtype, config.moment_dtype) == (None, jnp.float32)
    config = read({"bf16": {**half, "bf16_optimizer_states": True}}).config
    assert (config.master_dtype, config.moment_dtype) == (None, jnp.bfloat16)
    with pytest.raises(ValueError, match="only with bf16_master_weights_and_grads"):
        read({"bf16": {"enabled": True, "bf16_optimizer_states": True}})
    config = read({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}).config
    assert (config.master_dtype, config.moment_dtype) == (None, jnp.float32)
    assert read({"communication_data_type": "fp32"}).config.reduce_dtype == jnp.float32
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    assert read({**autocast, "zero_optimization": {"stage": 3}}).config.compute_dtype == jnp.bfloat16
    found = read({**autocast, "zero_optimization": {"stage": 2}})
    assert found.config.compute_dtype is None
    assert "nn.Dense" in rows(found)["torch_autocast.enabled"].text


@pytest.mark.unit
@pytest.mark.parametrize(
    ("given", "expected"),  # (train_batch_size, micro, accumulation), as DeepSpeed derives them on 8 devices
    [
        ((64, 4, 2), (64, 4, 2)),
        ((64, 4, None), (64, 4, 2)),
        ((64, None, 2), (64, 4, 2)),
        ((None, 4, 2), (64, 4, 2)),
        ((64, None, None), (64, 8, 1)),
        ((None, 4, None), (32, 4, 1)),
        ((None, None, 2), (None, None, 2)),
        ((None, None, None), (None, None, 1)),
    ],
)
def test_the_batch_is_derived_as_deepspeed_does(given, expected):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    found = read({k: v for k, v in zip(names, given, strict=True) if v is not None}, world=8)
    assert (found.train_batch_size, found.micro_batch_size, found.accumulate) == expected


@pytest.mark.unit
@pytest.mark.parametrize("given", [(64, 4, 3), (65, 4, None), (65, None, 2), (4, None, None), (4, 4, None)])
def test_a_batch_that_does_not_come_out(given):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    with pytest.raises(ValueError, match=r"train_batch_size \d+ is not .* x 8 \(devices\) = \d+.*world="):
        read({k: v for k, v in zip(names, given, strict=True) if v is not None}, world=8)


@pytest.mark.unit
def test_devices_are_those_of_jax_where_nobody_says():
    assert read({"train_batch_size": 32}).world == len(jax.devices())
    assert read({"train_micro_batch_size_per_gpu": 4}).world is None


@pytest.mark.unit
@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"zero_optimization": {"stge": 2}}, ValueError, r"1 unknown key:\s+zero_optimization.stge Did you mean"),
        ({"gradient_acumulation_steps": 2}, ValueError, "Did you mean 'gradient_accumulation_steps'"),
        ({"fp16": {"loss_scale_windw": 2}}, ValueError, "Did you mean 'fp16.loss_scale_window'"),
        ({"stage": 2}, ValueError, "Did you mean 'zero_optimization.stage'"),
        ({"zero_optimization": {"stage": "2"}}, TypeError, "zero_optimization.stage is '2'; it must be a whole number"),
        ({"zero_optimization": {"stage": True}}, TypeError, "must be a whole number"),
        ({"zero_optimization": {"stage": 2.5}}, TypeError, "must be a whole number"),
        ({"zero_optimization": {"stage": 4}}, ValueError, "stage is 4: it must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "auto"}}, ValueError, r"pass auto=\{'zero_optimization.stage'"),
        ({"zero_optimization": 2}, TypeError, "it must be an object"),
        ({"zero_optimization": {"overlap_comm": 1}}, TypeError, "must be true or false"),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, ValueError, "at least 0"),
        ({"zero_optimization": {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}}, ValueError, "one key"),
        ({"gradient_clipping": -1}, ValueError, "at least 0"),
        ({"gradient_clipping": math.nan}, TypeError, "a finite number"),
        ({"gradient_accumulation_steps": 0}, ValueError, "at least 1"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ValueError, "both enabled"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, ValueError, "above 0 and at most the first scale"),
        ({"fp16": {"enabled": True, "initial_scale_power": 200}}, ValueError, "2[*][*]127"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, ValueError, "at least 1"),
        ({"communication_data_type": "fp1"}, ValueError, "Did you mean 'fp16'"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "fast"}}}, TypeError, "lr is 'fast'; it must be a finite"),
        ({"optimizer": {"type": "Adam", "params": {"weight_deacy": 0.1, "epz": 1e-8}}}, ValueError,
         r"has 2 unknown keys:\n  optimizer.params.weight_deacy Did you mean 'weight_decay'\?\n  .*epz Did .* 'eps'"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1, "warmup_num_step": 3}}}, ValueError,
         r"1 unknown key:\n  scheduler.params.warmup_num_step Did you mean 'warmup_num_steps'"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.5]}}}, ValueError,
         r"betas is \[0.9, 1.5\]; both must be at least 0 and below 1"),
        ({"optimizer": {"type": "Adam", "params": {"lr": -1e-3}}}, ValueError, "lr is -0.001; it must be at least 0"),
        ({"optimizer": {"type": "Adam", "params": {"eps": -1e-8}}}, ValueError, "eps is -1e-08; it must be at least 0"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -1}}}, ValueError, "-1; it must be at"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, ValueError, "gradient_clipping"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, ValueError, "total_num_steps is None"),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, ValueError, "optimizer's lr, which the file does not set"),
        ({3: 4}, TypeError, "is not a string"),
        ([], TypeError, "path of a ds_config.json or a dict"),
    ],
)  # fmt: skip
def test_bad_input(config, error, message):
    with pytest.raises(error, match=message):
        read(config, world=8)


@pytest.mark.unit
def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read(tmp_path / "none.json")
    path = tmp_path / "ds_config.json"
    for text, error, message in (
        ('{"bf16": {"enabled": true,}}', ValueError, "ds_config.json, line 1, column"),
        ('{"a": 1, "a": 2}', ValueError, "'a' is there twice"),
        ("[1]", TypeError, "holds a list"),
    ):
        path.write_text(text)
        with pytest.raises(error, match=message):
            read(path)


@pytest.mark.unit
def test_auto_is_a_default_that_is_told_and_can_be_given():
    config = {
        "train_batch_size": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    }  # fmt: skip
    found = read(config, world=8)
    assert found.config == jzero.ZeroConfig(stage=3)
    assert (found.accumulate, found.clip, found.param_dtype) == (1, 1.0, None)
    told = {k: r.text for k, r in rows(found).items() if r.value == "auto"}
    assert len(told) == 10
    assert all('"auto"' in text for text in told.values())
    assert "optax.adamw(5e-05, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.0)" in "\n".join(found.code)
    found = read(
        config,
        world=8,
        auto={"bf16.enabled": True, "optimizer.params.lr": 1e-4, "gradient_accumulation_steps": 4},
    )
    assert (found.param_dtype, found.accumulate) == ("bfloat16", 4)
    assert "optax.adamw(0.0001," in "\n".join(found.code)
    with pytest.raises(ValueError, match="no such key"):
        read(config, auto={"bf16.enable": True})
    with pytest.raises(ValueError, match='says 3 there, not "auto"'):
        read(config, auto={"zero_optimization.stage": 2})


OPTIMIZERS = {
    "Adam": ({"lr": 0.1, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 0.1},
             optax.adamw(0.1, b1=0.8, b2=0.99, eps=1e-6, weight_decay=0.1)),
    "AdamW": ({"lr": 0.1}, optax.adamw(0.1, weight_decay=0.0)),
    "adam": ({"lr": 0.1, "adam_w_mode": False, "weight_decay": 0.1, "torch_adam": True},
             optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.1))),
    "Lion": ({"lr": 0.1, "weight_decay": 0.1}, optax.lion(0.1, b1=0.9, b2=0.999, weight_decay=0.1)),
    "Lamb": ({"lr": 0.1, "max_coeff": 10.0}, optax.lamb(0.1, eps=1e-8)),
    "SGD": ({"lr": 0.1, "momentum": 0.9, "nesterov": True}, optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "Adagrad": ({"lr": 0.1}, optax.adagrad(0.1, initial_accumulator_value=0.0, eps=1e-10)),
}  # fmt: skip


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_are_lines_of_optax(kind):
    given, expected = OPTIMIZERS[kind]
    found = read({"optimizer": {"type": kind, "params": given}})
    assert not found.not_supported
    line = next(line for line in found.code if line.startswith("tx = "))
    names: dict = {"optax": optax}
    exec(line, names)
    params = {"w": jnp.arange(6.0).reshape(2, 3)}
    grads = {"w": jnp.ones((2, 3)) * 0.3}
    one, two = (tx.update(grads, tx.init(params), params)[0] for tx in (names["tx"], expected))
    np.testing.assert_array_equal(one["w"], two["w"])


@pytest.mark.unit
def test_optimizers_and_arguments_that_optax_has_not():
    found = read({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1, "freeze_step": 3}}})
    assert len(found.not_supported) == 3
    assert "tx = ...  # your optax chain in place of OneBitAdam" in found.code
    found = read({"optimizer": {"type": "Adam", "params": {"lr": 0.1, "amsgrad": True}}})
    assert {r.key: r.text for r in found.not_supported} == {
        "optimizer.params.amsgrad": "optax.amsgrad, without decoupled weight decay",
    }
    params = {"lr": 0.1, "amsgrad": False, "foreach": True, "adam_w_mode": False}
    found = read({"optimizer": {"type": "Adam", "params": params}})
    assert {r.key.split(".")[-1] for r in found.mapped} == {"type", "lr", "adam_w_mode"}
    assert {r.key.split(".")[-1] for r in found.not_needed} == {"amsgrad", "foreach"}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("section", "name", "hint"),
    [
        ("optimizer", "AdmaW", "Did you mean 'AdamW'?"), ("optimizer", "admaw", "Did you mean 'AdamW'?"),
        ("optimizer", "FusedAdam", "Did you mean 'Adam'?"), ("optimizer", "RMSprop", ""), ("optimizer", "Muon", ""),
        ("scheduler", "WarmupLRR", "Did you mean 'WarmupLR'?"), ("scheduler", "OneCycle", ""),
    ],
)  # fmt: skip
def test_a_type_that_is_not_known_is_told_the_nearest(section, name, hint):
    """RMSprop and others are names of torch.optim, which DeepSpeed takes: nothing is misspelt there."""
    (row,) = read({section: {"type": name}}).not_supported
    assert row.key == f"{section}.type"
    assert row.text.endswith(hint)
    assert bool(hint) == ("Did you mean" in row.text)


@pytest.mark.unit
def test_warmup_of_no_steps_is_that_of_two():
    lines = []
    for steps in (0, 1, 2):
        params = {"warmup_num_steps": steps, "warmup_max_lr": 0.1}
        found = read({"scheduler": {"type": "WarmupLR", "params": params}})
        lines.append(found.code)
        text = rows(found)["scheduler.params.warmup_num_steps"].text
        assert text.startswith("taken as 2") == (steps < 2)
    assert lines[0] == lines[1] == lines[2]


PLACEHOLDERS = {
    "tx": "optax.sgd(0.1)", "schedule": "optax.constant_schedule(0.1)", "warmup_steps": "2", "total_steps": "4",
}  # fmt: skip
PARTITIONED = {"activation_checkpointing": {"partition_activations": True}}


@pytest.mark.default_cases("config3", "config4", "config21")
@pytest.mark.parametrize(
    "config",
    [
        {}, {"gradient_clipping": 1.0}, PARTITIONED,
        {**PARTITIONED, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}},
        {**PARTITIONED, "zero_optimization": {"stage": 3, "mics_shard_size": 2}, "gradient_accumulation_steps": 2},
        *({"optimizer": {"type": name, "params": {"lr": 0.1}}} for name in ("AdmaW", "OneBitAdam", "Muon")),
        *(
            {"optimizer": {"type": "AdamW"}, "scheduler": {"type": name, "params": {}}}
            for name in ("OneCycle", "LRRangeTest", "WarmupLRR")
        ),
        {"optimizer": {"type": "Muon", "params": {"lr": 0.1}}, "scheduler": {"type": "WarmupLR", "params": {}}},
        *(
            {"optimizer": {"type": "Adam"}, "scheduler": {"type": name, "params": {
                "warmup_num_steps": steps, "total_num_steps": steps, "warmup_type": kind,
            }}}
            for name in ("WarmupDecayLR", "WarmupCosineLR") for steps in (2, "auto") for kind in ("log", "linear")
        ),
        {"fp16": {"enabled": True}, "gradient_accumulation_steps": 2}, {"bf16": {"enabled": True}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    ],
)  # fmt: skip
def test_the_printed_lines_run(config):
    """As they are, with what is the reader's: the model and its shapes, params, the loss, and each `...`."""
    found = read(config, world=8)
    code = textwrap.dedent(str(found).split("\nwrite\n")[1])
    code = re.sub(r"(?m)^(\w+) = \.\.\.  # .*", lambda m: f"{m[1]} = {PLACEHOLDERS[m[1]]}", code)
    model = Small()
    params = create_small(optax.sgd(0.1)).params
    names: dict = {
        "model": model, "params": params, "loss_fn": lambda p, b: loss_of(model.apply, p, b), "Block": Small,
        "shapes": jax.eval_shape(lambda: params), "batch": batch(),
    }  # fmt: skip
    exec(code, names)
    assert names["plan"].config == found.config
    assert ("Block" in code) == bool(found.remat)
    if found.remat:
        assert names["Block"] is not Small
        assert names["mesh"].shape == {
            **dict.fromkeys(names["mesh"].shape, 0),
            **names["mesh"].shape,
            "model": 1,
        }
        assert jzero.mesh(found.mesh_axes) == names["mesh"]


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_schedules_follow_deepspeeds_formulas(name, kind):
    """Its `get_lr` at `last_batch_iteration`; DeepSpeed's cosine is one step ahead of the one asserted here."""
    low, peak, n, total = 0.01, 0.5, 10, 100
    params = {"warmup_num_steps": n, "warmup_type": kind}
    params |= {"warmup_min_ratio": low / peak, "cos_min_ratio": 0.1} if name == "WarmupCosineLR" else {
        "warmup_min_lr": low, "warmup_max_lr": peak,
    }  # fmt: skip
    if name != "WarmupLR":
        params["total_num_steps"] = total
    config = {
        "optimizer": {"type": "Adam", "params": {"lr": peak}},
        "scheduler": {"type": name, "params": params},
    }
    names: dict = {"optax": optax, "jnp": jnp}
    exec(next(line for line in read(config).code if line.startswith("schedule = ")), names)
    for step in (0, 1, 5, 9, 10, 11, 50, 99):
        rise = math.log(step + 1) / math.log(n) if kind == "log" else step / n
        fall = {
            "WarmupLR": peak, "WarmupDecayLR": low + (peak - low) * (total - step) / (total - n),
            "WarmupCosineLR": peak * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - n) / (total - n))) / 2),
        }[name]  # fmt: skip
        expected = low + (peak - low) * rise if step < n else fall
        assert float(names["schedule"](step)) == pytest.approx(expected, rel=1e-5), step


HUGGING_FACE = {  # a fine-tuning run: the Trainer fills in what is "auto"
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto", "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "none"},
        "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 500,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
}  # fmt: skip
PRETRAINING = {  # fp16 at stage 2, on 64 devices
    "train_batch_size": 1024, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0, "prescale_gradients": False, "steps_per_print": 10,
    "zero_optimization": {
        "stage": 2, "reduce_scatter": True, "reduce_bucket_size": 2e8, "allgather_partitions": True,
        "allgather_bucket_size": 2e8, "overlap_comm": True, "contiguous_gradients": True, "round_robin_gradients": True,
    },
    "fp16": {
        "enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
        "initial_scale_power": 14,
    },
    "optimizer": {"type": "Adam", "params": {"lr": 1.5e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1.5e-4, "warmup_num_steps": 2000, "warmup_type": "linear"},
    },
    "tensorboard": {"enabled": True, "output_path": "logs"}, "flops_profiler": {"enabled": False},
}  # fmt: skip
ZEROPP = {  # ZeRO++ over slow networks, activations on the host
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True, "check_grad_overflow": True},
    "zero_optimization": {
        "stage": 3, "zero_hpz_partition_size": 8, "zero_quantized_weights": True, "zero_quantized_gradients": True,
        "stage3_prefetch_bucket_size": 1e7, "stage3_param_persistence_threshold": 1e5, "overlap_comm": True,
    },
    "activation_checkpointing": {"cpu_checkpointing": True, "contiguous_memory_optimization": True},
    "communication_data_type": "bf16",
}  # fmt: skip


@pytest.mark.unit
def test_three_whole_configs():
    found = read(HUGGING_FACE, auto={"bf16.enabled": True})
    assert found.config == jzero.ZeroConfig(stage=3, offload="host")
    assert not found.not_supported
    assert "total_steps = ..." in "\n".join(found.code)

    found = read(PRETRAINING, world=64)
    assert found.config == jzero.ZeroConfig(stage=2, bucket_bytes=400_000_000)
    assert (found.accumulate, found.micro_batch_size, found.clip) == (4, 4, 1.0)
    assert isinstance(found.loss_scale, jzero.LossScale)
    assert found.loss_scale.initial == 2.0**14
    assert not found.not_supported
    assert {"tensorboard", "flops_profiler", "zero_optimization.overlap_comm"} <= {
        r.key for r in found.not_needed
    }

    found = read(ZEROPP, world=64)
    assert found.config == jzero.ZeroConfig(
        stage=3, axis=("replica", "data"), param_axis="data", bucket_bytes=20_000_000, min_shard_bytes=200_000,
        reduce_dtype="int8", gather_dtype="int8",
    )  # fmt: skip
    assert found.mesh_axes == {"replica": 8, "data": 8}
    assert found.remat == {"offload": "host"}
    assert not found.not_supported
    for line in (
        'mesh = jzero.mesh({"replica": 8, "data": 8})',
        'jzero.make_plan(shapes, config, mesh=mesh), offload="host")',
        "p.astype(jnp.bfloat16)",
        "optax.apply_if_finite(tx, 10**6)",
    ):
        assert line in "\n".join(found.code)
    for config in (HUGGING_FACE, PRETRAINING, ZEROPP):
        assert len(rows(read(config, world=64))) == count_leaves(config)


def count_leaves(config):
    """Keys of a config; a monitor's section is one."""
    whole = ("tensorboard", "flops_profiler")
    return sum(count_leaves(v) if isinstance(v, dict) and k not in whole else 1 for k, v in config.items())


@pytest.mark.unit
def test_the_command(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(PRETRAINING))
    assert main(["deepspeed", str(path), "--world", "64"]) == 0
    out = capsys.readouterr().out
    assert "bucket_bytes=400000000: 200000000 elements x 2 bytes (float16)" in out
    assert "not needed (" in out
    assert max(map(len, out.split("\nwrite\n")[0].splitlines())) <= 118
    path.write_text(json.dumps(ZEROPP))
    assert main(["deepspeed", str(path), "--world", "64"]) == 0
    loco = {"zero_optimization": {**ZEROPP["zero_optimization"], "zeropp_loco_param": {"err_beta": 0.8}}}
    path.write_text(json.dumps({**ZEROPP, **loco}))
    assert main(["deepspeed", str(path), "--world", "64"]) == 1
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 16}}))
    assert main(["deepspeed", str(path)]) == 2
    told = capsys.readouterr().err
    assert "it must divide the devices of the run, and JAX has 8 devices here. Pass --world where" in told
    assert "world=" not in told
    path.write_text('{"train_batch": 3}')
    assert main(["deepspeed", str(path)]) == 2
    assert "Did you mean 'train_batch_size'" in capsys.readouterr().err


def run(found, steps=3):
    """Trains the Small model by the lines that `found` says, as they are: state after `steps`, and losses."""
    model = Small()
    start = create_small(optax.sgd(0.1))
    names: dict = {
        "jax": jax, "jnp": jnp, "optax": optax, "jzero": jzero, "TrainState": TrainState, "model": model,
        "params": start.params, "loss_fn": lambda p, b: loss_of(model.apply, p, b),
    }  # fmt: skip
    before, _, inside = "\n".join(found.code).partition("# in the train step:\n")
    if "apply_gradients" not in inside:
        inside += "\nstate = state.apply_gradients(grads=grads)"
    step = "\n".join("    " + line for line in inside.splitlines())
    exec(f"{before}\ndef train_step(state, batch):\n{step}\n    return state, loss\n", names)
    train_step, state, losses = jax.jit(names["train_step"]), names["state"], []
    for _ in range(steps):
        state, loss = train_step(state, names["plan"].place_batch(batch()))
        losses.append(float(loss))
    return state, losses


TRAINED = {  # SGD, since Adam's steps would hide what clipping does
    "train_batch_size": BATCH, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01}},
    "scheduler": {
        "type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_min_lr": 0.1, "warmup_type": "linear"},
    },
}  # fmt: skip


@pytest.mark.default_cases("2", "offload")
@pytest.mark.parametrize(
    "fields",
    [
        {"stage": 0}, {"stage": 1}, {"stage": 2, "reduce_bucket_size": 100},
        {"stage": 3, "stage3_prefetch_bucket_size": 100, "stage3_param_persistence_threshold": 8},
        {"stage": 3, "zero_hpz_partition_size": 4}, {"stage": 3, "mics_shard_size": 2},
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    ],
    ids=["0", "1", "2", "3", "hpz", "mics", "offload"],
)  # fmt: skip
def test_what_it_says_trains_as_without(fields):
    """Three steps by its lines on 8 devices, and of plain optax on one: params equal to 2e-5 (fp32)."""
    found = read({**TRAINED, "zero_optimization": fields})
    assert "accumulate=2" in found.code[-1]
    state, losses = run(found)
    schedule = optax.join_schedules([optax.linear_schedule(0.1, 0.5, 2), optax.constant_schedule(0.5)], [2])
    alone = create_small(
        optax.chain(optax.clip_by_global_norm(0.1), optax.add_decayed_weights(0.01), optax.sgd(schedule, 0.9))
    )
    value_and_grad = jax.value_and_grad(lambda p: loss_of(Small().apply, p, batch()))
    for loss in losses:
        expected, grads = value_and_grad(alone.params)
        assert loss == pytest.approx(float(expected), rel=1e-5)
        alone = alone.apply_gradients(grads=grads)
    assert max_error(jzero.unshard(state.params), alone.params) < 2e-5
    kernel = state.params["Dense_0"]["kernel"]
    parts = {"stage": fields["stage"], "of": kernel.size // kernel.addressable_shards[0].data.size}
    split = {"zero_hpz_partition_size": 4, "mics_shard_size": 2}
    expected_parts = next((n for k, n in split.items() if k in fields), 8) if fields["stage"] == 3 else 1
    assert parts["of"] == expected_parts


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [2, 3])
def test_what_it_says_trains_in_fp16(stage):
    """From a scale of 2**30 the first steps overflow and are skipped; then the loss falls by a tenth in 20 steps."""
    config = {
        **TRAINED,
        "zero_optimization": {"stage": stage},
        "fp16": {"enabled": True, "initial_scale_power": 30, "hysteresis": 1},
    }
    state, losses = run(read(config), steps=40)
    assert state.params["Dense_0"]["kernel"].dtype == jnp.float16
    assert 5 < int(state.scale.skipped) < 30
    assert float(state.scale.value) < 2.0**25
    assert losses[-1] < 0.9 * losses[0]
    static = {**config, "fp16": {"enabled": True, "loss_scale": 128}}
    _, losses = run(read(static), steps=10)
    assert losses[-1] < 0.9 * losses[0]


# --- files that are not configs, or that mean harm -----------------------------------------------------------------


def written(tmp_path, text):
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    return path


FORGED = "Adam\n  import os; os.system('true')  #"


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
@pytest.mark.parametrize(
    "name", [FORGED, "Adam\r", "Adam # x", "Adam'", "A" * 65, "", "\u202eAdam", "Ad\u00e4m"]
)
def test_a_name_goes_into_code_as_a_name_alone(section, name, tmp_path, capsys):
    config = {section: {"type": name, "params": {"lr": 1e-3}}}
    with pytest.raises(ValueError, match=rf"{section}.type is .*letters, digits and _ . - alone"):
        read(config)
    assert main(["deepspeed", str(written(tmp_path, json.dumps(config)))]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "place", [{"a\nb": 1}, {"optimizer": {"type": "Mine", "params": {"lr\n  import os": 1}}}]
)
def test_a_key_is_one_line(place):
    with pytest.raises(ValueError, match="has characters that do not print"):
        read(place)


def brackets(depth, text="[]"):
    return "[" * depth + text + "]" * depth


@pytest.mark.parametrize("depth", [40, 100_000])
def test_deep_json_is_refused(depth, tmp_path):
    path = written(tmp_path, f'{{"wandb": {{"x": {brackets(depth)}}}}}')
    with pytest.raises(ValueError, match=r"ds_config.json is nested deeper than 32 levels"):
        read(path)
    value = {}
    for _ in range(depth):
        value = {"x": value}
    with pytest.raises(ValueError, match="the dict is nested deeper than 32 levels"):
        read({"wandb": value})
    read({"wandb": {"x": json.loads(brackets(20))}})


def test_huge_json_is_refused(tmp_path):
    path = written(tmp_path, json.dumps({"wandb": {"x": "y" * 2**20}}))
    with pytest.raises(ValueError, match=r"ds_config.json has 1.05 MB, and a config at most 1.05 MB"):
        read(path)


@pytest.mark.parametrize("value", [10**400, -(10**400), 10**9, 1e308, -1, math.nan, math.inf, 0])
def test_any_number_anywhere_is_taken_or_refused_in_words(value):
    for name, key in KEYS.items():
        if key.kind not in ("int", "number"):
            continue
        config = {}
        *sections, last = name.split(".")
        inner = config
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
        if sections == ["fp16"]:
            inner["enabled"] = True
        if sections[:1] == ["zero_optimization"]:
            config["zero_optimization"]["stage"] = value if last == "stage" else 3
        try:
            str(read(config, world=8))
        except (ValueError, TypeError) as error:
            assert str(error).startswith(("jzero", "ZeroConfig", "LossScale")), (name, error)  # noqa: PT017
