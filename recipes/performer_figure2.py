"""Figure 2 of the Performer's paper: trigonometric against positive features, by angle and length of two vectors.

For example ``python recipes/performer_figure2.py --config configs/features/performer_figure2.yaml``. Two vectors of
length l with the angle phi between them have the softmax kernel exp(l^2 cos phi). Closed forms of the mean squared
errors of its estimates are drawn beside estimates by random features. Features are counted, not projections: M
features are M projections where they are positive, and M / 2 where each has a cosine and a sine, or exp(w.x) and
exp(-w.x). Choromanski et al. 2021, arXiv:2009.14794, Figure 2 and Lemma 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from command_line import flag, parse_arguments, require_at_least
from performer_figure2_plot import draw
from performer_report import Claim, FigureArguments, finish, require_even, use_threads
from torch import Tensor
from tqdm.auto import tqdm

from hf_favorpp.features.baselines import trig_features
from hf_favorpp.features.gerf import quadrature
from hf_favorpp.features.projection import draw_projections

KINDS = {"trigonometric": "trig", "positive": "favor+", "hyperbolic": "favor+hyperbolic"}
"""Kinds of features, and what the library calls them."""
FEATURES_PER_PROJECTION = {"trigonometric": 2, "positive": 1, "hyperbolic": 2}
STANDARD_ERRORS = 5
NO_ERROR = 1e-12
"""Mean squared error below which all is rounding."""
SMALL_KERNEL = (0.75, 0.99)
"""Angles, in units of pi, at which the claims look where the kernel is small."""


@dataclass
class Figure2Arguments(FigureArguments):
    """Draw Figure 2 of the Performer's paper."""

    num_features: int = flag("M, random features of an estimate, even.", 64)
    head_dim: int = flag("d, at least 2.", 16)
    length: float = flag("l, of both vectors, where the angle alone varies.", 1.0)
    max_length: float = flag("Largest l of the map.", 2.0)
    grid: int = flag("Angles and lengths of the map.", 240)
    angles: int = flag("Angles at which estimates are drawn.", 25)
    draws: int = flag("Estimates at each angle.", 4000)
    output_json: str = flag("File of results.", "outputs/features/performer_figure2.json")
    figure: str = flag("PNG or SVG to draw.", "outputs/features/performer_figure2.png")

    def __post_init__(self) -> None:
        """Check sizes.

        Raises:
            ValueError: One of them is too small, or an odd number of features.
        """
        super().__post_init__()
        require_at_least(self, num_features=2, head_dim=2, grid=2, angles=2, draws=2)
        require_even("num_features", [self.num_features])
        for name in ("length", "max_length"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name} must be positive and finite, got {getattr(self, name)}.")


def log_mse(kind: str, angle: Tensor, length: Tensor, num_features: int) -> Tensor:
    r"""Return the logarithm of the mean squared error of an estimate of exp(x.y) by independent projections.

    With m projections, :math:`z = |x + y|^2`, :math:`\Delta = |x - y|^2` and :math:`SM = e^{x^\top y}` it is

    .. math:: \tfrac{1}{2m} e^z SM^{-2} (1 - e^{-\Delta})^2 \;\text{(trigonometric)}, \qquad
        \tfrac1m e^z SM^2 (1 - e^{-z}) \;\text{(positive)}, \qquad
        \tfrac{1}{2m} e^z SM^2 (1 - e^{-z})^2 \;\text{(hyperbolic)}

    Args:
        kind: A key of :data:`KINDS`.
        angle: phi, radians, any shape.
        length: l, |x| = |y|, broadcastable to it.
        num_features: M; m is half of it where a projection has two features.

    Returns:
        The logarithm, same shape and dtype; -inf where the estimate has no error.

    Source:
        Choromanski et al. 2021, arXiv:2009.14794, Lemma 2.
    """
    # 1 + cos phi and 1 - cos phi would cancel near pi and 0
    sum_sq_norm, difference_sq_norm = ((2 * length * f(angle / 2)).square() for f in (torch.cos, torch.sin))
    log_kernel = length.square() * angle.cos()
    log_projections = math.log(num_features / FEATURES_PER_PROJECTION[kind])
    if kind == "trigonometric":
        error = 2 * torch.log(-torch.expm1(-difference_sq_norm)) - math.log(2)
        return sum_sq_norm - 2 * log_kernel + error - log_projections
    error = torch.log(-torch.expm1(-sum_sq_norm))
    if kind == "hyperbolic":
        error = 2 * error - math.log(2)
    return sum_sq_norm + 2 * log_kernel + error - log_projections


def estimates(
    kind: str, x: Tensor, y: Tensor, num_features: int, draws: int, seed: int, draw_index: int = 0
) -> Tensor:
    """Estimate exp(x.y) by random features of independent projections, again and again.

    Args:
        kind: A key of :data:`KINDS`.
        x: Vectors, (N, d), float64.
        y: Vectors, (N, d), float64.
        num_features: M.
        draws: How many times.
        seed: Of the projections.
        draw_index: Which draws of that seed.

    Returns:
        The estimates, (draws, N), float64.
    """
    projections = num_features // FEATURES_PER_PROJECTION[kind]
    shape = (draws, projections, x.shape[-1])
    omega = draw_projections(*shape, projection="iid", seed=seed, draw_index=draw_index).to(x.dtype)
    if kind == "trigonometric":
        products = trig_features(x, omega) * trig_features(y, omega)
        return products.sum(-1) / projections * torch.exp((x.square() + y.square()).sum(-1) / 2)
    nodes, log_weights = quadrature(KINDS[kind], omega)
    exponents = (x + y) @ nodes.mT + log_weights.unsqueeze(-2)
    return torch.exp(torch.logsumexp(exponents, dim=-1) - (x.square() + y.square()).sum(-1) / 2)


def pairs(angle: Tensor, length: float, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return vectors of one length with given angles between them.

    Args:
        angle: (N,), radians.
        length: Of all.
        head_dim: d.

    Returns:
        x and y, (N, d) each.
    """
    x, y = angle.new_zeros(2, len(angle), head_dim)
    x[:, 0] = length
    y[:, 0], y[:, 1] = length * angle.cos(), length * angle.sin()
    return x, y


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the program.

    Args:
        argv: Command line without the program's name; None takes it from ``sys.argv``.

    Returns:
        What the file of results holds.
    """
    args = parse_arguments(Figure2Arguments, argv)
    use_threads(args)
    # Centres of cells: at both ends one kind of features has no error at all, and the ratio is 0 or infinite.
    centres = (torch.arange(args.grid, dtype=torch.float64) + 0.5) / args.grid
    angle, lengths = math.pi * centres, args.max_length * centres
    grid = {kind: log_mse(kind, angle, lengths[:, None], args.num_features) for kind in KINDS}
    slices = {
        kind: log_mse(kind, angle, torch.tensor(args.length, dtype=torch.float64), args.num_features) for kind in KINDS
    }
    drawn = simulate(args)
    measured = {
        "angle": angle.tolist(),
        "log_mse": {kind: values.tolist() for kind, values in slices.items()},
        "drawn": drawn,
    }
    ratio = (grid["trigonometric"] - grid["positive"]) / math.log(10)
    figure = draw(args.length, args.num_features, angle, lengths, ratio, slices, drawn)
    return finish(args, measured, check(args, ratio, slices, drawn), figure)


def simulate(args: Figure2Arguments) -> dict[str, Any]:
    """Estimate the kernel at some angles.

    Args:
        args: Of the program.

    Returns:
        The angles and the kernel, and of each kind of features mean, standard deviation and mean squared error of the
        estimates with its standard error.
    """
    angle = torch.linspace(0, math.pi, args.angles, dtype=torch.float64)
    x, y = pairs(angle, args.length, args.head_dim)
    kernel = torch.exp((x * y).sum(-1))
    drawn: dict[str, Any] = {"angle": angle.tolist(), "kernel": kernel.tolist()}
    per_chunk = 50  # a chunk of all features is tens of MiB
    chunks = [min(per_chunk, args.draws - start) for start in range(0, args.draws, per_chunk)]
    bar = tqdm(total=len(KINDS) * len(chunks), desc="estimates")
    for kind in KINDS:
        found = []
        for number, chunk in enumerate(chunks):
            found.append(estimates(kind, x, y, args.num_features, chunk, args.seed, number))
            bar.update()
        estimate = torch.cat(found)
        squared = (estimate - kernel).square()
        drawn[kind] = {
            "mean": estimate.mean(0).tolist(),
            "std": estimate.std(0).tolist(),
            "mse": squared.mean(0).tolist(),
            "mse_standard_error": (squared.std(0) / math.sqrt(args.draws)).tolist(),
        }
    bar.close()
    return drawn


def check(args: Figure2Arguments, ratio: Tensor, slices: dict[str, Tensor], drawn: dict[str, Any]) -> list[Claim]:
    """Check what the paper says of the figure.

    Args:
        args: Of the program.
        ratio: log10 of the errors' ratio over lengths and angles.
        slices: Logarithms of the errors over angles at one length.
        drawn: As :func:`simulate` returned it.

    Returns:
        The claims.
    """
    lengths = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    claims = []
    for kind, falls in (("positive", True), ("trigonometric", False)):
        shown, holds = [], True
        for share in SMALL_KERNEL:
            angle = torch.tensor(share * math.pi, dtype=torch.float64)
            mse = log_mse(kind, angle, lengths, args.num_features).exp()
            shown.append(f"phi = {share} pi: {', '.join(f'{each:.2g}' for each in mse.tolist())}")
            holds &= bool((mse.diff() < 0).all() if falls else (mse.diff() > 0).all())
        verb = "falls" if falls else "grows"
        statement = f"the error of {kind} features {verb} as the kernel goes to 0 (MSE at l = 1, 2, 3)"
        claims.append(Claim(statement, "; ".join(shown), holds))
    middle = torch.tensor(0.6 * math.pi, dtype=torch.float64)
    mse = log_mse("positive", middle, lengths, args.num_features).exp()
    claims.append(
        Claim(
            "that of positive features does so at any obtuse angle",
            f"phi = 0.6 pi: {', '.join(f'{each:.2g}' for each in mse.tolist())}; it takes phi > 2/3 pi",
            bool((mse.diff() < 0).all()),
        )
    )
    shares = []
    for length in (args.length, args.max_length):
        row = ratio[round(length / args.max_length * len(ratio)) - 1] if length <= args.max_length else ratio[-1]
        shares.append(1 - (row > 0).double().mean().item())
    largest = [(slices["trigonometric"] - slices["positive"])[-1].exp().item(), 10 ** ratio[-1, -1].item()]
    claims.append(
        Claim(
            "for large angles positive features are arbitrarily more accurate",
            "; ".join(
                f"l = {length:g}: better from {share:.2f} pi on, up to {most:.1g} times in the map"
                for length, share, most in zip((args.length, args.max_length), shares, largest, strict=True)
            ),
            bool((ratio[:, -1] > 0).all()),
        )
    )
    gain = torch.exp(slices["hyperbolic"] - slices["positive"])
    claims.append(
        Claim(
            "hyperbolic features are better than positive ones at equal numbers of features",
            f"{gain.min():.2g} to {gain.max():.2g} times their MSE at l = {args.length:g}",
            bool((slices["hyperbolic"] < slices["positive"]).all()),
        )
    )
    compared = [deviation for kind in KINDS for deviation in deviations(args, kind, drawn)]
    claims.append(
        Claim(
            f"Lemma 2 is what {args.draws} draws give (for phi < pi / 2 of trigonometric features only)",
            f"at most {max(compared):.1f} standard errors apart at {len(compared)} points",
            max(compared) < STANDARD_ERRORS,
        )
    )
    return claims


def deviations(args: Figure2Arguments, kind: str, drawn: dict[str, Any]) -> list[float]:
    """Return by how many standard errors what was drawn differs from Lemma 2, at angles where that can be told.

    Args:
        args: Of the program.
        kind: A key of :data:`KINDS`.
        drawn: As :func:`simulate` returned it.

    Returns:
        The deviations: not where there is no error but rounding, and for features that are log-normal not at acute
        angles, where so few of them make up the mean that a sample's own standard error is far too small.
    """
    angle, mse, error = (
        torch.tensor(values, dtype=torch.float64)
        for values in (drawn["angle"], drawn[kind]["mse"], drawn[kind]["mse_standard_error"])
    )
    exact = log_mse(kind, angle, torch.tensor(args.length, dtype=torch.float64), args.num_features).exp()
    told = (exact > NO_ERROR) & ((angle > math.pi / 2 - 1e-9) | (kind == "trigonometric"))
    deviation: list[float] = ((mse - exact).abs() / error)[told].tolist()
    return deviation


if __name__ == "__main__":
    main()
