"""Every test but the `long` ones, in parts: `python tests/nightly.py`. Stopped, it goes on where it was.

A part is tests/canary.py, some of the test files, half an hour of fresh cases of tests/differential.py, the mutations
of tests/mutations.py, or, with Python 3.12, tests/versions.py: a quick part on each supported jax. What a part printed
and how it ended is kept in `runs/nightly`, by commit and version of jax; a part that passed is not run again on the
same commit (`--again` runs all). With uncommitted changes nothing is taken over. The table at the end has counts and
minutes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = 10


def parts() -> dict[str, list[str]]:
    """What each part runs. Neighbours stay together: files of one subject share compiled programs."""
    files = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests").rglob("test_*.py"))]
    chunk = -(-len(files) // PARTS)
    pytest = ["-m", "pytest", "-q", "-n", "auto", "-m", "not long", "--durations=10"]
    named = {f"tests {i + 1}": [*pytest, *files[i * chunk : (i + 1) * chunk]] for i in range(PARTS)}
    named = {k: v for k, v in named.items() if v[len(pytest) :]}
    fresh = ["tests/differential.py", "--cases", "5000", "--minutes", "30"]
    canary = {"canary": ["tests/canary.py"]}
    versions = {"versions": ["tests/versions.py"]} if sys.version_info >= (3, 12) else {}  # once, by the newest
    return {**canary, **versions, **named, "differential": fresh, "mutations": ["tests/mutations.py"]}


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def counts(text: str) -> str:
    """`214 passed, 2 skipped` of the last line, of pytest or of checks."""
    found = re.findall(
        r"(\d+ (?:passed|failed|errors?|skipped|xfailed|ok|not looked at))",
        text.rsplit("\n", 3)[-2] if text else "",
    )
    return ", ".join(found)


def run(name: str, words: list[str], folder: Path) -> dict:
    """Run a part with its output on the screen and in a file."""
    started, log = time.monotonic(), folder / f"{name.replace(' ', '-')}.log"
    print(f"\n== {name}\n", flush=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)
    code = process.wait()
    passed = code == 0 or (code == 5 and "deselected" in log.read_text())  # nothing of it is in this run
    return {
        "passed": passed, "minutes": round((time.monotonic() - started) / 60, 1), "counts": counts(log.read_text())
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--again", action="store_true", help="run parts too that have passed on this commit")
    parser.add_argument("--only", action="append", help="a part by its name, as in the table")
    args = parser.parse_args()
    jax = importlib.metadata.version("jax")
    clean = not git("status", "--porcelain", "--untracked-files=no")
    folder = (
        ROOT
        / "runs"
        / "nightly"
        / f"{git('rev-parse', '--short', 'HEAD')}{'' if clean else '-changed'}-jax{jax}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    rows = {}
    for name, words in parts().items():
        if args.only and name not in args.only:
            continue
        record = folder / f"{name.replace(' ', '-')}.json"
        done = json.loads(record.read_text()) if record.exists() and clean and not args.again else {}
        rows[name] = done if done.get("passed") else run(name, words, folder)
        record.write_text(json.dumps(rows[name]))
    print(f"\njax {jax}, {folder.name.split('-jax')[0]}\n\n| part | result | minutes |\n|---|---|---|")
    for name, row in rows.items():
        print(f"| {name} | {'' if row['passed'] else 'FAILED: '}{row['counts']} | {row['minutes']} |")
    print(f"| all | | {sum(row['minutes'] for row in rows.values()):.1f} |")
    return 0 if all(row["passed"] for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
