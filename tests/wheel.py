"""The wheel in an empty environment: `python tests/wheel.py` makes it by `python -m build`, from the sdist.

README's example and `jzero plan` run there.

Nothing of the repository is on the path there, so a file that the wheel lacks, or a package that it does not ask for,
shows.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHOWN = 3  # blocks of the example: linen, NNX, the proof


def example() -> str:
    """README's example, behind what the page presumes."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Use\n")[1]
    blocks = re.findall(r"<!-- setup\n(.*?)-->|^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    parts, shown = [(ROOT / "docs" / "setups" / "mlp.py").read_text(encoding="utf-8")], 0
    for hidden, block in blocks:
        parts.append(hidden or block)
        shown += bool(block)
        if shown == SHOWN:
            break
    return "\n".join(parts) + "\nprint('loss', float(loss))\n"


def main() -> None:
    """Build, install, run; the exit status is that of the first command that fails."""
    with tempfile.TemporaryDirectory(prefix="jzero-wheel-") as folder:
        where = Path(folder)
        run = lambda *args: subprocess.run(list(map(str, args)), cwd=where, check=True, env=ENVIRONMENT)  # noqa: E731
        for name in ("tools", "venv"):
            run(sys.executable, "-m", "venv", where / name)
        tools, python = (where / name / "bin" / "python" for name in ("tools", "venv"))
        run(tools, "-m", "pip", "install", "-q", "build")
        run(tools, "-m", "build", "--outdir", where, ROOT)  # the wheel is made from the sdist
        (wheel,), (_,) = where.glob("*.whl"), where.glob("*.tar.gz")
        run(python, "-m", "pip", "install", "-q", f"{wheel}[pod]")
        (where / "example.py").write_text(example(), encoding="utf-8")
        run(python, "example.py")
        run(where / "venv" / "bin" / "jzero", "plan", "--preset", "gpt2-small", "--stages", "2")
        print(f"ok: {wheel.name}")


ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
    "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "TF_CPP_MIN_LOG_LEVEL": "3",
}  # fmt: skip

if __name__ == "__main__":
    main()
