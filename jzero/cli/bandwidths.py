"""The bandwidths that the command line takes."""

from __future__ import annotations

import dataclasses

from jzero.cli.inputs import InputError

BANDWIDTHS = {"pcie": 25.0, "memory": 200.0, "disk": 10.0, "within_host": 450.0, "between_hosts": 400.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bandwidths:
    """In GB per second. With --fit those that are omitted are the GPU's."""

    pcie: float | None = None
    """Of one GPU, in each direction; 25 if omitted."""
    memory: float | None = None
    """Of a host's memory, reads and writes together; 200 if omitted."""
    disk: float | None = None
    """Of a host's disks, reads and writes together; 10 if omitted."""
    within_host: float | None = None
    """Of one GPU to others of its host, in each direction (NVLink); 450 if omitted."""
    between_hosts: float | None = None
    """Of a host to others, in each direction: all of its network cards; 400 if omitted."""

    def given(self) -> dict[str, float]:
        """Those that are not omitted.

        Raises:
          InputError: a bandwidth that is not above 0.
        """
        found = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        for name, value in found.items():
            if not value > 0:
                raise InputError(f"--bandwidths.{name} {value}: must be above 0 GB per second.")
        return found
