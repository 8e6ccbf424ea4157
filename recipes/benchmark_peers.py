"""Attention of other packages, for comparison; each is imported only when it is asked for."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_favorpp.benchmarking.lineup import Attend, Shape

MakeAttend = Callable[[Shape, int], Attend]
"""Makes an attention for inputs of a shape and a number of features."""


def performer_pytorch(module: Any, shape: Shape, num_features: int) -> Attend:
    """Return the FAVOR+ of performer-pytorch as it comes: the softmax kernel, projections drawn once."""
    return module.FastAttention(dim_heads=shape.head_dim, nb_features=num_features).to(shape.device)


def fast_transformers(module: Any, shape: Shape, num_features: int) -> Attend:
    """Return the linear attention of pytorch-fast-transformers with its FAVOR+, which has new projections every call.

    It takes tensors as (B, L, H, d). Its feature map is stabilised, without which it overflows where logits are large.
    """
    masking, maps = (importlib.import_module(f"fast_transformers.{name}") for name in ("masking", "feature_maps"))
    feature_map = maps.Favor.factory(n_dims=num_features, stabilize=True)
    attention = module.LinearAttention(shape.head_dim, feature_map=feature_map).to(shape.device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, _, length, _ = query.shape
        everything = masking.FullMask(length, device=query.device)
        lengths = masking.LengthMask(torch.full((batch,), length, device=query.device), device=query.device)
        tokens = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return attention(*tokens, everything, lengths, lengths).transpose(1, 2)

    return attend


PEERS: dict[str, tuple[str, Callable[[Any, Shape, int], Attend]]] = {
    "performer-pytorch": ("performer_pytorch", performer_pytorch),
    "pytorch-fast-transformers": ("fast_transformers.attention", fast_transformers),
}
"""By name of the package: the module that is imported, and what makes its attention."""


def installed_peers() -> tuple[dict[str, MakeAttend], dict[str, str]]:
    """Import the peers.

    Returns:
        What makes the attention of each that is installed, and why the others are left out, by name of the package.
    """
    found, missing = {}, {}
    for name, (module_name, make) in PEERS.items():
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                module = importlib.import_module(module_name)
        except ImportError as error:
            missing[name] = f"left out, cannot be imported ({error}); pip install {name}"
            continue
        found[name] = functools.partial(make, module)
    return found, missing
