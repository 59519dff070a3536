"""A step that does not come back ends the job, with status 75 and an account; one that is slow does not."""

from __future__ import annotations

import gc
import threading
import time
import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from processes import start

import jzero
from jzero.core import step_watch
from jzero.core.step_watch import STATUS

COUNT = 2


@pytest.fixture
def ended(monkeypatch, capfd):
    """What a deadline says when it ends this process, which lives on."""
    over, codes = threading.Event(), []

    def leave(code):
        codes.append(code)
        over.set()
        time.sleep(60)

    monkeypatch.setattr(step_watch.os, "_exit", leave)

    def wait(seconds=10):
        assert over.wait(seconds)
        assert codes == [STATUS]
        return capfd.readouterr().err

    wait.codes = codes
    return wait


@pytest.mark.default_cases("stop-0", "save-1")
@pytest.mark.parametrize(
    ("kind", "who"), [("stop", 0), ("stop", 1), ("loop", 1), ("io", 0), ("save", 1), ("slow", 0)]
)
def test_processes(kind, who, tmp_path):
    workers = start("deadline_worker.py", COUNT, tmp_path, kind, who)
    living = [i for i in range(COUNT) if (kind, i) != ("stop", who)]
    try:
        said = {i: workers[i].communicate(timeout=90)[0] for i in living}
        codes = {workers[i].returncode for i in living}
    finally:
        for w in workers:
            w.kill()
            w.communicate()
    if kind in ("save", "slow"):  # somebody may be late and have time left
        assert codes == {0}, said
        assert all("RESULT 200.0" in x for x in said.values())
        assert (kind == "save") == any(f"waits for process {who}, between step 8" in x for x in said.values())
        return
    assert codes == {STATUS}, said
    for i, text in said.items():
        late = "Process 0, which has the key-value store, does not answer" if (kind, who) == ("stop", 0) else ""
        assert (late or f"Late: process {who}.") in text, text
        stacks = (tmp_path / f"deadline-process-{i}.txt").read_text()
        assert "deadline_worker.py" in stacks
        if i == who:
            assert ("in endless" if kind == "loop" else "in late") in stacks


def test_a_call_that_never_returns(ended, tmp_path):
    go = threading.Event()

    def wait(x):
        go.wait(20)
        return x

    @jax.jit
    def plain(x, hangs):
        return jax.lax.cond(hangs, lambda x: jax.pure_callback(wait, jax.typeof(x), x), lambda x: x, x)

    step = jzero.deadline(plain, seconds=0.5, folder=tmp_path)
    step(jnp.ones(4), False)
    thread = threading.Thread(target=step, args=(jnp.ones(4), True), name="the loop")
    thread.start()
    text = ended()
    go.set()
    thread.join()
    step.close()
    assert "in the call of step 2 for 0.5 s; the limit is 0.5 s." in text
    assert "\nthe loop\n" in (tmp_path / "deadline-process-0.txt").read_text()


def test_a_program_that_never_ends(ended, tmp_path):
    """As where dispatch is asynchronous: calls return, and the loop goes on until it reads a result."""
    go = threading.Event()
    leaf = types.SimpleNamespace(block_until_ready=lambda: go.wait(20))
    watched = step_watch.Watched(step_watch.Limits(0.5, 60.0, 60.0), tmp_path, 0)
    for _ in range(3):
        watched.begin()
        watched.called(leaf)
    assert "in step 1, its program on the devices, for 0.5 s; the limit is 0.5 s." in ended()
    watched.end()
    go.set()


def test_a_pause_that_never_ends(ended, tmp_path):
    step = jzero.deadline(jax.jit(lambda x: x + 1), seconds=5, pause_seconds=0.4, folder=tmp_path)
    step(jnp.ones(2))
    assert "between step 1 and the next call for 0.4 s; the limit is 0.4 s." in ended()
    step.close()


def test_compiling_is_no_step(ended, capfd):
    """Also for a shape that comes late."""

    @jax.jit
    def plain(x):
        time.sleep(1.5)  # while it is traced
        return x + 1

    with jzero.deadline(plain, seconds=0.9, pause_seconds=30) as step:
        for size in (1, 1, 2, 2):
            step(jnp.ones(size))
    assert ended.codes == [], capfd.readouterr()


def test_after_the_end_nothing_is_watched(ended, capfd):
    with jzero.deadline(jax.jit(lambda x: x + 1), seconds=9, pause_seconds=1) as step:
        step(jnp.ones(2))
    step(jnp.ones(2))  # begins again
    del step
    gc.collect()
    time.sleep(1.5)
    assert ended.codes == [], capfd.readouterr()


def test_a_step_may_return_donated_state_alone_or_nothing(ended):
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    @nnx.jit
    def in_place(model):
        model.kernel[...] += 1

    donates = jax.jit(lambda x: x + 1, donate_argnums=0)
    with jzero.deadline(in_place, seconds=30) as first, jzero.deadline(donates, seconds=30) as second:
        x = jnp.zeros((64, 64))
        for _ in range(30):
            first(model)
            x = second(x)
        assert float(x[0, 0]) == 30
        assert len(first._watch.durations) == 20
    assert ended.codes == []


def test_the_default_limit_is_ten_times_the_median_and_a_minute_at_least():
    limits = step_watch.Limits(None, 900.0, 60.0)
    assert limits.of_step(step_watch.deque([1.0] * 4)) == (900, "")
    assert limits.of_step(step_watch.deque([1.0] * 5))[0] == 60
    assert limits.of_step(step_watch.deque([7.0, 8, 9, 100, 9]))[0] == 90


def test_it_has_the_attributes_of_the_step():
    step = jzero.deadline(jax.jit(lambda x: x + 1))
    assert "add" in step.lower(jnp.ones(2)).as_text()
    with pytest.raises(AttributeError):
        _ = step.nothing


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"seconds": 0}, ValueError, "seconds=0\\): seconds must be a positive number"),
        ({"compile_seconds": None}, TypeError, "compile_seconds=None"),
        ({"pause_seconds": "1"}, TypeError, "pause_seconds='1'"),
        ({"folder": "/no/such"}, ValueError, "folder /no/such"),
    ],
)
def test_bad_arguments(given, kind, message):
    with pytest.raises(kind, match=message):
        jzero.deadline(jax.jit(lambda x: x), **given)
