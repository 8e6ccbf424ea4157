"""Uploading a finished run to the Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi

NOT_UPLOADED = ["step_*/**", "epoch_*/**", ".*", "softmax/**"]


def create_repository(name: str, token: str | None) -> str:
    """Make the repository before the training, so that a missing permission shows at once.

    Args:
        name: ``user/name``, or a name in the user's own namespace.
        token: Access token; None uses the stored one.

    Returns:
        Its full id.
    """
    return HfApi(token=token).create_repo(name, exist_ok=True).repo_id


def push_folder(repository: str, folder: Path, token: str | None) -> None:
    """Upload model, tokenizer and results, without checkpoints and twin.

    Args:
        repository: As :func:`create_repository` returned it.
        folder: Output folder of the run.
        token: Access token; None uses the stored one.
    """
    HfApi(token=token).upload_folder(
        repo_id=repository, folder_path=folder, commit_message="Upload the trained model", ignore_patterns=NOT_UPLOADED
    )
