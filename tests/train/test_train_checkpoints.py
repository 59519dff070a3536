"""train/gpt.py's checkpoints: a run that is stopped, killed or damaged goes on as if it had not been."""

import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jzero import checkpoint
from jzero.__main__ import main as command
from jzero.checkpoint import checksums
from train import config as flags
from train import gpt
from train.checkpoints import saved_steps
from train.config import PRESETS
from train.log import Log
from train.model import Model
from train.stopping import Stopping

ROOT = Path(__file__).resolve().parents[2]
CONFIG = dataclasses.replace(
    PRESETS["tiny"],
    model=Model(width=32, layers=1, heads=1, seq=16, dropout=0.1),
    steps=30, log_every=10, eval_every=10, save_every=10, eval_windows=16, sample_bytes=4, keep=1,
)  # fmt: skip


@functools.cache
def corpus():
    return gpt.data.load(CONFIG.data)


def run(config):
    return gpt.train(config, gpt.prepare(config))


def numbers(state):
    return [np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
            for x in jax.tree.leaves(state)]  # fmt: skip


def assert_same_end(got, whole):
    for a, b in zip(numbers(got.state), numbers(whole.state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert got.losses[-10:] == whole.losses[-10:]  # of earlier steps a resumed run has those in metrics.jsonl
    assert got.heldout == whole.heldout


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing happens to."""
    return run(dataclasses.replace(CONFIG, out=tmp_path_factory.mktemp("whole") / "run"))


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_run_goes_on_bitwise(number, whole, tmp_path, monkeypatch, capfd):
    config = dataclasses.replace(CONFIG, out=tmp_path / "run")
    before, line = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)], Log.step

    def at_13(log, step, loss):
        line(log, step, loss)
        if step == 13:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Log, "step", at_13)
    stopped = run(config)
    monkeypatch.undo()
    assert stopped.stopped == number
    assert int(stopped.state.step) == 13
    assert saved_steps(config.out)[-1] == 13
    out, err = capfd.readouterr()
    assert f"stopped by {number.name} after step 13: go on with --resume" in out
    assert ("Once more: at once, without one." in err) == (number == signal.SIGINT)
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    again = run(dataclasses.replace(config, resume=True))
    assert not again.stopped
    # losses are kept in lines every ten steps; those of a stopped run between two lines are not
    for a, b in zip(numbers(again.state), numbers(whole.state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert again.losses[-17:] == whole.losses[-17:]
    assert again.heldout == whole.heldout


def test_a_second_ctrl_c_ends_at_once():
    before = signal.getsignal(signal.SIGINT)

    def twice():
        with Stopping() as stopping:
            os.kill(os.getpid(), signal.SIGINT)
            assert stopping.after(1) == signal.SIGINT
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.nightly
@pytest.mark.parametrize("lose", [5, 7])
def test_training_waits_rather_than_lose_more_steps(lose, tmp_path, monkeypatch):
    """Every step finds a finished checkpoint that is near enough, though each takes longer than the steps between."""
    config = dataclasses.replace(CONFIG, out=tmp_path / "run", save_every=5, lose_at_most=lose)
    behind, line, seal_up = [], Log.step, checksums.write

    def slow(*args, **kwargs):
        time.sleep(0.3)
        return seal_up(*args, **kwargs)

    def step(log, number, metrics):
        behind.append(number - max(saved_steps(config.out), default=0))
        line(log, number, metrics)

    monkeypatch.setattr(Log, "step", step)
    monkeypatch.setattr(checksums, "write", slow)
    run(config)
    assert len(behind) == config.steps
    assert max(behind) <= lose


@pytest.mark.nightly
def test_a_killed_run_goes_on_bitwise(whole, tmp_path):
    """SIGKILL of a real process while it trains; the checkpoint of the step before is there, whole."""
    out = tmp_path / "run"
    given = [
        "--preset=tiny",
        f"--out={out}",
        *["--steps=30", "--log-every=10", "--eval-every=10", "--save-every=10"],
    ]
    given += [
        "--eval-windows=16",
        "--sample-bytes=4",
        "--keep=1",
        "--width=32",
        "--layers=1",
        "--heads=1",
        "--seq=16",
    ]
    given += ["--dropout=0.1"]
    assert dataclasses.replace(flags.parse(given), out=CONFIG.out) == CONFIG
    command_line = [sys.executable, "-m", "train.gpt", *given]
    with subprocess.Popen(command_line, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith("step 30/30  mean loss"):  # step 10 is written, 20 is being written
                process.kill()
    assert process.returncode == -signal.SIGKILL
    assert saved_steps(out)[-1] in (10, 20)
    again = run(dataclasses.replace(flags.parse(given), resume=True))
    for a, b in zip(numbers(again.state), numbers(whole.state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert again.heldout == whole.heldout
    assert not list((out / "checkpoints").glob("*tmp*"))


@pytest.mark.nightly
def test_the_last_and_the_best_are_kept(whole):
    best = min(whole.heldout, key=lambda x: x[1])[0]
    assert saved_steps(whole.out) == sorted({best, 30})


@pytest.mark.nightly
def test_a_damaged_checkpoint_is_refused_and_the_last_good_one_offered(tmp_path, capsys):
    config = dataclasses.replace(CONFIG, out=tmp_path / "run", keep=3, steps=20)
    first = run(config)
    capsys.readouterr()
    folder = config.out / "checkpoints"
    (data,) = (f for f in (folder / "20" / "state").rglob("*") if f.stat().st_size > 20_000 and f.is_file())
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert command(["verify", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{folder}/10: whole")
    assert f"{folder}/20 is damaged" in lines[1]
    assert f"The last good checkpoint beside it: {folder}/10" in lines
    with pytest.raises(checkpoint.CheckpointDamaged) as caught:
        run(dataclasses.replace(config, resume=True))
    assert caught.value.good == folder / "10"
    assert "--resume --resume-step 10" in gpt.damaged(caught.value)
    again = run(dataclasses.replace(config, resume=True, resume_step=10))
    assert f"moved a later checkpoint to {config.out}/set_aside/20" in capsys.readouterr().out
    assert_same_end(again, first)
    assert saved_steps(config.out) == [10, 20]
    assert command(["verify", str(folder)]) == 0


def test_steps_to_resume_from(tmp_path):
    with pytest.raises(ValueError, match="--resume-step: pass --resume with it"):
        flags.check(dataclasses.replace(CONFIG, resume_step=3), devices=8)
    config = dataclasses.replace(CONFIG, out=tmp_path / "run", resume=True, resume_step=7)
    (config.out / "checkpoints" / "10").mkdir(parents=True)
    with pytest.raises(ValueError, match=re.escape(f"--resume-step 7: the run in {config.out} has [10].")):
        gpt.prepare(config)


def test_an_empty_last_step_names_the_good_one(whole, tmp_path):
    config = dataclasses.replace(CONFIG, out=tmp_path / "run", resume=True)
    folder = config.out / "checkpoints"
    (folder / "30").mkdir(parents=True)
    message = rf"--resume: step 30 is not a checkpoint of a run. .*{folder}/30 is not a checkpoint of a state"
    with pytest.raises(ValueError, match=message) as caught:
        gpt.prepare(config)
    assert "--resume-step" not in str(caught.value)  # there is none
    shutil.copytree(whole.out / "checkpoints" / "30", folder / "20")
    with pytest.raises(ValueError, match=message) as caught:
        gpt.prepare(config)
    assert str(caught.value).endswith("Continue from the last good one: --resume --resume-step 20")


def test_two_runs_cannot_have_one_folder(whole, tmp_path, monkeypatch, capsys):
    """The second is refused before it writes anything, also with --overwrite and --resume."""
    out = tmp_path / "run"
    shutil.copytree(whole.out, out)
    with checkpoint.Steps(out / "checkpoints", write=True):
        # not the lock: its owner renews it while it is held
        found = lambda: (f for f in out.rglob("*") if f.is_file() and f.name != "writer.lock")  # noqa: E731
        files = lambda: {f: f.stat().st_mtime_ns for f in found()}  # noqa: E731
        before = files()
        for more in ({"overwrite": True}, {"resume": True, "steps": 40}):
            config = dataclasses.replace(CONFIG, out=out, **more)
            with pytest.raises(checkpoint.FolderInUse, match="two runs would overwrite each other's checkpoints"):
                gpt.train(config, corpus())
        monkeypatch.setattr(gpt.flags, "parse", lambda args: dataclasses.replace(CONFIG, out=out, overwrite=True))
        monkeypatch.setattr(gpt, "prepare", lambda *_: corpus())
        with pytest.raises(SystemExit, match=rf"error: --out {out} is in use\. .* is in use by process"):
            gpt.main([])
        assert files() == before
    assert not (out / "checkpoints" / "writer.lock").exists()


def test_export_from_the_command_line(whole, tmp_path, capsys):
    from safetensors.numpy import load_file

    step = whole.out / "checkpoints" / "30"
    assert command(["export", str(step), str(tmp_path / "m.safetensors")]) == 0
    assert str(tmp_path / "m.safetensors") in capsys.readouterr().out
    tensors = load_file(tmp_path / "m.safetensors")
    flat = jax.tree_util.tree_leaves_with_path(whole.state.params)
    assert len(tensors) == len(flat)
    for path, value in flat:
        name = ".".join(k.key for k in path)
        np.testing.assert_array_equal(tensors[name], np.asarray(value))
    small = [
        "export",
        str(step),
        str(tmp_path / "s.safetensors"),
        "--dtype=bfloat16",
        "--max-file-bytes=9000",
    ]
    assert command(small) == 0
    index = json.loads((tmp_path / "s.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values()) // 2
    assert command(["export", str(step), str(tmp_path / "m.bin")]) == 2
    assert "must end in .safetensors" in capsys.readouterr().err
