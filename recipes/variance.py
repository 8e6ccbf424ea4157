"""The variance of every estimator of the Gaussian kernel: "Chefs' Random Tables", Figure 1 (right) and Figure 2.

``python recipes/variance.py --output_json FILE`` writes ``{regime: {method: {sigma: {"mean": .., "std": ..}}}}``, the
log-variance of one projection in nats.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pandas as pd
import torch
from command_line import flag, parse_arguments, require_at_least, require_known, require_positive
from handwritten_digits import DigitsError, load_digits, standardise
from torch import Tensor
from tqdm.auto import tqdm

from hf_favorpp import FavorppError
from hf_favorpp.features.estimators import ESTIMATORS, fit_estimator
from hf_favorpp.features.gerf import oprf_coefficient
from hf_favorpp.features.variance import gerf_log_second_moment, log_variance
from hf_favorpp.training.results import describe_run, write_results

REGIMES = ("normal", "sphere", "heterogen", "mnist")
STANDARDISED = "mnist-standardised"
"""A fifth, to see what the scale of the images does."""
ANY_SIGN = ("TrigRF", "GERF", "PoisRF", "GeomRF")
POSITIVE = ("PosRF", "OPRF", "PoisRF+", "GeomRF+")
METHODS = (*ANY_SIGN, *POSITIVE)
STYLES = {
    **dict(zip(ANY_SIGN, (("#000000", "o"), ("#009E73", "s"), ("#56B4E9", "^"), ("#D55E00", "v")), strict=True)),
    **dict(zip(POSITIVE, (("#000000", "o"), ("#009E73", "s"), ("#56B4E9", "^"), ("#D55E00", "v")), strict=True)),
}
"""Colours of Okabe and Ito, and markers, by which the lines differ without colours too."""
CLAIMS = (
    *(("GERF", "TrigRF", regime, bound) for regime, bound in (("normal", 80), ("heterogen", 125), ("mnist", 10))),
    *(("OPRF", "PosRF", regime, bound) for regime, bound in (("normal", 75), ("heterogen", 125), ("mnist", 7))),
    *(("GeomRF+", "PosRF", regime, bound) for regime, bound in (("normal", 75), ("heterogen", 125), ("mnist", 7))),
)
"""By how many nats the paper has the variance of the first below that of the second, at sigma = 1."""
AT = "1.0"
"""The sigma of the claims."""
FIGURE_1_DIM, FIGURE_1_SQ_NORM, FIGURE_1_BOUND = 64, 100.0, 60
"""OPRF over PosRF at |x + y|^2 = 100 and d = 64 (Figure 1, right)."""


@dataclass
class VarianceArguments:
    """Compute the log-variance of estimators of the Gaussian kernel on four kinds of points."""

    config: str | None = flag("YAML file of arguments; the command line wins over it.")
    data_dir: str | None = flag("Folder of MNIST's idx files; None takes the 8 x 8 digits of scikit-learn.")
    regimes: list[str] = field(default_factory=lambda: list(REGIMES), metadata={"help": "Kinds of points."})
    methods: list[str] = field(default_factory=lambda: list(METHODS), metadata={"help": "Estimators."})
    sigmas: list[float] = field(
        default_factory=lambda: [round(0.1 * step, 1) for step in range(1, 11)],
        metadata={"help": "Scales of the points."},
    )
    head_dim: int = flag("Coordinates d of the drawn points; digits have 64.", 64)
    num_points: int = flag("Queries, and as many keys, whose averaged statistics choose the parameters.", 16)
    trials: int = flag("Such sets, over all of whose pairs the mean and the standard deviation are taken.", 64)
    seed: int = flag("Of the points.", 0)
    num_threads: int | None = flag("CPU threads.")
    output_json: str = flag("Receives the log-variances.", "outputs/features/variance.json")
    claims_json: str | None = flag("Receives the paper's claims beside what was found, and how the run was made.")
    figure: str | None = flag("PNG or SVG to draw of Figure 2.")
    gain_figure: str | None = flag("PNG or SVG to draw of Figure 1, right.")

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ValueError: The message names the argument, the rule and the remedy.
        """
        require_at_least(self, head_dim=1, num_points=1, trials=1, seed=0, num_threads=1)
        require_known(self, regimes=(*REGIMES, STANDARDISED), methods=ESTIMATORS)
        require_positive(self, "sigmas")


Found = dict[str, dict[str, dict[str, dict[str, float]]]]


def main(argv: list[str] | None = None) -> Found:
    """Run the program.

    Args:
        argv: Command line without the program's name; None takes it from ``sys.argv``.

    Returns:
        What ``output_json`` holds.
    """
    args = parse_arguments(VarianceArguments, argv)
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    digits = None
    if {"mnist", STANDARDISED} & set(args.regimes):
        digits = load_digits(None if args.data_dir is None else Path(args.data_dir))
    found = measure(args, digits)
    write_results(Path(args.output_json), found)
    claims = check_claims(found)
    print(f"\n{claims.to_markdown(index=False)}")
    if args.claims_json is not None:
        write_results(Path(args.claims_json), {"claims": claims.to_dict("records"), **describe_run(asdict(args))})
    if args.figure is not None:
        draw(found, Path(args.figure))
    if args.gain_figure is not None:
        draw_gain(Path(args.gain_figure))
    return found


def measure(args: VarianceArguments, digits: Tensor | None) -> Found:
    """Compute all means and standard deviations.

    Args:
        args: Of the run.
        digits: Images as points; None without that regime.

    Returns:
        By regime, method and sigma, in nats.
    """
    found: Found = {}
    cells = [(regime, sigma) for regime in args.regimes for sigma in args.sigmas]
    for regime, sigma in tqdm(cells, "regimes x sigmas"):
        images = standardise(digits) if regime == STANDARDISED and digits is not None else digits
        generator = torch.Generator().manual_seed(args.seed)  # the same points at every scale
        values: dict[str, list[Tensor]] = {name: [] for name in args.methods}
        for _ in range(args.trials):
            x, y = draw_points(regime, args, images, generator)
            x, y = sigma * x, sigma * y
            pairs = x.unsqueeze(1), y.unsqueeze(0)
            log_kernel = -(pairs[0] - pairs[1]).square().sum(-1) / 2
            for name in args.methods:
                moment = fit_estimator(name, x, y).log_second_moment(*pairs)
                values[name].append(log_variance(moment, log_kernel).flatten())
        for name, parts in values.items():
            all_pairs = torch.cat(parts)
            of_sigma = {"mean": all_pairs.mean().item(), "std": all_pairs.std().item()}
            found.setdefault(regime, {}).setdefault(name, {})[str(float(sigma))] = of_sigma
    return found


def draw_points(
    regime: str, args: VarianceArguments, digits: Tensor | None, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw queries and keys at the scale 1.

    Args:
        regime: ``"normal"``: both N(0, I); ``"sphere"``: both uniform on the sphere of radius 1; ``"heterogen"``:
            N(0, I) and N(1, I); else images.
        args: Of the run.
        digits: The images.
        generator: CPU generator.

    Returns:
        x and y, (num_points, d), float64.
    """
    if regime in ("mnist", STANDARDISED):
        assert digits is not None
        chosen = torch.randint(len(digits), (2, args.num_points), generator=generator)
        x, y = digits[chosen]
        return x, y
    x, y = torch.randn(2, args.num_points, args.head_dim, generator=generator, dtype=torch.float64)
    if regime == "sphere":
        return torch.nn.functional.normalize(x, dim=-1), torch.nn.functional.normalize(y, dim=-1)
    return x, y + (1.0 if regime == "heterogen" else 0.0)


def check_claims(found: Found) -> pd.DataFrame:
    """Set the paper's claims beside what was found.

    Args:
        found: All log-variances.

    Returns:
        A row per claim whose regime, methods and sigma = 1 were measured, and one for Figure 1.
    """
    rows: list[tuple[str, str, float, float]] = [
        (f"{better} below {worse}", regime, bound, methods[worse][AT]["mean"] - methods[better][AT]["mean"])
        for better, worse, regime, bound in CLAIMS
        for methods in [found.get(regime, {})]
        if AT in methods.get(better, {}) and AT in methods.get(worse, {})
    ]
    u = torch.tensor([FIGURE_1_SQ_NORM], dtype=torch.float64)
    rows.append(("OPRF below PosRF", "|x + y|^2 = 100, d = 64", FIGURE_1_BOUND, oprf_gain(u, FIGURE_1_DIM).item()))
    table = pd.DataFrame(rows, columns=["claim at sigma = 1", "points", "paper, more than (nats)", "here (nats)"])
    table["holds"] = table["here (nats)"] > table["paper, more than (nats)"]
    return table.round(1)


def oprf_gain(sq_norm: Tensor, head_dim: int) -> Tensor:
    """Return log(Var PosRF / Var OPRF), A being the best for the pair.

    Args:
        sq_norm: |x + y|^2 > 0, any shape, float64.
        head_dim: d.

    Returns:
        Nats, same shape; it depends on nothing else.
    """
    zero = torch.zeros_like(sq_norm)
    oprf = gerf_log_second_moment(sq_norm, oprf_coefficient(sq_norm, head_dim), head_dim)
    return log_variance(sq_norm, zero) - log_variance(oprf, zero)


def draw(found: Found, path: Path) -> None:
    """Draw log-variance against sigma, features of any sign above and positive ones below.

    Args:
        found: All log-variances.
        path: PNG or SVG to write.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(found), figsize=(3.3 * len(found), 5.6), squeeze=False, layout="constrained")
    for column, (regime, methods) in enumerate(found.items()):
        for axis, names in ((axes[0][column], ANY_SIGN), (axes[1][column], POSITIVE)):
            for name in names:
                if name not in methods:
                    continue
                sigmas = [float(sigma) for sigma in methods[name]]
                means = torch.tensor([entry["mean"] for entry in methods[name].values()])
                spread = torch.tensor([entry["std"] for entry in methods[name].values()])
                colour, marker = STYLES[name]
                axis.plot(sigmas, means, color=colour, marker=marker, markersize=3.5, linewidth=1.2, label=name)
                axis.fill_between(sigmas, means - spread, means + spread, color=colour, alpha=0.15, linewidth=0)
            axis.set_xlabel(r"$\sigma$")
            axis.grid(alpha=0.3)
        axes[0][column].set_title(regime)
    for row, kind in enumerate(("any sign", "positive")):
        axes[row][0].set_ylabel(f"log-variance (nats), {kind}")
        if axes[row][-1].get_legend_handles_labels()[0]:
            axes[row][-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_gain(path: Path) -> None:
    """Draw how far the variance of OPRF is below that of PosRF against |x + y|^2.

    Args:
        path: PNG or SVG to write.
    """
    import matplotlib.pyplot as plt

    u = torch.linspace(0.1, FIGURE_1_SQ_NORM, 400, dtype=torch.float64)
    figure, axis = plt.subplots(figsize=(4.8, 3.6), layout="constrained")
    for head_dim, colour, line in ((16, "#D55E00", ":"), (64, "#009E73", "-"), (256, "#0072B2", "--")):
        gain = oprf_gain(u, head_dim)
        axis.plot(u, gain, color=colour, linestyle=line, label=f"d = {head_dim}")
    axis.set_xlabel(r"$\|x + y\|^2$")
    axis.set_ylabel("log(variance of PosRF / of OPRF) (nats)")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    try:
        main()
    except (DigitsError, FavorppError) as error:
        sys.exit(f"error: {error}")
