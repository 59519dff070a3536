"""Which process of how many this is, and where process 0 is: from flags, JAX_* variables, or what a launcher sets.

                  number, this one                            process 0
    flags         --processes, --process-id                   --coordinator
    JAX_*         JAX_NUM_PROCESSES, JAX_PROCESS_ID           JAX_COORDINATOR_ADDRESS
    Open MPI      OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK  OMPI_MCA_orte_hnp_uri (Open MPI 4)
    Slurm         SLURM_STEP_NUM_TASKS, SLURM_PROCID          SLURM_STEP_NODELIST, SLURM_JOB_ID
    Kubernetes    (JAX_NUM_PROCESSES), JOB_COMPLETION_INDEX   (JAX_COORDINATOR_ADDRESS)

Each row is asked where the one above has no answer. Open MPI goes before Slurm: mpirun inside a Slurm job starts its
own daemons with srun, and their SLURM_PROCID is not that of a process of the run. A Kubernetes job says neither how
many pods it has nor where the first is, but over its API; the job's file sets the two (docs/launch/kubernetes.yaml).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Group:
    """A process of several.

    Attributes:
      coordinator: host:port, where process 0 can be reached.
      processes: how many there are.
      me: which one this is, from 0.
      local_devices: the GPUs of this host that are this process's, by number; None: all that it sees.
      source: who said so.
    """

    coordinator: str
    processes: int
    me: int
    local_devices: tuple[int, ...] | None = None
    source: str = "flags"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of process 0."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


@dataclasses.dataclass(frozen=True)
class _Launcher:
    """What the variables of one launcher say."""

    name: str
    processes: int | None
    me: int
    local: tuple[int, int]  # which process on its host, of how many there


def find(
    environ: Mapping[str, str],
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
) -> Group | None:
    """The group that this process belongs to; None for a process by itself.

    Args:
      environ: environment variables.
      coordinator, processes, process_id: the flags; they go before the variables.

    Raises:
      ValueError: a part is missing or is no number, with the flag or the variable that gives it.
    """
    launcher = _open_mpi(environ) or _slurm(environ) or _kubernetes(environ)
    count = _first(processes, _number(environ, "JAX_NUM_PROCESSES"), launcher and launcher.processes)
    given = _first(process_id, _number(environ, "JAX_PROCESS_ID"))
    me = _first(given, launcher and launcher.me)
    said = coordinator or environ.get("JAX_COORDINATOR_ADDRESS")
    asked = said is not None or processes is not None or process_id is not None
    asked = asked or "JAX_NUM_PROCESSES" in environ or "JAX_PROCESS_ID" in environ
    if count == 1 and not given:  # also of a Kubernetes job whose pods have nothing to do with each other
        return None
    if not asked and launcher is not None and count is None:
        raise ValueError(
            f"this is process {me} of {launcher.name}, which does not say how many there are. Set JAX_NUM_PROCESSES "
            "and JAX_COORDINATOR_ADDRESS in each (docs/launch/kubernetes.yaml), or JAX_NUM_PROCESSES=1 for pods that "
            "have nothing to do with each other."
        )
    if not asked and launcher is None:
        return None
    source = launcher.name if launcher else "flags or JAX_* variables"
    missing = {
        "--processes (or JAX_NUM_PROCESSES)": count is None,
        "--process-id (or JAX_PROCESS_ID)": me is None,
    }
    if any(missing.values()):
        raise ValueError(
            f"several processes were asked for, and {' and '.join(k for k, v in missing.items() if v)} is not "
            "given. Pass it, or start the processes with srun, mpirun or a Kubernetes indexed job (docs/launch.md)."
        )
    assert count is not None
    assert me is not None
    if not 0 <= me < count:
        raise ValueError(f"--process-id {me} of --processes {count}: it must be from 0 to {count - 1}.")
    address = said or _address(launcher, environ)
    if address is None:
        where = " Open MPI 5 does not tell where process 0 is." if source == "Open MPI" else ""
        raise ValueError(
            f"process {me} of {count} (from {source}) does not know where process 0 is.{where} Pass --coordinator "
            "HOST:PORT, or set JAX_COORDINATOR_ADDRESS: the host of process 0 and a port that is free there."
        )
    if not re.fullmatch(r".+:\d{1,5}", address) or not 0 < int(address.rpartition(":")[2]) < 65536:
        raise ValueError(f"--coordinator {address}: must be HOST:PORT, with a port from 1 to 65535.")
    devices = None if "JAX_LOCAL_DEVICE_IDS" in environ else _devices(launcher, environ)
    return Group(address, count, me, devices, source)


def _first(*values: int | None) -> int | None:
    return next((x for x in values if x is not None), None)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    if name not in environ:
        return None
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"{name}={environ[name]}: must be a whole number.") from None


def _open_mpi(environ: Mapping[str, str]) -> _Launcher | None:
    count, me = _number(environ, "OMPI_COMM_WORLD_SIZE"), _number(environ, "OMPI_COMM_WORLD_RANK")
    if count is None or me is None:
        return None
    rank, size = (_number(environ, f"OMPI_COMM_WORLD_LOCAL_{x}") for x in ("RANK", "SIZE"))
    return _Launcher("Open MPI", count, me, (rank or 0, size or 1))


def _slurm(environ: Mapping[str, str]) -> _Launcher | None:
    """Only inside of srun: a batch script has SLURM_NTASKS too, and is one process."""
    if not {"SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"} <= set(environ):
        return None
    count = _first(_number(environ, "SLURM_STEP_NUM_TASKS"), _number(environ, "SLURM_NTASKS"))
    each = [n for text in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(",") for n in _times(text)]
    node = _number(environ, "SLURM_NODEID") or 0
    here = each[node] if node < len(each) else 1
    return _Launcher("Slurm", count, int(environ["SLURM_PROCID"]), (int(environ["SLURM_LOCALID"]), here))


def _times(text: str) -> list[int]:
    """`2(x3)` is 2, 2, 2."""
    found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(found[1])] * int(found[2] or 1) if found else []


def _kubernetes(environ: Mapping[str, str]) -> _Launcher | None:
    me = _number(environ, "JOB_COMPLETION_INDEX")
    return None if me is None else _Launcher("a Kubernetes indexed job", None, me, (0, 1))


def _address(launcher: _Launcher | None, environ: Mapping[str, str]) -> str | None:
    """Where the launcher says process 0 is: the first host, and a port above 61440 that follows from the job.

    As JAX reads it by itself (jax._src.clusters), on JAX_COORDINATOR_PORT where that is set.
    """
    host = job = None
    if launcher is not None and launcher.name == "Slurm":
        # node07,node09 or node[07-10,12] or node[07,12]: node07
        found = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", environ["SLURM_STEP_NODELIST"])
        host = found and found[1] + (found[2] or "")
        job = _number(environ, "SLURM_JOB_ID")
    elif launcher is not None and "OMPI_MCA_orte_hnp_uri" in environ:
        # 1422917632.0;tcp://192.0.2.2,10.0.0.2:43927: the host of mpirun; the job is a multiple of 4096
        found = re.match(r"(\d+)\..*?(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", environ["OMPI_MCA_orte_hnp_uri"])
        host, job = (found[2] or f"[{found[3]}]", int(found[1]) // 4096) if found else (None, None)
    port = environ.get("JAX_COORDINATOR_PORT") or (None if job is None else 61440 + job % 4096)
    return None if host is None or port is None else f"{host}:{port}"


def _devices(launcher: _Launcher | None, environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """The share of its host's GPUs that a process has, where several see the same ones.

    A process alone on its host takes all. (JAX itself would take one for each process of srun or mpirun.)

    Raises:
      ValueError: the GPUs cannot be shared evenly.
    """
    rank, here = launcher.local if launcher is not None else (0, 1)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    gpus = len(visible.split(",")) if visible else len(list(Path("/dev").glob("nvidia[0-9]*")))
    given = visible is not None and gpus == 1  # by the launcher: one GPU for each process
    if here == 1 or gpus == 0 or given or environ.get("JAX_PLATFORMS") == "cpu":
        return None
    if gpus % here:
        raise ValueError(
            f"{here} processes on this host see {gpus} GPUs, which they cannot share evenly. Start one process "
            "per host or one per GPU, or set JAX_LOCAL_DEVICE_IDS in each."
        )
    each = gpus // here
    return tuple(range(rank * each, (rank + 1) * each))
