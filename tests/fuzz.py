"""Calls public functions with wrong arguments, and counts what is not refused in jzero's own words.

    python tests/fuzz.py --calls 7000 --seed 1
    python tests/fuzz.py --calls 2000 --seed 1 --group checkpoint

Each call takes the valid call of one subject (`fuzz_subjects.py`) and replaces one argument, sometimes two, by a value
of a wrong kind, or leaves one out. Prints a row of a Markdown table; with `--show` what was raw or accepted, too.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import random
import re
import string
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

REFUSED, RAW, ACCEPTED, FINE = "refused", "raw", "accepted", "fine"
OURS = re.compile(r"jzero\b|ZeroConfig[(.]|Offload\(|plan\.|pod\.")
PYTHONS = re.compile(
    r"[\w.<>]*?(\w+|<lambda>)\(\) (missing|got an unexpected keyword|takes|got multiple values)"
)
NEVER = (AttributeError, LookupError, AssertionError, RecursionError, NameError)  # whatever they say


def _word(rng: random.Random) -> str:
    return rng.choice(
        ["hello", "", "".join(rng.choices(string.ascii_letters + "_. %", k=rng.randint(1, 12)))]
    )


def _array(rng: random.Random) -> Any:
    shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 3))]
    kind = rng.choice([np.float32, np.int32, np.complex64, np.bool_])
    return rng.choice([np.ones, jnp.ones])(shape, kind)


def _function(rng: random.Random) -> Any:
    return rng.choice([lambda: None, lambda x: x, lambda *args, **kwargs: None])


KINDS: dict[str, Callable[[random.Random], Any]] = {
    "none": lambda rng: None,
    "bool": lambda rng: rng.random() < 0.5,
    "int": lambda rng: rng.randint(2, 9),
    "zero": lambda rng: rng.choice([0, 0.0]),
    "negative": lambda rng: -rng.randint(2, 99),
    "huge": lambda rng: 10 ** rng.randint(20, 40),
    "float": lambda rng: rng.uniform(1.0, 9.0),
    "nan": lambda rng: float("nan"),
    "inf": lambda rng: rng.choice([float("inf"), -float("inf")]),
    "word": _word,
    "bytes": lambda rng: rng.choice([b"", b"hello"]),
    "list": lambda rng: rng.choice([[], (), [object()], [None, 3], [[]]]),
    "words": lambda rng: rng.choice([["hello"], ("data", "data"), {"hello"}]),
    "dict": lambda rng: rng.choice([{}, {"hello": object()}, {3: 4}, {"w": "hello"}, {"w": None}]),
    "object": lambda rng: object(),
    "class": lambda rng: rng.choice([object, int, Exception]),
    "function": _function,
    "array": _array,
    "scalar": lambda rng: rng.choice([jnp.float32, np.float64])(rng.uniform(1.0, 9.0)),
    "shape": lambda rng: jax.ShapeDtypeStruct((rng.randint(1, 9),), "float32"),
    "mesh": lambda rng: Mesh(np.array(jax.devices()[:1]), ("hello",)),
}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A public function with a valid call.

    Attributes:
      name: as users write it.
      fn: called with keywords.
      valid: arguments by name.
      legal: by name of an argument the kinds, joined by spaces, that are not wrong for it; `any`: all of them.
      heavy: a call with a legal kind compiles or writes; such calls are left out.
      group: "jzero" or "checkpoint".
      runs: the valid call can be made here.
    """

    name: str
    fn: Callable[..., Any]
    valid: Mapping[str, Any]
    legal: Mapping[str, str]
    heavy: bool = False
    group: str = "jzero"
    runs: bool = True

    def allows(self, name: str, kind: str) -> bool:
        """The kind is not wrong for this argument."""
        legal = self.legal.get(name, "").split()
        return kind in legal or "any" in legal


@dataclasses.dataclass(frozen=True)
class Call:
    """One call that was made: the arguments that were replaced, with their kinds, and what came of it."""

    subject: str
    wrong: tuple[tuple[str, str], ...]
    outcome: str
    text: str


def outcome(subject: Subject, arguments: Mapping[str, Any], *, wrong: bool) -> tuple[str, str]:
    """What a call came to, and the text of its error; `wrong`: something in it should have been refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            subject.fn(**arguments)
        except Exception as error:
            text = str(error)
            named = PYTHONS.match(text)
            # Python's own words for an argument that is missing, of the function that was called
            names = (subject.name.split(".")[-1], "__init__", "<lambda>")
            own = isinstance(error, TypeError) and named and named[1] in names
            good = own or (OURS.match(text) and not isinstance(error, NEVER))
            return (REFUSED if good else RAW), f"{type(error).__name__}: {text}"
    return (ACCEPTED if wrong else FINE), ""


def draw(subject: Subject, rng: random.Random) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
    """The arguments of a fresh call, and what is wrong with them."""
    arguments, wrong = dict(subject.valid), []
    for name in rng.sample(sorted(arguments), k=min(len(arguments), 1 if rng.random() < 0.8 else 2)):
        kind = rng.choice([*KINDS, "dropped"])
        if subject.heavy and subject.allows(name, kind):
            continue
        wrong.append((name, kind))
        if kind == "dropped":
            del arguments[name]
        else:
            arguments[name] = KINDS[kind](rng)
    return arguments, tuple(wrong)


def fuzz(subjects: list[Subject], calls: int, seed: int) -> list[Call]:
    """That many calls, one after the other, of subjects drawn in proportion to their arguments."""
    rng, made = random.Random(seed), []
    weights = [len(s.valid) for s in subjects]
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:  # a word may be taken for a path
        os.chdir(folder)
        try:
            while len(made) < calls:
                (subject,) = rng.choices(subjects, weights)
                arguments, wrong = draw(subject, rng)
                if not wrong or (subject.heavy and any(kind == "dropped" for _, kind in wrong)):
                    continue
                bad = any(kind != "dropped" and not subject.allows(name, kind) for name, kind in wrong)
                made.append(Call(subject.name, wrong, *outcome(subject, arguments, wrong=bad)))
        finally:
            os.chdir(here)
    return made


def row(calls: list[Call]) -> str:
    """A row of the table: calls, raw errors, nonsense that was accepted."""
    count = collections.Counter(c.outcome for c in calls)
    share = 100 * count[RAW] / len(calls)
    return f"| wrong arguments | {len(calls)} calls | {count[RAW]} raw ({share:.1f} %) | {count[ACCEPTED]} accepted |"


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--calls", type=int, default=7000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--group", choices=("jzero", "checkpoint"), default="jzero")
    parser.add_argument("--only", default="", help="part of the names of the functions to call")
    parser.add_argument("--show", action="store_true", help="list what was raw or accepted")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    from fuzz_subjects import subjects  # makes arrays

    chosen = [s for s in subjects() if s.group == args.group and args.only in s.name]
    calls = fuzz(chosen, args.calls, args.seed)
    if args.show:
        kinds: dict[tuple, list[Call]] = {}
        for call in calls:
            if call.outcome in (RAW, ACCEPTED):
                kinds.setdefault((call.outcome, call.subject, tuple(n for n, _ in call.wrong)), []).append(
                    call
                )
        for (what, name, names), same in sorted(kinds.items()):
            found = ", ".join(sorted({" ".join(k for _, k in c.wrong) for c in same}))
            print(f"{what}: {name}({', '.join(names)}=): {found}\n    {same[0].text[:160]!r}")
    print(row(calls))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
