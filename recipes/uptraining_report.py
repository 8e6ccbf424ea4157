"""The table that a training recipe ends with, and what the attention of a run is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_favorpp import FavorppConfig

SOFTMAX = "softmax"
STAGE_NAMES = {"transfer": "transferred", "distil": "distilled"}
PRECONDITIONING_NAMES = {"none": "as published", "center": "centred", "diagonal": "diagonal", "full": "full"}


def print_table(results: dict[str, Any], measurements: Mapping[str, str]) -> None:
    """Print the results of a run; beside those of its softmax twin, if there was one.

    Args:
        results: Content of results.json.
        measurements: Keys of results.json to show below the metrics where it has them, with what they are called.
    """
    table = Table(title=f"{results['task']}, after {results['completed_steps']} optimizer steps")
    table.add_column("")
    twin = results.get("softmax")
    if twin is not None:
        table.add_column("softmax", justify="right")
    table.add_column(attention_name(results), justify="right")
    for metric, value in results["metrics"].items():
        before = [] if twin is None else [f"{100 * results['softmax_metrics'][metric]:.2f}"]
        table.add_row(f"{metric.replace('_', ' ')} x 100", *before, f"{100 * value:.2f}")
    for metric, value in results.get("initial_metrics", {}).items():
        before = [] if twin is None else [""]
        table.add_row(f"{metric.replace('_', ' ')} x 100, before training", *before, f"{100 * value:.2f}")
    for stage, done in STAGE_NAMES.items():
        for metric, value in result_of(results, stage).items():
            before = [] if twin is None else [""]
            table.add_row(f"{metric.replace('_', ' ')} x 100, {done}", *before, f"{100 * value:.2f}")
    for key, label in measurements.items():
        if key in results:
            before = [] if twin is None else [f"{twin[key]:,.0f}" if key in twin else ""]
            table.add_row(label, *before, f"{results[key]:,.0f}")
    Console().print(table)


def result_of(results: dict[str, Any], stage: str) -> dict[str, float]:
    """Return the metrics after a stage, where it was evaluated."""
    metrics: dict[str, float] = results.get(stage, {}).get("metrics", {})
    return metrics


def stages_name(result: dict[str, Any]) -> str:
    """Return what came before the task and beside its labels, as a part of :func:`attention_name`."""
    name = "".join(f", {done}" for stage, done in STAGE_NAMES.items() if stage in result)
    return name + (", taught" if result.get("arguments", {}).get("kd_weight") else "")


def attention_name(result: dict[str, Any]) -> str:
    """Return what the attention of a run is called in tables.

    Args:
        result: Content of a results.json.

    Returns:
        Kernel, preconditioning, neighbourhood and number of features.
    """
    options = result.get("favorpp")
    if options is None:
        return SOFTMAX if result.get("arguments", {}).get("teacher") is None else f"{SOFTMAX}, trained on"
    config = FavorppConfig.from_dict(options)
    window = config.exact_window
    near = f"{window[0]} x {window[1]} tiles" if isinstance(window, tuple) else f"window of {window}"
    if config.kernel == "none":
        return f"{near} alone{stages_name(result)}"
    if config.kernel == "uniform":
        return "mean of the values"
    name = config.kernel.replace("favor", "FAVOR")
    if name.startswith("FAVOR"):
        name += f", {PRECONDITIONING_NAMES[str(config.preconditioning)]}"
    if config.statistics == "calibrated":
        name += ", calibrated"
    if config.learnable:
        name += ", learnable"
    if window:
        name += f", {near}"
    name += stages_name(result)
    if config.redraw is not None:
        name += f", redrawn every {config.redraw.every}"
    return f"{name}, M = {config.num_features}"
