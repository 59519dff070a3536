"""The cache of pod programs: what makes an entry another one, what an unreadable entry costs, who compiles."""

from __future__ import annotations

import gzip
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

import jzero
from jzero.core import compile_only
from jzero.core.compile_only import MemoryStats, Program
from jzero.proof import pod_cache
from jzero.proof.pod_cache import get_or_compile, program_key

unit = pytest.mark.unit
PROGRAM = Program("HloModule x", MemoryStats(temp_size_in_bytes=7), (b"\x00\xff",), ())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JZERO_POD_CACHE", str(tmp_path / "pods"))
    return tmp_path / "pods"


def stablehlo(scope="update", line=3):
    return f'module {{\n  op loc(#loc2)\n}}\n#loc1 = loc("a.py":{line}:1)\n#loc2 = loc("jit(f)/{scope}"(#loc1))\n'


@unit
def test_scopes_are_part_of_the_key_and_lines_of_source_are_not():
    key = program_key(stablehlo(), "h200")
    assert key == program_key(stablehlo(line=4), "h200")
    assert key != program_key(stablehlo(scope="gather"), "h200")
    assert key != program_key(stablehlo(), "h100")


@unit
def test_the_second_call_reads_what_the_first_one_compiled(folder):
    made = []
    for _ in range(2):
        assert get_or_compile("k", lambda: made.append(1) or PROGRAM) == PROGRAM
    assert made == [1]
    assert [p.name for p in folder.iterdir()] == ["k.gz"]


@unit
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-9],
        lambda data: b"",
        lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
        lambda data: gzip.compress(json.dumps({"text": "HloModule x"}).encode()),
        lambda data: gzip.compress(b"[]"),
    ],
    ids=["cut short", "empty", "a flipped bit", "fields missing", "no object"],
)
def test_a_corrupt_entry_is_compiled_again_and_replaced(folder, damage):
    get_or_compile("k", lambda: PROGRAM)
    entry = folder / "k.gz"
    entry.write_bytes(damage(entry.read_bytes()))
    made = []
    for _ in range(2):
        assert get_or_compile("k", lambda: made.append(1) or PROGRAM) == PROGRAM
    assert made == [1]


@unit
def test_off_keeps_nothing_and_a_folder_that_cannot_be_made_costs_a_compile(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("JZERO_POD_CACHE", "off")
    assert get_or_compile("k", lambda: PROGRAM) == PROGRAM
    assert not folder.exists()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JZERO_POD_CACHE", str(tmp_path / "file" / "pods"))
    assert get_or_compile("k", lambda: PROGRAM) == PROGRAM


@unit
def test_the_folder_is_in_the_users_cache_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("JZERO_POD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert pod_cache.folder() == tmp_path / "jzero" / "pods"


@unit
def test_the_entries_used_longest_ago_go_first(folder, monkeypatch):
    for key in "abc":
        get_or_compile(key, lambda: PROGRAM)
    size = (folder / "a.gz").stat().st_size

    for age, key in enumerate("cba"):
        os.utime(folder / f"{key}.gz", (1000 - age, 1000 - age))
    get_or_compile("a", lambda: None)  # pyright: ignore  (read, so that it is the newest)
    monkeypatch.setattr(pod_cache, "MOST_BYTES", 3 * size)
    get_or_compile("d", lambda: PROGRAM)
    assert sorted(p.stem for p in folder.glob("*.gz")) == ["a", "c", "d"]


@unit
def test_who_wants_a_program_that_another_one_compiles_waits_for_it(folder):
    """Threads here: a lock belongs to an open file, so that threads and processes are alike to it."""
    made, begun = [], threading.Event()

    def compile_program():
        made.append(1)
        begun.wait(5)
        return PROGRAM

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(get_or_compile, "k", compile_program) for _ in range(3)]
        begun.set()
        assert [w.result() for w in waiting] == [PROGRAM] * 3
    assert made == [1]


@pytest.mark.pod
def test_a_program_from_the_cache_reads_like_the_compiled_one(folder, monkeypatch, tmp_path):
    pod = jzero.pod("h200")
    mesh = pod.mesh({"data": 8})
    x = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=NamedSharding(mesh, jax.P("data")))

    def compiled(**options):
        with jax.named_scope("scaled"):
            return pod.compile(lambda x: {"sum": (x * 2).sum(0), "x": x + 1}, x, **options)

    first = compiled()
    calls = []
    real = compile_only.compiler.backend_compile_and_load
    monkeypatch.setattr(
        compile_only.compiler, "backend_compile_and_load", lambda *a, **k: calls.append(1) or real(*a, **k)
    )
    second = compiled()
    assert calls == []
    assert first.as_text() == second.as_text()
    assert "all-reduce" in second.as_text()
    assert first.memory_analysis() == second.memory_analysis()
    assert second.memory_analysis().argument_size_in_bytes == 64 * 8 * 4 // 8
    assert first.output_shardings == second.output_shardings
    assert first.input_shardings == second.input_shardings
    for _ in range(2):  # what XLA writes beside the program is not in the cache
        dump = tmp_path / f"dump{len(calls)}"
        compiled(compiler_options={"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True})
        assert list(dump.glob("*buffer-assignment.txt"))
    assert len(calls) == 2
    calls.clear()
    compiled(compiler_options={"xla_gpu_enable_triton_gemm": False})
    other = jzero.pod("h100")
    there = jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(other.mesh({"data": 8}), jax.P("data"))
    )
    other.compile(lambda x: {"sum": (x * 2).sum(0), "x": x + 1}, there)
    assert calls == [1, 1]
