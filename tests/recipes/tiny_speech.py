"""Made-up recordings in the layouts of the real ones, and tiny random speech encoders, for speech.py."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import soundfile
import torch
from datasets import Dataset
from transformers import (
    PreTrainedModel,
    Wav2Vec2Config,
    Wav2Vec2ConformerConfig,
    Wav2Vec2ConformerModel,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2Model,
)

RATE = 1600
"""Samples per second; 20 to a frame."""
LETTERS = "AB C"
FRONT = {
    "conv_dim": [8, 8, 8],
    "conv_stride": [5, 2, 2],
    "conv_kernel": [8, 4, 4],
    "num_feat_extract_layers": 3,
    "feat_extract_norm": "layer",
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_length": 2,
}
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TINY = {**FRONT, **SIZES}
TINY_SPECTRA = {**SIZES, "position_embeddings_type": "rotary", "conv_depthwise_kernel_size": 5, "mask_time_length": 2}
"""Of a new wav2vec2-bert."""
TINY_OVERRIDES = json.dumps(TINY)
CERTAIN = dict.fromkeys(
    ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout"), 0.0
)
CERTAIN |= {"layerdrop": 0.0, "mask_time_prob": 0.0}
"""What draws nothing."""


def wave(text: str, seed: int = 0, rate: int = RATE) -> np.ndarray:
    """Return 100 ms of a tone of its own for each letter, with a little noise."""
    time = np.arange(rate // 10) / rate
    tones = [np.sin(2 * np.pi * time * 50 * (1 + LETTERS.find(letter))) for letter in text]
    noise = np.random.default_rng((seed, len(text))).normal(0, 0.01, len(text) * len(time))
    return (0.5 * np.concatenate(tones) + noise).astype(np.float32)


def text_of(number: int) -> str:
    """Return a transcript of one word or two."""
    source = np.random.default_rng(number)
    words = ["".join(source.choice(list("ABC"), source.integers(2, 6))) for _ in range(1 + number % 2)]
    return " ".join(words)


def write_librispeech(folder: Path, number: int, first: int = 0, rate: int = RATE) -> Path:
    """Write recordings of two speakers of one chapter each as LibriSpeech lays them out."""
    for speaker in ("19", "84"):
        chapter = folder / speaker / "7"
        chapter.mkdir(parents=True)
        own = [n for n in range(first, first + number) if (n % 2 == 0) == (speaker == "19")]
        names = [f"{speaker}-7-{n:04}" for n in own]
        for name, n in zip(names, own, strict=True):
            soundfile.write(chapter / f"{name}.flac", wave(text_of(n), n, rate), rate)
        lines = [f"{name} {text_of(n)}\n" for name, n in zip(names, own, strict=True)]
        (chapter / f"{speaker}-7.trans.txt").write_text("".join(lines))
    return folder


def write_digits(folder: Path, digits: str = "012", speakers: tuple[str, ...] = ("ann", "bob"), each: int = 7) -> Path:
    """Write spoken digits as the Free Spoken Digit Dataset names them; the loudness tells the recording."""
    folder.mkdir(parents=True)
    for digit in digits:
        for place, speaker in enumerate(speakers):
            for index in range(each):
                samples = np.full(RATE // 10 * (1 + int(digit)), (1 + index + 10 * place) / 100)
                soundfile.write(folder / f"{digit}_{speaker}_{index}.wav", samples, RATE)
    return folder


def write_hub_folder(folder: Path, librispeech: Path, tell_length: bool = True) -> Path:
    """Write what a data set on the Hub is: parquet files with encoded recordings, and a card that says so."""
    card = ["---", "dataset_info:", "  features:", "  - name: audio", "    dtype:", "      audio:"]
    card += [f"        sampling_rate: {RATE}", "  - name: text", "    dtype: string", "  splits:"]
    (folder / "data").mkdir(parents=True)
    for split in ("train", "validation"):
        texts = {}
        for transcript in sorted((librispeech / split).rglob("*.trans.txt")):
            lines = [line.partition(" ") for line in transcript.read_text().splitlines()]
            texts |= {transcript.parent / f"{name}.flac": text for name, _, text in lines}
        audio = [{"bytes": path.read_bytes(), "path": path.name} for path in texts]
        rows = Dataset.from_dict({"audio": audio, "text": list(texts.values())})
        rows.to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
        card += [f"  - name: {split}", f"    num_examples: {len(texts)}"]
    if tell_length:
        (folder / "README.md").write_text("\n".join([*card, "---", ""]))
    return folder


def encoded(samples: np.ndarray, rate: int = RATE, kind: str = "WAV", subtype: str = "FLOAT") -> bytes:
    """Return a file in memory."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=subtype)
    return buffer.getvalue()


def save_encoder(folder: Path, kind: str = "wav2vec2", **options: object) -> Path:
    """Save a random encoder without a CTC head, with its feature extractor."""
    torch.manual_seed(0)
    model: PreTrainedModel
    if kind == "wav2vec2":
        model = Wav2Vec2Model(Wav2Vec2Config(**{**TINY, "do_stable_layer_norm": True, **options}))
    else:
        model = Wav2Vec2ConformerModel(Wav2Vec2ConformerConfig(**{**TINY, "conv_depthwise_kernel_size": 5, **options}))
    model.save_pretrained(folder)
    Wav2Vec2FeatureExtractor(sampling_rate=RATE, return_attention_mask=True).save_pretrained(folder)
    return folder
