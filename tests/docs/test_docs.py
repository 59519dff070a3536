"""README.md and the pages of docs/: their python runs, on eight simulated devices, and their commands exist."""

from __future__ import annotations

import ast
import concurrent.futures
import os
import re
import subprocess
import sys

import jax
import pages
import pytest

PROGRAMS = {name: pages.program(path.read_text(encoding="utf-8")) for name, path in pages.PAGES.items()}
WITH_CODE = [name for name, program in PROGRAMS.items() if any(b.language == "python" for b in program)]
# blocks that cannot run here, by page: a new one is a decision, not an accident
NOT_RUN: dict[str, int] = {}


RUNS = [
    pytest.param(name, marks=[pytest.mark.pod] * any("pod" in b.code for b in PROGRAMS[name]))
    for name in WITH_CODE
]


@pytest.mark.default_cases(
    "README.md",
    "docs/index.md",
    "docs/nnx.md",
    "docs/checkpoints.md",
    "docs/proof.md",
    "docs/from_deepspeed.md",
)
@pytest.mark.parametrize("name", RUNS)
def test_the_python_of_a_page_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran, left, printed = pages.execute(pages.PAGES[name], {"__name__": "page"})
    assert ran or left, "no python was found"
    assert all(b.why or b.needs for b in left)
    if f"jax {jax.__version__}" in pages.PAGES[name].read_text(
        encoding="utf-8"
    ):  # another one prints other figures
        for block, text in printed:
            assert block.code == text, f"line {block.line}; run: python tests/pages.py {name}"


def test_blocks_that_are_not_run_are_counted():
    marked = {name: sum(bool(b.why) for b in program) for name, program in PROGRAMS.items()}
    assert {name: n for name, n in marked.items() if n} == NOT_RUN


def test_the_pages_with_code_are_all_there():
    assert {"README.md", "docs/index.md", "docs/engaged.md", "docs/recipes.md"} <= set(WITH_CODE)


@pytest.mark.parametrize("name", WITH_CODE)
def test_a_reader_has_every_name(name):
    """What the visible blocks read is defined in them, or the page says that it is yours: `model` is yours."""
    assert pages.undefined(pages.PAGES[name].read_text(encoding="utf-8")) == []


def test_names_that_a_reader_has_not():
    def undefined(code, before=""):
        return pages.undefined(f"{before}\n\n<!-- setup\na = b = 1\n-->\n```python\n{code}\n```\n")

    assert undefined("x = a\ny = b") == [(7, "a"), (8, "b")]
    assert undefined("x = a + b", "Text of `b` first. `a`, an int, is yours ([A page](a.md)).") == [(7, "b")]
    assert undefined("x = a", "A model.\n`a` and `f(x)`\nare yours:\n\n`b` is here") == []
    assert sorted(undefined("a = f(a)")) == [(7, "a"), (7, "f")]
    assert undefined("def f(x=1):\n    return g(x)\n\n\ndef g(x):\n    return len(x)") == []
    assert undefined("def f(x):\n    return g(x)") == [(7, "g")]
    assert undefined("for x in range(3):\n    y = [z * x for z in range(x)]\nprint(x, y, z)") == [(9, "z")]
    assert (
        undefined("try:\n    a = 1\nexcept ValueError as e:\n    print(e, a)\nwith open('f') as f:\n    f.g")
        == []
    )


def test_a_wrong_block_fails(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n\n<!-- setup\na = 1\n-->\n```python\nassert a == 1\n\nb\n```\n")
    with pytest.raises(NameError) as error:
        pages.execute(page, {})
    assert error.traceback[-1].lineno + 1 == 9
    page.write_text("<!-- not run: needs GPUs -->\n```python\nb\n```\n")
    assert pages.execute(page, {})[0] == 0
    with pytest.raises(ValueError, match="no block follows"):
        pages.blocks("<!-- not run: needs GPUs -->\n\ntext\n")


def help_of(program: tuple[str, ...]) -> str:
    """What a program says about its flags."""
    start = [program[0]] if program[0].endswith(".py") else ["-m", *program]
    environment = os.environ | {"COLUMNS": "200", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, *start, "--help"], cwd=pages.ROOT, env=environment, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr[-2000:]
    return done.stdout


@pytest.mark.nightly
def test_commands_that_pages_show_exist():
    shown: dict[tuple[str, ...], set[tuple[str, str]]] = {}
    count, missing = 0, []
    for name, path in pages.PAGES.items():
        for words in pages.commands(path.read_text(encoding="utf-8")):
            count += 1
            program = tuple(words[:2]) if words[0] == "jzero" else (words[0],)
            if program[0].endswith(".py") and not (pages.ROOT / program[0]).is_file():
                if program[0] != "engaged.py":  # which the reader saves
                    missing.append(f"{name}: no file {program[0]}")
                continue
            flags = [w.split("=")[0] for w in words if re.match(r"--[a-z]", w) and w != "--help"]
            if flags or program[0] == "jzero":
                shown.setdefault(program, set()).update((flag, name) for flag in flags)
    assert count > 40
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        texts = dict(zip(shown, pool.map(help_of, shown), strict=True))
    for program, flags in shown.items():
        for flag, name in sorted(flags):
            if not re.search(rf"(?<![\w-]){flag}(?![\w-])", texts[program]):
                missing.append(f"{name}: {' '.join(program)} has no {flag}")
    assert not missing, "\n".join(missing)


def texts_of_the_code() -> list[str]:
    """Every string of jzero's sources as one line, with `\0` where a value is put in that is not a file's `WHERE`."""
    where = ""

    def text(node: ast.AST) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value) if isinstance(node.value, str) else ""
        match node:
            case ast.JoinedStr():
                return "".join(map(text, node.values))
            case ast.FormattedValue(ast.Call(ast.Name("counted"), [_, *nouns])):  # as a page quotes it
                return f"\0 {text(nouns[1]) if nouns[1:] else text(nouns[0]) + 's'}"
            case ast.FormattedValue(ast.Name("WHERE")):
                return where
        return "\0"

    sources = [p.read_text(encoding="utf-8") for p in sorted((pages.ROOT / "jzero").rglob("*.py"))]
    found = []
    for source in sources:
        where = (re.findall(r'(?m)^WHERE = "(.+)"$', source) or ["\0"])[0]
        nodes = list(ast.walk(ast.parse(source)))
        found += [n.name for n in nodes if isinstance(n, ast.ClassDef)]
        found += [text(n) for n in nodes if isinstance(n, (ast.Constant, ast.JoinedStr))]
    return found


def test_messages_in_troubleshooting_are_those_of_the_code():
    page = (pages.ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    ours = page.split("## From JAX and XLA")[0]
    quoted = re.findall(r"(?m)^- `([^`]+)`", ours)
    assert len(quoted) >= 40
    texts = [" ".join(t.split(" ")) for t in texts_of_the_code()]

    def found(message: str) -> bool:
        parts = [re.escape(x.strip()) for x in message.split("...") if x.strip()]
        return any(re.search(".*".join(parts), t, re.DOTALL) for t in texts)

    assert [m for m in quoted if not found(m)] == []
    assert not found("jzero.shard: this state is purple")


def test_scopes_in_profiling_are_those_of_the_code():
    page = (pages.ROOT / "docs" / "profiling.md").read_text(encoding="utf-8")
    table = page.split("| scope |")[1].split("\n\n")[0]
    sources = "".join(p.read_text(encoding="utf-8") for p in (pages.ROOT / "jzero").rglob("*.py"))
    named = re.findall(r"named_scope\(.*|SCOPE = .*", sources)
    scopes = set(re.findall(r"\"jzero\.(\w+)\"", "".join(named)))
    assert set(re.findall(r"`jzero\.(\w+)`", table)) == scopes
    assert len(scopes) > 8
