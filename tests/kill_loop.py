"""Kills a process of a run again and again, at random moments, and goes on with another number of processes.

    python tests/kill_loop.py --rounds 20 --seed 1

Each round starts 1, 2 or 4 processes of train/gpt.py, kills one of them by SIGKILL, and checks that:
- the others end within the heartbeat, with an error, and name the process that is gone;
- the next round continues from the last checkpoint that was begun, or the one before if that was not finished;
- no more steps are lost than `--lose-at-most` allows: the interval of the checkpoints, one step more, or twice as many;
- the state it restores is bitwise the one that was saved, whatever the number of processes and devices of both;
- every process had, at every step, exactly its rows of the batch that this step has in a run that nothing happens to.
At the end the losses are those of that run, up to the order of summation (another number of devices). Prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from processes import free_port, names

from jzero import checkpoint
from train.checkpoints import saved_steps
from train.log import read_metrics

HERE = Path(__file__).resolve().parent
STEPS, EVERY, BATCH, HEARTBEAT = 48, 4, 16, 10
SLACK = 6.0  # seconds beyond the heartbeat: for a machine that others use too
TOLERANCE = 1e-4  # of a loss after 48 steps: sums over 1 to 8 devices in another order
FLAGS = [
    "--preset=tiny", f"--steps={STEPS}", f"--save-every={EVERY}", f"--batch={BATCH}", f"--heartbeat={HEARTBEAT}",
    "--width=32", "--layers=1", "--seq=16", "--dropout=0.1", "--eval-every=1000", "--eval-windows=16",
    "--sample-bytes=1", "--log-every=1", "--start-timeout=120", "--stage=3",
]  # fmt: skip


def start(out: Path, log: Path, count: int, devices: int, *more: str) -> list[subprocess.Popen]:
    """The processes of a run; what they say goes to LOG.RANK.err."""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE.parent), str(HERE)]), JAX_PLATFORMS="cpu")
    env.pop("XLA_FLAGS", None)
    group = [f"--coordinator=127.0.0.1:{free_port()}", f"--processes={count}"] if count > 1 else []
    workers = []
    for rank in range(count):
        command = [sys.executable, str(HERE / "kill_worker.py"), f"{log}.{rank}", *FLAGS, f"--out={out}"]
        command += [f"--devices={devices}", *group, *([f"--process-id={rank}"] if group else []), *more]
        with open(f"{log}.{rank}.out", "w") as text, open(f"{log}.{rank}.err", "w") as errors:
            workers.append(subprocess.Popen(command, stdout=text, stderr=errors, env=env, cwd=HERE.parent))
    return workers


def told(log: Path, count: int) -> list[list[dict[str, Any]]]:
    """What each process of a round wrote down; a line that the kill cut short is left out."""
    found = []
    for rank in range(count):
        file = Path(f"{log}.{rank}")
        lines = file.read_text().splitlines() if file.exists() else []
        found.append([json.loads(line) for line in lines if line.endswith("}")])
    return found


def last_step(log: Path) -> int:
    return max([x["step"] for x in told(log, 1)[0] if "step" in x], default=0)


def together(rows: list[list[dict[str, Any]]], what: str) -> dict[int, int]:
    """Digests of the states that all processes of a round saved (or restored), by step."""
    found: dict[int, list[int]] = {}
    for row in rows:
        for x in row:
            if what in x:
                found.setdefault(x[what], []).append(x["digest"])
    return {step: sum(parts) % 2**64 for step, parts in found.items() if len(parts) == len(rows)}


def errors_of(log: Path, count: int) -> str:
    return "\n".join(Path(f"{log}.{rank}.err").read_text()[-1500:] for rank in range(count))


class Loop:
    """The state of the checks over the rounds."""

    def __init__(self, folder: Path, seed: int, show: bool):
        self.folder, self.random, self.show = folder, random.Random(seed), show
        self.out = folder / "run"
        self.saved: dict[int, int] = {}  # the digest of the last state that was saved as a step
        self.begun: list[int] = []
        self.reached, self.lose = 0, EVERY

    def reference(self) -> None:
        """The run that nothing happens to: its rows and losses."""
        log = self.folder / "whole"
        (worker,) = start(self.folder / "whole_run", log, 1, 8)
        assert worker.wait(timeout=300) == 0, errors_of(log, 1)
        self.rows = {x["step"]: x["rows"] for x in told(log, 1)[0] if "step" in x}
        self.losses = {x["step"]: x["loss"] for x in read_metrics(self.folder / "whole_run" / "metrics.jsonl")
                       if "loss" in x}  # fmt: skip
        assert len(self.rows) == len(self.losses) == STEPS

    def round(self, number: int, count: int, devices: int, *, kill: bool) -> dict[str, Any]:
        """One start, and one kill or the end."""
        log = self.folder / f"round{number}"
        there = saved_steps(self.out)
        if there:
            checkpoint.verify(self.out / "checkpoints" / str(there[-1]))
        before, self.lose = self.lose, self.random.choice([EVERY, EVERY + 1, 2 * EVERY])
        more = (
            [f"--lose-at-most={self.lose}"] if self.lose < 2 * EVERY else []
        )  # twice as many without the flag
        workers = start(self.out, log, count, devices, *more, *(["--resume"] if there else []))
        row = {
            "round": number,
            "processes": count,
            "devices": count * devices,
            "from": there[-1] if there else 0,
            "lost": self.reached - (there[-1] if there else 0),
            "of at most": before,
        }
        try:
            if kill:
                row |= self.killed(log, workers)
            else:
                for worker in workers:
                    assert worker.wait(timeout=300) == 0, errors_of(log, count)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        rows = told(log, count)
        self.check_start(row["from"], rows, before)
        self.check_rows(rows)
        self.saved |= together(rows, "saved")
        begun = [x["saved"] for x in rows[0] if "saved" in x]
        self.begun = begun or self.begun
        self.reached = last_step(log) or self.reached
        return row | {"to": self.reached}

    def killed(self, log: Path, workers: list[subprocess.Popen]) -> dict[str, Any]:
        """Waits for a random moment, kills one process, and sees how the others end."""
        count, there = len(workers), saved_steps(self.out)
        at = (there[-1] if there else 0) + self.random.randint(EVERY + 1, 3 * EVERY)
        until = time.monotonic() + 200
        while last_step(log) < min(at, STEPS - 2):
            assert time.monotonic() < until, errors_of(log, count)
            assert all(w.poll() is None for w in workers), errors_of(log, count)
            time.sleep(0.01)
        time.sleep(self.random.random() * 0.2)
        victim = self.random.randrange(count)
        workers[victim].send_signal(signal.SIGKILL)
        killed, slowest = time.monotonic(), 0.0
        for rank, worker in enumerate(workers):
            code = worker.wait(timeout=HEARTBEAT + SLACK)
            slowest = max(slowest, time.monotonic() - killed)
            if rank != victim:
                said = Path(f"{log}.{rank}.err").read_text()
                assert code not in (0, None), said
                assert names(said, rank, victim), said[-2000:]
                assert "start all" in said, said[-2000:]
        under_way = bool(list((self.out / "checkpoints").glob("*tmp*")))
        return {"killed": victim, "seconds": round(slowest, 1), "save under way": under_way}

    def check_start(self, step: int, rows: list[list[dict[str, Any]]], lose: int) -> None:
        """It continued where it should, with the state that was saved there."""
        assert self.reached - step <= lose, (self.reached, step)
        if not step:
            return
        found = together(rows, "restored")
        assert set(found) == {step}, (step, found)
        assert found[step] == self.saved[step], f"step {step} was restored with other bits than were saved"
        assert step in self.begun[-2:], (step, self.begun)

    def check_rows(self, rows: list[list[dict[str, Any]]]) -> None:
        """Each process had its part of the batch of each step."""
        part = BATCH // len(rows)
        for rank, row in enumerate(rows):
            for x in row:
                if "step" in x:
                    assert x["rows"] == self.rows[x["step"]][rank * part : (rank + 1) * part], (
                        rank,
                        x["step"],
                    )

    def check_end(self) -> float:
        """The largest difference of a loss from the run that nothing happened to."""
        found = {x["step"]: x["loss"] for x in read_metrics(self.out / "metrics.jsonl") if "loss" in x}
        assert set(found) == set(self.losses)
        worst = max(abs(found[step] - self.losses[step]) for step in found)
        assert worst <= TOLERANCE, worst
        return worst

    def run(self, rounds: int, layouts: list[tuple[int, int]] | None = None) -> list[dict[str, Any]]:
        """All rounds; the last one runs to the end."""
        self.reference()
        table = []
        for number in range(rounds + 1):
            if layouts is not None:
                count, devices = layouts[number]
            else:
                count = self.random.choice([1, 2, 4] if number == rounds else [2, 4])
                devices = self.random.choice([8, 4]) // count
            last = number == rounds or max(saved_steps(self.out), default=0) > STEPS - 3 * EVERY
            row = self.round(number, count, devices, kill=not last)
            table.append(row)
            if self.show:
                print("  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
            if last:
                break
        worst = self.check_end()
        if self.show:
            print(f"losses within {worst:.1e} of the run that nothing happened to")
        return table


def main() -> None:
    """Rounds in runs of up to a few kills each, until so many processes were killed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    kills = run = 0
    while kills < given.rounds:
        with tempfile.TemporaryDirectory() as folder:
            loop = Loop(Path(folder), given.seed + 1000 * run, show=True)
            kills += sum("killed" in row for row in loop.run(given.rounds - kills))
        run += 1
    print(f"{kills} processes killed in {run} runs; every check passed")


if __name__ == "__main__":
    main()
