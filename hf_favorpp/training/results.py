"""results.json: the metrics of a run with everything needed to judge and repeat it."""

from __future__ import annotations

import gc
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

LAUNCHER_VARIABLES = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_", "WORLD_SIZE", "OMP_NUM_THREADS")
RECORDED_PACKAGES = ("hf-favorpp", "torch", "transformers", "accelerate", "safetensors", "numpy")


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write ``results`` as JSON, through a temporary sibling file, so that a killed process leaves no half file.

    Args:
        path: File to write; its folder is made.
        results: JSON-able values; paths become strings.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(results, indent=2, default=str) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def describe_run(arguments: Mapping[str, Any], packages: Iterable[str] = ()) -> dict[str, Any]:
    """Describe this process: the command, the arguments after defaults and files, versions and hardware.

    Args:
        arguments: Of the program, by name. Tokens and keys must have been taken out.
        packages: Distributions to record besides the core's own.

    Returns:
        ``command``, ``environment`` (what a launcher set), ``arguments``, ``versions`` and ``hardware``.
    """
    return {
        "command": command_line(),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(LAUNCHER_VARIABLES)},
        "arguments": dict(arguments),
        "versions": installed_versions((*RECORDED_PACKAGES, *packages)),
        "hardware": describe_hardware(),
    }


def command_line() -> str:
    """Return the command that started this process, quoted for a shell, without the values of ``--*token`` options."""
    program = ["python"]
    if precision := os.environ.get("ACCELERATE_MIXED_PRECISION"):  # set by the accelerate command
        ranks = os.environ.get("WORLD_SIZE", "1")
        program = ["accelerate", "launch", "--num_processes", ranks, "--mixed_precision", precision]
    script = Path(sys.argv[0])
    words = [*program, *sys.argv] if script.suffix == ".py" else [script.name, *sys.argv[1:]]  # an installed command
    hide = False
    shown = []
    for word in words:
        name, equals, _ = word.partition("=")
        secret = name.startswith("--") and name.endswith("token")
        shown.append("***" if hide else f"{name}=***" if secret and equals else word)
        hide = secret and not equals
    return shlex.join(shown)


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of those ``packages`` that are installed."""
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    versions["torch"] = str(torch.__version__)  # with its build, such as +cpu
    return versions


def describe_hardware() -> dict[str, Any]:
    """Return CPU model, cores that this process may use, torch's threads, memory in MiB and the GPUs' names."""
    hardware: dict[str, Any] = {
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }
    if hasattr(os, "sysconf"):
        hardware["memory_mib"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    return hardware


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_memory_mib() -> float:
    """Return the peak memory since the last :func:`reset_peak_memory`, in MiB.

    On a GPU that is what the tensors of this process took at most (``torch.cuda.max_memory_allocated``), elsewhere
    the largest resident set of the process. Where the system cannot reset the latter, it is the peak since the start.
    """
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated() > 0:
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) / 2**10
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return float("nan")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak) / (2**20 if sys.platform == "darwin" else 2**10)


def reset_peak_memory() -> None:
    """Free what can be freed and start counting the peak anew, so that a second run is not charged with a first."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated() > 0:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as clear:
            clear.write("5")  # Linux: reset VmHWM
    except OSError:
        pass


def _cpu_model() -> str:
    """Return the CPU's name as the system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as info:
            for line in info:
                if line.lower().startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
