"""What each stage of training is worth, for each kind of features: runs of glue.py of equal length, as a table.

For example ``python recipes/ablation.py --teacher SOFTMAX_FOLDER --steps 300 --num_features 64 --exact_window 64
--config configs/glue/documents.yaml --train_file TRAIN_JSONL --validation_file TEST_JSONL``. All arguments that are
not this program's own go to glue.py. A run that is finished is not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import glue
import pandas as pd
from glue_data import GlueDataError
from results_table import MAIN_METRIC
from tqdm.auto import tqdm
from uptraining import RESULTS_FILE, ModelError

from hf_favorpp import FavorppError
from hf_favorpp.training.results import describe_run, write_results

ENDS = (1, 1)
"""First and last tokens that every query sees beside a window."""


@dataclass(frozen=True)
class Method:
    """A kind of attention.

    Attributes:
        title: In tables.
        options: Of glue.py.
        learns: Whether its projections are learnable.
    """

    title: str
    options: tuple[str, ...]
    learns: bool = False


METHODS = {
    "favor+": Method("FAVOR+", ("--attention", "favor+", "--preconditioning", "none")),
    "published": Method("FAVOR++ as published", ("--attention", "favor++", "--preconditioning", "none")),
    "preconditioned": Method("preconditioned", ("--attention", "favor++", "--statistics", "calibrated")),
    "learnt": Method(
        "preconditioned, learnable",
        ("--attention", "favor++", "--statistics", "calibrated", "--learnable", "projections"),
        learns=True,
    ),
    "window": Method("window of equal cost alone", ("--attention", "none")),
}
TRAININGS = ("zero-shot", "uptrain", "transfer", "transfer+uptrain", "distil+uptrain", "all")
"""``all`` is a third each of transfer, distillation, and the task with the teacher's logits; ``distil+uptrain`` the
same without the transfer, a half each."""
KD_WEIGHT = 0.5


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the program.

    Args:
        argv: Command line without the program's name; None takes it from ``sys.argv``.

    Returns:
        What the file of results holds.
    """
    arguments, of_glue = parse(argv)
    path = arguments.output_json or arguments.output_dir / "ablation.json"
    if not arguments.report_only:
        write_results(path, run_all(arguments, of_glue))
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    table = tabulate(results)
    title = f"{results['task']}, {results['metric']} x 100, {results['steps']} optimizer steps in every run"
    print(f"\n{title}; softmax {results['softmax']:.1f}\n")
    print(table.map(lambda score: "" if pd.isna(score) else f"{score:.1f}").to_markdown(disable_numparse=True))
    if arguments.figure is not None:
        draw(results, table, arguments.figure)
    return results


def parse(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Read the command line.

    Args:
        argv: Without the program's name; None takes it from ``sys.argv``.

    Returns:
        This program's own arguments, and the words for glue.py.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="folder of the softmax model of the task, made by glue.py")
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps of each run, all stages together")
    parser.add_argument("--num_features", type=int, default=64, help="random features per head")
    parser.add_argument("--exact_window", type=int, default=0, help="tokens per block that are exact beside features")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--trainings", nargs="+", default=list(TRAININGS), choices=TRAININGS)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/ablation"), help="receives every run")
    parser.add_argument("--output_json", type=Path, help="None is OUTPUT_DIR/ablation.json")
    parser.add_argument("--figure", type=Path, help="PNG or SVG to write")
    parser.add_argument("--report_only", action="store_true", help="print and draw output_json, run nothing")
    arguments, of_glue = parser.parse_known_args(argv)
    if arguments.steps < len(TRAININGS) // 2:
        parser.error(f"--steps must be at least {len(TRAININGS) // 2}, got {arguments.steps}")
    return arguments, of_glue


def run_all(arguments: argparse.Namespace, of_glue: list[str]) -> dict[str, Any]:
    """Run what is not finished, and gather everything.

    Args:
        arguments: This program's own.
        of_glue: Those of glue.py.

    Returns:
        JSON-able content.
    """
    cells = [
        (name, training)
        for name in arguments.methods
        for training in arguments.trainings
        if METHODS[name].learns or training not in ("transfer", "transfer+uptrain", "all")
    ]
    runs = []
    for name, training in tqdm(cells, "runs"):
        folder = arguments.output_dir / f"{name}-{training}".replace("+", "-")
        finished = folder / RESULTS_FILE
        if finished.is_file():
            result = json.loads(finished.read_text(encoding="utf-8"))
        else:
            result = glue.main([*of_glue, *options_of(name, training, arguments), "--output_dir", str(folder)])
        stages = {stage: result[stage]["steps"] for stage in ("transfer", "distil") if stage in result}
        runs.append({
            "method": name,
            "training": training,
            "metrics": result["metrics"],
            "steps": {**stages, "task": result["completed_steps"]},
            "seconds": result["wall_time_s"] + sum(result[stage]["seconds"] for stage in stages),
            "command": result["command"],
        })
    teacher = json.loads(Path(arguments.teacher, RESULTS_FILE).read_text(encoding="utf-8"))
    metric = MAIN_METRIC.get(result["task"], "accuracy")
    own = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    return {
        "task": result["task"],
        "metric": metric,
        "steps": arguments.steps,
        "num_features": arguments.num_features,
        "exact_window": arguments.exact_window,
        "softmax": 100 * teacher["metrics"][metric],
        "runs": runs,
        **describe_run(own),
    }


def options_of(name: str, training: str, arguments: argparse.Namespace) -> list[str]:
    """Return the options of glue.py that make a run what it is.

    Args:
        name: Key of :data:`METHODS`.
        training: Of :data:`TRAININGS`.
        arguments: This program's own.

    Returns:
        Words of a command line.
    """
    features, window, steps = arguments.num_features, arguments.exact_window, arguments.steps
    words = ["--teacher", arguments.teacher, *METHODS[name].options]
    if name == "window":
        window += features
    else:
        words += ["--num_features", str(features)]
    if window:
        words += ["--exact_window", str(window)]
    if arguments.exact_window:
        words += ["--exact_ends", *map(str, ENDS)]
    half, third = steps // 2, steps // 3
    transfer, distil, task = {
        "zero-shot": (0, 0, 0),
        "uptrain": (0, 0, steps),
        "transfer": (steps, 0, 0),
        "transfer+uptrain": (half, 0, steps - half),
        "distil+uptrain": (0, half, steps - half),
        "all": (third, third, steps - 2 * third),
    }[training]
    words += ["--transfer_steps", str(transfer), "--distil_steps", str(distil), "--max_train_steps", str(task)]
    return words + (["--kd_weight", str(KD_WEIGHT)] if distil else [])


def tabulate(results: dict[str, Any]) -> pd.DataFrame:
    """Return the scores x 100, a row per method and a column per training."""
    rows = [(run["method"], run["training"], 100 * run["metrics"][results["metric"]]) for run in results["runs"]]
    table = pd.DataFrame(rows, columns=["method", "training", "score"]).pivot(
        index="method", columns="training", values="score"
    )
    table = table.reindex(index=[name for name in METHODS if name in table.index])
    table = table.reindex(columns=[training for training in TRAININGS if training in table.columns])
    return table.rename(index={name: method.title for name, method in METHODS.items()})


def draw(results: dict[str, Any], table: pd.DataFrame, path: Path) -> None:
    """Draw a group of bars per method, one per training, and softmax as a dashed line.

    Args:
        results: Content of the file.
        table: Of :func:`tabulate`.
        path: PNG or SVG to write.
    """
    import matplotlib.pyplot as plt

    colours = ("#999999", "#56B4E9", "#E69F00", "#009E73", "#0072B2", "#D55E00")  # Okabe and Ito's
    figure, axis = plt.subplots(figsize=(9.6, 4.2), layout="constrained")
    of_columns = [colours[TRAININGS.index(training)] for training in table.columns]
    table.plot.bar(ax=axis, color=of_columns, width=0.8, rot=12)
    axis.axhline(results["softmax"], color="black", linestyle="--", linewidth=1, label="softmax, the teacher")
    lowest = min(table.min().min(), results["softmax"])
    axis.set_ylim(max(0.0, lowest - 0.25 * (results["softmax"] - lowest) - 2))
    axis.set_xlabel("")
    axis.set_ylabel(f"{results['metric'].replace('_', ' ')} x 100")
    axis.set_title(f"{results['task']}, {results['steps']} optimizer steps in every run", fontsize=10)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    try:
        main()
    except (GlueDataError, ModelError, FavorppError, FloatingPointError) as error:
        sys.exit(f"error: {error}")
