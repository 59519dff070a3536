"""Orbax checkpoints of a run: the state shard by shard, the position in the data, the settings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

FOLDER = "checkpoints"


class Checkpoints:
    """The last few checkpoints of a run, written in the background.

    Args:
      out: the run's folder.
      keep: how many to keep.
      identity: settings that must not change when the run is resumed.
      overwrite: delete what is there.
    """

    def __init__(self, out: Path, *, keep: int, identity: dict[str, Any], overwrite: bool = False):
        self.identity = identity
        folder = (out / FOLDER).resolve()
        if overwrite and jax.process_index() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        latest: Any = ocp.training.preservation_policies.LatestN(keep)
        # A killed save leaves a temporary folder behind, never a step that looks finished.
        self.orbax = ocp.training.Checkpointer(
            str(folder), preservation_policy=latest, cleanup_tmp_directories=True
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.orbax.close()

    def save(self, step: int, state: Any, stream: Any) -> None:
        """Copies the shards and returns; the files are written while training goes on."""
        with_it = {"data": stream.get_state(), "identity": self.identity}
        self.orbax.save_async(step, state, force=True, custom_metadata=with_it)

    def restore(self, like: Any, stream: Any) -> Any:
        """The last state, in the layout of `like`; sets `stream` to the batch that comes next.

        Args:
          like: the state as `jax.ShapeDtypeStruct` with shardings; each process reads its shards only.
          stream: a grain iterator over the same data.
        """
        stream.set_state(_custom(self.orbax.metadata())["data"])
        return self.orbax.load(None, like)


def saved_steps(out: Path) -> list[int]:
    """Steps of the finished checkpoints of a run, ascending."""
    folder = out / FOLDER
    return sorted(int(f.name) for f in folder.iterdir() if f.name.isdigit()) if folder.is_dir() else []


def check_identity(out: Path, now: dict[str, Any]) -> None:
    """Refuses to resume a run with other settings.

    Args:
      out: the run's folder, with a checkpoint in it.
      now: the settings that must be those of that checkpoint.

    Raises:
      ValueError: with each setting that differs.
    """
    latest = (out / FOLDER / str(saved_steps(out)[-1])).resolve()
    saved = _custom(ocp.metadata(str(latest)))["identity"]
    changed = [name for name in now if saved.get(name) != now[name]]
    if changed:
        lines = [f"  {name}: {saved.get(name)} in the checkpoint, {now[name]} now" for name in changed]
        raise ValueError(
            f"--resume: the run in {out} was started with other settings:\n"
            + "\n".join(lines)
            + "\nPass the same flags again (the stage and the devices may change), or another --out."
        )


def _custom(metadata: Any) -> dict[str, Any]:
    return metadata.custom_metadata
