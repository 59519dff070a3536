"""Runs of train/gpt.py for the tables of the docs: the preset `tiny`, quiet, in a folder of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import tempfile
from pathlib import Path
from typing import Any

from train import gpt
from train.config import PRESETS, Config

TINY = PRESETS["tiny"]


def run(steps: int, **fields: Any) -> gpt.Result:
    """The result of a run of so many steps with these fields of its config."""
    with tempfile.TemporaryDirectory() as folder:
        ends = {"steps": steps, "eval_every": steps, "save_every": steps, "out": Path(folder) / "run"}
        config: Config = dataclasses.replace(TINY, **ends, **fields)
        with contextlib.redirect_stdout(io.StringIO()):
            return gpt.train(config, gpt.prepare(config))
