"""Generated photos in folders and files, and tiny random Vision Transformers, for imagenet.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image
from transformers import (
    Dinov2Config,
    Dinov2Model,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    ViTMAEConfig,
    ViTMAEForPreTraining,
    ViTModel,
)

CLASSES = ("ant", "bee", "cat", "dog", "eel", "fox")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
IMAGE = {"image_size": 16, "patch_size": 4}
DECODER = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
DECODER |= {"decoder_intermediate_size": 16}


def photo(label: int, number: int) -> Image.Image:
    """Return an image whose colour tells its class, of a size of its own."""
    source = np.random.default_rng((label, number))
    height, width = source.integers(18, 30, 2)
    colour = np.array([label * 40, 255 - label * 40, (label * 97) % 256])
    noise = source.integers(-40, 40, (height, width, 3))
    return Image.fromarray(np.clip(colour + noise, 0, 255).astype("uint8"))


def write_folder(folder: Path, per_class: int, first: int = 0) -> Path:
    """Write a folder of images per class."""
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for number in range(first, first + per_class):
            photo(label, number).save(folder / name / f"{number}.png")
    return folder


def write_hub_folder(folder: Path, images: Path, tell_length: bool = True) -> Path:
    """Write what a data set on the Hub is: parquet files with encoded images, and a card that tells the lengths."""
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=list(CLASSES))})
    card = []
    for split in ("train", "validation"):
        paths = sorted((images / split).rglob("*.png"))
        columns = {
            "image": [{"bytes": path.read_bytes(), "path": path.name} for path in paths],
            "label": [CLASSES.index(path.parent.name) for path in paths],
        }
        (folder / "data").mkdir(parents=True, exist_ok=True)
        Dataset.from_dict(columns, features=features).to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
        card += [f"  - name: {split}", f"    num_examples: {len(paths)}"]
    if tell_length:
        names = [f"          '{label}': {name}" for label, name in enumerate(CLASSES)]
        columns = ["  - name: image", "    dtype: image", "  - name: label", "    dtype:", "      class_label:"]
        columns += ["        names:", *names]
        (folder / "README.md").write_text(
            "\n".join(["---", "dataset_info:", "  features:", *columns, "  splits:", *card, "---", ""])
        )
    return folder


def tiny_vision_model(kind: str) -> PreTrainedModel:
    """Return a random model of the kind of a checkpoint: "vit", "classifier", "mae" or "dinov2"."""
    torch.manual_seed(0)
    options = {**SIZES, **IMAGE, "initializer_range": 0.2}
    if kind == "vit":
        return ViTModel(ViTConfig(**options), add_pooling_layer=False)
    if kind == "classifier":
        return ViTForImageClassification(ViTConfig(**options, num_labels=len(CLASSES)))
    if kind == "mae":
        return ViTMAEForPreTraining(ViTMAEConfig(**options, **DECODER))
    options.pop("intermediate_size")
    return Dinov2Model(Dinov2Config(**options | {"image_size": 24}))
