"""How many processes share a run of the tests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

MOST = 4
"""A worker holds up to 2 GiB, and tests that measure time want a core each."""


def number_of_workers(mark_expression: str, arguments: Sequence[str], cores: int) -> int:
    """Return how many workers pytest starts unless told with ``-n``; 0 is this process alone, as with ``-n 0``.

    Slow tests take all memory and cores that there are, and tests of a GPU the GPU, so they run one at a time. A file
    or a test that is named runs here too: it is done before a worker would have started, and a debugger works.
    """
    if not all(f"not {mark}" in mark_expression for mark in ("slow", "gpu")):
        return 0
    if any(not Path(argument).is_dir() for argument in arguments):
        return 0
    return 0 if cores == 1 else min(cores, MOST)


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
