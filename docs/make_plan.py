"""Rewrites docs/plan.md: runs each `$ jzero ...` of its blocks and puts what it prints below the command.

python docs/make_plan.py      # about 8 minutes on two cores; needs jzero[pod], no GPU
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("plan.md")
BLOCK = re.compile(r"```console\n(\$ .*?)\n```", re.DOTALL)


def run(block: re.Match) -> str:
    """A block with its command's present output."""
    command = re.match(r"\$ (.*?[^\\])(\n|$)", block[1], re.DOTALL)
    assert command, block[1]
    words = shlex.split(command[1].replace("\\\n", " "))
    assert words[0] == "jzero", words
    print(command[1], file=sys.stderr)
    done = subprocess.run(
        [sys.executable, "-m", *words], stdout=subprocess.PIPE, text=True, cwd=PAGE.parents[1], check=False
    )
    return f"```console\n$ {command[1]}\n{done.stdout.rstrip()}\n```"


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(run, PAGE.read_text()))
