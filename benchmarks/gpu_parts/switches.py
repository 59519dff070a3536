"""What jzero does to a program, each with what switches it off.

A field of ZeroConfig where there is one; else the functions that are replaced while the step is traced, in
the process of the part alone. A name that is gone from jzero is an error: `tests/benchmarks/test_gpu_bench.py` looks
for all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

NO_LIMIT = 2**40  # bytes


@dataclasses.dataclass(frozen=True)
class Switch:
    """One thing that jzero does.

    Attributes:
      name: what it is, where the notes in `jzero/` call it so.
      patches: "module:attribute" and a function that makes its replacement from what is there.
      fields: of the config.
      stages: at which it does anything.
      offload: it does anything with state in host memory alone.
    """

    name: str
    patches: tuple[tuple[str, Callable[[Any], Any]], ...] = ()
    fields: tuple[tuple[str, Any], ...] = ()
    stages: tuple[int, ...] = (1, 2, 3)
    offload: bool = False


def always(value: Any) -> Callable[[Any], Any]:
    """A function that answers `value` to everything."""
    return lambda _: lambda *args, **kwargs: value


def ties_without(**empty: Any) -> Callable[[Any], Any]:
    """`find_ties`, with its ties without some of their weights."""
    return lambda find: lambda *args: (dataclasses.replace(tie, **empty) for tie in find(*args))


SWITCHES = (
    Switch(
        "all ties of buckets",
        patches=(("jzero.gather.buckets:find_ties", always(())),),
        stages=(2, 3),
    ),
    Switch(
        "ties of gathers to activations",
        patches=(("jzero.gather.buckets:find_ties", ties_without(gather=())),),
        stages=(3,),
    ),
    Switch(
        "cotangents wait for reductions",
        patches=(("jzero.gather.buckets:find_ties", ties_without(reduce=())),),
        stages=(2, 3),
    ),
    Switch("limit of a bucket", fields=(("bucket_bytes", NO_LIMIT),), stages=(2, 3)),
    Switch(
        "old params die early",
        patches=(("jzero.optim:read_params_first", lambda _: lambda wide, stored, grads, plan: (wide, grads)),),
        stages=(1, 2),
    ),
    Switch(
        "stacks of new params gathered layer by layer",
        patches=(("jzero.update.new_params:goes_by_layers", always(False)),),
        stages=(1, 2),
    ),
    Switch(
        "one copy at a time", patches=(("jzero.update.new_params:is_copied", always(False)),), stages=(1, 2)
    ),
    Switch(
        "gradients of large weights in parts",
        patches=(("jzero.comm.gradients:CUT_BUCKETS", lambda _: NO_LIMIT),),
        stages=(2, 3),
    ),
    Switch(
        "weights dropped after the forward pass", fields=(("reshard_after_forward", False),), stages=(3,)
    ),
    Switch(
        "a tied embedding reduced once",
        patches=(("jzero.gather.gradients_at_use:tied_tables", always(set())),),
        stages=(1,),
    ),
    Switch(
        "gradients of vectors whole first",
        patches=(
            (
                "jzero.comm.gradients:GradientReduce.one_at_update",
                lambda _: lambda self, grad, x: self.plan.constrain(grad, x.state),
            ),
        ),
    ),
    Switch(
        "masters compared with params",
        patches=(("jzero.update.sharded_update:taken_over", lambda _: lambda shard, master: master),),
    ),
    Switch(
        "units of the streamed state in order",
        patches=(("jzero.stream.streaming:_Tie.after", lambda _: lambda self, arrays: arrays),),
        offload=True,
    ),
    Switch(
        "limit of the streamed state's units", fields=(("in_flight_bytes", NO_LIMIT),), offload=True
    ),
)  # fmt: skip


@contextlib.contextmanager
def off(switch: Switch) -> Iterator[None]:
    """Its functions are replaced inside."""
    old = []
    try:
        for where, replace in switch.patches:
            owner, name = owner_of(where)
            found = getattr(owner, name)
            old.append((owner, name, found))
            setattr(owner, name, replace(found))
        yield
    finally:
        for owner, name, found in reversed(old):
            setattr(owner, name, found)


def owner_of(where: str) -> tuple[Any, str]:
    """The module or class of "module:attribute", and the attribute's name."""
    module, path = where.split(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    if not hasattr(owner, name):
        raise AttributeError(f"{where} is gone: mend the table in benchmarks/gpu_parts/switches.py")
    return owner, name


def of(stage: int, offload: bool) -> list[Switch]:
    """Those that do anything at a stage; with offload those of the streamed state alone."""
    return [s for s in SWITCHES if stage in s.stages and s.offload == offload]
