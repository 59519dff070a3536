"""`check`: programs that really have a fault, each found. `test_check_clean.py` has those that have none.

Compiled for eight H200, scan and unrolled, on every jax that is tested. No GPU is needed.
"""

from __future__ import annotations

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P
from mistakes import BOTH, constrained, found_in, in_a_loop, unrolled_by_python, whole
from programs import (
    QUICK,
    SEQ,
    Block,
    Gpt,
    MlpBlock,
    Stack,
    gpt_loss,
    gpt_step,
    small_gpt,
    small_state,
    tokens,
)

import jzero
from jzero.proof.check import CheckError, Finding, check, findings
from jzero.proof.faults import KINDS

pytestmark = pytest.mark.pod

LAYERS = 3


@pytest.mark.default_cases("unrolled-3")
@pytest.mark.parametrize("stage", [2, 3])
@BOTH
def test_batch_not_split(stage, scan):
    state, plan = small_state(stage, scan=scan)
    found = found_in(state, plan, batch=tokens(8, plan.sharding(P())))
    finding = found["batch_not_split"]
    assert finding.bytes == 8 * SEQ * 4
    assert "['tokens'][8,16]" in finding.text
    assert "plan.place_batch(batch)" in finding.remedy


@pytest.mark.nightly
@pytest.mark.remedy("gradients_zero", "let the loss read its own argument")
def test_a_loss_that_does_not_read_its_argument():
    """The loss and all layouts are right, and nothing is trained."""

    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda params: gpt_loss(state, state.params, batch))(state.params)
        return state.apply_gradients(grads=grads), loss

    state, plan = small_state(2, scan=True)
    found = found_in(state, plan, step)
    assert set(found) == {"not_trained"}
    assert "every gradient is zero" in found["not_trained"].text
    assert found_in(state, plan) == {}


def naive(state):
    """Stage 3 by layouts alone: the plain model on split params."""
    return state.replace(apply_fn=state.apply_fn.fn)


@functools.cache
def naive_program(scan):
    """Not donated, too: a program with three findings."""
    state, plan = small_state(3, scan=scan)
    return jzero.pod("h200").compile(
        gpt_step, naive(state), tokens(), plan=plan, compiler_options=QUICK
    ), plan


@pytest.mark.nightly
@pytest.mark.remedy("gather_on_use", "or the apply_fn of the state that jzero.shard returned")
@pytest.mark.remedy("activations_moved", "loss_fn = jzero.gather_on_use(loss_fn, plan), with ")
@BOTH
def test_no_gather_on_use_and_activations_moved(scan):
    program, plan = naive_program(scan)
    found = {f.kind: f for f in findings(program, plan)}
    assert set(found) >= {"weights_not_gathered_on_use", "activations_moved"}
    text = f"{len(plan.layouts)} params are stored split, and no weight is gathered where it is used"  # vectors, too
    assert text in found["weights_not_gathered_on_use"].text
    assert found["weights_not_gathered_on_use"].bytes == pytest.approx(plan.param_bytes, rel=0.01)
    assert "all-to-all" in found["activations_moved"].text
    assert found["activations_moved"].bytes > 0.05 * plan.param_bytes
    assert found_in(*small_state(3, scan=scan)) == {}


@pytest.mark.nightly
@pytest.mark.remedy("activations_moved", "params as the plan stores them, with no constraint on them in the loss")
def test_params_that_the_loss_splits():
    """At stage 2, where they are whole."""
    state, plan = small_state(2, scan=True)

    def split(params):
        leaves, tree = jax.tree.flatten(params)
        pairs = zip(leaves, plan.layouts, strict=True)
        return jax.tree.unflatten(tree, [plan.constrain(x, layout.state) for x, layout in pairs])

    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda p: gpt_loss(state, split(p), batch))(state.params)
        return state.apply_gradients(grads=grads), loss

    assert "where nothing should" in found_in(state, plan, step)["activations_moved"].text
    assert found_in(state, plan) == {}


@pytest.mark.remedy("grads_all_reduced", "hand the gradients to tx.update as jax.grad gives them")
@pytest.mark.default_cases("scan")
@BOTH
def test_gradients_all_reduced(scan):
    state, plan = small_state(2, scan=scan)

    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda p: gpt_loss(state, p, batch))(state.params)
        grads = whole(grads, plan.mesh)
        clean = jax.tree.map(
            lambda g: g / (1 + jnp.sqrt(jnp.sum(g**2))), grads
        )  # a norm of the whole gradient
        return state.apply_gradients(grads=clean), loss

    found = found_in(state, plan, step)
    assert set(found) == {"gradients_all_reduced"}
    assert found["gradients_all_reduced"].bytes >= 0.9 * plan.param_bytes
    assert f"of {len(plan.layouts)} split params" in found["gradients_all_reduced"].text
    assert found_in(state, plan) == {}


@pytest.mark.default_cases("scan-3")
@pytest.mark.parametrize("stage", [1, 2, 3])
@BOTH
def test_state_whole(stage, scan):
    state, plan = small_state(stage, scan=scan)

    def step(state, batch):
        state, loss = gpt_step(state, batch)
        return whole(state, plan.mesh), loss

    found = found_in(state, plan, step)
    copies = 12 if stage < 3 else 14
    assert found["state_too_large"].bytes == pytest.approx(copies * plan.param_bytes // 2 * 7 // 8, rel=0.01)
    assert "comes back" in found["state_too_large"].text


@pytest.mark.default_cases("scan")
@BOTH
def test_state_not_donated(scan):
    found = found_in(*small_state(2, scan=scan), donate=())
    assert set(found) == {"state_not_donated"}
    assert "donate_argnums=0)" in found["state_not_donated"].remedy
    assert "['params']" in found["state_not_donated"].text or ".params[" in found["state_not_donated"].text
    assert found["state_not_donated"].bytes > 0


@pytest.mark.default_cases("scan")
@BOTH
def test_replicated_leaves(scan):
    found = found_in(*small_state(2, scan=scan, min_shard_bytes=2**20))
    assert "state_too_large" in found
    finding = found["state_too_large"]
    assert "['Embed_0']['embedding']" in finding.text
    assert "bf16[512,128]" in finding.text
    assert finding.remedy == "pass ZeroConfig(min_shard_bytes=0)."


def test_stack_gathered_before_the_loop():
    state, plan = small_state(3, scan=True)

    def step(state, batch):
        def loss_fn(params):
            return gpt_loss(naive(state), whole(params, plan.mesh), batch)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    found = found_in(state, plan, step, batch=tokens(512))
    finding = found["weights_not_gathered_on_use"]
    stacks = sum(x.nbytes for x in plan.layouts if x.scanned and len(x.shape) == 3)
    assert "of layers are gathered whole" in finding.text  # and that they are kept is not a finding of its own
    assert finding.bytes >= stacks


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("stage", "axis", "axes"), [(2, "data", {"other": 2, "data": 4}), (3, "layers", {"layers": 4, "data": 2})]
)
def test_stack_split_along_its_scanned_dim(stage, axis, axes):
    def spec(path, x):
        return P(axis) if "layers" in jax.tree_util.keystr(path) and x.ndim == 3 else P()

    params = jax.eval_shape(lambda: small_gpt(True, layers=4)).params
    specs = jax.tree_util.tree_map_with_path(spec, params)
    mesh = jzero.pod("h200").mesh(axes)
    found = found_in(*small_state(stage, scan=True, layers=4, mesh=mesh, param_specs=specs))
    assert set(found) == {"weights_not_gathered_on_use"}
    finding = found["weights_not_gathered_on_use"]
    assert "4 stacks of layers are split along the scanned dim by their own layout" in finding.text
    assert "that dim of the stack out of its layout" in finding.remedy
    stacks = sum(2 * x.size for x in jax.tree.leaves(params["layers"]) if x.ndim == 3)
    assert finding.bytes >= 4 * stacks * 3 // 4  # once for each layer, forward alone


@pytest.mark.remedy("weights_saved", "loss_fn = jzero.gather_on_use(loss_fn, plan); for blocks of your own")
@pytest.mark.default_cases("scan")
@BOTH
def test_gathered_weights_saved(scan):
    state, plan = small_state(3, scan=scan, remat=False)

    def step(state, batch):
        def loss_fn(params):
            if scan:
                return gpt_loss(naive_gathering(state, plan), params, batch)
            return gpt_loss(naive(state), whole(params, plan.mesh), batch)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    program = jzero.pod("h200").compile(step, state, tokens(512), donate_argnums=0, compiler_options=QUICK)
    first, kept, *_ = findings(program, plan)
    assert first.kind == kept.kind == "weights_not_gathered_on_use"
    assert "no weight is gathered where it is used" in first.text
    assert "still there in the backward pass" in kept.text
    assert kept.bytes >= 0.5 * plan.param_bytes
    assert found_in(state, plan, batch=tokens(512)) == {}


def naive_gathering(state, plan):
    """A constraint in the block, and no remat: what each layer gathers becomes a residual of the scan."""

    class Gathering(Block):
        @nn.compact
        def __call__(self, x, _=None):
            inner = nn.map_variables(Block, "params", lambda p: whole(p, plan.mesh), mutable=True)
            return inner(self.dim, self.heads, self.dtype, name="block")(x, None)

    model = Gpt(True, LAYERS, dim=128, heads=4, remat=False, block=Gathering)

    def apply(variables, tokens):
        params = dict(variables["params"])
        params["layers"] = {"block": params["layers"]}
        return model.apply({"params": params}, tokens)

    return state.replace(apply_fn=apply)


def microbatches_found(stage, scan, accumulate, parts=4):
    state, plan = small_state(stage, scan=scan)

    def step(state, batch):
        def grads_of(part):
            return jax.grad(lambda p: gpt_loss(state, p, part))(state.params)

        micro = jax.tree.map(lambda x: x.reshape(parts, -1, SEQ), batch)
        micro = constrained(micro, lambda x: plan.sharding(P(None, "data")))
        grads = accumulate(grads_of, jax.tree.map(jnp.zeros_like, state.params), micro)
        return state.apply_gradients(grads=grads), 0.0

    return found_in(state, plan, step, batch=tokens(8 * parts)).get("reduction_per_microbatch"), plan


@pytest.mark.default_cases("2-True-in_a_loop")
@pytest.mark.parametrize(
    ("stage", "scan", "accumulate"),
    [(0, True, in_a_loop), (2, True, in_a_loop), (2, False, in_a_loop), (2, True, unrolled_by_python)],
)
def test_reduction_per_microbatch(stage, scan, accumulate):
    finding, plan = microbatches_found(stage, scan, accumulate)
    assert finding is not None
    assert re.search(r"reduced (3\.[6-9]|4\.\d) times", finding.text)
    assert finding.bytes >= 2 * plan.param_bytes


@pytest.mark.nightly
def test_microbatches_and_layers_unrolled():
    """Where nothing is in a loop XLA itself adds the gradients up before it reduces them, once."""
    assert microbatches_found(2, False, unrolled_by_python, parts=2)[0] is None


def test_leaves_that_no_dim_divides():
    target = jzero.pod("h200")
    plan = jzero.make_plan(
        {"odd": jax.ShapeDtypeStruct((129, 131), jnp.float32)},
        stage=2,
        uneven="replicate",
        mesh=target.mesh({"data": 8}),
    )
    (finding,) = findings(target.compile(lambda params: params["odd"] * 2, plan.shapes), plan)
    assert (finding.kind, finding.bytes) == ("state_too_large", 129 * 131 * 4)
    assert finding.remedy.startswith("make a dim of the leaf a multiple of 8")


def test_check_lists_every_finding_and_its_remedy():
    program, plan = naive_program(True)
    with pytest.raises(CheckError, match=r"jzero\.check: \d findings; stage 3") as caught:
        check(program, plan)
    found = caught.value.findings
    assert found == findings(program, plan)
    assert [f.kind for f in found] == [k for k in KINDS if k in {f.kind for f in found}]
    for finding in found:
        assert isinstance(finding, Finding)
        assert str(finding) in str(caught.value)
        assert finding.bytes > 0
    assert "Remedy: jax.jit(step, donate_argnums=0)" in str(caught.value)


def test_cpu_programs():
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:8], ("data",))
    state, plan = small_state(2, scan=True, mesh=mesh)

    def found(batch, **options):
        lowered = jax.jit(gpt_step, **options).lower(state, batch)
        return {f.kind for f in findings(lowered.compile({"xla_backend_optimization_level": 0}), plan)}

    assert found(tokens(8, plan.batch), donate_argnums=0) == set()
    assert {"batch_not_split", "state_not_donated"} <= found(tokens(8, plan.sharding(P())))


@pytest.mark.remedy("batch_not_split", "plan.place_batch(batch)")
@pytest.mark.default_cases("2")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_array_without_a_layout_that_xla_splits_along_another_dim(stage):
    """As numpy arrays come; XLA splits the features over the devices of the state, and every device has all rows."""
    layers = {"up": jnp.ones((256, 512)), "down": jnp.ones((512, 256))}
    step = lambda s, x: s.apply_gradients(  # noqa: E731
        grads=jax.grad(lambda p: jnp.mean(s.apply_fn(p, x) ** 2))(s.params)
    )
    apply = lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"]  # noqa: E731
    state = jzero.shard(TrainState.create(apply_fn=apply, params=layers, tx=optax.adamw(1e-3)), stage=stage)
    plan, x = jzero.plan_of(state), np.ones((8192, 256), np.float32)
    compiled = jax.jit(step, donate_argnums=0).lower(state, x).compile()
    if stage < 3:  # what the program is
        assert compiled.input_shardings[0][1].shard_shape(x.shape) == (8192, 32)
    assert "batch_not_split" in {f.kind for f in findings(compiled, plan)}
    compiled = jax.jit(step, donate_argnums=0).lower(state, plan.place_batch(x)).compile()
    assert findings(compiled, plan) == ()


def test_bad_input():
    _, plan = small_state(2, scan=True)
    with pytest.raises(TypeError, match=r"needs a compiled program, got function"):
        findings(lambda x: x, plan)
    with pytest.raises(
        TypeError, match=r"check\(plan=3\): plan must be a jzero.Plan, not int\. Pass jzero\.plan_of"
    ):
        check(jax.jit(lambda x: x).lower(1.0).compile(), 3)


def logs_medians(state, batch):
    """For a log: what sorts a gradient gathers it."""
    loss, grads = jax.value_and_grad(lambda p: gpt_loss(state, p, batch))(state.params)
    medians = jax.tree.map(lambda g: jnp.median(jnp.abs(g)), grads)
    return state.apply_gradients(grads=grads), (loss, medians)


@pytest.mark.nightly
@pytest.mark.remedy("more_than_closed_form", "goes into a function of its own, called when it is wanted")
@BOTH
def test_more_than_the_closed_form(scan):
    """What no other rule knows: the leaf, the equation and the bytes are named."""
    state, plan = small_state(2, scan=scan)
    found = found_in(state, plan, logs_medians)
    assert set(found) == {"more_than_closed_form"}
    finding = found["more_than_closed_form"]
    psi = plan.param_bytes * 7 / 8
    assert finding.bytes == pytest.approx(psi, rel=0.1)
    assert "['kernel']" in finding.text
    assert "jit(median)" in finding.text
    assert found_in(state, plan) == {}


@pytest.mark.nightly
def test_a_metric_with_a_forward_pass_of_its_own_is_in_the_closed_form():
    def step(state, batch):
        return gpt_step(state, batch), gpt_loss(state, state.params, batch)

    state, plan = small_state(3, scan=True)
    assert found_in(state, plan, step) == {}


def scan_over_layers(rounds=None):
    def layer(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    def apply(variables, x):
        return jax.lax.scan(layer, x, variables["params"]["layers"])[0]

    def in_a_loop(variables, x):
        return jax.lax.scan(lambda x, _: (apply(variables, x), None), x, length=rounds)[0]

    params = {"layers": {"up": jnp.ones((4, 256, 512)), "down": jnp.ones((4, 512, 256))}}
    return TrainState.create(apply_fn=in_a_loop if rounds else apply, params=params, tx=optax.adam(1e-3))


def linen_scan():
    model = Stack(functools.partial(MlpBlock, 256), 4, scan=True)
    params = model.init(jax.random.key(0), jnp.zeros((1, 256)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))


def found_of_calls(create, calls, ignore=()):
    """Kinds in a step at stage 3 whose loss calls the model several times."""
    pod = jzero.pod("h100")
    state = jzero.abstract(create, stage=3, mesh=pod.mesh({"data": 8}), min_shard_bytes=0)
    batch = jax.ShapeDtypeStruct((64, 256), jnp.float32)

    def step(state, x, y):
        def loss(params):
            x_out, y_out = calls(lambda x: state.apply_fn({"params": params}, x), x, y)
            return jnp.mean(x_out * y_out)

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    program = pod.compile(step, state, batch, batch, donate_argnums=0, compiler_options=QUICK)
    return [f.kind for f in findings(program, jzero.plan_of(state), ignore=ignore)]


@pytest.mark.remedy("reduction_per_microbatch", "one call on all of them, jnp.stack([x, y], 1)")
@pytest.mark.default_cases("scan_over_layers")
@pytest.mark.parametrize("create", [scan_over_layers, linen_scan])
def test_a_scan_that_is_called_twice(create):
    """Its weights move in the loop over the layers, and are not constant over it."""

    def once(f, x, y):
        both = f(jnp.stack([x, y], 1).reshape(-1, *x.shape[1:])).reshape(-1, 2, *x.shape[1:])
        return both[:, 0], both[:, 1]

    assert found_of_calls(create, lambda f, x, y: (f(x), f(y))) == ["reduction_per_microbatch"]
    needs_another = lambda f, x, y: (f(f(x)), y)  # noqa: E731
    assert found_of_calls(create, needs_another, ignore=("reduction_per_microbatch",)) == []
    assert found_of_calls(create, once) == []


@pytest.mark.remedy("stack_before_loop", "where the scan stands in another loop, that one in Python")
def test_a_scan_in_another_loop():
    looped = functools.partial(scan_over_layers, rounds=2)
    kinds = found_of_calls(looped, lambda f, x, y: (f(x), y))
    assert kinds == ["weights_not_gathered_on_use", "reduction_per_microbatch"]
    assert found_of_calls(scan_over_layers, lambda f, x, y: (f(f(x)), y)) == ["reduction_per_microbatch"]


class Messages(nn.Module):
    """Edges read the nodes at their ends, and nodes the sum of their edges."""

    @nn.compact
    def __call__(self, nodes, senders, receivers):
        x = nn.Dense(256)(nodes)
        for _ in range(2):
            edges = nn.relu(nn.Dense(256)(x[senders]))
            x = x + nn.Dense(256)(jax.ops.segment_sum(edges, receivers, len(x)))
        return x


@pytest.mark.remedy("activations_moved", "Rows looked up or summed across the batch")
def test_rows_across_the_batch_are_named_and_the_remedy_helps():
    """A graph network whose edges may point anywhere in the batch; with an entry of the batch for each device."""
    pod, model = jzero.pod("h200"), Messages()
    some = jnp.zeros((2, 256)), jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32)
    create = lambda: TrainState.create(  # noqa: E731
        apply_fn=model.apply, params=model.init(jax.random.key(0), *some), tx=optax.sgd(0.1)
    )
    state = jzero.abstract(create, stage=3, mesh=pod.mesh({"data": 8}), min_shard_bytes=0)
    plan = jzero.plan_of(state)

    def step(state, graphs):
        def loss(params):
            apply = functools.partial(state.apply_fn, params)
            return ((jax.vmap(apply) if graphs[0].ndim == 3 else apply)(*graphs) ** 2).mean()

        loss, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), loss

    def found(*dims):
        ints = jax.ShapeDtypeStruct(dims, jnp.int32)
        batch = jax.ShapeDtypeStruct((*dims, 256), jnp.float32), ints, ints
        program = pod.compile(step, state, batch, donate_argnums=0, plan=plan, compiler_options=QUICK)
        return {f.kind: f for f in findings(program, plan)}, jzero.explain(program, plan).wire.psi

    (across, sent), (clean, least) = found(8 * 64), found(8, 64)
    assert "jvp(Messages)" in across["activations_moved"].text
    assert "gradients_all_reduced" not in across  # what is all-reduced in the backward pass are rows
    assert "segment_sum" in across["activations_moved"].remedy
    assert "jax.vmap" in across["activations_moved"].remedy
    assert clean == {}
    assert sent > 6.5
    assert least == pytest.approx(
        2.8, rel=0.01
    )  # the batch has no gradient: one gather fewer of the first weight


@pytest.mark.remedy("more_than_closed_form", "Rows looked up or summed across the batch")
def test_rows_that_are_gathered_across_the_batch():
    """With an optimizer that has no state."""
    pod = jzero.pod("h200")
    params = {"in": jnp.ones((256, 256)), "out": jnp.ones((256, 256))}
    create = lambda: TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))  # noqa: E731
    state = jzero.abstract(create, stage=2, mesh=pod.mesh({"data": 8}), min_shard_bytes=0)
    plan = jzero.plan_of(state)

    def found(*dims):
        def step(state, x, rows):
            def loss(params):
                model = lambda x, rows: jnp.tanh((x @ params["in"])[rows]) @ params["out"]  # noqa: E731
                return ((jax.vmap(model) if x.ndim == 3 else model)(x, rows) ** 2).mean()

            return state.apply_gradients(grads=jax.grad(loss)(state.params))

        batch = jax.ShapeDtypeStruct((*dims, 256), jnp.float32), jax.ShapeDtypeStruct(dims, jnp.int32)
        program = pod.compile(step, state, *batch, donate_argnums=0, compiler_options=QUICK)
        return findings(program, plan)

    (finding,) = found(8 * 64)
    assert "f32[64,256] in all-gather" in finding.text
    assert found(8, 64) == ()
