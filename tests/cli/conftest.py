"""Tiny checkpoints and data on disk."""

import json
import random

import numpy as np
import pytest
import soundfile
import torch
from command_runs import run
from PIL import Image
from test_media_families import media_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2Model,
    SiglipConfig,
    SiglipModel,
    ViTConfig,
    ViTModel,
    Wav2Vec2FeatureExtractor,
)

WORDS = ("the", "of", "and", "to", "in", "is", "it", "was", "for", "on", "are", "as", "word", "some", "what", "have")
TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS)
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


def save_tokenizer(folder, **options):
    BertTokenizer(vocab={token: index for index, token in enumerate(TOKENS)}, **options).save_pretrained(folder)


def save_image_processor(folder, kind):
    size = {"height": 32, "width": 32}
    processor = {"image_processor_type": kind, "size": size, "crop_size": size}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """A random classifier of two layers with a tokenizer of our words, and a card of its own."""
    folder = tmp_path_factory.mktemp("tiny") / "bert"
    save_tokenizer(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(TOKENS), max_position_embeddings=64, initializer_range=0.2, num_labels=3, **SIZES
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    (folder / "README.md").write_text("# Of the softmax model\n")
    (folder / "optimizer.pt").write_bytes(b"x")
    return folder


@pytest.fixture(scope="session")
def converted(bert, tmp_path_factory):
    """The same, converted by the command."""
    folder = tmp_path_factory.mktemp("converted") / "bert-favorpp"
    run("convert", bert, folder, "--num-features", 8)
    return folder


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """Texts in every format, the same ones."""
    folder, source = tmp_path_factory.mktemp("texts"), random.Random(0)
    lines = [" ".join(source.choices(WORDS, k=source.randint(12, 40))) for _ in range(12)]
    (folder / "a.txt").write_text("\n\n".join(lines) + "\n")
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": line, "n": 1}) for line in lines))
    (folder / "a.csv").write_text("n,text\n" + "\n".join(f'1,"{line}"' for line in lines))
    (folder / "a.tsv").write_text("text\tn\n" + "\n".join(f"{line}\t1" for line in lines))
    (folder / "each").mkdir()
    for index, line in enumerate(lines):
        (folder / "each" / f"{index:02}.txt").write_text(line)
    return folder


@pytest.fixture(scope="session")
def vit(tmp_path_factory):
    """A random ViT of 17 tokens with its image processor."""
    folder = tmp_path_factory.mktemp("tiny") / "vit"
    torch.manual_seed(0)
    ViTModel(ViTConfig(image_size=32, patch_size=8, initializer_range=0.2, **SIZES)).save_pretrained(folder)
    save_image_processor(folder, "ViTImageProcessor")
    return folder


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """Five images in two folders, and a file that is none."""
    folder = tmp_path_factory.mktemp("images")
    for index in range(5):
        (folder / f"class{index % 2}").mkdir(exist_ok=True)
        pixels = np.random.default_rng(index).integers(0, 256, (40, 36, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"class{index % 2}" / f"{index}.png")
    (folder / "broken.png").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="session")
def clip(tmp_path_factory):
    """A random CLIP, whose image model can be converted and whose text model cannot."""
    folder = tmp_path_factory.mktemp("tiny") / "clip"
    text = {**SIZES, "vocab_size": 40, "max_position_embeddings": 16, "eos_token_id": 2}
    torch.manual_seed(0)
    config = CLIPConfig(
        text_config=text, vision_config={**SIZES, "image_size": 32, "patch_size": 8}, projection_dim=16
    )
    CLIPModel(config).save_pretrained(folder)
    save_image_processor(folder, "CLIPImageProcessor")
    return folder


@pytest.fixture(scope="session")
def siglip(tmp_path_factory):
    """A random SigLIP, whose two models can be converted, with a tokenizer that hides no padding."""
    folder = tmp_path_factory.mktemp("tiny") / "siglip"
    text = {**SIZES, "vocab_size": len(TOKENS), "max_position_embeddings": 24, "projection_size": 32}
    torch.manual_seed(0)
    config = SiglipConfig(text_config=text, vision_config={**SIZES, "image_size": 32, "patch_size": 8})
    SiglipModel(config).save_pretrained(folder)
    save_tokenizer(folder, model_input_names=["input_ids"])
    save_image_processor(folder, "SiglipImageProcessor")
    return folder


@pytest.fixture(scope="session")
def wav2vec2(tmp_path_factory):
    """A random wav2vec 2.0 that takes 20 samples at least, with its feature extractor."""
    folder = tmp_path_factory.mktemp("tiny") / "wav2vec2"
    media_model("wav2vec2").save_pretrained(folder)
    Wav2Vec2FeatureExtractor(sampling_rate=16000).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def recordings(tmp_path_factory):
    """Four recordings in two formats, of one channel or two, one that is too short, and a file that is none."""
    folder = tmp_path_factory.mktemp("recordings")
    for index in range(4):
        samples = np.random.default_rng(index).standard_normal((400 + 50 * index, 1 + index % 2)) / 10
        soundfile.write(folder / f"{index}{('.wav', '.flac')[index // 2]}", samples, 16000)
    soundfile.write(folder / "short.wav", samples[:19], 16000)
    (folder / "broken.wav").write_bytes(b"no sound")
    return folder


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory):
    """A decoder, which cannot be converted."""
    folder = tmp_path_factory.mktemp("tiny") / "gpt2"
    GPT2Model(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32)).save_pretrained(folder)
    return folder
