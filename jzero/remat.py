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
from jax.sharding import NamedSharding

from jzero.boundary import KeepsInputs, Kept, begin, end
from jzero.errors import division, nearest, typed_shape
from jzero.mesh import in_shard_map
from jzero.modules import has_module
from jzero.sharding import Plan, check_host
from jzero.specs import P, axis_size, make_spec, named_on


def remat(
    subject: Any,
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
      subject: a linen Module class, an NNX Module class (its `__call__` then runs again), or a function, of modules too.
      plan: from `jzero.make_plan` or `jzero.plan_of(state)`, at any stage; gives the mesh.
      partition: mesh axis, or tuple of axes, over which the devices hold the same activations (tensor parallelism):
        each keeps its slice. Not an axis that splits the batch. None: kept as it is laid out.
      offload: "host": kept in pinned host memory: written while the block runs, fetched when the cotangent of its
        result is there. None: in device memory.
      policy: what to keep besides, any of `jax.checkpoint_policies`; it may offload named activations. None: nothing,
        all is computed again. At stage 3 gathered weights are never kept, whatever it says.
      dim: the dim of the input that `partition` splits: 1, the sequence in [batch, sequence, features]. It must be
        divisible by the axes, be whole so far, and not be the batch.
      argnums: which arguments are the block's input; `self` or the module counts as 0. Their floating-point arrays are
        kept as said here; other arguments as they are. None: the first argument that is such an array.
      prevent_cse, static_argnums: as in `jax.checkpoint`. `prevent_cse=False` is for a block in a scan.

    Returns:
      A Module class or a function that is called like `subject`.

    Raises:
      TypeError: `plan` is no Plan, or an argument is of the wrong kind.
      ValueError: an axis that the mesh has not or that splits the batch; an `offload` that is not "host", or devices
        without pinned host memory. When called: a dim that is not there or not divisible, no floating-point array.

    Cost:
      Per device and block, with A the bytes of its input on a device and m the size of `partition`: A / m kept instead
      of A, one all-gather more (A (m-1)/m sent) in the backward pass; with `offload` nothing in device memory but two
      inputs on their way, and A / m over PCIe each way.

    References:
      Rajbhandari et al., ZeRO (arXiv:1910.02054), section 6.1: partitioned activation checkpointing, P_a and P_a+cpu.
    """
    block = _Block(subject, plan, _axes(partition), offload, dim, _tuple(argnums), prevent_cse, _tuple(static_argnums))
    return block.checked().wrapped(KeepsInputs(policy))


@dataclasses.dataclass(frozen=True)
class _Block:
    """The arguments of `remat`."""

    subject: Any
    plan: Plan
    axes: tuple[str, ...]
    offload: str | None
    dim: int
    argnums: tuple[int, ...] | None
    prevent_cse: bool
    static_argnums: tuple[int, ...] | None

    def checked(self) -> _Block:
        """Itself, when its arguments are right."""
        return self

    def wrapped(self, policy: KeepsInputs) -> Any:
        """The subject with its transformation."""
        options = {"policy": policy, "prevent_cse": self.prevent_cse}
        linen, nnx = sys.modules.get("flax.linen"), sys.modules.get("flax.nnx")
        if linen is not None and _is_class(self.subject, linen.Module):
            return self._linen(options)
        options["static_argnums"] = self.static_argnums
        if nnx is not None and _is_class(self.subject, nnx.Module):
            return _nnx_class(self.subject, nnx.remat(self.marked(self.subject.__call__), **options))
        fn = self.marked(self.subject)

        @functools.wraps(self.subject)
        def run(*args, **kwargs):
            if has_module((args, kwargs)):
                return sys.modules["flax.nnx"].remat(fn, **options)(*args, **kwargs)
            return jax.checkpoint(fn, **options)(*args, **kwargs)

        return run

    def _linen(self, options):
        """As `nn.remat` does it, with the input marked inside of the region."""
        from flax.core import lift
        from flax.linen.transforms import lift_transform

        def checkpoint(fn, **options):  # its name is that of the class, as with nn.remat
            return lift.checkpoint(self.marked(fn), **options)

        static = tuple(i - 1 for i in self.static_argnums)  # lifted functions do not count `self`
        return lift_transform(checkpoint, self.subject, static_argnums=static, **options)

    def marked(self, fn: Callable) -> Callable:
        """The function with its input and its result marked, for inside of the region."""
        if not (self.axes or self.offload):
            return fn

        @functools.wraps(fn)
        def region(*args, **kwargs):
            tokens = []

            def mark(x):
                if not _is_floating(x):
                    return x
                x, token = begin(x, self.kept(x))
                tokens.append(token)
                return x

            args = list(args)
            for i in self.inputs(args):
                args[i] = jax.tree.map(mark, args[i])
            return _with_end(fn(*args, **kwargs), tokens if self.prevent_cse else [])

        return region

    def inputs(self, args: Sequence[Any]) -> Sequence[int]:
        """The positions of the block's input."""
        if self.argnums is not None:
            return self.argnums
        found = [i for i, x in enumerate(args) if _is_floating(x)]
        if not found:
            raise ValueError(
                "jzero.remat: no argument of the block is a floating-point array: what is its input? Pass argnums=, its "
                "position; `self` counts as 0."
            )
        return found[:1]

    def kept(self, x) -> Kept:
        """How this input is kept."""
        if not self.axes:
            return Kept(None, None, True)
        parts = axis_size(self.plan.mesh, self.axes)
        if not -x.ndim <= self.dim < x.ndim or x.shape[self.dim] % parts:
            why = division(x.shape[self.dim], parts) if -x.ndim <= self.dim < x.ndim else f"has {x.ndim} dims"
            raise ValueError(
                f"jzero.remat: partition={self.axes} has {parts} devices, which do not divide dim {self.dim} of the "
                f"block's input {typed_shape(x)} ({why}). Pass dim=, a dim that {parts} divides, or pad the sequence."
            )
        context = jax.sharding.get_abstract_mesh()
        mesh: Any = context if in_shard_map() else self.plan.array_mesh
        open_ = [P.UNCONSTRAINED] * x.ndim
        whole, split = list(open_), list(open_)
        dim = self.dim % x.ndim
        whole[dim] = None
        split[dim] = named_on(make_spec([self.axes]), mesh)[0]
        return Kept(NamedSharding(mesh, P(*split)), NamedSharding(mesh, P(*whole)), self.offload is not None)


def _nnx_class(subject, call):
    """A subclass that differs in its call."""

    class Remat(subject):
        __doc__ = subject.__doc__

        def __call__(self, *args, **kwargs):
            return call(self, *args, **kwargs)

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Remat, name, getattr(subject, name))
    return Remat


def _with_end(out: Any, tokens: Sequence[Any]) -> Any:
    """The result of a block, with its first floating-point array tied to what the block has kept."""
    done = not tokens

    def visit(x):
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


def _is_class(x: Any, base: type) -> bool:
    return isinstance(x, type) and issubclass(x, base)
def _axes(a): return () if a is None else (a,) if isinstance(a, str) else tuple(a)
def _tuple(a): return None if a is None else (a,) if isinstance(a, int) else tuple(a)
