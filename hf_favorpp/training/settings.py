"""What a training loop needs to know beside the objects that it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_favorpp.errors import ConfigError


@dataclass(frozen=True)
class LoopSettings:
    """Settings of one run of :func:`hf_favorpp.training.loop.train`.

    Attributes:
        output_dir: Folder that receives the checkpoints; None for none.
        num_epochs: Passes over the training data.
        max_steps: Optimizer steps to stop after, whatever ``num_epochs`` says; 0 evaluates alone, None is no limit.
        lr_scheduler_type: A name that ``transformers.get_scheduler`` knows and that needs no metric.
        warmup_steps: Optimizer steps of linear warm-up.
        warmup_ratio: The same as a share of all steps; used where ``warmup_steps`` is 0.
        max_grad_norm: Clip the gradient's norm to this; None leaves it alone.
        evaluate_every: Optimizer steps between evaluations, beside the one after each epoch; None for no more.
        checkpoint_every: Optimizer steps between checkpoints, "epoch", or None for no checkpoints.
        checkpoint_limit: Checkpoints to keep, the newest; None keeps all.
        checkpoint_at_end: Whether a finished run writes one more, so that resuming it changes nothing.
        resume_from: Checkpoint folder, "latest", or None.
        seed: Of the dropout masks. The order of the data has its own seed in Accelerate's data loader configuration.
        log_every: Optimizer steps between updates of the progress bar and the trackers.
        description: What the progress bar is called.
        show_progress: Whether the main process draws a progress bar.
        identity: JSON-able settings of the program that a resumed run must share with the interrupted one.
    """

    output_dir: Path | None
    num_epochs: int = 3
    max_steps: int | None = None
    lr_scheduler_type: str = "linear"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    max_grad_norm: float | None = None
    evaluate_every: int | None = None
    checkpoint_every: int | str | None = None
    checkpoint_limit: int | None = None
    checkpoint_at_end: bool = False
    resume_from: str | None = None
    seed: int = 0
    log_every: int = 10
    description: str = "training"
    show_progress: bool = True
    identity: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ConfigError: If a number is out of its range; the message names the setting, its rule and its value.
        """
        at_least_one: dict[str, Any] = {
            "num_epochs": self.num_epochs,
            "max_steps": self.max_steps or None,
            "checkpoint_limit": self.checkpoint_limit,
            "log_every": self.log_every,
            "evaluate_every": self.evaluate_every,
            "checkpoint_every": None if self.checkpoint_every == "epoch" else self.checkpoint_every,
        }
        for name, value in at_least_one.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}.")
        if self.output_dir is None and (self.checkpoint_every or self.checkpoint_at_end or self.resume_from):
            raise ConfigError("checkpoints need an output_dir, got None.")
        if self.max_steps is not None and self.max_steps < 0:
            raise ConfigError(f"max_steps must be at least 0, got {self.max_steps}.")
        if self.warmup_steps < 0 or not 0 <= self.warmup_ratio < 1:
            raise ConfigError(
                f"warm-up must be at least 0 steps or a ratio in [0, 1), got warmup_steps={self.warmup_steps}, "
                f"warmup_ratio={self.warmup_ratio}."
            )
        if self.seed < 0:
            raise ConfigError(f"seed must be at least 0, got {self.seed}.")
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise ConfigError(
                f"max_grad_norm must be positive, got {self.max_grad_norm}. Leave it out for no clipping."
            )
