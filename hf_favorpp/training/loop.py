"""The training loop of the recipes, on Accelerate: a killed run that is resumed ends with the same metrics.

Nothing random depends on how often the process was started: the order of the data is a function of (seed, epoch),
the dropout masks of (seed, optimizer step, rank), and whatever ``on_step_begin`` does of the optimizer step alone.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import set_seed
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import get_scheduler

from hf_favorpp.training.checkpoints import Progress, find_checkpoint, load_checkpoint, save_checkpoint
from hf_favorpp.training.results import peak_memory_mib
from hf_favorpp.training.settings import LoopSettings

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

Batch = Mapping[str, Tensor]
FINISHED = "finished"
"""Folder name of the checkpoint at the end."""


@dataclass(frozen=True)
class TrainingReport:
    """What a finished run has to say.

    Attributes:
        metrics: Of the last evaluation.
        history: One entry per evaluation: epochs so far, completed steps, training loss since the one before, metrics.
        completed_steps: Optimizer steps.
        tokens: Real tokens trained on, all processes together.
        train_seconds: Time in forward, backward and optimizer steps, s; a resumed run counts its earlier parts.
        wall_seconds: Time in the loop with evaluation and checkpoints, s; counts earlier parts too.
        tokens_per_second: ``tokens / train_seconds``.
        peak_memory_mib: Of this process, MiB; see :func:`hf_favorpp.training.results.peak_memory_mib`.
    """

    metrics: dict[str, float]
    history: list[dict[str, Any]]
    completed_steps: int
    tokens: int
    train_seconds: float
    wall_seconds: float
    tokens_per_second: float
    peak_memory_mib: float


def count_real_tokens(batch: Batch) -> Tensor:
    """Count the unmasked positions of a batch: the sum of its attention mask, or all of ``input_ids`` without one."""
    if "attention_mask" in batch:
        return batch["attention_mask"].sum()
    return torch.tensor(batch["input_ids"].numel(), device=batch["input_ids"].device)


def loss_of_output(model: nn.Module, batch: Batch) -> Tensor:
    """Return the ``loss`` that a Transformers model computes from the labels in the batch."""
    loss: Tensor = model(**batch).loss
    return loss


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    train_loader: DataLoader[Any],
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None,
    settings: LoopSettings,
    *,
    on_step_begin: Callable[[nn.Module, int], object] | None = None,
    on_step_end: Callable[[nn.Module, int], object] | None = None,
    compute_loss: Callable[[nn.Module, Batch], Tensor] = loss_of_output,
    count_tokens: Callable[[Batch], Tensor] = count_real_tokens,
    details: Callable[[], Mapping[str, float]] | None = None,
) -> TrainingReport:
    """Train ``model`` and evaluate it after every epoch, or more often.

    Gradient accumulation, mixed precision and the number of processes are the accelerator's. For exact resumption
    give it ``DataLoaderConfiguration(use_seedable_sampler=True, data_seed=...)``.

    Args:
        accelerator: Used for this run only, with ``gradient_accumulation_steps`` set.
        model: Unprepared; trained in place.
        optimizer: Over the model's parameters, unprepared.
        train_loader: Unprepared; yields mappings of tensors.
        evaluate: Called on every rank with the prepared model in eval mode and without gradients; returns the metrics.
            None never evaluates.
        settings: The rest.
        on_step_begin: Called with the prepared model and the number of completed optimizer steps before each
            optimizer step, once per step whatever the accumulation. Feature redraws go here.
        on_step_end: Called with the prepared model and the number of completed optimizer steps after each of them,
            before a checkpoint is written.
        compute_loss: Loss of a micro-batch.
        count_tokens: Tokens of a micro-batch, for the throughput.
        details: What to show and track beside the loss of the last micro-batch.

    Returns:
        The report, equal on all ranks but for the memory.
    """
    run = _Run(accelerator, model, optimizer, train_loader, settings)
    run.evaluate, run.on_step_begin, run.on_step_end = evaluate, on_step_begin, on_step_end
    run.compute_loss, run.count_tokens, run.details = compute_loss, count_tokens, details
    return run.finish()


class _Run:
    """One call of :func:`train`."""

    evaluate: Callable[[nn.Module], Mapping[str, float]] | None
    on_step_begin: Callable[[nn.Module, int], object] | None
    on_step_end: Callable[[nn.Module, int], object] | None
    compute_loss: Callable[[nn.Module, Batch], Tensor]
    count_tokens: Callable[[Batch], Tensor]
    details: Callable[[], Mapping[str, float]] | None

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer,
        train_loader: DataLoader[Any],
        settings: LoopSettings,
    ) -> None:
        """Prepare everything and restore the checkpoint, if there is one to resume from."""
        self.accelerator, self.settings = accelerator, settings
        self.started = time.perf_counter()
        self.model, self.optimizer, self.loader = accelerator.prepare(model, optimizer, train_loader)
        batches = len(self.loader)
        steps_per_epoch = math.ceil(batches / accelerator.gradient_accumulation_steps)
        epochs_steps = settings.num_epochs * steps_per_epoch
        self.total_steps = epochs_steps if settings.max_steps is None else settings.max_steps
        self.num_epochs = math.ceil(self.total_steps / steps_per_epoch)
        # Not prepared: Accelerate would step it once per process. Here it advances once per optimizer step.
        self.scheduler = get_scheduler(
            settings.lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=settings.warmup_steps or math.ceil(settings.warmup_ratio * self.total_steps),
            num_training_steps=self.total_steps,
        )
        accelerator.register_for_checkpointing(self.scheduler)
        world: dict[str, Any] = {
            "processes": accelerator.num_processes,
            "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
            "batches_per_epoch": batches,
            "total_steps": self.total_steps,
            **json.loads(json.dumps(settings.identity)),
        }
        self.progress = Progress(world=world)
        folder = find_checkpoint(settings.output_dir, settings.resume_from)
        if folder is not None:
            self.progress = load_checkpoint(accelerator, folder, world)
            accelerator.print(f"resumed from {folder} after {self.progress.completed_steps} optimizer steps")
        self.earlier_seconds = self.progress.wall_seconds
        self.new_tokens = torch.zeros((), dtype=torch.int64, device=accelerator.device)
        precise = torch.float32 if accelerator.device.type == "mps" else torch.float64
        self.new_loss = torch.zeros((), dtype=precise, device=accelerator.device)

    def finish(self) -> TrainingReport:
        """Train from where the progress stands to the end."""
        progress = self.progress
        self.bar = tqdm(
            total=self.total_steps,
            initial=progress.completed_steps,
            desc=self.settings.description,
            disable=not (self.settings.show_progress and self.accelerator.is_local_main_process),
        )
        finished = progress.epoch == self.num_epochs
        while progress.epoch < self.num_epochs:
            self._train_epoch()
            self._end_epoch()
            if self.settings.checkpoint_every == "epoch":
                self._checkpoint(f"epoch_{progress.epoch}")
        if self.total_steps == 0 and self.evaluate is not None:
            self._evaluate(0)
        self.bar.close()
        progress.wall_seconds = self._wall_seconds()
        if self.settings.checkpoint_at_end and not finished:
            self._checkpoint(FINISHED)
        skip = ("epoch", "completed_steps", "train_loss")
        return TrainingReport(
            metrics={key: value for entry in progress.history[-1:] for key, value in entry.items() if key not in skip},
            history=progress.history,
            completed_steps=progress.completed_steps,
            tokens=progress.tokens,
            train_seconds=progress.train_seconds,
            wall_seconds=progress.wall_seconds,
            tokens_per_second=progress.tokens / max(progress.train_seconds, 1e-9),
            peak_memory_mib=peak_memory_mib(),
        )

    def _train_epoch(self) -> None:
        """Train to the end of the unfinished epoch, or to the last optimizer step of all."""
        accelerator, progress = self.accelerator, self.progress
        self.model.train()
        self.loader.set_epoch(progress.epoch)
        if hasattr(self.loader.dataset, "set_epoch"):  # Accelerate tells the sampler or the dataset, not always both
            self.loader.dataset.set_epoch(progress.epoch)
        self._seed()  # workers of the data loader derive their seeds from the global state
        loader = self.loader
        if progress.batches_in_epoch:
            loader = accelerator.skip_first_batches(self.loader, progress.batches_in_epoch)
        step_begins = True
        self.segment_started = time.perf_counter()
        for batch in loader if progress.completed_steps < self.total_steps else ():
            if step_begins:
                self._seed()
                if self.on_step_begin is not None:
                    self.on_step_begin(self.model, progress.completed_steps)
            with accelerator.accumulate(self.model):
                loss = self.compute_loss(self.model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients and self.settings.max_grad_norm is not None:
                    accelerator.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
            progress.batches_in_epoch += 1
            progress.loss_batches += 1
            self.new_tokens += self.count_tokens(batch)
            self.new_loss += loss.detach()
            step_begins = accelerator.sync_gradients
            if step_begins:
                self._end_step(loss)
                if progress.completed_steps == self.total_steps:
                    break
        self._settle()

    def _end_step(self, loss: Tensor) -> None:
        """Advance schedule, progress bar and trackers by one step; evaluate and save where that is due."""
        progress, every = self.progress, self.settings.checkpoint_every
        if not self.accelerator.optimizer_step_was_skipped:  # fp16: the gradient overflowed, the weights stayed
            self.scheduler.step()
        progress.completed_steps += 1
        if self.on_step_end is not None:
            self.on_step_end(self.model, progress.completed_steps)
        self.bar.update()
        if progress.completed_steps % self.settings.log_every == 0:
            values = {"loss": loss.item(), "learning_rate": max(self.scheduler.get_last_lr())}
            values |= self.details() if self.details is not None else {}
            self.bar.set_postfix(values)
            self.accelerator.log(values, step=progress.completed_steps)
        evaluate_every = None if self.evaluate is None else self.settings.evaluate_every
        if evaluate_every and progress.completed_steps % evaluate_every == 0:
            self._settle()
            self._evaluate(progress.epoch + progress.batches_in_epoch / len(self.loader))
            self.model.train()
            self.segment_started = time.perf_counter()
        if isinstance(every, int) and progress.completed_steps % every == 0:
            self._settle()
            self._checkpoint(f"step_{progress.completed_steps}")
            self.segment_started = time.perf_counter()

    def _settle(self) -> None:
        """Move time, tokens and loss of the running segment into the progress.

        Raises:
            FloatingPointError: If the loss became NaN or infinite.
        """
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize(self.accelerator.device)
        self.progress.train_seconds += time.perf_counter() - self.segment_started
        self.segment_started = time.perf_counter()
        self.progress.tokens += int(self.accelerator.reduce(self.new_tokens, "sum").item())
        self.progress.loss_sum += float(self.accelerator.reduce(self.new_loss, "mean").item())
        self.new_tokens.zero_()
        self.new_loss.zero_()
        if not math.isfinite(self.progress.loss_sum):
            raise FloatingPointError(
                f"the training loss is {self.progress.loss_sum} at optimizer step {self.progress.completed_steps}. "
                "Lower the learning rate, warm up longer, clip the gradient, or train in bf16 or fp32 instead of fp16."
            )

    def _end_epoch(self) -> None:
        """Evaluate, unless that was just done, and begin the next epoch."""
        progress = self.progress
        done = bool(progress.history) and progress.history[-1]["completed_steps"] == progress.completed_steps
        if self.evaluate is not None and not done:
            self._evaluate(progress.epoch + 1)
        progress.epoch, progress.batches_in_epoch = progress.epoch + 1, 0

    def _evaluate(self, epoch: float) -> None:
        """Evaluate, append to the history, and report."""
        progress = self.progress
        assert self.evaluate is not None
        self.model.eval()
        with torch.no_grad():
            metrics = {name: float(value) for name, value in self.evaluate(self.model).items()}
        train_loss = progress.loss_sum / max(progress.loss_batches, 1)
        progress.loss_sum, progress.loss_batches = 0.0, 0
        progress.history.append({
            "epoch": epoch,
            "completed_steps": progress.completed_steps,
            "train_loss": train_loss,
            **metrics,
        })
        self.accelerator.log({"epoch": epoch, "train_loss": train_loss, **metrics}, step=progress.completed_steps)
        values = ", ".join(f"{name} {value:.4f}" for name, value in {"training loss": train_loss, **metrics}.items())
        if self.accelerator.is_main_process:
            self.bar.write(f"epoch {epoch:.4g}/{self.num_epochs}: {values}")

    def _checkpoint(self, name: str) -> None:
        """Write a checkpoint of the present state."""
        self.progress.wall_seconds = self._wall_seconds()
        assert self.settings.output_dir is not None
        save_checkpoint(
            self.accelerator, self.settings.output_dir, name, self.progress, self.settings.checkpoint_limit
        )

    def _wall_seconds(self) -> float:
        """Return the time in the loop, of this process and of those that it continues, s."""
        return self.earlier_seconds + time.perf_counter() - self.started

    def _seed(self) -> None:
        """Make what is drawn next a function of (seed, completed optimizer steps, rank)."""
        key = (self.settings.seed, self.progress.completed_steps, self.accelerator.process_index)
        set_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))
