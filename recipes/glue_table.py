"""Print the comparison on GLUE as a Markdown table and draw it, from the results.json files of many runs.

python recipes/glue_table.py recipes/results/glue --figure recipes/results/glue.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd

MAIN_METRIC = {"cola": "matthews_correlation", "mrpc": "f1", "qqp": "f1", "stsb": "spearmanr"}
"""The metric of CRT Table 2 per task; accuracy elsewhere."""
SOFTMAX = "softmax"


def main(argv: list[str] | None = None) -> None:
    """Run the program.

    Args:
        argv: Command line without the program's name; None takes it from ``sys.argv``.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of results.json files, searched recursively")
    parser.add_argument("--figure", type=Path, help="PNG or SVG to write")
    arguments = parser.parse_args(argv)
    paths = sorted(arguments.folder.rglob("*.json"))
    if not paths:
        parser.error(f"there is no results.json of recipes/glue.py in {arguments.folder}")
    scores = collect([json.loads(path.read_text(encoding="utf-8")) for path in paths])
    main_scores = scores[[(task, metric) for task, metric in scores.columns if metric == main_metric(task)]]
    table = scores.copy()
    table.columns = [f"{task} ({metric})" for task, metric in scores.columns]
    table["mean"] = main_scores.mean(axis=1, skipna=False)
    if SOFTMAX in table.index:
        table["share of softmax, %"] = 100 * table["mean"] / table.loc[SOFTMAX, "mean"]
    print(table.map("{:.1f}".format).replace("nan", "").to_markdown(disable_numparse=True))
    print(f"\nMeans are over {', '.join(f'{task} {metric}' for task, metric in main_scores.columns)}.")
    if arguments.figure:
        draw(main_scores, arguments.figure)


def main_metric(task: str) -> str:
    """Return the metric of CRT Table 2."""
    return MAIN_METRIC.get(task, "accuracy")


def collect(results: list[dict[str, Any]]) -> pd.DataFrame:
    """Average the runs of each method and task over seeds.

    Args:
        results: Contents of results.json files; a run with a twin counts for both.

    Returns:
        Metrics x 100, one row per method (softmax first) and one column per (task, metric).
    """
    rows = []
    for result in results:
        for name, metrics in ((method(result), "metrics"), (SOFTMAX, "softmax_metrics")):
            rows += [(name, result["task"], metric, 100 * value) for metric, value in result.get(metrics, {}).items()]
    runs = pd.DataFrame(rows, columns=["attention", "task", "metric", "score"])
    scores = runs.pivot_table(index="attention", columns=["task", "metric"], values="score", aggfunc="mean")
    return scores.loc[sorted(scores.index, key=place)]


def place(name: str) -> tuple[bool, str, int]:
    """Return the sort key of a row: softmax, FAVOR+, FAVOR++, the others, each by its number of features."""
    kind, _, num_features = name.partition(", M = ")
    return name != SOFTMAX, kind.replace("++", "~"), int(num_features or 0)


def method(result: dict[str, Any]) -> str:
    """Return what a run is called in the table.

    Args:
        result: Content of a results.json.

    Returns:
        Kernel, preconditioning and number of features.
    """
    options = result.get("favorpp")
    if options is None:
        return SOFTMAX
    name = options["kernel"].replace("favor", "FAVOR")
    if name.startswith("FAVOR"):
        name += {"none": ", as published", "center": ", centred"}[options["preconditioning"]]
    if options["redraw"] is not None:
        name += f", redrawn every {options['redraw']['every']}"
    return f"{name}, M = {options['num_features']}"


def draw(scores: pd.DataFrame, path: Path) -> None:
    """Draw one panel per task and one bar per method, with softmax as a dashed line.

    Args:
        scores: Main columns of what :func:`collect` returned.
        path: PNG or SVG to write.
    """
    import matplotlib.pyplot as plt

    methods = scores.drop(index=SOFTMAX, errors="ignore")
    kinds = list(dict.fromkeys(name.split(", M = ")[0] for name in methods.index))
    colours = [f"C{kinds.index(name.split(', M = ')[0])}" for name in methods.index]
    size = (3 * len(scores.columns) + 2, 0.35 * len(methods) + 1.4)
    figure, axes = plt.subplots(1, len(scores.columns), figsize=size, sharey=True, squeeze=False)
    for axis, (task, metric) in zip(axes[0], scores.columns, strict=True):
        bars = axis.barh(methods.index, methods[task, metric].fillna(0), color=colours)
        axis.bar_label(
            bars, fmt=lambda score: f"{score:.1f}" if score else "", label_type="center", color="white", fontsize=8
        )
        if SOFTMAX in scores.index:
            softmax = scores.loc[SOFTMAX, (task, metric)]
            axis.axvline(softmax, color="black", linestyle="--", linewidth=1)
            axis.set_title(f"{task} (softmax {softmax:.1f})", fontsize=10)
        axis.set_xlabel(f"{metric.replace('_', ' ')} x 100", fontsize=8)
    axes[0, 0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
