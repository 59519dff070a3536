"""Kills a run with `Offload(tier="disk")` again and again, at random moments, and goes on from its folder.

    python tests/disk_kill_loop.py --kills 200 --seed 1

Each child (tests/disk_kill_worker.py) restores the folder, or creates it, and trains until SIGKILL. Checked, with a
digest of all bits, against a run that nothing happens to:
- a child begins with the last generation that the one before had finished, or with the next: a step that was committed
  and not yet told;
- masters and moments are those of this generation, every bit: none is of another one;
- so are the params that it begins with, and those of every step.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
STARTS = 1 / 8  # the share of kills while a child starts, restores or creates
START, TRAIN = 2.5, 0.4  # seconds, at most, from the start and from the end of the first step on
CREATION = ("its creation did not end", "generation 0")  # what a folder says that was killed before generation 1


class Server:
    """The process that forks the children."""

    def __init__(self, cache: Path):
        env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE.parent), str(HERE)]))
        env.pop("XLA_FLAGS", None)
        env["PYTHONWARNINGS"] = "ignore:os.fork"  # the children use JAX, this process does not
        env["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        env |= {f"JAX_PERSISTENT_CACHE_MIN_{x}": "0" for x in ("COMPILE_TIME_SECS", "ENTRY_SIZE_BYTES")}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "disk_kill_worker.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=env,
        )  # fmt: skip

    def fork(self, folder: Path, log: Path, until: int = 10**9, every: int = 10**9) -> int:
        """Starts a child; its process id."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{folder} {log} {until} {every}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def lives(child: int) -> bool:
    return Path(f"/proc/{child}").exists()


def told(log: Path) -> list[tuple[str, int, int]]:
    """What a child wrote; a line that the kill cut short is left out."""
    text = log.read_text() if log.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [(what, int(g), int(d)) for what, g, d in (line.split() for line in lines)]


def error_of(log: Path) -> str:
    file = Path(f"{log}.error")
    return file.read_text() if file.exists() else ""


class Loop:
    """The run and what it has told."""

    def __init__(self, folder: Path, seed: int, show: bool = False):
        self.folder, self.random, self.show = folder, random.Random(seed), show
        self.state = folder / "state"
        self.reached, self.found = -1, {"whole": {}, "step": {}}
        self.ahead = self.unborn = 0  # kills between the commit and the line of a step; before generation 0 was whole

    def killed(self, server: Server, number: int) -> None:
        """One child and its end."""
        log = self.folder / f"log{number}"
        child = server.fork(self.state, log)
        started = time.monotonic()
        if self.random.random() < STARTS:
            time.sleep(self.random.uniform(0, START))
        else:
            while sum(what == "step" for what, *_ in told(log)) < 2 and lives(child):
                assert time.monotonic() < started + 120, error_of(log)
                time.sleep(0.01)
            time.sleep(self.random.uniform(0, TRAIN))
        if lives(child):
            os.kill(child, signal.SIGKILL)
            while lives(child):
                time.sleep(0.002)
        self.check(log)

    def check(self, log: Path) -> None:
        """It began where it should; remembers its digests."""
        rows, error = told(log), error_of(log)
        if error:  # a creation that was killed: nothing is lost
            assert self.reached == -1, error
            assert any(x in error for x in CREATION), error
            shutil.rmtree(self.state)
            self.unborn += 1
        for number, (what, g, found) in enumerate(rows):
            if number == 0 and self.reached >= 0:
                assert g in (self.reached, self.reached + 1), (g, self.reached)
                self.ahead += g == self.reached + 1
            assert self.found[what].setdefault(g, found) == found, (what, g)
            self.reached = max(self.reached, g)

    def reference(self, server: Server) -> None:
        """The run that nothing happens to, up to the last generation; it has the same bits."""
        log = self.folder / "whole"
        child = server.fork(self.folder / "undisturbed", log, self.reached, 1)
        while lives(child):
            time.sleep(0.05)
        assert not error_of(log), error_of(log)
        want = {(what, g): found for what, g, found in told(log)}
        assert max(g for _, g in want) == self.reached
        for what, rows in self.found.items():
            for g, found in rows.items():
                assert found == want[what, g], f"{what} {g} is not that of the run that nothing happened to"

    def run(self, kills: int) -> None:
        """All kills, then the comparison."""
        server = Server(self.folder / "cache")
        began = time.monotonic()
        try:
            for number in range(kills):
                self.killed(server, number)
                if self.show:
                    seconds = time.monotonic() - began
                    print(f"{number + 1} kills in {seconds:.0f} s, generation {self.reached}", flush=True)
            self.reference(server)
        finally:
            server.close()
        if self.show:
            print(
                f"{kills} kills, none lost: generation {self.reached}, {len(self.found['whole'])} states compared "
                f"whole, {self.ahead} kills between a commit and its line, {self.unborn} before there was a state"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Loop(Path(folder), given.seed, show=True).run(given.kills)


if __name__ == "__main__":
    main()
