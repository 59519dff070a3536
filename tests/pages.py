"""The pages of the docs as programs: their python blocks in order, with what the page presumes.

Comments, which neither GitHub nor the site shows, stand on the line before a block:

    <!-- setup            python that the page presumes: a model, a batch. Runs where it stands, like a block.
    model = ...
    -->
    <!-- setup: mlp -->             the same, from docs/setups/mlp.py.
    <!-- not run: why -->           the block cannot run here. tests/docs/test_docs.py counts these.
    <!-- needs: transformers -->    the block runs where this module is installed.
    <!-- prints -->                 what follows is what the python before it printed.

`python tests/pages.py docs/pipeline.md` runs a page and rewrites what its blocks print.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import importlib.util
import io
import os
import re
import shlex
import symtable
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = {p.relative_to(ROOT).as_posix(): p for p in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]}
SETUPS = ROOT / "docs" / "setups"
PART = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->$"
    r"|^<!-- setup: (?P<file>\w+) -->$"
    r"|^<!-- not run: (?P<why>.*?) -->$"
    r"|^<!-- needs: (?P<needs>[\w.]+) -->$"
    r"|^<!-- prints -->\n```\n(?P<shown>.*?)^```$"
    r"|^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class Block:
    """Code of a page.

    Attributes:
      line: of its first line of code, from 1.
      code: what it says.
      language: as the page says, `setup` for what is presumed, `prints` for what the python before it prints.
      why: why it is not run, or empty.
      needs: a module without which it is not run, or empty.
    """

    line: int
    code: str
    language: str
    why: str = ""
    needs: str = ""


def blocks(text: str) -> list[Block]:
    """All blocks of a page, in order.

    Raises:
      ValueError: a mark (`not run`, `needs`) that no block follows.
    """
    found, why, needs = [], "", ""
    for m in PART.finditer(text):
        line = text.count("\n", 0, m.start()) + 2
        if m["why"] or m["needs"]:
            why, needs = m["why"] or why, m["needs"] or needs
            if not re.match(r"\n(```|<!-- )", text[m.end() :]):
                raise ValueError(f"line {line - 1}: no block follows {m[0]!r}")
        elif m["shown"] is not None:
            found.append(Block(line + 1, m["shown"], "prints"))
        elif m["file"]:
            found.append(Block(line - 1, (SETUPS / f"{m['file']}.py").read_text(encoding="utf-8"), "setup"))
        elif m["setup"] is not None:
            found.append(Block(line, m["setup"], "setup", needs=needs))
            needs = needs if text[m.end() :].startswith("\n```") else ""
        else:
            found.append(Block(line, m["code"], m["language"], why, needs))
            why = needs = ""
    return found


def program(text: str) -> list[Block]:
    """The blocks that are python, marked ones included, and what they print."""
    return [b for b in blocks(text) if b.language in ("python", "setup", "prints")]


def yours(text: str) -> set[str]:
    """Names that a page says are the reader's: those in the sentences that end with `are yours` or `is yours`."""
    seen = re.sub(r"(?ms)^ *```.*?^ *```$|<!--.*?-->", "\n\n", text)
    sentences = re.findall(r"((?:(?!\n\n|\.\s|:\s).)*?)\s(?:are|is)\syours\b", seen, re.DOTALL)
    return {name for sentence in sentences for name in re.findall(r"`(\w+)(?:\([^`]*\))?`", sentence)}


def undefined(text: str) -> list[tuple[int, str]]:
    """Names that visible python reads, and their lines, where nothing above defines them or says that they are yours.

    What a function reads may be defined until the end of its block.
    """
    known, found, lines = set(dir(builtins)), [], text.splitlines(keepends=True)
    for block in program(text):
        if block.language != "python":
            continue
        known |= yours("".join(lines[: block.line - 2]))
        later: list[tuple[int, str]] = []
        for statement in _flat(ast.parse(block.code).body):
            line = block.line + statement.lineno - 1
            top = symtable.symtable(ast.unparse(statement), "page", "exec")
            own = [s for s in top.get_symbols() if s.get_name() not in _bound_in_comprehensions(statement)]
            found += [(line, s.get_name()) for s in own if s.is_referenced() and s.get_name() not in known]
            inside = [s.get_name() for t in _inner(top) for s in t.get_symbols() if s.is_global()]
            runs_now = not isinstance(statement, ast.FunctionDef)
            (found if runs_now else later).extend((line, name) for name in inside if name not in known)
            known |= {s.get_name() for s in own if s.is_assigned() or s.is_imported()}
        found += [(line, name) for line, name in later if name not in known]
    return found


def _flat(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements in the order in which they run; those that hold others as assignments, followed by what they hold."""
    for s in statements:
        match s:
            case ast.For():
                yield ast.copy_location(ast.Assign([s.target], s.iter), s)
            case ast.With():
                for item in s.items:
                    names = [item.optional_vars] if item.optional_vars else []
                    yield ast.copy_location(
                        ast.Assign(names, item.context_expr) if names else ast.Expr(item.context_expr), s
                    )
            case ast.If() | ast.While():
                yield ast.copy_location(ast.Expr(s.test), s)
            case ast.Try():
                yield from _flat(s.body)
                for handler in s.handlers:
                    name = ast.Name(handler.name or "_", ast.Store())
                    yield ast.copy_location(ast.Assign([name], handler.type or ast.Constant(None)), s)
                    yield from _flat(handler.body)
                yield from _flat(s.finalbody)
                continue
            case _:
                yield s
                continue
        yield from _flat(s.body)
        yield from _flat(getattr(s, "orelse", []))


def _bound_in_comprehensions(statement: ast.stmt) -> set[str]:
    """Names that end with a comprehension; since Python 3.12 the symbols of what is around it have them, too."""
    targets = [node.target for node in ast.walk(statement) if isinstance(node, ast.comprehension)]
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


def _inner(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _inner(child)


def execute(page: Path, names: dict) -> tuple[int, list[Block], list[tuple[Block, str]]]:
    """Run the blocks of a page in one namespace; a traceback has the lines of the page.

    Returns:
      How many were run (without setups), those that were not, and each `prints` with what was printed.
    """
    ran, left, printed, out = 0, [], [], io.StringIO()
    for block in program(page.read_text(encoding="utf-8")):
        if block.language == "prints":
            printed.append((block, "".join(f"{x.rstrip()}\n" for x in out.getvalue().rstrip().splitlines())))
            out = io.StringIO()
            continue
        if block.why or (block.needs and importlib.util.find_spec(block.needs.split(".")[0]) is None):
            left.append(block)
            continue
        out = io.StringIO() if block.language == "python" else out
        with contextlib.redirect_stdout(out):
            source = "\n" * (block.line - 1) + block.code
            exec(compile(source, str(page), "exec", dont_inherit=True), names)
        ran += block.language == "python"
    return ran, left, printed


def rewrite(page: Path) -> None:
    """Put what the blocks of a page print below them."""
    printed = execute(page, {"__name__": "page"})[2]
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    for block, text in reversed(printed):
        lines[block.line - 1 : block.line - 1 + block.code.count("\n")] = [text]
    page.write_text("".join(lines), encoding="utf-8")


def commands(text: str) -> list[list[str]]:
    """The command lines of this project that a page shows, in fences or in the text, as words: [program, word, ...].

    The program is `train.gpt`, `jzero`, or the path of a script.
    """
    fences = [b.code for b in blocks(text) if b.language not in ("python", "setup")]
    inline = re.findall(r"`([^`]+)`", re.sub(r"(?ms)^```.*?^```$", "", text))
    lines = "\n".join(x.replace("\\\n", " ") for x in fences).splitlines()
    found = []
    for line in [*lines, *(" ".join(x.split()) for x in inline)]:
        for part in re.split(r"&&|;|\|", line.strip().removeprefix("$ ")):
            words = _words(part)
            while words and re.fullmatch(r"[A-Z_]+=.*|bash|exec|srun|mpirun", words[0]):
                words = words[1:]
            if len(words) < 2:
                continue
            name = words[0].rsplit("/", 1)[-1]
            if name == "jzero" and re.fullmatch(r"plan|explain|verify|export", words[1]):
                found.append(["jzero", *words[1:]])
            elif name.startswith("python") and words[1] == "-m" and re.match(r"jzero$|train\.", words[2]):
                found.append(words[2:])
            elif name.startswith("python") and re.fullmatch(r"[\w/.]+\.py", words[1]):
                found.append(words[1:])
    return found


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # an apostrophe: a sentence, or what a program printed
        return []


if __name__ == "__main__":
    os.environ.setdefault("NPROC", "32")
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
    sys.path.insert(0, str(ROOT))
    for name in sys.argv[1:]:
        rewrite(Path(name))
