"""Rows from folders, from the Hub downloaded and streamed, and from scikit-learn; what is wrong with them is said."""

from __future__ import annotations

import io
import shutil

import numpy as np
import pytest
from imagenet_arguments import ImageNetArguments
from imagenet_data import MediaDataError, load_images, read_digits, read_folder
from PIL import Image
from skipped_files import SkippedFiles
from sklearn.datasets import load_digits
from tiny_images import CLASSES, write_hub_folder


def load(tmp_path, strict=False, **options):
    args = ImageNetArguments(model_type="vit", **options)
    return load_images(args, SkippedFiles(tmp_path, strict))


def labels(rows):
    return [row["label"] for row in rows]


def test_folders_name_the_classes(photos, tmp_path):
    data = load(tmp_path, train_dir=str(photos / "train"), validation_dir=str(photos / "validation"))
    assert data.label_names == list(CLASSES)
    assert (data.num_train, data.num_validation) == (len(data.train), len(data.validation)) == (24, 12)
    assert labels(data.train) == [label for label in range(6) for _ in range(4)]
    assert data.train[5]["image"]["path"] == str(photos / "train" / "bee" / "1.png")


def test_a_class_keeps_its_number_where_another_is_missing(photos, tmp_path):
    shutil.copytree(photos / "validation", tmp_path / "some")
    shutil.rmtree(tmp_path / "some" / "ant")
    data = load(tmp_path, train_dir=str(photos / "train"), validation_dir=str(tmp_path / "some"))
    assert sorted(set(labels(data.validation))) == [1, 2, 3, 4, 5]


def test_without_another_split_a_share_of_each_class_is_held_out(photos, tmp_path):
    data = load(tmp_path, train_dir=str(photos / "train"), train_val_split=0.25)
    assert sorted(labels(data.validation)) == list(range(6))
    paths = {row["image"]["path"] for part in (data.train, data.validation) for row in part}
    assert len(paths) == 24


def test_limits_choose_random_images(photos, tmp_path):
    folders = {"train_dir": str(photos / "train"), "validation_dir": str(photos / "validation")}
    data = load(tmp_path, **folders, max_train_samples=8, max_eval_samples=100)
    assert (data.num_train, data.num_validation) == (8, 12)
    assert len(set(labels(data.train))) > 2


@pytest.mark.parametrize("streaming", [False, True])
def test_the_hub_gives_encoded_images_and_lengths(streaming, hub_photos, photos, tmp_path):
    data = load(tmp_path, dataset_name=str(hub_photos), streaming=streaming)
    assert data.label_names == list(CLASSES)
    assert (data.num_train, data.num_validation) == (24, 12)
    row = next(iter(data.train))
    assert row["image"]["bytes"] == (photos / "train" / "ant" / "0.png").read_bytes()
    assert labels(data.train) == [label for label in range(6) for _ in range(4)]


def test_a_stream_of_unknown_length_needs_a_number(photos, tmp_path):
    folder = write_hub_folder(tmp_path / "untold", photos, tell_length=False)
    with pytest.raises(MediaDataError, match=r"does not tell how many training rows .* Give --max_train_samples"):
        load(tmp_path, dataset_name=str(folder), streaming=True)
    data = load(tmp_path, dataset_name=str(folder), streaming=True, max_train_samples=10)
    assert (data.num_train, len(list(data.train))) == (10, 10)


def test_digits_are_scikit_learns(tmp_path):
    parts = read_digits()
    assert {split: len(part) for split, part in parts.items()} == {"train": 1437, "validation": 360}
    counts = np.bincount(labels(parts["validation"]))
    assert counts.min() >= 34
    pixels = {Image.open(io.BytesIO(row["image"]["bytes"])).tobytes() for part in parts.values() for row in part}
    assert np.round(load_digits().images[0] * 255 / 16).astype("uint8").tobytes() in pixels
    assert load(tmp_path, dataset_name="digits").label_names == [str(digit) for digit in range(10)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_dir": "{}/none"}, r"none is not a folder\. It must hold one folder of images per class"),
        ({"train_dir": "{}/train", "validation_dir": "{}/extra"}, r"classes that the training images lack: \['yak'\]"),
        ({"train_dir": "{}/empty"}, "holds no images"),
        ({"dataset_name": "{}/none"}, "none could not be loaded .* give --train_dir"),
        ({"dataset_name": "{}/hub", "train_split_name": "all"}, r"has no split 'all' but \['train', 'validation'\]"),
        ({"dataset_name": "{}/hub", "image_column_name": "img"}, r"lacks the column\(s\) \['img'\].*'image', 'label'"),
        ({"dataset_name": "{}/hub", "streaming": True, "validation_split_name": "test"}, "has no split 'test'"),
    ],
)
def test_what_is_not_as_it_should_be_is_refused(options, message, photos, hub_photos, tmp_path):
    (tmp_path / "train").symlink_to(photos / "train")
    (tmp_path / "hub").symlink_to(hub_photos)
    for folder in ("extra/yak", "empty/ant"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(MediaDataError, match=message):
        load(tmp_path, **{k: v.format(tmp_path) if isinstance(v, str) else v for k, v in options.items()})


def test_other_files_are_skipped_or_refused(photos, tmp_path):
    shutil.copytree(photos / "validation", tmp_path / "images")
    (tmp_path / "images" / "bee" / "notes.txt").write_text("x")
    skipped = SkippedFiles(tmp_path, strict=False)
    assert len(read_folder(tmp_path / "images", skipped)) == 12
    assert skipped.names() == {str(tmp_path / "images/bee/notes.txt"): "its suffix is not that of an image"}
    with pytest.raises(MediaDataError, match=r"notes\.txt is not a readable image"):
        read_folder(tmp_path / "images", SkippedFiles(tmp_path, strict=True))
