"""Print runs of glue.py, imagenet.py or speech.py as a Markdown table and draw them, from their results.json files.

python recipes/results_table.py recipes/results/glue --figure recipes/results/glue.png
python recipes/results_table.py recipes/results/imagenet/finetuning --curves recipes/results/imagenet/curves.png
python recipes/results_table.py recipes/results/speech/digits --features recipes/results/speech/digits.png
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
from uptraining_report import SOFTMAX, attention_name

MAIN_METRIC = {"cola": "matthews_correlation", "mrpc": "f1", "qqp": "f1", "stsb": "spearmanr"}
"""The metric of CRT Table 2 per task; elsewhere accuracy, which is top-1 of images, or the error rate of words."""
ERROR_RATE = "wer"
ZERO_SHOT = ", before training"


def main(argv: list[str] | None = None) -> None:
    """Run the program.

    Args:
        argv: Command line without the program's name; None takes it from ``sys.argv``.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of results.json files, searched recursively")
    parser.add_argument("--figure", type=Path, help="PNG or SVG to write, a bar per run")
    parser.add_argument("--curves", type=Path, help="PNG or SVG to write, loss and metric against optimizer steps")
    parser.add_argument("--features", type=Path, help="PNG or SVG to write, the metric against numbers of features")
    arguments = parser.parse_args(argv)
    paths = sorted(arguments.folder.rglob("*.json"))
    if not paths:
        parser.error(f"there is no results.json of a training recipe in {arguments.folder}")
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    scores, deviations = collect(results), collect(results, "std")
    main_scores = scores[[(task, metric) for task, metric in scores.columns if metric == main_metric(task, scores)]]
    table = scores.map("{:.1f}".format).where(scores.notna(), "")
    table += deviations.map(" ± {:.1f}".format).where(deviations.notna(), "")
    table.columns = [f"{task} ({metric})" for task, metric in scores.columns]
    table["mean"] = main_scores.mean(axis=1, skipna=False).map(tenths)
    if SOFTMAX in table.index:
        right = rates_of_success(main_scores).mean(axis=1, skipna=False)
        table["share of softmax, %"] = (100 * right / right[SOFTMAX]).map(tenths)
    print(table.to_markdown(disable_numparse=True))
    print(f"\nMeans are over {', '.join(f'{task} {metric}' for task, metric in main_scores.columns)}.")
    if deviations.notna().any(axis=None):
        print("± is the standard deviation over seeds, where there are several.")
    if ERROR_RATE in main_scores.columns.get_level_values("metric"):
        print("Fewer errors are better; the share of softmax is that of 100 minus the error rate.")
    if arguments.figure:
        draw(main_scores, arguments.figure)
    if arguments.curves:
        draw_curves(results, arguments.curves)
    if arguments.features:
        draw_features(results, arguments.features)


def tenths(number: float) -> str:
    """Return a number as the table shows it, and nothing for NaN."""
    return "" if math.isnan(number) else f"{number:.1f}"


def main_metric(task: str, scores: pd.DataFrame) -> str:
    """Return the metric of a task that counts."""
    found = [metric for metric in ("top1", ERROR_RATE) if (task, metric) in scores.columns]
    return found[0] if found else MAIN_METRIC.get(task, "accuracy")


def rates_of_success(main_scores: pd.DataFrame) -> pd.DataFrame:
    """Return the main scores with error rates turned into 100 minus them, so that more is better everywhere."""
    return main_scores.apply(lambda column: 100 - column if column.name[1] == ERROR_RATE else column)


def task_of(result: dict[str, Any]) -> str:
    """Return the task, with the size of its images."""
    size = result.get("arguments", {}).get("image_size")
    return result["task"] + (f", {size} px" if size else "")


def collect(results: list[dict[str, Any]], summary: str = "mean") -> pd.DataFrame:
    """Average the runs of each method and task over seeds.

    Args:
        results: Contents of results.json files; a run with a twin counts for both.
        summary: ``"mean"``, or ``"std"`` for the sample standard deviation, which is NaN for a single run.

    Returns:
        Metrics x 100, one row per method (softmax first) and one column per (task, metric).
    """
    rows = []
    for result in results:
        kinds = ((attention_name(result), "metrics", ""), (attention_name(result), "initial_metrics", ZERO_SHOT))
        for name, metrics, when in (*kinds, (SOFTMAX, "softmax_metrics", "")):
            found = result.get(metrics, {})
            rows += [(name, task_of(result), metric + when, 100 * value) for metric, value in found.items()]
    runs = pd.DataFrame(rows, columns=["attention", "task", "metric", "score"])
    groups = runs.groupby(["attention", "task", "metric"])["score"]
    scores = groups.agg(summary).unstack(["task", "metric"]).sort_index(axis=1)
    return scores.loc[sorted(scores.index, key=place)]


def place(name: str) -> tuple[bool, bool, str, int]:
    """Return the sort key of a row: softmax, FAVOR+, FAVOR++, others, by features; controls come last."""
    kind = name.partition(", M = ")[0]
    return (
        not name.startswith(SOFTMAX),
        "alone" in name or name.endswith("values"),
        kind.replace("++", "~"),
        features_of(name),
    )


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


def draw_curves(results: list[dict[str, Any]], path: Path) -> None:
    """Draw training loss and main metric against optimizer steps, a column per task; a method has one colour.

    Args:
        results: Contents of results.json files.
        path: PNG or SVG to write.
    """
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(task_of(result) for result in results))
    names = sorted({attention_name(result) for result in results}, key=place)
    figure, axes = plt.subplots(2, len(tasks), figsize=(4.6 * len(tasks) + 3.2, 6.4), sharex="col", squeeze=False)
    lines = {}
    for column, task in enumerate(tasks):
        of_task = [result for result in results if task_of(result) == task]
        metric = main_metric(task, collect(of_task))
        for result in of_task:
            name = attention_name(result)
            style = {"color": "black" if name == SOFTMAX else f"C{names.index(name)}", "linewidth": 1.4, "alpha": 0.85}
            history = result["history"]
            steps = [entry["completed_steps"] for entry in history]
            (lines[name],) = axes[0, column].plot(steps, [entry["train_loss"] for entry in history], **style)
            scores = [result.get("initial_metrics", {}), *history]
            points = [(step, 100 * s[metric]) for step, s in zip([0, *steps], scores, strict=True) if metric in s]
            axes[1, column].plot(*zip(*points, strict=True), **style)
        axes[0, column].set_title(task, fontsize=10)
        axes[1, column].set_xlabel("optimizer steps")
        axes[0, column].set_ylabel("training loss, nats")
        axes[1, column].set_ylabel(f"{metric.replace('_', ' ')} x 100")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    ordered = [name for name in names if name in lines]
    figure.tight_layout(rect=(0, 0, 1 - 2.6 / figure.get_figwidth(), 1))
    figure.legend([lines[name] for name in ordered], ordered, loc="center right", frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def draw_features(results: list[dict[str, Any]], path: Path) -> None:
    """Draw the main metric against the number of features, right after the conversion and after training.

    There is a row of panels per task. Points are means over seeds, and bars their sample standard deviations; what has
    no number of features is a dashed line.

    Args:
        results: Contents of results.json files.
        path: PNG or SVG to write.
    """
    import matplotlib.pyplot as plt

    scores, deviations = collect(results), collect(results, "std").fillna(0.0)
    tasks = list(dict.fromkeys(task_of(result) for result in results))
    counts = sorted({count for name in scores.index if (count := features_of(name))})
    kinds = [kind for kind in dict.fromkeys(name.partition(", M = ")[0] for name in scores.index) if kind != SOFTMAX]
    whens = {"right after the conversion": ZERO_SHOT, "after training": ""}
    figure, axes = plt.subplots(len(tasks), 2, figsize=(9.6, 3.4 * len(tasks) + 0.6), squeeze=False)
    lines = {}
    for row, task in zip(axes, tasks, strict=True):
        metric = main_metric(task, scores.xs(task, axis=1, drop_level=False).dropna(axis=1, how="all"))
        for axis, (title, when) in zip(row, whens.items(), strict=True):
            for name in [name for name in scores.index if (task, metric + when) in scores.columns]:
                kind, count = name.partition(", M = ")[0], features_of(name)
                score = scores.loc[name, (task, metric + when)]
                colour = "black" if kind == SOFTMAX else f"C{kinds.index(kind)}"
                if not count and not math.isnan(score):
                    lines[kind] = axis.axhline(score, color=colour, linestyle="--", linewidth=1)
                elif kind not in lines or lines[kind].axes is not axis:
                    own = [other for other in scores.index if other.partition(", M = ")[0] == kind]
                    columns = (frame.loc[own, (task, metric + when)] for frame in (scores, deviations))
                    lines[kind] = axis.errorbar(
                        [features_of(other) for other in own], *columns, color=colour, marker="o", capsize=3
                    )[0]
            axis.set_title(f"{task}, {title}", fontsize=10)
            axis.set_xscale("log", base=2)
            axis.set_xticks(counts, [str(count) for count in counts])
            axis.minorticks_off()
            axis.set_xlabel("random features per head, M")
            axis.set_ylabel(f"{metric.replace('_', ' ')} x 100")
            axis.grid(alpha=0.3)
    figure.tight_layout(rect=(0, 0, 1 - 2.3 / figure.get_figwidth(), 1))
    figure.legend(lines.values(), lines.keys(), loc="center right", frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def features_of(name: str) -> int:
    """Return the number of features that the name of an attention ends with, 0 for one without."""
    return int(name.partition(", M = ")[2] or 0)


if __name__ == "__main__":
    main()
