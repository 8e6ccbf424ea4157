"""Mixup and CutMix: a batch of images mixed with itself, and the labels with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_favorpp.errors import ConfigError


@dataclass(frozen=True)
class Mixing:
    r"""Mixes every batch with a permutation of itself, by mixup or by CutMix.

    With a share :math:`\lambda`, mixup returns :math:`\lambda x + (1 - \lambda) x'`; CutMix pastes a rectangle of
    about :math:`(1 - \lambda)` of the image's area from :math:`x'`. One share and one rectangle serve the whole batch.

    Attributes:
        mixup: :math:`\alpha` of the share's distribution Beta(alpha, alpha) for mixup; 0 leaves mixup out.
        cutmix: The same for CutMix.

    Raises:
        ConfigError: If an alpha is negative.

    Source:
        Zhang et al. 2017, arXiv:1710.09412; Yun et al. 2019, arXiv:1905.04899. Both equally often, as in DeiT and MAE.
    """

    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        if min(self.mixup, self.cutmix) < 0:
            raise ConfigError(f"mixup and cutmix must be at least 0, got {self.mixup} and {self.cutmix}.")

    def __call__(self, pixels: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
        """Mix a batch; draws from torch's global generator of the CPU.

        Args:
            pixels: (B, C, H, W), floating point.
            labels: Classes, (B,).
            num_classes: C'.

        Returns:
            Pixels of the same shape, and the probabilities of the classes, (B, C'), float32, whose rows sum to 1.
        """
        targets = nn.functional.one_hot(labels, num_classes).float()
        methods = [name for name in ("mixup", "cutmix") if getattr(self, name) > 0]
        if not methods:
            return pixels, targets
        method = methods[int(torch.randint(len(methods), ()))]
        alpha = torch.tensor(getattr(self, method), dtype=torch.float64)
        share = float(torch.distributions.Beta(alpha, alpha).sample())
        order = torch.randperm(len(pixels)).to(pixels.device)
        if method == "mixup":
            pixels = torch.lerp(pixels[order], pixels, share)
        else:
            (top, bottom), (left, right) = rectangle(pixels.shape[-2], pixels.shape[-1], share)
            other = pixels[order, :, top:bottom, left:right]
            pixels = pixels.clone()
            pixels[:, :, top:bottom, left:right] = other
            share = 1 - (bottom - top) * (right - left) / (pixels.shape[-2] * pixels.shape[-1])
        return pixels, torch.lerp(targets[order], targets, share)


def rectangle(height: int, width: int, share: float) -> tuple[tuple[int, int], tuple[int, int]]:
    """Draw a rectangle of about ``1 - share`` of an image's area around a random centre, cut at the image's edge.

    Args:
        height: Of the image, pixels.
        width: Of the image, pixels.
        share: What stays of the image, in [0, 1].

    Returns:
        Rows and columns, each from (included) and to (excluded).
    """
    spans = []
    for side in (height, width):
        half = int(side * (1 - share) ** 0.5) / 2
        centre = int(torch.randint(side, ()))
        spans.append((max(0, int(centre - half)), min(side, int(centre + half))))
    return spans[0], spans[1]
