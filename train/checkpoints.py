"""The checkpoints of a run: the state, the position in the data, the settings; the last few, and the best."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import jax

from jzero import checkpoint
from jzero.checkpoint.restoring import last_good

FOLDER, ASIDE = "checkpoints", "set_aside"


class Checkpoints:
    """The last few checkpoints of a run and the one of the lowest held-out loss, written in the background.

    Args:
      out: the run's folder.
      keep: how many of the last ones to keep.
      identity: settings that must not change when the run is resumed.
      start: the step that the run begins after.
      lose_at_most: how many steps training may be ahead of the last finished one; None: as many as it likes.
      overwrite: delete what is there.

    Raises:
      FolderInUse: another run with the same `out` is alive.
    """

    def __init__(
        self,
        out: Path,
        *,
        keep: int,
        identity: dict[str, Any],
        start: int = 0,
        lose_at_most: int | None = None,
        overwrite: bool = False,
    ):
        self.identity, self.lose_at_most = identity, lose_at_most
        self.begun = self.finished = start
        folder = (out / FOLDER).resolve()
        self.steps = checkpoint.Steps(folder, keep=keep, best="heldout", write=True)
        if overwrite and jax.process_index() == 0:
            for step in saved_steps(out):
                shutil.rmtree(folder / str(step))

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.steps.close()

    def save(self, step: int, state: Any, stream: Any, *, heldout: float | None) -> None:
        """Copies the shards and returns; the files are written while training goes on.

        Args:
          step: how many steps the state has behind it.
          state: of the run.
          stream: the grain iterator that gives the next batch.
          heldout: the last held-out loss, where there is one.
        """
        with_it = {"data": stream.get_state(), "identity": self.identity}
        metrics = {"heldout": math.nan if heldout is None else heldout}
        self.steps.save(step, state, metrics=metrics, custom=with_it)
        self.finished, self.begun = self.begun, step  # it waits for the one before

    def must_wait(self, step: int) -> bool:
        """True where a run that is killed after `step` could lose more than it may: the same in every process."""
        return self.lose_at_most is not None and step - self.finished > self.lose_at_most

    def wait(self) -> None:
        """Returns when everything is written."""
        self.steps.wait()
        self.finished = self.begun

    def restore(self, step: int, like: Any, stream: Any) -> Any:
        """The state of a step, in the layout of `like`; sets `stream` to the batch that comes next.

        Args:
          step: which.
          like: the state as `jax.ShapeDtypeStruct` with shardings; each process reads its shards only.
          stream: a grain iterator over the same data.

        Raises:
          CheckpointDamaged: a file is not as it was written.
        """
        state = self.steps.restore(like, step=step)
        stream.set_state(self.steps.custom(step)["data"])
        return state


def saved_steps(out: Path) -> list[int]:
    """Steps of the finished checkpoints of a run, ascending."""
    folder = out / FOLDER
    return sorted(int(f.name) for f in folder.iterdir() if f.name.isdigit()) if folder.is_dir() else []


def check_identity(out: Path, step: int, now: dict[str, Any]) -> None:
    """Refuses to resume a run with other settings.

    Args:
      out: the run's folder.
      step: of the checkpoint to resume from.
      now: the settings that must be those of that checkpoint.

    Raises:
      ValueError: with each setting that differs, or what is damaged.
    """
    path = out / FOLDER / str(step)
    try:
        saved = checkpoint.custom(path)["identity"]
    except checkpoint.CheckpointDamaged:
        raise
    except (ValueError, TypeError, KeyError) as error:
        good = last_good(path)
        remedy = f"\nContinue from the last good one: --resume --resume-step {good.name}" if good else ""
        raise ValueError(f"--resume: step {step} is not a checkpoint of a run. {error}{remedy}") from error
    changed = [name for name in now if saved.get(name) != now[name]]
    if changed:
        lines = [f"  {name}: {saved.get(name)} in the checkpoint, {now[name]} now" for name in changed]
        raise ValueError(
            f"--resume: the run in {out} was started with other settings:\n"
            + "\n".join(lines)
            + "\nPass the same flags again (the stage and the devices may change), or another --out."
        )


def set_aside(out: Path, step: int) -> list[Path]:
    """Moves the checkpoints after a step out of the way of a run that continues from there; returns where to."""
    moved = []
    for later in [s for s in saved_steps(out) if s > step]:
        target = out / ASIDE / str(later)
        number = 1
        while target.exists():
            number += 1
            target = out / ASIDE / f"{later}-{number}"
        target.parent.mkdir(exist_ok=True)
        (out / FOLDER / str(later)).rename(target)
        moved.append(target)
    return moved
