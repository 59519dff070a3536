"""Rewrites docs/plan.md and docs/fit.md: runs each `$ jzero ...` of their blocks and puts what it prints below it.

python docs/make_plan.py            # about 9 minutes on two cores; needs jzero[pod], no GPU
python docs/make_plan.py fit.md     # one page
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent
BLOCK = re.compile(r"```console\n(\$ .*?)\n```", re.DOTALL)


def run(block: re.Match) -> str:
    """A block with its command's present output."""
    command = re.match(r"\$ (.*?[^\\])(\n|$)", block[1], re.DOTALL)
    assert command, block[1]
    words = shlex.split(command[1].replace("\\\n", " "))
    assert words[0] == "jzero", words
    print(command[1], file=sys.stderr)
    done = subprocess.run(
        [sys.executable, "-m", *words], stdout=subprocess.PIPE, text=True, cwd=DOCS.parent, check=False
    )
    return f"```console\n$ {command[1]}\n{done.stdout.rstrip()}\n```"


if __name__ == "__main__":
    for page in sys.argv[1:] or ("plan.md", "fit.md"):
        path = DOCS / page
        path.write_text(BLOCK.sub(run, path.read_text()))
