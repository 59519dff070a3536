"""The subject of a job: the creation function, the step and the batch, and what compiling them for a pod gives."""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jzero.cli import presets
from jzero.cli.inputs import (
    InputError,
    check_creator,
    check_step,
    load_function,
    names_function,
    parse_batch,
    signature,
)
from jzero.cli.job import Job
from jzero.comm.uses import Uses
from jzero.config import ZeroConfig
from jzero.core.errors import division, listing, typed_shape
from jzero.core.random_keys import is_key
from jzero.core.types import PyTree
from jzero.flax.adapters import is_pair
from jzero.flax.shard import abstract, plan_of
from jzero.layout.specs import axis_size
from jzero.proof.pod import Pod, pod
from jzero.proof.transformer import Transformer
from jzero.proof.uses import param_uses
from jzero.sharding import Plan

PACKAGE = str(Path(__file__).parents[1])


@dataclasses.dataclass(frozen=True)
class Subject:
    """What a job compiles, for any stage and any micro-batch.

    Attributes:
      create: makes the state.
      step: the train step.
      batch: the arguments that follow the state, without shardings.
      trainable: a function of a path and a leaf, whether this param is trained; None: what the optimizer says.
      pod, mesh: where it is compiled for.
      job: what was asked.
      model: sizes for the activations, of a preset.
    """

    create: Callable[[], PyTree]
    step: Callable[..., Any]
    batch: tuple[PyTree, ...]
    trainable: Callable[..., bool] | None
    pod: Pod
    mesh: Mesh
    job: Job
    model: Transformer | None

    @classmethod
    def of(cls, job: Job) -> Subject:
        """Loads and checks everything that a job names.

        Raises:
          InputError, ValueError, TypeError: something cannot be used.
        """
        machine = pod(job.gpu, hosts=job.hosts, gpus_per_host=job.gpus_per_host)
        config = job.config()
        mesh = machine.mesh(job.mesh or {config.axes[0]: len(machine.devices)})
        missing = [a for a in (*config.axes, *config.batch_axes) if a not in mesh.axis_names]
        if missing:
            raise InputError(
                f"--axis, --batch-axis: {missing[0]!r} is not an axis of the mesh {dict(mesh.shape)}."
            )
        if job.preset is not None:
            return cls._of_preset(job, machine, mesh, config)
        assert job.create is not None
        assert job.step is not None
        assert job.batch is not None
        create, step = load_function(job.create, "--create"), load_function(job.step, "--step")
        check_creator(create, job.create)
        trainable = None if job.trainable is None else load_function(job.trainable, "--trainable")
        return cls(create, step, tuple(_batch(job.batch)), trainable, machine, mesh, job, None)

    @classmethod
    def _of_preset(cls, job: Job, machine: Pod, mesh: Mesh, config: ZeroConfig) -> Subject:
        assert job.preset is not None
        preset = dataclasses.replace(presets.PRESETS[job.preset], tiled_loss=job.tiled_loss)
        seq = job.seq or preset.seq
        parts = axis_size(mesh, config.batch_axes)
        tokens = jax.ShapeDtypeStruct((job.accumulate * job.batch_per_gpu * parts, seq + 1), "int32")
        model = preset.transformer(seq=seq, batch=job.batch_per_gpu)
        create = presets.creator(preset, seq=seq)
        step = presets.gradient_step if config.updates_outside else presets.train_step
        step = functools.partial(step, accumulate=job.accumulate)
        return cls(create, step, ({"tokens": tokens},), None, machine, mesh, job, model)

    def abstract(self, stage: int, mesh: Mesh) -> PyTree:
        """The abstract state at a stage on a mesh."""
        return abstract(self.create, self.job.config(stage=stage), mesh=mesh, trainable=self.trainable)

    def state(self, stage: int) -> tuple[PyTree, Plan]:
        """The abstract state at a stage, and its plan.

        Raises:
          InputError: the mesh does not divide the batch, or the step cannot take the state first.
        """
        state = _phrased(lambda: self.abstract(stage, self.mesh), "--create", str(self.job.create))
        plan = plan_of(state)
        names = [*(["model", "optimizer"] if is_pair(state) else ["state"]), *self._batch_names()]
        check_step(self.step, str(self.job.step), names)
        self._check_batch(plan)
        return state, plan

    def _batch_names(self) -> list[str]:
        return ["batch"] if len(self.batch) == 1 else [f"batch_{i}" for i in range(len(self.batch))]

    def _check_batch(self, plan: Plan) -> None:
        parts = plan.batch_parts
        leaves = [x for x in jax.tree.leaves(self.batch) if _is_split(x)]
        bad = [(typed_shape(x), division(x.shape[0], parts))
               for x in leaves if x.shape[0] % parts]  # fmt: skip
        if bad:
            size = (int(bad[0][1].split()[0]) // parts + 1) * parts
            raise InputError(
                f"--batch: {parts} devices cannot split {len(bad)} of {len(leaves)} arrays evenly:\n"
                f"{listing(bad)}\nMake the leading dim a multiple of {parts}, {size} for example."
            )

    @property
    def micro_batch(self) -> int:
        """Examples of a micro-batch on one device."""
        sizes = [x.shape[0] for x in jax.tree.leaves(self.batch) if _is_split(x)]
        config = self.job.config()
        return sizes[0] // (axis_size(self.mesh, config.batch_axes) * self.job.accumulate) if sizes else 0

    def tokens(self, uses: Uses) -> int | None:
        """Tokens of a step over all devices: the most that it looks up in one param. None: it looks up no sequences."""
        if self.model is not None:
            return self.batch[0]["tokens"].shape[0] * self.model.seq
        rows = max((use.rows for some in uses.values() for use in some), default=0) * uses.micro_batches
        examples = max((x.shape[0] for x in jax.tree.leaves(self.batch) if _is_split(x)), default=0)
        return rows if rows > examples else None

    def uses(self, state: PyTree, plan: Plan) -> Uses:
        """What the step does with each param."""
        args = state if is_pair(state) else (state,)
        return self._step_phrased(lambda: param_uses(self.step, *args, *self.batch, plan=plan), args, self.batch)

    def _step_phrased(self, call: Callable[[], Any], args: tuple[PyTree, ...], batch: tuple[PyTree, ...]) -> Any:
        kinds = ", ".join(_kinds(args, batch))
        return _phrased(call, "--step", f"{self.job.step}: {signature(self.step)} called with ({kinds})")

    def compile(
        self, state: PyTree, plan: Plan, micro_batch: int, *, buffers: bool = False
    ) -> jax.stages.Compiled:
        """The step compiled for a micro-batch of that many examples per device; `buffers` as of `pod.compile`."""
        parts = plan.batch_parts * self.job.accumulate
        first = self.micro_batch * parts

        def resized(x):
            if not _is_split(x) or x.shape[0] != first:
                return x
            return jax.ShapeDtypeStruct((micro_batch * parts, *x.shape[1:]), x.dtype)

        batch = jax.tree.map(resized, self.batch)
        args = state if is_pair(state) else (state,)
        jitted = hasattr(self.step, "lower")
        keeps = jitted or plan.config.updates_outside  # the state is not returned: donating it would free nothing
        donate = () if keeps else tuple(range(len(args)))
        compile_step = functools.partial(
            self.pod.compile, self.step, *args, *batch, donate_argnums=donate, plan=plan, buffers=buffers
        )
        return self._step_phrased(compile_step, args, batch)


def _batch(text: str) -> list[PyTree]:
    """The batch that `--batch` describes, or what the function that it names returns."""
    if not names_function(text):
        return parse_batch(text)
    made = load_function(text, "--batch")()
    return list(made) if isinstance(made, tuple) else [made]


def _is_split(leaf: jax.ShapeDtypeStruct) -> bool:
    return leaf.ndim > 0 and not is_key(leaf)


def _kinds(args: tuple[PyTree, ...], batch: tuple[PyTree, ...]) -> list[str]:
    shown = [", ".join(typed_shape(x) for x in jax.tree.leaves(b)[:3]) for b in batch]
    return [*(type(a).__name__ for a in args), *shown]


def _phrased(call: Callable[[], Any], flag: str, what: str) -> Any:
    """What `call` returns; errors of the user's function name the line in their code."""
    try:
        return call()
    except InputError:
        raise
    except NotImplementedError as error:
        raise InputError(f"{flag} {what}: {error}") from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        foreign = (PACKAGE, "site-packages", "<frozen")
        ours = [f for f in frames if not any(place in f.filename for place in foreign)]
        place = f"\n  at {Path(ours[-1].filename).name}:{ours[-1].lineno}: {ours[-1].line}" if ours else ""
        first = str(error).strip().split("\n\n")[0][:2000]
        rule = (
            "A step takes the state first, then the batch, and returns the new state (for an update outside of the "
            "program, the gradients). One that needs the plan takes it from the state: jzero.plan_of(state), of an NNX "
            "pair jzero.plan_of(optimizer)."
        )
        failed = f"{flag} {what} failed: {type(error).__name__}: {first}{place}\n"
        raise InputError(failed + (rule if flag == "--step" else "")) from error
