"""Handwritten digits as points of 64 coordinates: MNIST at 8 x 8 pixels, or scikit-learn's digits."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import torch
from torch import Tensor

IMAGES = "train-images-idx3-ubyte.gz"
MAGIC = 2051
"""Of an idx file of images: unsigned bytes in three dimensions."""
SIDE = 8


class DigitsError(ValueError):
    """A folder without MNIST, or a file that is not MNIST's."""


def load_digits(data_dir: Path | None) -> Tensor:
    """Read images.

    Args:
        data_dir: Folder of MNIST as its idx files, compressed by gzip; None takes the digits of scikit-learn.

    Returns:
        Brightness from 0 to 1, (images, 64), float64.

    Raises:
        DigitsError: There is no such file, or it holds something else.
    """
    if data_dir is None:
        from sklearn import datasets

        return torch.from_numpy(datasets.load_digits().data) / 16
    path = data_dir / IMAGES
    if not path.is_file():
        raise DigitsError(f"{path} is no file. Give a folder with {IMAGES}, or none for the digits of scikit-learn.")
    content = gzip.decompress(path.read_bytes())
    magic, count, height, width = struct.unpack(">IIII", content[:16])
    if magic != MAGIC or len(content) != 16 + count * height * width:
        raise DigitsError(f"{path} is no idx file of images: it begins with {magic}, {count}, {height}, {width}.")
    pixels = torch.frombuffer(bytearray(content[16:]), dtype=torch.uint8).reshape(count, 1, height, width)
    small = torch.nn.functional.interpolate(pixels.double(), size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    return small.flatten(1) / 255


def standardise(points: Tensor) -> Tensor:
    """Return points of mean 0 and variance 1 in every coordinate that varies.

    Args:
        points: (points, coordinates).

    Returns:
        The same shape; what does not vary is 0.
    """
    centred = points - points.mean(0)
    spread = centred.std(0)
    return centred / torch.where(spread > 0, spread, 1.0)
