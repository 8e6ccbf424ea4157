"""What is made of measurements: a row for every configuration and length, and the lengths from which it pays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from hf_favorpp.benchmarking.lineup import SDPA, Entry, Lineup
from hf_favorpp.benchmarking.models import IDENTITY
from hf_favorpp.benchmarking.timing import NOT_ASKED, Measurement

PASSES = ("forward", "train")
TITLES = {"forward": "forward", "train": "forward and backward"}
CONFIGURATION = ("requested_backend", "num_features", "kernel", "preconditioning", "statistics")
NEIGHBOURHOOD = ("exact_window", "exact_ends")
FLASH = f"{SDPA} flash"
Measured = Mapping[str, Mapping[str, Measurement]]
"""By contestant and pass."""
NOTHING = Measurement(reason=NOT_ASKED)


def make_rows(lineup: Lineup, measured: Measured) -> list[dict[str, Any]]:
    """Return one row for every configuration of the library at one length.

    Args:
        lineup: Who is who.
        measured: By contestant and pass.

    Returns:
        Rows as the file has them: times in ms, memory in MiB. Where something was not measured it is None, and
        ``reasons`` says why, by key.
    """
    return [_make_row(lineup, entry, measured) for entry in lineup.entries]


def _make_row(lineup: Lineup, entry: Entry, measured: Measured) -> dict[str, Any]:
    config = entry.config
    row: dict[str, Any] = {
        "length": lineup.length,
        "backend": entry.observer.backend,
        **{name: None for kind in PASSES for name in (f"{kind}_ms", f"sdpa_{kind}_ms", f"{speedup_key(kind)}")},
        "peak_mib": None,
        "requested_backend": config.backend,
        **{name: getattr(config, name) for name in CONFIGURATION[1:]},
        **{name: config.to_dict()[name] for name in NEIGHBOURHOOD},
    }
    reasons: dict[str, str] = {}
    for kind in PASSES:
        own = measured[entry.name].get(kind, NOTHING)
        sdpa_name, sdpa = fastest(measured, kind)
        for prefix, measurement in (("", own), ("sdpa_", sdpa)):
            row[f"{prefix}{kind}_ms"] = measurement.median_ms
            row[f"{prefix}{kind}_min_ms"] = measurement.min_ms
            row[f"{prefix}{kind}_max_ms"] = measurement.max_ms
            row[f"{prefix}{kind}_repetitions"] = measurement.repetitions
            row[f"{prefix}{peak_key(kind)}"] = measurement.peak_mib
            if measurement.reason is not None:
                reasons[f"{prefix}{kind}_ms"] = measurement.reason
        row[speedup_key(kind)] = ratio(sdpa.median_ms, own.median_ms)
        row[f"sdpa_{kind}_backend"] = None if sdpa_name is None else sdpa_name.removeprefix(SDPA).strip() or "default"
        if FLASH in measured:
            row[f"flash_{kind}_ms"] = measured[FLASH].get(kind, NOTHING).median_ms
            row[f"{speedup_key(kind)}_over_flash"] = ratio(row[f"flash_{kind}_ms"], own.median_ms)
        if IDENTITY in measured:
            identity = measured[IDENTITY].get(kind, NOTHING)
            row[f"identity_{kind}_ms"] = identity.median_ms
            row[f"identity_{peak_key(kind)}"] = identity.peak_mib
            row[f"{kind}_over_identity"] = ratio(own.median_ms, identity.median_ms)
            if identity.reason is not None:
                reasons[f"identity_{kind}_ms"] = identity.reason
    row |= entry.more
    row["floor_fraction"] = ratio(row.get("floor_forward_ms"), row["forward_ms"])
    row["peers"] = {name: _peer(measured[rival], row) for name, rival in entry.peers.items()}
    return {**row, "reasons": reasons}


def fastest(measured: Measured, kind: str) -> tuple[str | None, Measurement]:
    """Return the fastest backend of SDPA in a pass, or None and why there is none.

    Args:
        measured: By contestant and pass.
        kind: The pass.

    Returns:
        The contestant's name and what was measured of it.
    """
    backends = {
        name: passes.get(kind, NOTHING)
        for name, passes in measured.items()
        if name == SDPA or name.startswith("sdpa ")
    }
    timed = {name: each for name, each in backends.items() if each.median_ms is not None}
    if timed:
        return min(timed.items(), key=lambda item: item[1].median_ms or math.inf)
    reasons = dict.fromkeys(str(each.reason) for each in backends.values())
    return None, Measurement(reason="; ".join(reasons))


def _peer(passes: Mapping[str, Measurement], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was measured of a peer, and how many times faster the row's own attention is."""
    found: dict[str, Any] = {}
    for kind in PASSES:
        measurement = passes.get(kind, NOTHING)
        found[f"{kind}_ms"] = measurement.median_ms
        found[peak_key(kind)] = measurement.peak_mib
        found[speedup_key(kind)] = ratio(measurement.median_ms, row[f"{kind}_ms"])
        if measurement.reason is not None:
            found[f"{kind}_reason"] = measurement.reason
    return found


def peak_key(kind: str) -> str:
    """Return the key of a row that holds the peak memory of a pass."""
    return "peak_mib" if kind == "train" else f"{kind}_peak_mib"


def speedup_key(kind: str) -> str:
    """Return the key of a row that holds how many times faster than SDPA a pass is."""
    return f"{kind}_speedup"


def ratio(a: float | None, b: float | None) -> float | None:
    """Return a / b, or None where one of them is None."""
    return None if a is None or b is None else a / b


def crossovers(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for every configuration the length from which it is faster than SDPA, forward and in training.

    Args:
        rows: Of all lengths.

    Returns:
        One entry a configuration; ``forward`` and ``train`` as :func:`crossover` has them, and the shortest and the
        longest length at which both were timed.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in CONFIGURATION), []).append(row)
    found = []
    for key, group in groups.items():
        entry = dict(zip(CONFIGURATION, key, strict=True))
        entry["backend"] = "+".join(dict.fromkeys(row["backend"] for row in group))
        for kind in PASSES:
            speedups = {row["length"]: row[speedup_key(kind)] for row in group if row[speedup_key(kind)] is not None}
            entry[kind] = crossover(speedups)
            entry[f"{kind}_measured"] = [min(speedups), max(speedups)] if speedups else None
        found.append(entry)
    return found


def crossover(speedups: Mapping[int, float]) -> float | None:
    """Return the length from which a speed-up stays above 1.

    Between the last length where it is not and the next one, its logarithm is taken as linear in that of the length.

    Args:
        speedups: By length, in any order; only lengths at which both sides were timed.

    Returns:
        The length; the shortest one where the speed-up is above 1 everywhere, which is then a bound; None where it is
        not above 1 at the longest.
    """
    lengths = sorted(speedups)
    slower = [length for length in lengths if not speedups[length] > 1]
    if not lengths or slower[-1:] == lengths[-1:]:
        return None
    if not slower:
        return float(lengths[0])
    left, right = slower[-1], lengths[lengths.index(slower[-1]) + 1]
    low, high = math.log(speedups[left]), math.log(speedups[right])
    return math.exp(math.log(left) + (math.log(right) - math.log(left)) * -low / (high - low))


def label(row: Mapping[str, Any]) -> str:
    """Return what sets the configuration of a row, or of a crossover, apart from others."""
    return f"{row['kernel']} M={row['num_features']} {row['preconditioning']} {row['requested_backend']}"


def describe_crossover(entry: Mapping[str, Any], kind: str) -> str:
    """Return from which length on a configuration is faster, in words: a number, a bound, or never.

    Args:
        entry: One of :func:`crossovers`.
        kind: The pass.

    Returns:
        Such as ``"450"``, ``"at most 128"`` or ``"never (up to 4096)"``.
    """
    measured = entry[f"{kind}_measured"]
    if measured is None:
        return "not measured"
    if entry[kind] is None:
        return f"never (up to {measured[1]})"
    return f"at most {measured[0]}" if entry[kind] == measured[0] else f"{entry[kind]:.0f}"
