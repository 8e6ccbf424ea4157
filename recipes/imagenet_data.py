"""Rows of images and classes: from the Hub, downloaded or streamed, from folders, or scikit-learn's digits."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from imagenet_arguments import ImageNetArguments
from media_rows import Rows, limited, read_hub
from PIL import Image
from skipped_files import MediaDataError, SkippedFiles

SUFFIXES = frozenset((
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".png",
    ".webp",
    ".bmp",
    ".gif",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
    ".jp2",
))
DIGITS = "digits"
DIGITS_SCALE = 16  # grey levels of scikit-learn's digits
COLUMNS = {"image_column_name": "image", "label_column_name": "label"}


@dataclass(frozen=True)
class ImageData:
    """What to train and evaluate on.

    Attributes:
        train: Rows with "image", a dictionary of encoded "bytes" or "path", and "label", an integer.
        validation: The same.
        label_names: In the order of the labels.
        num_train: Rows of ``train``.
        num_validation: Rows of ``validation``; None where a stream does not tell.
    """

    train: Rows
    validation: Rows
    label_names: list[str]
    num_train: int
    num_validation: int | None


def load_images(args: ImageNetArguments, skipped: SkippedFiles) -> ImageData:
    """Load the rows that ``args`` name; nothing is decoded yet.

    Args:
        args: Source, split, limits.
        skipped: Receives the names of files that are no images by their suffix.

    Returns:
        The rows.

    Raises:
        MediaDataError: If data are missing or not as they should be.
    """
    if args.dataset_name == DIGITS:
        train, validation = read_digits().values()
    elif args.dataset_name is not None:
        found = read_hub(args, COLUMNS, ImageFeature(decode=False), "give --train_dir and --validation_dir")
        train, validation = (None if rows is None else _with_class_names(rows, args) for rows in found)
    else:
        train, validation = read_folders(args, skipped)
    if validation is None:
        parts = train.train_test_split(args.train_val_split, seed=args.seed, stratify_by_column="label")
        train, validation = parts["train"], parts["test"]
    names = train.features["label"].names
    train, validation, num_train, num_validation = limited(args, train, validation)
    return ImageData(train, validation, names, num_train, num_validation)


def read_folders(args: ImageNetArguments, skipped: SkippedFiles) -> tuple[Dataset, Dataset | None]:
    """List the images of ``args.train_dir`` and, if given, ``args.validation_dir``."""
    train = read_folder(Path(str(args.train_dir)), skipped)
    if args.validation_dir is None:
        return train, None
    return train, read_folder(Path(args.validation_dir), skipped, train.features["label"].names)


def read_folder(folder: Path, skipped: SkippedFiles, names: list[str] | None = None) -> Dataset:
    """List the images below a folder that has one folder per class.

    Args:
        folder: The folder.
        skipped: Receives the files whose suffix is not that of an image.
        names: The classes in the order of their labels; None takes the folder's, sorted.

    Returns:
        The rows, sorted by class and path.

    Raises:
        MediaDataError: If the folder, its classes or images are missing, or a class is not among ``names``.
    """
    layout = "It must hold one folder of images per class: CLASS/ANY_NAME.jpg."
    if not folder.is_dir():
        raise MediaDataError(f"{folder} is not a folder. {layout}")
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    names = classes if names is None else names
    unknown = sorted(set(classes) - set(names))
    if unknown:
        raise MediaDataError(f"{folder} has classes that the training images lack: {unknown[:5]}.")
    paths, labels = [], []
    for name in classes:
        for path in sorted(path for path in (folder / name).rglob("*") if path.is_file()):
            if path.suffix.lower() in SUFFIXES:
                paths.append(str(path))
                labels.append(names.index(name))
            else:
                skipped.add(str(path), "its suffix is not that of an image")
    if not paths:
        raise MediaDataError(f"{folder} holds no images. {layout}")
    features = Features({"image": ImageFeature(decode=False), "label": ClassLabel(names=names)})
    return Dataset.from_dict({"image": paths, "label": labels}, features=features)


def read_digits() -> dict[str, Dataset]:
    """Load scikit-learn's 1,797 handwritten digits of 8 x 8 pixels.

    Returns:
        "train" (four fifths of each digit) and "validation".
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = [{"bytes": _png(pixels), "path": None} for pixels in digits.images]
    features = Features({
        "image": ImageFeature(decode=False),
        "label": ClassLabel(names=[str(n) for n in digits.target_names]),
    })
    rows = Dataset.from_dict({"image": images, "label": digits.target.tolist()}, features=features)
    parts = train_test_split(range(len(rows)), test_size=0.2, random_state=0, stratify=digits.target)
    return {split: rows.select(sorted(part)) for split, part in zip(("train", "validation"), parts, strict=True)}


def _png(pixels) -> bytes:
    """Encode grey levels of 0..16."""
    buffer = io.BytesIO()
    Image.fromarray((pixels * (255 / DIGITS_SCALE)).round().astype("uint8")).save(buffer, "PNG")
    return buffer.getvalue()


def _with_class_names(rows: Rows, args: ImageNetArguments) -> Rows:
    """Return the rows with classes that have names."""
    if isinstance(rows.features["label"], ClassLabel):
        return rows
    if args.streaming:
        raise MediaDataError(f"{args.dataset_name} does not name its classes: leave out --streaming.")
    return rows.class_encode_column("label")
