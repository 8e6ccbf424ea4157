"""``hf-favorpp inspect``."""

from typing import Annotated

import typer

from hf_favorpp.cli.options import Debug, Json, Revision, TrustRemoteCode
from hf_favorpp.cli.output import output


def inspect(
    path: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or Hub id.", show_default=False)],
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Tell what a model holds: its attention layers, what is converted, what stays softmax and why, sizes.

    Weights are not loaded, and of a model on the Hub not fetched.
    """
    with output.working("starting"):
        from hf_favorpp.cli.inspection import build_without_weights, describe, show
        from hf_favorpp.cli.sources import find_source, load_config, prepare_libraries
    prepare_libraries()
    source = find_source(path, revision, trust_remote_code)
    with output.working(f"looking at {path}"):
        config = load_config(source)
        description = describe(source, config, build_without_weights(source, config))
    output.result(description, show(description))
