"""One of several processes that train under a deadline: `deadline_worker.py rank count port folder kind who`.

At step 8 process `who` stops (SIGSTOP), loops in Python, waits for a byte that nobody sends, or saves for a while; with
`slow` every process is a bit late now and then, for 200 steps.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import jzero

AT, STEPS, SECONDS, PAUSE = 8, 200, 2.0, 5.0


def late(kind: str, step: int) -> None:
    """What keeps a process from its next step."""
    if kind == "slow":
        time.sleep(random.random() * 0.06 + (step % 50 == 0) * 1.5)
    elif kind == "save" and step == AT:
        time.sleep(2 * SECONDS)
    elif kind == "stop" and step == AT:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "loop" and step == AT:
        endless()
    elif kind == "io" and step == AT:
        os.read(os.pipe()[0], 1)


def endless() -> None:
    """A loop in Python."""
    while True:
        pass


def main(rank: int, count: int, port: str, folder: Path, kind: str, who: int) -> None:
    """Trains."""
    jax.config.update("jax_num_cpu_devices", 1)
    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", count, rank, heartbeat_timeout_seconds=60)
    mesh = jax.make_mesh((count,), ("data",))
    whole, split = (jax.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P("data")))
    x = jax.make_array_from_callback((count, 8), split, lambda _: jnp.ones((1, 8)))
    plain = jax.jit(lambda w, x: (w + x.mean(), x.sum()), out_shardings=(whole, whole), donate_argnums=0)
    w = jax.device_put(jnp.zeros(()), whole)
    times = {"seconds": SECONDS, "compile_seconds": 60, "pause_seconds": PAUSE}
    with jzero.deadline(plain, **times, folder=folder) as step:
        for number in range(1, STEPS + 1):
            w, total = step(w, x)
            if number % 4 == 0:
                total.block_until_ready()  # a loop that logs
            if kind == "slow" or rank == who:
                late(kind, number)
        print("RESULT", float(w), flush=True)


if __name__ == "__main__":
    rank, count, port, folder, kind, who = sys.argv[1:]
    main(int(rank), int(count), port, Path(folder), kind, int(who))
