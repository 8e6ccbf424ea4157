"""How much memory a step takes, and a limit that lets it fail before the system ends the process."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch

TOO_LITTLE = ("can't allocate memory", "bad_alloc", "out of memory", "ALLOC_FAILED")


def peak_memory_mib(step: Callable[[], object], device: torch.device) -> float:
    """Return the most memory that tensors took during a step, beyond those that were there before, in MiB.

    On a GPU that is what PyTorch's allocator says. Elsewhere it is the largest running sum of the allocations that its
    profiler sees: what the process as a whole takes depends on what was freed before, and is not returned at once.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return float(torch.cuda.max_memory_allocated(device) - before) / 2**20
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes to the terminal otherwise
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    taken = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        taken += event.nbytes()
        most = max(most, taken)
    return most / 2**20


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that there is too little memory, of a GPU or of the machine."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in TOO_LITTLE)


@contextmanager
def memory_limited(mib: float | None) -> Generator[None]:
    """Let allocations beyond a limit fail for a while, as on a GPU; without it the system ends the process.

    Args:
        mib: How much more than now the process may take; None means what is available. Linux only, elsewhere there
            is no limit.

    Yields:
        Nothing.
    """
    mib = available_memory_mib() if mib is None else mib
    taken = _amounts_in_mib(Path("/proc/self/status")).get("VmData")
    if mib is None or taken is None:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int((taken + mib) * 2**20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def available_memory_mib() -> float | None:
    """Return how much memory this process can still take before the system runs short, or None where unknown."""
    found = [_amounts_in_mib(Path("/proc/meminfo")).get("MemAvailable")]
    folder = Path("/sys/fs/cgroup")
    try:
        most, now = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        found.append((int(most) - int(now)) / 2**20 if most != "max" else None)
    except (OSError, ValueError):
        pass
    return min((each for each in found if each is not None), default=None)


def _amounts_in_mib(path: Path) -> dict[str, float]:
    """Return the lines of a file of Linux that read ``Name: number kB``."""
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii", errors="replace").splitlines()]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) / 2**10 for words in lines if len(words) == 3 and words[2] == "kB"}
