"""docs/launch: the files parse, their flags are those of train/gpt.py, and the Kubernetes job fits together."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from train import config as flags
from train.processes import find

LAUNCH = Path(__file__).resolve().parents[1] / "docs" / "launch"


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


def test_the_kubernetes_job_fits_together():
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
        group = find(environ | {"JOB_COMPLETION_INDEX": str(index), "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
        assert (group.me, group.processes) == (index, spec["completions"])
        port = service["spec"]["ports"][0]["port"]
        assert group.coordinator == f"{job['metadata']['name']}-0.{service['metadata']['name']}:{port}"
