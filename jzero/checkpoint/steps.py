"""The checkpoints of a run: a folder of steps, the last few and the best of them kept, one writer at a time."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

from jzero.checkpoint import commit, pending, store
from jzero.checkpoint.checksums import Checksums
from jzero.checkpoint.metrics import numbers_of
from jzero.checkpoint.restoring import custom, restore
from jzero.checkpoint.saving import to_write
from jzero.core.errors import check_choice, check_flag, check_int, check_kind, warn
from jzero.core.folder_lock import NAME, FolderInUse, FolderLock
from jzero.core.processes import everywhere
from jzero.core.types import PyTree


class Steps:
    """A folder of checkpoints, `<folder>/<step>`, written in the background.

    A reader changes nothing. The first `save` makes it the writer: it takes a lock on the folder (`writer.lock`, which
    `close` releases) and removes what a killed save left behind. As long as one writer lives, a second one is refused.

    Args:
      folder: made by the first save if it is not there. Across processes, on a file system that all of them see.
      keep: how many of the last steps are kept.
      best: the name of a metric; the step with the best value of it is kept too. A step whose metrics cannot be trusted
        (its checksums are damaged, or plain orbax wrote it) is named in a warning, and not deleted.
      mode: whether the smallest ("min") or the largest value is the best.
      write: become the writer now, not with the first save.

    Raises:
      ValueError: `keep` is below 1, or `mode` is neither "min" nor "max".
      TypeError: `folder` is not a path, `keep` is not an integer, or `best` is not a string.
      FolderInUse: with `write`, another run writes there.

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
        self,
        folder: store.PathLike,
        *,
        keep: int = 3,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        write: bool = False,
    ):
        where = "jzero.checkpoint.Steps"
        check_int(keep, "keep", where=where, low=1)
        check_choice(mode, "mode", ("min", "max"), where=where)
        check_kind(best, "best", str, "the name of a metric", where=where, optional=True)
        check_flag(write, "write", where=where)
        self.folder = store.absolute(folder, where)
        self._keep, self._metric, self._mode = keep, best, mode
        self._metrics: dict[int, Mapping[str, float]] = {}  # trusted ones
        self._doubts: dict[int, str] = {}
        self._told: set[int] = set()
        self._lock: FolderLock | None = None
        self._future: Future | None = None
        self._last = -1
        if write:
            self._become_writer()

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, kind: Any, *exc: Any) -> None:
        self._close(None if kind is None else pending.EXIT_SECONDS)

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        tx: optax.GradientTransformation | None = None,
        metrics: Mapping[str, float] | None = None,
        custom: Any = None,
    ) -> None:
        """Copies the arrays and returns; the files are written while training goes on.

        Waits first until the save before is finished. A process that ends before a save does waits for it; see
        `jzero.checkpoint.save_async`.

        Args:
          step: its number, larger than that of the last one.
          state, tx, custom: as for `jzero.checkpoint.save`.
          metrics: numbers by name; arrays of one number count as numbers.

        Raises:
          ValueError: the step is not after the last one, or `best` is not among the metrics.
          TypeError: the step is not an integer, or a metric is not a number.
          FolderInUse: another run writes to this folder.
          FileExistsError: something that is not a checkpoint has that name.
          OSError: the disk is full, or refuses; also for the save before this one.
        """
        where = "jzero.checkpoint.Steps.save"
        check_int(step, "step", where=where, low=0)
        numbers = numbers_of(metrics, where)
        if self._metric is not None and self._metric not in numbers:
            raise ValueError(
                f"{where}: the best step is chosen by {self._metric!r}, which is not in metrics=."
            )
        tree, trained = to_write(state, tx, custom, where=where)
        writer = self._become_writer()
        self.wait()
        last = max([self._last, *self.steps[-1:]])
        if step <= last:
            raise ValueError(f"{where}: step {step} is not after the last one in {self.folder}, {last}.")
        path = self.folder / str(int(step))
        store.check_free(path, where)
        store.clean_steps(self.folder)

        def written() -> None:
            self._metrics[int(step)] = numbers
            self._rotate()

        self._future = commit.save_async(
            path,
            commit.host_copies(tree),
            custom=custom,
            metrics=numbers,
            trained=trained,
            before=writer.check,
            after=written,
        )
        self._last = int(step)

    def wait(self) -> None:
        """Returns when everything is written.

        Raises:
          OSError, FolderInUse: the save failed. Its step is not there, and the next save starts afresh.
        """
        self._wait(None)

    def close(self) -> None:
        """Waits, and releases the lock; the folder can be read and written again."""
        self._close(None)

    def _wait(self, timeout: float | None) -> None:
        if self._future is None:
            return
        future = self._future
        try:
            pending.result(future, timeout)
        finally:
            if future.done():  # else it goes on, after Ctrl-C or the timeout, until the process ends
                self._future = None
                self._last = -1 if future.exception() else self._last
        self._warn()

    def _close(self, timeout: float | None) -> None:
        try:
            self._wait(timeout)
        finally:
            if self._lock is not None and self._future is None:
                self._lock.release()
                self._lock = None

    @property
    def steps(self) -> list[int]:
        """The finished steps that are there now, ascending."""
        return store.numbered(self.folder)

    @property
    def best(self) -> int | None:
        """The step with the best metric; None without `best=`, or where no step has that metric."""
        found = self._best(self.steps)
        self._warn()
        return found

    def restore(
        self,
        like: PyTree,
        *,
        step: int | None = None,
        tx: optax.GradientTransformation | None = None,
        cast: bool = False,
        only: str | None = None,
    ) -> Any:
        """A step in the layout of `like`: the last one, or the one named; see `jzero.checkpoint.restore`.

        Raises:
          FileNotFoundError: there is no such step, or its writer removed it while it was read.
        """
        path = self._path(step)
        try:
            return restore(path, like, tx=tx, cast=cast, only=only)
        except (ValueError, OSError) as error:
            if path.exists():
                raise
            raise FileNotFoundError(
                f"jzero.checkpoint.Steps.restore: {path} is not there: no such step was saved, or the run that writes "
                f"there has removed it (it keeps only its last steps). There are {self.steps} now."
            ) from error

    def custom(self, step: int | None = None) -> Any:
        """The JSON that was saved with a step; see `jzero.checkpoint.custom`."""
        return custom(self._path(step))

    def _path(self, step: int | None) -> Path:
        where = "jzero.checkpoint.Steps"
        if step is None:
            step = max(self.steps, default=-1)
            if jax.process_count() > 1:  # all read the same one; jax has no 64 bits by default
                halves = multihost_utils.broadcast_one_to_all(np.array([step >> 31, step & (2**31 - 1)], np.int32))
                step = (int(halves[0]) << 31) + int(halves[1])
            if step < 0:
                raise FileNotFoundError(f"{where}: no step in {self.folder}.")
        check_int(step, "step", where=where, low=0)
        return self.folder / str(step)

    def _become_writer(self) -> FolderLock:
        if self._lock is None:
            writer = FolderLock(
                self.folder, where="jzero.checkpoint.Steps", keeps="checkpoints",
                own="close the Steps that wrote there",
                advice="To read, open the folder without saving; if you are certain that it is gone, remove "
                f"{self.folder / NAME}.",
            )  # fmt: skip
            one = writer.acquire if jax.process_index() == 0 else lambda: None  # for all of them
            everywhere(one, f"lock {self.folder}", where="jzero.checkpoint.Steps", error=FolderInUse)
            weakref.finalize(self, writer.release)
            self._lock = writer
            store.clean_steps(self.folder)
        return self._lock

    def _rotate(self) -> None:
        """Deletes all steps but those to keep, those whose metrics are in doubt, and links."""
        steps = self.steps
        kept = {*steps[-self._keep :], self._best(steps), *self._doubts}
        for step in steps:
            path = self.folder / str(step)
            if step not in kept and not path.is_symlink():
                store.delete(path)

    def _best(self, steps: list[int]) -> int | None:
        if self._metric is None:
            return None
        ranks = {step: self._rank(step) for step in steps}
        ranks = {step: rank for step, rank in ranks.items() if not math.isnan(rank)}
        return max(ranks, key=lambda step: ranks[step], default=None)

    def _rank(self, step: int) -> float:
        """Larger is better; nan if the step lacks that metric, or it is in doubt."""
        if step not in self._metrics and step not in self._doubts:
            self._read_metrics(step)
        value = self._metrics.get(step, {}).get(str(self._metric), math.nan)
        return -value if self._mode == "min" else value

    def _read_metrics(self, step: int) -> None:
        path = self.folder / str(step)
        checks = Checksums(path) if store.has_checksums(path) else None
        if not path.exists():
            return  # its writer has removed it
        if checks is None:
            self._doubts[step] = "it has no checksums"
        elif checks.damage:
            self._doubts[step] = str(checks.damage[0])
        elif not checks.has_metrics:
            self._doubts[step] = "an earlier version wrote it, whose metrics have no checksum"
        else:
            self._metrics[step] = checks.metrics or {}

    def _warn(self) -> None:
        for step in sorted(set(self._doubts) - self._told):
            self._told.add(step)
            warn(
                f"jzero.checkpoint.Steps: the metrics of step {step} in {self.folder} cannot be trusted "
                f"({self._doubts[step]}). It is not compared with the others, and not deleted.",
            )
