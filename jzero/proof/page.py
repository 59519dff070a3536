"""`write_html`: what XLA made of a step as one page: memory along the schedule, collectives, findings, the plan."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib import resources
from importlib.metadata import version
from pathlib import Path

import jax

from jzero.core.compile_only import buffers_of
from jzero.core.errors import check_kind
from jzero.core.traces import innermost
from jzero.proof.buffers import read_buffers
from jzero.proof.check import Findings, findings
from jzero.proof.page_data import Json, page_data
from jzero.proof.report import Report, explain
from jzero.sharding import Plan, check_plan


def write_html(path: str | os.PathLike[str], compiled: jax.stages.Compiled, plan: Plan, *, title: str = "") -> None:
    """Writes one page that shows what XLA made of a step. It needs no network and no server.

    The page has the memory of one device along the schedule by kind, or by address, with what is in use at the peak or
    wherever one clicks (name, type, line of code); the collectives below it; bytes by axis, operation and phase; what
    `check` finds; the leaves of the plan. Tables are filtered and sorted. What is looked at is in the address of the
    page, after `#`.

    Args:
      path: file to write, replaced if it is there.
      compiled: what `pod.compile(step, ..., buffers=True)` returns. Without `buffers` the page has no memory along the
        schedule.
      plan: the plan of the state that the step was compiled for, `jzero.plan_of(state)`.
      title: shown at the head of the page.

    Raises:
      TypeError, ValueError, ProofError: as `explain` and `findings`; nothing is written then.
      FileNotFoundError: the folder of `path` is missing.

    Cost:
      As `explain` and `findings`. A page of an unrolled program of 32 layers has 1 to 2 MB.

    Example:
      >>> import jzero
      >>> jzero.write_html("step.html", compiled, jzero.plan_of(state))  # doctest: +SKIP
    """
    where = "jzero.write_html"
    check_plan(plan, where=where)
    check_kind(title, "title", str, "a string", where=where)
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{where}: path must be a string or a path, got {type(path).__name__}.")
    folder = Path(path).resolve().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{where}: there is no folder {folder}.")
    program = program_of(compiled, plan, explain(compiled, plan), findings(compiled, plan))
    html = page_of([program], title=title or "A step, as compiled")
    Path(path).write_text(html, encoding="utf-8")


def program_of(compiled: jax.stages.Compiled, plan: Plan, report: Report, found: Findings) -> Json:
    """What a page shows of one program, as plain data; `report`, `found`: what `explain` and `findings` say of it."""
    compiled = innermost(compiled, jax.stages.Compiled)
    text = buffers_of(compiled)
    return page_data(compiled, plan, read_buffers(text) if text else None, report, found)


def page_of(programs: Sequence[Json], *, title: str, subtitle: str = "", limit: float | None = None) -> str:
    """The text of a page.

    Args:
      programs: what `program_of` returned for each.
      title, subtitle: its head.
      limit: bytes of a device that a program may take; None if that is not known.
    """
    footer = f"jzero {version('jzero')}, jax {jax.__version__}. Compiled, not run: all figures are the program's."
    fields = {"title": title, "subtitle": subtitle, "limit": limit, "programs": list(programs), "footer": footer}
    data = json.dumps(fields, separators=(",", ":")).replace("</", "<\\/")
    return resources.files("jzero.proof").joinpath("page.html").read_text("utf-8").replace("@DATA@", data)
