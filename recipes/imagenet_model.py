"""The model of imagenet.py: with a head for the classes, at the wanted image size, converted."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import set_seed
from imagenet_arguments import ImageNetArguments
from imagenet_resolution import at_image_size
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    BitImageProcessorPil,
    PreTrainedConfig,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from uptraining import ModelError, favorpp_config, override

from hf_favorpp import convert_to_favorpp
from hf_favorpp.training.drop_path import add_drop_path

NO_DECAY = ("position_embeddings", "cls_token", "distillation_token", "mask_token")
"""Parameters of more than one dimension that do not decay, as in timm and MAE."""


class Normalisation:
    """From bytes to what a model takes, on the model's device."""

    def __init__(self, mean: Any = IMAGENET_DEFAULT_MEAN, std: Any = IMAGENET_DEFAULT_STD) -> None:
        """Keep mean and standard deviation of each channel, of pixels in [0, 1]."""
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return float32 of the shape of ``pixels``, (batch, 3, height, width), uint8."""
        mean, std = (pixels.new_tensor(value, dtype=torch.float32)[:, None, None] for value in (self.mean, self.std))
        return (pixels.float() / 255 - mean) / std


def find_normalisation(source: str | None) -> Normalisation:
    """Return the normalisation of a checkpoint's image processor; that of ImageNet where it has none."""
    if source is not None:
        try:
            processor = AutoImageProcessor.from_pretrained(source)
            return Normalisation(processor.image_mean, processor.image_std)
        except (OSError, ValueError, AttributeError):
            pass
    return Normalisation()


def make_processor(normalisation: Normalisation, size: int, crop_ratio: float) -> BitImageProcessorPil:
    """Return an image processor that prepares images as the evaluation does, up to rounding."""
    return BitImageProcessorPil(
        size={"shortest_edge": round(size / crop_ratio)},
        crop_size={"height": size, "width": size},
        image_mean=list(normalisation.mean),
        image_std=list(normalisation.std),
    )


def build_model(args: ImageNetArguments, label_names: list[str]) -> PreTrainedModel:
    """Load or make the model, put it at the image size, add drop path and convert it, as the arguments say.

    Args:
        args: Model, seed, attention.
        label_names: In the order of the labels.

    Returns:
        The model, in float32; mixed precision is Accelerate's.
    """
    set_seed(args.seed)  # the head's weights
    model = _load(args, label_names)
    if args.image_size is not None:
        model = at_image_size(model, args.image_size)
    if args.drop_path and not hasattr(model.config, "drop_path_rate"):
        add_drop_path(model, args.drop_path)
    if args.attention != "softmax":
        model = convert_to_favorpp(model, favorpp_config(args))
    if args.linear_probe:
        freeze_all_but_head(model)
    return model


def image_size(model: PreTrainedModel, args: ImageNetArguments) -> int:
    """Return the side of the images in pixels: as asked for, else as the model has it."""
    size = args.image_size or getattr(model.config, "image_size", 224)
    return size if isinstance(size, int) else min(size)


def freeze_all_but_head(model: PreTrainedModel) -> None:
    """Train nothing but what a model for classification adds to the base model.

    Raises:
        ModelError: If base model and head cannot be told apart.
    """
    if model.base_model is model:
        raise ModelError(f"--linear_probe cannot tell the head of {type(model).__name__} from the rest. Leave it out.")
    model.base_model.requires_grad_(False)


def make_average(model: PreTrainedModel, decay: float) -> AveragedModel:
    """Return the running exponential average of a model's weights, a copy; its buffers follow the model's."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    return average.eval().requires_grad_(False)


def _load(args: ImageNetArguments, label_names: list[str]) -> PreTrainedModel:
    """Return the softmax model with a head for the classes."""
    labels: dict[str, Any] = {
        "num_labels": len(label_names),
        "id2label": dict(enumerate(label_names)),
        "label2id": {name: index for index, name in enumerate(label_names)},
    }
    if args.model_type is not None:
        config = AutoConfig.for_model(args.model_type, **labels)
        override(config, args.config_overrides)
        _set_drop_path(config, args)
        return AutoModelForImageClassification.from_config(config, dtype=torch.float32)
    remote: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    config = AutoConfig.from_pretrained(args.model_name_or_path, **remote, **labels)
    auto: Any = AutoModelForImageClassification
    if config.model_type == "vit_mae":  # its encoder is a ViT, but it has no class with a head
        config, auto, remote = _vit_config(config, labels), ViTForImageClassification, {}
    _set_drop_path(config, args)
    return auto.from_pretrained(
        args.model_name_or_path,
        config=config,
        ignore_mismatched_sizes=args.ignore_mismatched_sizes,
        dtype=torch.float32,
        **remote,
    )


def _vit_config(config: PreTrainedConfig, labels: dict[str, Any]) -> ViTConfig:
    """Return the configuration of the encoder of a ViTMAE: without the decoder's options, and of type vit."""
    options = config.to_dict()
    shared = set(ViTConfig().to_dict()) - {"model_type", "architectures", "transformers_version", *labels}
    return ViTConfig(**{name: value for name, value in options.items() if name in shared}, **labels)


def _set_drop_path(config: PreTrainedConfig, args: ImageNetArguments) -> None:
    """Use the model's own drop path, if it has one."""
    if hasattr(config, "drop_path_rate"):
        config.drop_path_rate = args.drop_path
