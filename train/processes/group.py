"""Which process of how many this is, and where process 0 is: from flags, JAX_* variables, or what a launcher sets.

The first that has an answer, in this order: flags, JAX_*, Open MPI, Slurm, Kubernetes (docs/launch.md has the names).
mpirun inside a Slurm job starts its own daemons with srun, whose SLURM_PROCID is not that of a process of the run.
JAX would ask the API of Kubernetes; here the job's file says how many there are and where process 0 is.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from jax._src.clusters import OmpiCluster, SlurmCluster


@dataclasses.dataclass(frozen=True)
class Group:
    """A process of several."""

    coordinator: str  # host:port, where process 0 can be reached
    processes: int
    me: int  # from 0
    local_devices: tuple[int, ...] | None = None  # its GPUs, by their number on the host; None: all that it sees


def find(
    *, coordinator: str | None = None, processes: int | None = None, process_id: int | None = None
) -> Group | None:
    """The group that this process belongs to; None for a process by itself.

    Args:
      coordinator, processes, process_id: the flags; they go before the variables.

    Raises:
      ValueError: a part is missing or is not a number, with the flag or the variable that gives it.
    """
    mpi, srun = "OMPI_COMM_WORLD_RANK" in os.environ, "SLURM_STEP_NUM_TASKS" in os.environ
    size = "OMPI_COMM_WORLD_SIZE" if mpi else "SLURM_STEP_NUM_TASKS"  # not of a batch script, which is one process
    rank = "OMPI_COMM_WORLD_RANK" if mpi else "SLURM_PROCID" if srun else "JOB_COMPLETION_INDEX"
    count = _number("JAX_NUM_PROCESSES", size, flag=processes)
    me = _number("JAX_PROCESS_ID", rank, flag=process_id)
    address = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    alone = count == 1 and not _number("JAX_PROCESS_ID", flag=process_id)  # or one of many unrelated pods
    if alone or (address, count, me) == (None, None, None):
        return None
    if count is None or me is None:
        flags = {"--processes (or JAX_NUM_PROCESSES)": count, "--process-id (or JAX_PROCESS_ID)": me}
        raise ValueError(
            f"one of several processes, and {' and '.join(k for k, v in flags.items() if v is None)} is not given. "
            "Pass it, or use srun or mpirun (docs/launch.md). JAX_NUM_PROCESSES=1 is for pods that work alone."
        )
    if not 0 <= me < count:
        raise ValueError(f"--process-id {me} of --processes {count}: it must be from 0 to {count - 1}.")
    address = address or _address(mpi)
    if address is None:
        raise ValueError(
            f"process {me} of {count} does not know where process 0 is (Open MPI 5 does not tell). Pass --coordinator "
            "HOST:PORT, or set JAX_COORDINATOR_ADDRESS: the host of process 0, and a port that is free there."
        )
    if not re.fullmatch(r".+:\d{1,5}", address) or not 0 < int(address.rpartition(":")[2]) < 65536:
        raise ValueError(f"--coordinator {address}: must be HOST:PORT, with a port from 1 to 65535.")
    return Group(address, count, me, _local_devices(count, mpi))


def _number(*names: str, flag: int | None = None) -> int | None:
    """The flag, or the first of these variables that is set."""
    name = next((name for name in names if name in os.environ), "")
    if flag is None and name and not re.fullmatch(r"-?\d+", os.environ[name]):
        raise ValueError(f"{name}={os.environ[name]}: must be a whole number.")
    return flag if flag is not None or not name else int(os.environ[name])


def _address(mpi: bool) -> str | None:
    """As JAX reads it: the first host, and a port that follows from the job or is JAX_COORDINATOR_PORT."""
    cluster, known = (OmpiCluster, "OMPI_MCA_orte_hnp_uri") if mpi else (SlurmCluster, "SLURM_STEP_NODELIST")
    return cluster.get_coordinator_address(None, os.getenv("JAX_COORDINATOR_PORT")) if known in os.environ else None


def _local_devices(count: int, mpi: bool) -> tuple[int, ...] | None:
    """The share of its host's GPUs of one of several processes; alone it takes all, where JAX would take one."""
    nodes = count if mpi else _number("SLURM_STEP_NUM_NODES") or count
    here = (_number("OMPI_COMM_WORLD_LOCAL_SIZE") if mpi else -(-count // nodes)) or 1
    rank = _number("OMPI_COMM_WORLD_LOCAL_RANK" if mpi else "SLURM_LOCALID") or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = len(visible.split(",")) if visible else len(list(Path("/dev").glob("nvidia[0-9]*")))
    cpu, one_given = gpus == 0 or os.environ.get("JAX_PLATFORMS") == "cpu", visible is not None and gpus == 1
    if here == 1 or cpu or one_given or "JAX_LOCAL_DEVICE_IDS" in os.environ:  # which JAX reads
        return None
    if gpus % here or rank >= here or count % nodes:
        raise ValueError(
            f"up to {here} processes on a host see {gpus} GPUs, which they cannot share evenly. Start one process on "
            "each host, or one for each GPU, or set JAX_LOCAL_DEVICE_IDS in each."
        )
    return tuple(range(rank * gpus // here, (rank + 1) * gpus // here))
