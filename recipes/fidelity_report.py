"""The tables and the figure of fidelity.py, from its file of results."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fidelity_methods import CALIBRATED, CONTROLS, LEARNT, WINDOW
from rich.console import Console
from rich.table import Table
from tabulate import tabulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SOFTMAX = "softmax"
NOTE = (
    "uniform: attention replaced by the mean of the values. window-only: exact attention within blocks, no features, "
    "at the same cost per query: blocks of M tokens; with +window of the window and M more, and the ends."
)
# Okabe and Ito's colours, which colour-blind readers tell apart. Methods of one preconditioning share one.
COLOURS = {
    "favor+": "#56B4E9",
    "none": "#D55E00",
    "center": "#E69F00",
    "diagonal": "#009E73",
    "full": "#0072B2",
    "other": "#CC79A7",
}
GREY = "#555555"
CONTROL_MARKERS = {"uniform": None, "window-only": "x", "window-only+window": "+"}


@dataclass(frozen=True)
class Score:
    """A number as it is shown.

    Attributes:
        key: Name in the file.
        title: Above the table and beside the axis.
        factor: What it is multiplied by.
        digits: After the point.
        of_softmax: Whether it is divided by what softmax has.
        drawn: Whether the figure has a panel for it.
    """

    key: str
    title: str
    factor: float = 1.0
    digits: int = 3
    of_softmax: bool = False
    drawn: bool = True


SCORES: dict[str, tuple[Score, ...]] = {
    "sts": (
        Score("spearman", "Spearman x 100", 100, 2, drawn=False),
        Score("spearman", "share of softmax kept, %", 100, 2, of_softmax=True),
    ),
    "text": (
        Score("cosine", "cosine of embeddings to softmax"),
        Score("correlation", "correlation of pairwise similarities with softmax"),
        Score("attention_error", "relative error of attention, mean over layers", drawn=False),
    ),
    "far": (
        Score("delta_cosine", "cosine to softmax of what far evidence changes"),
        Score("delta_norm_ratio", "how much it changes, share of softmax"),
    ),
    "image": (
        Score("patch_cosine", "cosine of patch features to softmax"),
        Score("class_cosine", "cosine of the class token to softmax"),
    ),
    "probe": (
        Score("zero_shot_accuracy", "accuracy of the probe of softmax features, %", 100, 1),
        Score("probe_accuracy", "accuracy of a probe of the features themselves, %", 100, 1),
        Score("patch_cosine", "cosine of patch features to softmax", drawn=False),
        Score("class_cosine", "cosine of the class token to softmax", drawn=False),
    ),
    "audio": (
        Score("attention_error", "relative error of attention, mean over layers"),
        Score("frame_cosine", "cosine of frames to softmax"),
    ),
}
"""What is shown of each task; the titles are of tables and axes."""

Cell = tuple[float, float | None]  # mean, and standard deviation where there are several draws


def print_tables(results: dict[str, Any], markdown: bool) -> None:
    """Print one table per score: a row per method, a column per number of features, mean and deviation over draws.

    Args:
        results: Content of the file.
        markdown: As Markdown rather than as a drawn table.
    """
    counts = feature_counts(results)
    header = ["attention", *(f"M = {count}" for count in counts)]
    for score in SCORES[results["task"]]:
        if score.key not in results[SOFTMAX]:
            continue  # of a file that is older than the score
        rows = []
        for method, cells in methods(results, score).items():
            shown = [cells.get(count, cells.get(None)) for count in counts]
            rows.append([method, *("" if cell is None else format_cell(cell, score.digits) for cell in shown)])
        title = f"{score.title}: {results['model']}, {results['task']}"
        if markdown:
            table = tabulate(rows, header, tablefmt="github", disable_numparse=True)
            print(f"\n{title}\n\n{table}")
            continue
        drawn = Table(title=title)
        for place, name in enumerate(header):
            drawn.add_column(name, justify="right" if place else "left", no_wrap=True)
        for row in rows:
            drawn.add_row(*row)
        Console().print(drawn)
    print(f"\n{NOTE}")


def feature_counts(results: dict[str, Any]) -> list[int]:
    """Return all numbers of features of a file, ascending."""
    return sorted({run["num_features"] for run in results["runs"] if run["num_features"] is not None})


def methods(results: dict[str, Any], score: Score) -> dict[str, dict[int | None, Cell]]:
    """Average the draws of each method and number of features.

    Args:
        results: Content of the file.
        score: What of it.

    Returns:
        Softmax, the controls, then methods as the file has them; by number of features, None where it plays no part.
    """
    softmax = results[SOFTMAX][score.key]
    scale = score.factor / (softmax if score.of_softmax else 1.0)
    values: dict[str, dict[int | None, list[float]]] = {name: {} for name in CONTROLS}
    for run in results["runs"]:
        value = run["scores"][score.key]
        cell = values.setdefault(run["method"], {}).setdefault(run["num_features"], [])
        cell.append(math.nan if value is None else scale * value)
    table: dict[str, dict[int | None, Cell]] = {SOFTMAX: {None: (scale * softmax, None)}}
    for method, cells in values.items():
        if cells:
            table[method] = {count: summary(draws) for count, draws in cells.items()}
    return table


def summary(draws: list[float]) -> Cell:
    """Return mean and sample standard deviation, the latter None for a single draw."""
    return statistics.fmean(draws), statistics.stdev(draws) if len(draws) > 1 else None


def format_cell(cell: Cell, digits: int) -> str:
    """Return a cell as text, "not finite" where a draw was not."""
    mean, deviation = cell
    if not math.isfinite(mean):
        return "not finite"
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw one panel per score over the number of features, with the deviation over draws; controls are dashed.

    Args:
        results: Content of the file.
        path: PNG or SVG to write.
    """
    from matplotlib.figure import Figure

    scores = [score for score in SCORES[results["task"]] if score.drawn]
    figure = Figure(figsize=(4.2 * len(scores) + 2.8, 4.4), layout="constrained")
    panels = figure.subplots(1, len(scores), squeeze=False)[0]
    for axis, score in zip(panels, scores, strict=True):
        lines = _draw_panel(axis, results, score)
    figure.legend(lines.values(), lines.keys(), loc="outside center right", frameon=False, fontsize=9)
    figure.suptitle(f"Zero-shot fidelity to softmax: {results['model']}, {results['task']}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_panel(axis: Axes, results: dict[str, Any], score: Score) -> dict[str, Any]:
    """Draw one score, and return what a legend shows of each method."""
    counts = feature_counts(results) or [1]
    lines: dict[str, Any] = {}
    for name, cells in methods(results, score).items():
        style = _style(name)
        if None in cells:
            (lines[name],) = axis.plot(counts, [cells[None][0]] * len(counts), **{**style, "marker": None})
            continue
        x, mean, deviation = zip(*((count, *cells[count]) for count in counts if count in cells), strict=True)
        bars = [each or 0.0 for each in deviation]
        lines[name] = axis.errorbar(x, mean, bars, capsize=2.5, elinewidth=1, **style)
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.minorticks_off()
    axis.set_xlabel("random features per head, M")
    axis.set_ylabel(score.title)
    axis.grid(alpha=0.3)
    return lines


def _style(name: str) -> dict[str, Any]:
    """Return colour by preconditioning, marker by statistics; dash-dotted with a window, dashed for a control."""
    if name == SOFTMAX:
        return {"color": "black", "linestyle": ":", "linewidth": 1.5}
    if name in CONTROLS:
        return {"color": GREY, "linestyle": "--", "linewidth": 1.2, "marker": CONTROL_MARKERS[name]}
    plain = name.removesuffix(WINDOW)
    preconditioning = plain.removeprefix(CALIBRATED).removeprefix(LEARNT).removesuffix("-random")
    preconditioning = preconditioning.replace("favor++", "none")
    colour = COLOURS.get(preconditioning, COLOURS["other"])
    calibrated, windowed = plain.startswith(CALIBRATED), name.endswith(WINDOW)
    markers = {"relu": "v", "trig": "D", "elu": None}
    return {
        "color": colour,
        "linestyle": "-." if windowed else "-",
        "marker": "*"
        if plain.startswith(LEARNT)
        else markers.get(plain, "o" if not calibrated else "^" if plain.endswith("-random") else "s"),
        "markerfacecolor": "white" if windowed else colour,
        "markersize": 5.5,
        "linewidth": 1.0 if plain.endswith("-random") else 1.6,
    }
