"""``hf-favorpp push``."""

from typing import Annotated

import typer

from hf_favorpp.cli import options
from hf_favorpp.cli.output import output


def push(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Folder of a converted model.", show_default=False)],
    repo: Annotated[
        str,
        typer.Argument(metavar="REPO", help="Where it goes: user/name; name alone is yours.", show_default=False),
    ],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a repository that is made.", show_default=False)
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch; it is made where it does not exist.", show_default=False)
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="HF_TOKEN", help="By default that of 'hf auth login'.", show_default=False, show_envvar=True
        ),
    ] = None,
    base_model: options.BaseModel = None,
    commit_message: Annotated[str, typer.Option(help="Of the one commit.")] = "Upload a model with FAVOR++ attention",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Tell what would be uploaded, and stop. The Hub is not asked: name, token and rights go unchecked.",
        ),
    ] = False,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Upload a converted model to the Hub: weights, tokenizer or processor, and its model card, in one commit.

    The model is loaded first, to see that it is whole. The card says how to load it and, where results.json holds it,
    what was measured; words of yours in README.md, or on the Hub, stay.
    """
    with output.working("starting"):
        from hf_favorpp.cli.sources import (
            find_source,
            load_config,
            load_model,
            prepare_libraries,
            require_converted,
        )
        from hf_favorpp.cli.upload import require_folder, require_repo_id, show_upload, staged, upload
    prepare_libraries()
    require_repo_id(repo)
    source = find_source(path, trust_remote_code=trust_remote_code)
    folder = require_folder(source)
    config = load_config(source)
    require_converted(source, config)
    model = load_model(source, config, device="cpu")
    with staged(folder) as stage:
        document = upload(
            model,
            stage,
            repo,
            private=private,
            revision=revision,
            token=token,
            base_model=base_model,
            commit_message=commit_message,
            dry_run=dry_run,
        )
    output.result({"source": path, **document}, show_upload(document))
