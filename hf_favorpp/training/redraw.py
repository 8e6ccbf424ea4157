"""Redraws during training, for ``Trainer`` and for hand-written loops."""

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_favorpp.config import RedrawSchedule
from hf_favorpp.convert import converted_layers
from hf_favorpp.errors import ConversionError


class FavorppCallback(TrainerCallback):
    """Redraws the projections of a model between optimizer steps.

    With ``Trainer``: ``Trainer(..., callbacks=[FavorppCallback()])``. In a hand-written loop: ``callback.step(model,
    completed_steps)`` before each optimizer step, on the wrapped (DDP, compiled) model as it is. The draw in force is
    a function of the number of completed optimizer steps alone: it is the same on every rank, after a resume, and
    throughout the micro-batches of gradient accumulation.
    """

    def __init__(self, schedule: RedrawSchedule | None = None) -> None:
        """Choose the schedule.

        Args:
            schedule: When to redraw; None uses ``FavorppConfig.redraw`` of the model, which may be never.
        """
        self.schedule = schedule

    def step(self, model: nn.Module, completed_steps: int) -> bool:
        """Bring the projections to the draw that is due. Nothing happens in eval mode.

        Args:
            model: A converted model, wrapped or not.
            completed_steps: Optimizer steps completed so far.

        Returns:
            Whether any layer was redrawn.

        Raises:
            ConversionError: The model has no converted layer.
        """
        return model.training and self._redraw(model, completed_steps)

    def _redraw(self, model: nn.Module, completed_steps: int) -> bool:
        layers = converted_layers(model)
        if not layers:
            raise ConversionError("there is nothing to redraw: the model is not converted to FAVOR++.")
        redrawn = False
        for layer in layers:
            schedule = self.schedule or layer.config.redraw
            if schedule is None:
                continue
            due = schedule.draw_index(completed_steps)
            if due != int(layer.draw_index):
                layer.redraw_(due)
                redrawn = True
        return redrawn

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
            self._redraw(model, state.global_step)
