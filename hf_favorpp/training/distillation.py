"""Distillation: a student is kept near its softmax teacher, in the hidden states of every block and in the logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax

from hf_favorpp.errors import ConfigError, InputError
from hf_favorpp.observing import undisturbed

LABELS = "labels"
Inputs = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Makes of a batch what a model takes."""


def without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a batch: a teacher needs no labels, and some models compute a loss of them."""
    return {name: value for name, value in batch.items() if name != LABELS}


class Distillation:
    r"""The distance of a student to its teacher on the same inputs, without labels.

    Both are compared as they are used afterwards, in eval mode, whatever mode the student is in: dropout alone puts a
    model at a distance from itself that is larger than what a converted one has to learn.

    Hidden states are compared block by block by |h - h'|^2 / |h'|^2 over real tokens, in the mean over blocks, and the
    final one once more, as the head reads it: after the last norm where a model has one behind its blocks. Logits of
    classes are compared by the divergence of their probabilities at a temperature,
    :math:`T^2\, \mathrm{KL}(p'_T \,\|\, p_T)`, which keeps its scale whatever T is; a single logit is a score, and
    compared by half its squared difference.

    Attributes:
        teacher: A softmax model, frozen and in eval mode.
        temperature: T, > 0.

    Source:
        Hinton, Vinyals & Dean 2015, arXiv:1503.02531, eq. 2 for the logits.
    """

    def __init__(
        self,
        teacher: nn.Module,
        *,
        temperature: float = 2.0,
        inputs: Inputs = without_labels,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Freeze the teacher.

        Args:
            teacher: Any model with the outputs of the student; it is left in eval mode, without gradients.
            temperature: T.
            inputs: Makes of a batch what the models take.
            autocast: Context that the teacher runs in, such as ``accelerator.autocast``.

        Raises:
            ConfigError: The temperature is not above 0.
        """
        if not temperature > 0:
            raise ConfigError(f"the temperature must be above 0, got {temperature!r}.")
        self.teacher, self.temperature = teacher.eval().requires_grad_(False), temperature
        self.inputs, self.autocast = inputs, autocast

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Return the sum of :meth:`losses`; fits ``compute_loss`` of :func:`hf_favorpp.training.loop.train`."""
        return torch.stack(list(self.losses(model, batch).values())).sum()

    def losses(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Compare a student with the teacher.

        Args:
            model: The student, wrapped or not.
            batch: Inputs, with or without labels, on the device of both.

        Returns:
            ``"hidden"`` and, of models that have logits, ``"logits"``: scalars.

        Raises:
            InputError: The models give nothing that can be compared.
        """
        inputs = self.inputs(batch)
        with torch.no_grad(), self.autocast():
            target = outputs_with_states(self.teacher, inputs)
        with undisturbed(model):
            output = outputs_with_states(model, inputs)
        return compare_outputs(output, target, real_tokens(self.teacher, inputs), self.temperature)

    def of_logits(self, logits: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Compare logits that the student gave with the teacher's.

        Args:
            logits: (B, classes) or (B, L, classes).
            inputs: As the student took them.

        Returns:
            A scalar.
        """
        with torch.no_grad(), self.autocast():
            target = self.teacher(**inputs).logits
        return logits_loss(logits, target, real_tokens(self.teacher, inputs), self.temperature)


def real_tokens(model: nn.Module, batch: Mapping[str, Any]) -> dict[int, Tensor]:
    """Return which tokens of a batch are real, by the number of tokens: a speech encoder makes frames of samples.

    Args:
        model: Knows how many.
        batch: With or without ``"attention_mask"``.

    Returns:
        By the length L (B, L), bool: of the mask, and of a speech encoder before and after its adapter.
    """
    mask = batch.get("attention_mask")
    return {} if not isinstance(mask, Tensor) else {mask.shape[-1]: mask.bool(), **_frames(model, mask)}


def _frames(model: nn.Module, mask: Tensor) -> dict[int, Tensor]:
    lengths = getattr(model, "_get_feat_extract_output_lengths", None)
    if lengths is None:
        return {}
    found: dict[int, Tensor] = {}
    # hidden states are those before the adapter, logits those after it
    for options in ({"add_adapter": False}, {}) if getattr(model.config, "add_adapter", False) else ({},):
        count = int(lengths(torch.tensor(mask.shape[-1]), **options))
        real = lengths(mask.sum(-1), **options).unsqueeze(-1)
        found[count] = torch.arange(count, device=mask.device) < real
    return found


def outputs_with_states(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Run a model of Transformers and keep what its head reads.

    Vision and speech models normalise the last block's state before their head reads it, and the normalised one is not
    among their ``hidden_states``: it is the ``last_hidden_state`` of the base model alone.

    Args:
        model: With or without a head, wrapped for several processes or not.
        inputs: As the model takes them.

    Returns:
        Its outputs with ``hidden_states`` and, as far as the base model gives it, ``last_hidden_state``.
    """
    own = getattr(model, "module", model)
    last: list[Tensor | None] = []
    hook = getattr(own, "base_model", own).register_forward_hook(
        lambda module, args, output: last.append(getattr(output, "last_hidden_state", None))
    )
    try:
        outputs = model(**inputs, output_hidden_states=True)
    finally:
        hook.remove()
    if last and last[-1] is not None:
        outputs.last_hidden_state = last[-1]
    return outputs


def compare_outputs(student: Any, teacher: Any, real: Mapping[int, Tensor], temperature: float) -> dict[str, Tensor]:
    """Compare the outputs of two models of Transformers, see :class:`Distillation`.

    Args:
        student: Of :func:`outputs_with_states`; as far as it has a gradient, so have the losses.
        teacher: The same.
        real: Of :func:`real_tokens`.
        temperature: T.

    Returns:
        ``"hidden"`` and ``"logits"``, as far as there are any.

    Raises:
        InputError: There are neither, or one model has more hidden states than the other.
    """
    losses: dict[str, Tensor] = {}
    hidden, target = (_hidden_states(outputs) for outputs in (student, teacher))
    if len(hidden) != len(target):
        raise InputError(
            f"the student gave the states of {len(hidden)} blocks and the teacher those of {len(target)}: they are "
            f"compared block by block. Give a student of as many blocks."
        )
    if hidden:
        blocks = torch.stack([_relative_error(h, t, real) for h, t in zip(hidden, target, strict=True)])
        final, wanted = (getattr(outputs, "last_hidden_state", None) for outputs in (student, teacher))
        if final is None or wanted is None:
            final, wanted = hidden[-1], target[-1]
        losses["hidden"] = blocks.mean() + _relative_error(final, wanted, real)
    logits = getattr(student, "logits", None)
    if logits is not None:
        losses["logits"] = logits_loss(logits, teacher.logits, real, temperature)
    if not losses:
        raise InputError(f"distillation compares hidden states and logits, and {type(student).__name__} has neither.")
    return losses


def _hidden_states(outputs: Any) -> list[Tensor]:
    """Return what the blocks made, without the embeddings, which no block made."""
    states = getattr(outputs, "hidden_states", None)
    if states is not None:
        return list(states[1:]) if len(states) > 1 else list(states)
    last = getattr(outputs, "last_hidden_state", None)
    return [] if last is None else [last]


def _relative_error(hidden: Tensor, target: Tensor, real: Mapping[int, Tensor]) -> Tensor:
    hidden, target = hidden.float(), target.float()
    error, size = (hidden - target).square().sum(-1), target.square().sum(-1)
    if error.ndim == 2 and (mask := real.get(error.shape[1])) is not None:
        error, size = error.masked_fill(~mask, 0), size.masked_fill(~mask, 0)
    return error.sum() / size.sum().clamp(min=torch.finfo(size.dtype).tiny)


def logits_loss(student: Tensor, teacher: Tensor, real: Mapping[int, Tensor], temperature: float) -> Tensor:
    """Compare logits, see :class:`Distillation`.

    Args:
        student: (B, classes), or of every token, (B, L, classes).
        teacher: The same shape.
        real: Of :func:`real_tokens`.
        temperature: T.

    Returns:
        A scalar: the mean over rows, or over real tokens.
    """
    student, teacher = student.float(), teacher.float()
    if student.shape[-1] == 1:
        return (student - teacher).square().mean() / 2
    divergence = kl_div(
        log_softmax(student / temperature, -1),
        log_softmax(teacher / temperature, -1),
        reduction="none",
        log_target=True,
    ).sum(-1)
    mask = real.get(divergence.shape[1]) if divergence.ndim == 2 else None
    if mask is None:
        return divergence.mean() * temperature**2
    return divergence.masked_fill(~mask, 0).sum() / mask.sum().clamp(min=1) * temperature**2
