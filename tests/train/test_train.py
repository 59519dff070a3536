"""train/: the GPT learns, resumes bitwise, and refuses what cannot run; the digits pass 95 %."""

import contextlib
import dataclasses
import functools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax import contrib
from processes import free_port

import jzero
from jzero.core.errors import human_bytes
from train import config as flags
from train import digits, figures, gpt, memory
from train.config import PRESETS
from train.log import Log, read_metrics
from train.model import GPT, Model

ROOT = Path(__file__).resolve().parents[2]
SHORT = {
    "steps": 40,
    "log_every": 10,
    "eval_every": 20,
    "save_every": 20,
    "eval_windows": 64,
    "sample_bytes": 16,
}
TINY = dataclasses.replace(PRESETS["tiny"], **SHORT)


SMALL = dataclasses.replace(TINY, model=Model(width=32, layers=2, heads=1, seq=16))


def run(config):
    return gpt.train(config, gpt.prepare(config))


def exactly(text):
    return f"^{re.escape(text)}$"


def with_model(config=TINY, **fields):
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **fields))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run from start to end."""
    config = with_model(dataclasses.replace(TINY, out=tmp_path_factory.mktemp("gpt") / "run"), dropout=0.1)
    return config, run(config)


def copied(finished, tmp_path):
    """The same run, stopped at step 20 with the files of the later steps lost."""
    config = dataclasses.replace(finished[0], out=tmp_path / "run", resume=True)
    shutil.copytree(finished[0].out, config.out)
    shutil.rmtree(config.out / "checkpoints" / "40")
    return config


def new_state(config):
    """Under jit: eager initialisation compiles one op at a time."""
    return jax.jit(lambda: gpt.create_state(config))()


def leaves(state):
    plain = state.replace(key=jax.random.key_data(state.key))
    return [np.asarray(x) for x in jax.tree.leaves(plain)]


# -- a run


@pytest.mark.nightly
def test_the_loss_falls(finished):
    _, result = finished
    losses = [loss for _, loss in result.losses]
    assert [step for step, _ in result.losses] == list(range(1, 41))
    assert 5 < losses[0] < 7
    assert np.mean(losses[-5:]) < 3.3
    assert [step for step, _ in result.heldout] == [20, 40]
    assert result.heldout[-1][1] < result.heldout[0][1]
    assert 2 < result.bigram < 3


def test_what_a_run_leaves_behind(finished):
    config, result = finished
    rows = [json.loads(line) for line in (config.out / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if "loss" in r] == [10, 20, 30, 40]
    assert all(r["tokens_per_second"] > 0 for r in rows if "loss" in r)
    assert rows[-1]["margin"] == pytest.approx(result.bigram - result.heldout[-1][1])
    for name in ("loss.png", "step.png"):
        assert (config.out / name).read_bytes().startswith(b"\x89PNG")
    assert list((config.out / "tensorboard").iterdir())
    assert gpt.saved_steps(config.out) == [20, 40]
    assert (config.out / "sample.txt").read_text() == result.text
    assert result.text.startswith(config.prompt)


def test_lines_have_the_memory_and_the_wire_of_the_program(finished):
    """2 Psi by the closed form; on simulated devices an all-reduce stands for a reduce-scatter, which makes it 3."""
    config, result = finished
    rows = [row for row in read_metrics(config.out / "metrics.jsonl") if "loss" in row]
    psi = 7 * 4 * sum(x.size for x in jax.tree.leaves(result.state.params)) // 8
    for row in rows:
        assert row["wire_bytes"] == pytest.approx(3 * psi, rel=0.01)
        assert row["wire_by_closed_form"] == pytest.approx(1.5, rel=0.01)
        assert row["memory_bytes"] > 10**8


def test_wire_that_cannot_be_read_is_said_and_ends_no_run(finished, monkeypatch):
    def fails(*_):
        raise jzero.ProofError("one part of it is new")

    plan = jzero.plan_of(finished[1].state)
    program = jax.jit(lambda x: x + 1).lower(jnp.ones(8)).compile()
    monkeypatch.setattr(jzero, "explain", fails)
    found = figures.figures_of(program, plan, jzero.estimate(plan))
    assert found.wire is None
    assert found.metrics == {}
    assert "bytes on the wire are not known: one part of it is new" in str(found)


def test_the_batch_is_split_and_the_state_is_sharded(finished):
    config, result = finished
    plan = gpt.jzero.plan_of(result.state)
    tokens = plan.place_batch({"tokens": np.zeros((config.batch, 33), np.int32)})["tokens"]
    assert tokens.sharding.shard_shape(tokens.shape) == (config.batch // 8, 33)
    moments = [x for x in jax.tree.leaves(result.state.opt_state) if x.size >= 64 * 192]
    assert moments
    for x in moments:
        assert np.prod(x.sharding.shard_shape(x.shape)) == x.size // 8


def test_a_run_ends_with_what_a_device_holds_and_what_one_alone_would(finished):
    state = finished[1].state
    expected = gpt.jzero.estimate(gpt.jzero.plan_of(state), tx=state.tx)
    whole = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
    held = f"{human_bytes(expected.params + expected.opt_state)} of params and optimizer state on each of 8 devices"
    assert gpt.held_line(state) == f"{held}; one unsharded device would hold {human_bytes(whole)}"
    assert whole > 2 * (expected.params + expected.opt_state)


# -- resuming


def test_a_resumed_run_equals_the_uninterrupted_one_bitwise(finished, tmp_path):
    config = copied(finished, tmp_path)
    again = run(config)
    whole = finished[1]
    for got, wanted in zip(leaves(again.state), leaves(whole.state), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert [x for x in again.losses if x[0] > 20] == whole.losses[20:]
    assert again.heldout == whole.heldout
    assert again.text == whole.text
    rows = [json.loads(line)["step"] for line in (config.out / "metrics.jsonl").read_text().splitlines()]
    assert rows == [10, 20, 20, 30, 40, 40, 40]


@pytest.mark.nightly
def test_a_run_resumes_at_another_stage(finished, tmp_path):
    config = dataclasses.replace(copied(finished, tmp_path), stage=3)
    again = run(config)
    for (step, got), (_, wanted) in zip(again.losses[-20:], finished[1].losses[20:], strict=True):
        assert got == pytest.approx(wanted, rel=1e-3), step


def test_resume_without_a_checkpoint(tmp_path):
    text = f"--resume: no checkpoint in {tmp_path}. Pass the run's --out, or leave out --resume."
    with pytest.raises(ValueError, match=exactly(text)):
        gpt.prepare(dataclasses.replace(TINY, out=tmp_path, resume=True))


def test_resume_with_other_settings(finished):
    config = dataclasses.replace(with_model(finished[0], layers=3), batch=24, resume=True)
    text = (
        f"--resume: the run in {config.out} was started with other settings:\n"
        "  layers: 2 in the checkpoint, 3 now\n"
        "  batch: 16 in the checkpoint, 24 now\n"
        "Pass the same flags again (the stage and the devices may change), or another --out."
    )
    with pytest.raises(ValueError, match=exactly(text)):
        gpt.prepare(config)


def test_a_finished_run_is_not_overwritten_unasked(finished):
    text = (
        f"--out {finished[0].out} holds a run that reached step 40. Pass --resume to continue it, "
        "--overwrite to delete it, or another --out."
    )
    with pytest.raises(ValueError, match=exactly(text)):
        gpt.prepare(finished[0])


# -- several processes


@pytest.mark.nightly
def test_two_processes_give_the_losses_of_one(tmp_path):
    def start(out, *more):
        command = [
            sys.executable,
            ROOT / "train" / "gpt.py",
            "--preset",
            "tiny",
            "--steps",
            "20",
            "--dropout",
            "0.1",
        ]
        command = [*map(str, command), "--log-every", "1", "--out", str(tmp_path / out), *more]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    group = [
        "--devices",
        "4",
        "--coordinator",
        f"localhost:{free_port()}",
        "--processes",
        "2",
        "--process-id",
    ]
    for process in [start("two", *group, "0"), start("two", *group, "1"), start("one")]:
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert len(one) == 22
    for a, b in zip(one, two, strict=True):
        for name in {"loss", "heldout_loss"} & a.keys():
            assert b[name] == pytest.approx(a[name], abs=1e-6), (a["step"], name)


# -- bad input


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            dataclasses.replace(TINY, batch=20),
            "--batch 20: 8 devices cannot split 20 windows evenly (20 = 2 x 8 + 4). Pass --batch 16 or 24.",
        ),
        (
            dataclasses.replace(TINY, batch=3),
            "--batch 3: 8 devices cannot split 3 windows evenly (3 = 0 x 8 + 3). Pass --batch 8.",
        ),
        (
            with_model(heads=3),
            "--width 64 --heads 3: 3 heads cannot split 64 features evenly (64 = 21 x 3 + 1). Pass --heads 2, or "
            "another --width.",
        ),
        (
            with_model(width=6, heads=2),
            "--width 6 --heads 2: rotary positions need an even number of features per head, not 6/2.",
        ),
        (with_model(heads=0), "--heads 0: must be at least 1."),
        (
            with_model(width=7, heads=2),
            "--width 7 --heads 2: 2 heads cannot split 7 features evenly (7 = 3 x 2 + 1). Pass another --width.",
        ),
        (dataclasses.replace(TINY, save_every=0), "--save-every 0: must be at least 1."),
        (
            dataclasses.replace(TINY, save_every=20, lose_at_most=10),
            "--lose-at-most 10: there is a checkpoint every 20 steps only. Pass --save-every 10, or --lose-at-most 20 "
            "or more.",
        ),
        (dataclasses.replace(TINY, devices=0), "--devices 0: must be at least 1."),
        (
            dataclasses.replace(TINY, offload_params=True),
            "--offload-params: needs stage 3; at stage 2 the model reads whole params on the device. "
            "Pass --stage 3, or --offload host for the optimizer state alone.",
        ),
        (
            dataclasses.replace(TINY, optim=dataclasses.replace(TINY.optim, lr=-1.0)),
            "--lr -1: must be more than 0.",
        ),
        (dataclasses.replace(TINY, temperature=float("nan")), "--temperature nan: must be more than 0."),
        (with_model(dropout=1.0), "--dropout 1: must be at least 0 and less than 1."),
        (
            dataclasses.replace(TINY, prompt=""),
            "--prompt: must not be empty; the sample needs a byte to start from.",
        ),
    ],
)
def test_bad_sizes(config, text):
    with pytest.raises(ValueError, match=exactly(text)):
        flags.check(config, devices=8)


def test_a_folder_that_cannot_be_made():
    with pytest.raises(ValueError, match=r"--out /proc/x: .* Pass a folder that can be written"):
        gpt.prepare(dataclasses.replace(TINY, out=Path("/proc/x")))


def test_unknown_stage():
    with pytest.raises(ValueError, match="stage must be an integer from 0 to 3"):
        gpt.prepare(dataclasses.replace(TINY, stage=4))


def test_the_command_line_ends_with_the_error_alone(tmp_path):
    """From another folder, as a script; nothing is compiled before it ends."""
    command = [sys.executable, str(ROOT / "train" / "gpt.py"), "--preset", "tiny", "--data", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: --data nowhere: no such file or folder.")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_flags_go_on_top_of_a_preset():
    config = flags.parse(["--preset=tiny", "--stage=3", "--dtype=bfloat16", "--lr=0.5", "--resume"])
    assert config == dataclasses.replace(
        PRESETS["tiny"],
        stage=3,
        resume=True,
        model=dataclasses.replace(PRESETS["tiny"].model, dtype="bfloat16"),
        optim=dataclasses.replace(PRESETS["tiny"].optim, lr=0.5),
    )
    assert flags.parse([]) == PRESETS["default"]


# -- the model


def batch_of(config, rows=4):
    tokens = np.random.default_rng(0).integers(0, 256, (rows, config.model.seq + 1))
    return {"tokens": jnp.asarray(tokens, jnp.int32)}


def loss_and_grads(model, params, batch):
    def loss_of(params):
        loss: Any = GPT(model).apply({"params": params}, *gpt.windows_of(batch))
        return loss

    return jax.jit(jax.value_and_grad(loss_of))(params)


@pytest.mark.nightly
@pytest.mark.parametrize("tied", [False, True])
def test_a_loss_in_tiles_has_the_same_curve(tied, tmp_path):
    """1e-5 apart at the most, in training and in evaluation; by default small logits stay whole."""
    short = dataclasses.replace(SMALL, steps=12, log_every=1, eval_every=6, stage=3)
    assert not memory.in_tiles(SMALL)
    assert memory.in_tiles(with_model(dataclasses.replace(SMALL, batch=10**9), tied=tied))
    found = [
        run(with_model(dataclasses.replace(short, out=tmp_path / str(tiles)), tied=tied, tiled_loss=tiles))
        for tiles in (False, True)
    ]
    plain, tiled = ([loss for _, loss in (*r.losses, *r.heldout)] for r in found)
    np.testing.assert_allclose(tiled, plain, atol=1e-5)


def test_create_state_needs_no_arguments():
    state = jax.eval_shape(gpt.create_state)
    assert state.params["embed"]["embedding"].shape == (256, PRESETS["default"].model.width)
    assert sum(x.size for x in jax.tree.leaves(state.params)) < 2_000_000


def test_only_kernels_decay():
    for scan in (False, True):
        params = jax.eval_shape(lambda scan=scan: gpt.create_state(with_model(scan=scan))).params
        decays = jax.tree_util.tree_leaves_with_path(gpt.is_matrix(params))
        assert all(decay == (path[-1].key == "kernel") for path, decay in decays)
        assert 0 < sum(decay for _, decay in decays) < len(decays)


@pytest.mark.parametrize("scan", [False, True])
def test_muon_takes_the_matrices_of_the_blocks(scan):
    params = jax.eval_shape(lambda: gpt.create_state(with_model(scan=scan))).params
    for path, optimizer in jax.tree_util.tree_leaves_with_path(gpt.owner(params)):
        names = [key.key for key in path]
        block = names[0] == "layers" or re.fullmatch(r"layer_\d+", names[0])
        assert optimizer == ("muon" if block and names[-1] == "kernel" else "adamw")
    dims = gpt.matrices(params)["layers" if scan else "layer_0"]["qkv"]["kernel"]
    assert dims == ((1, 2) if scan else (0, 1))


@pytest.mark.nightly
def test_a_run_with_muon(tmp_path):
    config = dataclasses.replace(SMALL, stage=3, out=tmp_path / "run")
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, optimizer="muon"))
    result = run(config)
    assert result.losses[-1][1] < result.losses[0][1] - 1
    (muon,) = (s for s in jax.tree.leaves(result.state.opt_state, is_leaf=is_muon) if is_muon(s))
    assert jax.tree.leaves(muon.mu["layer_0"])
    assert not jax.tree.leaves(muon.mu["embed"])


def is_muon(state):
    return isinstance(state, contrib.MuonState)


def test_remat_changes_no_number():
    batch = batch_of(SMALL)
    params = new_state(SMALL).params
    plain = loss_and_grads(SMALL.model, params, batch)
    again = loss_and_grads(dataclasses.replace(SMALL.model, remat=True), params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain, again)


def test_a_scan_over_layers_is_the_same_model():
    batch = batch_of(SMALL)
    params = dict(new_state(SMALL).params)
    stacked = {k: v for k, v in params.items() if not k.startswith("layer_")}
    stacked["layers"] = jax.tree.map(lambda *x: jnp.stack(x), *[params[f"layer_{i}"] for i in range(2)])
    plain, _ = loss_and_grads(SMALL.model, params, batch)
    scanned, _ = loss_and_grads(dataclasses.replace(SMALL.model, scan=True, remat=True), stacked, batch)
    assert float(scanned) == pytest.approx(float(plain), rel=1e-6)


def test_tied_embedding_has_no_head():
    params = jax.eval_shape(lambda: gpt.create_state(with_model(tied=True))).params
    assert "head" not in params


def test_no_byte_sees_the_ones_after_it():
    state = new_state(SMALL)
    tokens = batch_of(SMALL, rows=1)["tokens"][:, :-1]
    later = tokens.at[0, 10:].set(0)
    one, two = (jax.jit(state.apply_fn)({"params": state.params}, x)[0, :10] for x in (tokens, later))
    np.testing.assert_array_equal(one, two)


@pytest.mark.nightly
def test_dropout_is_drawn_from_the_key_and_the_step():
    config = with_model(SMALL, dropout=0.5)
    state, batch = new_state(config), batch_of(config)
    step = jax.jit(lambda state: gpt.train_step(state, batch)[1]["loss"])
    same, other = step(state), step(state.replace(step=1))
    assert float(step(state)) == float(same) != float(other)
    assert float(gpt.eval_step(state, batch)) == float(gpt.eval_step(state.replace(step=1), batch))


def test_bfloat16_params_and_float32_logits():
    config = with_model(SMALL, dtype="bfloat16")
    state = jax.eval_shape(lambda: gpt.create_state(config))
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    logits = jax.eval_shape(state.apply_fn, {"params": state.params}, batch_of(config)["tokens"])
    assert logits.dtype == jnp.float32


@pytest.mark.nightly
def test_every_dtype_starts_from_the_same_numbers():
    wide = new_state(SMALL)
    half = new_state(with_model(SMALL, dtype="bfloat16"))
    mixed = new_state(with_model(SMALL, dtype="bfloat16", param_dtype="float32"))
    for a, b, c in zip(*(jax.tree.leaves(s.params) for s in (wide, half, mixed)), strict=True):
        np.testing.assert_array_equal(a.astype(jnp.bfloat16), b)
        np.testing.assert_array_equal(a, c)
    state = jzero.shard(lambda: gpt.create_state(with_model(SMALL, dtype="bfloat16")), stage=2)
    for a, master in zip(jax.tree.leaves(wide.params), jax.tree.leaves(state.opt_state.master), strict=True):
        # not the rounded ones: these are 2^-9 off
        np.testing.assert_allclose(a, jzero.unshard(master), rtol=1e-5, atol=1e-7)


@pytest.mark.nightly
def test_a_scale_of_int8_moments_that_is_not_finite_stops_the_run(tmp_path):
    plan = {"stage": 2, "moment_dtype": "int8", "min_shard_bytes": 0}
    state = jzero.shard(lambda: gpt.create_state(with_model(width=64)), **plan)
    bad = jax.tree.map(lambda p: jnp.full(p.shape, jnp.inf, p.dtype), state.params)
    raises = pytest.raises(FloatingPointError, match='moment_dtype="int8"')
    for grads, stops in ((state.params, contextlib.nullcontext()), (bad, raises)):
        _, metrics = jax.jit(gpt.updated)(state, grads, {"loss": jnp.float32(0)})
        with stops, Log(tmp_path, steps=1, every=1, tokens=1, start=0) as log:
            log.step(1, metrics)


@pytest.mark.nightly
def test_fp16_skips_overflows_and_logs_them(tmp_path, monkeypatch):
    monkeypatch.setattr(jzero, "LossScale", functools.partial(jzero.LossScale, initial=2.0**24))
    config = dataclasses.replace(
        with_model(SMALL, dtype="float16"), out=tmp_path / "run", steps=20, log_every=10
    )
    result = run(config)
    skipped = int(result.state.scale.skipped)
    assert 0 < skipped < 20
    assert float(result.state.scale.value) < 2.0**24
    assert {x.dtype for x in jax.tree.leaves(result.state.params)} == {jnp.dtype("float16")}
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jzero.unshard(result.state.params)))
    rows = [row for row in read_metrics(config.out / "metrics.jsonl") if "loss_scale" in row]
    assert [row["step"] for row in rows] == [10, 20]
    assert rows[-1]["skipped_steps"] == skipped


def test_sample_goes_past_the_window_and_repeats_with_its_key():
    from train.model import sample

    model = GPT(Model(width=32, layers=1, heads=1, seq=8))
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    prompt = jnp.asarray([1, 2, 3], jnp.int32)
    one, two = (sample(model, params, prompt, jax.random.key(1), count=20, temperature=1.0) for _ in range(2))
    assert one.shape == (20,)
    np.testing.assert_array_equal(one, two)


# -- digits


@pytest.mark.nightly
def test_digits_pass_95_percent():
    assert digits.train(digits.Config()) > digits.PASS


# --- memory of a machine that simulates devices -------------------------------------------------------------------


def test_what_the_machine_cannot_hold_is_refused_with_a_batch_that_fits(monkeypatch):
    monkeypatch.setattr(memory, "machine_bytes", lambda: 25 * 10**9)
    memory.check_fits(300 * 10**6, 0, batch=128)
    with pytest.raises(MemoryError) as caught:
        memory.check_fits(300 * 10**6, 34 * 10**9, batch=128)
    assert str(caught.value).startswith(
        "this run needs 274.40 GB of memory, 34.30 GB for each of 8 simulated devices, and this machine has 25.00 GB. "
        "Pass --batch 8 (now 128), --preset default or tiny"
    )
    for held, temp in ((10**10, 0), (10**10, 10**9)):  # no batch helps
        with pytest.raises(MemoryError, match=r"Pass --preset default or tiny"):
            memory.check_fits(held, temp, batch=128)


def test_the_memory_of_the_machine_is_that_of_its_container(tmp_path, monkeypatch):
    whole = memory.machine_bytes()
    assert 2**28 < whole < 2**48
    monkeypatch.setattr(memory, "LIMITS", (str(tmp_path / "memory.max"), str(tmp_path / "nothing")))
    found = []
    for text in ("max", str(2**62), str(2**28)):
        (tmp_path / "memory.max").write_text(text + "\n")
        found.append(memory.machine_bytes())
    assert found[0] == found[1] >= whole
    assert found[2] == 2**28


@pytest.mark.default_cases("1000000-Pass --preset")
@pytest.mark.parametrize(
    ("limit", "asks"), [(10**6, "Pass --preset"), (11 * 10**6, r"Pass --batch \d+ \(now")]
)
def test_a_run_that_does_not_fit_leaves_nothing_behind(limit, asks, tmp_path, monkeypatch):
    """Before anything is compiled where the state alone is too large, else before it is made."""
    config = dataclasses.replace(TINY, out=tmp_path / "run")
    monkeypatch.setattr(memory, "machine_bytes", lambda: limit)
    monkeypatch.setattr(jzero, "shard", None)
    with pytest.raises(MemoryError, match=asks):
        run(config)
    assert not (config.out / "checkpoints").exists()


def test_the_command_says_so_in_one_line(tmp_path, monkeypatch):
    def train(*_):
        raise MemoryError("this run needs more")

    monkeypatch.setattr(gpt, "train", train)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    with pytest.raises(SystemExit, match=exactly("error: this run needs more")):
        gpt.main(["--preset=tiny", f"--out={tmp_path / 'run'}"])
