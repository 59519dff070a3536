"""How much code there is: lines without docstrings, comments and blank lines, by package.

    python benchmarks/lines.py

The core is what is neither proof, checkpoints, DeepSpeed nor the command line.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

HOUSE = Path(__file__).resolve().parents[1] / "jzero"
OUTSIDE = ("proof", "checkpoint", "deepspeed", "cli", "__main__.py")
QUIET = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def code_lines(file: Path) -> int:
    text = file.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {n for t in tokens if t.type not in QUIET for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            assert first.end_lineno is not None
            lines -= set(range(first.lineno, first.end_lineno + 1))
    return len(lines)


def main() -> None:
    parts: dict[str, list[int]] = {}
    for file in sorted(HOUSE.rglob("*.py")):
        parts.setdefault(file.relative_to(HOUSE).parts[0], []).append(code_lines(file))
    for name, counts in sorted(parts.items(), key=lambda x: -sum(x[1])):
        print(f"{sum(counts):6}  {len(counts):3} files  {name}")
    core = sum(sum(counts) for name, counts in parts.items() if name not in OUTSIDE)
    print(f"{core:6}  the core; {sum(map(sum, parts.values()))} in all")


if __name__ == "__main__":
    main()
