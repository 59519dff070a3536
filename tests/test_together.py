"""Tests that share compiled programs run in one worker, whatever pytest and pytest-xdist make of markers."""

import os
import re
import subprocess
import sys
from pathlib import Path

from programs import cached
from together import TOGETHER, group_of

HERE = Path(__file__).parent


def test_groups():
    assert group_of("tests/activations/test_remat.py::test_x[3-a]") == "test_remat"
    assert group_of("tests/test_parity.py::test_ten_steps[0-adam]") == "parity-adam"
    assert group_of("tests/test_parity.py::test_ten_steps[3-adam]") == "parity-adam"
    assert group_of("tests/flax/test_state.py::test_x[1]") == "tests/flax/test_state.py::test_x[1]"
    assert {f.stem for f in HERE.rglob("test_*.py")} >= TOGETHER


def test_a_file_stays_in_one_worker(tmp_path):
    """Eight tests of a file that is a group, beside another file that keeps the other worker waiting for work."""
    (tmp_path / "conftest.py").write_text("from together import pytest_xdist_make_scheduler\n")
    code = "import pytest\n\n@pytest.mark.parametrize('i', range(8))\ndef test_x(i):\n    pass\n"
    for name in ("test_remat", "test_other"):
        (tmp_path / f"{name}.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist=loadgroup", "-v", "-p", "no:cacheprovider"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"PYTHONPATH": str(HERE)}
    done = subprocess.run([*command, str(tmp_path)], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert "16 passed" in done.stdout, done.stdout + done.stderr
    ran = re.findall(r"\[(gw\d)\].*PASSED (\w+)\.py", done.stdout)
    assert len({worker for worker, file in ran if file == "test_remat"}) == 1


def test_a_default_is_no_second_program():
    made = []

    @cached
    def program(stage, scan=False, **size):
        made.append((stage, scan, size))
        return len(made)

    assert program(1) == program(1, False) == program(1, scan=False) == program(stage=1) == 1
    assert program(1, True) == program(1, scan=True) == 2
    assert program(1, layers=2) == program(1, False, layers=2) == 3
    assert made == [(1, False, {}), (1, True, {}), (1, False, {"layers": 2})]
