"""`fit`: the fastest configuration that fits, by closed forms first and compiling second.

[Note: how it searches]
All options have a modelled time and estimated bytes. The fastest whose bytes are below the limit is compiled. What XLA
allocated corrects the estimate: by the bytes that it was off, for all options with the same remat, in proportion to the
examples of a micro-batch, or along the line through two programs with different numbers of them. The search goes on
with the fastest option that is then below the limit, and ends when that one is compiled and fits. Offloading, and fewer
bits, make no option faster; so they are tried for those that would be faster than what was found, and are too large.
What a program of stage 2 took beyond its estimate may be gradients that stage 3 does not hold: one of stage 3 is
compiled before an option that would be faster by a fifth is called too large.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jzero.config import ZeroConfig
from jzero.core.errors import check_flag, check_function, check_int, check_kind
from jzero.core.types import PyTree
from jzero.flax.adapters import is_creator
from jzero.proof.fitting.candidates import WHERE, Candidate, Task
from jzero.proof.fitting.rates import rates_of
from jzero.proof.fitting.show import shown
from jzero.proof.pod import JAX_TAKES, Pod
from jzero.proof.pod import pod as pod_of

HOST_BYTES = 10**12
MOST_COMPILES = 4
MOST_HOSTS = 512
SHOWN = 3
WORTH = 0.05
"""The part of a step's time for which one more program is compiled."""
UNSURE = 0.1
"""An estimate may be off by this part: what exceeds the limit by no more is compiled, too."""
UNSURE_ALIKE = 0.02
"""The same once a program with the same weights and gradients whole, and as many examples, has been compiled."""
WORTH_TRYING = 0.2
"""The same for one that may not fit."""
LEAST_HELD = (3, True, 0)
"""`Option.held` of the options with the fewest weights and gradients whole."""
SAME = 0.02
"""Options whose modelled times differ by no more than this part count as equally fast."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """What `fit` found; printing it gives the config as code, its costs, and why cheaper ones do not fit.

    Attributes:
      best: the fastest that fits; None: none does.
      runner_up: the next one that fits, compiled or by its estimate.
      refused: three that would be faster and do not fit, of different kinds, those with the fewest bytes.
      compiled: bytes of one device, by candidate, of those that were compiled.
      predicted: bytes of one device of any candidate: compiled, or estimated and corrected by what was compiled.
      limit: bytes of one device that a program may take.
      pod: for which it was searched.
      pair: the state is an NNX pair.
      trainable: `fit` was told which params train.
      needed: where none fits, the smallest number of GPUs on which one does by the closed forms; None: not found.
      notes: what a reader should know.
    """

    best: Candidate | None
    runner_up: Candidate | None
    refused: tuple[Candidate, ...]
    compiled: Mapping[Candidate, int]
    predicted: Callable[[Candidate], float] = dataclasses.field(repr=False)
    limit: float
    pod: Pod
    pair: bool = False
    trainable: bool = False
    needed: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def config(self) -> ZeroConfig:
        """The config of the best.

        Raises:
          ValueError: nothing fits.
        """
        if self.best is None:
            raise ValueError(f"{WHERE}: nothing fits.\n{self}")
        return self.best.option.config

    def __str__(self) -> str:
        return shown(self)


def fit(
    create_state: Callable[..., PyTree], step: Callable[..., Any], batch: PyTree, *, pod: Pod,
    memory_bytes: int | None = None, host_bytes: int = HOST_BYTES, rates: Mapping[str, float] | None = None,
    lower_precision: bool = False, model: Mapping[str, Any] | None = None, trainable: Any = None,
    compiles: int = MOST_COMPILES, say: Callable[[str], None] | None = None,
) -> Fit:  # fmt: skip
    """The fastest configuration that fits: stage, offload, micro-batches, remat, where they can be chosen.

    Closed forms of all options come first; then the best are compiled for the pod, until one fits.

    Args:
      create_state: returns a TrainState, or an NNX pair, as for `jzero.shard`. If it takes `remat` or `tiled_loss`, it
        is called with both True and False, and the better one is chosen.
      step: the train step, (state, *batch) or (model, optimizer, *batch). If it takes `accumulate`, a number of
        micro-batches is chosen too.
      batch: the global batch, the examples of all devices in a step, as `jax.ShapeDtypeStruct` leaves or arrays. A
        tuple holds several arguments.
      pod: from `jzero.pod`.
      memory_bytes: of one GPU that the program may take. None: 0.75 of it, as JAX does.
      host_bytes: how much memory each host has for offloaded state.
      rates: other numbers than those of the GPU's data sheet, by the names of `jzero.proof.fitting.rates.Rates`:
        {"between_hosts": 50e9}.
      lower_precision: True: moments may be stored in bfloat16 or int8.
      model: sizes of a transformer, as for `jzero.estimate`: without it only compiling tells what activations take.
      trainable: as for `jzero.shard`.
      compiles: how many programs to compile at most; more, up to twice as many, while none of these fits, or where
        another one seems to fit and to be 5 % faster.
      say: is called with a line of text before each step of the work.

    Returns:
      A `Fit`: print it. Its `config`, and `best.option` with the mesh's axes, micro-batches and variants.

    Raises:
      TypeError, ValueError: an argument is of the wrong kind, or the devices do not divide the batch; what
        `jzero.shard` raises for the state.

    Cost:
      Closed forms of some hundred options, ten seconds to a minute, and the compiling of one to `compiles` programs,
      which a cache keeps for the next time.

    Example:
      >>> import jzero
      >>> print(jzero.fit(create_state, train_step, batch, pod=jzero.pod("h100", hosts=2)))  # doctest: +SKIP
    """
    if not is_creator(create_state):
        raise TypeError(f"{WHERE}: create_state must be a function that returns a train state, got {create_state!r}.")
    check_function(step, "step", where=WHERE)
    check_kind(pod, "pod", Pod, "a jzero.Pod, from jzero.pod(...)", where=WHERE)
    check_int(host_bytes, "host_bytes", where=WHERE, low=0)
    check_int(compiles, "compiles", where=WHERE, low=1)
    check_flag(lower_precision, "lower_precision", where=WHERE)
    if memory_bytes is not None:
        check_int(memory_bytes, "memory_bytes", where=WHERE, low=1)
    limit = JAX_TAKES * pod.memory_bytes if memory_bytes is None else memory_bytes
    args = batch if isinstance(batch, tuple) else (batch,)
    check_function(say, "say", where=WHERE, optional=True)
    check_kind(model, "model", Mapping, "a mapping of sizes", where=WHERE, optional=True)
    task = Task(create_state, step, args, pod, rates_of(pod.gpu, rates), model, trainable)
    _ = task.examples  # raises for a batch that the devices do not divide
    say = say or (lambda text: None)
    found = Search(task, limit, host_bytes, compiles, say, lower_precision=lower_precision)
    found.run()
    return found.result()


class Search:
    """See [Note: how it searches]."""

    def __init__(
        self, task: Task, limit: float, host_bytes: int, compiles: int, say: Callable[[str], None], *,
        lower_precision: bool,
    ) -> None:  # fmt: skip
        self.task, self.limit, self.host_bytes, self.compiles, self.say = task, limit, host_bytes, compiles, say
        self.lower_precision = lower_precision
        self.compiled: dict[Candidate, int] = {}
        self.notes: list[str] = []
        say("estimating options with the state in device memory")
        self.known = task.candidates()

    def run(self) -> None:
        """First with the state in device memory; then with what would be faster, if it is made smaller."""
        self.compile_until_one_fits()
        best = self.best()
        large = [c for c in self.known if not self.fits(c) and (best is None or c.seconds.total < best.seconds.total)]
        if large:
            self.say("estimating options with less on the device")
            more = self.task.smaller(large, lower_precision=self.lower_precision)
            if best is not None:
                more = [c for c in more if c.seconds.total < best.seconds.total]
            self.known = [*self.known, *more]
            self.compile_until_one_fits()

    def compile_until_one_fits(self) -> None:
        """Compiles until the fastest that seems to fit has been compiled, and does."""
        while (c := self.worth_compiling()) is not None:
            c, number = self.telling(c), len(self.compiled) + 1
            if number == self.compiles + 1:
                best = self.best()
                gain = 0.0 if best is None else self.gain(c, best)
                why = "none of these fits" if best is None else f"another one may fit and be {gain:.0%} faster"
                self.note(f"more than {self.compiles} programs were compiled, since {why}.")
            self.say(f"compiling {c.option} for {len(self.task.pod.devices)} {self.task.pod.gpu} (program {number})")
            self.compiled[c] = self.task.compiled_bytes(c.option)

    def worth_compiling(self) -> Candidate | None:
        """The next candidate to compile; of more than `compiles`, one that would be faster by far or surely fits."""
        best, done = self.best(), len(self.compiled)
        for c in (self.next(), choice(filter(self.fits, self.known))):
            if c is None or c in self.compiled:
                break
            if best is None or done < self.compiles:
                return c
            gain, fits = self.gain(c, best), self.fits(c)
            if done < 2 * self.compiles and gain >= (WORTH if fits else WORTH_TRYING):
                return c
            what = f"{'fits' if fits else 'may fit'} by the estimate and would be {gain:.0%} faster"
            self.note(f"{c.option}: {what}; it was not compiled (compiles={self.compiles}).")
        c = choice(filter(self.untold, self.known))
        worth = best is not None and c is not None and self.gain(c, best) >= WORTH_TRYING
        return c if worth and done < 2 * self.compiles else None

    def untold(self, c: Candidate) -> bool:
        """It may fit, and only programs that hold more weights or gradients whole say that it does not.

        What these took beyond their estimates may be just that.
        """
        if c.option.held != LEAST_HELD or c.estimate.total > self.limit or c.estimate.host_per_node > self.host_bytes:
            return False
        return not any(o.option.held == LEAST_HELD for o in self.like(c))

    @staticmethod
    def gain(c: Candidate, best: Candidate) -> float:
        """The part of a step's time by which a candidate is faster."""
        return 1 - c.seconds.total / best.seconds.total

    def note(self, text: str) -> None:
        """For the reader, once."""
        self.notes += [text] if text not in self.notes else []

    def telling(self, c: Candidate) -> Candidate:
        """What to compile: `c`, or with the state in device memory what tells of the activations of its model variant.

        That compiles in seconds also where it is far too large; a program with offloaded state may take minutes then.
        """
        if self.like(c):
            return c
        alike = (o for o in self.known if o.option.config == c.option.resident and o.examples == c.examples)
        return next((o for o in alike if o.option.offered == c.option.offered and o.option.axes == c.option.axes), c)

    def like(self, c: Candidate) -> list[Candidate]:
        """Those that were compiled with the same remat."""
        return [o for o in self.compiled if o.option.offered.get("remat") == c.option.offered.get("remat")]

    def next(self) -> Candidate | None:
        """The fastest candidate that fits as far as is known, or is too close to the limit to tell.

        Once two were compiled in vain, it is in the lower half of the room between the smallest one and the limit, then
        in the lowest quarter, and so on.
        """
        failed = len(self.compiled) if self.best() is None else 0
        if failed < 2:
            return choice(c for c in self.known if self.fits(c, unsure=self.unsure(c)))
        sizes = {c: self.predicted(c) for c in self.known if self.fits(c)}
        least = min(sizes.values(), default=0.0)
        return choice(c for c, size in sizes.items() if size <= least + (self.limit - least) / 2 ** (failed - 1))

    def unsure(self, c: Candidate) -> float:
        """By what part its bytes may be off."""
        alike = (o.option.held == c.option.held and o.examples == c.examples for o in self.like(c))
        return UNSURE_ALIKE if any(alike) else UNSURE

    def best(self) -> Candidate | None:
        """The fastest that was compiled and fits."""
        return choice(c for c in self.compiled if self.fits(c))

    def fits(self, c: Candidate, *, unsure: float = 0.0) -> bool:
        """As far as is known; `unsure`: or exceeds the limit by this part at most, without having been compiled."""
        most = self.limit * (1 + unsure * (c not in self.compiled))
        return self.predicted(c) <= most and c.estimate.host_per_node <= self.host_bytes

    def predicted(self, c: Candidate) -> float:
        """Bytes of one device: compiled, or estimated and corrected."""
        if c in self.compiled:
            return self.compiled[c]
        like = self.like(c)
        if not like:
            return c.estimate.total
        like.sort(key=lambda o: (o.option.held != c.option.held, abs(o.examples - c.examples)))
        first, off = like[0], self.off(like[0])
        second = next((o for o in like[1:] if o.examples != first.examples), None)
        slope = off / first.examples
        if second is not None:
            slope = max(0.0, (self.off(second) - off) / (second.examples - first.examples))
        off += slope * (c.examples - first.examples)
        return max(c.estimate.total + off, c.estimate.params + c.estimate.opt_state)

    def off(self, c: Candidate) -> int:
        """How many bytes more a program took than was estimated."""
        return self.compiled[c] - c.estimate.total

    def result(self) -> Fit:
        """What was found."""
        best, known = self.best(), self.known
        faster = known if best is None else [c for c in known if c.seconds.total < best.seconds.total]
        large = [c for c in faster if not self.fits(c)]
        kinds = dict[tuple[Any, ...], Candidate]()
        for c in sorted(large, key=self.predicted):
            kinds.setdefault((c.option.config.stage, len(c.option.axes), c.option.config.offload), c)
        runner_up = choice(c for c in known if c is not best and self.fits(c)) if best is not None else None
        return Fit(
            best=best, runner_up=runner_up, refused=tuple(kinds.values())[:SHOWN], compiled=self.compiled,
            predicted=self.predicted, limit=self.limit, pod=self.task.pod, pair=self.task.pair,
            trainable=self.task.trainable is not None,
            needed=None if best is not None else self.smallest(), notes=tuple(self.notes),
        )  # fmt: skip

    def smallest(self) -> int | None:
        """The smallest number of GPUs, in hosts that divide the batch, on which an option fits by the closed forms."""
        pod = self.task.pod
        examples = self.task.examples * len(pod.devices)
        for hosts in range(pod.hosts + 1, MOST_HOSTS + 1):
            if examples % (hosts * pod.gpus_per_host):
                continue
            self.say(f"estimating on {hosts * pod.gpus_per_host} {pod.gpu}")
            machine = pod_of(pod.gpu, hosts=hosts, gpus_per_host=pod.gpus_per_host)
            larger = dataclasses.replace(self.task, pod=machine)
            known = larger.candidates(smallest=True)
            every = itertools.chain(known, larger.smaller(known, lower_precision=self.lower_precision))
            if any(c.estimate.total <= self.limit and c.estimate.host_per_node <= self.host_bytes for c in every):
                return len(machine.devices)
        return None


def choice(candidates: Iterable[Candidate]) -> Candidate | None:
    """The simplest candidate within 2 % of the fastest; None if there are no candidates."""
    some = list(candidates)
    least = min((c.seconds.total for c in some), default=0.0)
    alike = (c for c in some if c.seconds.total <= (1 + SAME) * least)
    return min(alike, key=lambda c: (c.option.complexity, c.seconds.total), default=None)
