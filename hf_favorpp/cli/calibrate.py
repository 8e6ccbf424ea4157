"""``hf-favorpp calibrate``."""

import time
from pathlib import Path
from typing import Annotated

import typer

from hf_favorpp.cli import options
from hf_favorpp.cli.output import output


def calibrate(
    path: Annotated[
        str, typer.Argument(metavar="SRC", help="Converted model: a folder or Hub id.", show_default=False)
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.", show_default=False)],
    data: options.Data,
    field: options.Field = "text",
    max_samples: options.MaxSamples = 256,
    max_length: options.MaxLength = None,
    batch_size: options.BatchSize = 8,
    device: options.Device = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Fix the statistics of a converted model, and choose its projections, on data like those of the task.

    Some hundred inputs are enough, as long as those of the task; no labels are used. Afterwards nothing is computed
    per call. DST is read back before it takes its place.

    Example: `hf-favorpp calibrate minilm-favorpp minilm-calibrated --data reviews.jsonl`
    """
    begin = time.perf_counter()
    with output.working("starting"):
        from hf_favorpp.calibration import calibrate as calibrate_model
        from hf_favorpp.cli.conversion import describe_conversion, show_conversion
        from hf_favorpp.cli.data import DataOptions, read_batches
        from hf_favorpp.cli.sources import (
            find_source,
            load_config,
            load_model,
            options_of,
            prepare_libraries,
            require_converted,
        )
        from hf_favorpp.cli.writing import require_writable, save_whole
    prepare_libraries()
    source = find_source(path, revision, trust_remote_code)
    require_writable(destination, source, overwrite)
    config = load_config(source)
    require_converted(source, config)
    model = load_model(source, config, device=device)
    batches = read_batches(DataOptions(data, field, max_samples, max_length, batch_size), source, model)
    with options_of(source):
        calibrate_model(model, batches)
    agreement = save_whole(model, source, destination, keep_card=True)
    seconds = time.perf_counter() - begin
    document = describe_conversion("calibrate", model, source, destination, agreement, batches, seconds)
    output.result(document, show_conversion(document, agreement))
