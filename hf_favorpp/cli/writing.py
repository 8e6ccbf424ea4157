"""A converted checkpoint is written whole or not at all, and read back before it takes its place."""

import contextlib
import shutil
import tempfile
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_favorpp.cli.failures import CommandError, ExitCode, UsageError
from hf_favorpp.cli.output import output
from hf_favorpp.cli.sources import Source, files_beside, local_files
from hf_favorpp.hub.card import write_card

CARD = "README.md"
LENGTH = 160
"""Tokens of the inputs that a reloaded model is compared on."""
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
TOLERANCE_OF_HALF = 2e-2


@dataclass(frozen=True)
class Agreement:
    """How a reloaded model compares with the one in memory.

    Attributes:
        tensors: How many tensors are equal, bit by bit: all.
        difference: Largest difference of the outputs, relative to the largest output; None where none were compared.
        why_not: Why none were.
    """

    tensors: int
    difference: float | None
    why_not: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"tensors": self.tensors, "output_difference": self.difference, "why_no_outputs": self.why_not}

    def __str__(self) -> str:
        outputs = (
            f"outputs agree to {self.difference:.0e} with those before saving"
            if self.difference
            else "outputs are as before saving"
            if self.difference == 0
            else f"outputs were not compared: {self.why_not}"
        )
        return f"read back: {self.tensors} tensors and {outputs}"


def require_writable(destination: Path, source: Source, overwrite: bool) -> None:
    """Refuse a destination before any work is done.

    Args:
        destination: The folder to write.
        source: What is read.
        overwrite: Whether a checkpoint that is there may be replaced.

    Raises:
        UsageError: It is a file, or holds something, or is or holds the source.
    """
    if destination.exists() and not destination.is_dir():
        raise UsageError(f"DST must be a folder, and {destination} is a file.")
    target = destination.resolve()
    if source.folder is not None:
        origin = source.folder.resolve()
        if target == origin or target in origin.parents:
            raise UsageError(f"DST {destination} is or holds {source.name}, which is read: write beside it.")
    if destination.is_dir() and any(destination.iterdir()):
        if not overwrite:
            raise UsageError(f"DST {destination} is not empty: choose another folder, or replace it with --overwrite.")
        if not (destination / "config.json").is_file():
            raise UsageError(
                f"DST {destination} holds something else than a checkpoint (no config.json): it is not replaced."
            )


def save_whole(
    model: PreTrainedModel,
    source: Source,
    destination: Path,
    *,
    check: bool = True,
    keep_card: bool = False,
    base_model: str | None = None,
) -> Agreement | None:
    """Write a model with the tokenizer and processor of its source, and read it back, before it takes its place.

    Args:
        model: The converted model.
        source: Where it comes from.
        destination: The folder; what is there is replaced.
        check: Read it back and compare.
        keep_card: Begin with the model card of the source, which is one of the converted model.
        base_model: Its id on the Hub, for the model card; None for what is known of it.

    Returns:
        How the reloaded model compares; None without a check.

    Raises:
        CommandError: It differs. Nothing is at the destination then but what was there before.
    """
    with _taking_the_place_of(destination) as folder:
        with output.working("saving"):
            beside = local_files(source)
            if keep_card and (beside / CARD).is_file():
                shutil.copyfile(beside / CARD, folder / CARD)
            for path in files_beside(beside):
                copy = folder / path.relative_to(beside)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
            model.save_pretrained(folder)
            write_card(model, folder, base_model)
        if not check:
            return None
        with output.working("reading it back"):
            return _compare(model, folder, source)


@contextlib.contextmanager
def _taking_the_place_of(destination: Path) -> Generator[Path]:
    """Yield a new folder beside the destination, whose place it takes in the end, unless something goes wrong."""
    parent = destination.resolve().parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{destination.name}.", dir=parent) as temporary:
        folder, before = Path(temporary, destination.name), Path(temporary, "before")
        folder.mkdir()
        yield folder  # ruff: ignore[fallible-context-manager] - what was written so far goes with the temporary folder
        if destination.exists():
            destination.rename(before)
        try:
            folder.rename(destination)
        except OSError:
            if before.exists():
                before.rename(destination)
            raise


@torch.no_grad()
def _compare(model: PreTrainedModel, folder: Path, source: Source) -> Agreement:
    loader: Any = type(model)
    reloaded = loader.from_pretrained(folder, dtype=model.dtype).to(model.device).eval()
    mine, theirs = model.state_dict(), reloaded.state_dict()
    for name in sorted(mine.keys() | theirs.keys()):
        if name not in mine or name not in theirs or not _equal(mine[name], theirs[name]):
            raise CommandError(
                f"the saved model does not reload as it was: {name} differs. Nothing was written; please report it.",
                ExitCode.CHECK_FAILED,
            )
    try:
        inputs = sample_inputs(model)
        before, after = (_outputs(each, inputs) for each in (model, reloaded))
    except Exception as error:  # models have inputs of every kind, and the tensors are equal
        return Agreement(len(mine), None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    difference = max(
        float((a - b).abs().max() / a.abs().max().clamp(min=1e-12)) for a, b in zip(before, after, strict=True)
    )
    if not difference <= TOLERANCE.get(model.dtype, TOLERANCE_OF_HALF):
        raise CommandError(
            f"the saved model does not reload as it was: its outputs differ by {difference:.1e}. Nothing was written; "
            f"please report it.",
            ExitCode.CHECK_FAILED,
        )
    return Agreement(len(mine), difference)


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.cpu(), b.cpu()) or (
        torch.equal(a.cpu().isnan(), b.cpu().isnan()) and torch.equal(a.cpu().nan_to_num(), b.cpu().nan_to_num())
    )


def _outputs(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # masked autoencoders mask at random
        found = model(**inputs)
    tensors = [each for each in found.values() if isinstance(each, Tensor) and each.is_floating_point()]
    if not tensors:
        raise ValueError("the model returns no tensor")
    return [tensor.float() for tensor in tensors]


def sample_inputs(model: PreTrainedModel, seed: int = 0) -> dict[str, Tensor]:
    """Make up inputs that a model takes.

    Args:
        model: Of texts, images, waveforms or spectrograms, or of texts and images.
        seed: Of the content.

    Returns:
        A batch of two, on the device of the model; of texts the second is shorter, and padded.
    """
    config, generator = model.config, torch.Generator().manual_seed(seed)
    inputs: dict[str, Tensor] = {}
    text, image = getattr(config, "text_config", None), getattr(config, "vision_config", None)
    if model.main_input_name == "input_ids" or text is not None:
        own = text or config
        length = min(LENGTH, (getattr(own, "max_position_embeddings", None) or LENGTH) - 8)
        ids = torch.randint(own.vocab_size, (2, max(length, 2)), generator=generator)
        padding = own.pad_token_id if isinstance(getattr(own, "pad_token_id", None), int) else 0
        mask = torch.ones_like(ids)
        mask[1, ids.shape[1] // 2 :] = 0
        inputs |= {"input_ids": ids.masked_fill(mask == 0, padding), "attention_mask": mask}
    if model.main_input_name == "pixel_values" or image is not None:
        own = image or config
        height, width = own.image_size if isinstance(own.image_size, list | tuple) else (own.image_size,) * 2
        frames = (own.num_frames,) if hasattr(own, "num_frames") else ()
        inputs["pixel_values"] = torch.randn(2, *frames, own.num_channels, height, width, generator=generator)
    if model.main_input_name == "input_values":
        shape = (config.max_length, config.num_mel_bins) if hasattr(config, "num_mel_bins") else (16000,)
        inputs["input_values"] = torch.randn(2, *shape, generator=generator)
    return {
        name: tensor.to(model.device, model.dtype if tensor.is_floating_point() else None)
        for name, tensor in inputs.items()
    }
