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


@pytest.mark.parametrize("name", ["slurm.sbatch", "mpirun.sh"])
def test_the_shell_files_parse(name):
    subprocess.run(["bash", "-n", LAUNCH / name], check=True)


def test_the_pods_script_parses():
    (script,) = kubernetes()[2]["containers"][0]["args"]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize("name", ["slurm.sbatch", "mpirun.sh", "kubernetes.yaml"])
def test_the_flags_are_known(name):
    """With the shell's variables as a run and a restart have them."""
    (command,) = re.findall(r"-m train\.gpt (.*)", (LAUNCH / name).read_text())
    for resume in ("", "--resume"):
        values = {"$resume": resume, '"$out"': "/runs/x", '"$OUT"': "/runs/x", '"$@"': ""}
        text = command
        for variable, value in values.items():
            text = text.replace(variable, value)
        config = flags.parse(shlex.split(text))
        assert config.preset == "gpt2-xl"
        assert config.out == Path("/runs/x")
        assert config.resume == bool(resume)


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
        (folder / "own.py").write_text(code.replace("localhost:12345", f"localhost:{free_port()}"))
        env = dict(os.environ, COUNT=str(count), JAX_PLATFORMS="cpu", PYTHONPATH=str(LAUNCH.parents[1]))
        workers = [
            subprocess.Popen(
                [sys.executable, "own.py"], cwd=folder, env=env | {"RANK": str(rank)},
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
