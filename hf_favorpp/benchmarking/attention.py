"""Attention alone: what is timed, on inputs that lie in memory as models make them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_favorpp.attention import favorpp_attention
from hf_favorpp.benchmarking.floor import Machine, floor_keys
from hf_favorpp.benchmarking.lineup import (
    Attend,
    Entry,
    Lineup,
    Observer,
    Shape,
    config_name,
    sdpa_contestants,
    told,
)
from hf_favorpp.benchmarking.timing import CannotRunError, Contestant, Step
from hf_favorpp.config import FavorppConfig
from hf_favorpp.errors import FavorppError
from hf_favorpp.features.preconditioning import Preconditioner, precondition
from hf_favorpp.features.projection import draw_projections
from hf_favorpp.features.statistics import RunningMoments

CHECKED_LENGTH = 512
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far an output may be from the reference, |out - reference| / |reference|, by dtype of the inputs."""


@dataclass(frozen=True)
class Inputs:
    """Query, key, value, and the gradient that comes back to the output, (B, H, L, d) each."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor


def attention_lineup(
    length: int,
    shape: Shape,
    configs: Iterable[FavorppConfig],
    *,
    peers: Mapping[str, Callable[[Shape, int], Attend]] | None = None,
    machine: Machine | None = None,
    seed: int = 0,
) -> Lineup:
    """Return the contestants of attention alone at one length.

    Args:
        length: L.
        shape: Of the inputs.
        configs: Options of the library, one row each.
        peers: By name of the package, what makes its attention for a number of features.
        machine: What the device was measured to do, for the floor.
        seed: Of inputs and projections.

    Returns:
        SDPA, the configurations, and each peer once for every number of features.
    """
    inputs = make_inputs(length, shape, seed)
    contestants, entries = sdpa_contestants(shape.device, functools.partial(attention_steps, inputs=inputs)), []
    for config in configs:
        observer = Observer(config.backend)
        error, refusal = error_to_reference(length, shape, config, seed)
        steps = attention_steps(refusal or favorpp_attend(config, inputs), inputs)
        contestants.append(
            Contestant(config_name(config), {kind: observer.watch(step) for kind, step in steps.items()})
        )
        rivals = {name: f"{name} M={config.num_features}" for name in peers or {}}
        for name, rival in rivals.items():
            if all(rival != other.name for other in contestants):
                steps = attention_steps((peers or {})[name](shape, config.num_features), inputs)
                contestants.append(Contestant(rival, {kind: told(step, Exception) for kind, step in steps.items()}))
        exact_keys = int(config.exact_window) + sum(config.exact_ends)  # type: ignore[arg-type]
        more = {"error_to_reference": error, **floor_keys(machine, inputs.query, config.num_features, exact_keys)}
        entries.append(Entry(config_name(config), config, observer, rivals, more))
    return Lineup(length, contestants, entries)


def make_inputs(length: int, shape: Shape, seed: int = 0) -> Inputs:
    """Draw inputs from a normal distribution: logits of standard deviation 1.

    Args:
        length: L.
        shape: Of the inputs.
        seed: Of the draw.

    Returns:
        Tensors of shape (B, H, L, d) that lie in memory as (B, L, H, d), as the projections of a model leave them;
        the gradient too. Query, key and value require gradients.
    """
    generator = torch.Generator().manual_seed(seed)
    size = (shape.batch_size, length, shape.num_heads, shape.head_dim)
    drawn = [torch.randn(size, generator=generator).to(shape.device, shape.dtype).transpose(1, 2) for _ in range(4)]
    query, key, value = (tensor.requires_grad_() for tensor in drawn[:3])
    return Inputs(query, key, value, drawn[3])


def attention_steps(attend: Attend, inputs: Inputs) -> dict[str, Step]:
    """Return the two passes: forward without a graph; forward and backward to query, key and value.

    Args:
        attend: The attention.
        inputs: What it is called with.

    Returns:
        Steps that return what they computed.
    """
    qkv = (inputs.query, inputs.key, inputs.value)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*qkv)

    def train() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*qkv), qkv, inputs.grad_out)

    return {"forward": forward, "train": train}


def favorpp_attend(config: FavorppConfig, inputs: Inputs) -> Attend:
    """Return the library's attention with projections drawn, and with statistics taken if they are calibrated.

    Args:
        config: The options. Statistics of each sequence are taken within every call, and timed.
        inputs: Whose moments calibrated statistics are.

    Returns:
        The attention.
    """
    _, num_heads, _, head_dim = inputs.query.shape
    omega = draw_projections(
        num_heads, config.num_features, head_dim, projection=str(config.projection), seed=config.seed
    ).to(inputs.query.device)
    window = config.exact_window
    assert isinstance(window, int), "attention alone has no image grid"
    return functools.partial(
        favorpp_attention,
        omega=omega,
        kernel=config.kernel,
        preconditioning=str(config.preconditioning),
        statistics=calibrated(config, inputs) if config.statistics == "calibrated" else None,
        exact_window=window,
        exact_ends=config.exact_ends,
        backend=config.backend,
    )


def calibrated(config: FavorppConfig, inputs: Inputs) -> Preconditioner:
    """Return the preconditioner of the inputs' own moments, one per head, float32."""
    _, num_heads, _, head_dim = inputs.query.shape
    moments = RunningMoments(num_heads, head_dim, inputs.query.device)
    moments.watch(inputs.query, inputs.key, None, None)
    return precondition(moments.statistics(), str(config.preconditioning)).to(torch.float32)


def error_to_reference(
    length: int, shape: Shape, config: FavorppConfig, seed: int = 0
) -> tuple[float | None, Attend | None]:
    """Compare the backend of a configuration with the plain one, on inputs of at most 512 tokens.

    Args:
        length: L.
        shape: Of the inputs.
        config: The options.
        seed: Of inputs and projections.

    Returns:
        |out - reference| / |reference|, which is rounding and not what random features cost: both use the same ones.
        And where it is too large, or the backend cannot run, what takes its place: a wrong answer is not timed.
    """
    inputs = make_inputs(min(length, CHECKED_LENGTH), shape, seed)
    attend: Callable[..., Tensor] = favorpp_attend(config, inputs)
    qkv = [tensor.detach() for tensor in (inputs.query, inputs.key, inputs.value)]
    try:
        out = attend(*qkv).float()
    except FavorppError as refusal:
        return None, _refusing(str(refusal))
    reference = functools.partial(attend, backend="reference")(*(tensor.float() for tensor in qkv))
    error = float((out - reference).norm() / reference.norm())
    if error <= TOLERANCE[shape.dtype]:
        return error, None
    return error, _refusing(
        f"its output differs from the reference by {error:.1e}, more than {TOLERANCE[shape.dtype]:g}"
    )


def _refusing(reason: str) -> Attend:
    def refuse(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise CannotRunError(reason)

    return refuse
