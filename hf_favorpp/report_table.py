"""The result of an approximation report: numbers per head, as a table, as JSON, as a figure."""

import importlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from statistics import fmean, median
from typing import Any

GOOD_ERROR, FAIR_ERROR = 0.25, 0.5
"""Largest relative output errors of the verdicts ``"good"`` and ``"fair"``."""
NUM_WORST = 5
"""Heads that ``print`` names."""


@dataclass(frozen=True)
class HeadReport:
    r"""What was measured at one head, over the real tokens of the batch.

    Attributes:
        layer: Index of the attention layer in the model, as in ``FavorppConfig.layers``.
        name: Dotted name of the attention module within the model.
        head: Index of the head.
        psi: Mean of :math:`|x'_i + y'_j|^2` over the pairs of a sequence, mean over sequences, after the
            preconditioning in use: what the variance of random features grows with.
        norm_x: Root mean square of |x|, the queries times the root of the scaling, before preconditioning.
        norm_y: As ``norm_x``, of the keys.
        entropy: Of the softmax weights, mean over queries, nats.
        max_entropy: The entropy of uniform weights, mean over queries, nats.
        predicted_log_variance: Logarithm of Var[estimate] / exp(x.y)^2 at the mean pair, in closed form for M
            independent projections of equal weight. Projections chosen by a calibration (``candidates`` > 1) do
            better, and so do orthogonal ones. NaN for kernels other than the positive estimators of softmax.
        error: |out - exact| / |exact|, Frobenius norms, of the output of the head given the inputs that it has in the
            softmax model.
        uniform_error: The same of the plain mean of the values, which ignores queries and keys.
        verdict: ``"good"``, ``"fair"``, ``"poor"``, ``"worse than uniform"`` or ``"not finite"``, see :func:`judge`.
    """

    layer: int
    name: str
    head: int
    psi: float
    norm_x: float
    norm_y: float
    entropy: float
    max_entropy: float
    predicted_log_variance: float
    error: float
    uniform_error: float
    verdict: str


@dataclass(frozen=True)
class ApproximationReport:
    """What :func:`hf_favorpp.approximation_report` measured; ``print`` shows it as a table.

    Attributes:
        heads: One record per head of each converted layer, in the order of the layers.
        layer_errors: |out - exact| / |exact| over all heads of each converted layer.
        layer_uniform_errors: The same of the plain mean of the values.
        end_to_end: The converted model against the softmax model: ``"logits_distance"`` (relative) and
            ``"argmax_agreement"`` (share, of models with more than one class) where the output has ``logits``, else
            ``"hidden_distance"`` (relative) and ``"pooled_cosine"`` (of the mean over tokens, mean over sequences)
            of ``last_hidden_state``. Tokens that are not real stay out. Empty where the output has neither.
        num_tokens: Real tokens in the batch.
        backends: Which implementations computed the converted attention, see :mod:`hf_favorpp.attention.backends`.
    """

    heads: tuple[HeadReport, ...]
    layer_errors: tuple[float, ...]
    layer_uniform_errors: tuple[float, ...]
    end_to_end: dict[str, float]
    num_tokens: int
    backends: tuple[str, ...]

    @property
    def layers(self) -> tuple[tuple[HeadReport, ...], ...]:
        """The heads of each converted layer."""
        names = dict.fromkeys(head.name for head in self.heads)
        return tuple(tuple(head for head in self.heads if head.name == name) for name in names)

    @property
    def layer_verdicts(self) -> tuple[str, ...]:
        """The verdict on each converted layer, by the errors over all its heads."""
        return tuple(judge(*errors) for errors in zip(self.layer_errors, self.layer_uniform_errors, strict=True))

    def __str__(self) -> str:
        errors_of = ("best head", "median", "worst head", "all heads", "uniform")
        layers: list[tuple[str, ...]] = [("layer", "module", *errors_of, "entropy", "psi", "verdict")]
        measured = zip(self.layers, self.layer_errors, self.layer_uniform_errors, self.layer_verdicts, strict=True)
        for heads, error, uniform, verdict in measured:
            of_heads = sorted((head.error for head in heads), key=_nan_last)
            errors = [f"{number:.2f}" for number in (of_heads[0], median(of_heads), of_heads[-1], error, uniform)]
            entropy = f"{fmean(head.entropy for head in heads):.2f}/{heads[0].max_entropy:.2f}"
            psi = f"{fmean(head.psi for head in heads):.1f}"
            layers.append((str(heads[0].layer), heads[0].name, *errors, entropy, psi, verdict))
        worst: list[tuple[str, ...]] = [
            ("layer", "head", "error", "uniform", "entropy", "psi", "log variance", "verdict")
        ]
        for head in sorted(self.heads, key=lambda head: _nan_last(head.error), reverse=True)[:NUM_WORST]:
            errors = [f"{number:.2f}" for number in (head.error, head.uniform_error)]
            entropy = f"{head.entropy:.2f}/{head.max_entropy:.2f}"
            variance = f"{head.predicted_log_variance:.1f}"
            worst.append((
                str(head.layer),
                str(head.head),
                *errors,
                entropy,
                f"{head.psi:.1f}",
                variance,
                head.verdict,
            ))
        parts = [
            f"Relative output error of each layer against softmax, {self.num_tokens} tokens, computed by "
            f"backend {' and '.join(self.backends)}",
            *_aligned("rlrrrrrrrl", layers),
            "",
            "Worst heads",
            *_aligned("rrrrrrrl", worst),
        ]
        if self.end_to_end:
            numbers = [(name, f"{number:.4f}") for name, number in self.end_to_end.items()]
            parts += ["", "Converted model against softmax model", *_aligned("lr", numbers)]
        return "\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values.

        Returns:
            A dictionary of lists, dictionaries, strings and numbers; None where a number is not finite, which JSON
            cannot say.
        """
        fields: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return fields

    def to_pandas(self) -> Any:
        """Return the heads as a table.

        Returns:
            A ``pandas.DataFrame``, one row per head, columns named as the attributes of :class:`HeadReport`.

        Raises:
            ImportError: pandas is not installed.
        """
        return _optional("pandas", "to_pandas()").DataFrame([asdict(head) for head in self.heads])

    def plot(self, path: str | PathLike[str] | None = None) -> Any:
        """Draw the relative error of every head beside that of uniform attention, on one colour scale from 0 to 1.

        Args:
            path: File to write, in the format of its suffix (png, pdf, svg); None writes none.

        Returns:
            The ``matplotlib.figure.Figure``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figures = _optional("matplotlib.figure", "plot()")
        rows, columns = len(self.layers), max(len(heads) for heads in self.layers)
        size = (2 * (0.42 * columns + 0.7) + 0.9, 0.32 * rows + 1.3)
        figure = figures.Figure(figsize=(max(size[0], 5.5), max(size[1], 2.2)), dpi=200, layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for axis, field, title in zip(
            axes, ("error", "uniform_error"), ("Converted", "Uniform attention"), strict=True
        ):
            table = [[getattr(head, field) for head in heads] for heads in self.layers]
            padded = [row + [math.nan] * (columns - len(row)) for row in table]
            image = axis.imshow(padded, vmin=0, vmax=1, cmap="viridis", aspect="auto")
            axis.set_facecolor("0.85")  # shows where there is no number
            for row, numbers in enumerate(table):
                for column, number in enumerate(numbers):
                    colour = "white" if number < 0.6 else "black"
                    axis.text(column, row, f"{number:.2f}", ha="center", va="center", fontsize=7, color=colour)
            axis.set(title=title, xlabel="head", xticks=range(columns))
            axis.set_yticks(range(rows), [str(heads[0].layer) for heads in self.layers])
            axis.tick_params(length=0)
        axes[0].set_ylabel("layer")
        figure.colorbar(image, ax=list(axes), extend="max", fraction=0.04, pad=0.015, label="relative output error")
        if path is not None:
            figure.savefig(path)
        return figure


def judge(error: float, uniform_error: float) -> str:
    """Judge a relative output error.

    Args:
        error: |out - exact| / |exact| of the converted attention.
        uniform_error: The same of the plain mean of the values.

    Returns:
        ``"good"`` up to 0.25, whatever uniform attention does; beyond it ``"worse than uniform"`` where that does as
        well, else ``"fair"`` up to 0.5 and ``"poor"``. ``"not finite"`` where either number is not.
    """
    if not (math.isfinite(error) and math.isfinite(uniform_error)):
        return "not finite"
    if error <= GOOD_ERROR:
        return "good"
    if error >= uniform_error:
        return "worse than uniform"
    return "fair" if error <= FAIR_ERROR else "poor"


def _nan_last(number: float) -> float:
    return math.inf if math.isnan(number) else number


def _aligned(sides: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """Pad the columns of a table to the left (``"l"``) or to the right (``"r"``)."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, sides, widths, strict=True)
        lines.append("  ".join(cell.ljust(width) if side == "l" else cell.rjust(width) for cell, side, width in cells))
    return [line.rstrip() for line in lines]


def _optional(module: str, purpose: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ImportError(f"{purpose} needs {name}: pip install 'hf-favorpp[recipes]', or {name} alone.") from error
