"""The page of benchmarks/gpu.py, written anew after every part from the rows so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NO_GPU = """**No GPU has run this page.** It is the short form of the script on {count} simulated CPU devices,
which shows that every part runs. No time, peak or rate here says anything about a GPU; "Could not do" has the
rest."""


def page(run: dict[str, Any], done: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]) -> str:
    """The page.

    Args:
      run: date, command, minutes, took, machine, driver, environment, and what was asked of all parts.
      done: of each part: name, title, asked, budget, seconds, cases, finished, findings.
      events: what parts have written: "part", "case", and "row" or "failed".
    """
    machine = run["machine"]
    gpu = machine["platform"] != "cpu"
    lines = [f"# What compiling cannot settle: {machine['count']} x {machine['kind']}, {run['date']}", ""]
    lines += [] if gpu else [NO_GPU.format(count=machine["count"]), ""]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines += [
        f"`{run['command']}`, {run['minutes']:g} minutes asked, {run['took'] / 60:.1f} taken. "
        f"Python {machine['python']}, {versions}. {run['driver']}".strip(),
        "",
        "Environment: "
        + (", ".join(f"`{k}={v}`" for k, v in sorted(run["environment"].items())) or "nothing set")
        + ".",
        "",
        table([summary(part) for part in done]),
    ]
    for part in done:
        rows = [
            e["row"] for e in events if e["part"] == part["name"] and "row" in e and "cannot" not in e["row"]
        ]
        lines += ["", f"## {part['title']}", "", part["asked"]]
        lines += ["", *[f"- {text}" for text in part["findings"]]] if part["findings"] else []
        for name in dict.fromkeys(r.get("table", "") for r in rows):
            lines += [
                "",
                *([f"### {name}", ""] if name else []),
                table([r for r in rows if r.get("table", "") == name]),
            ]
    lines += ["", "## Could not do", "", *[f"- {text}" for text in could_not(run, done, events)], ""]
    return "\n".join(lines)


def summary(part: dict[str, Any]) -> dict[str, Any]:
    """A part in the first table."""
    return {
        "part": part["name"], "budget, s": round(part["budget"]), "taken, s": round(part["seconds"]),
        "cases finished": f"{part['finished']} of {len(part['cases'])}",
    }  # fmt: skip


def could_not(
    run: dict[str, Any], done: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]
) -> list[str]:
    """What this machine cannot show, what failed, what there was no time for, and parts that were not asked for."""
    shown = [f"{e['part']}: {e['row']['cannot']}" for e in events if "cannot" in e.get("row", {})]
    failed = [f"{e['part']}, {e['case']}: {e['failed']}" for e in events if "failed" in e]
    left = [f"{p['name']}: {p['left']}" for p in done if p["left"]]
    names = {p["name"] for p in done}
    parts = [
        f"{name}: not run yet" if name in run["asked"] else f"{name}: not asked for"
        for name in run["parts"]
        if name not in names
    ]
    return list(dict.fromkeys([*shown, *failed, *left, *parts])) or ["nothing"]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown; a column for every key of any row."""
    names = [n for n in dict.fromkeys(k for r in rows for k in r) if n != "table"]
    if not names:
        return "No rows."
    lines = [names, ["---:" if any(is_number(r.get(n)) for r in rows) else "---" for n in names]]
    lines += [[cell(n, r.get(n)) for n in names] for r in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def cell(name: str, value: Any) -> str:
    """A value as it is printed: four digits; what was asked as pass or FAIL."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return {"ok": ("FAIL", "pass")}.get(name, ("no", "yes"))[value]
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value).replace("|", "\\|").replace("\n", " ")
