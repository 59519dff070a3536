"""train/processes/group.py: who a process is, from flags, JAX_* variables, srun, mpirun and Kubernetes."""

import re

import pytest

from train.processes import find
from train.processes.group import Group

# as Debian's Slurm 22.05 and Open MPI 4.1 set them
SRUN = {
    "SLURM_JOB_ID": "2", "SLURM_STEP_NODELIST": "node[07-10]", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8",
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
}  # fmt: skip
MPIRUN = {
    "OMPI_MCA_orte_hnp_uri": "1422917632.0;tcp://192.0.2.2:43927;tcp6://[fd00::2]:51277",
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}  # fmt: skip
INDEXED_JOB = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1",
    "JAX_COORDINATOR_ADDRESS": "jzero-0.jzero:12321", "JAX_NUM_PROCESSES": "4",
}  # fmt: skip


def test_a_process_by_itself():
    assert find({}) is None
    batch_script = {"SLURM_JOB_ID": "2", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert find(batch_script) is None
    assert find(SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    pod = {"JOB_COMPLETION_INDEX": "3"}
    assert find(pod | {"JAX_NUM_PROCESSES": "1"}) is None  # pods that have nothing to do with each other
    with pytest.raises(
        ValueError, match=r"process 3 of a Kubernetes indexed job.* Set JAX_NUM_PROCESSES and"
    ):
        find(pod)
    assert find({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}) is None


def test_flags_and_variables():
    group = find({}, coordinator="b:2", processes=4, process_id=3)
    assert group == Group("b:2", 4, 3, None, "flags or JAX_* variables")
    environ = {"JAX_COORDINATOR_ADDRESS": "[::1]:70", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    group = find(environ)
    assert (group.coordinator, group.processes, group.me) == ("[::1]:70", 2, 1)
    assert group.address == ("::1", 70)
    assert find(environ, coordinator="b:2", processes=4, process_id=3).coordinator == "b:2"


def test_srun():
    group = find(SRUN)
    assert group == Group("node07:61442", 8, 3, None, "Slurm")
    assert find(SRUN | {"JAX_COORDINATOR_PORT": "99"}).coordinator == "node07:99"
    assert find(SRUN | {"JAX_COORDINATOR_ADDRESS": "x:5"}).coordinator == "x:5"


def test_mpirun_also_inside_of_a_slurm_job():
    for environ in (MPIRUN, SRUN | MPIRUN):
        group = find(environ)
        assert (group.processes, group.me, group.source) == (4, 2, "Open MPI")
        assert group.coordinator.startswith("192.0.2.2:")
    five = {k: v for k, v in MPIRUN.items() if "orte" not in k}
    with pytest.raises(ValueError, match=r"Open MPI 5 does not tell where process 0 is\. Pass --coordinator"):
        find(five)
    assert find(five | {"JAX_COORDINATOR_ADDRESS": "x:5"}).coordinator == "x:5"


def test_a_kubernetes_indexed_job():
    assert find(INDEXED_JOB) == Group("jzero-0.jzero:12321", 4, 1, None, "a Kubernetes indexed job")


@pytest.mark.parametrize(
    ("tasks", "visible", "devices"),
    [
        ("2(x4)", "0,1,2,3,4,5,6,7", (4, 5, 6, 7)),
        ("2(x4)", "0,1", (1,)),
        ("2(x4)", "1", None),  # srun gave it one
        ("1(x8)", "0,1,2,3", None),  # alone on its host: all
        ("1,2(x3)", "0,1", (1,)),
    ],
)
def test_the_gpus_of_a_host_are_shared(tasks, visible, devices):
    environ = SRUN | {"SLURM_STEP_TASKS_PER_NODE": tasks, "CUDA_VISIBLE_DEVICES": visible}
    assert find(environ).local_devices == devices
    assert find(environ | {"JAX_LOCAL_DEVICE_IDS": "0"}).local_devices is None  # JAX reads it itself


def test_gpus_that_cannot_be_shared():
    with pytest.raises(
        ValueError, match=r"^2 processes on this host see 3 GPUs, which they cannot share evenly\."
    ):
        find(SRUN | {"CUDA_VISIBLE_DEVICES": "0,1,2"})


@pytest.mark.parametrize(
    ("environ", "flags", "text"),
    [
        ({}, {"coordinator": "a:1"}, "--processes (or JAX_NUM_PROCESSES) and --process-id (or JAX_PROCESS_ID) is not"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "a:1"}, {}, "--process-id (or JAX_PROCESS_ID) is not"),
        ({}, {"processes": 2, "process_id": 1}, "process 1 of 2 (from flags or JAX_* variables) does not know where"),
        ({}, {"coordinator": "a:1", "processes": 2, "process_id": 2}, "--process-id 2 of --processes 2: it must be"),
        ({}, {"coordinator": "a", "processes": 2, "process_id": 1}, "--coordinator a: must be HOST:PORT"),
        ({}, {"coordinator": "a:99999", "processes": 2, "process_id": 1}, "--coordinator a:99999: must be HOST:PORT"),
        ({"JAX_NUM_PROCESSES": "two"}, {}, "JAX_NUM_PROCESSES=two: must be a whole number."),
    ],
)  # fmt: skip
def test_what_is_missing_or_wrong(environ, flags, text):
    with pytest.raises(ValueError, match=f"{re.escape(text)}"):
        find(environ, **flags)
