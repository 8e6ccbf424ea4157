"""Made-up data and tiny random models for fidelity.py, of every task."""

from __future__ import annotations

import json
import random
import wave
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tiny_glue import HEADERS, make_rows, make_sentence, write_book, write_tsv
from transformers import AutoConfig, AutoTokenizer, BertModel, ViTConfig, ViTModel, Wav2Vec2Config, Wav2Vec2Model

RATE = 16_000


def write_data(folder: Path) -> dict[str, dict[str, Path]]:
    """Write a few rows of data for every task, and return the arguments that name them."""
    source = random.Random(0)
    for task in ("STS-B", "QNLI"):
        write_tsv(folder / f"{task}.tsv", HEADERS[task], make_rows(task, 40, seed=0))
    for name in ("test", "train"):
        texts = [" ".join(make_sentence(source, True) for _ in range(6)) for _ in range(6)]
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts) + "\n")
        for label in ("ants", "bees"):
            (folder / name / label).mkdir(parents=True)
            for index in range(3):
                write_image(folder / name / label / f"{index}.png", source.randrange(40, 60), source.randrange(40, 60))
    for name, count in (("faint", 6), ("faint_too", 12)):  # classes that differ in brightness
        for grey, label in enumerate(("dark", "light", "lighter")):
            (folder / name / label).mkdir(parents=True)
            for index in range(count):
                write_image(folder / name / label / f"{index}.png", 40 + index, 40 + count, 40 * grey, 40 * grey + 90)
    write_book(folder / "book.txt", source)
    for index in range(4):
        write_recording(folder / "speech" / f"{index}.wav", 2400 + 400 * index)
    text = {"data_file": folder / "test.jsonl", "calibration_file": folder / "train.jsonl"}
    return {
        "sts": {"data_file": folder / "STS-B.tsv"},
        "text": text,
        "far": {"data_file": folder / "QNLI.tsv", "filler_file": folder / "book.txt"},
        "image": {"data_file": folder / "test", "calibration_file": folder / "train"},
        "probe": {"data_file": folder / "faint", "calibration_file": folder / "faint_too"},
        "audio": {"data_file": folder / "speech"},
    }


def write_image(path: Path, width: int, height: int, least: int = 0, most: int = 255) -> None:
    """Write noise between two levels."""
    pixels = np.random.default_rng(width * height).integers(least, most + 1, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_recording(path: Path, samples: int, rate: int = RATE, channels: int = 1) -> None:
    path.parent.mkdir(exist_ok=True)
    noise = np.random.default_rng(samples).normal(0, 3000, (samples, channels)).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(noise.tobytes())


def write_bert(folder: Path, tokenizer: Path) -> Path:
    """Save a BERT whose attention is far from uniform, beside the tokenizer of another folder."""
    torch.manual_seed(0)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    config = AutoConfig.from_pretrained(tokenizer)
    config.initializer_range = 0.3
    BertModel(config).save_pretrained(folder)
    return folder


def write_vit(folder: Path) -> Path:
    """Save a ViT of 17 tokens."""
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=32,
        patch_size=8,
        initializer_range=0.3,
    )
    ViTModel(config).save_pretrained(folder)
    return folder


def write_wav2vec2(folder: Path) -> Path:
    """Save a Wav2Vec2 with a frame every 40 samples."""
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        conv_dim=(16, 16),
        conv_stride=(8, 5),
        conv_kernel=(10, 5),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        initializer_range=0.3,
    )
    Wav2Vec2Model(config).save_pretrained(folder)
    return folder


def command(task: str, model: Path, files: dict[str, Path], output: Path, **more: object) -> list[str]:
    """Return the command line of a short measurement."""
    options: dict[str, object] = {
        **{"task": task, "model_name_or_path": model, **files, "output_json": output},
        **{"num_features": [8], "seeds": 1, "max_samples": 6, "calibration_samples": 4, "num_threads": 1},
        **more,
    }
    if task == "far":
        options.setdefault("max_length", 96)
    words = []
    for name, value in options.items():
        values = value if isinstance(value, list | tuple) else [value]
        words += [f"--{name}", *map(str, values)]
    return words
