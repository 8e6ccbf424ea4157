"""Attention transfer: features learnt from the softmax attention that they stand in for.

First every converted layer by itself: the softmax model runs, and in each layer the features attend to the same
queries, keys and values, and learn to give the same output. Then, if wanted, all layers together: the model with
features learns to give the hidden states and logits that it gives with softmax. Nothing but the features changes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hf_favorpp.errors import ConfigError, ConversionError, InputError
from hf_favorpp.nn import FavorppFeatures, Probe, converted_layers, learnable_parameters, named_layers
from hf_favorpp.observing import evaluating, has_towers, observing, tower_for
from hf_favorpp.rules import require_int
from hf_favorpp.training.distillation import (
    Inputs,
    compare_outputs,
    outputs_with_states,
    real_tokens,
    without_labels,
)
from hf_favorpp.training.layer_losses import LOSSES
from hf_favorpp.training.loop import train
from hf_favorpp.training.settings import LoopSettings

LOG_EVERY = 10
TEMPERATURE = 2.0

Model = TypeVar("Model", bound=nn.Module)


def transfer_attention(
    model: Model,
    dataloader: Iterable[Mapping[str, Any]],
    steps: int,
    *,
    align_steps: int = 0,
    loss: str = "output",
    learning_rate: float = 0.1,
    align_learning_rate: float = 0.02,
    checkpoint_dir: str | Path | None = None,
    checkpoint_every: int | str | None = None,
    on_log: Callable[[int, Mapping[str, float]], object] | None = None,
    inputs: Inputs = without_labels,
    seed: int = 0,
) -> Model:
    """Learn the features of a converted model from its own softmax attention, in place.

    For ``steps`` optimizer steps every converted layer learns at once: one forward of the softmax model, which may be
    fused, gives queries, keys, values and outputs of all layers, and the features of each learn by themselves to give
    the same outputs. Then for ``align_steps`` the whole converted model learns to give the hidden states of every
    block, and the logits, that it gives with softmax (as :class:`hf_favorpp.training.distillation.Distillation`). No
    labels are used. All other weights stay as they are: ``revert_to_softmax`` gives back the model bit by bit.

    Adam with a cosine schedule and no weight decay, on the device, in the mixed precision, with the accumulation of
    gradients and on the processes that Accelerate has; gradients are averaged over the processes. Memory is linear in
    length.

    Args:
        model: Converted with ``FavorppConfig(learnable="projections")``, and best calibrated. It is moved to the
            device of Accelerate, and is in eval mode meanwhile.
        dataloader: Batches, mappings of tensors as the model takes them, gone through as often as needed: a
            ``DataLoader``, of which each process takes its part, or a list of batches.
        steps: Optimizer steps of the layers by themselves, >= 0.
        align_steps: Optimizer steps of all layers together, >= 0.
        loss: Of a layer. ``"output"``: |out - exact|^2 / |exact|^2 over real queries. ``"weights"``: the
            cross-entropy of the attention weights of one query in eight, less the least that it can be.
        learning_rate: Of the layers by themselves; features are learnt where queries and keys have about unit scale.
        align_learning_rate: Of all layers together.
        checkpoint_dir: Folder for checkpoints of both parts; where it holds some, the run goes on from the latest.
        checkpoint_every: Optimizer steps between checkpoints, or ``"epoch"``, beside the one at the end of each part.
        on_log: Called every 10 optimizer steps with their number and, in the first part, the relative error
            |out - exact| / |exact| of each layer by its name, or the nats of ``"weights"``; in the second part with
            the losses of hidden states and logits.
        inputs: Makes of a batch what the model takes.
        seed: Of the sampled queries, and of the order in which a shuffling ``dataloader`` goes through its rows.

    Returns:
        The same model.

    Raises:
        ConfigError: An option is impossible, or a checkpoint was written by a run with others.
        ConversionError: The model is not converted, its features are not learnable, or not calibrated though their
            configuration asks for that.
        InputError: A batch is not a mapping, there is none, or the data do not reach every converted layer.

    Source:
        Zhang et al. 2024 (Hedgehog, arXiv:2402.04347) for learning features from attention before anything else.
    """
    require_int("steps", steps, minimum=0)
    require_int("align_steps", align_steps, minimum=0)
    if loss not in LOSSES:
        raise ConfigError(f"loss must be one of {', '.join(map(repr, LOSSES))}, got {loss!r}.")
    for name, rate in (("learning_rate", learning_rate), ("align_learning_rate", align_learning_rate)):
        if not rate > 0:
            raise ConfigError(f"{name} must be above 0, got {rate!r}.")
    if checkpoint_every is not None and checkpoint_dir is None:
        raise ConfigError(f"checkpoint_every={checkpoint_every} needs a checkpoint_dir.")
    layers = _learnable_layers(model)
    loader = _as_loader(dataloader)
    parts: tuple[tuple[type[_Part], int, float], ...] = (
        (_Attention, steps, learning_rate),
        (_Outputs, align_steps, align_learning_rate),
    )
    with _alone(model):
        for kind, count, rate in parts:
            if count:
                folder = None if checkpoint_dir is None else Path(checkpoint_dir, kind.NAME)
                settings = LoopSettings(
                    output_dir=folder,
                    max_steps=count,
                    lr_scheduler_type="cosine",
                    checkpoint_every=checkpoint_every,
                    checkpoint_limit=None if folder is None else 1,
                    checkpoint_at_end=folder is not None,
                    resume_from=None if folder is None else "latest",
                    seed=seed,
                    log_every=LOG_EVERY,
                    description=f"learning {kind.NAME}",
                    identity={"learning_rate": rate, "loss": loss, "seed": seed},
                )
                _learn(kind(model, layers, loss, inputs), loader, rate, settings, on_log)
    return model


def _learnable_layers(model: nn.Module) -> dict[str, FavorppFeatures]:
    """Return the features by the names of their attention modules."""
    layers = named_layers(model)
    if not layers:
        raise ConversionError(f"{type(model).__name__} is not converted; call convert_to_favorpp(model) first.")
    for name, layer in layers.items():
        if not layer.config.learnable:
            raise ConversionError(
                f"the features of {name} cannot learn: learnable is None. Convert the model with "
                f"FavorppConfig(learnable='projections')."
            )
        layer.require_calibrated()
    return layers


def _as_loader(dataloader: Iterable[Mapping[str, Any]]) -> DataLoader[Any]:
    if isinstance(dataloader, DataLoader):
        return dataloader
    if isinstance(dataloader, Mapping):
        raise InputError("the dataloader must yield batches; a single batch is passed as [batch].")
    batches: Any = list(dataloader)
    if not batches:
        raise InputError("there is no batch to learn from: the dataloader is empty, or used up.")
    return DataLoader(batches, batch_size=1, collate_fn=lambda rows: rows[0])


@contextmanager
def _alone(model: nn.Module) -> Generator[None]:
    """Let features be all that has a gradient for a while, in eval mode."""
    features = learnable_parameters(model)
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.requires_grad_(id(parameter) in features)
    try:
        with evaluating(model), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)
            if id(parameter) in features:
                parameter.grad = None


def _learn(
    part: _Part,
    loader: DataLoader[Any],
    learning_rate: float,
    settings: LoopSettings,
    on_log: Callable[[int, Mapping[str, float]], object] | None,
) -> None:
    """Train the features of one part of the transfer."""
    accelerator = Accelerator(
        gradient_accumulation_steps=GradientState().num_steps,  # which all accelerators of a process share
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=settings.seed),
    )
    part.model.to(accelerator.device)

    def log(_: nn.Module, completed_steps: int) -> None:
        if on_log is not None and completed_steps % LOG_EVERY == 0:
            on_log(completed_steps, dict(zip(part.names, part.shown(), strict=True)))

    train(
        accelerator,
        part,
        torch.optim.Adam(part.parameters(), lr=learning_rate),
        loader,
        None,
        settings,
        on_step_end=log,
        compute_loss=lambda prepared, batch: prepared(batch).sum(),
        count_tokens=lambda batch: torch.tensor(len(next(iter(batch.values()))), device=accelerator.device),
        details=lambda: dict(zip(part.short_names, part.shown(), strict=True)),
    )


class _Part(nn.Module):
    """The features, and how they learn. The model that they are of is no part of it, so it is not saved with them.

    Attributes:
        names: Of the losses.
        short_names: For the progress bar.
        latest: The losses of the last batch, (losses,).
    """

    NAME = ""

    def __init__(self, model: nn.Module, layers: Mapping[str, FavorppFeatures], loss: str, inputs: Inputs) -> None:
        super().__init__()
        self.features = nn.ModuleList(layers.values())
        self._model = (model,)  # in a tuple it is not registered
        self.layer_names, self.loss, self.make_inputs = list(layers), loss, inputs
        self.names = self.short_names = self.layer_names
        self.latest = torch.zeros(0)

    @property
    def model(self) -> nn.Module:
        return self._model[0]

    @property
    def layers(self) -> list[FavorppFeatures]:
        return converted_layers(self.features)

    def train(self, mode: bool = True) -> _Part:
        """Leave everything in eval mode."""
        return self

    def shown(self) -> list[float]:
        """Return ``latest`` as it is to be read."""
        return [float(value) for value in self.latest]

    def inputs(self, batch: object) -> tuple[nn.Module, Mapping[str, Any]]:
        """Return what of the model a batch is for, and the inputs in it."""
        if not isinstance(batch, Mapping):
            raise InputError(
                f"a batch must be a mapping of tensors, as the model takes it, got {type(batch).__name__}."
            )
        inputs = self.make_inputs(batch)
        return tower_for(self.model, inputs), inputs


class _Attention(_Part):
    """Every layer by itself, beside the softmax model."""

    NAME = "attention"

    def __init__(self, model: nn.Module, layers: Mapping[str, FavorppFeatures], loss: str, inputs: Inputs) -> None:
        super().__init__(model, layers, loss, inputs)
        self.short_names = [str(layer.layer) for layer in layers.values()]

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss of each layer, (layers,)."""
        tower, inputs = self.inputs(batch)
        losses = [LOSSES[self.loss](layer) for layer in self.layers]
        probes: list[Probe] = [loss.watch for loss in losses]
        with torch.no_grad(), observing(self.layers, probes, exact=True):
            tower(**inputs)
        for name, loss in zip(self.layer_names, losses, strict=True):
            if not loss.called and not has_towers(self.model):
                raise InputError(f"the data never reached {name}: its part of the model does not run on them.")
        values = torch.stack([loss.value() for loss in losses])
        self.latest = values.detach()
        return values

    def shown(self) -> list[float]:
        """Return relative errors, not their squares."""
        return [value**0.5 for value in super().shown()] if self.loss == "output" else super().shown()


class _Outputs(_Part):
    """All layers together."""

    NAME = "outputs"

    def __init__(self, model: nn.Module, layers: Mapping[str, FavorppFeatures], loss: str, inputs: Inputs) -> None:
        super().__init__(model, layers, loss, inputs)
        self.names = self.short_names = []

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the losses of hidden states and logits, as far as there are any."""
        tower, inputs = self.inputs(batch)
        with torch.no_grad(), observing(self.layers, exact=True):
            target = outputs_with_states(tower, inputs)
        output = outputs_with_states(tower, inputs)
        losses = compare_outputs(output, target, real_tokens(tower, inputs), TEMPERATURE)
        self.names = self.short_names = list(losses)
        values = torch.stack(list(losses.values()))
        self.latest = values.detach()
        unused = sum((p.sum() * 0 for p in self.parameters()), values.new_zeros(()))  # of a tower without data
        return values + unused
