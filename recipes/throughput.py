"""Which is slower, the loader or the model: images per second of each alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

LOADER_BATCHES = 20
MODEL_SECONDS = 2.0


def loader_rate(loader: DataLoader[Any], num_batches: int = LOADER_BATCHES) -> float:
    """Measure a loader that is asked for batches as fast as it makes them.

    Args:
        loader: Yields mappings with "labels". What its workers had prepared before the clock starts is about what
            they have prepared when it stops; of a loader too short for that, the whole pass is taken.
        num_batches: To time.

    Returns:
        Images per second.
    """
    ahead = loader.num_workers * (loader.prefetch_factor or 0)
    begun = started = time.perf_counter()
    images = total = 0
    for number, batch in enumerate(loader):
        total += len(batch["labels"])
        if number == ahead:
            started = time.perf_counter()
        elif number > ahead:
            images += len(batch["labels"])
        if number == ahead + num_batches:
            return images / (time.perf_counter() - started)
    return total / (time.perf_counter() - begun)


def model_rate(
    model: nn.Module,
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor],
    batch: dict[str, Tensor],
    autocast: Callable[[], Any],
) -> float:
    """Measure forward and backward on one batch, without loader, optimizer and communication.

    Args:
        model: On its device; as before afterwards, but for gradients, of which it has none then.
        loss: Of the model and the batch.
        batch: On the same device.
        autocast: Context of the mixed precision.

    Returns:
        Images per second, of at least one pass after a first one.
    """
    training = model.training
    model.eval()  # the same work, and no running statistics
    passes, seconds = 0, 0.0
    while passes < 2 or seconds < MODEL_SECONDS:
        started = time.perf_counter()
        with autocast():
            value = loss(model, batch)
        value.backward()
        model.zero_grad(set_to_none=True)
        if value.device.type == "cuda":
            torch.cuda.synchronize(value.device)
        passes += 1
        if passes > 1:
            seconds += time.perf_counter() - started
    model.train(training)
    return len(batch["labels"]) * (passes - 1) / seconds


def verdict(loader: float, model: float, num_workers: int) -> str:
    """Return the two rates and what follows, for a person to read."""
    text = f"loader alone {loader:,.0f} images/s with {num_workers} workers, model alone {model:,.0f} images/s"
    if loader < model:
        return f"{text}: the loader is the bottleneck, raise --num_workers if there are cores for it"
    return f"{text}: the loader is not the bottleneck"
