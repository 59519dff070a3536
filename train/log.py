"""What a run shows and keeps: a progress bar, or plain lines; JSONL, TensorBoard, pictures."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
import tensorboardX
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from train.figures import Figures, draw, host_peak, peak_bytes

NOT_FINITE = "scales_not_finite"
"""The metric that ends a run: how many scales of 8-bit moments are infinite or no number."""


class Log:
    """Collects the losses of a run, in nats per byte. Only the first process shows and writes anything.

    Args:
      out: folder of the run.
      start: step that a resumed run continues from, else 0.
      steps: last step.
      tokens: bytes that one step trains on, over all devices.
      every: steps between two lines of metrics.

    Attributes:
      figures: of the compiled step, once they are known.
      rows: what metrics.jsonl holds.
      losses: (step, loss) of every step of this process; of a resumed run also the lines of earlier ones.
      heldout: (step, loss) of every evaluation.
    """

    def __init__(self, out: Path, *, start: int, steps: int, tokens: int, every: int):
        self.out, self.start, self.steps, self.tokens, self.every = out, start, steps, tokens, every
        self.figures: Figures | None = None
        self.rows: list[dict[str, Any]] = []
        self.losses: list[tuple[int, float]] = []
        self.heldout: list[tuple[int, float]] = []
        self.unread: list[tuple[int, dict[str, Any]]] = []
        self.latest: dict[str, float] = {}
        self.first_process = jax.process_index() == 0
        given = (
            False if "OMPI_COMM_WORLD_RANK" in os.environ else None
        )  # mpirun fakes a terminal, for files too
        self.console = Console(
            quiet=not self.first_process, highlight=False, soft_wrap=True, markup=False, force_terminal=given
        )
        self.progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (self.first_process and self.console.is_terminal),
        )
        self.task = self.progress.add_task("train", total=steps, completed=start, text="compiling")
        self.jsonl = self.board = None
        self.start_clock()

    def __enter__(self) -> Log:
        if self.first_process:
            self._open()
        self.progress.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.progress.stop()
        if self.jsonl is not None and self.board is not None:
            self.jsonl.close()
            self.board.close()

    def print(self, *text: Any) -> None:
        """On the first process, above the bar."""
        self.console.print(*map(str, text), sep="\n")

    def start_clock(self) -> None:
        """From here on the time counts as training."""
        self.busy, self.since, self.steps_since = 0.0, time.perf_counter(), 0

    def _open(self) -> None:
        """Keeps what earlier parts of a resumed run wrote, up to the step that it continues from."""
        self.out.mkdir(parents=True, exist_ok=True)
        file = self.out / "metrics.jsonl"
        self.rows = kept = [row for row in read_metrics(file) if row["step"] <= self.start] if self.start else []
        file.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self.losses = [(row["step"], row["loss"]) for row in kept if "loss" in row]
        self.heldout = [(row["step"], row["heldout_loss"]) for row in kept if "heldout_loss" in row]
        self.jsonl = file.open("a")
        logging.getLogger("tensorboardX").setLevel(logging.ERROR)
        self.board = tensorboardX.SummaryWriter(str(self.out / "tensorboard"), purge_step=self.start or None)

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        """One step's loss and what else it measured, still on the device; every few steps a line of them.

        It is read when the next step is on its way: the devices do not wait for the host, and the host runs
        ahead of them by one step at most.
        """
        self.unread.append((step, metrics))
        on_line = step % self.every == 0 or step == self.steps
        self._read(leave=0 if on_line else 1)
        if on_line:
            self._line(step)

    def _read(self, *, leave: int) -> None:
        while len(self.unread) > leave:
            step, metrics = self.unread.pop(0)
            metrics = dict(metrics)
            if lost := int(metrics.pop(NOT_FINITE, 0)):
                raise FloatingPointError(
                    f'step {step}: moment_dtype="int8": {lost} scales of blocks are not finite, and with them all '
                    "moments of these blocks. A gradient was not finite: the loss diverged, or needs "
                    "optax.apply_if_finite."
                )
            self.latest = {k: float(v) for k, v in metrics.items() if k != "loss"}
            self.losses.append((step, float(metrics["loss"])))
            self.steps_since += 1

    def _line(self, step: int) -> None:
        """Metrics of the steps since the last line; tokens/s over the time that was spent training."""
        seconds = time.perf_counter() - self.since - self.busy
        rate = self.steps_since * self.tokens / seconds
        mean = float(np.mean([loss for _, loss in self.losses[-self.steps_since :]]))
        self.start_clock()
        own = {"loss": self.losses[-1][1], "mean_loss": mean, "tokens_per_second": round(rate, 1)}
        compiled = {} if self.figures is None else self.figures.metrics
        self._keep(step, **own, memory_bytes=peak_bytes(), **compiled, **self.latest)
        others = "".join(f"  {k.replace('_', ' ')} {v:,.0f}" for k, v in self.latest.items())
        text = f"mean loss {mean:.3f}  {rate:,.0f} tokens/s{others}"
        self.progress.update(self.task, completed=step, text=text)
        if not self.console.is_terminal:
            eta = (self.steps - step) * self.tokens / rate
            self.print(f"step {step}/{self.steps}  {text}  about {eta:.0f} s left")

    @contextlib.contextmanager
    def not_training(self) -> Iterator[None]:
        """The time inside does not count against tokens/s."""
        self._read(leave=0)
        began = time.perf_counter()
        yield
        self.busy += time.perf_counter() - began

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Says what the run waits for, and for how long; a spinner on a terminal."""
        began = time.perf_counter()
        if self.console.is_terminal and not self.progress.live.is_started:
            with self.console.status(what):
                yield
        else:
            yield
        seconds = time.perf_counter() - began
        if seconds > 0.1:
            self.print(f"{what}: {seconds:.1f} s")

    def evaluation(self, step: int, loss: float) -> None:
        """One held-out loss."""
        self.heldout.append((step, loss))
        self._keep(step, heldout_loss=loss)
        self.print(f"step {step}/{self.steps}  held-out loss {loss:.4f} nats/byte")

    def summary(self, *, bigram: float, text: str, held: str, seconds: float) -> None:
        """The sample, the held-out loss against the bigram's, what a device holds, and where everything lies."""
        if not self.first_process:
            return
        loss = self.heldout[-1][1]
        (self.out / "sample.txt").write_text(text)
        self._keep(self.steps, bigram_loss=bigram, margin=bigram - loss)
        pictures = [str(self.curve(bigram))]
        if self.figures is not None:
            draw(self.out / "step.png", self.figures, self.rows)
            pictures.append("step.png")
        self.print(
            f"--- a sample\n{text}\n---",
            f"held-out loss    {loss:.4f} nats/byte  {loss / np.log(2):.3f} bits/byte",
            f"bigram, add-one  {bigram:.4f} nats/byte  {bigram / np.log(2):.3f} bits/byte  (the same bytes)",
            f"margin           {bigram - loss:+.4f} nats/byte",
            f"time             {seconds:.0f} s, peak host memory {host_peak() / 1e9:.2f} GB",
            f"memory           {held}",
            f"written          {', '.join(pictures)}, metrics.jsonl, tensorboard/, checkpoints/, sample.txt",
        )

    def _keep(self, step: int, **numbers: float) -> None:
        if self.jsonl is not None and self.board is not None:
            self.rows.append({"step": step, **numbers})
            self.jsonl.write(json.dumps(self.rows[-1]) + "\n")
            self.jsonl.flush()
            for name, value in numbers.items():
                self.board.add_scalar(name, value, step)

    def curve(self, baseline: float) -> Path:
        """Writes the loss curve and returns its path."""
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        axes.plot(*zip(*self.losses, strict=True), color="#b8c4d6", linewidth=0.8, label="train")
        axes.plot(*zip(*self.heldout, strict=True), color="#1f4e9c", marker=".", label="held-out")
        axes.axhline(baseline, color="#b3541e", linestyle="--", label=f"bigram, held-out ({baseline:.3f})")
        axes.set(xlabel="step", ylabel="loss (nats per byte)")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        path = self.out / "loss.png"
        figure.savefig(path, dpi=150)
        plt.close(figure)
        return path


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; none where there is no file. A line cut short by a crash is left out."""
    rows = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
