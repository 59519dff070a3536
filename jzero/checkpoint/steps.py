"""The checkpoints of a run: a folder of steps, the last few and the best of them kept."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from orbax.checkpoint import v1 as ocp

from jzero.checkpoint import store
from jzero.checkpoint.restoring import custom, restore
from jzero.checkpoint.saving import to_write


class Steps:
    """A folder of checkpoints, `<folder>/<step>`, written in the background.

    A step that was killed while it was written never has its final name; what is left of it is removed when the folder
    is opened again.

    Args:
      folder: made if it is not there. Across processes, on a file system that all of them see.
      keep: how many of the last steps are kept.
      best: the name of a metric; the step with the best value of it is kept too.
      mode: whether the smallest ("min") or the largest value is the best.

    Raises:
      ValueError: `keep` below 1, another `mode`.

    Example:
      >>> import jax.numpy as jnp, jzero, tempfile
      >>> with jzero.checkpoint.Steps(tempfile.mkdtemp(), keep=2, best="loss") as steps:
      ...     for step, loss in ((1, 0.5), (2, 0.9), (3, 0.8), (4, 0.7)):
      ...         steps.save(step, {"w": jnp.full(3, step)}, metrics={"loss": loss})
      ...     steps.wait()
      ...     steps.steps, steps.best, int(steps.restore({"w": jnp.zeros(3, jnp.int32)})["w"][0])
      ([1, 3, 4], 1, 4)
    """

    def __init__(
        self, folder: Any, *, keep: int = 3, best: str | None = None, mode: Literal["min", "max"] = "min"
    ):
        if keep < 1:
            raise ValueError(f"jzero.checkpoint.Steps(keep={keep}): keep at least 1.")
        if mode not in ("min", "max"):
            raise ValueError(f"jzero.checkpoint.Steps(mode={mode!r}): mode is 'min' or 'max'.")
        self.folder = Path(os.path.abspath(folder))
        self._metric, self._mode = best, mode
        policies = ocp.training.preservation_policies
        kept: list[Any] = [policies.LatestN(keep)]
        if best is not None:
            kept.append(policies.BestN(get_metric_fn=self._rank, n=1, keep_checkpoints_without_metrics=False))
        policy: Any = policies.AnyPreservationPolicy(kept)
        context, self._handler = store.writing()
        self._orbax = ocp.training.Checkpointer(
            str(self.folder),
            context=context,
            preservation_policy=policy,
            cleanup_tmp_directories=True,
        )

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def save(
        self,
        step: int,
        state: Any,
        *,
        tx: Any = None,
        metrics: Mapping[str, float] | None = None,
        custom: Any = None,
    ) -> None:
        """Copies the arrays and returns; the files are written while training goes on.

        Waits first until the save before is finished.

        Args:
          step: its number, larger than that of the last one.
          state, tx, custom: as for `jzero.checkpoint.save`.
          metrics: numbers by name.

        Raises:
          ValueError: a step that is there or behind; `best` is not among the metrics.
          OSError, RuntimeError: the save before this one failed.
        """
        where = "jzero.checkpoint.Steps.save"
        tree = to_write(state, tx, custom, where=where)
        last = self.steps[-1] if self.steps else -1
        if step <= last:
            raise ValueError(f"{where}: step {step} is not after the last one in {self.folder}, {last}.")
        if self._metric is not None and self._metric not in (metrics or {}):
            raise ValueError(f"{where}: the best step is told by {self._metric!r}, which metrics= has not.")
        self._handler.custom = custom
        kept: Any = dict(metrics) if metrics else None
        with store.disk_errors(self.folder):
            self._orbax.save_async(step, tree, force=True, metrics=kept, custom_metadata=store.MARK)

    def wait(self) -> None:
        """Returns when everything is written.

        Raises:
          OSError, RuntimeError: a save failed.
        """
        with store.disk_errors(self.folder):
            self._orbax.wait()

    def close(self) -> None:
        """Waits, and frees what the folder's manager holds."""
        self._orbax.close()

    @property
    def steps(self) -> list[int]:
        """The finished steps, ascending."""
        return sorted(c.step for c in self._orbax.checkpoints)

    @property
    def best(self) -> int | None:
        """The step with the best metric; None without `best=` or without a step."""
        if self._metric is None or not self._orbax.checkpoints:
            return None
        return max(self._orbax.checkpoints, key=lambda c: self._rank(c.metrics)).step

    def restore(self, like: Any, *, step: int | None = None, tx: Any = None, cast: bool = False) -> Any:
        """A step in the layout of `like`: the last one, or the one named; see `jzero.checkpoint.restore`."""
        return restore(self._path(step), like, tx=tx, cast=cast)

    def custom(self, step: int | None = None) -> Any:
        """The JSON that was saved with a step; see `jzero.checkpoint.custom`."""
        return custom(self._path(step))

    def _path(self, step: int | None) -> Path:
        if step is None and not self.steps:
            raise FileNotFoundError(f"jzero.checkpoint.Steps: no step in {self.folder}.")
        return self.folder / str(self.steps[-1] if step is None else step)

    def _rank(self, metrics: Any) -> float:
        """Larger is better; what has no such metric, or nan, is worst."""
        value = (metrics or {}).get(self._metric, math.nan)
        value = -value if self._mode == "min" else value
        return -math.inf if math.isnan(value) else value
