"""Images in folders, and recordings."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fidelity_arguments import FidelityArguments
from fidelity_inputs import FidelityError, Inputs, existing, split, spread, stack
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import AutoFeatureExtractor, AutoImageProcessor, PreTrainedModel
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
RECORDINGS = (".wav", ".flac")
SHORTEST_SIDE = 256 / 224
"""Of an image before its centre is cut out, in sides of what is cut out."""
SAMPLING_RATE = 16_000
"""Of a model that brings no feature extractor, Hz."""
Prepare = Callable[[Path], dict[str, Tensor]]
Recordings = tuple[Path, ...]
"""Files that are heard one after the other."""


class Files(Dataset[dict[str, Tensor]]):
    """Files that are decoded when they are needed."""

    def __init__(self, paths: Sequence[Any], prepare: Callable[[Any], dict[str, Tensor]]) -> None:
        """Keep what is needed.

        Args:
            paths: The files, or tuples of those that belong together.
            prepare: Makes the inputs of a model of one.
        """
        self.paths, self.prepare = paths, prepare

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.prepare(self.paths[index])


def images(args: FidelityArguments, source: str, model: PreTrainedModel) -> Inputs:
    """Find the images below a folder, and prepare them as the checkpoint's image processor does.

    Args:
        args: Folders and sizes.
        source: Of the image processor. Without one the shortest side is scaled, the centre cut out, and the pixels
            normalised by ImageNet's mean and standard deviation.
        model: Tells dtype and image size.

    Returns:
        Batches.
    """
    prepare, _, _ = image_preparation(source, model)
    return _inputs(args, IMAGES, prepare)


def classified_images(args: FidelityArguments, source: str, model: PreTrainedModel) -> Inputs:
    """Find images in folders of one folder per class, to train probes on and to evaluate them.

    Args:
        args: Folders and sizes.
        source: As for :func:`images`.
        model: Tells dtype and image size.

    Returns:
        Batches, those that calibrate among those that train, and the classes.

    Raises:
        FidelityError: There are images of a class to evaluate and none to train on.
    """
    prepare, _, _ = image_preparation(source, model)
    inputs = _inputs(args, IMAGES, prepare)
    paths = find_files(existing(str(args.calibration_file), "calibration_file"), IMAGES)
    training = spread(paths, args.training_samples)
    names = sorted({path.parent.name for path in training})
    assert isinstance(inputs.evaluation.dataset, Files)
    evaluated = inputs.evaluation.dataset.paths
    unknown = sorted({path.parent.name for path in evaluated} - set(names))
    if unknown or len(names) < 2:
        raise FidelityError(
            f"a probe is trained on the classes {names} of --calibration_file"
            + (f", and --data_file has images of {unknown}." if unknown else ": two or more are needed.")
        )
    loader = DataLoader(Files(training, prepare), args.batch_size, collate_fn=stack)
    gold, training_gold = (
        torch.tensor([names.index(path.parent.name) for path in part]) for part in (evaluated, training)
    )
    return replace(inputs, gold=gold, training=loader, training_gold=training_gold)


def image_preparation(source: str, model: PreTrainedModel) -> tuple[Prepare, Sequence[float], Sequence[float]]:
    """Return how images are prepared, as for :func:`images`.

    Args:
        source: Of the image processor.
        model: Tells dtype and image size.

    Returns:
        What makes the inputs of the model of a file, and the mean and standard deviation of pixels in [0, 1], red,
        green and blue, by which it normalises them.
    """
    try:
        processor = AutoImageProcessor.from_pretrained(source)
    except (OSError, ValueError):
        print(f"{source} has no image processor: resized, centre cut out, normalised as for ImageNet")
        return (
            partial(_prepare_image, size=_image_size(model), dtype=model.dtype),
            IMAGENET_DEFAULT_MEAN,
            IMAGENET_DEFAULT_STD,
        )
    prepare = partial(_process_image, processor=processor, dtype=model.dtype)
    if not processor.do_normalize:
        return prepare, (0.0,) * 3, (1.0,) * 3
    return prepare, processor.image_mean, processor.image_std


def recordings(args: FidelityArguments, source: str, model: PreTrainedModel) -> Inputs:
    """Find the wav and flac files below a folder, and prepare them as the checkpoint's feature extractor does.

    Args:
        args: Folders and sizes.
        source: Of the feature extractor. Without one the waveform is of 16 kHz, normalised to mean 0 and variance 1.
        model: Tells the dtype.

    Returns:
        Batches of one recording, or of several joined.

    Raises:
        FidelityError: The packages soundfile and soxr are not installed, or a recording cannot be read.
    """
    try:
        import speech_audio
    except ImportError:
        raise FidelityError("recordings are read with the packages soundfile and soxr: pip install both") from None
    try:
        extractor = AutoFeatureExtractor.from_pretrained(source)
    except (OSError, ValueError):
        print(f"{source} has no feature extractor: waveforms of {SAMPLING_RATE} Hz, normalised to mean 0, variance 1")
        extractor = None
    rate = SAMPLING_RATE if extractor is None else extractor.sampling_rate
    longest = args.max_length if args.joined_seconds is None else round(args.joined_seconds * rate)

    def prepare(paths: Recordings) -> dict[str, Tensor]:
        try:
            waves = [speech_audio.read_audio(path, rate) for path in paths]
        except speech_audio.UNREADABLE as error:
            raise FidelityError(f"one of {', '.join(map(str, paths))}: {speech_audio.reason(error)}") from error
        return _prepare_wave(np.concatenate(waves)[:longest], rate, extractor, model.dtype)

    def join(paths: list[Path]) -> list[Recordings]:
        if args.joined_seconds is None:
            return [(path,) for path in paths]
        return _joined(paths, args.joined_seconds, speech_audio.seconds_of)

    return _inputs(args, RECORDINGS, prepare, join)


def find_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files below a folder, sorted by class folder and name.

    Args:
        folder: The folder.
        suffixes: Of the names, in lower case.

    Returns:
        The paths.

    Raises:
        FidelityError: There is none.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes)
    if not paths:
        raise FidelityError(f"there is no {', '.join(suffixes)} file below {folder}.")
    return paths


def _inputs(
    args: FidelityArguments,
    suffixes: tuple[str, ...],
    prepare: Callable[[Any], dict[str, Tensor]],
    join: Callable[[list[Path]], list[Any]] = list,
) -> Inputs:
    """Return batches of files, or of what ``join`` makes of them, which ``prepare`` takes."""
    rows = join(find_files(existing(str(args.data_file), "data_file"), suffixes))
    other = None
    if args.calibration_file is not None:
        other = join(find_files(existing(args.calibration_file, "calibration_file"), suffixes))
    chosen = split(rows, other, args.max_samples, args.calibration_samples, contents=_files)
    return Inputs(*(DataLoader(Files(part, prepare), args.batch_size, collate_fn=stack) for part in chosen))


def _files(row: Path | Recordings) -> tuple[Path, ...]:
    """Return what a row consists of."""
    return tuple(path.resolve() for path in (row if isinstance(row, tuple) else (row,)))


def _joined(paths: list[Path], seconds: float, seconds_of: Callable[[Path], float]) -> list[Recordings]:
    """Put recordings, each once, together into pieces that last at least so long; what is left over is left out."""
    pieces: list[Recordings] = []
    piece: list[Path] = []
    total = 0.0
    for path in random.Random(0).sample(paths, len(paths)):
        piece.append(path)
        total += seconds_of(path)
        if total >= seconds:
            pieces.append(tuple(piece))
            piece, total = [], 0.0
    return pieces


def _image_size(model: PreTrainedModel) -> tuple[int, int]:
    """Return height and width of the images that a model was made for."""
    size = getattr(model.config, "image_size", 224)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return height, width


def _process_image(path: Path, processor: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    with Image.open(path) as image:
        pixels = processor(images=image.convert("RGB"), return_tensors="pt")["pixel_values"]
    return {"pixel_values": pixels[0].to(dtype)}


def _prepare_image(path: Path, size: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    height, width = size
    with Image.open(path) as file:
        image = file.convert("RGB")
    scale = SHORTEST_SIDE * max(height / image.height, width / image.width)
    image = image.resize((round(scale * image.width), round(scale * image.height)), Image.Resampling.BICUBIC)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    pixels = np.asarray(image.crop((left, top, left + width, top + height)), dtype=np.float32) / 255
    normalised = torch.from_numpy((pixels - np.float32(IMAGENET_DEFAULT_MEAN)) / np.float32(IMAGENET_DEFAULT_STD))
    return {"pixel_values": normalised.permute(2, 0, 1).contiguous().to(dtype)}


def _prepare_wave(wave: NDArray[np.float32], rate: int, extractor: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    if extractor is None:
        return {"input_values": torch.from_numpy((wave - wave.mean()) / np.sqrt(wave.var() + 1e-7)).to(dtype)}
    inputs = extractor(wave, sampling_rate=rate, return_tensors="pt")
    return {name: t[0].to(dtype) if t.is_floating_point() else t[0] for name, t in inputs.items()}
