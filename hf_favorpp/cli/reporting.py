"""What the report of a model looks like."""

import math
from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel

from hf_favorpp.cli.data import Batch, Batches
from hf_favorpp.cli.failures import CommandError
from hf_favorpp.cli.inspection import facts_table, new_table
from hf_favorpp.hub.measured import WEIGHTS_KEY, find_results, weights_digest
from hf_favorpp.hub.origin import RESULTS_FILE
from hf_favorpp.report import approximation_report
from hf_favorpp.report_table import FAIR_ERROR, GOOD_ERROR, NUM_WORST, ApproximationReport, HeadReport
from hf_favorpp.training.results import describe_run, write_results

BAR = 10
"""Characters of an error of 1."""
STYLES = {"good": "green", "fair": "cyan", "poor": "yellow", "worse than uniform": "red", "not finite": "bold red"}
END_TO_END = {
    "logits_distance": "relative distance of the logits",
    "argmax_agreement": "same prediction, share",
    "hidden_distance": "relative distance of the hidden states",
    "pooled_cosine": "cosine of the pooled hidden states",
}


def measure(model: PreTrainedModel, batches: Batches) -> ApproximationReport:
    """Compare a model with softmax.

    Args:
        model: A converted model.
        batches: One batch.

    Returns:
        The report.
    """
    batch: Batch = next(iter(batches))
    return approximation_report(model, batch)


def record_fidelity(folder: Path, found: ApproximationReport) -> None:
    """Put an approximation report into results.json, beside what a run wrote there of the same weights.

    Args:
        folder: Of the checkpoint that was measured.
        found: The report.
    """
    results = find_results(folder) or describe_run({})
    measured = {WEIGHTS_KEY: weights_digest(folder), "fidelity": found.to_dict()}
    write_results(folder / RESULTS_FILE, {**results, **measured})


def draw(found: ApproximationReport, path: Path) -> None:
    """Draw the errors of all heads.

    Args:
        found: The report.
        path: File to write; its folder is made.

    Raises:
        CommandError: matplotlib is not installed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found.plot(path)
    except ImportError as error:
        raise CommandError("--plot needs matplotlib: pip install 'hf-favorpp[cli]'.") from error


def show_report(
    found: ApproximationReport, name: str, batches: Batches, per_head: bool, plot: Path | None
) -> Iterator[RenderableType]:
    """Draw a report.

    Args:
        found: The report.
        name: Of the model.
        batches: What it was measured on.
        per_head: All heads, or the worst ones.
        plot: Where the figure is.

    Yields:
        Tables.
    """
    facts = facts_table()
    facts.add_row("model", name)
    used = f"{batches.used} of {batches.available} {batches.kind}, {found.num_tokens} tokens"
    facts.add_row("measured on", f"{used}; backend {' and '.join(found.backends)}")
    for key, number in found.end_to_end.items():
        facts.add_row("end to end", f"{END_TO_END.get(key, key)}: {number:.4f}")
    if plot is not None:
        facts.add_row("figure", str(plot))
    yield facts
    yield _layers(found)
    worst = sorted(found.heads, key=lambda head: math.inf if math.isnan(head.error) else head.error, reverse=True)
    yield _heads(found.heads if per_head else worst[:NUM_WORST], "All heads" if per_head else "Worst heads")
    yield Text(
        f"error: |out - softmax| / |softmax| of the attention output; good up to {GOOD_ERROR}, fair up to "
        f"{FAIR_ERROR}. uniform: the same of the plain mean of the values. entropy: of the softmax weights, in nats, "
        f"/ the most it could be, that of equal weights. psi: mean of |query + key|^2 as the features see them; the "
        f"larger, the noisier they are.",
        style="dim",
    )


def _layers(found: ApproximationReport) -> Table:
    table = new_table("Layers")
    for title in ("#", "error", "", "uniform", "best head", "worst head"):
        table.add_column(title, justify="left" if not title else "right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    rows = zip(found.layers, found.layer_errors, found.layer_uniform_errors, found.layer_verdicts, strict=True)
    for heads, error, uniform, verdict in rows:
        errors = [head.error for head in heads]
        style = STYLES[verdict]
        table.add_row(
            str(heads[0].layer),
            f"{error:.2f}",
            _bar(error, style),
            f"{uniform:.2f}",
            f"{min(errors):.2f}",
            f"{max(errors):.2f}",
            Text(verdict, style=style),
        )
    return table


def _heads(heads: tuple[HeadReport, ...] | list[HeadReport], title: str) -> Table:
    table = new_table(title)
    for name in ("layer", "head", "error", "", "uniform", "entropy", "psi"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for head in heads:
        style = STYLES[head.verdict]
        table.add_row(
            str(head.layer),
            str(head.head),
            f"{head.error:.2f}",
            _bar(head.error, style),
            f"{head.uniform_error:.2f}",
            f"{head.entropy:.2f}/{head.max_entropy:.2f}",
            f"{head.psi:.1f}",
            Text(head.verdict, style=style),
        )
    return table


def _bar(error: float, style: str) -> Text:
    full = BAR if not error <= 1 else round(error * BAR)
    return Text("━" * full, style=style).append("━" * (BAR - full), style="dim")
