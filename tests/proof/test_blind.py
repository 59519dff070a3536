"""The proof says what it could not read: texts that it does not expect, and steps that paths and shapes do not explain.

A text is attacked where it is clean (a fault must not be silent) and where it is not (the fault must not disappear).
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from mistakes import constrained, in_a_loop, renamed_derivatives, with_text, without_asynchronous_copies
from programs import JAXLIB, QUICK, SEQ, gpt_loss, gpt_step, small_state, tokens

import jzero
from jzero.core.traces import trace_of
from jzero.proof.check import CheckError, findings
from jzero.proof.faults import KINDS
from jzero.proof.record import record_of

pytestmark = pytest.mark.pod


@functools.cache
def clean():
    state, plan = small_state(3, scan=True)
    return jzero.pod("h200").compile(gpt_step, state, tokens(), donate_argnums=0, compiler_options=QUICK), plan


@functools.cache
def whole_gradients():
    state, plan = small_state(2, scan=True)

    def step(state, batch):
        whole = jax.NamedSharding(plan.mesh, P())
        loss, grads = jax.value_and_grad(lambda p: state.apply_fn({"params": p}, batch["tokens"]).mean())(state.params)
        grads = jax.tree.map(lambda g: jax.lax.with_sharding_constraint(g, whole), grads)
        norms = jax.tree.map(lambda g: 1 + jnp.sqrt(jnp.sum(g**2)), grads)
        return state.apply_gradients(grads=jax.tree.map(jnp.divide, grads, norms)), loss

    return jzero.pod("h200").compile(step, state, tokens(), donate_argnums=0, compiler_options=QUICK), plan


ATTACKS = {
    "an opcode": (r" (all-gather|reduce-scatter)(-start|-done)?\(", r" super-\1\2(", "not a known collective"),
    "a notation": (r"replica_groups=(\[[^ ]*|mesh\[[^ ]* \S+)", "replica_groups=ring(8),", "no replica groups"),
    "ranges": (r"replica_groups=(\[[^ ]*|mesh\[[^ ]* \S+)", "replica_groups={{0-3},{4-7}},", "unknown notation"),
    "a suffix": (r"(replica_groups=(?:\[[^ ]*|mesh\[[^ ]* \S+)),", r"\1~2,", "no replica groups"),
    "trip counts": (r'"known_trip_count":\{"n":"\d+"\}', '"unroll":1', "whose trip count XLA does not know"),
    "a memory space": (r"(f32\[\d+\]\{0)\}", r"\1:S(9)}", "memory space S(9)"),
    "a dtype": (r"\bs32\[", "word[", "dtype word"),
    "loops": (r"/while", "/cycle", "without a name that tells which loop is in the loss"),
    "pairs": (r'"is_sync":', '"waits":', "without a mark that tells whether the program waits"),
    "derivatives": (r"transpose\(jvp\(", "transpose(lin(", "has a backward pass, and none was recognized"),
    "transposes": (r"transpose\(", "cotangent(", "has a backward pass, and none was recognized"),
    "updates": (r"jzero\.update", "zero_update", "has an update, and none was recognized"),
    "all names": (r'op_name="[^"]*"', "", "none was recognized"),
    "a custom call": (
        r'(?m)^(ENTRY .*\{)$',
        r'\1' + '\n  %mine = f32[] custom-call(), custom_call_target="my_kernel", api_version=API_VERSION_TYPED_FFI',
        "custom call of 'my_kernel'",
    ),
}  # fmt: skip
# nothing of such a program can be counted
STOP = ("an opcode", "a notation", "ranges", "a suffix", "a memory space", "a dtype")


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_text_that_jzero_does_not_expect(attack):
    old, new, said = ATTACKS[attack]
    compiled, plan = clean()
    assert findings(compiled, plan) == ()
    text, count = re.subn(old, new, compiled.as_text())
    assert count
    attacked = with_text(compiled, text)
    found = {f.kind: f for f in findings(attacked, plan)}
    assert "not_checked" in found
    assert any(said in f.text for f in findings(attacked, plan) if f.kind == "not_checked")
    if attack in STOP:
        with pytest.raises(jzero.ProofError, match=re.escape(said)):
            jzero.explain(attacked, plan)
    else:
        report = jzero.explain(attacked, plan)
        assert report.is_lower_bound == (attack == "trip counts") == (">= " in str(report))
        assert ("my_kernel" in str(report)) == (attack == "a custom call")
        assert (None in {c.asynchronous for c in report.collectives}) == (attack == "pairs")
        assert attack != "pairs" or "  ?  " in str(report)  # for its overlap
    assert findings(attacked, plan, ignore=tuple({*found, "not_checked"})) == ()


@pytest.mark.remedy("not_checked", 'report it to jzero with the version of jax')
@pytest.mark.remedy("not_checked", 'ignore=("not_checked",) leaves it out')
def test_what_cannot_be_read_is_left_out_when_asked():
    compiled, plan = clean()
    old, new, _ = ATTACKS["a notation"]
    attacked = with_text(compiled, re.sub(old, new, compiled.as_text()))
    assert {f.kind for f in findings(attacked, plan)} == {"not_checked"}
    assert findings(attacked, plan, ignore=("not_checked",)) == ()


@pytest.mark.remedy("not_checked", "meanwhile a version that docs/compatibility.md lists")
def test_names_of_a_version_that_is_listed():
    compiled, plan = clean()
    old, new, _ = ATTACKS["transposes"]
    assert "not_checked" in {f.kind for f in findings(with_text(compiled, re.sub(old, new, compiled.as_text())), plan)}
    assert findings(compiled, plan) == ()


@pytest.mark.remedy("not_checked", "if it does not: ignore=(")
def test_a_kernel_that_is_known_is_named_once():
    compiled, plan = clean()
    old, new, _ = ATTACKS["a custom call"]
    attacked = with_text(compiled, re.sub(old, new, compiled.as_text()))
    with pytest.raises(CheckError, match=r"stage 3 .* is not proven"):
        jzero.check(attacked, plan)
    (finding,) = findings(attacked, plan)
    assert "ignore=('my_kernel',)" in finding.remedy
    jzero.check(attacked, plan, ignore=("my_kernel",))
    with pytest.raises(TypeError, match="ignore must be a sequence of names"):
        jzero.check(attacked, plan, ignore="my_kernel")


def bad(stage, step=gpt_step, *, scan=True, donate=0, batch=None, **fields):
    state, plan = small_state(stage, scan=scan, **fields)
    batch = tokens() if batch is None else batch(plan)
    target = jzero.pod("h200")
    return target.compile(step, state, batch, donate_argnums=donate, plan=plan, compiler_options=QUICK), plan


def lost(state, batch):
    return gpt_step(state, batch)[1]


def apart(state, batch):
    return gpt_step(state.replace(apply_fn=state.apply_fn.fn), batch)


def summed_by_hand(state, batch):
    def grads_of(part):
        return jax.grad(lambda p: gpt_loss(state, p, part))(state.params)

    layout = jzero.plan_of(state).sharding(P(None, "data"))
    parts = constrained(jax.tree.map(lambda x: x.reshape(4, -1, SEQ), batch), lambda x: layout)
    grads = in_a_loop(grads_of, jax.tree.map(jnp.zeros_like, state.params), parts)
    return state.apply_gradients(grads=grads), 0.0


def split_params(state, batch):
    plan = jzero.plan_of(state)

    def split(params):
        rows = zip(jax.tree.leaves(params), plan.layouts, strict=True)
        return jax.tree.unflatten(jax.tree.structure(params), [plan.constrain(p, x.state) for p, x in rows])

    loss, grads = jax.value_and_grad(lambda p: gpt_loss(state, split(p), batch))(state.params)
    return state.apply_gradients(grads=grads), loss


def logs_medians(state, batch):
    loss, grads = jax.value_and_grad(lambda p: gpt_loss(state, p, batch))(state.params)
    return state.apply_gradients(grads=grads), (loss, jax.tree.map(jnp.median, grads))


def sorts_gradients():
    def sort(updates, state, params=None):
        return jax.tree.map(lambda g: jnp.sort(jnp.stack([g, 2 * g, g**2]), axis=1).sum(0), updates), state

    sorts = optax.GradientTransformation(lambda params: optax.EmptyState(), sort)
    return dict_program(tx=optax.chain(sorts, optax.adam(1e-3)))[:2]


def wrong_stride():
    """As jaxlib before 0.11.2 wrote it: the stride of a forward loop in a backward one."""
    compiled, plan = clean()
    return with_text(compiled, re.sub(r'"byte_stride":"-', '"byte_stride":"', compiled.as_text())), plan


def waits_for_copies():
    """Params in host memory, as if XLA wrote plain copies."""
    compiled, plan = bad(3, scan=False, offload=jzero.Offload(params="host", in_flight_bytes=30_000))
    return with_text(compiled, without_asynchronous_copies(compiled.as_text())), plan


def comes_back_on_the_device():
    """An offloaded state whose new values XLA leaves in device memory."""
    compiled, plan = bad(2, offload="host")
    return with_text(compiled, compiled.as_text().replace(":S(5)", "")), plan


BAD = {
    "gradients_all_reduced": whole_gradients,
    "not_trained": functools.partial(bad, 2, lost, donate=()),
    "state_not_donated": functools.partial(bad, 2, donate=()),
    "batch_not_split": functools.partial(bad, 2, batch=lambda plan: tokens(8, plan.sharding(P()))),
    "state_too_large": functools.partial(bad, 2, min_shard_bytes=2**20),
    "weights_not_gathered_on_use": functools.partial(bad, 3, apart),
    "reduction_per_microbatch": functools.partial(bad, 2, summed_by_hand, batch=lambda plan: tokens(32)),
    "activations_moved": functools.partial(bad, 2, split_params),
    "more_than_closed_form": functools.partial(bad, 2, logs_medians),
    "optimizer_moves": sorts_gradients,
    "loop_slices_wrong": wrong_stride,
    "state_not_offloaded": comes_back_on_the_device,
    "host_transfers_waited_for": waits_for_copies,
}
if JAXLIB < (0, 11, 2):  # which cannot compile params there
    del BAD["host_transfers_waited_for"]


def test_every_kind_has_a_bad_program():
    assert set(KINDS) - set(BAD) <= {"host_transfers_waited_for"}


ATTACKED = ("derivatives", "all names", "an opcode", "loops")


@pytest.mark.default_cases(
    *(f"gradients_all_reduced-{attack}" for attack in ATTACKED), *(f"loop_slices_wrong-{attack}" for attack in ATTACKED)
)
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("kind", BAD)
def test_a_fault_does_not_disappear_with_the_names(kind, attack):
    old, new, _ = ATTACKS[attack]
    compiled, plan = cached_bad(kind)
    assert kind in {f.kind for f in findings(compiled, plan)}
    found = {f.kind for f in findings(with_text(compiled, re.sub(old, new, compiled.as_text())), plan)}
    assert found & {kind, "not_checked"}


@pytest.mark.nightly
@pytest.mark.parametrize("make", [clean, *BAD.values()], ids=["clean", *BAD])
def test_a_program_of_a_jax_that_names_derivatives_otherwise(make):
    """The trace is of the same jax, and has no more of a backward pass in it than the text."""
    with renamed_derivatives():
        compiled, plan = getattr(make, "__wrapped__", make)()
        found = findings(compiled, plan)
    assert any("names the derivative otherwise" in f.text for f in found if f.kind == "not_checked")


@functools.cache
def cached_bad(kind):
    return BAD[kind]()


def test_what_is_looked_for_is_said():
    compiled, plan = clean()
    found = findings(compiled, plan)
    assert found == ()
    assert re.fullmatch(r"0 findings, of \d+ kinds looked for", repr(found))
    assert set(findings(compiled, plan, ignore=("activations_moved",)).left_out) == {"activations_moved"}
    small = jzero.make_plan({"w": jnp.ones((8, 8))}, stage=1)
    step = jax.jit(lambda params: params["w"].sum()).lower(small.shapes).compile()
    assert "not looked for, in a program of the CPU backend: loop_slices_wrong, " in repr(findings(step, small))


def test_a_program_without_params_is_refused():
    plan = jzero.make_plan({"w": jnp.ones((64, 64))}, stage=0)
    foreign = jax.jit(lambda x: x * 2).lower(jnp.ones(8)).compile()
    for read in (findings, jzero.check, jzero.explain):
        with pytest.raises(ValueError, match="the plan does not match the params of this program"):
            read(foreign, plan)


@pytest.mark.remedy("not_checked", "uses=jzero.param_uses(step, state, batch)")
def test_a_step_that_cannot_be_traced_again_is_said():
    """It wants a context that is over when `check` traces it: rules that need a trace were dropped without a word."""
    inside = [True]

    def in_context():
        if not inside:
            raise RuntimeError("outside of its context")

    compiled, plan, _ = dict_program(in_context)
    inside.clear()
    (finding,) = findings(compiled, plan)
    assert finding.kind == "not_checked"
    assert "RuntimeError: outside of its context" in finding.text
    assert findings(compiled, plan, uses={"['up']": ("kept",), "['down']": ("matmul",)}) == ()


def test_less_than_the_closed_form_is_a_note():
    compiled, plan = clean()
    assert findings(compiled, plan).notes == ()
    more = {x.name: ("matmul", "matmul") for x in plan.layouts}
    found = findings(compiled, plan, uses=more)
    assert found == ()
    (note,) = found.notes
    assert "less than the" in note
    assert f"note: {note}" in repr(found)


def test_the_same_step_compiled_twice_has_the_same_findings():
    """What was traced was counted while it was traced, and jax traces a jitted step once."""
    state, plan = small_state(2, scan=True)
    step = jax.jit(lambda state, batch: gpt_step(state, batch)[1])
    found = []
    for _ in range(2):
        compiled = jzero.pod("h200").compile(step, state, tokens(), compiler_options=QUICK)
        found.append([f.kind for f in findings(compiled, plan)])
    assert found[0] == found[1]
    assert "not_trained" in found[0]


class Net(nnx.Module):
    """With a frozen weight of the shape of a param between them, as LoRA has."""

    def __init__(self, rngs):
        self.base = nnx.Variable(jnp.ones((256, 1024)))
        self.down, self.up = nnx.Linear(1024, 256, rngs=rngs), nnx.Linear(256, 1024, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x) + x @ self.base[...]))


def pair():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def nnx_step(plan, *, ema=False, jit=True):
    loss = jzero.gather_on_use(lambda model, x: (model(x) ** 2).mean(), plan)

    def step(model, optimizer, x, *averages):
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        averages = [jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, a, nnx.state(model, nnx.Param)) for a in averages]
        return (value, averages) if jit else (model, optimizer, value, averages)

    donate = (0, 1, 3) if ema else (0, 1)
    return nnx.jit(step, donate_argnums=donate) if jit else step, {} if jit else {"donate_argnums": donate}


@pytest.mark.parametrize("ema", [False, True], ids=["", "ema"])
@pytest.mark.parametrize("jit", [True, False], ids=["nnx.jit", "plain"])
@pytest.mark.default_cases("3-nnx.jit-", "2-plain-ema")
@pytest.mark.parametrize("stage", [2, 3])
def test_an_nnx_step_by_record(stage, jit, ema):
    """Params, state and the wire are exact, whatever has the shape of a param beside them."""
    target = jzero.pod("h200")
    model, optimizer = jzero.abstract(pair, stage=stage, mesh=target.mesh({"data": 8}), min_shard_bytes=0)
    plan = jzero.plan_of(optimizer)
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=plan.batch)
    step, options = nnx_step(plan, ema=ema, jit=jit)
    averages = []
    if ema:
        averages = [abstract_like(nnx.state(model, nnx.Param), [x.state for x in plan.layouts], plan)]
    compiled = target.compile(step, model, optimizer, x, *averages, plan=plan, compiler_options=QUICK, **options)
    report = jzero.explain(compiled, plan)
    held = jzero.estimate(plan, tx=optimizer.tx)
    assert report.memory.params == held.params
    assert report.memory.opt_state == held.opt_state
    uses = jzero.param_uses(step, model, optimizer, x, *averages, plan=plan)
    assert set(uses) == {x.name for x in plan.layouts}
    assert report.wire.psi == pytest.approx(jzero.estimate(plan, uses=uses).wire_psi, rel=0.01)
    assert [f.kind for f in findings(compiled, plan)] == ["state_too_large"] * (stage == 3)  # the frozen weight


def abstract_like(tree, specs, plan):
    rows = zip(jax.tree.leaves(tree), specs, strict=True)
    leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=plan.sharding(spec)) for x, spec in rows]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def dict_program(called=lambda: None, tx=None):
    """As big_vision has it: `{"params", "opt"}`; nothing is called opt_state, and an average is called params."""
    target = jzero.pod("h200")
    shapes = {k: jax.ShapeDtypeStruct(s, jnp.bfloat16) for k, s in (("up", (256, 1024)), ("down", (1024, 256)))}
    plan = jzero.make_plan(shapes, stage=2, mesh=target.mesh({"data": 8}), min_shard_bytes=0)
    tx = jzero.zero(tx or optax.adam(1e-3), plan)
    opt = jax.eval_shape(tx.init, plan.shapes)
    opt = abstract_like(opt, [*plan.state_specs(opt.inner), *(x.state for x in plan.layouts)], plan)

    def step(train, ema, x):
        called()
        loss, grads = jax.value_and_grad(lambda p: (jnp.tanh(x @ p["up"]) @ p["down"]).mean())(train["params"])
        updates, opt = tx.update(grads, train["opt"], train["params"])
        params = optax.apply_updates(train["params"], updates)
        ema = {"params": jax.tree.map(lambda e, m: 0.9 * e + 0.1 * m, ema["params"], opt.master)}
        return {"params": params, "opt": opt}, ema, loss

    x = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
    given = {"params": plan.shapes, "opt": opt}, {"params": opt.master}, x
    return target.compile(step, *given, plan=plan, donate_argnums=(0, 1), compiler_options=QUICK), plan, tx


def test_a_dict_state_by_record():
    compiled, plan, tx = dict_program()
    report, held = jzero.explain(compiled, plan), jzero.estimate(plan, tx=tx)
    assert (report.memory.params, report.memory.opt_state) == (held.params, held.opt_state)
    assert report.memory.rest == sum(x.size * 4 // 8 for x in plan.layouts) + 64 * 256 * 2 // 8  # the average, x
    assert report.wire.psi == pytest.approx(2, rel=0.01)
    assert findings(compiled, plan) == ()


@pytest.mark.nightly
def test_steps_in_a_row_are_counted_in_the_trace():
    """Two updates in a round of a loop, and three rounds: the text of XLA says it in no one place."""
    state, plan = small_state(2, scan=True)

    def steps(state, batches):
        return jax.lax.scan(gpt_step, state, batches, unroll=2)

    split = plan.sharding(P(None, "data"))
    batches = {"tokens": jax.ShapeDtypeStruct((6, *tokens()["tokens"].shape), jnp.int32, sharding=split)}
    compiled = jzero.pod("h200").compile(steps, state, batches, donate_argnums=0, compiler_options=QUICK)
    assert [u.times for u in record_of(compiled).of(plan)] == [6]
    assert findings(compiled, plan) == ()


def test_programs_of_jzero_jit_keep_their_trace():
    params = {"w": jnp.ones((1024, 64))}
    plan = jzero.make_plan(params, stage=2, min_shard_bytes=0)
    tx = jzero.zero(optax.adam(0.1), plan)

    def step(params, opt, x):
        grads = jax.grad(lambda p: (x @ p["w"]).mean())(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt

    params = plan.place(params)
    compiled = jzero.jit(step, plan).lower(params, tx.init(params), jnp.ones((64, 1024))).compile()
    assert len(trace_of(compiled).jaxpr.jaxpr.invars) == 5
    again = trace_of(compiled).again
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves((again.args, again.keywords)))
    assert findings(compiled, plan) == ()

