"""`jzero deepspeed`: what every key of a ds_config.json becomes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSpeedCommand:
    """What every key of a DeepSpeed config becomes, and the lines to write.

    Exit status: 0 if every key is mapped or not needed, 1 if one is not supported, 2 if the file is refused.
    """

    path: Annotated[Path, tyro.conf.Positional]
    """The ds_config.json."""
    world: int | None = None
    """Devices that share the batch; those of this machine if omitted and if the file needs them."""

    def run(self) -> int:
        """Reads and prints; 1 if a key is not supported.

        Raises:
          TypeError, ValueError, OSError: as `jzero.deepspeed.read`.
        """
        from jzero.deepspeed import read

        try:
            found = read(self.path, world=self.world)
        except ValueError as error:  # in the words of the command line
            raise ValueError(str(error).replace(" world=", " --world")) from None
        print(found)
        return int(bool(found.not_supported))
