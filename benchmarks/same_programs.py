"""Does a change of jzero's code change the programs that XLA compiles? The same steps, compiled before and after.

    python benchmarks/same_programs.py write runs/before      # at one commit: about 2 minutes on two cores, no GPU
    python benchmarks/same_programs.py write runs/after       # at the other
    python benchmarks/same_programs.py compare runs/before runs/after

Compiled for 64 H200: the GPT of tests/programs.py at every stage, unrolled and in a scan, its conv net and its mixture
of experts. The text is compared without metadata (names, source lines): two programs whose text is equal take the same
time, memory and wire.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JZERO_POD_CACHE"] = "off"
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

GPT = [("gpt", stage, scan) for stage in range(4) for scan in (False, True)]
CASES = [*GPT, ("conv", 2, None), ("conv", 3, None), ("experts", 3, None)]
FORMS = {None: "", False: ", unrolled", True: ", scan"}


def plain(text: str) -> str:
    """The text of a program without its metadata."""
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    text = re.sub(r'"scheduling_name":"[^"]*",?|scheduling_name=\S+|stack_frame_id=\d+', "", text)
    return re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n.*?(?=\n\n)", "", text, flags=re.S)


def write(folder: Path) -> None:
    """Compiles every case; its text and its figures go into the folder."""
    from programs import program

    folder.mkdir(parents=True, exist_ok=True)
    figures = {}
    for model, stage, scan in CASES:
        size = () if scan is None else (("scan", scan), ("layers", 12 if scan else 4))
        made = program(model, stage=stage, n=64, size=size)
        name, report = f"{model}, stage {stage}{FORMS[scan]}", made.report
        (folder / f"{name}.txt").write_text(plain(made.program.as_text()))
        figures[name] = {
            "arguments": report.memory.arguments, "temp": report.memory.temp, "psi": round(report.wire.psi, 4),
        }  # fmt: skip
        print(name, figures[name], flush=True)
    (folder / "figures.json").write_text(json.dumps(figures, indent=2))


def compare(before: Path, after: Path) -> None:
    """Prints a table."""
    old, new = (json.loads((folder / "figures.json").read_text()) for folder in (before, after))
    print("| program | text | arguments, bytes | temp, bytes: before | after | wire: before | after |")
    print("|---|---|---|---|---|---|---|")
    for name, a in old.items():
        b = new[name]
        texts = [(folder / f"{name}.txt").read_text() for folder in (before, after)]
        same = "equal" if texts[0] == texts[1] else "differs"
        held = f"{a['arguments']}" + ("" if a["arguments"] == b["arguments"] else f" -> {b['arguments']}")
        print(f"| {name} | {same} | {held} | {a['temp']} | {b['temp']} | {a['psi']} Psi | {b['psi']} Psi |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("folders", nargs="+", type=Path)
    given = parser.parse_args()
    (write if given.what == "write" else compare)(*given.folders)


if __name__ == "__main__":
    main()
