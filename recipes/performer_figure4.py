"""Figure 4 of the Performer's paper: error of the output of attention by projections, features and their number.

For example ``python recipes/performer_figure4.py --config configs/features/performer_figure4.yaml``. Queries, keys and
values of one head are standard normal. Features are counted, not projections: M trigonometric features are the cosines
and sines of M / 2 projections. FAVOR++ is drawn beside what the paper has. Choromanski et al. 2021, arXiv:2009.14794,
Figure 4 and Section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from command_line import flag, parse_arguments
from performer_report import COLOURS, Claim, FigureArguments, finish, require_even, use_threads
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
        self.require_at_least(num_features=2, length=1, head_dim=1, draws=2)
        require_even("num_features", self.num_features)


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


def output_error(
    query: Tensor, key: Tensor, value: Tensor, exact: Tensor, omega: Tensor, method: Method
) -> tuple[float, float]:
    """Return the mean squared error of the output of attention, and the share of queries far off.

    Args:
        query: (1, 1, L, d), float64.
        key: Likewise.
        value: Likewise.
        exact: Softmax attention of them.
        omega: Projections.
        method: The method.

    Returns:
        Mean over entries of the squared difference, and the share of queries that alone have more than 100 times the
        median query's: those whose denominator is near 0.
    """
    output = favorpp_attention(query, key, value, omega, kernel=method.kernel, preconditioning="none")
    squared = (output - exact).square().mean(-1)
    return squared.mean().item(), (squared > 100 * squared.median()).double().mean().item()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the program.

    Args:
        argv: Command line without the program's name; None takes it from ``sys.argv``.

    Returns:
        What the file of results holds.
    """
    args = parse_arguments(Figure4Arguments, argv)
    use_threads(args)
    errors: dict[str, list[list[float]]] = {name: [[] for _ in args.num_features] for name in METHODS}
    far_off: dict[str, list[list[float]]] = {name: [[] for _ in args.num_features] for name in METHODS}
    means: list[float] = []
    bar = tqdm(total=args.draws * len(METHODS) * len(args.num_features), desc="errors")
    for draw in range(args.draws):
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + draw)
        shape = (3, 1, 1, args.length, args.head_dim)
        query, key, value = torch.randn(shape, generator=generator, dtype=torch.float64)
        exact = scaled_dot_product_attention(query, key, value)
        means.append((value.mean(-2, keepdim=True) - exact).square().mean().item())
        for name, method in METHODS.items():
            for place, count in enumerate(args.num_features):
                omega = projections_of(method, count, args.head_dim, args.seed, draw)
                error, share = output_error(query, key, value, exact, omega, method)
                errors[name][place].append(error)
                far_off[name][place].append(share)
                bar.update()
    bar.close()
    measured = {
        "num_features": args.num_features,
        "mse": errors,
        "share_far_off": {name: [fmean(each) for each in shares] for name, shares in far_off.items()},
        "mse_of_mean_value": means,
    }
    return finish(args, measured, check(args.num_features, errors, means), draw_figure(args, errors, fmean(means)))


def check(counts: Sequence[int], errors: dict[str, list[list[float]]], means: Sequence[float]) -> list[Claim]:
    """Check what the paper says of the figure, by means and medians over draws.

    Args:
        counts: Numbers of features.
        errors: Of each method, by number of features, by draw.
        means: The error of the mean of the values in place of attention, by draw.

    Returns:
        The claims.
    """
    claims = []
    for statement, (better, worse) in PAIRS.items():
        shown, wins = [], []
        for title, average in (("means", fmean), ("medians", median)):
            below = _below(average, errors[better], errors[worse])
            wins.append(all(below))
            missing = [str(count) for count, holds in zip(counts, below, strict=True) if not holds]
            shown.append(
                f"{title}: {sum(below)} of {len(counts)}" + (f", not at {', '.join(missing)}" if missing else "")
            )
        ratio = fmean(errors[better][-1]) / fmean(errors[worse][-1])
        shown.append(f"{ratio:.2g} times the mean error at M = {counts[-1]}")
        claims.append(Claim(statement, "; ".join(shown), all(wins)))
    control = fmean(means)
    for name in METHODS:
        useful = [count for count, draws in zip(counts, errors[name], strict=True) if fmean(draws) < control]
        shown = [f"from M = {min(useful)} on" if useful else f"at no M, {fmean(errors[name][-1]):.2g} at the last"]
        statement = f"{name}: better than the mean of the values, {control:.2g} (not in the paper)"
        claims.append(Claim(statement, shown[0], bool(useful)))
    return claims


def _below(
    average: Callable[[Sequence[float]], float], better: list[list[float]], worse: list[list[float]]
) -> list[bool]:
    return [average(one) < average(other) for one, other in zip(better, worse, strict=True)]


def draw_figure(args: Figure4Arguments, errors: dict[str, list[list[float]]], control: float) -> Figure:
    """Draw the errors over the number of features, means and standard deviations over draws.

    Args:
        args: Of the program.
        errors: Of each method, by number of features, by draw.
        control: The error of the mean of the values.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4.6), layout="constrained")
    axis = figure.subplots()
    for name, method in METHODS.items():
        orthogonal = method.projection == "orthogonal"
        axis.errorbar(
            args.num_features,
            [fmean(draws) for draws in errors[name]],
            [stdev(draws) for draws in errors[name]],
            color=COLOURS[method.kind],
            linestyle="-" if orthogonal else "--",
            marker="o" if orthogonal else "s",
            markerfacecolor=COLOURS[method.kind] if orthogonal else "white",
            markersize=5,
            capsize=2.5,
            elinewidth=1,
            label=name,
        )
    axis.axhline(control, color="black", linestyle=":", linewidth=1.2, label="mean of the values (control)")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", nonpositive="clip")
    axis.set_xticks(args.num_features, [str(count) for count in args.num_features])
    axis.minorticks_off()
    axis.set_xlabel("random features, M (trigonometric: of M / 2 projections)")
    axis.set_ylabel("mean squared error of the output")
    axis.set_title(
        f"L = {args.length}, d = {args.head_dim}, standard normal input; mean ± deviation of {args.draws} draws",
        fontsize=10,
    )
    axis.grid(alpha=0.3)
    figure.legend(loc="outside center right", frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    main()
