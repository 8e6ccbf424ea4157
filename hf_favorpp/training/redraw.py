"""Redraws and recalibrations during training, for ``Trainer`` and for hand-written loops."""

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_favorpp.calibration import sum_over_processes
from hf_favorpp.config import RedrawSchedule
from hf_favorpp.errors import ConversionError
from hf_favorpp.nn import converted_layers


class FavorppCallback(TrainerCallback):
    """Redraws the projections of a model between optimizer steps, and renews its calibration.

    With ``Trainer``: ``Trainer(..., callbacks=[FavorppCallback()])``. In a hand-written loop: ``callback.step(model,
    completed_steps)`` before each optimizer step, on the wrapped (DDP, compiled) model as it is, and, with
    recalibration, ``callback.end_step(model, completed_steps)`` after it. The draw in force is a function of the
    number of completed optimizer steps alone: it is the same on every rank, after a resume, and throughout the
    micro-batches of gradient accumulation.
    """

    def __init__(self, schedule: RedrawSchedule | None = None) -> None:
        """Choose the schedule.

        Args:
            schedule: When to redraw; None uses ``FavorppConfig.redraw`` of the model, which may be never.
        """
        self.schedule = schedule
        self._absorbed_steps: int | None = None

    def step(self, model: nn.Module, completed_steps: int) -> bool:
        """Bring projections and statistics to the draw and the calibration that are due; in eval mode nothing happens.

        Args:
            model: A converted model, wrapped or not.
            completed_steps: Optimizer steps completed so far.

        Returns:
            Whether any layer was redrawn or calibrated anew.

        Raises:
            ConversionError: The model has no converted layer, or a schedule was given and projections are learnable.
        """
        return model.training and self._renew(model, completed_steps)

    def _renew(self, model: nn.Module, completed_steps: int) -> bool:
        layers = converted_layers(model)
        if not layers:
            raise ConversionError("there is nothing to redraw: the model is not converted to FAVOR++.")
        renewed = False
        for layer in layers:
            if (recalibrate := layer.config.recalibrate) is not None:
                if self._absorbed_steps != completed_steps:  # end_step did it: the sum over processes is not free
                    layer.absorb_(sum_over_processes)
                renewed |= layer.recalibrate_(recalibrate.draw_index(completed_steps))
            if (redraw := self.schedule or layer.config.redraw) is not None:
                if layer.config.learnable:
                    raise ConversionError(
                        f"the projections are learnable, and a redraw would undo what was learnt, but the callback "
                        f"has the schedule {redraw}: use FavorppCallback() without one."
                    )
                due = redraw.draw_index(completed_steps)
                if due != int(layer.draw_index):
                    layer.redraw_(due)
                    renewed = True
        return renewed

    def end_step(self, model: nn.Module, completed_steps: int) -> None:
        """Take what was seen in an optimizer step into the running moments, before a checkpoint is written.

        Without ``FavorppConfig.recalibrate`` there are none. Every process must call it.

        Args:
            model: A converted model, wrapped or not.
            completed_steps: Optimizer steps completed so far.
        """
        for layer in converted_layers(model):
            layer.absorb_(sum_over_processes)
        self._absorbed_steps = completed_steps

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Update the running moments after an optimizer step; called by ``Trainer``.

        Args:
            args: Not used.
            state: Holds the number of completed optimizer steps.
            control: Not used.
            model: The model in training.
            **kwargs: Not used.
        """
        if model is not None:
            self.end_step(model, state.global_step)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Redraw before an optimizer step; called by ``Trainer``.

        Args:
            args: Not used.
            state: Holds the number of completed optimizer steps.
            control: Not used.
            model: The model in training.
            **kwargs: Not used.
        """
        if model is not None:  # still in eval mode here after an evaluation: Trainer calls model.train() later
            self._renew(model, state.global_step)
