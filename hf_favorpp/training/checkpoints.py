"""Checkpoints of a training run: written whole or not at all, found by name or as the latest."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_favorpp.errors import ConfigError

if TYPE_CHECKING:
    from accelerate import Accelerator

PROGRESS_FILE = "progress.json"


@dataclass
class Progress:
    """How far a run has come; everything the loop itself must remember across a restart.

    Attributes:
        completed_steps: Optimizer steps taken.
        epoch: Epochs finished, training and evaluation both.
        batches_in_epoch: Micro-batches of the unfinished epoch already used, per process.
        loss_sum: Sum of the micro-batch losses since the last evaluation, averaged over processes.
        loss_batches: Their number, per process.
        tokens: Real tokens trained on so far, over all processes.
        train_seconds: Time spent in forward, backward and optimizer steps, without evaluation and checkpoints, s.
        wall_seconds: Time spent in the loop as a whole, s.
        history: One entry per evaluation: epoch, completed steps, training loss since the one before, and metrics.
        world: What must not change between the run and its continuation.
    """

    completed_steps: int = 0
    epoch: int = 0
    batches_in_epoch: int = 0
    loss_sum: float = 0.0
    loss_batches: int = 0
    tokens: int = 0
    train_seconds: float = 0.0
    wall_seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    world: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(
    accelerator: Accelerator, output_dir: Path, name: str, progress: Progress, limit: int | None = None
) -> Path:
    """Write ``output_dir/name`` through a temporary sibling folder, so that a killed run leaves no half checkpoint.

    Args:
        accelerator: Holds the prepared model, optimizer, registered scheduler and random states. All ranks call this.
        output_dir: Folder of the run.
        name: Folder name of the checkpoint; an older one of the same name is replaced.
        progress: Stored beside the state as JSON.
        limit: Keep at most this many checkpoints, the newest; None keeps all.

    Returns:
        The checkpoint's folder.
    """
    final, temporary = output_dir / name, output_dir / f".{name}.tmp"
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(temporary))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (temporary / PROGRESS_FILE).write_text(json.dumps(dataclasses.asdict(progress), indent=2), encoding="utf-8")
        _remove(final)
        os.replace(temporary, final)
        if limit is not None:
            for old in list_checkpoints(output_dir)[:-limit]:
                _remove(old)
    accelerator.wait_for_everyone()
    return final


def load_checkpoint(accelerator: Accelerator, folder: Path, world: dict[str, Any]) -> Progress:
    """Restore model, optimizer, scheduler and random states from ``folder`` and return how far the run had come.

    Args:
        accelerator: Holds the prepared objects, built as in the run that wrote the checkpoint.
        folder: As :func:`find_checkpoint` returned it.
        world: What has to be the same as then: processes, accumulation, batches per epoch, the program's settings.

    Returns:
        The stored progress.

    Raises:
        ConfigError: If ``world`` differs from that of the run that wrote the checkpoint.
    """
    progress = Progress(**json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8")))
    changed = {key: (old, world.get(key)) for key, old in progress.world.items() if world.get(key) != old}
    if changed:
        differences = ", ".join(f"{key} was {old} and is now {new}" for key, (old, new) in changed.items())
        raise ConfigError(
            f"a resumed run must continue what was interrupted, but {differences}. "
            f"Restore these settings, or start anew without resuming from {folder}."
        )
    accelerator.load_state(str(folder))
    return progress


def find_checkpoint(output_dir: Path | None, resume_from: str | os.PathLike[str] | None) -> Path | None:
    """Resolve what a user gave as the place to resume from.

    Args:
        output_dir: Folder of the run, searched for ``"latest"``; None for a run without checkpoints.
        resume_from: A checkpoint folder, ``"latest"``, or None.

    Returns:
        The checkpoint's folder; None to begin at the start: nothing was asked for, or "latest" found nothing.

    Raises:
        ConfigError: If a path was given that holds no checkpoint; or if nothing was asked for, but the folder holds
            checkpoints that "latest" would later confuse with those of the new run.
    """
    if output_dir is None:
        return None
    if resume_from is None:
        if list_checkpoints(output_dir):
            raise ConfigError(
                f'{output_dir} holds checkpoints of an earlier run. Resume from "latest", choose another folder, '
                "or delete them."
            )
        return None
    if resume_from == "latest":
        found = list_checkpoints(output_dir)
        return found[-1] if found else None
    folder = Path(resume_from)
    if not (folder / PROGRESS_FILE).is_file():
        raise ConfigError(
            f"{folder} is no checkpoint of this loop ({PROGRESS_FILE} is missing). "
            f"Checkpoints in {output_dir}: {[path.name for path in list_checkpoints(output_dir)] or 'none'}."
        )
    return folder


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Return the complete checkpoints in ``output_dir``, oldest first by optimizer steps, then by epochs finished."""
    found = []
    for path in output_dir.glob(f"*/{PROGRESS_FILE}"):
        if not path.parent.name.startswith("."):
            stored = json.loads(path.read_text(encoding="utf-8"))
            found.append((stored["completed_steps"], stored["epoch"], path.parent))
    return [path for _, _, path in sorted(found)]


def _remove(folder: Path) -> None:
    """Delete a checkpoint; renamed first, so that one that is half deleted is never taken for a checkpoint."""
    if folder.exists():
        hidden = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(hidden, ignore_errors=True)
        os.replace(folder, hidden)
        shutil.rmtree(hidden, ignore_errors=True)
