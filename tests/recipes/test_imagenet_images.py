"""Images on their way into a batch: decoded, changed as (seed, epoch, bytes) say, and skipped where they are none."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from datasets import load_dataset
from imagenet_data import read_folder
from imagenet_images import IGNORED, CentreView, Reader, TrainingView, as_tensor, random_box
from media_examples import Examples, StreamedExamples
from PIL import Image
from skipped_files import MediaDataError, SkippedFiles
from tiny_images import photo
from torch.utils.data import DataLoader

VIEW = TrainingView(size=12, magnitude=9, magnitude_std=0.5, seed=3)
PLAIN = replace(VIEW, magnitude=None, flip=0.0)


@pytest.fixture
def skipped(tmp_path):
    return SkippedFiles(tmp_path / "run", strict=False)


@pytest.fixture
def rows(photos, skipped):
    return read_folder(photos / "train", skipped)


def batches(dataset, epoch=0, workers=0, size=5):
    """Return all pixels and labels in order."""
    dataset.set_epoch(epoch)
    found = list(DataLoader(dataset, size, num_workers=workers))
    return torch.cat([batch["pixel_values"] for batch in found]), torch.cat([batch["labels"] for batch in found])


def test_changes_depend_on_seed_epoch_and_image_and_not_on_workers_or_place(rows, skipped):
    images = Examples(rows, Reader(VIEW, skipped), replace=True)
    state = torch.get_rng_state()
    assert images[0]["labels"] == 0
    assert torch.equal(torch.get_rng_state(), state), "the model's generator is left alone"
    pixels, labels = batches(images)
    assert pixels.dtype == torch.uint8
    for workers in (1, 2):
        assert torch.equal(batches(images, workers=workers)[0], pixels)
    order = list(range(len(rows)))[::-1]
    assert torch.equal(batches(Examples(rows.select(order), images.reader, replace=True))[0], pixels.flip(0))
    same_seed = (batches(images, epoch=1)[0] == pixels).flatten(1).all(1)
    other_seed = batches(Examples(rows, Reader(replace(VIEW, seed=4), skipped), replace=True))[0]
    assert not same_seed.any()
    assert not torch.equal(other_seed, pixels)
    assert labels.tolist() == [label for label in range(6) for _ in range(4)]


def test_streams_give_the_batches_of_indexed_rows(rows, hub_photos, skipped):
    stream = load_dataset(str(hub_photos), split="train", streaming=True).decode(False)
    streamed = StreamedExamples(stream, Reader(VIEW, skipped), len(rows))
    assert len(DataLoader(streamed, 5)) == 5
    for epoch in (0, 2):
        for own, other in zip(
            batches(streamed, epoch),
            batches(Examples(rows, streamed.reader, replace=True), epoch),
            strict=True,
        ):
            assert torch.equal(own, other)


def test_randaugment_gets_stronger_and_none_is_none():
    image = photo(2, 0)
    plain = PLAIN(image, (0, 1)).float()

    def change(magnitude):
        view = replace(PLAIN, magnitude=magnitude)
        return sum((view(image, (0, key)).float() - PLAIN(image, (0, key)).float()).abs().mean() for key in range(40))

    assert torch.equal(PLAIN(image, (0, 1)).float(), plain)
    assert 0 < change(1) < change(10)


def test_crops_keep_scale_and_aspect_ratio():
    for width, height in ((300, 200), (64, 64)):
        for _ in range(200):
            left, top, right, bottom = random_box(width, height, 0.3)
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height
            assert 0.27 <= (right - left) * (bottom - top) / (width * height) <= 1
            assert 0.7 <= (right - left) / (bottom - top) <= 1.42
    assert random_box(1000, 10, 0.5) == (493, 0, 506, 10), "where nothing fits, the largest crop of the centre"


def test_mirror_images_come_as_often_as_asked():
    image = Image.new("RGB", (20, 20))
    image.paste((255, 255, 255), (0, 0, 10, 20))
    view = TrainingView(size=8, min_scale=1.0, flip=0.25)
    mirrored = [view(image, (0, key))[0, 4, 0] < view(image, (0, key))[0, 4, 7] for key in range(400)]
    assert sum(mirrored) / 400 == pytest.approx(0.25, abs=0.06)


def test_the_centre_is_what_is_evaluated():
    image = Image.new("RGB", (80, 40), "red")
    image.paste((0, 0, 255), (30, 10, 50, 30))
    whole = CentreView(10, ratio=0.5)(image, (0, 0))
    assert whole.shape == (3, 10, 10)
    assert (whole == as_tensor(Image.new("RGB", (10, 10), "blue")))[:, 1:-1, 1:-1].all()
    assert whole[2].min() > 200
    assert (CentreView(10, ratio=1.0)(image, (0, 0))[0, :2] > 200).all()


BROKEN = {
    "text.jpg": b"no image",
    "empty.png": b"",
    "cut.png": None,
    "bomb.bmp": b"BM" + bytes(60),
}


def break_files(folder):
    """Put files that are no images among the others."""
    buffer = io.BytesIO()
    photo(0, 0).save(buffer, "PNG")
    for name, content in BROKEN.items():
        (folder / "ant" / name).write_bytes(buffer.getvalue()[:200] if content is None else content)
    return sorted(str(folder / "ant" / name) for name in BROKEN)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_no_image_is_skipped_and_counted_once(workers, tmp_path, skipped):
    for label, name in enumerate(("ant", "bee")):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(3):
            photo(label, number).save(tmp_path / "data" / name / f"{number}.png")
    broken = break_files(tmp_path / "data")
    (tmp_path / "data" / "bee" / "Thumbs.db").write_text("x")
    rows = read_folder(tmp_path / "data", skipped)
    assert len(rows) == 10
    train = Examples(rows, Reader(PLAIN, skipped), replace=True)
    for epoch in (0, 1):
        pixels, _ = batches(train, epoch, workers, size=3)
        assert len(pixels) == 10
        assert (pixels.flatten(1).float().std(1) > 0).all(), "a readable image is in the place of each"
    evaluated = batches(Examples(rows, Reader(CentreView(12), skipped), replace=False), workers=workers)[1]
    assert (evaluated == IGNORED).sum() == len(BROKEN)
    streamed = StreamedExamples(rows.to_iterable_dataset(), Reader(PLAIN, skipped), None)
    assert len(batches(streamed)[1]) == 6
    assert list(skipped.names()) == sorted([*broken, str(tmp_path / "data" / "bee" / "Thumbs.db")])
    assert skipped.summary().startswith("skipped 5 files that are no readable images:\n  ")
    assert "text.jpg: no image format known" in skipped.summary()


def test_strict_raises_with_the_name(tmp_path, photos):
    strict = SkippedFiles(tmp_path, strict=True)
    row = {"image": {"path": "cut.png", "bytes": b"\x89PNG"}, "label": 0}
    images = Examples([row], Reader(PLAIN, strict), replace=True)
    with pytest.raises(MediaDataError, match=r"cut\.png is not a readable image .*leave out --strict"):
        batches(images)
    assert not strict.names()


def test_a_training_set_without_any_image_is_an_error(skipped):
    row = {"image": {"path": "none.png", "bytes": b""}, "label": 0}
    with pytest.raises(MediaDataError, match="none of the 1 training images can be read"):
        batches(Examples([row], Reader(PLAIN, skipped), replace=True))


def test_clearing_forgets_and_names_survive_another_list(tmp_path):
    first = SkippedFiles(tmp_path, strict=False)
    for _ in range(2):
        first.add("b", "why")
    SkippedFiles(tmp_path, strict=False).add("a", "why not")
    assert first.names() == {"a": "why not", "b": "why"}
    first.clear()
    assert (first.names(), first.summary()) == ({}, "")
