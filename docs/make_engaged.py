"""Rewrite the tables of docs/engaged.md: run the page's own python blocks, put what they print below them.

    python docs/make_engaged.py                # 15 s on two cores; needs jzero[pod], no GPU

The text of the page is written there by hand. Its python blocks run in order as one program, from the first
that starts with an import on; a block without a language is the output of the python block before it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax

PAGE = Path(__file__).with_name("engaged.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
VERSION = re.compile(r"\(jax ([\w.]+);")


def outputs(text: str) -> list[str]:
    """What the blocks of `engaged.py` on the page print, one text for each block that prints."""
    blocks = [code for language, code in BLOCK.findall(text) if language == "python"]
    first = next(i for i, code in enumerate(blocks) if "pod = " in code)  # engaged.py
    found, names = [], {"__name__": PAGE.stem}
    for code in blocks[first:]:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, str(PAGE), "exec"), names)
        found += [out.getvalue()] if out.getvalue() else []
    return found


def tables(text: str) -> list[str]:
    """The outputs that the page shows."""
    return [shown for language, shown in BLOCK.findall(text) if not language]


def page(text: str, printed: list[str]) -> str:
    """The page with these outputs in place of those it shows, and with the version of jax that printed them.

    Raises:
      ValueError: the page shows more outputs, or fewer.
    """
    if len(printed) != len(tables(text)):
        raise ValueError(
            f"{PAGE.name}: {len(printed)} blocks print, but {len(tables(text))} outputs are shown."
        )
    rest = iter(printed)
    text = BLOCK.sub(lambda m: m[0] if m[1] else f"```\n{tidy(next(rest))}```", text)
    return VERSION.sub(f"(jax {jax.__version__};", text)


def tidy(printed: str) -> str:
    """An output without blanks at the ends of its lines."""
    return "\n".join(line.rstrip() for line in printed.rstrip().splitlines()) + "\n"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page(text, outputs(text)), encoding="utf-8")
    print(f"wrote {PAGE}")
