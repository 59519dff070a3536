"""`check`: more of the train state in memory between steps than the closed form says; each remedy is applied."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from models import batch, create_small, loss_of, train_step

import jzero
from jzero.proof.evidence import Evidence
from jzero.proof.faults import KINDS

KIND, WHOLE = "more than the closed form", "whole"
ADAM = optax.adamw(1e-2)
HISTORY = optax.chain(optax.scale_by_lbfgs(memory_size=4), optax.scale(-1e-2))


class Averaged(TrainState):
    average: Any


def averaged(of=lambda params: params, tx=ADAM):
    state = create_small(tx)
    return Averaged(**vars(state), average=of(state.params))


def sharded(mesh, stage, create=lambda: create_small(ADAM), **fields):
    state = jzero.shard(create, stage=stage, mesh=mesh, min_shard_bytes=0, **fields)
    return state, jzero.plan_of(state)


def averages(state, data):
    new, loss = train_step(state, data)
    params = jax.tree.unflatten(jax.tree.structure(state.average), jax.tree.leaves(new.params))
    return new.replace(average=jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state.average, params)), loss


def found_in(state, plan, step=train_step, donate=0):
    program = jax.jit(step, donate_argnums=donate).lower(state, plan.place_batch(batch())).compile()
    return by_cause(jzero.findings(program, plan))


def by_cause(found):
    """By kind, and those of `state_too_large` by their cause."""
    causes = {WHOLE: "not split as planned", KIND: "by the plan's closed form"}
    return {next((name for name, text in causes.items() if text in f.text), f.kind): f for f in found}


def whole(tree, plan):
    return jax.device_put(tree, plan.sharding(jax.P()))


def widened(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)


def again(state, plan):
    return jzero.shard(state, plan.config, mesh=plan.mesh)


def held(tree) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.default_cases("one vector")
@pytest.mark.remedy("more_memory_than_closed_form", "state = jzero.shard(state, plan.config, mesh=mesh)")
@pytest.mark.parametrize("tx", [HISTORY, optax.flatten(ADAM)], ids=["history", "one vector"])
def test_state_that_has_no_shape_of_a_param(tx, mesh):
    """By a chain whose init was called outside of jzero, or a restore: no leaf for `state.state_whole`, or not all."""
    state, plan = sharded(mesh, 2, lambda: create_small(tx))
    assert KIND not in found_in(state, plan)
    wrong = state.replace(opt_state=whole(state.opt_state, plan))
    found = found_in(wrong, plan)
    said = found[WHOLE].bytes if tx is HISTORY else 0
    assert found[KIND].bytes == held(wrong.opt_state) - held(state.opt_state) - said  # each leaf once
    name = "diff_params_memory['Dense_0']['kernel'] comes in as f32[4,24,32], planned f32[4,3,32]"
    assert (name if tx is HISTORY else ".opt_state[0].mu comes in as f32[") in found[KIND].text
    assert "jzero.shard(state, plan.config" in found[KIND].remedy
    assert KIND not in found_in(again(wrong, plan), plan)


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_moments_in_a_wider_dtype_than_planned(stage, mesh):
    state, plan = sharded(mesh, stage, moment_dtype="bfloat16")
    assert found_in(state, plan) == {}
    wrong = state.replace(opt_state=widened(state.opt_state))
    finding = found_in(wrong, plan)[KIND]
    assert finding.bytes == held(wrong.opt_state) - held(state.opt_state)
    assert "comes in as f32[3,32], planned bf16[3,32]" in finding.text
    assert found_in(again(wrong, plan), plan) == {}


@pytest.mark.remedy("not_checked", "an init that takes params alone")
def test_an_init_that_cannot_be_traced_again(mesh):
    """Of a program that jzero has not traced: its `tx` says what the state should be, or why it cannot."""
    ready = [True]

    def init(params):
        if not ready:
            raise KeyError("wants a batch")
        return ADAM.init(params)

    state, plan = sharded(mesh, 2, lambda: create_small(optax.GradientTransformation(init, ADAM.update)))
    ready.clear()
    found = found_in(state, plan)
    assert set(found) == {"not_checked"}
    assert "its init cannot be traced (KeyError: 'wants a batch')" in found["not_checked"].text
    assert found_in(*sharded(mesh, 2)) == {}


@pytest.mark.remedy("not_checked", "of a step that updates by jzero.zero(tx, plan)")
def test_moments_without_their_optimizer(mesh, monkeypatch):
    """In programs of the CPU it is in the text, in those for GPUs a finding: as of other rules that want a trace."""
    state, plan = sharded(mesh, 2)

    def step(both, data):
        new, loss = train_step(state.replace(**both), data)
        return {"params": new.params, "opt_state": new.opt_state}, loss

    both, data = {"params": state.params, "opt_state": state.opt_state}, plan.place_batch(batch())
    program = jax.jit(step, donate_argnums=0).lower(both, data).compile()
    found = jzero.findings(program, plan)
    assert found == ()
    assert "not the dtypes of the optimizer state" in found.in_part["state_too_large"]
    monkeypatch.setattr(Evidence, "on_cpu", False)
    uses = {x.name: ("kept",) for x in plan.layouts}
    (finding,) = jzero.findings(program, plan, uses=uses, ignore=KINDS)
    assert "whether the optimizer state is held in the dtypes of the plan was not looked for" in finding.text
    state, other = sharded(mesh, 2, lambda: averaged(tx=optax.sgd(0.1)))  # without state: an average is none
    program = jax.jit(averages, donate_argnums=0).lower(state, data).compile()
    assert jzero.findings(program, other, uses=uses, ignore=KINDS) == ()
    traced = jzero.jit(step, plan, donate_argnums=0).lower(both, data).compile()
    assert jzero.findings(traced, plan, uses=uses, ignore=KINDS) == ()


@pytest.mark.default_cases("2")
@pytest.mark.remedy("more_memory_than_closed_form", "Copies of the params as a tree with their names")
@pytest.mark.remedy("more_memory_than_closed_form", "A layout on the mesh that an average")
@pytest.mark.parametrize("stage", [2, 3])
def test_an_average_as_a_list(stage, mesh):
    """Nothing says whose copies its leaves are, so `shard` keeps them whole; vectors are passed over."""
    state, plan = sharded(mesh, stage, lambda: averaged(jax.tree.leaves))
    finding = found_in(state, plan, averages)[KIND]
    assert finding.bytes == sum(x.nbytes * 7 // 8 for x in plan.layouts if not x.vector and not x.reason)
    copy = state.average
    scope = {"jax": jax, "plan": plan, "params": state.params, "copy": copy}
    for words in finding.remedy.split("copy = ")[1:]:
        scope["copy"] = eval(words.partition(". ")[0].removesuffix("."), scope)
    assert found_in(again(state.replace(average=scope["copy"]), plan), plan, averages) == {}


@pytest.mark.remedy("state_whole", "A layout on the mesh that an average")
def test_an_average_that_is_whole(mesh):
    """`state.state_whole` names it, alone; jzero keeps a layout on the mesh, so the remedy lays it out first."""
    state, plan = sharded(mesh, 2, averaged)
    assert found_in(state, plan, averages) == {}
    wrong = state.replace(average=whole(state.average, plan))
    found = found_in(wrong, plan, averages)
    assert set(found) == {WHOLE}
    words = found[WHOLE].remedy.split("copy = ")[1].removesuffix(".")
    copy = eval(words, {"jax": jax, "plan": plan, "copy": wrong.average})
    assert found_in(again(wrong.replace(average=copy), plan), plan, averages) == {}


@pytest.mark.parametrize("stage", [2, 3])
def test_an_average_of_a_param_whose_state_is_padded(stage, mesh):
    """The optimizer state alone is padded: `shard` keeps such an average whole, which is not a fault."""

    def create(of=lambda params: params):
        params = {"odd": jnp.ones((129, 131)), "even": jnp.ones((131, 256))}
        return Averaged.create(
            apply_fn=lambda v, x: jnp.pad(x, ((0, 0), (0, 105))) @ v["params"]["odd"] @ v["params"]["even"][:, :6],
            params=params, tx=ADAM, average=of(params),
        )  # fmt: skip

    state, plan = sharded(mesh, stage, create, uneven="pad")
    assert not {KIND, WHOLE} & set(found_in(state, plan, averages))
    state, plan = sharded(mesh, stage, lambda: create(jax.tree.leaves), uneven="pad")
    assert "129" not in found_in(state, plan, averages)[KIND].text


def test_an_evaluation_with_whole_params(mesh):
    def evaluates(state, data):
        return loss_of(state.apply_fn, state.params, data)

    state, plan = sharded(mesh, 3)
    wrong = state.replace(params=jzero.unshard(state.params))
    ((cause, finding),) = found_in(wrong, plan, evaluates, donate=()).items()
    assert (cause, finding.bytes) == (KIND, held(wrong.params) - held(state.params))
    assert found_in(again(wrong, plan), plan, evaluates, donate=()) == {}


def test_params_on_the_device_whose_place_is_host_memory(mesh):
    state, plan = sharded(mesh, 3, offload=jzero.Offload(params="host"))
    there = [x.sharding.memory_kind for x in jax.tree.leaves(state.params)]
    assert "pinned_host" in there
    assert KIND not in found_in(state, plan)
    here = jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")), state.params)
    finding = found_in(state.replace(params=here), plan)[KIND]
    assert "planned in host memory" in finding.text
    assert finding.bytes == sum(
        held(x) for x, kind in zip(jax.tree.leaves(here), there, strict=True) if kind == "pinned_host"
    )


@pytest.mark.pod
def test_a_jit_of_the_user_whose_in_shardings_replicate_the_params():
    """`state.state_whole` names what has a layout of its own in the plan; nothing is said twice."""
    pod = jzero.pod("h200")
    state = jzero.abstract(lambda: create_small(ADAM), stage=3, mesh=pod.mesh({"data": 8}), min_shard_bytes=0)
    plan, data = jzero.plan_of(state), jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch())
    homes = jax.tree.map(lambda x: x.sharding, state).replace(params=plan.sharding(jax.P()))
    step = jax.jit(train_step, in_shardings=(homes, plan.batch), donate_argnums=0)
    bare = state.replace(params=jax.tree.map(lambda x: x.update(sharding=plan.sharding(jax.P())), state.params))
    found = by_cause(jzero.findings(pod.compile(step, bare, data), plan))
    assert WHOLE in found
    assert KIND not in found
