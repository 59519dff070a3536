"""docs/launch: the files parse, their flags are those of train/gpt.py, and the Kubernetes job fits together."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pages
import pytest
import yaml
from processes import free_port

from train import config as flags
from train.processes import find

LAUNCH = Path(__file__).resolve().parents[2] / "docs" / "launch"


def kubernetes():
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    return service, job, job["spec"]["template"]["spec"]


@pytest.fixture
def started(tmp_path):
    """What a template would start, as a list of words: the launchers and Python print their arguments."""
    for name in ("srun", "mpirun", ".venv/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('#!/bin/bash\nprintf "%s\\n" "$0" "$@"\n')
        (tmp_path / name).chmod(0o755)

    def run(template, command=()):
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": "runs/x", "JOB_COMPLETION_INDEX": "0"}
        if template == "kubernetes.yaml":
            (script,) = kubernetes()[2]["containers"][0]["args"]
            words, env["COMMAND"] = ["-c", script], shlex.join(command)
        else:
            words = [LAUNCH / template, *command]
        done = subprocess.run(["bash", *words], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

    return run


@pytest.mark.parametrize("name", ["slurm.sbatch", "mpirun.sh", "kubernetes.yaml"])
def test_a_template_starts_train_gpt_or_your_script(name, started, tmp_path):
    for saved in (False, True):
        if saved:
            (tmp_path / "runs/x/checkpoints/20").mkdir(parents=True)
        words = started(name)
        config = flags.parse(words[words.index("train.gpt") + 1 :])
        assert (config.preset, config.out, config.resume) == ("gpt2-xl", Path("runs/x"), saved)
    own = [".venv/bin/python", "own.py", "--name", "two words"]
    assert started(name, own)[-3:] == own[1:]


def test_the_kubernetes_job_fits_together(monkeypatch):
    service, job, pod = kubernetes()
    spec, (container,) = job["spec"], pod["containers"]
    environ = {x["name"]: x["value"] for x in container["env"]}
    assert (job["apiVersion"], job["kind"], service["kind"]) == ("batch/v1", "Job", "Service")
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(environ["JAX_NUM_PROCESSES"])
    assert service["spec"]["clusterIP"] == "None"  # headless
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["restartPolicy"] == "Never"
    mounted = {x["name"] for x in container["volumeMounts"]}
    assert mounted == {x["name"] for x in pod["volumes"]}
    for index in range(spec["completions"]):
        monkeypatch.setattr(os, "environ", environ | {"JOB_COMPLETION_INDEX": str(index)})
        group = find()
        assert group is not None
        assert (group.me, group.processes) == (index, spec["completions"])
        port = service["spec"]["ports"][0]["port"]
        assert group.coordinator == f"{job['metadata']['name']}-0.{service['metadata']['name']}:{port}"


def own_script(folder, code, counts):
    """What the processes of each start of the page's script print last: (step, loss) of every one of them."""
    found = []
    folder.mkdir()
    for count in counts:
        (folder / "own.py").write_text(code)
        env = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=str(LAUNCH.parents[1]))
        env |= {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": str(count)}
        env |= {"JAX_NUM_CPU_DEVICES": str(8 // count)}
        workers = [
            subprocess.Popen(
                [sys.executable, "own.py"], cwd=folder, env=env | {"JAX_PROCESS_ID": str(rank)},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(count)
        ]  # fmt: skip
        texts = [w.communicate(timeout=200) for w in workers]
        assert not any(w.returncode for w in workers), texts[0][1][-3000:]
        lines = [re.search(r"step (\d+), loss (\S+)", text)[0] for text, _ in texts]
        assert len(set(lines)) == 1
        step, loss = re.findall(r"[\d.]+", lines[0])
        found.append((int(step), float(loss)))
    return found


@pytest.mark.nightly
def test_the_script_of_the_page_goes_on_with_the_next_row_on_other_numbers_of_processes(tmp_path):
    (block,) = [b for b in pages.program(pages.PAGES["docs/launch.md"].read_text()) if b.language == "python"]
    one = own_script(tmp_path / "one", block.code, [1, 1])
    several = own_script(tmp_path / "several", block.code, [2, 4])
    assert [step for step, _ in one] == [step for step, _ in several] == [10, 20]
    assert [loss for _, loss in several] == pytest.approx([loss for _, loss in one], rel=1e-5)
