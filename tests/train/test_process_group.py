"""train/processes/group.py: who a process is, from flags, JAX_* variables, srun, mpirun and Kubernetes."""

import os
import re

import pytest

from train.processes import Group, find

# as Debian's Slurm 22.05 and Open MPI 4.1 set them
SRUN = {
    "SLURM_JOB_ID": "2", "SLURM_STEP_NODELIST": "node[07-10]", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8",
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "4",
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


@pytest.fixture
def found(monkeypatch):
    """What `find` says with these variables and flags, and no others of a launcher."""

    def find_in(environ, **flags):
        monkeypatch.setattr(os, "environ", dict(environ))
        return find(**flags)

    return find_in


def test_a_process_by_itself(found):
    assert found({}) is None
    batch_script = {"SLURM_JOB_ID": "2", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert found(batch_script) is None
    assert found(SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    pod = {"JOB_COMPLETION_INDEX": "3"}
    assert found(pod | {"JAX_NUM_PROCESSES": "1"}) is None  # pods that have nothing to do with each other
    with pytest.raises(ValueError, match=r"--processes \(or JAX_NUM_PROCESSES\) is not given.* JAX_NUM_PROCESSES=1 is"):
        found(pod)
    assert found({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}) is None


def test_flags_and_variables(found):
    assert found({}, coordinator="b:2", processes=4, process_id=3) == Group("b:2", 4, 3)
    environ = {"JAX_COORDINATOR_ADDRESS": "[::1]:70", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    assert found(environ) == Group("[::1]:70", 2, 1)
    assert found(SRUN | environ, coordinator="b:2", processes=4, process_id=3) == Group("b:2", 4, 3)


def test_srun(found):
    assert found(SRUN) == Group("node07:61442", 8, 3)
    assert found(SRUN | {"JAX_COORDINATOR_PORT": "99"}).coordinator == "node07:99"
    assert found(SRUN | {"JAX_COORDINATOR_ADDRESS": "x:5"}).coordinator == "x:5"


def test_mpirun_also_inside_of_a_slurm_job(found):
    for environ in (MPIRUN, SRUN | MPIRUN):
        group = found(environ)
        assert (group.processes, group.me) == (4, 2)
        assert group.coordinator.startswith("192.0.2.2:")
    five = {k: v for k, v in MPIRUN.items() if "orte" not in k}
    with pytest.raises(ValueError, match=r"process 2 of 4 .* \(Open MPI 5 does not tell\)\. Pass --coordinator"):
        found(SRUN | five)
    assert found(five | {"JAX_COORDINATOR_ADDRESS": "x:5"}).coordinator == "x:5"


def test_a_kubernetes_indexed_job(found):
    assert found(INDEXED_JOB) == Group("jzero-0.jzero:12321", 4, 1)


@pytest.mark.parametrize(
    ("nodes", "visible", "devices"),
    [
        ("4", "0,1,2,3,4,5,6,7", (4, 5, 6, 7)),
        ("4", "0,1", (1,)),
        ("4", "1", None),  # srun gave it one
        ("8", "0,1,2,3", None),  # alone on its host: all
    ],
)
def test_the_gpus_of_a_host_are_shared(found, nodes, visible, devices):
    environ = SRUN | {"SLURM_STEP_NUM_NODES": nodes, "CUDA_VISIBLE_DEVICES": visible}
    assert found(environ).local_devices == devices
    assert found(environ | {"JAX_LOCAL_DEVICE_IDS": "0"}).local_devices is None  # JAX reads it itself
    mpi = MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert found(mpi | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}).local_devices == (2, 3)


@pytest.mark.parametrize(
    "more",
    [
        {"CUDA_VISIBLE_DEVICES": "0,1,2"},
        {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_LOCALID": "2"},  # more here than on the other hosts
        {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_NUM_TASKS": "7"},  # fewer on one of them
    ],
)
def test_gpus_that_cannot_be_shared(found, more):
    with pytest.raises(ValueError, match=r"^up to 2 processes on a host see \d GPUs, which they cannot share evenly\."):
        found(SRUN | more)


@pytest.mark.parametrize(
    ("environ", "flags", "text"),
    [
        ({}, {"coordinator": "a:1"}, "--processes (or JAX_NUM_PROCESSES) and --process-id (or JAX_PROCESS_ID) is not"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "a:1"}, {}, "--process-id (or JAX_PROCESS_ID) is not"),
        ({}, {"processes": 2, "process_id": 1}, "process 1 of 2 does not know where process 0 is"),
        ({}, {"coordinator": "a:1", "processes": 2, "process_id": 2}, "--process-id 2 of --processes 2: it must be"),
        ({}, {"coordinator": "a", "processes": 2, "process_id": 1}, "--coordinator a: must be HOST:PORT"),
        ({}, {"coordinator": "a:99999", "processes": 2, "process_id": 1}, "--coordinator a:99999: must be HOST:PORT"),
        ({"JAX_NUM_PROCESSES": "two"}, {}, "JAX_NUM_PROCESSES=two: must be a whole number."),
    ],
)  # fmt: skip
def test_what_is_missing_or_wrong(found, environ, flags, text):
    with pytest.raises(ValueError, match=f"{re.escape(text)}"):
        found(environ, **flags)
