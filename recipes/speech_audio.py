"""From recordings to batches: decoded by soundfile and resampled by soxr in the workers of the data loader."""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
import torch
from media_examples import Example
from numpy.typing import NDArray
from skipped_files import SkippedFiles
from torch import Tensor
from transformers import PreTrainedTokenizerBase, SequenceFeatureExtractor

IGNORED = -100
"""Label of what is no character: padding, and all of a recording that could not be read."""
SHORTEST_S = 0.1
"""Shorter recordings are padded with silence to as much, so that they have a frame."""

UNREADABLE = (OSError, soundfile.SoundFileError, ValueError)
"""What soundfile raises at files that are damaged or no recordings."""


def read_audio(source: Path | io.BytesIO, rate: int) -> NDArray[np.float32]:
    """Decode a recording, average its channels, and resample it.

    Args:
        source: File in any format that soundfile knows.
        rate: Wanted, Hz.

    Returns:
        (samples,).

    Raises:
        soundfile.SoundFileError: If it cannot be decoded.
        ValueError: If it is empty, cut short, or holds what is no number.
    """
    with soundfile.SoundFile(source) as file:
        wave = file.read(dtype="float32", always_2d=True).mean(axis=1)
        own_rate, expected = file.samplerate, file.frames
    if not len(wave) or len(wave) < expected:
        raise ValueError(f"it holds {len(wave)} samples where its header says {expected}")
    if not np.isfinite(wave).all():
        raise ValueError("it holds samples that are no numbers")
    return wave if own_rate == rate else soxr.resample(wave, own_rate, rate)


def open_audio(audio: Mapping[str, Any]) -> io.BytesIO | Path:
    """Return what soundfile reads of an undecoded recording, a dictionary of "bytes" or "path"."""
    return Path(audio["path"]) if audio.get("bytes") is None else io.BytesIO(audio["bytes"])


def seconds_of(source: Path | io.BytesIO) -> float:
    """Return how long a recording lasts by its header, s; raises what :data:`UNREADABLE` holds."""
    return float(soundfile.info(source).duration)


def write_audio(wave: NDArray[np.float32], rate: int) -> bytes:
    """Return a WAV file of 16 bits, of samples in [-1, 1]."""
    buffer = io.BytesIO()
    soundfile.write(buffer, wave, rate, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def normalised(text: str, case: str) -> str:
    """Return a transcript with single spaces, and its letters as they are to be: "keep", "lower" or "upper"."""
    text = " ".join(text.split())
    return text if case == "keep" else text.lower() if case == "lower" else text.upper()


def name_of(audio: Mapping[str, Any], text: str) -> str:
    """Return what tells which recording it is: its path, or else its transcript and a checksum."""
    path, data = audio.get("path"), audio.get("bytes")
    return str(path) if path else f"a recording of {text!r} with checksum {zlib.crc32(data or b''):08x}"


def reason(error: Exception) -> str:
    """Return what soundfile says, without the object's address in memory."""
    return str(getattr(error, "error_string", error))


@dataclass(frozen=True)
class AudioReader:
    """Makes an example of a row.

    Attributes:
        tokenizer: Of the transcripts.
        case: Of their letters, "keep", "lower" or "upper".
        rate: Of the model, Hz.
        skipped: Receives the names of what cannot be read.
    """

    tokenizer: PreTrainedTokenizerBase
    case: str
    rate: int
    skipped: SkippedFiles

    def __call__(self, row: Mapping[str, Any], epoch: int) -> Example | None:
        """Return "wave", (samples,), and "labels", a list of integers; None if the recording is unreadable.

        Args:
            row: "audio" with "bytes" or "path", and "text".
            epoch: Not used.

        Returns:
            The example.
        """
        try:
            wave = read_audio(open_audio(row["audio"]), self.rate)
        except UNREADABLE as error:
            self.skipped.add(name_of(row["audio"], row["text"]), reason(error))
            return None
        missing = round(SHORTEST_S * self.rate) - len(wave)
        return {
            "wave": np.pad(wave, (0, max(0, missing))),
            "labels": self.tokenizer(normalised(row["text"], self.case)).input_ids,
        }

    def ignored(self) -> Example:
        """Return silence without a transcript."""
        return {"wave": np.zeros(round(SHORTEST_S * self.rate), dtype=np.float32), "labels": []}


@dataclass(frozen=True)
class Collator:
    """Makes a batch of examples: the inputs of the model, padded, and "labels", padded with :data:`IGNORED`."""

    extractor: SequenceFeatureExtractor

    def __call__(self, examples: list[Example]) -> dict[str, Tensor]:
        """Return the batch.

        Args:
            examples: As :class:`AudioReader` makes them.

        Returns:
            Tensors of one row per example.
        """
        waves = [example["wave"] for example in examples]
        batch = self.extractor(waves, sampling_rate=self.extractor.sampling_rate, padding=True, return_tensors="pt")
        longest = max(1, *(len(example["labels"]) for example in examples))
        labels = torch.full((len(examples), longest), IGNORED)
        for row, example in zip(labels, examples, strict=True):
            row[: len(example["labels"])] = torch.tensor(example["labels"])
        return {**batch, "labels": labels}
