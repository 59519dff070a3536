"""Every jax from the oldest to the newest supported one: tests/canary.py and a quick part of the tests on each.

`python tests/versions.py` makes a virtual environment per version (.venvs/), with plugins of the same version and the
Flax, optax and orbax that pip resolves, and prints the table of docs/compatibility.md. `--only 0.11.1` runs some
versions, `--print` none. A version whose Python is not installed is left out, and the table says so. Output and results
are kept in runs/versions.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "runs" / "versions"
VERSIONS = {  # and the Python to run it with: 0.10.2 is the last for 3.11
    "0.10.2": "3.11", "0.11.0": "3.12", "0.11.1": "3.12", "0.11.2": "3.12", "0.12.0": "3.12", "0.12.0.1": "3.12",
}  # fmt: skip
OF_ONE_VERSION = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt")
FILES = (  # numerics, traces and programs: what a jax changes first
    "tests/test_optim.py", "tests/gather/test_gather.py", "tests/gather/test_loop_weights.py",
    "tests/flax/test_explicit.py", "tests/proof/test_pod.py", "tests/compiled/test_gpu_program.py",
    "tests/compiled/test_gpu_host_params.py",
)  # fmt: skip
RUNS = {
    "checks": ["tests/canary.py"],
    "tests": ["-m", "pytest", "-q", "-n", "auto", "--durations=3", *FILES],
}


def interpreter(python: str) -> str | None:
    """A Python of this version that can make a virtual environment: this one, on PATH, or of pyenv."""
    here = sys.executable if python == ".".join(map(str, sys.version_info[:2])) else None
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(
        f"versions/{python}*/bin/python{python}"
    )
    for candidate in filter(None, [here, f"python{python}", *map(str, sorted(pyenv))]):
        try:
            if subprocess.run([candidate, "-c", "import venv"], capture_output=True).returncode == 0:
                return candidate
        except OSError:
            continue
    return None


def environment(version: str, python: str) -> Path:
    """The Python of a virtual environment with this jax, made where there is none."""
    folder = ROOT / ".venvs" / f"jax{version}"
    packages = ["-e", ".[test]", *(f"{name}=={version}" for name in OF_ONE_VERSION)]
    made = folder / "made_from"
    words = "\n".join([*packages, (ROOT / "pyproject.toml").read_text()])
    if not made.exists() or made.read_text() != words:
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "-q", *packages], cwd=ROOT, check=True)
        made.write_text(words)
    return folder / "bin" / "python"


def run(version: str) -> dict:
    """What the checks and the tests say on one version."""
    python = interpreter(VERSIONS[version])
    if python is None:
        return {"ok": None, "why": f"no Python {VERSIONS[version]} here"}
    try:
        python = environment(version, python)
    except subprocess.CalledProcessError as error:
        return {"ok": False, "why": f"cannot be installed: {' '.join(map(str, error.cmd))[:80]}"}
    found: dict = {"ok": True, "commit": commit()}
    start = time.monotonic()
    for name, words in RUNS.items():
        log = RESULTS / f"{version}-{name}.log"
        print(f"\n== jax {version}: {name}\n", flush=True)
        with log.open("w") as file:
            command = subprocess.Popen(
                [python, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            assert command.stdout
            for line in command.stdout:
                print(line, end="", flush=True)
                file.write(line)
        found["ok"] &= command.wait() == 0
        found[name] = outcome(log.read_text())
    held = (RESULTS / f"{version}-checks.log").read_text()
    found["packages"] = dict(re.findall(r"(Python|flax|optax|orbax-checkpoint) ([\w.]+)", held))
    return found | {"minutes": round((time.monotonic() - start) / 60, 1)}


def outcome(text: str) -> str:
    """`64 ok`, `214 passed, 2 failed` of the last line of checks or tests; nothing of those that are 0."""
    last = text.strip().rsplit("\n", 1)[-1]
    counts = re.findall(r"(\d+) (ok|not looked at|passed|failed|errors?|skipped|xfailed)", last)
    return ", ".join(f"{n} {what}" for n, what in counts if n != "0") or "ended early"


def commit() -> str:
    words = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def table(found: dict[str, dict]) -> str:
    """The results in Markdown."""
    rows = ["| jax | Python | Flax | orbax | checks | tests |", "|---|---|---|---|---|---|"]
    for version, row in found.items():
        held = row.get("packages", {})
        cells = [
            held.get("Python", VERSIONS[version]),
            held.get("flax", ""),
            held.get("orbax-checkpoint", ""),
        ]
        results = [row.get("checks", row.get("why", "")), row.get("tests", "")]
        rows.append(f"| {' | '.join([version, *cells, *results])} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(VERSIONS), help="some versions")
    parser.add_argument("--print", action="store_true", help="the table of what was run, and run nothing")
    args = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    chosen = [] if args.print else args.only or list(VERSIONS)
    for version in chosen:
        (RESULTS / f"{version}.json").write_text(json.dumps(run(version)))
    files = {v: RESULTS / f"{v}.json" for v in VERSIONS}
    found = {v: json.loads(f.read_text()) for v, f in files.items() if f.exists()}
    print(f"\n{table(found)}\n")
    if args.print:
        return 0
    results = [found[v]["ok"] for v in chosen]
    ok, failed, left_out = (results.count(kind) for kind in (True, False, None))
    print(f"{len(chosen)} versions: {ok} ok, {failed} failed, {left_out} not looked at")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
