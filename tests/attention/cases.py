"""Inputs of attention, and its outputs and gradients by name, for tests that compare implementations."""

import pytest
import torch

from hf_favorpp import favorpp_attention
from hf_favorpp.features.preconditioning import precondition
from hf_favorpp.features.projection import draw_projections
from hf_favorpp.features.statistics import sequence_statistics

F64 = torch.float64
KERNELS = ("favor++", "favor+", "favor+hyperbolic")
PRECONDITIONINGS = ("none", "center", "diagonal", "full")
MASKS = ("none", "right", "left", "holes", "empty row")
STATISTICS = ("sequence", "statistics", "preconditioner", "preconditioner of each row")

FAST_BACKENDS = [
    "cpu",
    pytest.param(
        "triton",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
    ),
]
"""For ``pytest.mark.parametrize``."""


def device_of(backend):
    return torch.device("cuda" if backend == "triton" else "cpu")


def exactest_dtype(backend):
    """Return the widest dtype that a backend takes, and how near float64 its results must come."""
    return (torch.float32, 3e-5) if backend == "triton" else (F64, 1e-10)


def tokens(batch=3, heads=4, queries=9, keys=None, head_dim=5, value_dim=None, kv_heads=None, dtype=F64, seed=0):
    """Return query, key and value of unit variance, whose means are not 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        mean = torch.randn(1, shape[1], 1, shape[3], generator=generator, dtype=F64) / 2
        return (mean + torch.randn(shape, generator=generator, dtype=F64)).to(dtype)

    kv_heads, keys = kv_heads or heads, keys or queries
    return (
        normal(batch, heads, queries, head_dim),
        normal(batch, kv_heads, keys, head_dim),
        normal(batch, kv_heads, keys, value_dim or head_dim),
    )


def omega_for(query, num_features=7, seed=0):
    return draw_projections(query.shape[1], num_features, query.shape[-1], seed=seed).to(F64)


def log_weights_for(omega, seed=0):
    return torch.randn(omega.shape[:-1], generator=torch.Generator().manual_seed(seed), dtype=F64) / 2


def mask_of(kind, batch, length, seed=0):
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(100 * length + seed)
    lengths = torch.randint(1, length + 1, (batch, 1), generator=generator)
    ranks = torch.arange(length).expand(batch, -1)
    if kind == "left":
        return ranks >= length - lengths
    if kind == "holes":
        return torch.rand(batch, length, generator=generator) < 0.6
    mask = ranks < lengths
    if kind == "empty row":
        mask[-1] = False
    return mask


def statistics_of(kind, query, key, kernel, preconditioning):
    """Return what is given as ``statistics``, made of the tokens of one sequence or of each."""
    if kind == "sequence":
        return None
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    x, y = (t.to(F64) * query.shape[-1] ** -0.25 for t in (query, key))
    if kind != "preconditioner of each row":
        x, y = x[:1], y[:1]
    moments = sequence_statistics(x, y, covariance=True)
    return moments if kind == "statistics" else precondition(moments, preconditioning)


def run(backend, tensors, omega, log_weights=None, seed=1, omega_key=None, **options):
    """Attend, and go back with a random gradient at real queries.

    Returns:
        Output (0 at padded queries, where backends differ) and the gradients of every tensor, by name.
    """
    device = device_of(backend)
    leaves = dict(zip(("query", "key", "value"), tensors, strict=True))
    leaves |= {"omega": omega, "omega_key": omega_key, "log_weights": log_weights}
    leaves = {name: t.detach().to(device, copy=True).requires_grad_() for name, t in leaves.items() if t is not None}
    options = {name: to(option, device) for name, option in options.items()}
    out = favorpp_attention(**leaves, backend=backend, **options)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=F64)
    gradient = gradient.to(device, out.dtype)
    if (real := real_queries(leaves["query"], leaves["key"], options)) is not None:
        real = real[:, None, :, None]
        gradient, shown = gradient.masked_fill(~real, 0), out.detach().masked_fill(~real, 0)
    else:
        shown = out.detach()
    grads = torch.autograd.grad(out, list(leaves.values()), gradient, materialize_grads=True)
    result = {"output": shown, **dict(zip(leaves, grads, strict=True))}
    return {name: t.cpu() for name, t in result.items()}


def real_queries(query, key, options):
    if options.get("query_mask") is not None:
        return options["query_mask"]
    return options.get("key_mask") if query.shape[2] == key.shape[2] else None


def to(option, device):
    if isinstance(option, torch.Tensor):
        return option.to(device)
    if isinstance(option, tuple) and hasattr(option, "_fields"):
        return type(option)(*(to(field, device) for field in option))
    return option


def errors(result, expected):
    """Return the relative error of each tensor in the 2-norm; of next to nothing, the absolute one."""
    found = {}
    for name, tensor in result.items():
        assert torch.isfinite(tensor).all(), f"{name} is not finite"
        target = expected[name].to(F64)
        least = 1e-2 * target.numel() ** 0.5
        found[name] = ((tensor.to(F64) - target).norm() / target.norm().clamp(min=least)).item()
    return found


def assert_agrees(result, expected, tolerance):
    found = errors(result, expected)
    wrong = {name: f"{error:.1e}" for name, error in found.items() if not error <= tolerance}
    assert not wrong, f"more than {tolerance:.0e}: {wrong}"
