"""Every key of a DeepSpeed config, and what becomes of it. The docs' table is printed from here.

The names are those of DeepSpeed 0.19.6: `runtime/config.py`, `runtime/constants.py`, the fields of the classes in
`runtime/zero/config.py`, `offload_config.py` and `precision_config.py`, and the sections' own constants.
`tests/deepspeed_config/test_deepspeed.py` has them as a list of its own.
"""

from __future__ import annotations

import dataclasses

SOURCE = "DeepSpeed 0.19.6"
MAPPED, NOT_NEEDED, NOT_SUPPORTED = "mapped", "not needed", "not supported"
FATES = (MAPPED, NOT_NEEDED, NOT_SUPPORTED)
KINDS = ("bool", "int", "number", "str", "dict", "list", "any")


@dataclasses.dataclass(frozen=True)
class Key:
    """One key.

    Args:
      name: with its sections, `zero_optimization.stage`.
      kind: of its value: bool, int (also 5e8, as JSON writes it), number, str, dict, list or any.
      fate: "mapped", "not needed" or "not supported".
      text: where it goes, why it is not needed, or what to do in its place.
      off: values by which nothing is asked for; a "not supported" key with one of them is not needed. A dict that is
        empty or says `"enabled": false` is off too.
      low: the least number.
    """

    name: str
    kind: str
    fate: str
    text: str
    off: tuple = (False, None)
    low: float | None = None


def _mapped(section: str, rows: dict[str, tuple[str, str]]) -> list[Key]:
    return [
        Key(section + k, kind, MAPPED, text, low=0 if kind in ("int", "number") else None)
        for k, (kind, text) in rows.items()
    ]


def _unneeded(section: str, kind: str, rows: dict[str, str]) -> list[Key]:
    return [Key(section + k, kind, NOT_NEEDED, text) for k, text in rows.items()]


ZERO = "zero_optimization."
OPTIMIZER = "zero_optimization.offload_optimizer."
PARAM = "zero_optimization.offload_param."
NVME_ALONE = "of an NVMe tier for params, which is not there"
DIVIDED = "the loss is a mean over the whole batch: gradients are divided before they are reduced"
TYPED = "jax.profiler.trace, or your own logger"

_LIST = [
    # batch
    *_mapped("", {
        "train_batch_size": ("int", "the batch that `plan.place_batch` gets; the arithmetic is checked"),
        "train_micro_batch_size_per_gpu": ("int", "the batch is this x accumulation x devices"),
        "gradient_accumulation_steps": ("int", "`jzero.value_and_grad(accumulate=)`"),
        "gradient_clipping": ("number", "`optax.clip_by_global_norm` in front of the optimizer"),
        "communication_data_type": ("str", "`reduce_dtype`"),
    }),
    # zero_optimization
    *_mapped(ZERO, {
        "stage": ("int", "`stage`"),
        "reduce_bucket_size": ("int", "stages 2 and 3: `bucket_bytes`, elements x bytes of a param"),
        "stage3_prefetch_bucket_size": ("int", "stage 3: `bucket_bytes`, where it is the smaller one"),
        "stage3_param_persistence_threshold": ("int", "stage 3: `min_shard_bytes`, elements x bytes of a param"),
        "zero_hpz_partition_size": ("int", "stage 3: `param_axis` within `axis`, and the mesh"),
        "cpu_offload": ("bool", "`offload`, as offload_optimizer.device: cpu"),
        "cpu_offload_param": ("bool", "`offload`, as offload_param.device: cpu"),
    }),
    Key(ZERO + "mics_shard_size", "int", MAPPED, "stage 3: `axis` within `batch_axis`, and the mesh", low=-1),
    *_mapped(OPTIMIZER, {
        "device": ("str", '`offload`; cpu: `jzero.Offload()`, updated on the device; nvme: `Offload(tier="disk")`'),
        "nvme_path": ("str", 'of nvme: `path` of `jzero.Offload(tier="disk")`'),
    }),
    *_mapped(PARAM, {"device": ("str", 'cpu, at stage 3: `jzero.Offload(params="host")`; nvme is refused')}),
    Key(ZERO + "mics_hierarchical_params_gather", "bool", NOT_SUPPORTED,
        "a gather over hosts is one collective, whose algorithm NCCL chooses"),
    Key(OPTIMIZER + "ratio", "number", NOT_SUPPORTED, "all of the optimizer state is offloaded, or nothing",
        off=(1, None)),
    Key(OPTIMIZER + "super_offload", "bool", NOT_SUPPORTED, "the update runs on the device, state streamed through it"),
    Key(OPTIMIZER + "pin_memory", "bool", NOT_SUPPORTED, "host memory is always pinned", off=(True, None)),
    Key(PARAM + "pin_memory", "bool", NOT_SUPPORTED, "host memory is always pinned", off=(True, None)),
    Key(ZERO + "cpu_offload_use_pin_memory", "bool", NOT_SUPPORTED, "host memory is always pinned", off=(True, None)),
    Key(ZERO + "zenflow", "dict", NOT_SUPPORTED, "every step applies all of its gradients"),
    Key(ZERO + "zero_quantized_weights", "bool", NOT_SUPPORTED, "weights are gathered in their own dtype, or at "
        'stage 3 in `compute_dtype="bfloat16"`'),
    Key(ZERO + "zero_quantized_nontrainable_weights", "bool", NOT_SUPPORTED, "frozen weights keep their dtype"),
    Key(ZERO + "zero_quantized_gradients", "bool", NOT_SUPPORTED, 'gradients are reduced in `reduce_dtype`; "bfloat16" '
        "is the smallest"),
    Key(ZERO + "zeropp_loco_param", "dict", NOT_SUPPORTED, "error feedback of quantized gradients"),
    Key(ZERO + "elastic_checkpoint", "bool", NOT_NEEDED, "`jzero.checkpoint.restore` takes any number of devices"),
    Key(ZERO + "stage3_model_persistence_threshold", "int", NOT_SUPPORTED,
        "there is no cap on the sum of small leaves; "
        "print(plan.describe()) has it; lower `min_shard_bytes`", off=(None, 2**63 - 1)),
    *_unneeded(ZERO, "int", {
        "allgather_bucket_size": "stages 1 and 2 gather leaf by leaf, and XLA combines small ones",
        "sub_group_size": "state is streamed in units of `jzero.Offload(in_flight_bytes=)`, chosen from its size",
        "stage3_max_live_parameters": "at most `prefetch` + 1 buckets of gathered weights are alive",
        "stage3_max_reuse_distance": "a weight is dropped after its use, and gathered again for the backward pass; "
        "`reshard_after_forward=False` keeps all",
        "stage3_module_granularity_threshold": "there are no hooks: buckets follow the order of uses in the program",
    }),
    *_unneeded(ZERO, "bool", {
        "contiguous_gradients": "XLA assigns static buffers: nothing fragments",
        "reduce_scatter": "what is split is reduce-scattered",
        "use_multi_rank_bucket_allreduce": "every leaf is split over all devices: no bucket belongs to one rank",
        "allgather_partitions": "updated params are all-gathered",
        "overlap_comm": "XLA schedules collectives beside compute: jit with plan.compiler_options",
        "load_from_fp32_weights": "a checkpoint holds fp32 masters, and restores them",
        "stage3_gather_16bit_weights_on_model_save": "`jzero.checkpoint.export` writes whole weights, leaf by leaf",
        "stage3_use_all_reduce_for_fetch_params": "weights are all-gathered",
        "stage3_allgather_sequential": "`bucket_bytes=1` gathers weight by weight",
        "ignore_unused_parameters": "a param without use has a gradient of zeros",
        "legacy_stage1": "there is one stage 1",
        "round_robin_gradients": "every device moves its own 1/N of a gradient to the host",
        "memory_efficient_linear": "gathered weights are never kept for the backward pass",
        "pipeline_loading_checkpoint": "`jzero.checkpoint.restore` reads each device's part alone",
        "override_module_apply": "a state that is created by `jzero.shard(create, stage=3)` is born split",
        "log_trace_cache_warnings": "the program is compiled once: there is no trace to keep up with",
        "enable_sanity_checks": "`jzero.check(compiled, plan)` looks at the compiled program",
        "save_muon_momentum_buffer_in_memory": NVME_ALONE,
    }),
    *_unneeded(ZERO, "dict", {"leaf_module": "there are no module hooks: each weight is gathered where it is used"}),
    *_unneeded(OPTIMIZER, "bool", {
        "pipeline_read": "fetches run ahead of the update in any case",
        "fast_init": "files begin with the initial state",
        "pipeline_write": "writes run behind the update in any case",
    }),
    *_unneeded(OPTIMIZER, "any", {
        "buffer_count": "the buffer has one size, `jzero.Offload(buffer_bytes=)`",
        "cpuadam_cores_perc": "of super_offload",
    }),
    *_unneeded(PARAM, "any", {
        "nvme_path": NVME_ALONE, "buffer_count": NVME_ALONE, "buffer_size": NVME_ALONE, "max_in_cpu": NVME_ALONE,
    }),
    # precision
    *_mapped("fp16.", {
        "enabled": ("bool", "params in float16, fp32 masters, `jzero.LossScale`"),
        "loss_scale": ("number", "0: a `jzero.LossScale`; else `jzero.value_and_grad(scale=)` with the number"),
        "initial_scale_power": ("int", "`jzero.LossScale(initial=2.0**power)`"),
        "loss_scale_window": ("int", "`jzero.LossScale(growth_interval=)`"),
        "hysteresis": ("int", "`jzero.LossScale(hysteresis=)`"),
        "min_loss_scale": ("number", "`jzero.LossScale(minimum=)`"),
        "fp16_master_weights_and_grads": ("bool", '`master_dtype=None`, `moment_dtype="float32"`'),
    }),
    Key("fp16.auto_cast", "bool", NOT_SUPPORTED, "cast the batch in your loss, or name the model's dtype"),
    Key("fp16.consecutive_hysteresis", "bool", NOT_SUPPORTED, "overflows are counted since the scale last changed"),
    *_mapped("bf16.", {
        "enabled": ("bool", "params in bfloat16, fp32 masters"),
        "check_grad_overflow": ("bool", "`optax.apply_if_finite` round the chain"),
        "bf16_master_weights_and_grads": ("bool", "`master_dtype=None`, `moment_dtype`"),
        "bf16_optimizer_states": ("bool", '`moment_dtype="bfloat16"`, rounded so that the mean is right'),
    }),
    Key("bf16.immediate_grad_update", "bool", NOT_NEEDED, "micro-batches are summed in fp32 as they come"),
    *_mapped("data_types.", {"param_dtype": ("str", "the dtype of the params")}),
    Key("data_types.grad_accum_dtype", "str", NOT_SUPPORTED, "micro-batches are always summed in fp32",
        off=("fp32", None)),
    Key("data_types.buffer_dtype", "str", NOT_SUPPORTED, "cast the collections of variables yourself", off=(None,)),
    *_mapped("torch_autocast.", {
        "enabled": ("bool", "params in fp32, compute in 16 bits: the model's dtype, at stage 3 `compute_dtype`"),
        "dtype": ("str", "which 16 bits"),
    }),
    Key("torch_autocast.lower_precision_safe_modules", "list", NOT_SUPPORTED, "each Flax layer has a dtype of its own",
        off=(None,)),
    Key("amp", "dict", NOT_SUPPORTED, "Apex: say bf16 or fp16 in its place"),
    # optimizer and schedule
    *_mapped("", {"optimizer.type": ("str", "a line of optax"), "optimizer.params": ("dict", "its arguments"),
                  "scheduler.type": ("str", "a schedule of optax"), "scheduler.params": ("dict", "its arguments")}),
    *_unneeded("", "bool", {
        "optimizer.legacy_fusion": "XLA fuses the update",
        "zero_allow_untested_optimizer": "any optax chain is split",
        "zero_force_ds_cpu_optimizer": "the optimizer is the same on device and host",
    }),
    # activations
    *_mapped("activation_checkpointing.", {
        "partition_activations": ("bool", '`jzero.remat(partition="model")`: an axis of tensor parallelism'),
        "cpu_checkpointing": ("bool", '`jzero.remat(offload="host")`'),
    }),
    *_unneeded("activation_checkpointing.", "any", {
        "number_checkpoints": "`jzero.remat` stands where a block is written",
        "contiguous_memory_optimization": "XLA assigns static buffers: nothing fragments",
        "synchronize_checkpoint_boundary": "one compiled program has no streams to join",
        "profile": "jax.profiler.trace has every block",
    }),
    # gradients, small things
    *_unneeded("", "bool", {
        "prescale_gradients": DIVIDED,
        "sparse_gradients": "an embedding's gradient is split like its table",
        "disable_allgather": "DeepSpeed reads it no more",
        "dump_state": "print(plan.describe())",
        "wall_clock_breakdown": TYPED, "memory_breakdown": "`jzero.explain(compiled, plan).memory`",
        "dataloader_drop_last": "of your data loader; `plan.place_batch` names a batch that does not divide",
        "graph_harvesting": "the train step is one compiled program",
    }),
    *_unneeded("", "any", {
        "gradient_predivide_factor": DIVIDED,
        "steps_per_print": TYPED, "log_level": "warnings are Python's",
        "vocabulary_size": "DeepSpeed warns where 8 does not divide it; any size is split here",
    }),
    Key("gradient_allreduce_op", "str", NOT_SUPPORTED, "gradients are means: multiply the loss by the devices",
        off=("mean", None)),
    Key("managed_gradient_accumulation", "bool", NOT_SUPPORTED,
        "one call of `jzero.value_and_grad` takes all micro-batches",
        off=(True, None)),
    *_unneeded("", "dict", {
        "aio": NVME_ALONE, "flops_profiler": "`compiled.cost_analysis()`, jax.profiler.trace",
        "comms_logger": "`jzero.explain(compiled, plan)` lists every collective with its bytes",
        "tensorboard": TYPED, "wandb": TYPED, "csv_monitor": TYPED, "comet": TYPED, "timers": TYPED,
        "autotuning": "`jzero plan --search` tries stages and micro-batches without a GPU",
        "compile": "jax.jit compiles the whole train step",
    }),
    # checkpoints
    *_unneeded("checkpoint.", "any", {
        "tag_validation": "a checkpoint is written once, by all processes together",
        "load_universal": "every checkpoint restores into any stage, mesh and number of devices",
        "parallel_write": "every process writes its own part", "writer": "orbax and tensorstore write",
        "checkpoint_serialization": "orbax and tensorstore write",
    }),
    Key("checkpoint.use_node_local_storage", "bool", NOT_SUPPORTED, "checkpoints belong on storage that all hosts see"),
    Key("nebula", "dict", NOT_SUPPORTED, "`jzero.checkpoint.Steps` saves in the background"),
    Key("datastates_ckpt", "any", NOT_SUPPORTED, "`jzero.checkpoint.Steps` saves in the background"),
    # other kinds of parallelism, other libraries
    Key("tensor_parallel", "dict", NOT_SUPPORTED, 'give the params a layout on an axis "model" (Flax metadata, '
        "`param_specs=`): jzero adds its axes on top"),
    Key("sequence_parallel_size", "int", NOT_SUPPORTED, "split the sequence on a mesh axis of your own", off=(1, None)),
    Key("seq_parallel_communication_data_type", "str", NOT_SUPPORTED, "belongs to sequence_parallel_size", off=(None,)),
    Key("data_parallel_size", "int", NOT_NEEDED, "the mesh says it"),
    Key("pipeline", "dict", NOT_SUPPORTED, "there are no pipeline stages; docs/pipeline.md has some of your own"),
    Key("expert_parallel", "dict", NOT_SUPPORTED, "give the experts a layout on a mesh axis of their own"),
    Key("use_data_before_expert_parallelism", "bool", NOT_SUPPORTED, "the order of the mesh's axes says it"),
    Key("elasticity", "dict", NOT_SUPPORTED, "restore on another number of devices, and say the batch yourself"),
    *[Key(name, "dict", NOT_SUPPORTED, text) for name, text in {
        "sparse_attention": "of the model", "progressive_layer_drop": "of the model",
        "compression_training": "of the model", "quantize_training": "of the model",
        "weight_quantization": "of inference", "hybrid_engine": "of inference", "eigenvalue": "of quantize_training",
        "data_efficiency": "of the data loader", "curriculum_learning": "of the data loader",
    }.items()],
]  # fmt: skip

KEYS: dict[str, Key] = {key.name: key for key in _LIST}

SECTIONS = {name.rsplit(".", 1)[0] for name in KEYS if "." in name} | {"zero_optimization"}

# Another name of the same key: aliases of DeepSpeed's fields, and names it has given up.
ALIASES = {
    **{ZERO + k.removeprefix("stage3_"): ZERO + k for k in (
        "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
        "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save",
        "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential",
    )},
    ZERO + "stage3_gather_fp16_weights_on_model_save": ZERO + "stage3_gather_16bit_weights_on_model_save",
    "bfloat16": "bf16",
    "allgather_size": ZERO + "allgather_bucket_size",
}  # fmt: skip

# Without these nobody knows what to train: "auto" is refused.
NEVER_AUTO = (ZERO + "stage", ZERO + "zero_hpz_partition_size", ZERO + "mics_shard_size", OPTIMIZER + "device",
              PARAM + "device", "optimizer.type", "scheduler.type")  # fmt: skip


def key_of(name: str) -> Key:
    """The key of a dotted name; the arguments of optimizers and schedules are checked where they are used."""
    if name not in KEYS:
        return dataclasses.replace(KEYS[name.rsplit(".", 1)[0]], name=name, kind="any")
    return KEYS[name]
