"""Kernel regression on UCI data by random features of the Gaussian kernel: "Chefs' Random Tables", Table 1.

``python recipes/kernel_regression.py --data_dir DIR --output_json FILE`` writes ``{"accuracy": {dataset: {method:
percent}}, "average": {method: percent}}``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from command_line import flag, parse_arguments, require_at_least, require_known, require_positive
from crt_table import METHODS, beside
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot
from tqdm.auto import tqdm
from uci_tables import CATEGORICAL, Encoding, Split, UciError, read_table, split_table

from hf_favorpp import FavorppError
from hf_favorpp.features.estimators import ESTIMATORS, Estimator, draw_omega, fit_estimator
from hf_favorpp.training.results import describe_run, write_results

EXACT = "exact"
"""The kernel itself, which features can at best come near."""


@dataclass
class RegressionArguments:
    """Classify by kernel regression with random features, the width of the kernel tuned on validation rows."""

    config: str | None = flag("YAML file of arguments; the command line wins over it.")
    data_dir: str | None = flag("Folder of the eight CSV files.")
    datasets: list[str] = field(default_factory=lambda: list(CATEGORICAL), metadata={"help": "Which of them."})
    methods: list[str] = field(
        default_factory=lambda: list(METHODS),
        metadata={"help": "Kinds of features; `exact` is the kernel itself."},
    )
    num_features: int = flag("Projections, or counts, M.", 128)
    sigmas: list[float] = field(
        default_factory=lambda: np.logspace(-2, 1, 19).round(4).tolist(),
        metadata={"help": "Factors of the scaled data to choose from, the width of the kernel being 1."},
    )
    encoding: Encoding = field(default="onehot", metadata={"help": "Of columns that hold names."})
    projection: Literal["orthogonal", "iid"] = field(
        default="orthogonal", metadata={"help": "Of exponential features."}
    )
    seeds: int = flag("Splits and draws, over which accuracies are averaged.", 10)
    first_seed: int = flag("The first of them.", 0)
    num_threads: int | None = flag("CPU threads.")
    output_json: str = flag("Receives the accuracies.", "outputs/features/kernel_regression.json")
    details_json: str | None = flag("Receives standard deviations, the sigmas chosen, and how the run was made.")
    figure: str | None = flag("PNG or SVG to draw.")

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ValueError: The message names the argument, the rule and the remedy.
        """
        if self.data_dir is None:
            raise ValueError("--data_dir is missing: give the folder of the eight CSV files.")
        require_at_least(self, num_features=1, seeds=1, first_seed=0, num_threads=1)
        require_known(self, datasets=tuple(CATEGORICAL), methods=(*ESTIMATORS, EXACT))
        require_positive(self, "sigmas")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the program.

    Args:
        argv: Command line without the program's name; None takes it from ``sys.argv``.

    Returns:
        What ``output_json`` holds.
    """
    args = parse_arguments(RegressionArguments, argv)
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    scores = run(args)
    accuracy = {
        name: {method: float(np.mean(values["test"])) for method, values in row.items()}
        for name, row in scores.items()
    }
    average = {method: float(np.mean([row[method] for row in accuracy.values()])) for method in args.methods}
    results = {"accuracy": accuracy, "average": average}
    write_results(Path(args.output_json), results)
    if args.details_json is not None:
        write_results(Path(args.details_json), {"scores": scores, **describe_run(asdict(args))})
    table = pd.DataFrame({**accuracy, "average": average}).T
    cells, summary = beside(table)
    print(
        f"\ntest accuracy in percent (the paper's), M = {args.num_features}, mean of {args.seeds} splits and draws\n"
    )
    print(cells.to_markdown(disable_numparse=True))
    print(f"\n{summary}")
    if args.figure is not None:
        draw(table, Path(args.figure))
    return json.loads(Path(args.output_json).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def run(args: RegressionArguments) -> dict[str, dict[str, dict[str, Any]]]:
    """Measure every data set and method.

    Args:
        args: Of the run.

    Returns:
        By data set and method: accuracies on the test rows by seed in percent, and the sigma that was chosen.
    """
    assert args.data_dir is not None
    tables = {name: read_table(Path(args.data_dir), name) for name in args.datasets}  # refuse before hours of work
    scores: dict[str, dict[str, dict[str, Any]]] = {}
    steps = tqdm(total=len(tables) * len(args.methods) * args.seeds, desc="methods x seeds")
    for name, (columns, labels) in tables.items():
        validation = {method: np.zeros((args.seeds, len(args.sigmas))) for method in args.methods}
        test = {method: np.zeros((args.seeds, len(args.sigmas))) for method in args.methods}
        for index in range(args.seeds):
            seed = args.first_seed + index
            split = split_table(columns, labels, name, args.encoding, seed)
            for method in args.methods:
                validation[method][index], test[method][index] = accuracies(split, method, seed, args).T
                steps.update()
        scores[name] = {}
        for method in args.methods:
            best = int(validation[method].mean(0).argmax())
            scores[name][method] = {"test": test[method][:, best].tolist(), "sigma": args.sigmas[best]}
    steps.close()
    return scores


def accuracies(split: Split, method: str, seed: int, args: RegressionArguments) -> NDArray[np.float64]:
    """Return the accuracies on validation and on test rows for every sigma, in percent.

    Args:
        split: Of the data.
        method: An estimator's name, or ``"exact"``.
        seed: Of the projections.
        args: Of the run.

    Returns:
        (sigmas, 2).
    """
    queries, keys = torch.cat((split.validation, split.test)), split.train
    values = one_hot(split.labels[0], split.num_classes).double()
    classes = torch.cat(split.labels[1:])
    sq_distances = torch.cdist(queries, keys).square() if method == EXACT else None
    found = np.zeros((len(args.sigmas), 2))
    for at, sigma in enumerate(args.sigmas):
        if sq_distances is not None:
            scores = torch.softmax(-(sigma**2) / 2 * sq_distances, -1) @ values
        else:
            x, y = sigma * queries, sigma * keys
            estimator = fit_estimator(method, x, y)
            omega = draw_omega(estimator, args.num_features, y.shape[-1], projection=args.projection, seed=seed)
            scores = regression(estimator, omega, x, y, values)
        correct = (scores.argmax(-1) == classes).double() * 100
        found[at] = [part.mean().item() for part in correct.split([len(split.validation), len(split.test)])]
    return found


def regression(estimator: Estimator, omega: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return sum_j K(q_i, k_j) v_j up to a positive factor of each query, K estimated by features.

    Features may lie beyond the range of float64: each is scaled by its largest value among the keys, which the query's
    side pays back, and each query by its own largest.

    Args:
        estimator: Fitted.
        omega: Of the estimator, (M, d).
        queries: (L, d).
        keys: (N, d).
        values: (N, C).

    Returns:
        (L, C).
    """
    of_keys = estimator.log_features(keys, omega, of_keys=True)
    largest = of_keys.log_magnitude.amax(0)
    summary = (of_keys.factor * (of_keys.log_magnitude - largest).exp()).mT @ values
    of_queries = estimator.log_features(queries, omega)
    weights = of_queries.log_magnitude + largest
    return (of_queries.factor * (weights - weights.amax(-1, keepdim=True)).exp()) @ summary


def draw(table: pd.DataFrame, path: Path) -> None:
    """Draw a group of bars for each data set.

    Args:
        table: Accuracies in percent, a row per data set.
        path: PNG or SVG to write.
    """
    import matplotlib.pyplot as plt

    colours = ("#999999", "#56B4E9", "#0072B2", "#F0E442", "#E69F00", "#D55E00", "#CC79A7", "#009E73", "#000000")
    figure, axis = plt.subplots(figsize=(11, 4.2), layout="constrained")
    table.plot.bar(ax=axis, color=colours[: len(table.columns)], width=0.85, rot=0)
    axis.set_ylabel("test accuracy (%)")
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    try:
        main()
    except (UciError, FavorppError) as error:
        sys.exit(f"error: {error}")
