"""``hf-favorpp convert``."""

import time
from pathlib import Path
from typing import Annotated

import typer

from hf_favorpp.cli import options
from hf_favorpp.cli.failures import UsageError
from hf_favorpp.cli.output import output
from hf_favorpp.config import FavorppConfig
from hf_favorpp.errors import ConfigError
from hf_favorpp.rules import KERNELS

_HOW, _LOADING = "How attention is replaced", "Loading"


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Softmax model: folder or Hub id.", show_default=False)],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.", show_default=False)],
    num_features: Annotated[
        int, typer.Option(help="Random features per head: cost grows, error falls.", rich_help_panel=_HOW)
    ] = 128,
    kernel: Annotated[str, typer.Option(help=f"One of {', '.join(KERNELS)}.", rich_help_panel=_HOW)] = "favor++",
    preconditioning: Annotated[
        str | None,
        typer.Option(
            help="none (as published), center, diagonal, full. By default full with calibration data, else center.",
            rich_help_panel=_HOW,
            show_default=False,
        ),
    ] = None,
    projection: Annotated[
        str | None,
        typer.Option(
            help="orthogonal, antithetic, iid, hadamard, givens. By default what was measured to be best.",
            rich_help_panel=_HOW,
            show_default=False,
        ),
    ] = None,
    statistics: Annotated[
        str | None,
        typer.Option(
            help="sequence, or calibrated, which needs calibration data and follows from them.",
            rich_help_panel=_HOW,
            show_default=False,
        ),
    ] = None,
    exact_window: Annotated[
        str,
        typer.Option(
            metavar="N|RxC",
            help="Attend exactly within blocks of N tokens, or within tiles of R x C patches.",
            rich_help_panel=_HOW,
        ),
    ] = "0",
    exact_ends: Annotated[
        tuple[int, int],
        typer.Option(metavar="A B", help="The first A and last B tokens are exact for all.", rich_help_panel=_HOW),
    ] = (0, 0),
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Convert these layers alone, such as 0,2,4-7; the others stay softmax.",
            rich_help_panel=_HOW,
            show_default=False,
        ),
    ] = None,
    error_budget: Annotated[
        float | None,
        typer.Option(
            help="Leave layers softmax whose relative output error on calibration data is larger, such as 0.5.",
            rich_help_panel=_HOW,
            show_default=False,
        ),
    ] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="FAVOR++ exactly as published.", rich_help_panel=_HOW)
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the projections.", rich_help_panel=_HOW)] = 0,
    calibration_data: options.CalibrationData = None,
    field: options.Field = "text",
    max_samples: options.MaxSamples = 256,
    max_length: options.MaxLength = None,
    batch_size: options.BatchSize = 8,
    anew: Annotated[
        bool,
        typer.Option("--anew", help="Convert anew a SRC that is converted already.", rich_help_panel=_LOADING),
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(help="Of weights: auto (as stored), float32, bfloat16, float16.", rich_help_panel=_LOADING),
    ] = "auto",
    device: options.Device = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    base_model: options.BaseModel = None,
    overwrite: options.Overwrite = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Read DST back and compare.", rich_help_panel="Output")
    ] = True,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Convert a model to FAVOR++ attention and save it, with its tokenizer or processor.

    DST is read back, compared with the model in memory, and only then takes its place: it is whole or not there at
    all. Data like those of the task (--calibration-data, some hundred inputs, no labels) make the result much better.

    Example: `hf-favorpp convert all-MiniLM-L6-v2 minilm-favorpp --exact-window 64 --exact-ends 1 1 --calibration-data
    reviews.jsonl`
    """
    begin = time.perf_counter()
    config = _options(
        calibration_data is not None,
        num_features=num_features,
        kernel=kernel,
        preconditioning=preconditioning,
        projection=projection,
        statistics=statistics,
        exact_window=options.parse_window(exact_window),
        exact_ends=exact_ends,
        layers=None if layers is None else tuple(options.parse_numbers("--layers", layers)),
        seed=seed,
        paper=paper,
    )
    if error_budget is not None and calibration_data is None:
        _refuse("--error-budget is measured on --calibration-data; give both.")
    with output.working("starting"):
        from hf_favorpp.cli.conversion import describe_conversion, show_conversion
        from hf_favorpp.cli.data import DataOptions, read_batches
        from hf_favorpp.cli.sources import (
            DTYPES,
            QUICKSTART_HUB_ID,
            QUICKSTART_MODEL,
            converted_options,
            find_source,
            load_config,
            load_model,
            prepare_libraries,
        )
        from hf_favorpp.cli.writing import require_writable, save_whole
        from hf_favorpp.convert import convert_to_favorpp
    if dtype not in DTYPES:
        _refuse(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    prepare_libraries()
    found = find_source(source, revision, trust_remote_code)
    require_writable(destination, found, overwrite)
    loaded = load_config(found)
    if converted_options(loaded) and not anew:
        _refuse(f"{source} is converted already. Convert its softmax model anew with --anew, or calibrate it.")
    model = load_model(found, loaded, dtype=dtype, device=device, softmax=anew)
    data = None
    if calibration_data is not None:
        data = read_batches(DataOptions(calibration_data, field, max_samples, max_length, batch_size), found, model)
    convert_to_favorpp(
        model,
        config,
        calibration_data=data,
        keep_softmax=None if error_budget is None else "auto",
        error_budget=error_budget,
    )
    base_model = base_model or (QUICKSTART_HUB_ID if source == QUICKSTART_MODEL else None)
    agreement = save_whole(model, found, destination, check=check, base_model=base_model)
    document = describe_conversion("convert", model, found, destination, agreement, data, time.perf_counter() - begin)
    output.result(document, show_conversion(document, agreement))


def _options(has_data: bool, *, paper: bool, statistics: str | None, **given: object) -> FavorppConfig:
    """Build the options, and refuse what does not go together before anything is loaded."""
    if statistics == "calibrated" and not has_data:
        raise UsageError(
            "--statistics calibrated needs --calibration-data. Or convert without both, and run hf-favorpp calibrate."
        )
    if statistics == "sequence" and has_data:
        raise UsageError("--statistics sequence contradicts --calibration-data, which makes them calibrated.")
    try:
        if paper:
            own = {name: given[name] for name in ("num_features", "layers", "seed")}
            if has_data or given["exact_window"] or given["preconditioning"] or given["kernel"] != "favor++":
                raise UsageError(
                    "--paper is the published method: leave out calibration data, window, preconditioning, kernel."
                )
            return FavorppConfig.paper(**own)
        return FavorppConfig(statistics=statistics if statistics and not has_data else "sequence", **given)  # type: ignore[arg-type]
    except ConfigError as error:
        raise UsageError(str(error)) from error


def _refuse(message: str) -> None:
    raise UsageError(message)
