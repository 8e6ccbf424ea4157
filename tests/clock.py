"""A clock for tests of what measures time: it goes on where it is told to, however busy the machine is."""

from __future__ import annotations

TICK = 1e-6
"""Seconds that one look takes, lest what repeats until some time has passed repeats for ever."""


class Clock:
    """Stands in for the module ``time``."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += TICK
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
