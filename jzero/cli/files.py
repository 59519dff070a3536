"""`jzero verify` and `jzero export`: checkpoints on disk, without the model and without devices."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from jzero.core.errors import human_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyCommand:
    """Reads every byte of a checkpoint, or of all in a folder, against its checksums."""

    path: Annotated[Path, tyro.conf.Positional]
    """A checkpoint, or a folder of checkpoints."""

    def run(self) -> int:
        """Prints one line per checkpoint; 1 if one is damaged or has no checksums."""
        from jzero.checkpoint import CheckpointDamaged, store, verify

        folder = self.path.is_dir() and not (self.path / store.STATE).is_dir()
        paths = (store.steps(self.path) if folder else []) or [self.path]
        bad = 0
        for path in paths:
            began = time.perf_counter()
            try:
                count = verify(path)
                print(f"{path}: whole, {human_bytes(count)} in {time.perf_counter() - began:.1f} s")
            except CheckpointDamaged as error:
                bad += 1
                print(error)
            except ValueError as error:
                if len(paths) == 1:
                    raise
                bad += 1
                print(error)
        return int(bad > 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """Consolidated weights of a checkpoint as safetensors; the fp32 masters if there are any."""

    path: Annotated[Path, tyro.conf.Positional]
    """A checkpoint."""
    file: Annotated[Path, tyro.conf.Positional]
    """Where to: model.safetensors. Split, with an index beside it, above --max-file-bytes."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of floating-point params and what --include names. If omitted: the fp32 masters if any, else as stored."""
    max_file_bytes: int = 5_000_000_000
    """Of tensors in one file."""
    include: tuple[str, ...] = ()
    """Further parts of the state beside the params, e.g. batch_stats."""

    def run(self) -> int:
        """Writes the files, and prints their names and sizes."""
        from jzero.checkpoint import export

        with _bar() as advance:
            written = export(
                self.path,
                self.file,
                dtype=self.dtype,
                max_file_bytes=self.max_file_bytes,
                include=self.include,
                progress=advance,
            )
        for file in written:
            print(f"{file}  {human_bytes(file.stat().st_size)}")
        return 0


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
