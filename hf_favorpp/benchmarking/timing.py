"""The measuring core: contestants take turns in one run, so that whatever disturbs the machine disturbs them alike.

It knows steps, clocks and memory; what attention or a model is, it does not know.
"""

from __future__ import annotations

import functools
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hf_favorpp.benchmarking.memory import is_out_of_memory, memory_limited, peak_memory_mib

Step = Callable[[], object]
Result = TypeVar("Result")

LEAST_ROUNDS, MOST_ROUNDS = 2, 100
SETTLED_SAMPLES, SETTLED_SPREAD = 5, 1.25
"""Of a contestant with fewer samples, whose median is so many times the fastest, more are taken than time is left for:
one pause of the machine would count for half otherwise."""
SHORTEST_SAMPLE = 0.1
"""Seconds; a sample of a shorter step is the mean of as many calls in a row as take that long."""
OUT_OF_MEMORY = "out of memory"
NOT_ASKED = "not asked for"


class CannotRunError(Exception):
    """A step that cannot run here at all; the message says why."""


@dataclass(frozen=True)
class Contestant:
    """Something to be timed.

    Attributes:
        name: Unique in a race.
        steps: By name of the pass, such as ``"forward"`` and ``"train"``; what a step returns is dropped at once.
        growth: Exponent by which its time grows with the length, to predict whether a longer one takes too long.
        context: Made and entered around every sample, so that entering it is not timed with each call.
    """

    name: str
    steps: Mapping[str, Step]
    growth: int = 1
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Measurement:
    """What was measured of one pass of one contestant: times and ``peak_mib``, or else the ``reason`` why not.

    Attributes:
        median_ms: Over the samples, as ``min_ms`` and ``max_ms``.
        min_ms: The fastest sample.
        max_ms: The slowest sample.
        repetitions: Number of samples.
        peak_mib: The most memory that one call took beyond what was there before it.
        reason: Why there is no time, or None.
    """

    median_ms: float | None = None
    min_ms: float | None = None
    max_ms: float | None = None
    repetitions: int = 0
    peak_mib: float | None = None
    reason: str | None = None


class Race:
    """Measures contestants at growing lengths, and remembers which of them have become too slow or too large."""

    def __init__(
        self,
        device: torch.device,
        *,
        seconds_per_length: float = 20.0,
        max_seconds: float = 60.0,
        max_memory_mib: float | None = None,
        say: Callable[[str], object] = print,
    ) -> None:
        """Begin without a history.

        Args:
            device: Of all contestants.
            seconds_per_length: Samples are taken for so long at each length, all passes and contestants together,
                warm-ups not counted; at least 2 of each all the same.
            max_seconds: A call that is predicted to take longer is left out.
            max_memory_mib: On the CPU, how much more memory than at the start of a pass the process may take; None
                means all that is available. Without a limit the system would end the process.
            say: Tells the user what is left out.
        """
        self.device = device
        self.seconds_per_length = seconds_per_length
        self.max_seconds = max_seconds
        self.max_memory_mib = max_memory_mib
        self.say = say
        self._last: dict[tuple[str, str], tuple[int, float]] = {}
        self._ended: dict[tuple[str, str], str] = {}

    def run(
        self, length: int, contestants: Iterable[Contestant], passes: Sequence[str]
    ) -> dict[str, dict[str, Measurement]]:
        """Measure all contestants at one length, larger than those before.

        Args:
            length: Tokens.
            contestants: Their names are the same at all lengths.
            passes: Keys of their steps.

        Returns:
            By contestant and pass. Whatever could not be measured has a reason and does not stop the others.
        """
        contestants = list(contestants)
        results: dict[str, dict[str, Measurement]] = {contestant.name: {} for contestant in contestants}
        for kind in passes:
            with memory_limited(self.max_memory_mib) if self.device.type == "cpu" else nullcontext():
                measured = self._run_pass(length, contestants, kind, self.seconds_per_length / len(passes))
            for name, measurement in measured.items():
                results[name][kind] = measurement
                if measurement.median_ms is not None:
                    self._last[name, kind] = (length, measurement.median_ms / 1e3)
        return results

    def _run_pass(
        self, length: int, contestants: list[Contestant], kind: str, seconds: float
    ) -> dict[str, Measurement]:
        reasons: dict[str, str] = {}
        peaks: dict[str, float] = {}
        calls: dict[str, int] = {}
        for contestant in contestants:
            name = contestant.name
            reason = self._ended.get((name, kind)) or self._too_slow(length, contestant, kind)
            if reason is None:
                warm, reason = attempt(functools.partial(warm_up, contestant, kind, self.device))
                if warm is not None and warm[0] > self.max_seconds:
                    reason = f"one call took {warm[0]:.3g} s, more than {self.max_seconds:g} s"
                elif warm is not None:
                    peaks[name] = warm[1]
                    calls[name] = math.ceil(SHORTEST_SAMPLE / max(warm[0], 1e-7))
                if reason is not None:
                    self._ended[name, kind] = f"{reason} (at length {length})"
            if reason is not None:
                reasons[name] = reason
                self.say(f"length {length}: {name}, {kind}: {reason}")
        running = [contestant for contestant in contestants if contestant.name in peaks]
        samples, failures = interleave(running, kind, calls, self.device, seconds)
        for name, reason in failures.items():
            reasons[name] = reason
            self._ended[name, kind] = f"{reason} (at length {length})"
            self.say(f"length {length}: {name}, {kind}: {reason}")
        return {
            contestant.name: Measurement(reason=reasons[contestant.name])
            if contestant.name in reasons
            else summary(samples[contestant.name], peaks[contestant.name])
            for contestant in contestants
        }

    def _too_slow(self, length: int, contestant: Contestant, kind: str) -> str | None:
        """Return why a length is left out, going by the length before it, or None."""
        if (contestant.name, kind) not in self._last:
            return None
        before, seconds = self._last[contestant.name, kind]
        predicted = seconds * (length / before) ** contestant.growth
        if predicted <= self.max_seconds:
            return None
        return f"left out: {predicted:.3g} s a call expected from length {before}, more than {self.max_seconds:g} s"


def summary(seconds: Sequence[float], peak_mib: float) -> Measurement:
    """Return median and extremes in ms of samples in seconds."""
    median, low, high = (1e3 * each for each in (statistics.median(seconds), min(seconds), max(seconds)))
    return Measurement(median, low, high, len(seconds), peak_mib)


def interleave(
    contestants: Iterable[Contestant], kind: str, calls: Mapping[str, int], device: torch.device, seconds: float
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Time contestants in turn, every round in another random order, so that none always follows the same one.

    Args:
        contestants: All warm.
        kind: The pass.
        calls: How many calls a sample has, by name.
        device: Where they run.
        seconds: No round is begun after so long, once there are two; a third to a fifth still is for those contestants
            whose samples are far apart.

    Returns:
        The samples in seconds a call, by name, and why some could not go on.
    """
    samples: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    running, failures = list(contestants), {}
    shuffle = random.Random(0).shuffle
    begin = time.perf_counter()
    for round_index in range(MOST_ROUNDS):
        if round_index >= LEAST_ROUNDS and time.perf_counter() - begin > seconds:
            running = [contestant for contestant in running if not is_settled(samples[contestant.name])]
        shuffle(running)
        for contestant in tuple(running):
            name = contestant.name
            sample, reason = attempt(functools.partial(time_calls, contestant, kind, device, calls[name]))
            if sample is None:
                failures[name] = str(reason)
                running.remove(contestant)
            else:
                samples[name].append(sample)
    return samples, failures


def is_settled(samples: Sequence[float]) -> bool:
    """Return whether there are enough samples, or few that agree."""
    return len(samples) >= SETTLED_SAMPLES or statistics.median(samples) <= SETTLED_SPREAD * min(samples)


def time_calls(contestant: Contestant, kind: str, device: torch.device, calls: int) -> float:
    """Return the seconds of one of several calls in a row: by events on a GPU, else by the clock."""
    step = contestant.steps[kind]
    with contestant.context():
        if device.type != "cuda":
            begin = time.perf_counter()
            for _ in range(calls):
                step()
            return (time.perf_counter() - begin) / calls
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(calls):
            step()
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end)) / 1e3 / calls


def warm_up(contestant: Contestant, kind: str, device: torch.device) -> tuple[float, float]:
    """Call a step for the first time at a length, without timing it for the record.

    Returns:
        Roughly the seconds of a call, and the peak memory of one in MiB.
    """
    step = contestant.steps[kind]
    with contestant.context():
        if device.type == "cuda":
            step()  # compiles and tunes, which takes memory of its own
        begin = time.perf_counter()
        peak = peak_memory_mib(step, device)
        seconds = time.perf_counter() - begin
    # Measuring memory takes time itself, which tells only where a call is short.
    return (seconds if seconds > 2 else time_calls(contestant, kind, device, 1)), peak


def attempt(action: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """Do something that may find too little memory, or that cannot run here.

    Args:
        action: What to do.

    Returns:
        Its result and None, or None and the reason why there is no result.

    Raises:
        Exception: Whatever else goes wrong.
    """
    try:
        return action(), None
    except CannotRunError as error:
        reason = str(error)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = OUT_OF_MEMORY
    gc.collect()  # only now, without the traceback, nothing holds the tensors of the failed call
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None, reason
