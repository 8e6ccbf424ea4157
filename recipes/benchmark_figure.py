"""The figure of benchmark.py, from its file of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_favorpp.benchmarking.rows import PASSES, TITLES, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#555555"
PEER_MARKERS = ("^", "v", "D")


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw time over length, forward and in training, and memory, both axes logarithmic.

    Args:
        results: Content of the file.
        path: PNG or SVG to write.
    """
    from matplotlib.figure import Figure

    rows = results["rows"]
    panels = [(f"{kind}_ms", f"{TITLES[kind]}, ms") for kind in PASSES] + [("peak_mib", "memory of training, MiB")]
    panels = [panel for panel in panels if any(row[panel[0]] is not None for row in rows)]
    figure = Figure(figsize=(4.2 * max(len(panels), 1) + 2.8, 4.4), layout="constrained")
    axes = figure.subplots(1, max(len(panels), 1), squeeze=False)[0]
    lines: dict[str, Any] = {}
    for axis, (key, title) in zip(axes, panels, strict=False):
        lines |= _draw_panel(axis, rows, key)
        axis.set_ylabel(title)
    figure.legend(lines.values(), lines.keys(), loc="outside center right", frameon=False, fontsize=9)
    figure.suptitle(f"{results['title']}, {results['settings']['device']}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_panel(axis: Axes, rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """Draw one quantity of all contestants, and return what a legend shows of each."""
    curves: dict[str, tuple[dict[int, float | None], dict[str, Any]]] = {}

    def add(name: str, row: Mapping[str, Any], value: float | None, **style: Any) -> None:
        curves.setdefault(name, ({}, style))[0][row["length"]] = value

    for row in rows:
        add("SDPA", row, row[f"sdpa_{key}"], color="black", linestyle=":")
        add("identity", row, row.get(f"identity_{key}"), color=GREY, linestyle="--")
        if key == "forward_ms":
            add(f"floor, M={row['num_features']}", row, row.get("floor_forward_ms"), color=GREY, linestyle="-.")
        for marker, (peer, found) in zip(PEER_MARKERS, row["peers"].items(), strict=False):
            add(f"{peer} M={row['num_features']}", row, found[key], linestyle="--", marker=marker)
    for row in rows:
        add(label(row), row, row[key], marker="o")
    colours = cycle(COLOURS)
    lines = {}
    for name, (points, style) in curves.items():
        if "color" not in style:
            style["color"] = next(colours)
        known = {length: value for length, value in sorted(points.items()) if value is not None}
        if known:
            (lines[name],) = axis.plot(list(known), list(known.values()), markersize=4, linewidth=1.5, **style)
    lengths = sorted({row["length"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(lengths, [str(length) for length in lengths], rotation=45)
    axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axis.set_xlabel("tokens")
    axis.grid(alpha=0.3)
    return lines
