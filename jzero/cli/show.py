"""The tables of `jzero plan`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable

from jzero.cli.job import Answers, Job, Json
from jzero.core.errors import counted, human_bytes
from jzero.proof.pod import JAX_TAKES
from jzero.proof.tables import lines_of, plain_table

COMPARED = ("params", "opt_state", "wire")
OFF, SHARE_OFF = "*", 0.05
VARIABLE, OLDER = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
SHARE_SHOWN = 1e-4  # of a device's bytes: a step counter that an update outside of the program keeps to itself


def title(job: Job, answers: Answers) -> str:
    """The model, the pod, the mesh and the micro-batch in two lines."""
    results = [r for r in answers["results"].values() if "values" in r]
    about = answers["about"]
    axes = ", ".join(f"{k}: {v}" for k, v in about["mesh"].items())
    hosts = f"{job.hosts} host{'s' if job.hosts > 1 else ''} x {job.gpus_per_host}"
    pod = f"{about['gpus']} {job.gpu} ({hosts}), {human_bytes(about['memory'])} each, mesh {{{axes}}}"
    if not results:
        return f"{job.preset or job.create}\n{pod}"
    values = results[0]["values"]
    count = f"{values / 1e9:.2f}B" if values >= 1e9 else f"{values / 1e6:.1f}M" if values >= 1e5 else f"{values:,}"
    examples = f"{counted(results[0]['micro_batch'], 'example')} per device"
    if job.accumulate > 1:
        examples += f" and micro-batch, {job.accumulate} micro-batches"
    tokens = next((r["tokens_per_step"] for r in results if r["tokens_per_step"]), None)
    if tokens:
        examples += f", {tokens:,} tokens per step"
    return f"{job.preset or job.create}: {count} params, {examples}\n{pod}"


def _is_off(result: Json, key: str) -> bool:
    """True if the compiled figure is not that of the closed form."""
    estimated, compiled = result["estimate"][key], result["compiled"][key]
    apart = abs(compiled - estimated)
    return apart > SHARE_OFF * estimated and apart > SHARE_SHOWN * result["estimate"]["total"]


def stage_table(results: list[Json], fraction: float) -> list[str]:
    """Two lines per stage: estimated, then compiled; `fraction`: of a GPU's memory, in which a step fits."""
    done = [r for r in results if "crash" not in r]
    most = max((r["compiled"]["total"] for r in done), default=0)
    unit, size = ("GB", 1e9) if most >= 1e9 else ("MB", 1e6) if most >= 1e6 else ("kB", 1e3)

    def shown(*counts: float) -> list[str]:
        return [f"{count / size:.2f}" for count in counts]

    numbers = ("params", "state", "grads", "active", "total", "fits", "largest", "wire", "Psi")
    table = plain_table("stage", unit, *numbers, right=numbers)
    for r in done:
        e, c = r["estimate"], r["compiled"]
        active = e["activations"] + e["working"] + e["in_flight"]
        table.add_row(
            str(r["stage"]), "estimated", *shown(e["params"], e["opt_state"], e["grads"]),
            *(shown(active) if active else ["-"]), *shown(e["total"]), "", "", *shown(e["wire"]), _psi(e),
        )  # fmt: skip
        rest = c["total"] - c["params"] - c["opt_state"]
        marked = {key: shown(c[key])[0] + (OFF if _is_off(r, key) else "") for key in COMPARED}
        table.add_row(
            "", "compiled", marked["params"], marked["opt_state"], "-", *shown(rest, c["total"]),
            "yes" if r["fits"] else "no", _largest(r), marked["wire"], _psi(c),
        )  # fmt: skip
    reasons = [f"  stage {r['stage']}: {_reason(r['estimate'], *row)}" for r in done for row in _reasons(r["estimate"])]
    if reasons:
        reasons = ["wire, where it is not 2 Psi (3 at stage 3):", *reasons, ""]
    crashes = [f"stage {r['stage']}: the compiler ended ({r['crash']})" for r in results if "crash" in r]
    tables = [*(lines_of(table) if done else []), *_host_table(done, unit, shown)]
    return [*tables, *reasons, *_notes(done, fraction), *crashes]


def _reasons(e: Json) -> Iterable[tuple[str, int]]:
    return e.get("wire_reasons", {}).items()


def _reason(e: Json, why: str, size: int) -> str:
    """`+0.50 Psi for matrices of the optimizer, to their owners and back`."""
    psi = f"{size * e['wire_psi'] / e['wire']:+.2f} Psi" if e["wire_psi"] and e["wire"] else human_bytes(size)
    return f"{psi} for {why}"


def _host_table(done: list[Json], unit: str, shown: Callable[..., list[str]]) -> list[str]:
    """With offload: host memory, and what crosses PCIe."""
    if any("update" in r for r in done):
        return _update_table(done, unit, shown)
    if not any(r["estimate"]["host"] for r in done):
        return []
    numbers = ("host", "host/node", "to device", "to host", "in flight")
    table = plain_table("stage", unit, *numbers, right=numbers)
    same = ("host_per_node", "to_device", "to_host")
    for r in done:
        e, c = r["estimate"], r["compiled"]
        table.add_row(str(r["stage"]), "estimated", *shown(e["host"], *(e[k] for k in same), e["in_flight"]))
        table.add_row("", "compiled", *shown(c["host_total"], *(c[k] for k in same)), "")
    return lines_of(table)


def _update_table(done: list[Json], unit: str, shown: Callable[..., list[str]]) -> list[str]:
    """For an update outside of the program: host memory, files, what crosses PCIe, and how long it takes."""
    numbers = ("host", "host/node", "disk/node", "to device", "to host", "from disk", "to disk", "update")
    table = plain_table("stage", unit, *numbers, right=numbers)
    for r in done:
        e = r["estimate"]
        moved = e["updated"] if e["disk"] else 0
        cells = (e[k] for k in ("host", "host_per_node", "disk_per_node", "to_device", "to_host"))
        seconds = f"{r['update']['seconds']:.2g} s"
        table.add_row(str(r["stage"]), "estimated", *shown(*cells, moved, moved), seconds)
    return lines_of(table)


def _psi(figures: Json) -> str:
    return "-" if figures["wire_psi"] is None else f"{figures['wire_psi']:.2f}"


def _largest(result: Json) -> str:
    found = result.get("largest")
    if found is None:
        return "-"
    return ("" if found["exact"] else ">= ") + str(found["micro_batch"])


def _notes(results: list[Json], fraction: float) -> list[str]:
    if not results:
        return []
    notes = [
        "Bytes per device. active: activations, logits, gathered weights (estimated for presets alone); compiled, the",
        "gradients are in it, since they share buffers. wire: sent by one device in a step.",
    ]
    rates = results[0]["gb_per_second"]
    times = ", ".join(f"stage {r['stage']} {1000 * r['wire_seconds']:.1f} ms" for r in results)
    notes += [
        f"Time on the wire at full links, without compute: {times}",
        f"({rates['within_host']:g} GB/s per GPU within a host, {rates['between_hosts']:g} per host between hosts: "
        "--bandwidths).",
    ]
    if any("update" in r for r in results):
        notes += [
            "The update runs outside of the compiled program. At stage 2 so does the gather of new params: the",
            "compiled wire is without that Psi. host, disk: of one device, and of all devices of a host (/node), with",
            "gradients on their way, buffers, and both slots of the files. to device, to host, from disk, to disk: in",
            "a step, of one device. update: copies, arithmetic and files side by side, at these GB/s (--bandwidths):",
            f"{rates['pcie']:g} of PCIe per GPU and direction, {rates['memory']:g} of memory and "
            f"{rates['disk']:g} of disk per host.",
        ]
    elif any(r["estimate"]["host"] for r in results):
        notes += [
            "host, host/node: in pinned host memory, of one device and of all devices of a host: optimizer state, and",
            "with --offload-params params and gradients. to device, to host: over PCIe in a step, of one device.",
            "in flight: what of the state is on the device at once.",
        ]
    if any(_is_off(r, key) for r in results for key in COMPARED):
        notes.append(
            f"{OFF} more than {SHARE_OFF:.0%} from the estimate; findings, where there are any, say why."
        )
    if any("largest" in r for r in results):
        notes.append(
            "fits, largest: this micro-batch, and the largest number of examples per device that still does."
        )
    notes += [
        f"fits: in {fraction:g} of a GPU's memory (--memory-fraction). JAX takes {JAX_TAKES:g} of it, or what",
        f"{VARIABLE} says before Python starts.",
    ]
    seconds = ", ".join(f"{r['seconds']:.0f} s" for r in results)
    memory = human_bytes(max(r["host_memory"] for r in results))
    return [*notes, f"Compiled in {seconds} with {memory} of host memory."]


def findings_text(results: list[Json]) -> list[str]:
    """What `check` found, stage by stage; one line where it found nothing."""
    compiled = [r for r in results if "findings" in r]
    lines: list[str] = []
    for r in compiled:
        for f in r["findings"]:
            text = f"stage {r['stage']}: {f['kind']} ({human_bytes(f['bytes'])}): {f['text']}"
            lines += ["", *_wrapped(text), *_wrapped(f"Remedy: {f['remedy']}", indent="    ")]
    clean = [str(r["stage"]) for r in compiled if not r["findings"]]
    if clean:
        lines += [
            "",
            f"jzero.check: nothing found at stage{'s' if len(clean) > 1 else ''} {', '.join(clean)}.",
        ]
    return lines


def _wrapped(text: str, indent: str = "") -> list[str]:
    rows = [
        textwrap.wrap(x, 108, initial_indent=indent, subsequent_indent=indent + "  ")
        for x in text.splitlines()
    ]
    return [line for row in rows for line in row]
