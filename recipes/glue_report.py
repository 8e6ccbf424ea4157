"""The table that glue.py ends with."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

MEASUREMENTS = ("train_tokens_per_s", "wall_time_s", "peak_memory_mib")


def print_table(results: dict[str, Any]) -> None:
    """Print the results of a run; beside those of its softmax twin, if there was one.

    Args:
        results: Content of results.json.
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
    labels = ("training tokens / s", "wall time, s", "peak memory, MiB")
    for label, key in zip(labels, MEASUREMENTS, strict=True):
        before = [] if twin is None else [f"{twin[key]:,.0f}"]
        table.add_row(label, *before, f"{results[key]:,.0f}")
    Console().print(table)
