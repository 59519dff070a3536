"""What a user may choose: `ZeroConfig`, checked when it is made."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jzero.core.errors import check_choice, check_dtype, check_flag, check_int, check_kind, nearest, shown

BUCKETS = 16  # into which the params are divided by default
BUCKET_BYTES = 32 * 2**20  # at most, by default
GATHERED_BUCKET_BYTES = 64 * 2**20  # at stage 3
WHOLE_BYTES = 2**30  # of a weight, at stage 3; a larger one is gathered in pieces
LEAST_BUCKET = 4 * 2**20  # at stage 2; the gradients of small models need no order


@dataclasses.dataclass(frozen=True)
class Stage:
    """One row of the ZeRO table: which of the model states is split over the ZeRO axis."""

    params: bool
    grads: bool
    state: bool
    text: str


STAGES = {
    0: Stage(False, False, False, "plain data parallelism"),
    1: Stage(False, False, True, "P_os: optimizer state split"),
    2: Stage(False, True, True, "P_os+g: optimizer state and gradients split"),
    3: Stage(True, True, True, "P_os+g+p: optimizer state, gradients and params split"),
}


@dataclasses.dataclass(frozen=True)
class Effect:
    """From which stage on a field of `ZeroConfig` has an effect, and why it has none below.

    Attributes:
      stage: the first one with an effect.
      why: the reason, for the plan's notes and errors.
      refused: below that stage it is an error to set it.
      where: what it has no effect on below that stage, if it has one elsewhere.
    """

    stage: int
    why: str
    refused: bool = False
    where: str = ""


EFFECTS = {
    "compute_dtype": Effect(
        3,
        "it casts a param on its shard before it is gathered, and only stage 3 gathers on use",
        refused=True,
    ),
    "gather_dtype": Effect(3, "only stage 3 gathers weights", refused=True),
    "reshard_after_forward": Effect(3, "params are whole between steps too", refused=True),
    "kept_gathered_bytes": Effect(3, "params are whole between steps too", refused=True),
    "param_axis": Effect(3, "params are whole"),
    "prefetch": Effect(3, "nothing is gathered on use"),
    "update_dtype": Effect(1, "every device has all new params", refused=True),
    "bucket_bytes": Effect(2, "gradients are reduced by the update, in the order that XLA chooses"),
    "reduce_dtype": Effect(
        2,
        "XLA reduces in the dtype of the matmul that makes a gradient. jzero.value_and_grad honours it",
        where=" on plain jax.grad",
    ),
}

BUFFER_BYTES = 2**30
"""The default of `Offload(buffer_bytes=)`."""

MOMENT_DTYPES = ("int8", "bfloat16", "float32", "float64")
GATHER_DTYPES = ("int8", "float8_e4m3fn")
GRADIENT_CODES = (np.dtype(jnp.int8), np.dtype(jnp.int4))
"""The values of `reduce_dtype` in which gradients travel, but are not summed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offload:
    """Optimizer state and masters in host memory (ZeRO-Offload), weights too, or on disk (ZeRO-Infinity). Hashable.

    Args:
      tier: where masters and moments live. "host": pinned host memory. "disk": files below `path`; the update runs
        outside of the compiled program, as with `update="host"`.
      params: "host": at stage 3 the shards of params, and of their gradients, live in pinned host memory too; a weight
        is fetched and gathered where the model uses it. In the step they are arrays in host memory. "device": they
        stay in device memory.
      update: where the new state is computed. "device": state is fetched, updated and written back, 24 bytes per
        parameter over PCIe for Adam with a master. "host": by the CPU, outside of the compiled program, 4 bytes per
        16-bit parameter: `apply_gradients` (NNX: `optimizer.update`) is called on gradients that a jitted function
        returned. Needs stage 2 or 3. Every param has a master.
      delay: for an update outside of the program. 1: the update of a step runs beside the forward and backward pass of
        the next one, so that params are one step late (ZeRO-Offload's delayed update), and the host has a copy of the
        params too. 0: no delay.
      path: for `tier="disk"`: a folder that does not exist or is empty. Each process writes into a folder of its own in
        it.
      buffer_bytes: for `tier="disk"`: bytes of host memory through which state goes, in each process. None: 1 GiB.
      in_flight_bytes: bytes of one device's state that are on the device at once, as three groups of a third each,
        which are fetched, updated and written. None: a 64th of a device's share of the state, from 64 MiB to 1 GiB.
      prefetch: True: the first groups may be fetched before the gradients are there. That takes in_flight_bytes more at
        the peak of the backward pass, and the update starts without waiting.

    Raises:
      TypeError: a field is of the wrong kind.
      ValueError: tier or update is unknown, a number is out of range, options do not go together.
    """

    tier: str = "host"
    params: str = "device"
    update: str = "device"
    in_flight_bytes: int | None = None
    prefetch: bool = False
    delay: int = 0
    path: str | os.PathLike[str] | None = None
    buffer_bytes: int | None = None

    def __post_init__(self):
        check_choice(self.tier, "tier", ("host", "disk"), where="Offload")
        check_choice(self.params, "params", ("device", "host"), where="Offload")
        check_choice(self.update, "update", ("device", "host"), where="Offload")
        if self.in_flight_bytes is not None:
            check_int(self.in_flight_bytes, "in_flight_bytes", where="Offload", low=1)
        check_flag(self.prefetch, "prefetch", where="Offload")
        check_int(self.delay, "delay", where="Offload", low=0, high=1)
        if self.buffer_bytes is not None:
            check_int(self.buffer_bytes, "buffer_bytes", where="Offload", low=1)
        if self.path is not None:
            check_kind(self.path, "path", (str, os.PathLike), "the path of a folder", where="Offload")
            object.__setattr__(self, "path", os.fspath(self.path))
        self._check_together()

    def _check_together(self):
        disk = self.tier == "disk"
        wrong = ""
        if disk and self.path is None:
            wrong = 'tier="disk" needs path=, the folder for the files'
        elif not disk and (self.path is not None or self.buffer_bytes is not None):
            wrong = 'path and buffer_bytes belong to tier="disk"'
        elif self.delay and not self.outside:
            wrong = 'delay=1 belongs to update="host": inside of the program nothing is late'
        elif self.outside and (self.in_flight_bytes is not None or self.prefetch):
            wrong = "in_flight_bytes and prefetch belong to an update inside of the program, through the device"
        if wrong:
            raise ValueError(f"Offload: {wrong}.")

    @property
    def outside(self) -> bool:
        """The update runs outside of the compiled program."""
        return self.update == "host" or self.tier == "disk"

    @property
    def buffer(self) -> int:
        """Bytes of host memory through which state in files goes, in each process; 0 without files."""
        return (self.buffer_bytes or BUFFER_BYTES) if self.tier == "disk" else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """How a train state is split over a mesh. Immutable and hashable; every field is checked here.

    Args:
      stage: 0 (data parallelism), 1 (optimizer state split), 2 (and gradients), 3 (and params).
      axis: mesh axis, or tuple of axes, that shares optimizer state and gradients.
      batch_axis: mesh axes that split the batch; gradients are reduced over all of them. None: `axis`.
      param_axis: stage 3: mesh axes that share params, a part of `axis` (params within the node, state
        over all). None: `axis`.
      master_dtype: dtype of the master copy of 16-bit params kept in the optimizer state. "auto": float32
        for 16-bit params, no master for wider ones. None: never a master. "remainder": of the float32 master of a
        bfloat16 param only the 16 bits that the param lacks are stored, as int16: 2 bytes per value, not 4, and no bit
        is lost. (Params are then rounded with ties away from zero, and a param that you replace keeps the old
        remainder.)
      compute_dtype: stage 3: params are cast to it on the shard, before they are gathered.
      gather_dtype: stage 3: "int8" or "float8_e4m3fn": weights travel in 8 bits, with one float32 scale per block of
        `quantize_block` values, and the model computes with what arrives. Gradients are those of the weights as they
        are used, and the update changes the exact ones. Or a mapping from mesh axis to dtype: over the other axes
        weights travel as they are, after that. Weights of fewer than 4096 values, and those of which the layout would
        cut a block, travel as they are; `describe` names them. None: all do.
      reduce_dtype: dtype in which gradients are reduced over devices. None: that of the params. `jzero.value_and_grad`
        honours it. (int8 is not one in which they are summed: at stages 2 and 3 gradients of matmuls, convolutions and
        lookups with at least 4096 values travel in 8 bits, with one float32 scale per block of `quantize_block` values,
        and are summed in float32 on the shard: over several axes, or hosts, each value is rounded twice. int4 is int8
        within a host, and 4 bits between hosts.) At stages 2 and 3 plain `jax.grad` through a sharded `apply_fn` or
        `gather_on_use` honours it too, for the weights of matmuls and lookups; a wider one also for biases and scales,
        a narrower one also for convolutions. (Other gradients are reduced in the dtype in which they are made.)
      update_dtype: stages 1 and 2, and stage 3 with `param_axis`: "int8": what an update adds to a bfloat16 param
        travels in 8 bits, with one float32 scale per block of `quantize_block` values, and every device adds it to the
        param that it has. What the codes have lost stays in the state and is sent later: instead of the float32
        master, its difference to the param is stored. (A param that you replace keeps the old difference.) Params of
        fewer than 4096 values, and those of which the layout would cut a block, travel whole. None: all do.
      moment_dtype: dtype in which the optimizer's moments are stored: bfloat16 (rounded so that the mean is right),
        float32 or float64. They are computed in the wider of this dtype and their own. None: their own. int8: in blocks
        with one float32 scale each, computed in float32; leaves of fewer than 4096 values, tables that lookups read and
        leaves of which the plan would cut a block stay in their own dtype, and `describe` names them.
      quantize_block: values that share a scale, of moments, weights and gradients: a power of two of at least 8.
      updates: what the wrapped `update` returns: "deferred", objects that become the new param when they are added to
        the old one; "delta", plain arrays to add.
      offload: "host" or a `jzero.Offload`: optimizer state and masters live in pinned host memory, split as the stage
        says, and are streamed through the device. None: in device memory.
      uneven: what to do with a leaf that divides along no dim, nor along several together: "pad" (its optimizer state
        is stored padded by zeros, and the optimizer sees its own shape; at stage 3 the param is stored in as many parts
        as divide it, or whole), "replicate" (all of it is whole, and the plan lists its bytes) or "error".
      min_shard_bytes: leaves of fewer bytes stay whole, and the plan lists them. 0 splits all. "auto": the largest
        threshold of at most 64 KiB that adds at most 1 % to the optimizer state of a device; the plan has the number.
      bucket_bytes: stages 2 and 3: bytes of whole weights whose gradients are reduced together, and which are gathered
        together at stage 3. Smaller ones share a message, larger ones have their own. About two buckets of whole
        gradients, and at stage 3 `prefetch` + 1 of gathered weights, are alive at once. None: a sixteenth of the
        params, at stage 2 from 4 to 32 MiB, at stage 3 at most 64 MiB.
      prefetch: stage 3: how many buckets ahead of its use a weight is gathered in unrolled code; at least 1.
      logical_axis_rules: pairs (logical name, mesh axis, tuple of axes or None) for the names in Flax metadata and
        `param_specs` that are not mesh axes. As in `flax.linen`, earlier rules go first, and a rule is skipped if its
        axes split another dim of the param already; a dim whose rules are all skipped is whole. A name without a rule
        must be a mesh axis.
      reshard_after_forward: stage 3: True drops a gathered weight after its use, and the backward pass gathers it
        again: 3 Psi on the wire. False keeps it from the forward to the backward pass: 2 Psi, but all params are whole
        at the end of the forward pass, as at stage 2. Between steps they are split in both cases.
      kept_gathered_bytes: stage 3: how many bytes of gathered weights of a device may stay from the forward to the
        backward pass; these are gathered once. The smallest weights come first, a stack of layers as one weight, each
        in the dtype in which the model computes.

    Raises:
      TypeError: a field is of the wrong kind (a bool is not an int).
      ValueError: a field is out of range, is refused at this stage, or does not go with another one.
    """

    stage: int = 2
    axis: str | tuple[str, ...] = "data"
    batch_axis: str | tuple[str, ...] | None = None
    param_axis: str | tuple[str, ...] | None = None
    master_dtype: Any = "auto"
    compute_dtype: Any = None
    gather_dtype: Any = None
    reduce_dtype: Any = None
    update_dtype: Any = None
    moment_dtype: Any = None
    quantize_block: int = 256
    updates: str = "deferred"
    offload: str | Offload | None = None
    uneven: str = "pad"
    min_shard_bytes: int | str = "auto"
    bucket_bytes: int | None = None
    prefetch: int = 1
    reshard_after_forward: bool = True
    kept_gathered_bytes: int = 0
    logical_axis_rules: Sequence[tuple[str, str | tuple[str, ...] | None]] = ()

    def __post_init__(self):
        check_int(self.stage, "stage", where="ZeroConfig", low=0, high=3, remedy="Pass stage=0, 1, 2 or 3.")
        for name in ("axis", "batch_axis", "param_axis"):
            object.__setattr__(self, name, _axes(getattr(self, name), name, optional=name != "axis"))
        for name in ("master_dtype", "compute_dtype", "reduce_dtype", "update_dtype", "moment_dtype"):
            object.__setattr__(self, name, _dtype(getattr(self, name), name))
        object.__setattr__(self, "gather_dtype", _gather_dtype(self.gather_dtype))
        check_int(self.quantize_block, "quantize_block", where="ZeroConfig", low=8)
        if self.updates == "land":
            raise ValueError("ZeroConfig(updates='land'): it is called 'deferred' now, and is the default.")
        check_choice(self.updates, "updates", ("deferred", "delta"), where="ZeroConfig")
        check_choice(self.uneven, "uneven", ("pad", "replicate", "error"), where="ZeroConfig")
        if isinstance(self.min_shard_bytes, str):
            check_choice(self.min_shard_bytes, "min_shard_bytes", ("auto",), where="ZeroConfig")
        else:
            check_int(self.min_shard_bytes, "min_shard_bytes", where="ZeroConfig", low=0)
        check_int(self.prefetch, "prefetch", where="ZeroConfig", low=1)
        check_flag(
            self.reshard_after_forward, "reshard_after_forward", where="ZeroConfig",
            remedy="To gather weights over fewer devices pass param_axis=.",
        )  # fmt: skip
        check_int(self.kept_gathered_bytes, "kept_gathered_bytes", where="ZeroConfig", low=0)
        if self.bucket_bytes is not None:
            check_int(self.bucket_bytes, "bucket_bytes", where="ZeroConfig", low=1)
        object.__setattr__(self, "offload", _offload(self.offload))
        object.__setattr__(self, "logical_axis_rules", _rules(self.logical_axis_rules))
        self._check_together()

    def _check_together(self):
        if self.moment_dtype is not None and self.moment_dtype.name not in MOMENT_DTYPES:
            raise ValueError(
                f"ZeroConfig(moment_dtype={self.moment_dtype.name}): squares of gradients are far below what it can "
                f"hold. Pass one of {', '.join(MOMENT_DTYPES)}."
            )
        if self.kept_gathered_bytes and not self.reshard_after_forward:
            raise ValueError(
                f"ZeroConfig(kept_gathered_bytes={self.kept_gathered_bytes}) has no effect beside "
                "reshard_after_forward=False, which keeps all gathered weights. Leave one of the two out."
            )
        if self.quantize_block & (self.quantize_block - 1):
            raise ValueError(f"ZeroConfig(quantize_block={self.quantize_block}) must be a power of two, such as 256.")
        if self.reduces_in_codes and not self.row.grads:
            raise ValueError(
                f"ZeroConfig(reduce_dtype={self.reduce_dtype}) needs stage 2 or 3: at stage {self.stage} gradients "
                "stay whole, and codes of different scales cannot be summed. Pass stage=2."
            )
        if self.param_axis is not None and not set(self.param_axes) <= set(self.axes):
            raise ValueError(
                f"ZeroConfig(param_axis={self.param_axis!r}) is not within axis={self.axis!r}: params are split "
                "over a part of the axes that share the optimizer state."
            )
        unknown = sorted({a for a, _ in self.gathers_in_codes if a not in self.param_axes})
        if self.row.params and unknown:
            raise ValueError(
                f"ZeroConfig(gather_dtype=...): weights are not gathered over {', '.join(map(repr, unknown))}, but "
                f"over {', '.join(map(repr, self.param_axes))}. Name these axes."
            )
        for name, axes in self.logical_axis_rules:
            if set(_as_tuple(axes or ())) & set(self.axes):
                raise ValueError(
                    f"ZeroConfig(logical_axis_rules=...): the rule ({name!r}, {axes!r}) names axis={self.axis!r}, over "
                    f"which jzero splits each leaf as the stage says. Pass ({name!r}, None)."
                )
        if self.params_on_host:
            self._check_params_on_host()
        if self.updates_outside:
            self._check_outside()
        if self.update_dtype is not None:
            self._check_update_dtype()
        if self.master_dtype == "remainder" and self.updates == "delta":
            raise ValueError(
                'ZeroConfig(master_dtype="remainder") and updates="delta" exclude each other: a difference is '
                "rounded again when it is added, and the param would no longer match its remainder. Leave updates out."
            )
        for name, effect in self._without_effect().items():
            if effect.refused:
                value = _text(getattr(self, name))
                raise ValueError(
                    f"ZeroConfig({name}={value}) has no effect at stage {self.stage}: {effect.why}. Leave it out or "
                    f"pass stage={effect.stage}."
                )

    def _check_params_on_host(self):
        where, why = 'ZeroConfig(offload=Offload(params="host"))', ""
        if not self.row.params:
            why = f"needs stage 3: at stage {self.stage} the model reads whole params on the device. Pass stage=3"
        elif not self.reshard_after_forward or self.kept_gathered_bytes:
            field = "kept_gathered_bytes" if self.kept_gathered_bytes else "reshard_after_forward=False"
            why = f"fetches a weight for each use, and {field} keeps weights on the device. Leave one of the two out"
        elif self.updates == "delta":
            why = (
                'and updates="delta" exclude each other: JAX has no sum of a param in host memory and a difference in '
                "device memory. Leave updates out"
            )
        if why:
            raise ValueError(f"{where} {why}.")

    def _check_outside(self):
        where, why = 'an update outside of the program (Offload(update="host") or tier="disk")', ""
        if not self.row.grads:
            why = f"needs stage 2 or 3: at stage {self.stage} gradients leave the program whole. Pass stage=2"
        elif self.updates == "delta":
            why = 'and updates="delta" exclude each other: what comes back is the new param. Leave updates out'
        elif self.master_dtype is None:
            why = "keeps a master of every param. Leave master_dtype out"
        elif self.master_dtype == "remainder":
            why = (
                "has no params beside its masters, and a remainder needs its param: moving the param to the host in "
                "each step would cost the bytes that it saves. Leave master_dtype out"
            )
        elif self.moment_dtype == jnp.int8:
            why = "keeps moments in 16 bits or more. Pass moment_dtype=\"bfloat16\""
        if why:
            raise ValueError(f"ZeroConfig: {where} {why}.")

    def _check_update_dtype(self):
        where, why = "ZeroConfig(update_dtype=int8)", ""
        if self.row.params and set(self.param_axes) == set(self.axes):
            why = (
                "has no effect where params are split like their optimizer state: no new param is gathered. Leave it "
                "out, pass stage=2, or name the axes of a host as param_axis"
            )
        elif self.updates == "delta":
            why = 'and updates="delta" exclude each other: a difference in codes is added by jzero. Leave updates out'
        elif self.master_dtype not in ("auto", jnp.float32):
            why = "stores in float32 what the codes have lost, in place of the master. Leave master_dtype out"
        elif self.updates_outside or self.params_on_host:
            why = "needs an update and params in device memory. Leave one of update_dtype and offload out"
        if why:
            raise ValueError(f"{where} {why}.")

    def _without_effect(self) -> dict[str, Effect]:
        """The fields that are not at their default and have no effect at this stage."""
        ignored = (name for name in EFFECTS if getattr(self, name) != getattr(ZeroConfig, name))
        return {name: EFFECTS[name] for name in ignored if self.stage < EFFECTS[name].stage}

    def without_effect(self) -> list[str]:
        """For each field that is set and has no effect, a line that says so."""
        lines = [
            f"{name}={_text(getattr(self, name))} has no effect{effect.where} at stage {self.stage}: {effect.why}."
            for name, effect in self._without_effect().items()
        ]
        in_blocks = self.moment_dtype == jnp.int8 or self.reduces_in_codes
        in_blocks = in_blocks or self.gather_dtype is not None or self.update_dtype is not None
        if self.quantize_block != ZeroConfig.quantize_block and not in_blocks:
            lines.append(
                f"quantize_block={self.quantize_block} has no effect without gather_dtype and update_dtype, with a "
                'moment_dtype other than "int8" and a reduce_dtype other than "int8" or "int4".'
            )
        return lines

    @property
    def row(self) -> Stage:
        """The stage's row in the table."""
        return STAGES[self.stage]

    @property
    def offload_options(self) -> Offload | None:
        """Where optimizer state lives; None: in device memory."""
        assert not isinstance(self.offload, str)
        return self.offload

    @property
    def params_on_host(self) -> bool:
        """Shards of params and of gradients live in host memory."""
        return self.offload_options is not None and self.offload_options.params == "host"

    @property
    def updates_outside(self) -> bool:
        """The update runs outside of the compiled program, on the host."""
        return self.offload_options is not None and self.offload_options.outside

    @property
    def in_files(self) -> bool:
        """Optimizer state lives in files."""
        return self.offload_options is not None and self.offload_options.tier == "disk"

    @property
    def streams(self) -> bool:
        """Optimizer state lives in pinned host memory and goes through the device, in the compiled program."""
        return self.offload_options is not None and not self.offload_options.outside

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that share optimizer state and gradients."""
        return _as_tuple(self.axis)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the batch."""
        return self.axes if self.batch_axis is None else _as_tuple(self.batch_axis)

    @property
    def param_axes(self) -> tuple[str, ...]:
        """Mesh axes that share params at stage 3."""
        return self.axes if self.param_axis is None else _as_tuple(self.param_axis)

    @property
    def reduces_in_codes(self) -> bool:
        """True where gradients travel in codes, at the stages that shard them."""
        return self.reduce_dtype in GRADIENT_CODES

    @property
    def gathers_in_codes(self) -> tuple[tuple[str, np.dtype], ...]:
        """The axes over which weights are gathered in codes of 8 bits, and the dtype of these, in this order."""
        if self.gather_dtype is None:
            return ()
        if isinstance(self.gather_dtype, tuple):
            return self.gather_dtype
        return tuple((axis, self.gather_dtype) for axis in self.param_axes)

    @property
    def gathered_first(self) -> tuple[str, ...]:
        """The axes over which weights are gathered in hops of their own; empty where one hop gathers over all."""
        return tuple(a for a, _ in self.gathers_in_codes) if isinstance(self.gather_dtype, tuple) else ()

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """`param_axes` in the order in which they cut a dim.

        The axes that are gathered first are the innermost ones: what they gather is then in one piece.
        """
        first = self.gathered_first
        return (*(a for a in self.param_axes if a not in first), *reversed(first))

    def master_for(self, dtype: DTypeLike) -> np.dtype | None:
        """The dtype of the master copy of a param of `dtype`; None if it needs none."""
        dtype = check_dtype(dtype, "dtype", where="ZeroConfig.master_for", floating=False)
        if self.master_dtype is None:
            return None
        wanted = jnp.dtype(jnp.float32) if isinstance(self.master_dtype, str) else self.master_dtype
        return wanted if wanted.itemsize > dtype.itemsize else None

    @property
    def paired_by(self) -> str | None:
        """The field by which masters of bfloat16 params are stored as what the params lack; None: they are whole."""
        if isinstance(self.master_dtype, str) and self.master_dtype == "remainder":
            return "master_dtype"
        return None if self.update_dtype is None else "update_dtype"

    def adam_bytes(self, dtype: DTypeLike, *, wide: bool = False) -> int:
        """Bytes per value of a param of `dtype` in the state of Adam: two moments, and the master if it has one.

        An update outside of the program keeps a master of every param. With 8-bit moments their scales are left out;
        `wide`: of a param whose moments stay in their own dtype.
        """
        dtype = check_dtype(dtype, "dtype", where="ZeroConfig.adam_bytes", floating=False)
        master = self.master_for(dtype) or (dtype if self.updates_outside else None)
        moment = (None if wide and self.moment_dtype == jnp.int8 else self.moment_dtype) or master or dtype
        remainder = self.paired_by == "master_dtype" and dtype == jnp.bfloat16
        stored = 2 if remainder else master.itemsize if master else 0
        return 2 * moment.itemsize + stored


def make_config(config: ZeroConfig | None, fields: dict[str, Any], *, where: str) -> ZeroConfig:
    """The config of a call, from `config=` or from its fields as keywords.

    Raises:
      TypeError: both are given, `config` is not a ZeroConfig, or a field has an unknown name.
    """
    known = [f.name for f in dataclasses.fields(ZeroConfig)]
    for name in fields:
        if name not in known:
            raise TypeError(
                f"{where}: unknown config field {name!r}.{nearest(name, known)} The fields are {', '.join(known)}."
            )
    if config is None:
        return ZeroConfig(**fields)
    if not isinstance(config, ZeroConfig):
        got = type(config).__name__
        raise TypeError(f"{where}: config must be a jzero.ZeroConfig, not {got}. Name it: stage=2, mesh=mesh, ...")
    if fields:
        raise TypeError(f"{where}: pass config= or its fields ({', '.join(fields)}), not both.")
    return config


def _text(value: Any) -> str:
    return value.name if isinstance(value, np.dtype) else repr(value)


def _as_tuple(axis: str | Sequence[str]) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else tuple(axis)


def _offload(value: Any) -> Offload | None:
    if value is None or isinstance(value, Offload):
        return value
    check_kind(value, "offload", str, '"host", a jzero.Offload or None', where="ZeroConfig")
    if value == "disk":
        raise ValueError("ZeroConfig: offload='disk' names no folder. Pass jzero.Offload(tier='disk', path=...).")
    check_choice(value, "offload", ("host",), where="ZeroConfig")
    return Offload()


def _axes(value: Any, name: str, *, optional: bool) -> str | tuple[str, ...] | None:
    if value is None and optional:
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, (tuple, list)) and value and all(isinstance(v, str) for v in value):
        if len(set(value)) != len(value):
            raise ValueError(f"ZeroConfig({name}={value!r}): an axis is named twice.")
        return tuple(value)
    raise TypeError(
        f"ZeroConfig({name}={shown(value)}): {name} must be the name of a mesh axis or a tuple of names."
    )


def _rules(value: Any) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    """Rules as tuples, so that they can be hashed."""
    pairs = list(value) if isinstance(value, (tuple, list)) else [value]
    if not all(isinstance(r, (tuple, list)) and len(r) == 2 and isinstance(r[0], str) for r in pairs):
        raise TypeError(
            f"ZeroConfig(logical_axis_rules={shown(value)}): logical_axis_rules must be a sequence of pairs "
            '(logical name, mesh axis or None), such as [("mlp", "model"), ("embed", None)].'
        )
    return tuple((name, _axes(axes or None, "logical_axis_rules", optional=True)) for name, axes in pairs)


def _gather_dtype(value: Any) -> np.dtype | tuple[tuple[str, np.dtype], ...] | None:
    """The dtype of codes, or (axis, dtype) pairs, which can be hashed."""
    if value is None:
        return None
    if isinstance(value, (Mapping, tuple)):
        pairs = tuple(value.items() if isinstance(value, Mapping) else value)
        if not pairs or not all(isinstance(row, tuple) and len(row) == 2 and isinstance(row[0], str) for row in pairs):
            raise TypeError(
                f"ZeroConfig(gather_dtype={shown(value)}): a mapping must have the names of mesh axes as keys and "
                "dtypes as values, such as {'host': 'int8'}."
            )
        return tuple((axis, _code_dtype(dtype)) for axis, dtype in pairs)
    return _code_dtype(value)


def _code_dtype(value: Any) -> np.dtype:
    rule = "a dtype, a mapping from mesh axis to dtype, or None"
    dtype = check_dtype(value, "gather_dtype", where="ZeroConfig", rule=rule, example="'int8'", floating=False)
    if dtype.name not in GATHER_DTYPES:
        raise ValueError(
            f"ZeroConfig(gather_dtype={dtype.name}) must be one of {', '.join(GATHER_DTYPES)}. To gather weights in 16 "
            "bits pass compute_dtype=."
        )
    return dtype


def _dtype(value: Any, name: str) -> np.dtype | str | None:
    words = ("auto", "remainder") if name == "master_dtype" else ()
    if value is None or (isinstance(value, str) and value in words):
        return value
    rule = "a dtype, 'auto', 'remainder' or None" if words else "a dtype or None"
    example = "'int8'" if name == "update_dtype" else "jnp.bfloat16"
    floating = name not in ("moment_dtype", "reduce_dtype", "update_dtype")
    dtype = check_dtype(value, name, where="ZeroConfig", rule=rule, example=example, floating=floating)
    if name == "update_dtype" and dtype != jnp.int8:
        raise ValueError(f"ZeroConfig(update_dtype={shown(value)}) must be int8 or None.")
    if name == "reduce_dtype" and not jnp.issubdtype(dtype, jnp.floating) and dtype not in GRADIENT_CODES:
        raise ValueError(f"ZeroConfig(reduce_dtype={shown(value)}) must be a floating dtype, int8 or int4.")
    return dtype
