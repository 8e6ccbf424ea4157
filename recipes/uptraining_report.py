"""The table that a training recipe ends with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


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
    features = results["favorpp"] or {}
    name = results["attention"] + (f", {features['num_features']} features" if features else "")
    table.add_column(name, justify="right")
    for metric, value in results["metrics"].items():
        before = [] if twin is None else [f"{100 * results['softmax_metrics'][metric]:.2f}"]
        table.add_row(f"{metric.replace('_', ' ')} x 100", *before, f"{100 * value:.2f}")
    for metric, value in results.get("initial_metrics", {}).items():
        before = [] if twin is None else [""]
        table.add_row(f"{metric.replace('_', ' ')} x 100, before training", *before, f"{100 * value:.2f}")
    for key, label in measurements.items():
        if key in results:
            before = [] if twin is None else [f"{twin[key]:,.0f}" if key in twin else ""]
            table.add_row(label, *before, f"{results[key]:,.0f}")
    Console().print(table)
