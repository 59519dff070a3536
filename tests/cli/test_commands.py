"""The command line: what it reads, what it refuses before anything is compiled, and plans from end to end."""

from __future__ import annotations

import json
import re
import sys
import types

import jax
import pytest
from cli_model import FILE, SUBJECT

from jzero.__main__ import main
from jzero.cli import results
from jzero.cli.inputs import (
    InputError,
    load_function,
    parse_axes,
    parse_batch,
    parse_names,
    parse_stages,
)
from jzero.cli.job import Job
from jzero.cli.plan import PlanCommand
from jzero.cli.presets import PRESETS, creator
from jzero.cli.process import run_job
from jzero.cli.program import Subject
from jzero.cli.search import largest_that_fits

pytestmark = pytest.mark.pod


def test_batches():
    (batch,) = parse_batch("tokens=int32[1024,1025]")
    assert (batch["tokens"].shape, batch["tokens"].dtype) == ((1024, 1025), "int32")
    first, key, named = parse_batch("bf16[8, 3] key[] x=i32[8],y=bool[]")
    assert (first.shape, first.dtype) == ((8, 3), "bfloat16")
    assert jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    assert list(named) == ["x", "y"]
    assert named["y"].shape == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read"),
        ("tokens", "cannot read 'tokens'"),
        ("tokens=int32(16,65)", "in square brackets: [16,65]. Write --batch 'tokens=int32[16,65]'."),
        ("int32 (16, 65)", "Write --batch 'int32 [16, 65]'."),
        ("tokens=int32:16,65", "or module:function"),
        ("x=f32[8,3", "cannot read"),
        ("x=f32[8] nonsense", "cannot read 'nonsense'"),
        ("x=f32[8], x=f32[8]", "'x' is named twice"),
        ("x=float31[8]", "unknown dtype 'float31'. Did you mean 'float32'?"),
    ],
)
def test_bad_batches(text, message):
    with pytest.raises(InputError) as caught:
        parse_batch(text)
    assert message in str(caught.value)


def test_axes_names_and_stages():
    assert parse_axes("replica=2, data=4", "--mesh") == {"replica": 2, "data": 4}
    assert parse_names("replica,data") == ("replica", "data")
    assert parse_names("data") == "data"
    assert parse_stages("3,1,1") == [1, 3]
    for bad in ("data", "data=x", "data=2,data=4", ""):
        with pytest.raises(InputError, match="--mesh"):
            parse_axes(bad, "--mesh")
    with pytest.raises(InputError, match="4 is not a stage"):
        parse_stages("2,4")


def test_updates_in_codes_need_stages_that_gather_new_params():
    flags = PlanCommand(preset="gpt2-small", update_dtype="int8")
    with pytest.raises(InputError, match="--stages 1,2, or --stages 3 with --param-axis"):
        flags.job(stages=[1, 2, 3], search=False)
    assert flags.job(stages=[1, 2], search=False).fields["update_dtype"] == "int8"


@pytest.mark.parametrize(
    ("start", "limit", "answer"), [(8, 200, 21), (1, 57, 1), (1, 56, 0), (64, 200, 21), (3, 10**5, 14278)]
)
def test_search_finds_the_largest_micro_batch(start, limit, answer):
    calls = []

    def measure(size):
        calls.append(size)
        return 50 + 7 * size

    size, exact = largest_that_fits(measure, {start: 50 + 7 * start}, limit)
    assert (size, exact) == (answer, True)
    assert len(calls) <= 5
    assert start not in calls


@pytest.mark.parametrize(("cuts", "answer"), [(4, (80, True)), (1, (32, False))])
def test_search_of_a_step_that_cuts_its_batch(cuts, answer, monkeypatch):
    """In multiples of its micro-batches; where these are not known, what was measured is the answer."""
    sizes = []

    def compiled(state, plan, size):
        sizes.append(size)
        if size % 4:
            raise InputError("cannot split the batch evenly")
        return size

    monkeypatch.setattr(results, "memory_of", lambda size: types.SimpleNamespace(total=50 + 7 * size))
    subject = types.SimpleNamespace(micro_batch=8, compile=compiled)
    assert results.search(subject, None, None, 106, 50 + 7 * 83, print, cuts) == dict(
        zip(("micro_batch", "exact"), answer, strict=True)
    )
    assert sizes[0] == 32


def test_search_where_memory_is_flat_first():
    """Gradients hide small activations: one line through the first sizes says nothing."""
    sizes = {1: 1000}
    size, _ = largest_that_fits(lambda b: max(1000, 10 * b), sizes, 2003)
    assert 198 <= size <= 200


def test_search_measures_what_it_answers_when_memory_jumps():
    """A compiler that changes its mind: the answer was measured, and nothing beyond it is claimed."""
    seen = {4: 100}

    def measure(size):
        seen[size] = 60 + 10 * size + (300 if size > 9 else 0)
        return seen[size]

    size, exact = largest_that_fits(measure, dict(seen), 250)
    assert seen[size] <= 250
    assert not exact or seen.get(size + 1, 251) > 250


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt2-small", 0.1244), ("gpt2-xl", 1.5576), ("gpt-7.5b", 7.46), ("llama3-8b", 8.0303), ("llama3-70b", 70.554)],
)  # fmt: skip
def test_presets_have_the_published_number_of_params(name, billions):
    preset = PRESETS[name]
    params = jax.eval_shape(creator(preset, seq=preset.seq)).params
    assert sum(x.size for x in jax.tree.leaves(params)) / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["plan"], "--create, --step, --batch not given"),
        (["plan", "--preset", "gpt2-xxl"], "Did you mean 'gpt2-xl'?"),
        (["plan", "--preset", "gpt2-xl", "--gpu", "h20"], "unknown gpu 'h20'. Did you mean 'h200'?"),
        (["plan", "--preset", "gpt2-xl", "--hosts", "0"], "hosts must be an integer from 1 to"),
        (["plan", "--preset", "gpt2-xl", "--stages", "7"], "7 is not a stage"),
        (["plan", "--preset", "gpt2-xl", "--step", "a:b"], "leave out --step"),
        (["plan", "--preset", "gpt2-xl", "--mesh", "data"], "write axis=size"),
        (["plan", "--preset", "gpt2-xl", "--memory-fraction", "2"], "must be above 0 and at most 1"),
        (["plan", "--preset", "gpt2-xl", "--accumulate", "0"], "--accumulate must be an integer of at least 1"),
        (["plan", "--preset", "gpt2-xl", "--bandwidths.within-host", "0"], "--bandwidths.within_host 0.0:"),
        (["plan", *SUBJECT, "--accumulate", "2"], "--accumulate belongs to --preset"),
        (["plan", "--preset", "gpt2-xl", "--plot", "x.txt"], "must end in .png"),
        (["plan", "--preset", "gpt2-xl", "--plot", "/no/such/folder/x.png"], "there is no folder"),
        (["plan", "--preset", "gpt2-xl", "--html", "x.png"], "--html x.png: the name must end in .html"),
        (["explain", *SUBJECT, "--html", "/no/folder/x.html"], "--html /no/folder/x.html: there is no folder"),
        (["plan", "--fit", "--preset", "gpt2-xl", "--html", "x.html"], "--fit does not go with --html"),
        (["plan", *SUBJECT, "--seq", "3"], "--seq belongs to --preset"),
        (["plan", "--preset", "gpt2-xl", "--trainable", f"{FILE}:is_first"], "leave out --trainable"),
        (["explain", *SUBJECT, "--stage", "4"], "must be an integer from 0 to 3"),
        (["plan", "--fit", "--preset", "gpt2-xl", "--search"], "--fit does not go with --search"),
        (["plan", "--fit", "--preset", "gpt2-xl", "--tiled-loss"], "--fit does not go with --tiled-loss"),
        (["plan", "--fit", "--preset", "gpt2-xl", "--memory", "72"], "write a number and a unit, as in --memory 72GB"),
        (["plan", "--fit", *SUBJECT, "--global-batch", "8"], "--global-batch belongs to --preset"),
        (["plan", "--preset", "gpt2-xl", "--memory", "72GB"], "--memory belongs to --fit"),
        (["explain", *SUBJECT, "--kept-gathered-bytes", "9"], "--stages 3, or --stage 3 of jzero explain"),
    ],
)
def test_flags_are_refused_before_anything_starts(args, message, capsys, monkeypatch):
    monkeypatch.setattr("jzero.cli.plan.run_job", None)  # calling it would raise another error
    monkeypatch.setattr("jzero.cli.plan.run_fit", None)
    assert main(args) == 2
    assert message in capsys.readouterr().err


@pytest.mark.default_cases(
    "change1-has no 'creat'. Did you mean 'create'?",
    "change5-36 = 4 x 8 + 4",
    "change6-failed: KeyError: 'y'",
)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--create": "nothing:create"}, "no module named 'nothing' here"),
        ({"--create": f"{FILE}:creat"}, "has no 'creat'. Did you mean 'create'?"),
        ({"--create": f"{FILE}:create_with"}, "it needs width"),
        ({"--step": f"{FILE}:three"}, "three(state, batch, key) cannot be called with (state, batch)"),
        ({"--step": f"{FILE}:batch_first"}, "A step takes the state first, then the batch"),
        ({"--batch": "x=f32[36,256], y=f32[36,256]"}, "36 = 4 x 8 + 4"),
        ({"--batch": "x=f32[32,256]"}, "failed: KeyError: 'y'"),
        ({"--mesh": "data=7"}, "7 (data) = 7 devices, but this pod has 1 host x 8 h200 = 8"),
        ({"--axis": "shard", "--mesh": "data=8"}, "'shard' is not an axis of the mesh"),
    ],
)
def test_what_cannot_be_used_is_one_clear_error(change, message, capsys):
    flags = dict(zip(SUBJECT[::2], SUBJECT[1::2], strict=True)) | change
    assert main(["plan", "--stages", "2", *[word for pair in flags.items() for word in pair]]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


@pytest.mark.nightly
def test_plan_as_json_and_as_a_plot(capsys, tmp_path):
    plot = tmp_path / "memory.png"
    args = ["plan", *SUBJECT, "--stages", "1,3", "--search", "--json", "--plot", str(plot), "--min-shard-bytes", "0"]
    assert main(args) == 0
    said = capsys.readouterr()
    answer = json.loads(said.out)
    one, three = answer["stages"]
    values = 2 * (256 * 256 + 256)
    assert (one["stage"], three["stage"], one["values"]) == (1, 3, values)
    assert one["estimate"]["params"] == one["compiled"]["params"] == 4 * values
    assert three["estimate"]["params"] == three["compiled"]["params"] == 4 * values // 8
    assert three["compiled"]["opt_state"] == three["estimate"]["opt_state"] == 8 * values // 8 + 4
    # two layers: nobody asks for the gradient of the input, so the first weight is gathered once, not twice
    assert three["estimate"]["wire_psi"] == pytest.approx(3 - 0.5, rel=0.02)
    for stage in (one, three):
        assert stage["compiled"]["wire_psi"] == pytest.approx(stage["estimate"]["wire_psi"], rel=0.02)
        assert stage["fits"]
        assert stage["findings"] == []
        assert stage["largest"]["micro_batch"] > 1000
        assert stage["host_memory"] < 2e9
    assert answer["total_by_gpus"]["3"]["64"] < answer["total_by_gpus"]["3"]["8"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "stage 1 (1 of 2): compiling for 8 h200" in said.err
    assert re.search(r"stage 3 \(2 of 2, about \d+ s\): compiling for 8 h200", said.err)


def test_plan_as_a_table_and_a_page_with_a_jitted_step(capsys, tmp_path):
    args = ["--create", f"{FILE}:create", "--step", f"{FILE}:jitted", "--batch", f"{FILE}:make_batch"]
    part = ["--trainable", f"{FILE}:is_first", "--min-shard-bytes", "0"]
    page = tmp_path / "step.html"
    assert main(["plan", *args, *part, "--stages", "2", "--html", str(page)]) == 0
    assert '"timeline":{"kinds":' in page.read_text()
    out = capsys.readouterr().out
    estimated = next(line.split() for line in out.splitlines() if "estimated  " in line)
    assert [float(x) for x in estimated[2:5]] == [526.34, 65.8, 32.9]  # kB; moments, gradients: of one layer
    assert "8 h200 (1 host x 8), 151.40 GB each, mesh {data: 8}" in out
    assert [line.split()[:2] for line in out.splitlines() if "estimated  " in line] == [["2", "estimated"]]
    assert "jzero.check: nothing found at stage 2." in out
    assert "fits: in 0.75 of a GPU's memory (--memory-fraction)" in out
    assert "XLA_CLIENT_MEM_FRACTION says before Python starts" in out


def test_bytes_that_stay_gathered_reach_the_config():
    job = PlanCommand(preset="gpt2-small", kept_gathered_bytes=7).job(stages=[3], search=False)
    assert job.fields["kept_gathered_bytes"] == 7


def test_the_memory_that_jax_takes(monkeypatch):
    """What fits is measured against that: 0.75 of the GPU, or what the variable of JAX says."""

    def fraction():
        return PlanCommand(preset="gpt2-small").job(stages=[2], search=False).fraction

    names = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert fraction() == 0.75
    for name, value in zip(names, (0.92, 0.95), strict=True):
        monkeypatch.setenv(name, str(value))
        assert fraction() == value
    monkeypatch.setenv(names[1], "most")
    with pytest.raises(InputError, match="XLA_CLIENT_MEM_FRACTION=most: must be a number"):
        fraction()


@pytest.mark.parametrize(
    ("create", "step", "batch", "tokens"),
    [("create_reader", "read_step", "i32[32,9]", 32 * 8), ("create", "step", "x=f32[32,256], y=f32[32,256]", None)],
)
def test_tokens_of_a_step(create, step, batch, tokens):
    """As many as it looks up: the last token of a sequence is only predicted."""
    subject = Subject.of(job(create=f"{FILE}:{create}", step=f"{FILE}:{step}", batch=batch))
    assert subject.tokens(subject.uses(*subject.state(2))) == tokens


@pytest.mark.nightly
@pytest.mark.pod
def test_micro_batches_of_a_preset(capsys):
    """Each has the batch per GPU, and stage 2 sends k + 1 Psi, as estimated."""
    args = ["plan", "--preset", "gpt2-small", "--seq", "32", "--gpus-per-host", "4", "--stages", "2"]
    assert main([*args, "--accumulate", "3", "--batch-per-gpu", "2", "--json"]) == 0
    (stage,) = json.loads(capsys.readouterr().out)["stages"]
    assert (stage["micro_batch"], stage["tokens_per_step"]) == (2, 3 * 2 * 4 * 32)
    assert stage["estimate"]["wire_psi"] == pytest.approx(4, rel=0.02)
    assert stage["compiled"]["wire_psi"] == pytest.approx(4, rel=0.02)
    assert stage["findings"] == []


@pytest.mark.nightly
@pytest.mark.pod
def test_micro_batches_of_a_step(capsys):
    """The estimate knows how many a step of the user's has: two layers gather three weights in each."""
    step = ["--step", f"{FILE}:step_of_micro_batches", "--batch", f"{FILE}:make_batch", "--min-shard-bytes", "0"]
    assert main(["plan", "--create", f"{FILE}:create", *step, "--stages", "2,3", "--json"]) == 0
    for stage, psi in zip(json.loads(capsys.readouterr().out)["stages"], (3, 5), strict=True):
        assert stage["estimate"]["wire_psi"] == pytest.approx(psi, rel=0.02)
        assert stage["compiled"]["wire_psi"] == pytest.approx(psi, rel=0.02)


@pytest.mark.pod
def test_fit_as_json_and_as_text(capsys):
    """Of a step that offers nothing; the memory of a GPU that no config fits into."""
    assert main(["plan", "--fit", *SUBJECT, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["best"]
    assert (best["config"], best["mesh"], best["accumulate"]) == ({"stage": 1}, {"data": 8}, 1)
    assert best["compiled"] == best["predicted"] <= found["limit"]
    assert main(["plan", "--fit", *SUBJECT, "--memory", "1kB"]) == 1
    assert "nothing fits on 8 h200" in capsys.readouterr().out


@pytest.mark.nightly
def test_a_crash_of_the_compiler_is_a_line_of_the_table(capfd):
    args = [
        "--create",
        f"{FILE}:create",
        "--step",
        f"{FILE}:crash_at_stage_2",
        "--batch",
        f"{FILE}:make_batch",
    ]
    assert main(["plan", *args, "--stages", "1,2,3"]) == 1
    out = capfd.readouterr().out
    assert "stage 2: the compiler ended (killed by SIGABRT" in out
    rows = [line.split()[0] for line in out.splitlines() if "estimated  " in line]
    assert rows == ["1", "3"]


def test_explain_and_arguments_one_by_one(capsys):
    args = [
        "--create",
        f"{FILE}:create",
        "--step",
        f"{FILE}:step_of_arrays",
        "--batch",
        "f32[32,256] f32[32,256]",
    ]
    assert main(["explain", *args, "--stage", "2", "--min-shard-bytes", "0"]) == 0
    out = capsys.readouterr().out
    assert "reduce-scatter" in out
    assert "memory per device" in out


@pytest.mark.nightly
def test_explain_of_an_nnx_pair_that_did_not_engage(capsys, tmp_path):
    page = tmp_path / "step.html"
    args = ["--create", f"{FILE}:create_pair", "--step", f"{FILE}:pair_step", "--batch", "f32[32,256]"]
    assert main(["explain", *args, "--stage", "2", "--min-shard-bytes", "10000000", "--html", str(page)]) == 1
    out = capsys.readouterr().out
    assert "state_too_large" in out
    assert '"kind":"state_too_large"' in page.read_text()
    assert "Remedy: pass ZeroConfig(min_shard_bytes=0)" in out


# --- what is imported from where ----------------------------------------------------------------------------------


FOREIGN = """
import pathlib
pathlib.Path(__file__).with_suffix(".ran").touch()
raise ImportError("a file of the current folder took the place of a module")
"""


@pytest.fixture
def folder_of_impostors(tmp_path, monkeypatch):
    """The current folder, with files called like modules that are installed."""
    for name in ("jax", "numpy", "optax", "flax", "json", "jzero", "tyro"):
        (tmp_path / f"{name}.py").write_text(FOREIGN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job(**fields):
    given = {"create": None, "step": None, "batch": None, "preset": None, "seq": None, "batch_per_gpu": 1}
    given |= {"gpu": "h200", "hosts": 1, "gpus_per_host": 8, "mesh": None, "fields": {}, "stages": [1]}
    return Job(**(given | {"search": False, "fraction": 0.9} | fields))


def test_a_preset_imports_nothing_from_the_current_folder(folder_of_impostors):
    with pytest.raises(InputError, match="'nowhere' is not an axis"):
        run_job(job(preset="gpt2-small", fields={"axis": "nowhere"}, mesh={"data": 8}))
    assert list(folder_of_impostors.glob("*.ran")) == []


def test_create_and_step_come_from_there_after_everything_else(folder_of_impostors):
    for name in ("mine", "beside"):
        (folder_of_impostors / f"{name}.py").write_text(
            "import flax, optax\ndef create(): return 1 / 0\ndef step(s): pass"
        )
    (folder_of_impostors / "mine.py").write_text("from beside import create, step")
    for create in ("mine:create", "mine.py:create"):
        with pytest.raises(InputError, match=r"failed: ZeroDivisionError: .*\n  at beside.py:2"):
            run_job(job(create=create, step="mine:step", batch="f32[8]"))
    assert list(folder_of_impostors.glob("*.ran")) == []


def test_a_file_called_like_a_module_is_not_that_module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "optax.py").write_text("def create(): return 'mine'")
    import optax

    assert load_function(f"{tmp_path / 'optax.py'}:create", "--create")() == "mine"
    assert sys.modules["optax"] is optax
    assert sys.path[-1] == str(tmp_path)
