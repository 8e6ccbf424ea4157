"""``transformers.pipeline`` on converted checkpoints, text and images."""

import pytest
import torch
from PIL import Image
from test_media_families import media_model
from tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    ViTImageProcessor,
    pipeline,
)

from hf_favorpp import FavorppConfig, convert_to_favorpp
from hf_favorpp.nn import converted_layers

OPTIONS = FavorppConfig(num_features=16)


@pytest.mark.parametrize("remote", [None, True])
def test_text_classification(tmp_path, remote):
    words = {word: index for index, word in enumerate(["[UNK]", "[PAD]", "a", "good", "film", "bad"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")
    model = convert_to_favorpp(tiny_model("bert", AutoModelForSequenceClassification), OPTIONS)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    classify = pipeline("text-classification", model=str(tmp_path), device="cpu", trust_remote_code=remote)
    assert len(converted_layers(classify.model)) == 2
    texts = ["a good film", "bad"]
    padded = classify(texts, batch_size=2)
    with torch.no_grad():
        expected = [float(model(**tokenizer(text, return_tensors="pt")).logits.softmax(-1).max()) for text in texts]
    assert [row["score"] for row in padded] == pytest.approx(expected, abs=1e-5)


def test_image_classification(tmp_path):
    model = convert_to_favorpp(media_model("vit", AutoModelForImageClassification), OPTIONS)
    size = {"height": model.config.image_size, "width": model.config.image_size}
    processor = ViTImageProcessor(size=size)
    for part in (model, processor):
        part.save_pretrained(tmp_path)
    image = Image.effect_noise((40, 30), 60).convert("RGB")
    classify = pipeline("image-classification", model=str(tmp_path), device="cpu")
    assert len(converted_layers(classify.model)) == len(converted_layers(model)) > 0
    with torch.no_grad():
        expected = model(**processor(image, return_tensors="pt")).logits.softmax(-1).max()
    assert classify(image)[0]["score"] == pytest.approx(float(expected), abs=1e-5)
