"""What is uploaded to the Hub: one commit, from a folder of links, so that nothing of the user's is changed."""

import contextlib
import fnmatch
import shutil
import tempfile
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.errors import (  # type: ignore[attr-defined] # HTTPError is of httpx or httpx2, as it uses
    HfHubHTTPError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from rich.console import Group, RenderableType
from rich.text import Text
from transformers import PreTrainedModel

from hf_favorpp.cli.failures import CommandError, NotFoundError, UsageError
from hf_favorpp.cli.inspection import facts_table, in_bytes
from hf_favorpp.cli.output import output
from hf_favorpp.cli.sources import Source
from hf_favorpp.hub.origin import is_repository_id
from hf_favorpp.hub.remote import REMOTE_MODULE, auto_map, write_remote_file
from hf_favorpp.hub.upload import prepare_upload

LEFT_OUT = (
    ".*",
    "checkpoint-*",
    "runs",
    "__pycache__",
    *("optimizer*", "scheduler*", "scaler*", "rng_state*", "random_states*", "*.tmp", "trainer_state.json"),
)
"""Of a folder of training: what is no part of the model."""


def require_repo_id(repo: str) -> None:
    """Refuse what cannot be the name of a repository.

    Args:
        repo: The name.

    Raises:
        UsageError: It cannot.
    """
    if not is_repository_id(repo):
        raise UsageError(f"REPO must be user/name, or a name of yours, as the Hub has it, got {repo!r}.")


def require_folder(source: Source) -> Path:
    """Return the folder of a checkpoint.

    Args:
        source: The checkpoint.

    Returns:
        The folder.

    Raises:
        NotFoundError: It is none.
    """
    if source.folder is None:
        raise NotFoundError(
            f"there is no folder {source.name}; save the converted model first, with hf-favorpp convert."
        )
    return source.folder


@contextlib.contextmanager
def staged(folder: Path) -> Generator[Path]:
    """Yield a folder of links to what is uploaded, where the model card can be completed.

    Args:
        folder: Of the checkpoint.

    Yields:
        The folder.
    """
    with tempfile.TemporaryDirectory() as temporary:
        stage = Path(temporary, folder.resolve().name)
        for path in _uploaded(folder):
            link = stage / path.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            if path.name in (REPOCARD_NAME, f"{REMOTE_MODULE}.py"):
                shutil.copyfile(path, link)
            else:
                link.symlink_to(path.resolve())
        yield stage


def _uploaded(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(fnmatch.fnmatch(part, pattern) for part in parts for pattern in LEFT_OUT):
            yield path


def upload(
    model: PreTrainedModel,
    stage: Path,
    repo: str,
    *,
    private: bool | None,
    revision: str | None,
    token: str | None,
    base_model: str | None,
    commit_message: str,
    dry_run: bool,
) -> dict[str, Any]:
    """Complete the model card and upload everything in one commit.

    Args:
        model: As loaded from the folder.
        stage: As :func:`staged` yielded it.
        repo: On the Hub.
        private: Of a repository that is made; None is the default of the account.
        revision: Branch.
        token: None is that of the login.
        base_model: Hub id for the model card; None for what is known of it.
        commit_message: Of the commit.
        dry_run: Stop before anything is sent.

    Returns:
        JSON values; the token is not among them.

    Raises:
        CommandError: The Hub refuses.
        NotFoundError: The Hub cannot be reached.
    """
    document: dict[str, Any] = {"repo": repo, "revision": revision, "dry_run": dry_run, "commit_url": None}
    if not dry_run:
        api = HfApi(token=token)
        try:
            with output.working(f"asking the Hub for {repo}"):
                repo = str(api.create_repo(repo, private=private, exist_ok=True).repo_id)
                if revision is not None:
                    api.create_branch(repo, branch=revision, exist_ok=True)
                prepare_upload(model, stage, repo, token, base_model)
            commit = api.upload_folder(
                repo_id=repo, folder_path=stage, revision=revision, commit_message=commit_message
            )
        except OfflineModeIsEnabled as error:
            raise NotFoundError("the Hub cannot be reached: HF_HUB_OFFLINE is set.") from error
        except LocalTokenNotFoundError as error:
            raise CommandError("the Hub needs a token: run 'hf auth login', or give --token.") from error
        except HfHubHTTPError as error:
            raise CommandError(_refusal(repo, error)) from error
        except (OSError, HTTPError) as error:  # no network, or one that broke
            raise NotFoundError(f"the Hub cannot be reached: {' '.join(str(error).split())[:200]}") from error
        document |= {"repo": repo, "commit_url": str(commit.commit_url)}
    elif auto_map(model):
        write_remote_file(stage)  # which is listed too
    files = {str(path.relative_to(stage)): path.stat().st_size for path in sorted(stage.rglob("*")) if path.is_file()}
    return {**document, "files": files, "bytes": sum(files.values())}


def _refusal(repo: str, error: HfHubHTTPError) -> str:
    status = getattr(error.response, "status_code", None)
    text = " ".join(str(error).split())[:300]
    if status in (401, 403):
        return f"the Hub does not let you write to {repo}: log in with 'hf auth login', or give --token. {text}"
    return f"the Hub refused: {text}"


def show_upload(document: Mapping[str, Any]) -> RenderableType:
    """Draw what was uploaded.

    Args:
        document: As :func:`upload` returned it.

    Returns:
        A table of facts and one of files.
    """
    facts = facts_table()
    branch = "" if document["revision"] is None else f" ({document['revision']})"
    done = "would upload" if document["dry_run"] else "uploaded"
    facts.add_row(
        done, f"{len(document['files'])} files, {in_bytes(document['bytes'])}, to {document['repo']}{branch}"
    )
    if document["commit_url"]:
        facts.add_row("commit", document["commit_url"])
    files = facts_table()
    for name, size in document["files"].items():
        files.add_row(Text(f"  {name}", style="default"), in_bytes(size))
    return Group(facts, files) if document["dry_run"] else facts
