"""Measurements that can be interrupted: what a file holds is not measured again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def resumed(out: Path, measure: Callable[..., Any]) -> Callable[..., Any]:
    """`measure(*key)`, looked up in `out` where that has it, else measured and added.

    Args:
      out: a file of JSON lines, each a key and a result; it need not be there.
      measure: takes a key of JSON scalars, and returns what JSON can hold.
    """
    done = {}
    if out.exists():
        done = {tuple(key): result for key, result in map(json.loads, out.read_text().splitlines())}

    def found(*key: Any) -> Any:
        if key not in done:
            done[key] = measure(*key)
            with out.open("a") as file:
                file.write(json.dumps([key, done[key]]) + "\n")
        return done[key]

    return found
