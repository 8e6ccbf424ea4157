"""Figure 4 of the Performer's paper: error of the output of attention by projections, features and their number.

For example ``python recipes/performer_figure4.py --config configs/features/performer_figure4.yaml``. Queries, keys and
values of one head are normal: the paper calls its input appropriately normalised and does not say how, so there is a
panel for each standard deviation of queries and keys. Features are counted, not projections: M trigonometric features
are the cosines and sines of M / 2 projections. FAVOR++ is drawn beside what the paper has. Choromanski et al. 2021,
arXiv:2009.14794, Figure 4 and Section 4.2.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev, variance
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from command_line import flag, parse_arguments, require_at_least, require_positive
from performer_report import COLOURS, GREY, Claim, FigureArguments, finish, require_even, use_threads
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from tqdm.auto import tqdm

from hf_favorpp import favorpp_attention
from hf_favorpp.features.projection import draw_projections

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Method(NamedTuple):
    """One curve.

    Attributes:
        kind: Of features, a key of the colours.
        kernel: What the library calls it.
        projection: Of :func:`hf_favorpp.features.projection.draw_projections`.
        features_per_projection: 2 where a projection has a cosine and a sine.
    """

    kind: str
    kernel: str
    projection: str
    features_per_projection: int = 1


METHODS = {
    "trigonometric, iid": Method("trigonometric", "trig", "iid", 2),
    "trigonometric, orthogonal": Method("trigonometric", "trig", "orthogonal", 2),
    "positive, iid": Method("positive", "favor+", "iid"),
    "positive, orthogonal": Method("positive", "favor+", "orthogonal"),
    "FAVOR++, orthogonal": Method("FAVOR++", "favor++", "orthogonal"),
}
PAIRS = {
    "orthogonal projections are better than iid ones, positive features": ("positive, orthogonal", "positive, iid"),
    "orthogonal projections are better than iid ones, trigonometric features": (
        "trigonometric, orthogonal",
        "trigonometric, iid",
    ),
    "positive features are better than trigonometric ones, iid": ("positive, iid", "trigonometric, iid"),
    "positive features are better than trigonometric ones, orthogonal": (
        "positive, orthogonal",
        "trigonometric, orthogonal",
    ),
    "FAVOR++ is better than positive features, orthogonal (not in the paper)": (
        "FAVOR++, orthogonal",
        "positive, orthogonal",
    ),
}
"""What is claimed: at each number of features the first is below the second."""


@dataclass
class Figure4Arguments(FigureArguments):
    """Draw Figure 4 of the Performer's paper."""

    num_features: list[int] = field(
        default_factory=lambda: [8, 16, 32, 64, 128, 192, 256], metadata={"help": "M, random features, even."}
    )
    stds: list[float] = field(
        default_factory=lambda: [1.0, 0.7, 0.5],
        metadata={
            "help": "Standard deviations of queries and keys, a panel each; logits are divided by d^1/2 besides."
        },
    )
    length: int = flag("L, queries and keys.", 4096)
    head_dim: int = flag("d, of queries, keys and values.", 16)
    draws: int = flag("Draws of queries, keys, values and projections.", 15)
    output_json: str = flag("File of results.", "outputs/features/performer_figure4.json")
    figure: str = flag("PNG or SVG to draw.", "outputs/features/performer_figure4.png")

    def __post_init__(self) -> None:
        """Check sizes.

        Raises:
            ValueError: One of them is too small, or an odd number of features.
        """
        super().__post_init__()
        require_at_least(self, num_features=2, length=1, head_dim=1, draws=2)
        require_even("num_features", self.num_features)
        require_positive(self, "stds")


def projections_of(method: Method, num_features: int, head_dim: int, seed: int, draw: int) -> Tensor:
    """Draw the projections that give a method so many features.

    Args:
        method: The method.
        num_features: M.
        head_dim: d.
        seed: Of the program.
        draw: Which draw.

    Returns:
        omega, (1, M, d), or (1, M / 2, d) for trigonometric features.
    """
    count = num_features // method.features_per_projection
    return draw_projections(1, count, head_dim, projection=method.projection, seed=seed, draw_index=draw)


def output_error(query: Tensor, key: Tensor, value: Tensor, exact: Tensor, omega: Tensor, method: Method) -> float:
    """Return the mean squared error of the output of attention, over all its entries.

    Args:
        query: (1, 1, L, d), float64.
        key: Likewise.
        value: Likewise.
        exact: Softmax attention of them.
        omega: Projections.
        method: The method.

    Returns:
        The error.
    """
    output = favorpp_attention(query, key, value, omega, kernel=method.kernel, preconditioning="none")
    return (output - exact).square().mean().item()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the program.

    Args:
        argv: Command line without the program's name; None takes it from ``sys.argv``.

    Returns:
        What the file of results holds.
    """
    args = parse_arguments(Figure4Arguments, argv)
    use_threads(args)
    bar = tqdm(total=len(args.stds) * args.draws * len(METHODS) * len(args.num_features), desc="errors")
    panels = [measure(args, std, bar) for std in args.stds]
    bar.close()
    measured = {"num_features": args.num_features, "panels": panels}
    return finish(args, measured, check(args.num_features, panels), draw_figure(args, panels))


def measure(args: Figure4Arguments, std: float, bar: tqdm[None]) -> dict[str, Any]:
    """Measure all methods with all numbers of features on the same queries, keys and values.

    Args:
        args: Of the program.
        std: Standard deviation of queries and keys.
        bar: Told of each error.

    Returns:
        ``std``; ``mse`` of each method, by number of features and draw; ``mse_of_mean_value``, by draw, of the mean of
        the values in place of attention, the control.
    """
    errors: dict[str, list[list[float]]] = {name: [[] for _ in args.num_features] for name in METHODS}
    means: list[float] = []
    for draw in range(args.draws):
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + draw)
        shape = (3, 1, 1, args.length, args.head_dim)
        query, key, value = torch.randn(shape, generator=generator, dtype=torch.float64)
        query, key = std * query, std * key
        exact = scaled_dot_product_attention(query, key, value)
        means.append((value.mean(-2, keepdim=True) - exact).square().mean().item())
        for name, method in METHODS.items():
            for place, count in enumerate(args.num_features):
                omega = projections_of(method, count, args.head_dim, args.seed, draw)
                errors[name][place].append(output_error(query, key, value, exact, omega, method))
                bar.update()
    return {"std": std, "mse": errors, "mse_of_mean_value": means}


def check(counts: Sequence[int], panels: Sequence[dict[str, Any]]) -> list[Claim]:
    """Check what the paper says of the figure, by means over draws.

    Args:
        counts: Numbers of features.
        panels: As :func:`measure` returned them.

    Returns:
        The claims.
    """
    claims = []
    for statement, (better, worse) in PAIRS.items():
        shown, wins = [], []
        for panel in panels:
            gaps = [_gap(*draws) for draws in zip(panel["mse"][better], panel["mse"][worse], strict=True)]
            lower, surely, higher = (
                sum(holds) for holds in zip(*((g < 0, g < -2, g > 2) for g, _ in gaps), strict=True)
            )
            shown.append(
                f"std {panel['std']:g}: lower at {lower} of {len(counts)} M, beyond two standard errors at {surely} "
                f"(higher so at {higher}), {gaps[-1][1]:.2g} times the error at M = {counts[-1]}"
            )
            wins.append(lower == len(counts))
        claims.append(Claim(statement, "; ".join(shown), all(wins)))
    shown, wins = [], []
    for panel in panels:
        control = fmean(panel["mse_of_mean_value"])
        useful = [
            f"{name} from M = {min(below)} on"
            for name in METHODS
            if (below := [count for count, e in zip(counts, panel["mse"][name], strict=True) if fmean(e) < control])
        ]
        shown.append(f"std {panel['std']:g}: {', '.join(useful) or 'none'}")
        wins.append(len(useful) == len(METHODS))
    claims.append(
        Claim("features are better than the mean of the values (not in the paper)", "; ".join(shown), all(wins))
    )
    return claims


def _gap(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return by how many standard errors the mean of one exceeds the other's, and their ratio."""
    error = math.sqrt((variance(one) + variance(other)) / len(one))
    return (fmean(one) - fmean(other)) / max(error, sys.float_info.min), fmean(one) / fmean(other)


def draw_figure(args: Figure4Arguments, panels: Sequence[dict[str, Any]]) -> Figure:
    """Draw the errors over the number of features, means and standard deviations over draws.

    Args:
        args: Of the program.
        panels: As :func:`measure` returned them.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(panels) + 2.8, 4.4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    lines: dict[str, Any] = {}
    for axis, panel in zip(axes, panels, strict=True):
        for name, method in METHODS.items():
            means = [fmean(draws) for draws in panel["mse"][name]]
            deviations = [stdev(draws) for draws in panel["mse"][name]]
            # a bar that would reach below 0 has no lower end on a logarithmic axis
            below = [each if each < mean else 0.0 for mean, each in zip(means, deviations, strict=True)]
            orthogonal = method.projection == "orthogonal"
            lines[name] = axis.errorbar(
                args.num_features,
                means,
                [below, deviations],
                color=COLOURS[method.kind],
                linestyle="-" if orthogonal else "--",
                marker="o" if orthogonal else "s",
                markerfacecolor=COLOURS[method.kind] if orthogonal else "white",
                markersize=5,
                capsize=2.5,
                elinewidth=1,
            )
        control = fmean(panel["mse_of_mean_value"])
        lines["mean of the values (control)"] = axis.axhline(control, color=GREY, linestyle=":", linewidth=1.5)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(args.num_features, [str(count) for count in args.num_features], fontsize=8)
        axis.minorticks_off()
        axis.set_xlabel("random features, M")
        axis.set_title(f"queries and keys of standard deviation {panel['std']:g}", fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean squared error of the output")
    figure.legend(list(lines.values()), list(lines), loc="outside center right", frameon=False, fontsize=9)
    figure.suptitle(
        f"L = {args.length}, d = {args.head_dim}; mean ± deviation of {args.draws} draws; "
        "M trigonometric features are of M / 2 projections",
        fontsize=11,
    )
    return figure


if __name__ == "__main__":
    main()
