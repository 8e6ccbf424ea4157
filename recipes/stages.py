"""What comes before the training on a task, transfer and distillation, and the teacher's part in the task."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from uptraining import loop_settings, make_accelerator
from uptraining_arguments import UptrainingArguments

from hf_favorpp import FavorppCallback, transfer_attention
from hf_favorpp.nn import converted_layers
from hf_favorpp.training.checkpoints import find_checkpoint
from hf_favorpp.training.distillation import Distillation, Inputs, without_labels
from hf_favorpp.training.loop import train
from hf_favorpp.training.parameter_groups import parameter_groups
from hf_favorpp.training.results import write_results

TRANSFER, DISTIL, STAGES_FILE, LOSSES_FILE = "transfer", "distil", "stages.json", "losses.json"
Score = Callable[[nn.Module], Mapping[str, float]]


class Stages:
    """The stages of one run, which a resumed run does not repeat.

    Attributes:
        report: For results.json: steps, seconds and losses of each stage, and with ``evaluate_first`` the metrics
            after it.
    """

    def __init__(
        self,
        args: UptrainingArguments,
        output_dir: Path,
        accelerator: Accelerator,
        teacher: PreTrainedModel | None,
        inputs: Inputs = without_labels,
    ) -> None:
        """Make ready.

        Args:
            args: Of the run.
            output_dir: Of the run; each stage has its checkpoints in a folder within.
            accelerator: Of the run.
            teacher: The softmax model of the task; None without one.
            inputs: Makes of a batch what the model takes.
        """
        self.args, self.output_dir, self.accelerator, self.inputs = args, output_dir, accelerator, inputs
        self.report: dict[str, Any] = {}
        self.path = output_dir / STAGES_FILE
        self.distillation = None
        if teacher is not None:
            self.distillation = Distillation(
                teacher.to(accelerator.device),
                temperature=args.kd_temperature,
                inputs=inputs,
                autocast=accelerator.autocast,
            )

    def run(self, model: PreTrainedModel, loader: DataLoader[Any], score: Score, **decay: Any) -> None:
        """Bring the model to where the task begins, in place.

        Args:
            model: Converted and calibrated.
            loader: Of the training rows, unprepared.
            score: Gives the metrics of a model.
            **decay: What must not decay, as :func:`parameter_groups` takes it.
        """
        args = self.args
        self.report = self._read(self.path)
        if find_checkpoint(self.output_dir, args.resume_from_checkpoint) is not None:
            return  # the checkpoint holds what the stages made
        stages: dict[str, tuple[int, Callable[[Path | None], dict[str, Any]]]] = {
            TRANSFER: (args.transfer_steps, lambda folder: self._transfer(model, loader, folder)),
            DISTIL: (args.distil_steps, lambda folder: self._distil(model, loader, folder, decay)),
        }
        folders = {name: self._folder(name) for name, (steps, _) in stages.items() if steps}
        if "initial_metrics" not in self.report:
            self._evaluate(model, score, "initial_metrics", self.report)
        self._write(self.path, self.report)
        for name, folder in folders.items():
            steps, run = stages[name]
            self.accelerator.print(f"{name}: {steps} steps")
            begin = time.perf_counter()
            found = run(folder)
            if name not in self.report:  # a resumed run loads what a finished stage made
                found = {"steps": steps, "seconds": time.perf_counter() - begin, **found}
                self._evaluate(model, score, "metrics", found)
                self.report[name] = found
                self._write(self.path, self.report)

    def loss(self, own: Callable[[nn.Module, Mapping[str, Tensor]], tuple[Tensor, Tensor, Mapping[str, Any]]]) -> Any:
        """Return the loss of the task, to which the teacher adds its share.

        Args:
            own: Gives the loss by the labels, the logits, and the inputs that they were made of.

        Returns:
            What :func:`train` takes as ``compute_loss``.
        """
        share, distillation = self.args.kd_weight, self.distillation

        def compute_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
            loss, logits, inputs = own(model, batch)
            if not share or distillation is None:
                return loss
            return (1 - share) * loss + share * distillation.of_logits(logits, inputs)

        return compute_loss

    def _read(self, path: Path) -> dict[str, Any]:
        """Return what an interrupted run wrote that is being resumed; nothing of any other."""
        if self.args.resume_from_checkpoint is None or not path.is_file():
            return {}
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        """Write the file; without content there is none, also none of an earlier run."""
        if self.accelerator.is_main_process:
            if content:
                write_results(path, content)
            else:
                path.unlink(missing_ok=True)

    def _losses(self, folder: Path | None) -> tuple[dict[str, Any], Callable[[int, Any], None]]:
        """Return the losses of a stage by its steps, and what adds one: a resumed stage knows those before it."""
        path = None if folder is None else folder / LOSSES_FILE
        losses = {} if path is None else self._read(path)

        def write() -> None:
            if path is not None:
                self._write(path, losses)

        def add(step: int, loss: Any) -> None:
            losses[str(step)] = loss
            write()

        write()
        return losses, add

    def _evaluate(self, model: PreTrainedModel, score: Score, name: str, report: dict[str, Any]) -> None:
        if self.args.evaluate_first:
            with torch.no_grad():
                report[name] = dict(score(model.eval()))
            values = ", ".join(f"{metric} {value:.4f}" for metric, value in report[name].items())
            self.accelerator.print(f"before training on the task: {values}")

    def _folder(self, name: str) -> Path | None:
        """Return where a stage has its checkpoints; None without any."""
        folder = self.output_dir / name
        if self.args.checkpoint_interval() is None:
            return None
        if self.args.resume_from_checkpoint is None:
            for part in (folder, *folder.glob("*")):
                find_checkpoint(part, None)  # refuses checkpoints of an earlier run
        return folder

    def _transfer(self, model: PreTrainedModel, loader: DataLoader[Any], folder: Path | None) -> dict[str, Any]:
        args = self.args
        losses, add = self._losses(folder)
        transfer_attention(
            model,
            loader,
            args.transfer_steps,
            loss=args.transfer_loss,
            learning_rate=args.transfer_learning_rate,
            checkpoint_dir=folder,
            checkpoint_every=args.checkpoint_interval(),
            on_log=lambda step, found: add(step, [round(value, 4) for value in found.values()]),
            inputs=self.inputs,
            seed=args.seed,
        )
        return {"layer_losses": losses}

    def _distil(
        self, model: PreTrainedModel, loader: DataLoader[Any], folder: Path | None, decay: dict[str, Any]
    ) -> dict[str, Any]:
        args = self.args
        assert self.distillation is not None
        rate = args.distil_learning_rate or args.learning_rate
        settings = loop_settings(args, self.output_dir)
        settings = replace(
            settings,
            output_dir=folder,
            max_steps=args.distil_steps,
            evaluate_every=None,
            checkpoint_limit=None if folder is None else 1,
            checkpoint_at_end=folder is not None,
            resume_from=None if folder is None or args.resume_from_checkpoint is None else "latest",
            description="distilling",
            identity={**settings.identity, "stage": DISTIL},  # no checkpoint of the task
        )
        untracked = replace(args, with_tracking=False, report_to="all")
        some_unused = self.accelerator.ddp_handler.find_unused_parameters
        accelerator = make_accelerator(untracked, self.output_dir, DISTIL, some_unused=some_unused)
        groups = parameter_groups(
            model, rate, args.weight_decay, feature_learning_rate=args.feature_learning_rate, **decay
        )
        renewal = FavorppCallback() if converted_layers(model) else None
        distillation, latest = self.distillation, torch.zeros(())
        losses, add = self._losses(folder)

        def compute_loss(student: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
            nonlocal latest
            loss = distillation(student, batch)
            latest = loss.detach()
            return loss

        def end_step(student: nn.Module, completed_steps: int) -> None:
            if renewal is not None:
                renewal.end_step(student, completed_steps)
            if completed_steps % settings.log_every == 0:
                add(completed_steps, round(float(latest), 5))

        train(
            accelerator,
            model,
            torch.optim.AdamW(groups, lr=rate, fused=True),
            loader,
            None,
            settings,
            on_step_begin=renewal and renewal.step,
            on_step_end=end_step,
            compute_loss=compute_loss,
            count_tokens=lambda batch: torch.tensor(len(next(iter(batch.values()))), device=accelerator.device),
        )
        accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # takes its autocast off again
        return {"losses": losses}


def loss_and_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the loss that a model of Transformers computes by the labels, its logits, and their inputs.

    Args:
        model: Prepared.
        batch: With labels.

    Returns:
        What :meth:`Stages.loss` expects.
    """
    output = model(**batch)
    return output.loss, output.logits, without_labels(batch)
