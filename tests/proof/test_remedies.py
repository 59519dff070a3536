"""Every remedy that `check` can print is applied by a test, marked `remedy`, to the program that provoked it.

tests/conftest.py sees to it that the test has found the remedy, and in the program that it checks last no finding of
that kind. Here the marks are compared with the texts in jzero/proof/faults; and here are the remedies of findings that
have no test elsewhere, on the CPU backend.
"""

from __future__ import annotations

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from models import batch, create_small, train_step

import jzero
from jzero.proof import faults

ADAM = optax.adam(1e-2)
RULES = Path(faults.__file__).parent
TESTS = Path(__file__).parents[1]


def parsed(file):
    return ast.parse(file.read_text(encoding="utf-8"))


def assigned(nodes):
    """What names are assigned: several values where branches differ."""
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            targets = node.targets[0]
            pairs = [(targets, node.value)]
            if isinstance(targets, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(targets.elts, node.value.elts, strict=True)
            for target, value in pairs:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(value)
    return found


def texts(node, names):
    """The literal texts that an expression is put together from; of an f-string what stands between its values."""
    if isinstance(node, ast.JoinedStr):
        yield "{}".join(v.value for v in node.values if isinstance(v, ast.Constant))
        children = [v for v in node.values if isinstance(v, ast.FormattedValue)]
    elif isinstance(node, ast.Name):
        children = names.get(node.id, [])
        names = {name: values for name, values in names.items() if name != node.id}
    else:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        children = ast.iter_child_nodes(node)
    for child in children:
        yield from texts(child, names)


def printed():
    """(function, text) of each piece of a remedy: the third value of what a rule yields."""
    wording = assigned(parsed(RULES / "wording.py").body)
    for file in RULES.glob("*.py"):
        top = wording | assigned(parsed(file).body)
        for fn in (node for node in ast.walk(parsed(file)) if isinstance(node, ast.FunctionDef)):
            for node in ast.walk(fn):
                value = node.value if isinstance(node, ast.Yield) else None
                if isinstance(value, ast.Tuple) and len(value.elts) == 3:
                    found = texts(value.elts[2], top | assigned(ast.walk(fn)))
                    yield from ((fn.name, text) for text in found if " " in text.strip())


def applied():
    """(function, words) of the marks in the tests."""
    for file in TESTS.rglob("test_*.py"):
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.remedy":
                yield tuple(map(ast.literal_eval, node.args))


@pytest.mark.unit
def test_every_remedy_is_applied():
    remedies, marks = set(printed()), set(applied())
    assert len(remedies) > 40
    missing = [(fn, text) for fn, text in remedies if not any(fn == of and words in text for of, words in marks)]
    assert not missing
    unknown = [(of, words) for of, words in marks if not any(fn == of and words in text for fn, text in remedies)]
    assert not unknown


ODD = {"shape": (129, 131), "uneven": "replicate"}


@pytest.mark.parametrize(
    ("given", "remedies"),
    [
        pytest.param({"min_shard_bytes": 2**20}, [{"min_shard_bytes": 0}],
                     marks=pytest.mark.remedy("whole_leaves", "pass ZeroConfig(min_shard_bytes=0).")),
        pytest.param({"devices": 1}, [{"devices": 8}],
                     marks=pytest.mark.remedy("whole_leaves", "pass a mesh with more than one device")),
        pytest.param(ODD, [{"shape": (136, 131)}, {"devices": 3}, {"uneven": "pad"}],
                     marks=pytest.mark.remedy("whole_leaves", "ZeroConfig(uneven=\"pad\").")),
        pytest.param({**ODD, "stage": 3}, [{"shape": (136, 131)}, {"devices": 3}],
                     marks=pytest.mark.remedy("whole_leaves", "(pad the vocabulary), or share over fewer devices")),
        pytest.param({**ODD, "stage": 3, "uneven": "pad"}, [{"shape": (136, 131)}, {"devices": 3}],
                     marks=pytest.mark.remedy("whole_leaves", ". Their state is shared.")),
    ],
)  # fmt: skip
def test_leaves_that_stay_whole(given, remedies):
    """And at stage 3 none is told to pad, which splits the state and not the param."""

    def found(shape=(128, 128), devices=8, stage=2, **fields):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))
        params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
        plan = jzero.make_plan(params, stage=stage, mesh=mesh, **{"min_shard_bytes": 0, **fields})
        return jzero.findings(jax.jit(lambda p: p["w"] * 2).lower(plan.shapes).compile(), plan)

    (finding,) = found(**given)
    assert finding.kind == "state_too_large"
    assert ('uneven="pad"' in finding.remedy) == ({"uneven": "pad"} in remedies)
    for remedy in remedies:
        assert found(**{**given, **remedy}) == ()


def scanned(params, x):
    return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None), x, params)[0]


def mixed(params, x):
    """Experts, which have the shapes of a stack."""
    hidden = jnp.tanh(jnp.einsum("bd,edh->beh", x, params["up"]))
    return jnp.einsum("beh,ehd->bd", hidden, params["down"])


@pytest.mark.parametrize(
    ("model", "given", "remedy"),
    [
        pytest.param(scanned, {"spec": jax.P("data")}, {"spec": jax.P(None)},
                     marks=pytest.mark.remedy("stack_before_loop", "leave that dim of the stack out of its layout")),
        pytest.param(mixed, {"spec": jax.P("data"), "whole": True}, {"scan_axes": {"w": None}},
                     marks=pytest.mark.remedy("stack_before_loop", "Where it is not a stack")),
        pytest.param(scanned, {"whole": True, "gathers": False}, {"whole": False, "gathers": True},
                     marks=pytest.mark.remedy("stack_before_loop", "no constraint on the stacked params before")),
    ],
)  # fmt: skip
def test_stacks_that_are_gathered_whole(model, given, remedy, mesh):
    def found(spec=None, whole=False, gathers=True, scan_axes=None):
        params = {"w": {"up": jnp.ones((8, 64, 128)), "down": jnp.ones((8, 128, 64))}}
        create = lambda: TrainState.create(apply_fn=None, params=params, tx=ADAM)  # noqa: E731
        specs = jax.tree.map(lambda _: spec or jax.P(), params)
        state = jzero.abstract(create, stage=3, mesh=mesh, min_shard_bytes=0, param_specs=specs, scan_axes=scan_axes)
        plan = jzero.plan_of(state)

        def loss_fn(params):
            params = jax.lax.with_sharding_constraint(params, plan.sharding(jax.P())) if whole else params
            return (model(params["w"], jnp.ones((64, 64))) ** 2).mean()

        def step(state):
            loss = jzero.gather_on_use(loss_fn, plan) if gathers else loss_fn
            return state.apply_gradients(grads=jax.grad(loss)(state.params))

        return jzero.findings(jax.jit(step, donate_argnums=0).lower(state).compile(), plan)

    assert {f.kind for f in found(**given)} == {"weights_not_gathered_on_use"}
    assert found(**{**given, **remedy}) == ()


@pytest.mark.remedy("_endless", "jax.lax.fori_loop with a length that is known")
def test_a_loop_of_unknown_length(mesh):
    state = jzero.shard(lambda: create_small(ADAM), stage=2, mesh=mesh)
    plan = jzero.plan_of(state)

    def found(loop):
        def step(state, data):
            w = state.params["Dense_0"]["kernel"]
            return loop(lambda x: jnp.tanh(x @ w @ w.T) / jnp.mean(x), data["x"])

        return jzero.findings(jax.jit(step).lower(state, plan.place_batch(batch())).compile(), plan)

    (finding,) = found(lambda body, x: jax.lax.while_loop(lambda x: jnp.mean(x) > 0.1, body, x))
    assert "whose trip count XLA does not know" in finding.text
    assert found(lambda body, x: jax.lax.fori_loop(0, 9, lambda _, x: body(x), x)) == ()


@pytest.mark.remedy("_endless", "jax.lax.with_sharding_constraint(numbers, plan.sharding(jax.P()))")
def test_random_numbers_that_are_drawn_until_they_are_accepted(mesh):
    def run(place):
        state = jzero.shard(lambda: create_small(ADAM), stage=2, mesh=mesh)
        plan = jzero.plan_of(state)

        def step(state, data, key):
            def loss(params):
                numbers = place(jax.random.beta(key, 1.5, 1.0, data["x"].shape[:1]), plan)
                return jnp.mean(state.apply_fn({"params": params}, data["x"] * numbers[:, None]) ** 2)

            value, grads = jax.value_and_grad(jzero.gather_on_use(loss, plan))(state.params)
            return state.apply_gradients(grads=grads), value

        args = state, plan.place_batch(batch()), jax.random.key(0)
        program = jzero.jit(step, plan).lower(*args).compile()
        return jzero.findings(program, plan), program(*args)[1]

    (finding,), loss = run(lambda numbers, plan: numbers)
    assert "that ends when all devices have drawn their random numbers" in finding.text
    found, same = run(lambda numbers, plan: jax.lax.with_sharding_constraint(numbers, plan.sharding(jax.P())))
    assert found == ()
    np.testing.assert_allclose(loss, same, rtol=1e-6)


@pytest.mark.remedy("not_checked", "an init that takes params alone")
def test_an_init_that_cannot_be_traced(mesh):
    over = []

    def init(params):
        if over:
            raise RuntimeError("outside of its context")
        return optax.EmptyState()

    tx = optax.chain(optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state)), ADAM)
    state = jzero.shard(lambda: create_small(tx), stage=2, mesh=mesh, min_shard_bytes=0)
    plan = jzero.plan_of(state)
    program = jzero.jit(train_step, plan).lower(state, batch()).compile()
    over.append(True)
    (finding,) = jzero.findings(program, plan)
    assert "(RuntimeError: outside of its context)" in finding.text
    over.clear()
    assert jzero.findings(program, plan) == ()
