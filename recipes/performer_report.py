"""What the programs of the Performer's figures share: arguments, the claims that they check, and where results go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from command_line import flag, require_at_least
from tabulate import tabulate

from hf_favorpp.training.results import describe_run, write_results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers tell apart; those of FAVOR+ and FAVOR++ as fidelity.py has them.
COLOURS = {
    "trigonometric": "#CC79A7",
    "positive": "#56B4E9",
    "hyperbolic": "#009E73",
    "FAVOR++": "#D55E00",
    "FAVOR++, centred": "#E69F00",
    "FAVOR++, full": "#0072B2",
}
GREY = "#555555"


@dataclass
class FigureArguments:
    """Draw a figure of the Performer's paper."""

    config: str | None = flag("YAML file of arguments; the command line wins over it.")
    seed: int = flag("Of everything that is drawn.", 0)
    num_threads: int | None = flag("CPU threads; None keeps those of the environment.")
    output_json: str = flag("File of results.", "outputs/features/performer.json")
    figure: str = flag("PNG or SVG to draw.", "outputs/features/performer.png")

    def __post_init__(self) -> None:
        """Check what no library does.

        Raises:
            ValueError: The message names the argument, the rule and the value.
        """
        require_at_least(self, seed=0, num_threads=1)
        if Path(self.figure).suffix not in (".png", ".svg"):
            raise ValueError(f"--figure must end with .png or .svg, got {self.figure!r}.")


@dataclass(frozen=True)
class Claim:
    """A statement of the paper and what was measured of it.

    Attributes:
        statement: What is claimed.
        measured: What was found, in words and numbers.
        holds: Whether it was found everywhere that was looked.
    """

    statement: str
    measured: str
    holds: bool


def require_even(name: str, counts: Iterable[int]) -> None:
    """Require numbers of features that both a cosine and a sine of each projection add up to.

    Args:
        name: Of the argument.
        counts: Numbers of features.

    Raises:
        ValueError: One of them is odd.
    """
    if odd := [count for count in counts if count % 2]:
        raise ValueError(
            f"--{name} must be even, because a projection has two trigonometric features, its cosine and its sine; "
            f"got {odd[0]}."
        )


def use_threads(args: FigureArguments) -> None:
    """Let torch use as many threads as the arguments say."""
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)


def finish(args: FigureArguments, measured: dict[str, Any], claims: Sequence[Claim], figure: Figure) -> dict[str, Any]:
    """Write the file of results and the figure, and print the claims as a Markdown table.

    Args:
        args: Of the program.
        measured: What the figure shows, JSON-able.
        claims: What was checked.
        figure: The figure.

    Returns:
        What the file holds.
    """
    results = {**measured, "claims": [asdict(claim) for claim in claims], **describe_run(asdict(args))}
    write_results(Path(args.output_json), results)
    path = Path(args.figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    rows = [[claim.statement, claim.measured, "yes" if claim.holds else "no"] for claim in claims]
    print(tabulate(rows, ["claim", "measured", "holds"], tablefmt="github", disable_numparse=True))
    print(f"\nwritten: {args.output_json}\ndrawn: {args.figure}")
    return results
