"""Would the default tier notice? Each mutation breaks one public behaviour, and a test has to fail.

`python tests/mutations.py` names that test for each, or ends with 1.

A mutation replaces a public name of jzero (or of a library below it) by one that does the wrong thing, so that it means
the same however the code behind that name is arranged. `JZERO_MUTATION=<number>` applies one when the tests start
(tests/conftest.py). Each is run against the test files beside it, in the default tier, until a test fails.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A fault: what it does, the files whose tests should see it, and the function that puts it in place."""

    what: str
    files: tuple[str, ...]
    apply: Callable[[], None]


FOUND: list[Mutation] = []


def mutation(what: str, *files: str):
    def keep(apply):
        FOUND.append(Mutation(what, tuple(str(next(TESTS.rglob(f"test_{f}.py"))) for f in files), apply))
        return apply

    return keep


def wrap(owner: Any, name: str, around: Callable) -> None:
    """`owner.name` becomes `around(original, *args, **kwargs)`."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


def wrap_method(cls: type, name: str, around: Callable) -> None:
    original = getattr(cls, name)

    def method(self, *args, **kwargs):
        return around(original, self, *args, **kwargs)

    setattr(cls, name, method)


def force(change: Callable[[Any], dict[str, Any]]) -> None:
    """Configs are changed on their way into `shard`, `abstract` and `make_plan`."""
    import jzero

    names = {f.name for f in dataclasses.fields(jzero.ZeroConfig)}

    def forced(original, subject, config=None, **kwargs):
        fields = {k: kwargs.pop(k) for k in list(kwargs) if k in names}
        given = config or jzero.ZeroConfig(**fields)
        return original(subject, dataclasses.replace(given, **change(given)), **kwargs)

    for name in ("shard", "abstract", "make_plan"):
        wrap(jzero, name, forced)


def wrapped_classes() -> list[type]:
    """The classes of what `jzero.zero(tx, plan).init` and `.update` are."""
    import jax.numpy as jnp
    import optax

    import jzero

    return [type(f) for f in jzero.zero(optax.sgd(1.0), jzero.make_plan({"w": jnp.ones((8, 8))}, stage=1))]


@mutation("a stage that splits nothing", "state")
def _():
    force(lambda c: {"min_shard_bytes": 2**60})


@mutation("stage 3 keeps params whole", "state")
def _():
    force(lambda c: {"stage": min(c.stage, 2)})


@mutation("a gather that keeps the weight until the backward pass", "gpu_program")
def _():
    force(lambda c: {"reshard_after_forward": c.stage < 3})


@mutation("stage 2 keeps whole gradients", "gpu_program")
def _():
    force(lambda c: {"stage": 1} if c.stage == 2 else {})


@mutation("leaves that no dim divides stay whole", "uneven")
def _():
    force(lambda c: {"uneven": "replicate"})


@mutation("offload is ignored", "offload")
def _():
    force(lambda c: {"offload": None})


@mutation("params stay on the device, whatever offload says", "host_params")
def _():
    from jzero.sharding import Plan

    Plan.lives_on_host = lambda self, x: False


@mutation("the update outside of the program runs inside", "host_update")
def _():
    force(lambda c: {"offload": "host"} if c.updates_outside else {})


@mutation("delay=1 is not late", "host_update")
def _():
    def on_time(config):
        options = config.offload_options
        return {} if options is None else {"offload": dataclasses.replace(options, delay=0)}

    force(on_time)


@mutation("an older state of an update outside is taken", "host_update")
def _():
    from jzero.update.on_host.running import Running

    Running.check = lambda self, held: None


@mutation("a unit is written over the slot that is committed", "disk_crash")
def _():
    from jzero.update.on_host.disk.slots import Slots

    wrap_method(Slots, "file", lambda original, self, index, slot: original(self, index, 0))


@mutation("moment_dtype is ignored", "moments")
def _():
    force(lambda c: {"moment_dtype": None})


@mutation("a chain that counts no steps rounds its bf16 moments alike in every step", "moments")
def _():
    import optax

    from jzero import optim

    def alike(original, tx, plan, params):
        made = original(tx, plan, params)

        def update(updates, state, params=None, **extra):
            if "rounding_count" in extra:
                extra["rounding_count"] = extra["rounding_count"] * 0
            return made.update(updates, state, params, **extra)

        return optax.GradientTransformationExtraArgs(made.init, update)

    wrap(optim, "with_moment_dtype", alike)


@mutation("8-bit moments are rounded to nearest", "int8_moments")
def _():
    from jzero.update import int8_moments

    wrap(int8_moments, "encoded", lambda encoded, x, scales, blocks, salt=None: encoded(x, scales, blocks))


@mutation("a value that is small in its block becomes zero", "int8_moments")
def _():
    from jzero.update import int8_moments

    def encoded(original, x, scales, blocks, salt=None):
        codes = original(x, scales, blocks, salt)
        return codes * (abs(codes) > 1)

    wrap(int8_moments, "encoded", encoded)


@mutation("masters are rounded to even beside remainders", "remainder")
def _():
    import jax.numpy as jnp

    from jzero.update import remainder

    split = remainder.split
    remainder.split = lambda master: (master.astype(jnp.bfloat16), split(master)[1])


@mutation("a master that becomes a pair loses its remainder", "remainder")
def _():
    from jzero.flax import conversion

    def paired(original, param, known, was, pair, shape):
        rest, param = original(param, known, was, pair, shape)
        return (rest if pair is None else rest * 0), param

    wrap(conversion, "_paired", paired)


@mutation("what the codes of an update lose is lost", "update_in_codes")
def _():
    from jzero.update import sharded_update

    def sent(original, master, param, way):
        added, rest = original(master, param, way)
        return added, rest * 0

    wrap(sharded_update, "sent_in_codes", sent)


@mutation("a device adds other values than the shard that keeps the rest", "update_in_codes")
def _():
    from jzero.comm import updates

    def plus(original, param, added):
        return original(param, added * 1.01)

    wrap(updates, "plus", plus)


@mutation("a remainder of another sign is added to zeros and infinities", "remainder")
def _():
    import jax
    import jax.numpy as jnp

    from jzero.update import remainder

    def join(param, rest):
        upper = jax.lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.uint32) << 16
        return jax.lax.bitcast_convert_type(upper + rest.astype(jnp.int32).astype(jnp.uint32), jnp.float32)

    remainder.join = join


@mutation("moments of a bare array are no moments", "optim")
def _():
    import sys

    from jzero.layout import state_layouts

    found = state_layouts.named_by
    for module in [m for name, m in sys.modules.items() if name.startswith("jzero") and hasattr(m, "named_by")]:
        module.named_by = lambda keys, params: (x for x in found(keys, params) if x.keys)  # pyright: ignore


@mutation("a result takes the buffer of a gradient that is still read", "offload")
def _():
    import collections

    from jzero.stream.streaming import _Run

    def unread(original, self, *args):
        readers, self.readers = self.readers, collections.defaultdict(set)
        try:
            return original(self, *args)
        finally:
            self.readers = readers

    wrap_method(_Run, "_buffer", unread)


@mutation("a number is added up over the parts of any state on disk", "disk_tier")
def _():
    from jzero.update.on_host.units import Units

    Units._adds_up = lambda self, *args: True


@mutation("files of the disk tier begin at step 0", "disk_tier")
def _():
    from jzero.update.on_host import disk_tier

    disk_tier.first_step = lambda data: 0


@mutation("params are restored without the statistics", "checkpoint_weights")
def _():
    from jzero.checkpoint import exporting, logical

    for module in (exporting, logical):
        module.needed_by_model = lambda *args, **kw: set()  # pyright: ignore


@mutation("matrices have no owners", "owners")
def _():
    from jzero.update import sharded_update

    sharded_update.on_owners = lambda update, plan: update


@mutation("masters are rebuilt from the rounded params", "state")
def _():
    import jax
    import jax.numpy as jnp

    def rebuilt(original, self, updates, state, params=None, **extra):
        if getattr(state, "master", None) is not None:
            wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
            kept = jax.tree.map(lambda m, w: w if m.shape == w.shape else m, state.master, wide)
            state = state._replace(master=kept)
        return original(self, updates, state, params, **extra)

    wrap_method(wrapped_classes()[1], "__call__", rebuilt)


@mutation("params that the user replaced are overwritten by the masters", "state")
def _():
    import jax

    def overwritten(original, self, updates, state, params=None, **extra):
        if getattr(state, "master", None) is not None:
            params = jax.tree.map(
                lambda p, m: m.astype(p.dtype) if m.shape == p.shape else p, params, state.master
            )
        return original(self, updates, state, params, **extra)

    wrap_method(wrapped_classes()[1], "__call__", overwritten)


@mutation("every wrapped optimizer equals every other", "identity")
def _():
    for cls in wrapped_classes():
        cls.__eq__ = lambda self, other, cls=cls: type(other) is cls  # pyright: ignore
        cls.__hash__ = lambda self: 0  # pyright: ignore


@mutation("a batch that is not split", "state", "parity")
def _():
    import jax

    import jzero

    def whole(original, self, batch):
        everywhere = jax.NamedSharding(self.mesh, jax.P())
        return jax.tree.map(lambda x: jax.device_put(x, everywhere), batch)

    wrap_method(jzero.Plan, "place_batch", whole)


@mutation("micro-batches are consecutive rows, each on some of the devices", "micro_batches", "sharding")
def _():
    import jax

    import jzero

    def consecutive(original, self, batch, k):
        return jax.tree.map(lambda x: x.reshape(k, -1, *x.shape[1:]), batch)

    wrap_method(jzero.Plan, "micro_batches", consecutive)


@mutation("jzero.jit leaves batches as they come", "jit")
def _():
    import jax

    import jzero

    jzero.jit = lambda step, plan, **options: jax.jit(step, **options)


@mutation("of two trees of one form jzero.jit donates the first", "jit")
def _():
    from jzero.flax import jit

    jit.replaced = lambda given, traced, is_candidate, static: [k for k, x in given.items() if is_candidate(x)][:1]


@mutation("a sum over examples is averaged over micro-batches", "gradients")
def _():
    from jzero.gradients.batch_independence import Loss

    wrap_method(Loss, "check", lambda original, self, **kw: ["weighted mean"] * len(original(self, **kw)))


@mutation("check overlooks a step that loses its state", "check_truth")
def _():
    import jzero

    def other(original, compiled, plan):
        return tuple(f for f in original(compiled, plan) if f.kind != "not_trained")

    wrap(jzero, "findings", other)


@mutation("micro-batches draw the same numbers from a key that the loss closes over", "gradients")
def _():
    from jzero.gradients import batch_independence

    batch_independence.shared_draws = lambda *args: []


@mutation("all micro-batches but the first are dropped", "gradients")
def _():
    import jax

    import jzero

    def first(original, loss_fn, plan, **kwargs):
        parts = kwargs.pop("accumulate", 1)
        fn = original(loss_fn, plan, **kwargs)
        return lambda params, batch, *rest, **kw: fn(
            params, jax.tree.map(lambda x: x[: len(x) // parts], batch), *rest, **kw
        )

    wrap(jzero, "value_and_grad", first)


@mutation("the weights of micro-batches are ignored", "gradients")
def _():
    import jzero

    wrap(jzero, "value_and_grad", lambda original, f, plan, **kw: original(f, plan, **{**kw, "weight": None}))


@mutation("weights are not gathered where they are used", "gather", "gather_nnx")
def _():
    import jzero

    wrap(jzero, "gather_on_use", lambda original, fn, plan, **kw: fn)


@mutation("remat keeps a block's input whole", "remat")
def _():
    import jzero

    wrap(jzero, "remat", lambda original, *args, **kw: original(*args, **{**kw, "partition": None}))


@mutation("the loss scale never changes", "scale")
def _():
    import jzero

    wrap_method(jzero.LossScale, "update", lambda original, self, after: self)


@mutation("unshard returns what is stored, padding and all", "uneven")
def _():
    import jzero

    wrap(jzero, "unshard", lambda original, tree, **kw: tree)


@mutation("a checksum is never compared", "checkpoint_damage")
def _():
    import xxhash

    class Same:
        update = staticmethod(lambda data: None)
        digest = staticmethod(lambda: bytes(8))
        hexdigest = staticmethod(lambda: "0" * 16)
        intdigest = staticmethod(lambda: 0)

    for name in ("xxh3_64", "xxh3_128", "xxh64"):
        size = 32 if "128" in name else 16
        setattr(xxhash, name, lambda *a, **k: Same)
        setattr(xxhash, f"{name}_hexdigest", lambda *a, size=size, **k: "0" * size)
        setattr(xxhash, f"{name}_digest", lambda *a, size=size, **k: bytes(size // 2))
        setattr(xxhash, f"{name}_intdigest", lambda *a, **k: 0)


@mutation("restore leaves the optimizer state as it was", "checkpoint")
def _():
    import jax
    import jax.numpy as jnp

    from jzero import checkpoint

    def partly(original, path, like, **kw):
        state = original(path, like, **kw)
        if not hasattr(state, "opt_state"):
            return state
        return state.replace(opt_state=jax.tree.map(jnp.zeros_like, state.opt_state))

    wrap(checkpoint, "restore", partly)


@mutation("check finds nothing", "check")
def _():
    import jzero
    from jzero.proof import check

    for owner in (jzero, check):
        wrap(owner, "findings", lambda original, *args, **kw: ())


@mutation("explain counts what a loop sends once", "explain", "gpu_program")
def _():
    import jzero
    from jzero.proof import report

    def once(original, *args, **kw):
        found = original(*args, **kw)
        flat = tuple(dataclasses.replace(c, trips=1) for c in found.collectives)
        return dataclasses.replace(found, collectives=flat)

    for owner in (jzero, report):
        wrap(owner, "explain", once)


@mutation("explain counts params as optimizer state", "states")
def _():
    import jzero

    def moved(original, *args, **kw):
        found = original(*args, **kw)
        if found.memory is None or found.memory.params is None:
            return found
        memory = dataclasses.replace(found.memory, params=0, opt_state=found.memory.params + found.memory.opt_state)
        return dataclasses.replace(found, memory=memory)

    wrap(jzero, "explain", moved)


@mutation("jzero.shard does not know that it runs inside of a jit", "state")
def _():
    import importlib

    for name in ("shard", "creation", "conversion"):
        importlib.import_module(f"jzero.flax.{name}").in_trace = lambda: False


@mutation("optimizer_sharding is not read", "sharding")
def _():
    from flax import nnx

    def without(original, self, *args, **kw):
        found = original(self, *args, **kw)
        return {k: v for k, v in found.items() if k != "optimizer_sharding"} if isinstance(found, dict) else found

    wrap_method(nnx.Variable, "get_metadata", without)


@mutation("trainable= is not read", "frozen_params")
def _():
    import jzero

    for name in ("shard", "make_plan"):
        wrap(jzero, name, lambda original, *args, trainable=None, **kw: original(*args, **kw))


@mutation("estimate forgets that state is split", "estimate", "gpu_program")
def _():
    import jzero
    from jzero.proof import memory

    def whole(original, plan, **kw):
        found = original(plan, **kw)
        return dataclasses.replace(found, opt_state=found.opt_state * plan.shards)

    for owner in (jzero, memory):
        wrap(owner, "estimate", whole)


@mutation("a mesh has its axes the wrong way round", "mesh", "hybrids")
def _():
    import jax

    import jzero

    def turned(original, *args, **kw):
        mesh = original(*args, **kw)
        return jax.sharding.Mesh(mesh.devices.T, mesh.axis_names[::-1], axis_types=mesh.axis_types[::-1])

    wrap(jzero, "mesh", turned)


@mutation("the stage of a DeepSpeed config is not read", "deepspeed")
def _():
    from jzero import deepspeed

    def unread(original, *args, **kw):
        found = original(*args, **kw)
        return dataclasses.replace(found, config=dataclasses.replace(found.config, stage=0))

    wrap(deepspeed, "read", unread)


@mutation("the gradient of a tiled loss is that of a device's own tokens", "tiled_loss")
def _():
    from jzero.comm.gradients import GradientReduce

    def own(original, self, grad, x, spec):
        n = self.plan.batch_parts
        return original(self, grad, x, spec) / n if n > 1 else original(self, grad, x, spec)

    wrap(GradientReduce, "in_parts", own)


@mutation("a tiled loss makes all logits at once", "tiled_loss")
def _():
    from jzero.core import token_loss

    wrap(token_loss, "tiles_of", lambda original, *args: 1)


@mutation("pieces of the vocabulary are summed without their maximum", "tiled_loss")
def _():
    from jzero.comm import token_loss_pieces

    def first(original, loss, sums, *rest, **given):
        found = original(loss, sums, *rest, **given)
        return (found[0], found[1] - sums[1], *found[2:])

    wrap(token_loss_pieces, "sums_with", first)


@mutation("what a fit says fits was never compiled", "fit")
def _():
    from jzero.proof.fitting.candidates import Task

    wrap(Task, "compiled_bytes", lambda original, self, option: self.candidate(option).estimate.total)


@mutation("a layer that mixes positions is tiled", "tiled")
def _():
    from jzero.activations.position_wise import PositionWise

    wrap(PositionWise, "_refuse", lambda original, self, why: None)


@mutation("every tile of a layer draws the same numbers", "tiled")
def _():
    import jax

    def same(original, key, data):
        return key if getattr(data, "ndim", 1) == 0 and isinstance(data, jax.core.Tracer) else original(key, data)

    wrap(jax.random, "fold_in", same)


@mutation("a deadline takes compiling for a step that hangs", "deadline")
def _():
    from jzero.core import step_watch

    step_watch.compiles = lambda frame: False


@mutation("a collective is hidden by whatever stands beside it", "timeline")
def _():
    from jzero.proof import timeline

    timeline._Timeline.work = lambda self, home, i: 1e9


def apply(number: str) -> None:
    """Puts a fault in place; raises AttributeError where it replaces a name that jzero no longer has."""
    FOUND[int(number)].apply()
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == "jzero"]:
        ours = [name for name, x in vars(module).items() if getattr(x, "__module__", None) == __name__]
        gone = [name for name in ours if name not in Path(str(module.__file__)).read_text()]
        if gone:
            raise AttributeError(f"{module.__name__} has no {gone[0]}: {FOUND[int(number)].what}")


def failing_test(number: int) -> tuple[str, str]:
    """The first test of the default tier that fails under a mutation, and the end of what pytest printed."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n",
        "0",
        "-rf",
        "--durations=0",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*words, *FOUND[number].files], cwd=ROOT, env={**os.environ, "JZERO_MUTATION": str(number)},
        capture_output=True, text=True,
    )  # fmt: skip
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return (failed[1] if failed and done.returncode == 1 else ""), done.stdout[-2000:] + done.stderr[-500:]


def main(words: list[str]) -> int:
    chosen = [i for i, m in enumerate(FOUND) if not words or any(w in m.what for w in words)]
    caught = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for i, (test, output) in zip(chosen, pool.map(failing_test, chosen), strict=True):
            caught += bool(test)
            print(f"{FOUND[i].what}: {test or 'NO TEST FAILED'}", flush=True)
            if not test:
                print(output)
    print(f"\n{caught} passed, {len(chosen) - caught} failed")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
