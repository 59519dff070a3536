"""Random training runs, each compared with plain optax and Flax on one device: `python tests/differential.py`.

    python tests/differential.py --cases 1000 --seed 7     # prints failures with a script to paste, and the coverage
    python tests/differential.py --case '{...}'            # one case again, from its JSON
    python tests/differential.py --case 7/123              # or from seed and index
    python tests/differential.py --case 7/123 --shrink     # and its smallest form that fails alike
    python tests/differential.py --gpu --jobs 8            # on a GPU: cases of one device, in real memory spaces
    python tests/differential.py --mutation "two trees"    # how many cases find a fault of tests/mutations.py again

A case runs in a process with 25 others, so that a crash costs one case and is its failure; every fourth batch runs with
XLA's default optimizations, as users have them. From 500 cases on, cases are added for the shares of
`differ.grammar.SHARES` that the draws have missed. Ends with 1 where a case failed or a share is missed still.
Generation is our own and not hypothesis's: its draws favour what is small and repeat themselves, which misses the
shares, and it runs and shrinks cases in its own process, which a segfault ends.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.metadata
import itertools
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).resolve().parent
BATCH = 25
SECONDS = 600  # for one case, so that a hang is a failure and a busy machine is not


def environment(default_xla: bool) -> dict[str, str]:
    """Of a worker: simulated devices; XLA without most optimizations unless asked for."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")}
    env |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2", "NPROC": "32", "PYTHONUNBUFFERED": "1"}
    env["XLA_FLAGS"] = "--xla_cpu_parallel_codegen_split_count=1"
    env["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent), env.get("PYTHONPATH", "")])
    if default_xla:
        return env
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # half of the time; see conftest.py
        env["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
    return env | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def gpu_environment(jobs: int) -> dict[str, str]:
    """Of one of `jobs` workers that share a GPU: exact products, and no timing of kernels."""
    env = environment(default_xla=True) | {"JAX_PLATFORMS": "cuda,cpu", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    env.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # the older name: jaxlib refuses both together
    return {"XLA_CLIENT_MEM_FRACTION": f"{0.9 / jobs:.3f}"} | env | {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}


def on_one_device(case: dict) -> dict | None:
    """A case on one device; None where its mesh has several axes, or where all its state stays on the device."""
    places = [case, *(e for e in case["events"].values() if "mesh" in e)]
    if any(p["mesh"]["kind"] not in ("flat", "explicit") for p in places):
        return None
    if all(p["config"]["tier"] == "device" for p in places):
        return None
    events = {
        at: e | {"mesh": e["mesh"] | {"n": 1}} if "mesh" in e else e for at, e in case["events"].items()
    }
    return case | {"mesh": case["mesh"] | {"n": 1}, "events": events}


def work() -> None:
    """A worker: cases as JSON lines on standard input, outcomes on standard output."""
    import jax

    if "JZERO_MUTATION" in os.environ:
        import mutations

        mutations.apply(os.environ["JZERO_MUTATION"])
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    from differ.compare import run_case

    for line in sys.stdin:
        case = json.loads(line)
        outcome = run_case(case)
        print(f"\n@{json.dumps([case['id'], *outcome])}", flush=True)
        jax.clear_caches()


class Worker:
    """A process and the cases that it has still to run; what it answers goes into `answers`, None when it has ended."""

    def __init__(self, cases: list[dict], env: dict[str, str], answers: queue.Queue):
        self.cases, self.env, self.answers = list(cases), env, answers
        self.start()

    def start(self) -> None:
        """A new process for what is left."""
        log = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115 (closed by the listener)
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=log, env=self.env, cwd=TESTS.parent,
        )  # fmt: skip
        self.listener = threading.Thread(target=self.listen, args=(self.process, log), daemon=True)
        self.listener.start()
        self.send()

    def listen(self, process, log) -> None:
        """Hand on what a process answers, and keep its last words."""
        for line in process.stdout:
            if line.startswith("@"):
                self.answers.put((self, process, json.loads(line[1:])))
        process.stdout.close()
        process.wait()
        log.seek(0)
        self.last_words = "".join(log.readlines()[-5:])
        log.close()
        self.answers.put((self, process, None))

    def send(self) -> None:
        """The next case."""
        self.since = time.monotonic()
        if self.cases:
            self.process.stdin.write(json.dumps(self.cases[0]) + "\n")
            self.process.stdin.flush()
        else:
            self.process.stdin.close()  # it ends, and its listener with it

    def ended(self, answer: list | None) -> tuple[dict, str, str]:
        """The case that an answer is of, with its outcome; without an answer the process ended in the middle of it."""
        case = self.cases.pop(0)
        if answer is not None:
            self.send()
            return case, answer[1], answer[2]
        hung = time.monotonic() - self.since > SECONDS
        if hung:
            self.process.kill()
        code = self.process.wait()
        with contextlib.suppress(OSError):  # what it has not read
            self.process.stdin.close()
        self.listener.join()
        last = self.last_words
        if self.cases:
            self.start()
        why = f"no answer after {SECONDS} s" if hung else f"the process ended with {code}"
        return case, "FAILED", f"{why}, and these last words:\n{last}"


def run(cases: list[dict], jobs: int, default_xla: str = "mixed"):
    """Yields (case, kind, why) as cases end; `default_xla`: "gpu" for a GPU, else as `--xla`."""
    batches = [cases[i : i + BATCH] for i in range(0, len(cases), BATCH)]
    kinds = {"mixed": lambda i: i % 4 == 3, "default": lambda i: True, "light": lambda i: False}
    kind = kinds.get(default_xla)
    envs = [environment(kind(i)) if kind else gpu_environment(jobs) for i in range(len(batches))]
    waiting = collections.deque(zip(batches, envs, strict=True))
    workers: set[Worker] = set()
    answers: queue.Queue = queue.Queue()
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                workers.add(Worker(*waiting.popleft(), answers))
            try:
                got = [answers.get(timeout=5)]
            except queue.Empty:
                got = [(w, w.process, None) for w in workers if time.monotonic() - w.since > SECONDS]
            for worker, process, answer in got:
                if process is not worker.process or not worker.cases:
                    continue  # of a process that was given up, or of one that has run all its cases
                yield worker.ended(answer)
                if not worker.cases:
                    workers.discard(worker)
                    worker.listener.join()
    finally:  # the caller has seen enough
        for worker in workers:
            worker.process.kill()


def simpler(case: dict):
    """Cases with one thing less."""
    for at in case["events"]:
        yield case | {"events": {k: v for k, v in case["events"].items() if k != at}}
    for i in range(len(case["blocks"])):
        yield case | {"blocks": case["blocks"][:i] + case["blocks"][i + 1 :]}
    for i in range(len(case["wraps"])):
        yield case | {"wraps": case["wraps"][:i] + case["wraps"][i + 1 :]}
    for name in case["config"]:
        if name not in ("stage", "tier", "min_shard_bytes"):
            yield case | {"config": {k: v for k, v in case["config"].items() if k != name}}
    for name, value in (("micro", None), ("compute", None), ("step", "jit"), ("donate", False), ("born", False),
                        ("dtype", "float32"), ("inject", False)):  # fmt: skip
        if case.get(name) != value:
            yield case | {name: value}
    if case["steps"] > 1 and all(int(at) < case["steps"] - 1 for at in case["events"]):
        yield case | {"steps": case["steps"] - 1}


def shrink(case: dict, limit: int = 60) -> tuple[dict, str]:
    """The smallest form of a case that still fails, and how; each try in a process of its own."""
    why, tries = "", 0
    while tries < limit:
        for smaller in simpler(case):
            tries += 1
            _, kind, text = next(iter(run([smaller], 1, "light")))
            if kind == "FAILED":
                case, why = smaller, text
                break
            if tries >= limit:
                break
        else:
            break
    return case, why


def script(case: dict) -> str:
    """What to paste into a shell to see a failure again."""
    return f"python tests/differential.py --case '{json.dumps(case)}'"


def covered(cases: list[dict]) -> dict[str, collections.Counter]:
    """How many cases of each kind, by name."""
    from differ.grammar import features

    counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for case in cases:
        for kind, name in set(features(case)):
            counts[kind][name] += 1
    return counts


def missing(cases: list[dict], total: int) -> dict[tuple[str, str], int]:
    """How many cases each (kind, name) lacks to its share of `total`."""
    from differ.grammar import SHARES

    counts = covered(cases)
    least = {kind: math.ceil(SHARES.get(kind, 0) * total) for kind in counts}
    return {(k, name): least[k] - n for k, names in counts.items() for name, n in names.items() if n < least[k]}


def filling(cases: list[dict], more: Iterable[dict]) -> list[dict]:
    """The first of `more` that bring what `cases` lack."""
    from differ.grammar import features

    lacks, chosen = missing(cases, len(cases) + len(cases) // 20), []
    for case in more:
        if not lacks:
            break
        if found := lacks.keys() & set(features(case)):
            chosen.append(case)
            lacks = {f: n - (f in found) for f, n in lacks.items() if n > (f in found)}
    return chosen


def table(cases: list[dict]) -> str:
    """Coverage: how many cases of each kind."""
    rows = [
        f"| {kind} | {', '.join(f'{n} {c}' for n, c in sorted(names.items()))} |"
        for kind, names in covered(cases).items()
    ]
    return "\n".join(["| covered | cases |", "|---|---|", *rows])


def cost(case: dict) -> float:
    """About how long a case takes, in the time of a plain one: what it compiles."""
    programs = sum({"restore": 1.0, "reshard": 1.0, "second": 0.7}.get(e["kind"], 0.2) for e in case["events"].values())
    return 1 + 0.15 * len(case["blocks"]) + programs + (2 if case["step"] == "eager" else 0)


def covering(count: int, seed: int = 0, among: int = 600) -> list[dict]:
    """Few cheap cases that cover much: of the first draws of a seed, each time the one with the most that is new."""
    from differ.grammar import draw, features

    pool = [draw(seed, i) for i in range(among)]
    covered, chosen = collections.Counter(), []
    for _ in range(count):
        best = max(pool, key=lambda c: (sum(3.0 ** -covered[f] for f in set(features(c))) / cost(c), c["id"]))
        pool.remove(best)
        chosen.append(best)
        covered.update(set(features(best)))
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--first", type=int, default=0, help="index of the first case")
    parser.add_argument("--only", help='a kind of the coverage table, or one of it: "scan_axes", "tier disk"')
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, help="begin no case after this time")
    parser.add_argument("--xla", choices=("mixed", "default", "light"), default="mixed")
    parser.add_argument("--case", action="append", help="JSON, or seed/index")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--gpu", action="store_true", help="cases of one device, on the first GPU of this machine")
    parser.add_argument("--mutation", help="break jzero as this one of tests/mutations.py does; stop when found")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work()
        return 0
    sys.path.insert(0, str(TESTS))
    from differ.grammar import draw, features

    if args.mutation:
        import mutations

        number, what = next((i, m.what) for i, m in enumerate(mutations.FOUND) if args.mutation in m.what)
        os.environ["JZERO_MUTATION"] = str(number)
        print(f"broken: {what}")
    if args.case:
        cases = [json.loads(c) if c.startswith("{") else draw(*map(int, c.split("/"))) for c in args.case]
        args.xla = "light" if args.xla == "mixed" else args.xla
    else:
        drawn = (draw(args.seed, i) for i in itertools.count(args.first))
        drawn = (one for c in drawn if (one := on_one_device(c))) if args.gpu else drawn
        wanted = (c for c in drawn if args.only is None or any(args.only in (k, f"{k} {n}") for k, n in features(c)))
        cases = list(itertools.islice(wanted, args.cases))
    args.xla = "gpu" if args.gpu else args.xla
    started, done, failed, refused = time.monotonic(), [], [], collections.Counter()

    def go_through(cases: list[dict], minutes: float | None = None) -> None:
        for case, kind, why in run(cases, args.jobs, args.xla):
            done.append(case)
            if kind == "refused":
                refused[why] += 1
            if kind == "FAILED":
                if args.shrink:
                    case, why = shrink(case)
                failed.append(case["id"])
                print(f"\nFAILED {case['id']}\n{why}\n{script(case)}\n", flush=True)
                if args.mutation:
                    break
            if len(done) % 50 == 0:
                print(f"{len(done)} cases, {len(failed)} failed, {time.monotonic() - started:.0f} s", flush=True)
            if minutes and time.monotonic() - started > 60 * minutes:
                break

    print(f"{len(cases)} cases, seed {args.seed}", flush=True)
    go_through(cases, args.minutes)
    gate = len(done) >= 500 and not (args.case or args.only or args.gpu)
    if gate:
        known = {c["id"] for c in done}
        others = (c for c in itertools.chain(cases, drawn) if c["id"] not in known)
        more = filling(done, itertools.islice(others, 50_000))
        print(f"{len(more)} more cases, for shares that are missed", flush=True)
        go_through(more)
    if not args.case:
        print(f"\n{table(done)}\n\nrefused: {dict(refused)}")
    missed = missing(done, len(done)) if gate else {}
    print("".join(f"share missed: {kind} {name} lacks {n}\n" for (kind, name), n in missed.items()), end="")
    print(f"{len(done)} cases of seed {args.seed}: {len(failed)} failed {failed}, {sum(refused.values())} refused, "
          f"{time.monotonic() - started:.0f} s")  # fmt: skip
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
