"""From rows to batches: images are decoded and changed in the workers of the data loader.

What happens to an image is a function of (seed, epoch, its bytes): not of the worker, the process, its place in the
order, or how often a run was interrupted.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kornia.augmentation.auto import RandAugment
from PIL import Image, UnidentifiedImageError
from skipped_files import SkippedFiles
from torch import Tensor

IGNORED = -100
"""Label of an image that could not be read; it does not count in an evaluation."""
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)
"""What PIL raises at files that are damaged or no images."""
KORNIA_SCALE = 30 / 10
"""Kornia's magnitudes lie in (0, 30), those of the papers in (0, 10)."""
ASPECT_RATIOS = (3 / 4, 4 / 3)
ATTEMPTS = 10


@dataclass(frozen=True)
class TrainingView:
    """A random crop, scaled, perhaps mirrored, and RandAugment.

    Attributes:
        size: Of a side, pixels.
        min_scale: Least share of the area that the crop covers.
        flip: Probability of the mirror image.
        magnitude: Mean strength of RandAugment's two operations, 0 to 10; None is without.
        magnitude_std: Its standard deviation.
        seed: Of everything random here.

    Source:
        Szegedy et al. 2015, arXiv:1409.4842 (crop); Cubuk et al. 2019, arXiv:1909.13719 (RandAugment, as Kornia has
        it, with Kornia's ranges).
    """

    size: int
    min_scale: float = 0.08
    flip: float = 0.5
    magnitude: float | None = None
    magnitude_std: float = 0.0
    seed: int = 0

    def __call__(self, image: Image.Image, key: tuple[int, int]) -> Tensor:
        """Return (3, size, size), uint8.

        Args:
            image: In RGB.
            key: Epoch and checksum of the image.

        Returns:
            The pixels.
        """
        with torch.random.fork_rng(devices=[]):
            state = np.random.SeedSequence((self.seed, *key)).generate_state(1)
            torch.default_generator.manual_seed(int(state[0]))
            box = random_box(image.width, image.height, self.min_scale)
            image = image.resize((self.size, self.size), Image.Resampling.BICUBIC, box=box)
            if torch.rand(()) < self.flip:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            pixels = as_tensor(image)
            if self.magnitude is None:
                return pixels
            strength = KORNIA_SCALE * (self.magnitude + self.magnitude_std * float(torch.randn(())))
            augment = _randaugment()
            augment.m = min(max(strength, 0.0), 30.0)
            changed = augment(pixels[None].float() / 255)[0]
        return changed.clamp_(0, 1).mul_(255).round_().to(torch.uint8)


@dataclass(frozen=True)
class CentreView:
    """The centre of an image.

    Attributes:
        size: Of a side, pixels.
        ratio: ``size`` in shortest sides of the scaled image.
    """

    size: int
    ratio: float = 0.875

    def __call__(self, image: Image.Image, key: tuple[int, int]) -> Tensor:
        """Return (3, size, size), uint8.

        Args:
            image: In RGB.
            key: Not used.

        Returns:
            The pixels.
        """
        side = min(image.size) * self.ratio
        left, top = (image.width - side) / 2, (image.height - side) / 2
        box = (left, top, left + side, top + side)
        return as_tensor(image.resize((self.size, self.size), Image.Resampling.BICUBIC, box=box))


View = TrainingView | CentreView
_AUGMENT: list[RandAugment] = []


def _randaugment() -> RandAugment:
    """Return the one of this process; it keeps the parameters of its last call, and so is not shared."""
    if not _AUGMENT:
        _AUGMENT.append(RandAugment(n=2, m=15, transformation_matrix_mode="skip"))
    return _AUGMENT[0]


def random_box(width: int, height: int, min_scale: float) -> tuple[float, float, float, float]:
    """Draw a crop of at least ``min_scale`` of the area, with sides between 3:4 and 4:3; else the largest such centre.

    Args:
        width: Of the image, pixels.
        height: Of the image, pixels.
        min_scale: In (0, 1].

    Returns:
        Left, top, right and bottom, whole pixels.
    """
    low, high = (float(np.log(ratio)) for ratio in ASPECT_RATIOS)
    for _ in range(ATTEMPTS):
        scale, ratio, across, down = torch.rand(4, dtype=torch.float64).tolist()
        area = width * height * (min_scale + scale * (1 - min_scale))
        aspect = float(np.exp(low + ratio * (high - low)))
        crop_width, crop_height = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left, top = int(across * (width - crop_width + 1)), int(down * (height - crop_height + 1))
            return left, top, left + crop_width, top + crop_height
    crop_width = min(width, round(height * ASPECT_RATIOS[1]))
    crop_height = min(height, round(width / ASPECT_RATIOS[0]))
    left, top = (width - crop_width) // 2, (height - crop_height) // 2
    return left, top, left + crop_width, top + crop_height


def as_tensor(image: Image.Image) -> Tensor:
    """Return the pixels, (channels, height, width), uint8."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


@dataclass(frozen=True)
class Reader:
    """Makes an example of a row.

    Attributes:
        view: What to make of the image.
        skipped: Receives the names of what cannot be read.
    """

    view: View
    skipped: SkippedFiles

    def __call__(self, row: Mapping[str, Any], epoch: int) -> dict[str, Any] | None:
        """Return "pixel_values", (3, size, size), uint8, and "labels", an integer; None if the image is unreadable.

        Args:
            row: "image" with "bytes" or "path", and "label".
            epoch: In which it is read.

        Returns:
            The example.
        """
        path, data = row["image"].get("path"), row["image"].get("bytes")
        try:
            if data is None:
                data = Path(path).read_bytes()
            with Image.open(io.BytesIO(data)) as file:
                image = file.convert("RGB")
        except UNREADABLE as error:
            name = path or f"an image of class {row['label']} with checksum {zlib.crc32(data or b''):08x}"
            unknown = isinstance(error, UnidentifiedImageError)  # its message holds an address in memory
            self.skipped.add(str(name), "no image format known" if unknown else f"{type(error).__name__}: {error}")
            return None
        return {"pixel_values": self.view(image, (epoch, zlib.crc32(data))), "labels": int(row["label"])}

    def ignored(self) -> dict[str, Any]:
        """Return a black image whose label is :data:`IGNORED`."""
        return {"pixel_values": torch.zeros(3, self.view.size, self.view.size, dtype=torch.uint8), "labels": IGNORED}
