"""``hf-favorpp report``."""

from pathlib import Path
from typing import Annotated

import typer

from hf_favorpp.cli import options
from hf_favorpp.cli.failures import ExitCode, UsageError
from hf_favorpp.cli.output import output

PLOTS = (".png", ".pdf", ".svg")


def report(
    path: Annotated[
        str, typer.Argument(metavar="MODEL", help="Converted model: a folder or Hub id.", show_default=False)
    ],
    data: options.Data,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw all heads: png, pdf, svg.", rich_help_panel="Output", show_default=False),
    ] = None,
    per_head: Annotated[
        bool, typer.Option("--per-head", help="List all heads, not the worst alone.", rich_help_panel="Output")
    ] = False,
    record: Annotated[
        bool,
        typer.Option(
            "--record", help="Write it to results.json in the folder, for the model card.", rich_help_panel="Output"
        ),
    ] = False,
    fail_above: Annotated[
        float | None,
        typer.Option(
            help="Exit with 4 where the error of a layer is larger, such as 0.5.",
            rich_help_panel="Output",
            show_default=False,
        ),
    ] = None,
    field: options.Field = "text",
    max_samples: options.MaxSamples = 8,
    max_length: options.MaxLength = None,
    device: options.Device = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Measure how far a converted model is from softmax on data of yours, layer by layer and end to end.

    Each layer is compared with softmax on the same queries, keys and values. An error beyond that of the plain mean of
    the values (uniform) is worse than no attention at all. Time is quadratic in length.

    Example: `hf-favorpp report minilm-favorpp --data reviews.jsonl --max-length 512 --plot heads.png`
    """
    if plot is not None and plot.suffix.lower() not in PLOTS:
        _refuse(f"--plot must end in {', '.join(PLOTS)}, got {plot}.")
    with output.working("starting"):
        from hf_favorpp.cli.data import DataOptions, read_batches
        from hf_favorpp.cli.reporting import draw, measure, record_fidelity, show_report
        from hf_favorpp.cli.sources import find_source, load_config, load_model, prepare_libraries, require_converted
    prepare_libraries()
    source = find_source(path, revision, trust_remote_code)
    config = load_config(source)
    require_converted(source, config)
    if record and source.folder is None:
        _refuse(f"--record writes into a folder, and {source.name} is on the Hub: download it first.")
    model = load_model(source, config, device=device)
    options_of_data = DataOptions(data, field, max_samples, max_length, batch_size=max_samples)
    batches = read_batches(options_of_data, source, model).first()
    with output.working("comparing with softmax"):
        found = measure(model, batches)
    if plot is not None:
        draw(found, plot)
    if record and source.folder is not None:
        record_fidelity(source.folder, found)
    document = {
        "source": source.name,
        "data": batches.to_dict(),
        "plot": None if plot is None else str(plot),
        "layer_verdicts": list(found.layer_verdicts),
        **found.to_dict(),
    }
    output.result(document, *show_report(found, source.name, batches, per_head, plot))
    worst = max(found.layer_errors)
    if fail_above is not None and not worst <= fail_above:  # NaN too
        _fail(worst, fail_above)


def _refuse(message: str) -> None:
    raise UsageError(message)


def _fail(worst: float, limit: float) -> None:
    output.note(f"the largest error of a layer is {worst:.2f}, more than --fail-above {limit:g}.")
    raise typer.Exit(int(ExitCode.CHECK_FAILED))
