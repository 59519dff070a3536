"""Code that was not written for jzero, run with it: docs/compatibility.md.

    pip install -e ".[pod]" "transformers<5" equinox dm-haiku rollfast psgd-jax==0.2.8 numpyro
    python benchmarks/compatibility.py                    # all rows: what the file of results lacks
    python benchmarks/compatibility.py --rows gpt2 resnet # some of them
    python benchmarks/compatibility.py --print            # the table of what is there
    python benchmarks/compatibility.py --checkouts FOLDER # with the rows that need checkouts (`IN_CHECKOUTS`)

FOLDER holds checkouts from github.com: young-geng/EasyLM, google-research/big_vision, google/flax,
luchris429/purejaxrl and Physical-Intelligence/openpi. They and Tunix need `pip install mlxu einops ml_collections
google-tunix distrax gymnax==0.0.9 augmax beartype==0.19.0 jaxtyping==0.2.36 tqdm-loggable fsspec safetensors`. The row
maxtext needs Python 3.12 or newer, and packages of its own: docs/compatibility.md.

Each row is a process of its own, takes half a minute to two, and becomes a line of `--out`; a stopped run goes on. Its
script lies in `benchmarks/compatibility_scripts/`: lines that end in `# -` are those of the plain script alone, `# +`
those of the script with jzero. `# +name` and `# -name` belong to one row. A script leaves its state in `args`, `step`
and `batches`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "benchmarks" / "compatibility_scripts"
N, STAGES, WIRE = 8, (1, 2, 3), (2, 3)
SIMULATED = ("filter",)  # `eqx.is_array` drops what is abstract
WHOLE_RUNS = ("ppo",)  # a run of many updates that shards its state inside of its program
ROWS = {  # by name: the script, and the packages that its code is from
    **dict.fromkeys(("gpt2", "bert", "t5", "llama", "whisper", "vit"), ("hugging_face", "transformers")),
    **dict.fromkeys(("partition", "filter"), ("equinox_model", "equinox")),
    **dict.fromkeys(("transformer", "resnet"), ("haiku_model", "dm-haiku")),
    **dict.fromkeys(
        ("muon", "schedule_free_adamw", "prodigy", "dadapt_adamw", "mechanize", "adopt"),
        ("optimizers", "optax"),
    ),
    **dict.fromkeys(("kron", "prism"), ("optimizers", "rollfast")),
    "psgd": ("optimizers", "psgd-jax"),
    "svi": ("numpyro_svi", "numpyro"),
    **dict.fromkeys(
        ("lm1b", "seq2seq", "batchnorm", "gan", "dpo", "graph", "experts"), ("architectures", "flax")
    ),
    "easylm": ("checkouts", "EasyLM"),
    "big_vision": ("checkouts", "big_vision"),
    "gemma": ("checkouts", "flax/examples/gemma"),
    "ppo": ("purejaxrl_ppo", "purejaxrl"),
    "tunix": ("checkouts", "google-tunix"),
    **dict.fromkeys(("openpi", "openpi_lora"), ("openpi_pi0", "openpi")),
    "maxtext": ("maxtext_train", "maxtext"),
}
IN_CHECKOUTS = ("easylm", "big_vision", "gemma", "ppo", "openpi", "openpi_lora")
CHECKOUTS = "JZERO_CHECKOUTS"  # the folder of checkouts, for the process of a row


def source(row: str, sharded: bool) -> tuple[str, int]:
    """The plain script of a row or the one with jzero, and how many lines are only in this one."""
    lines, own = (SCRIPTS / f"{ROWS[row][0]}.py").read_text().splitlines(), 0
    for i, line in enumerate(lines):
        mark = re.search(r"  # ([+-])(\w*)$", line)
        if mark and (mark[1] == "+") != sharded:
            lines[i] = ""
        elif mark and mark[2] in ("", row):
            own += 1
    return "\n".join(lines), own


def executed(row: str, stage: int | None) -> dict[str, Any]:
    """The globals that a script leaves: with jzero at this stage, or plain."""
    text, _ = source(row, stage is not None)
    names = {"ROW": row, "STAGE": stage, "FOLDER": os.environ.get(CHECKOUTS), "__name__": row}
    exec(compile(text, str(SCRIPTS / ROWS[row][0]), "exec", dont_inherit=True), names)
    return names


def losses(names: dict[str, Any]) -> tuple[list[float], tuple[Any, ...]]:
    """The losses of all batches, and the state after them."""
    args, found = names["args"], []
    for batch in names["batches"]:
        *new, loss = names["step"](*args, batch)
        args = (*new, *args[len(new) :])
        found.append(float(loss))
    return found, args


def fullest(args: Any) -> tuple[int, int]:
    """Bytes of a state on the fullest device, and of one copy of it."""
    import jax

    held, whole = dict[Any, int](), 0
    for x in jax.tree.leaves(args):
        if isinstance(x, jax.Array) and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            whole += x.nbytes
            for shard in x.addressable_shards:
                held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values()), whole


@contextlib.contextmanager
def without_arrays(mesh: Any) -> Iterator[None]:
    """Scripts make their states for compile-only devices."""
    import jax

    import jzero

    def place(plan, params):
        def abstract(x, layout):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=plan.param_sharding(layout))

        return jax.tree.map(abstract, params, plan.tree.unflatten(plan.layouts))

    def jit(fn, **options):
        if not hasattr(fn, "plan"):
            return real_jit(fn, **options)

        def init(params):
            leaves, tree = jax.tree.flatten(jax.eval_shape(fn, params))
            shardings = fn.plan.state_shardings(tree.unflatten(leaves))
            return tree.unflatten(
                [
                    jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
                    for x, s in zip(leaves, shardings, strict=True)
                ]
            )

        return init

    def put(tree, sharding):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    real_jit, make_plan, abstract = jax.jit, jzero.make_plan, jzero.abstract
    with (
        mock.patch.object(jzero, "mesh", return_value=mesh),
        mock.patch.object(jzero, "shard", lambda state, **f: abstract(state, mesh=mesh, **f)),
        mock.patch.object(jzero, "make_plan", lambda params, **f: make_plan(params, mesh=mesh, **f)),
        mock.patch.object(jzero.Plan, "place", place),
        mock.patch.object(jax, "jit", jit),
        mock.patch.object(jax.numpy, "copy", lambda x: x),
        mock.patch.object(jax, "device_put", put),
    ):
        yield


def compiled(row: str, stage: int) -> dict[str, Any]:
    """Psi of a step on 8 H100, that of the closed form, and what `check` finds."""
    import jax

    import jzero

    pod = jzero.pod("h100")
    if row in WHOLE_RUNS:
        return compiled_run(row, stage, pod)
    with without_arrays(pod.mesh({"data": N})):
        names = executed(row, stage)
    states = [x for x in names["args"] if hasattr(x, "tx")]
    plans = [jzero.plan_of(x) for x in states] or [names["plan"]]
    txs = [x.tx for x in states] or [names["tx"]]
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), names["batches"][0])
    program = pod.compile(names["step"], *names["args"], batch, plan=plans[0])
    closed = 0.0
    for plan, tx in zip(plans, txs, strict=True):
        uses = jzero.param_uses(names["step"], *names["args"], batch, plan=plan)
        closed += jzero.estimate(plan, tx=tx, uses=uses).wire
    return read(program, plans, closed)


def read(program: Any, plans: Sequence[Any], closed: float, updates: int = 1) -> dict[str, Any]:
    """What a compiled program sends for an update beside its closed form, in Psi, and what `check` finds in it."""
    import jzero

    psi = sum(plan.param_bytes for plan in plans) * (N - 1) / N
    sent = jzero.explain(program, plans[0]).wire.total / updates
    found = {f.kind: str(f) for plan in plans for f in jzero.findings(program, plan)}
    return {"psi": sent / psi, "closed": closed / psi, "findings": found}


def compiled_run(row: str, stage: int, pod: Any) -> dict[str, Any]:
    """The same of a script that leaves a function `train` of a key and its number of updates; Psi of one update."""
    import jax

    import jzero

    plans, mesh, shard = [], pod.mesh({"data": N}), jzero.shard

    def on_the_pod(state, **fields):
        state = shard(state, mesh=mesh, **fields)
        plans.append(jzero.plan_of(state))
        return state

    with mock.patch.object(jzero, "shard", on_the_pod):
        names = executed(row, stage)
        program = pod.compile(names["train"], jax.ShapeDtypeStruct((2,), "uint32"))
        return read(program, plans[-1:], jzero.estimate(plans[-1]).wire, names["updates"])


def shortly(error: Exception) -> str:
    """An error in one line, with the last line of jzero or of the script that it came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "jzero/" in f.filename]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{where}"


def version(code: str) -> str:
    """The code's name with its version on PyPI or the commit of its checkout."""
    folder = Path(os.environ.get(CHECKOUTS, os.devnull)) / code
    if not folder.is_dir():
        return f"{code} {importlib.metadata.version(code)}"
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return f"{code} {subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()}"


def measure(row: str, verbose: bool = False) -> dict[str, Any]:
    """One row, in this process."""
    import jax
    import numpy as np

    found: dict[str, Any] = {"lines": source(row, True)[1], "errors": {}, "wire": {}, "difference": {}}
    found["version"] = version(ROWS[row][1])
    with jax.default_device(jax.devices()[0]):
        plain, _ = losses(executed(row, None))
    found["losses"] = plain
    for stage in STAGES:
        try:
            got, args = losses(executed(row, stage))
            found["difference"][stage] = float(np.max(np.abs(np.subtract(got, plain))))
            if stage == 3:
                found["held"], found["whole"] = fullest(args)
        except Exception as error:
            found["errors"][str(stage)] = shortly(error)
            if verbose:
                traceback.print_exc()
    for stage in () if row in SIMULATED else WIRE:
        try:
            found["wire"][stage] = compiled(row, stage)
        except Exception as error:
            found["errors"][f"{stage}, compiled"] = shortly(error)
            if verbose:
                traceback.print_exc()
    return found


def in_a_process(row: str) -> dict[str, Any]:
    """One row, in a process with simulated devices."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(N), "NPROC": "32"}
    command = [sys.executable, __file__, "--one", row]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"errors": {"script": done.stderr.strip().splitlines()[-1][:300]}}
    return json.loads(done.stdout.splitlines()[-1])


def table(results: dict[str, Any]) -> Iterator[str]:
    """The lines of the page."""
    heads = (
        "code",
        "row",
        "lines",
        "stages",
        "loss",
        "state",
        "sum / 8",
        "wire, Psi",
        "closed form",
        "`check`",
    )
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    known = {ROWS[row][1]: found["version"] for row, found in results.items() if "version" in found}
    for row, found in results.items():
        yield f"| {' | '.join((known.get(ROWS[row][1], ROWS[row][1]), row, *cells(found)))} |"


def cells(found: dict[str, Any]) -> Iterator[str]:
    """A row behind its name; of a row that does not run, why."""
    errors = "; ".join(f"{where}: {text}" for where, text in found["errors"].items())
    if "held" not in found:
        yield from ("", "", "", "", "", "", "", errors)
        return
    worst = max(found["difference"], key=found["difference"].__getitem__)
    wire = [found["wire"][s] for s in map(str, WIRE) if s in found["wire"]]
    yield str(found["lines"])
    yield ", ".join(found["difference"])
    yield f"{found['difference'][worst]:.0e} ({worst})"
    yield f"{found['held'] / 1e6:.2f}"
    yield f"{found['whole'] / N / 1e6:.2f}"
    for key in ("psi", "closed"):
        yield ", ".join(f"{w[key]:.2f}" for w in wire)
    yield errors or ", ".join(dict.fromkeys(f"`{kind}`" for w in wire for kind in w["findings"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="NAME", help="all"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "compatibility.jsonl")
    parser.add_argument("--checkouts", type=Path, metavar="FOLDER", help="where the checkouts lie")
    parser.add_argument("--print", action="store_true", help="only the table of what --out holds")
    parser.add_argument("--one", choices=list(ROWS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, verbose=True)))
        return
    there = {}
    if args.out.exists():
        there = {name: found for (name,), found in map(json.loads, args.out.read_text().splitlines())}
    if args.checkouts:
        os.environ[CHECKOUTS] = str(args.checkouts.resolve())
    if not args.print:
        measured = resumed(args.out, in_a_process)
        for row in args.rows if CHECKOUTS in os.environ else [x for x in args.rows if x not in IN_CHECKOUTS]:
            there[row] = measured(row)
            print(row, json.dumps(there[row])[:400], file=sys.stderr, flush=True)
    for line in table({row: there[row] for row in args.rows if row in there}):
        print(line)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT)]
    from benchmarks.resumed import resumed

    main()
