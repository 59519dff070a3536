"""`remat`: blocks that run again in the backward pass, and what they keep of their input (P_a of ZeRO-R)."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.core.block_input import InputStorage, KeepsInputs, begin, end
from jzero.core.errors import (
    check_choice,
    check_flag,
    check_function,
    check_int,
    check_ints,
    check_kind,
    division,
    shown,
    typed_shape,
)
from jzero.core.nnx_modules import has_module, is_module_class
from jzero.core.types import PyTree
from jzero.core.xla_options import host_loop_limit, warn_of_pipelined_offload
from jzero.layout.mesh import in_shard_map
from jzero.layout.placement import check_host
from jzero.layout.specs import axis_size, check_axes, make_spec, named_on
from jzero.sharding import Plan, check_plan

Subject = type | Callable[..., Any]
"""A class of modules, or a function."""
MOST_DIMS = 64  # of a numpy array
WHERE = 'jzero.remat(offload="host")'


def remat(
    subject: Subject,
    plan: Plan,
    *,
    partition: str | Sequence[str] | None = None,
    offload: str | None = None,
    policy: Callable[..., Any] | None = None,
    dim: int = 1,
    argnums: int | Sequence[int] | None = None,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
) -> Any:
    """A block that runs again in the backward pass and keeps its input split, or in host memory, until then.

    It takes the place of `nn.remat`, `nnx.remat` and `jax.checkpoint`, also under a scan over layers: the same params,
    the same values. Without `partition` and `offload` it is what they are.

    Args:
      subject: a linen Module class, an NNX Module class (its `__call__` then runs again), or a function.
      plan: from `jzero.make_plan` or `jzero.plan_of(state)`, at any stage; gives the mesh.
      partition: mesh axis, or tuple of axes, over which the devices hold the same activations (tensor parallelism):
        each keeps its slice. Not an axis that splits the batch. None: kept as it is laid out.
      offload: "host": kept in pinned host memory: written while the block runs, fetched when the cotangent of its
        result is there, before the second run starts. None: kept in device memory.
      policy: what else to keep: any of `jax.checkpoint_policies`; it may offload named activations. None: nothing,
        all is computed again. At stage 3 gathered weights are never kept, whatever the policy says.
      dim: the dim of the input that `partition` splits: 1, the sequence in [batch, sequence, features]. The size of
        `partition` must divide it. It must not be split already, and not be the batch dim.
      argnums: which arguments are the block's input; `self` or the module counts as 0. Their floating-point arrays are
        kept as said here; other arguments as they are. None: the first argument that is such an array.
      prevent_cse, static_argnums: as in `jax.checkpoint`. `prevent_cse=False` is for a block in a scan.

    Returns:
      A Module class or a function that is called like `subject`.

    Raises:
      TypeError: `plan` is not a Plan, or an argument is of the wrong kind.
      ValueError: an axis that is not in the mesh or that splits the batch; an `offload` that is not "host", or devices
        without pinned host memory. When called: no argument is a floating-point array, or `argnums` is out of range.
        When differentiated: the dim is not there or not divisible.
      NotImplementedError: when differentiated: `offload` in a scan, on GPUs with jaxlib before 0.11.2, whose XLA gets
        the gradients wrong (openxla/xla pull request 46231).

    Cost:
      Per device and block, with A the bytes of its input on a device and m the size of `partition`: A / m kept instead
      of A, one all-gather more (A (m-1)/m sent) in the backward pass; with `offload` nothing in device memory but two
      inputs on their way, and A / m over PCIe each way.

    References:
      Rajbhandari et al., ZeRO (arXiv:1910.02054), section 6.1: partitioned activation checkpointing, P_a and P_a+cpu.
    """
    where = "jzero.remat"
    check_plan(plan, where=where)
    if not _is_subject(subject):
        raise TypeError(f"jzero.remat: {shown(subject)} is neither a Module class nor a function.")
    check_function(policy, "policy", optional=True, remedy="Pass one of jax.checkpoint_policies.", where=where)
    check_choice(offload, "offload", ("host",), optional=True, where=where)
    check_flag(prevent_cse, "prevent_cse", where=where)
    check_int(dim, "dim", low=-MOST_DIMS, high=MOST_DIMS, where=where)
    if offload is not None:
        check_host(plan.mesh, f"jzero.remat(offload={offload!r})")
    block = _Block(
        subject, plan, _axes(partition, plan), offload is not None, dim, prevent_cse,
        None if argnums is None else check_ints(argnums, "argnums", where=where),
        check_ints(static_argnums, "static_argnums", where=where),
    )  # fmt: skip
    return block.wrapped(KeepsInputs(policy))


def _axes(partition: str | Sequence[str] | None, plan: Plan) -> tuple[str, ...]:
    """The axes of `partition`, which the mesh has and the batch leaves whole."""
    if partition is None:
        return ()
    rule = "the name of a mesh axis or a tuple of names"
    check_kind(partition, "partition", (str, tuple, list), rule, where="jzero.remat", optional=True)
    axes = (partition,) if isinstance(partition, str) else tuple(partition)
    check_axes(axes, plan.mesh, where=f"jzero.remat(partition={partition!r})")
    for name in axes:
        if name in plan.batch_axes:
            raise ValueError(
                f"jzero.remat: partition axis {name!r} splits the batch already (batch axes {plan.batch_axes}), so "
                f"its devices hold different activations. Pass a tensor-parallel axis of {dict(plan.mesh.shape)}."
            )
    if not axes or len(set(axes)) != len(axes):
        raise ValueError(f"jzero.remat(partition={partition!r}): name each axis once, or pass None.")
    return axes


@dataclasses.dataclass(frozen=True)
class _Block:
    """The checked arguments of `remat`."""

    subject: Subject
    plan: Plan
    axes: tuple[str, ...]
    host: bool
    dim: int
    prevent_cse: bool
    argnums: tuple[int, ...] | None
    static_argnums: tuple[int, ...]

    def wrapped(self, policy: KeepsInputs) -> Any:
        """The subject with its transformation."""
        options = {"policy": policy, "prevent_cse": self.prevent_cse}
        if is_module_class(self.subject, "flax.linen"):
            return self.linen(options)
        options["static_argnums"] = self.static_argnums
        if is_module_class(self.subject):
            call = self.marked(self.subject.__call__)
            return _nnx_class(self.subject, sys.modules["flax.nnx"].remat(call, **options))
        fn = self.marked(self.subject)

        @functools.wraps(self.subject)
        def run(*args, **kwargs):
            of_modules = has_module((args, kwargs))
            transform = sys.modules["flax.nnx"].remat if of_modules else jax.checkpoint
            return transform(fn, **options)(*args, **kwargs)

        return run

    def linen(self, options: dict[str, Any]) -> Any:
        """As `nn.remat` does it, with the input marked inside of the region."""
        from flax.core import lift
        from flax.linen.transforms import lift_transform

        def checkpoint(fn, **options):  # the class gets this name in front of its own, as with nn.remat
            return lift.checkpoint(self.marked(fn), **options)

        static = tuple(i - 1 for i in self.static_argnums)  # lifted functions do not count `self`
        return lift_transform(checkpoint, self.subject, static_argnums=static, **options)

    def marked(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function with its input and its result marked, to be traced inside of the region."""
        if not (self.axes or self.host):
            return fn

        @functools.wraps(fn)
        def region(*args, **kwargs):
            tokens = []

            def mark(x: Any) -> Any:
                if not _is_floating(x):
                    return x
                x, _, token = begin(x, self.storage(x))
                tokens.append(token)
                return x

            marked = list(args)
            for i in self.inputs(args):
                marked[i] = jax.tree.map(mark, args[i])
            out = fn(*marked, **kwargs)
            return _with_end(out, tokens) if self.prevent_cse else out  # [Note: the boundary of a block]

        return region

    def inputs(self, args: Sequence[PyTree]) -> Sequence[int]:
        """The positions of the block's input."""
        floating = [i for i, x in enumerate(args) if _is_floating(x)]
        if self.argnums is not None and all(-len(args) <= i < len(args) for i in self.argnums):
            asked = [args[i] for i in self.argnums]
            if any(map(_is_floating, jax.tree.leaves(asked))):
                return self.argnums
        if not floating or self.argnums is not None:
            raise ValueError(
                f"jzero.remat: what is the block's input? argnums={self.argnums}, and of its {len(args)} positional "
                f"arguments {len(floating)} are floating-point arrays. Pass its position as argnums=; "
                "`self` counts as 0."
            )
        return floating[:1]

    def storage(self, x: jax.Array) -> InputStorage:
        """How this input is kept. An input that cannot be split raises only when it is kept, so `init` still runs."""
        platform = self.plan.mesh.devices.flat[0].platform
        limit = host_loop_limit(platform, WHERE) if self.host else ""
        if self.host:
            warn_of_pipelined_offload(platform, "a block's input")
        if not self.axes:
            return InputStorage(None, None, 0, self.host, loop_limit=limit)
        parts = axis_size(self.plan.mesh, self.axes)
        there, refused = -x.ndim <= self.dim < x.ndim, ""
        if not there or x.shape[self.dim] % parts:
            why = division(x.shape[self.dim], parts) if there else f"it has {x.ndim} dims"
            axes = ", ".join(map(repr, self.axes))
            refused = (
                f"jzero.remat: {axes} ({parts} devices) cannot split dim {self.dim} of the block's input "
                f"{typed_shape(x)}: {why}. Pass a dim= that {parts} divides, or pad the input."
            )
        context = jax.sharding.get_abstract_mesh()
        mesh: Any = context if in_shard_map() else self.plan.array_mesh
        names = named_on(make_spec([self.axes]), mesh)[0]
        return InputStorage(mesh, names, self.dim % x.ndim if there else 0, self.host, refused, limit)


def _nnx_class(subject: type, call: Callable[..., Any]) -> type:
    """A subclass with another `__call__`."""
    names = {name: getattr(subject, name) for name in ("__doc__", "__qualname__", "__module__")}
    body = {**names, "__call__": lambda self, *args, **kwargs: call(self, *args, **kwargs)}
    return type(subject)(subject.__name__, (subject,), body)


def _with_end(out: PyTree, tokens: Sequence[jax.Array]) -> PyTree:
    """The result of a block, with its first floating-point array tied to what the block has kept."""
    done = not tokens

    def visit(x: PyTree) -> PyTree:
        nonlocal done
        if not done and _is_floating(x):
            done = True
            return end(x, tokens)
        if type(x) in (tuple, list):
            return type(x)(visit(v) for v in x)
        return {k: visit(v) for k, v in x.items()} if type(x) is dict else x

    return visit(out)


def _is_floating(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray)) and x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.floating)


def _is_subject(x: Any) -> bool:
    """True for a class of modules or a function; not for a module, which is callable too."""
    packages = ("flax.linen", "flax.nnx")
    if isinstance(x, type):
        return any(is_module_class(x, p) for p in packages)
    return callable(x) and not any(is_module_class(type(x), p) for p in packages)
