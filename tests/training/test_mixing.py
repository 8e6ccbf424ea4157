"""Mixup and CutMix: what a batch is mixed with can be read off its pixels, and the labels agree with it."""

import pytest
import torch

from hf_favorpp.errors import ConfigError
from hf_favorpp.training.mixing import Mixing, rectangle

CLASSES = 5


def constant_images(size=24):
    """Return images whose pixels all are the label."""
    labels = torch.arange(CLASSES)
    return labels.float().view(-1, 1, 1, 1).expand(-1, 3, size, size + 4).contiguous(), labels


@pytest.mark.parametrize("mixing", [Mixing(mixup=0.8), Mixing(cutmix=1.0), Mixing(0.8, 1.0)], ids=str)
def test_targets_sum_to_one_and_say_what_the_pixels_show(mixing):
    pixels, labels = constant_images()
    shares = []
    for _ in range(30):
        mixed, targets = mixing(pixels, labels, CLASSES)
        torch.testing.assert_close(targets.sum(1), torch.ones(CLASSES))
        torch.testing.assert_close(mixed.mean((1, 2, 3)), targets @ torch.arange(CLASSES).float())
        assert ((targets > 0).sum(1) <= 2).all()
        shares.append(targets.max().item())
    assert len(set(shares)) > 5
    assert pixels.unique().tolist() == list(range(CLASSES)), "the input is left alone"


def test_mixup_blends_and_cutmix_pastes():
    pixels, labels = constant_images()
    blended, targets = Mixing(mixup=0.8)(pixels, labels, CLASSES)
    assert all(len(image.unique()) == 1 for image in blended)
    whole = [Mixing(cutmix=1.0)(pixels, labels, CLASSES)[0] for _ in range(10)]
    assert {value for batch in whole for value in batch.unique().tolist()} == set(range(CLASSES))
    assert any(len(image.unique()) == 2 for batch in whole for image in batch)
    assert targets.dtype == torch.float32


def test_both_are_chosen_about_equally_often():
    pixels, labels = constant_images()
    pasted = [(Mixing(0.8, 1.0)(pixels, labels, CLASSES)[0] % 1 == 0).all().item() for _ in range(200)]
    assert 0.35 < sum(pasted) / 200 < 0.7  # mixup of a batch with itself looks pasted too


def test_without_both_labels_become_one_hot():
    pixels, labels = constant_images()
    mixed, targets = Mixing()(pixels, labels, CLASSES)
    assert mixed is pixels
    assert torch.equal(targets, torch.eye(CLASSES))


def test_the_rectangle_has_the_area_that_does_not_stay():
    areas = []
    for _ in range(400):
        (top, bottom), (left, right) = rectangle(40, 60, 0.75)
        assert 0 <= top <= bottom <= 40
        assert 0 <= left <= right <= 60
        areas.append((bottom - top) * (right - left) / 2400)
    assert max(areas) == pytest.approx(0.25)
    assert min(areas) < 0.1, "the edge cuts it"


def test_negative_alphas_are_refused():
    with pytest.raises(ConfigError, match=r"at least 0, got -1 and 0"):
        Mixing(-1, 0)
