"""Whole models with random weights, built from configurations: softmax, identity and converted attention in each."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_favorpp.benchmarking.lineup import SDPA, Entry, Lineup, Observer, Shape, config_name, sdpa_contestants
from hf_favorpp.benchmarking.timing import Contestant, Step
from hf_favorpp.config import FavorppConfig
from hf_favorpp.convert import convert_to_favorpp
from hf_favorpp.registration import padding_mask

IDENTITY = "identity"
IDENTITY_IMPLEMENTATION = "favorpp_benchmark_identity"
CALIBRATION_TOKENS = 512

MakeInputs = Callable[[PreTrainedConfig, int, int, torch.Generator], dict[str, Tensor]]
"""From configuration, batch size, size and generator to the inputs, on the CPU."""


@dataclass(frozen=True)
class ModelKind:
    """A model that can be timed at growing sizes.

    Attributes:
        title: As it is shown.
        model_type: ``config.model_type``.
        num_tokens: From configuration and size to the tokens that attend, L.
        make_inputs: Makes the inputs of a size.
        options: Of the configuration, where the defaults of Transformers do not do. No dropout: converted layers have
            none, and the others are to be compared with them.
        size_options: From a size to those options of the configuration that depend on it.
        images: Whether the size is the side of an image in pixels, not a number of tokens.
    """

    title: str
    model_type: str
    num_tokens: Callable[[PreTrainedConfig, int], int]
    make_inputs: MakeInputs
    options: Mapping[str, Any] = field(default_factory=dict)
    size_options: Callable[[int], dict[str, Any]] = lambda size: {}
    images: bool = False


def random_token_ids(
    config: PreTrainedConfig, batch_size: int, size: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return texts of a length; see :data:`MakeInputs`."""
    return {"input_ids": torch.randint(config.vocab_size, (batch_size, size), generator=generator)}


def random_images(
    config: PreTrainedConfig, batch_size: int, size: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return square images of a size; see :data:`MakeInputs`."""
    return {"pixel_values": torch.randn(batch_size, config.num_channels, size, size, generator=generator)}


def random_spectra(
    config: PreTrainedConfig, batch_size: int, size: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return as many frames of mel spectra; see :data:`MakeInputs`."""
    shape = (batch_size, size, config.feature_projection_input_dim)
    return {"input_features": torch.randn(shape, generator=generator)}


def _waveforms(config: PreTrainedConfig, batch_size: int, size: int, generator: torch.Generator) -> dict[str, Tensor]:
    samples = size
    for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
        samples = (samples - 1) * stride + kernel
    return {"input_values": torch.randn(batch_size, samples, generator=generator)}


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_NO_SPEECH_DROPOUT = {
    **dict.fromkeys(("hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout"), 0.0),
    **{"layerdrop": 0.0, "apply_spec_augment": False},
}
_VIT = ModelKind(
    "ViT-B/16",
    "vit",
    lambda config, size: (size // config.patch_size) ** 2 + 1,
    random_images,
    _NO_DROPOUT,
    lambda size: {"image_size": size},
    images=True,
)


def _conformer(positions: str) -> ModelKind:
    return ModelKind(
        f"Conformer (S), {positions} positions",
        "wav2vec2-bert",
        lambda config, size: size,
        random_spectra,
        {
            **_NO_SPEECH_DROPOUT,
            **{"hidden_size": 144, "num_attention_heads": 4, "num_hidden_layers": 16, "intermediate_size": 576},
            "conformer_conv_dropout": 0.0,
            "position_embeddings_type": positions.replace("-", "_"),
        },
    )


MODELS: dict[str, ModelKind] = {
    "bert": ModelKind(
        "BERT-base",
        "bert",
        lambda config, size: size,
        random_token_ids,
        _NO_DROPOUT,
        lambda size: {"max_position_embeddings": max(512, size)},
    ),
    "vit": _VIT,
    "vit-small": replace(
        _VIT,
        title="ViT-S/14",
        options={
            **_NO_DROPOUT,
            **{"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "patch_size": 14},
        },
    ),
    "wav2vec2": ModelKind("wav2vec 2.0 base", "wav2vec2", lambda config, size: size, _waveforms, _NO_SPEECH_DROPOUT),
    **{f"conformer-{positions}": _conformer(positions) for positions in ("rotary", "relative", "relative-key")},
}
"""By the name that ``--model`` takes. The Conformers are of the small size of Gulati et al. 2020, arXiv:2005.08100,
Table 1, and their sizes are frames of the encoder."""


def model_lineup(
    kind: ModelKind, size: int, shape: Shape, configs: Iterable[FavorppConfig], *, seed: int = 0
) -> Lineup:
    """Return the contestants of one model at one size. All of them share its weights.

    Args:
        kind: The model.
        size: Tokens, or pixels along the side of an image.
        shape: Of which batch size, dtype and device matter; heads are the model's.
        configs: Options of the library, one row each.
        seed: Of weights and inputs.

    Returns:
        The softmax model, the same with the identity in place of attention, and the converted ones.
    """
    model = build_model(kind, size, shape, seed)
    length = kind.num_tokens(model.config, size)
    generator = torch.Generator().manual_seed(seed)
    inputs = _on(kind.make_inputs(model.config, shape.batch_size, size, generator), shape)
    grad_out = torch.randn(shape.batch_size, length, model.config.hidden_size, generator=generator)
    make_steps = functools.partial(model_steps, inputs=inputs, grad_out=grad_out.to(shape.device, shape.dtype))
    softmax = make_steps(model)
    contestants = sdpa_contestants(shape.device, lambda attend: softmax)
    contestants.append(Contestant(IDENTITY, make_steps(with_identity_attention(model))))
    entries = []
    for config in configs:
        calibration = None
        if config.statistics == "calibrated":
            cut = size if kind.images else min(size, CALIBRATION_TOKENS)
            calibration = [_on(kind.make_inputs(model.config, 1, cut, generator), shape)]
        converted = convert_to_favorpp(twin(model), config, calibration_data=calibration)
        observer = Observer(config.backend)
        steps = {name: observer.watch(step) for name, step in make_steps(converted).items()}
        contestants.append(Contestant(config_name(config), steps))
        entries.append(Entry(config_name(config), config, observer, more={"image_size": size} if kind.images else {}))
    return Lineup(length, contestants, entries)


def build_model(kind: ModelKind, size: int, shape: Shape, seed: int = 0) -> PreTrainedModel:
    """Build a softmax model with random weights; nothing is downloaded.

    Args:
        kind: The model.
        size: Tokens or pixels.
        shape: With its dtype and device.
        seed: Of the weights.

    Returns:
        The model, in eval mode, as it is without dropout anyway.
    """
    config = AutoConfig.for_model(kind.model_type, **{**kind.options, **kind.size_options(size)})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModel.from_config(config, dtype=shape.dtype, attn_implementation=SDPA)  # type: ignore[no-untyped-call]
    built: PreTrainedModel = model.to(shape.device).eval()
    return built


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy that has modules and configuration of its own, but the very same weights."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def with_identity_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Return a twin whose attention hands out the values as they are: the most that faster attention could win.

    Args:
        model: A softmax model.

    Returns:
        The twin. Its projections of queries and keys are still computed; what relative positions would add to the
        logits is not.

    Source:
        Choromanski et al. 2021, arXiv:2009.14794, Section 4.1 (the line "X").
    """
    AttentionInterface.register(IDENTITY_IMPLEMENTATION, _identity_forward)
    AttentionMaskInterface.register(IDENTITY_IMPLEMENTATION, padding_mask)
    copied = twin(model)
    copied.set_attn_implementation(IDENTITY_IMPLEMENTATION)
    part: Any
    for part in copied.modules():
        if hasattr(part, "position_embeddings_type"):
            part.position_embeddings_type = None
    return copied


def _identity_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    return value.transpose(1, 2), None


def model_steps(model: PreTrainedModel, inputs: Mapping[str, Tensor], grad_out: Tensor) -> dict[str, Step]:
    """Return the two passes: forward without a graph; forward and backward to all weights.

    Args:
        model: The model.
        inputs: As it takes them.
        grad_out: The gradient that comes back to the last hidden state.

    Returns:
        Steps; the gradients of the weights are dropped at the end of each.
    """

    def forward() -> Tensor:
        with torch.no_grad():
            out: Tensor = model(**inputs).last_hidden_state
            return out

    def train() -> None:
        try:
            model(**inputs).last_hidden_state.backward(grad_out)
        finally:  # also where the memory ran out on the way
            model.zero_grad(set_to_none=True)

    return {"forward": forward, "train": train}


def _on(inputs: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """Return inputs on the device, and those that are not token ids in the dtype."""
    return {
        name: tensor.to(shape.device, shape.dtype if tensor.is_floating_point() else None)
        for name, tensor in inputs.items()
    }
