"""Who races: SDPA by its backends and configurations of the library, attention alone or in a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_favorpp.attention import observed_backends
from hf_favorpp.benchmarking.memory import is_out_of_memory
from hf_favorpp.benchmarking.timing import CannotRunError, Contestant, Step
from hf_favorpp.config import FavorppConfig
from hf_favorpp.errors import FavorppError

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From query, key and value, (B, H, L, d) each, to the output, (B, H, L, d)."""

SDPA = "sdpa"
GPU_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


@dataclass(frozen=True)
class Shape:
    """What all inputs of a benchmark share.

    Attributes:
        batch_size: B.
        num_heads: H.
        head_dim: d.
        dtype: Of queries, keys and values.
        device: Where they are.
    """

    batch_size: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class Observer:
    """Learns from the first call of each step, which is never timed, which backend ran."""

    def __init__(self, requested: str) -> None:
        """Begin.

        Args:
            requested: The backend that was asked for, which is named where none ran.
        """
        self.requested = requested
        self.seen: list[str] = []

    @property
    def backend(self) -> str:
        """The backend that ran; several are joined by a plus sign."""
        return "+".join(dict.fromkeys(self.seen)) or self.requested

    def watch(self, step: Step) -> Step:
        """Return the same step, watched once; an error of the library becomes a reason why it cannot run."""
        calls = iter(("first",))

        def watched() -> object:
            if next(calls, None) is None:
                return step()
            with observed_backends() as names:
                result = step()
            self.seen += names
            return result

        return told(watched, FavorppError)


@dataclass(frozen=True)
class Entry:
    """A configuration of the library in a lineup.

    Attributes:
        name: Of its contestant.
        config: The options.
        observer: Knows which backend ran.
        peers: Names of the contestants with as many features, by name of the package.
        more: Further keys of its row.
    """

    name: str
    config: FavorppConfig
    observer: Observer
    peers: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Lineup:
    """All contestants at one length, and which of them are whose.

    Attributes:
        length: Tokens.
        contestants: All.
        entries: Those of the library: one row each.
    """

    length: int
    contestants: Sequence[Contestant]
    entries: Sequence[Entry]


def config_name(config: FavorppConfig) -> str:
    """Return what sets a configuration apart from the others of a run."""
    return f"{config.kernel} M={config.num_features} {config.preconditioning} {config.backend}"


def sdpa_contestants(device: torch.device, make_steps: Callable[[Attend], Mapping[str, Step]]) -> list[Contestant]:
    """Return SDPA: as PyTorch chooses on the CPU, by each of its backends on a GPU.

    Args:
        device: Where it runs.
        make_steps: Makes the passes, for attention alone or of a model.

    Returns:
        Contestants named ``sdpa`` or ``sdpa flash`` and so on; a backend without a kernel for the inputs says so when
        it runs.
    """
    steps = {kind: told(step, RuntimeError) for kind, step in make_steps(softmax_attend).items()}
    if device.type != "cuda":
        return [Contestant(SDPA, steps, growth=2)]
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        name: functools.partial(sdpa_kernel, backend) for name, backend in GPU_BACKENDS.items()
    }
    return [Contestant(f"{SDPA} {name}", steps, growth=2, context=context) for name, context in contexts.items()]


def softmax_attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend by softmax; see :data:`Attend`."""
    return scaled_dot_product_attention(query, key, value)


def told(step: Step, kind: type[Exception]) -> Step:
    """Return a step of which some errors mean that it cannot run here, and are no reason to end the program.

    Args:
        step: The step.
        kind: Of those errors; those of too little memory are left as they are.

    Returns:
        The step, which raises CannotRunError instead, with the first line of the message.
    """

    def telling() -> object:
        try:
            return step()
        except kind as error:
            if is_out_of_memory(error):
                raise
            raise CannotRunError(f"cannot run: {str(error).partition(chr(10))[0]}") from None

    return telling
