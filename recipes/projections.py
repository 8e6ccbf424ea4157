"""What kinds of projections are worth: errors of the softmax kernel beside independent ones, and the time to draw.

For example ``python recipes/projections.py --config configs/features/projections.yaml``.

The estimate of exp(x.y) is off by a factor that depends on x + y alone. Its error is averaged over all directions of
x + y, and not by sampling: E exp(a.s) = 0F1(; d/2; |a|^2 |s|^2 / 4) for s uniform on a sphere, so that the mean square
of a sum of features is a sum over pairs of projections. In that, the square of one feature has its closed form: seen
from all directions, a row is as good as normal if its norm is chi(d). Only pairs of different projections are left to
the draws. Errors are against the exact kernel and so include bias.

Averaged so, all projections with the same angles and norms are alike, as those of one orthogonal block are. What tells
them apart is the bias for x + y on a coordinate axis, where directions that are not uniform show; that is sampled.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch
from command_line import flag, parse_arguments, require_at_least, require_positive
from scipy.special import hyp0f1
from torch import Tensor
from tqdm.auto import tqdm

from hf_favorpp import FavorppError
from hf_favorpp.features.gerf import oprf_coefficient, quadrature
from hf_favorpp.features.projection import draw_projections
from hf_favorpp.features.variance import gerf_log_second_moment, relative_variance
from hf_favorpp.rules import NORMS, PROJECTIONS
from hf_favorpp.training.results import describe_run, write_results

TITLES = {"favor+": "FAVOR+", "favor++": "OPRF"}
COLOURS = dict(zip(PROJECTIONS, ("#0072B2", "#D55E00", "#000000", "#009E73", "#CC79A7"), strict=True))
"""Okabe and Ito's, which colour-blind readers tell apart."""
MARKERS = dict(zip(PROJECTIONS, (("o", 9), ("^", 6), ("s", 5), ("x", 5), ("+", 10)), strict=True))
"""Of sizes that let those below be seen: three lines of errors lie on each other."""
STYLES = {"chi": ("-", "chi(d)"), "sqrt_d": ("--", "sqrt(d)")}
"""Line and title of norms."""


@dataclass
class ProjectionArguments:
    """Measure the kinds of projections."""

    config: str | None = flag("YAML file of arguments; the command line wins over it.")
    head_dims: list[int] = field(
        default_factory=lambda: [4, 16, 64], metadata={"help": "Powers of two, where all norms have closed forms."}
    )
    multiples: list[int] = field(
        default_factory=lambda: [1, 2], metadata={"help": "Projections per head, in multiples of the head dimension."}
    )
    sum_sq_norms: list[float] = field(
        default_factory=lambda: [2.0, 3.0, 4.0], metadata={"help": "|x + y|^2 of the pairs of points, dimensionless."}
    )
    num_pairs: int = flag("Pairs of projections in all draws of a measurement together, about.", 300_000)
    timed_head_dims: list[int] = field(
        default_factory=lambda: [64, 128, 256], metadata={"help": "Head dimensions at which draws are timed."}
    )
    repeats: int = flag("Draws that are timed; their median is given.", 7)
    seed: int = flag("Of the projections.", 0)
    output_json: str = flag("File of results.", "outputs/features/projections.json")
    report_only: bool = flag("Print and draw output_json, measure nothing.", False)
    figure: str = flag("File to draw: png, pdf or svg.", "outputs/features/projections.png")

    def __post_init__(self) -> None:
        """Check what the library does not.

        Raises:
            ValueError: A number is out of its range, or there is no such file.
        """
        require_positive(self, "head_dims", "multiples", "timed_head_dims", "sum_sq_norms")
        if any(d < 2 or d & (d - 1) for d in self.head_dims):
            raise ValueError(f"--head_dims must be powers of two from 2 on, got {self.head_dims}.")
        if self.report_only and not Path(self.output_json).is_file():
            raise ValueError(f"--report_only needs a file of results; --output_json {self.output_json} is none.")
        require_at_least(self, num_pairs=1, repeats=1)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the program.

    Args:
        argv: Command line without the program's name; None takes it from ``sys.argv``.

    Returns:
        What the file of results holds.
    """
    args = parse_arguments(ProjectionArguments, argv)
    path = Path(args.output_json)
    if not args.report_only:
        write_results(path, measure_all(args))
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    report(results)
    draw(results, Path(args.figure))
    return results


def measure_all(args: ProjectionArguments) -> dict[str, Any]:
    """Measure errors and times, and return what the file of results holds."""
    started = time.perf_counter()
    cells = list(product(args.head_dims, args.multiples, PROJECTIONS, NORMS))
    timings = list(product(args.timed_head_dims, PROJECTIONS))
    errors: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    with tqdm(total=len(cells) + len(timings), desc="projections") as bar:
        for head_dim, multiple, projection, norms in cells:
            errors += measure(head_dim, multiple * head_dim, projection, norms, args)
            bar.update()
        for head_dim, projection in timings:
            ms = time_draw(head_dim, projection, args.repeats, args.seed)
            times.append({"projection": projection, "head_dim": head_dim, "ms_per_block": ms})
            bar.update()
    return {
        "errors": errors,
        "times": times,
        "seconds": round(time.perf_counter() - started, 1),
        **describe_run(asdict(args), ("scipy", "pandas", "matplotlib")),
    }


def measure(
    head_dim: int, num_features: int, projection: str, norms: str, args: ProjectionArguments
) -> list[dict[str, Any]]:
    """Measure errors of both estimators with one kind of projections.

    Args:
        head_dim: d.
        num_features: M.
        projection: Of :data:`hf_favorpp.rules.PROJECTIONS`.
        norms: Of :data:`hf_favorpp.rules.NORMS`.
        args: Of the program.

    Returns:
        A row for each estimator and |x + y|^2: "mse_ratio" to independent projections with chi(d) norms,
        "standard_error" of that over the draws, "bias" of the estimate, relative and averaged over directions, and
        "axis_bias", the same for x + y on a coordinate axis, averaged over the axes and with its standard error.
    """
    num_draws = max(2, args.num_pairs // (num_features * (num_features - 1) // 2))
    omega = draw_projections(
        num_draws, num_features, head_dim, projection=projection, norms=norms, seed=args.seed
    ).double()
    rows = []
    for kernel, sum_sq_norm in product(TITLES, args.sum_sq_norms):
        psi = torch.tensor(sum_sq_norm, dtype=torch.float64)
        A = oprf_coefficient(psi, head_dim) if kernel == "favor++" else torch.zeros_like(psi)
        log_second_moment = gerf_log_second_moment(psi, A, head_dim)
        nodes, log_weights = quadrature("favor++", omega, A.expand(num_draws, 1))
        estimate = mean_factor(nodes, log_weights, sum_sq_norm).sum(-1)
        if norms == "chi":  # their mean, without the noise of its heavy tail
            squares = log_second_moment.exp() / num_features
        else:
            squares = mean_factor(2 * nodes, 2 * log_weights - sum_sq_norm / 2, sum_sq_norm).sum(-1)
        along = nodes * sum_sq_norm**0.5 - sum_sq_norm / 2
        on_axes = (along + log_weights.unsqueeze(-1)).exp().sum(-2).mean(-1)
        error = squares + different_pairs(nodes, log_weights, sum_sq_norm) - 2 * estimate + 1
        ratio = error / (relative_variance(log_second_moment) / num_features)
        rows.append({
            "projection": projection,
            "norms": norms,
            "head_dim": head_dim,
            "num_features": num_features,
            "estimator": TITLES[kernel],
            "sum_sq_norm": sum_sq_norm,
            "mse_ratio": float(ratio.mean()),
            "standard_error": float(ratio.std()) / num_draws**0.5,
            "bias": 0.0 if norms == "chi" else float(estimate.mean()) - 1,
            "axis_bias": float(on_axes.mean()) - 1,
            "axis_bias_error": float(on_axes.std()) / num_draws**0.5,
            "draws": num_draws,
        })
    return rows


def mean_factor(nodes: Tensor, log_weights: Tensor, sum_sq_norm: float) -> Tensor:
    """Return E exp(b + v.s - |s|^2 / 2) over all directions of s = x + y, each feature's part of estimate / kernel.

    Args:
        nodes: v, (..., d), float64.
        log_weights: b, (...), nats.
        sum_sq_norm: |s|^2.

    Returns:
        Means, (...).
    """
    spread = hyp0f1(nodes.shape[-1] / 2, nodes.square().sum(-1).numpy() * (sum_sq_norm / 4))
    return (log_weights - sum_sq_norm / 2).exp() * torch.from_numpy(spread)


def different_pairs(nodes: Tensor, log_weights: Tensor, sum_sq_norm: float) -> Tensor:
    """Return what pairs of different projections contribute to the mean square of the estimate over the exact kernel.

    Args:
        nodes: (draws, M, d), float64.
        log_weights: (draws, M), nats.
        sum_sq_norm: |x + y|^2.

    Returns:
        One number per draw, (draws,).
    """
    one, other = torch.triu_indices(nodes.shape[1], nodes.shape[1], offset=1)
    log_products = log_weights[:, one] + log_weights[:, other] - sum_sq_norm / 2
    return 2 * mean_factor(nodes[:, one] + nodes[:, other], log_products, sum_sq_norm).sum(-1)


def time_draw(head_dim: int, projection: str, repeats: int, seed: int, num_heads: int = 12) -> float:
    """Return the median time of a draw in ms per block of head_dim rows; each of ``num_heads`` heads has two."""
    samples = []
    for index in range(repeats + 1):
        started = time.perf_counter()
        draw_projections(num_heads, 2 * head_dim, head_dim, projection=projection, seed=seed, draw_index=index)
        samples.append(time.perf_counter() - started)
    return 1000 * median(samples[1:]) / (2 * num_heads)


def error_table(rows: list[dict[str, Any]], value: str = "mse_ratio") -> pd.DataFrame:
    """Return means over |x + y|^2 of a value: a row per projection and norms, a column per estimator and d."""
    frame = pd.DataFrame(rows).assign(
        column=[f"{row['estimator']}, d = {row['head_dim']}" for row in rows],
        row=[f"{row['projection']}, {STYLES[row['norms']][1]}" for row in rows],
    )
    order = {name: list(dict.fromkeys(frame[name])) for name in ("row", "column")}
    columns = sorted(order["column"], key=lambda title: title.partition(",")[0])  # stable: d stays in order
    table = frame.pivot_table(index="row", columns="column", values=value).loc[order["row"], columns]
    return table.rename_axis(index="projection, norms", columns=None)


def time_table(times: list[dict[str, Any]]) -> pd.DataFrame:
    """Return milliseconds per block, a row per projection and a column per head dimension."""
    table = pd.DataFrame(times).pivot_table(index="projection", columns="head_dim", values="ms_per_block")
    return table.loc[list(PROJECTIONS)].rename(columns=lambda d: f"d = {d}").rename_axis(columns=None)


def report(results: dict[str, Any]) -> None:
    """Print tables of errors, of biases and of times."""
    errors = results["errors"]
    for multiple in sorted({row["num_features"] // row["head_dim"] for row in errors}):
        chosen = [row for row in errors if row["num_features"] == multiple * row["head_dim"]]
        of_features = f"M = {title_of(multiple)}"
        largest = max(row["standard_error"] for row in chosen)
        print(f"\nmean squared error / that of iid with chi norms, {of_features}; standard error <= {largest:.3f}\n")
        print(error_table(chosen).to_markdown(floatfmt=".2f"))
        largest = max(row["axis_bias_error"] for row in chosen)
        print(f"\nbias where x + y lies on a coordinate axis, {of_features}; standard error <= {largest:.3f}\n")
        print(error_table(chosen, "axis_bias").to_markdown(floatfmt=".3f"))
    print("\nmilliseconds to draw a block of d rows, chi norms\n")
    print(time_table(results["times"]).to_markdown(floatfmt=".2f"))


def title_of(multiple: int) -> str:
    """Return a number of features as a multiple of d."""
    return "d" if multiple == 1 else f"{multiple} d"


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw ratios of errors and times against the head dimension.

    Args:
        results: Content of the file.
        path: File to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 4.2), layout="constrained")
    *of_errors, of_times = figure.subplots(1, 3)
    frame = pd.DataFrame(results["errors"])
    multiple = min(frame["num_features"] // frame["head_dim"])
    frame = frame[frame["num_features"] == multiple * frame["head_dim"]]
    for axis, title in zip(of_errors, TITLES.values(), strict=True):
        curves = frame[frame["estimator"] == title].groupby(["projection", "norms"], sort=False)
        for (projection, norms), points in curves:
            line, name = STYLES[norms]
            means = points.groupby("head_dim")[["mse_ratio", "standard_error"]].mean()
            axis.errorbar(
                means.index,
                means["mse_ratio"],
                means["standard_error"],
                linestyle=line,
                label=f"{projection}, {name}",
                **look(projection),
            )
        axis.axhline(1, color="#999999", linewidth=0.8, zorder=0)
        axis.set_ylabel("mean squared error / that of iid, chi(d)")
        axis.set_title(f"{title}, M = {title_of(multiple)}", fontsize=10)
    for projection, points in pd.DataFrame(results["times"]).groupby("projection", sort=False):
        of_times.plot(points["head_dim"], points["ms_per_block"], **look(projection))
    of_times.set_yscale("log")
    of_times.set_ylabel("time to draw a block of d rows, ms")
    of_times.set_title("chi(d) norms", fontsize=10)
    for axis, dims in zip((*of_errors, of_times), (frame, frame, pd.DataFrame(results["times"])), strict=True):
        ticks = sorted(set(dims["head_dim"]))
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.set_xlabel("head dimension d")
        axis.grid(alpha=0.3)
    handles, titles = of_errors[0].get_legend_handles_labels()
    figure.legend(handles, titles, loc="outside center right", frameon=False, fontsize=8, title="projection, norms")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def look(projection: str) -> dict[str, Any]:
    """Return colour and marker of a kind of projections."""
    marker, size = MARKERS[projection]
    colour = COLOURS[projection]
    return {"color": colour, "marker": marker, "markersize": size, "markerfacecolor": "none", "linewidth": 1.2}


if __name__ == "__main__":
    try:
        main()
    except FavorppError as error:
        sys.exit(f"error: {error}")
