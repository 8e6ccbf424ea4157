"""Rows of images and classes: from the Hub, downloaded or streamed, from folders, or scikit-learn's digits."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

from datasets import ClassLabel, Dataset, Features, IterableDataset, load_dataset
from datasets import Image as ImageFeature
from imagenet_arguments import ImageNetArguments
from PIL import Image
from skipped_files import ImageDataError, SkippedFiles

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
Rows = Dataset | IterableDataset


@dataclass(frozen=True)
class ImageData:
    """What to train and evaluate on.

    Attributes:
        train: Rows with "image", a dictionary of encoded "bytes" or "path", and "label", an integer.
        validation: The same.
        label_names: In the order of the labels.
        num_train: Rows of ``train``; None where a stream does not tell.
        num_validation: Rows of ``validation``; likewise.
    """

    train: Rows
    validation: Rows
    label_names: list[str]
    num_train: int | None
    num_validation: int | None


def load_images(args: ImageNetArguments, skipped: SkippedFiles) -> ImageData:
    """Load the rows that ``args`` name; nothing is decoded yet.

    Args:
        args: Source, split, limits.
        skipped: Receives the names of files that are no images by their suffix.

    Returns:
        The rows.

    Raises:
        ImageDataError: If data are missing or not as they should be.
    """
    if args.dataset_name == DIGITS:
        train, validation = read_digits().values()
    elif args.dataset_name is not None:
        train, validation = read_hub(args)
    else:
        train, validation = read_folders(args, skipped)
    if validation is None:
        parts = train.train_test_split(args.train_val_split, seed=args.seed, stratify_by_column="label")
        train, validation = parts["train"], parts["test"]
    names = train.features["label"].names
    if args.streaming:
        numbers = [
            _streamed_length(args, rows, split)
            for rows, split in ((train, args.train_split_name), (validation, args.validation_split_name))
        ]
    else:
        numbers = [len(train), len(validation)]
    limits = (args.max_train_samples, args.max_eval_samples)
    (train, num_train), (validation, num_validation) = (
        _limited(*part, args.seed) for part in zip((train, validation), numbers, limits, strict=True)
    )
    if args.streaming and num_train is None:
        raise ImageDataError(
            f"{args.dataset_name} does not tell how many training images it has, which the length of an epoch needs. "
            "Give --max_train_samples that number, or leave out --streaming."
        )
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
        ImageDataError: If the folder, its classes or images are missing, or a class is not among ``names``.
    """
    layout = "It must hold one folder of images per class: CLASS/ANY_NAME.jpg."
    if not folder.is_dir():
        raise ImageDataError(f"{folder} is not a folder. {layout}")
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    names = classes if names is None else names
    unknown = sorted(set(classes) - set(names))
    if unknown:
        raise ImageDataError(f"{folder} has classes that the training images lack: {unknown[:5]}.")
    paths, labels = [], []
    for name in classes:
        for path in sorted(path for path in (folder / name).rglob("*") if path.is_file()):
            if path.suffix.lower() in SUFFIXES:
                paths.append(str(path))
                labels.append(names.index(name))
            else:
                skipped.add(str(path), "its suffix is not that of an image")
    if not paths:
        raise ImageDataError(f"{folder} holds no images. {layout}")
    features = Features({"image": ImageFeature(decode=False), "label": ClassLabel(names=names)})
    return Dataset.from_dict({"image": paths, "label": labels}, features=features)


def read_hub(args: ImageNetArguments) -> tuple[Rows, Rows | None]:
    """Load a data set with ``datasets.load_dataset``, without decoding its images.

    Args:
        args: Name, configuration, splits and columns.

    Returns:
        Training rows, and those of the validation split or None where there is none.

    Raises:
        ImageDataError: If it cannot be had, or lacks the split, a column or the names of its classes.
    """
    name = str(args.dataset_name)
    try:
        splits = load_dataset(name, args.dataset_config_name, streaming=args.streaming)
    except (ConnectionError, FileNotFoundError) as error:
        raise ImageDataError(
            f"{name} could not be loaded ({error}). Without a network, give --train_dir and --validation_dir."
        ) from error
    found = []
    for split in (args.train_split_name, args.validation_split_name):
        if split in splits:
            found.append(_columns(splits[split], args))
        elif split == args.validation_split_name and not args.streaming:
            found.append(None)
        else:
            raise ImageDataError(
                f"{name} has no split {split!r} but {sorted(splits)}. Choose with --train_split_name and "
                "--validation_split_name."
            )
    return found[0], found[1]


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


def _columns(rows: Rows, args: ImageNetArguments) -> Rows:
    """Return the rows with the columns "image", undecoded, and "label"."""
    wanted = {args.image_column_name: "image", args.label_column_name: "label"}
    known = rows.column_names or []
    missing = [column for column in wanted if column not in known]
    if missing:
        raise ImageDataError(
            f"{args.dataset_name} lacks the column(s) {missing}; it has {known}. Choose with --image_column_name and "
            "--label_column_name."
        )
    rows = rows.select_columns(list(wanted)).rename_columns({old: new for old, new in wanted.items() if old != new})
    rows = rows.cast_column("image", ImageFeature(decode=False))
    if not isinstance(rows.features["label"], ClassLabel):
        if args.streaming:
            raise ImageDataError(f"{args.dataset_name} does not name its classes: leave out --streaming.")
        rows = rows.class_encode_column("label")
    return rows


def _streamed_length(args: ImageNetArguments, rows: IterableDataset, split: str) -> int | None:
    """Return how many rows a stream says that it has."""
    splits = rows.info.splits or {}
    return (splits[split].num_examples or None) if split in splits else None


def _limited(rows: Rows, number: int | None, limit: int | None, seed: int) -> tuple[Rows, int | None]:
    """Return at most ``limit`` rows, random ones where they lie in memory, and how many they are."""
    if limit is None or (number is not None and limit >= number):
        return rows, number
    if isinstance(rows, IterableDataset):
        return rows.take(limit), limit
    return rows.shuffle(seed=seed).select(range(limit)), limit
