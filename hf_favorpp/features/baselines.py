"""Feature maps that FAVOR++ is compared with."""

import torch
from torch import Tensor


def relu_log_features(x: Tensor, omega: Tensor) -> Tensor:
    """Return log relu(w.x), -inf where the feature is 0.

    Args:
        x: Queries or keys, (B, H, L, d); the scale cancels in attention.
        omega: Projections, (H, M, d) or (M, d).

    Returns:
        Log-features, (B, H, L, M), with zero gradient where the feature is 0.

    Source:
        Choromanski et al. 2021, arXiv:2009.14794, Section 4 (Performer-ReLU).
    """
    projected = x @ omega.mT
    positive = projected > 0
    log_phi = torch.where(positive, projected, torch.ones_like(projected)).log()
    return log_phi.masked_fill(~positive, float("-inf"))


def elu_log_features(x: Tensor) -> Tensor:
    """Return log(elu(x) + 1), which is x itself where x < 0 and log(1 + x) elsewhere.

    Args:
        x: Unscaled queries or keys, (B, H, L, d).

    Returns:
        Log-features, (B, H, L, d).

    Source:
        Katharopoulos et al. 2020, arXiv:2006.16236, eq. 7.
    """
    return torch.where(x < 0, x, torch.log1p(x.clamp(min=0)))


def trig_features(x: Tensor, omega: Tensor) -> Tensor:
    """Return cos(w.x) and sin(w.x), whose products average to exp(-|x - y|^2 / 2).

    Args:
        x: Scaled queries or keys, (B, H, L, d).
        omega: Projections, (H, M, d) or (M, d).

    Returns:
        Features of either sign, (B, H, L, 2M).

    Source:
        Rahimi and Recht 2007; Likhosherstov et al. 2022, arXiv:2205.15317, Section 2.3 (TrigRF).
    """
    projected = x @ omega.mT
    return torch.cat((projected.cos(), projected.sin()), dim=-1)
