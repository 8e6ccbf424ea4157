"""The measuring core: turns, limits of time and memory, and what is recorded where there is no number."""

from __future__ import annotations

import re

import pytest
import torch
from clock import Clock
from tiny_benchmark import CPU

from hf_favorpp.benchmarking.memory import available_memory_mib, is_out_of_memory, memory_limited, peak_memory_mib
from hf_favorpp.benchmarking.timing import (
    LEAST_ROUNDS,
    CannotRunError,
    Contestant,
    Race,
    attempt,
    interleave,
    is_settled,
    summary,
)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("hf_favorpp.benchmarking.timing.time", clock)
    return clock


def contestant(name, step, growth=1):
    return Contestant(name, {"forward": step}, growth)


def run(race, length, *contestants):
    return {name: passes["forward"] for name, passes in race.run(length, contestants, ["forward"]).items()}


@pytest.fixture
def sleeper(clock):
    return lambda seconds: lambda: clock.sleep(seconds)


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")


def test_times_are_those_of_the_steps(sleeper):
    found = run(
        Race(CPU, seconds_per_length=0.1), 8, contestant("short", sleeper(0.01)), contestant("long", sleeper(0.03))
    )
    for name, ms in (("short", 10), ("long", 30)):
        row = found[name]
        assert [row.min_ms, row.median_ms, row.max_ms] == pytest.approx([ms] * 3, rel=1e-3)
        assert row.repetitions >= LEAST_ROUNDS
        assert row.reason is None


def test_contestants_take_turns():
    calls = []
    names = ["a", "b", "c"]
    contestants = [contestant(name, lambda name=name: calls.append(name)) for name in names]
    samples, failures = interleave(contestants, "forward", dict.fromkeys(names, 2), CPU, seconds=0.01)
    assert not failures
    rounds = [calls[start : start + 6] for start in range(0, len(calls), 6)]
    assert all(sorted(each) == sorted(names * 2) and each[::2] == each[1::2] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1, "not always in the same order"
    assert {len(each) for each in samples.values()} == {len(rounds)}


def test_two_rounds_are_run_however_long_they_take(sleeper):
    found = run(Race(CPU, seconds_per_length=0.0), 8, contestant("a", sleeper(0.01)))
    assert found["a"].repetitions == LEAST_ROUNDS


def test_a_pause_of_the_machine_does_not_count_for_half(sleeper, clock):
    pauses = iter([0.06])
    samples, _ = interleave(
        [contestant("paused", lambda: clock.sleep(next(pauses, 0.01))), contestant("even", sleeper(0.01))],
        "forward",
        {"paused": 1, "even": 1},
        CPU,
        seconds=0.0,
    )
    assert len(samples["even"]) == 2
    assert summary(samples["paused"], 0.0).median_ms < 20
    assert is_settled([1.0, 1.4])
    assert not is_settled([1.0, 1.6])
    assert is_settled([1.0, 3.0, 3.0, 3.0, 3.0])


def test_a_step_that_would_take_too_long_is_left_out_and_the_others_finish(sleeper):
    said = []
    race = Race(CPU, seconds_per_length=0.0, max_seconds=0.1, say=said.append)
    quadratic, linear = contestant("softmax", sleeper(0.02), growth=2), contestant("linear", sleeper(0.02))
    assert run(race, 100, quadratic, linear)["softmax"].median_ms >= 20
    found = run(race, 300, quadratic, linear)  # 9 and 3 times as long
    assert found["softmax"].median_ms is None
    assert found["softmax"].repetitions == 0
    assert re.match(r"left out: 0\.\d+ s a call expected from length 100, more than 0\.1 s$", found["softmax"].reason)
    assert found["linear"].median_ms >= 20
    assert said == [f"length 300: softmax, forward: {found['softmax'].reason}"]
    assert run(race, 400, quadratic)["softmax"].median_ms is None, "still by the last length that was timed"


def test_a_first_call_that_takes_too_long_is_the_last(sleeper):
    race = Race(CPU, max_seconds=0.05, say=lambda text: None)
    slow = contestant("slow", sleeper(0.1))
    assert run(race, 8, slow)["slow"].reason.endswith(" s, more than 0.05 s")
    assert run(race, 16, slow)["slow"].reason.endswith(" s, more than 0.05 s (at length 8)")


def test_too_little_memory_is_recorded_and_not_tried_again(sleeper):
    race = Race(CPU, seconds_per_length=0.0, say=lambda text: None)
    tried = []

    def large():
        tried.append(1)
        out_of_memory()

    found = run(race, 8, contestant("large", large), contestant("small", sleeper(0.001)))
    assert found["large"].reason == "out of memory"
    assert found["small"].median_ms > 0
    assert run(race, 16, contestant("large", large))["large"].reason == "out of memory (at length 8)"
    assert len(tried) == 1


def test_a_contestant_may_fail_in_a_later_round(sleeper, clock):
    calls = iter(range(100))

    def sometimes():
        if next(calls) >= 3:
            out_of_memory()
        clock.sleep(0.01)

    race = Race(CPU, seconds_per_length=0.5, say=lambda text: None)
    found = run(race, 8, contestant("a", sometimes), contestant("b", sleeper(0.01)))
    assert found["a"].reason == "out of memory"
    assert found["a"].median_ms is None
    assert found["b"].median_ms >= 10


def test_what_cannot_run_says_why_and_an_error_is_an_error():
    def cannot():
        raise CannotRunError("there is no kernel")

    def wrong():
        raise RuntimeError("a mistake")

    assert run(Race(CPU, say=lambda text: None), 8, contestant("a", cannot))["a"].reason == "there is no kernel"
    with pytest.raises(RuntimeError, match="a mistake"):
        run(Race(CPU), 8, contestant("a", wrong))


def test_passes_are_measured_apart(sleeper):
    steps = {"forward": sleeper(0.01), "train": out_of_memory}
    found = Race(CPU, seconds_per_length=0.0, say=lambda text: None).run(
        8, [Contestant("a", steps)], ["forward", "train"]
    )
    assert found["a"]["forward"].median_ms >= 10
    assert found["a"]["train"].reason == "out of memory"


def test_peak_memory_is_the_largest_sum_of_tensors_that_live_at_once():
    before = torch.ones(2**18)

    def step():
        a = torch.empty(2**18)  # 1 MiB
        b = torch.empty(2**19)  # 2 MiB
        del a
        c = torch.empty(2**18)
        return b, c, before

    assert peak_memory_mib(step, CPU) == pytest.approx(3, abs=0.01)
    assert peak_memory_mib(lambda: before.add_(1), CPU) == pytest.approx(0, abs=0.01)


def test_peak_memory_of_training_holds_the_gradients():
    x, y = (torch.ones(2**18, requires_grad=True) for _ in range(2))
    peak = peak_memory_mib(lambda: torch.autograd.grad((x * y).sum(), (x, y)), CPU)
    assert 2 <= peak <= 4.1


@pytest.mark.skipif(available_memory_mib() is None, reason="the limit needs Linux")
def test_allocations_beyond_the_limit_fail_and_later_ones_do_not():
    with memory_limited(64):
        value, reason = attempt(lambda: torch.ones(2**28))  # 1 GiB
        assert (value, reason) == (None, "out of memory")
        assert attempt(lambda: torch.ones(2**20).sum().item()) == (2**20, None)
    assert attempt(lambda: torch.ones(2**26).sum().item()) == (2**26, None)


@pytest.mark.skipif(available_memory_mib() is None, reason="the limit needs Linux")
def test_a_race_keeps_to_its_limit_of_memory():
    race = Race(CPU, seconds_per_length=0.0, max_memory_mib=64, say=lambda text: None)
    found = run(race, 8, contestant("large", lambda: torch.ones(2**28)), contestant("small", lambda: torch.ones(9)))
    assert found["large"].reason == "out of memory"
    assert found["small"].median_ms > 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("shapes do not fit"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_mean_too_little_memory(error, expected):
    assert is_out_of_memory(error) is expected
