"""Position embeddings of BERT-like encoders, stretched to longer texts."""

from __future__ import annotations

import copy
import json

import glue
import numpy as np
import pytest
import torch
from text_positions import extend_positions_, require_positions
from tiny_glue import write_documents
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    ModernBertConfig,
    RobertaConfig,
)
from uptraining import ModelError

from hf_favorpp import convert_to_favorpp

SIZES = {"vocab_size": 50, "num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 8}
CONFIGS = {
    "bert": BertConfig(**SIZES, max_position_embeddings=12),
    "distilbert": DistilBertConfig(
        vocab_size=50, n_heads=2, n_layers=1, dim=16, hidden_dim=8, max_position_embeddings=12
    ),
    "electra": ElectraConfig(**SIZES, embedding_size=10, max_position_embeddings=12),
    "roberta": RobertaConfig(**SIZES, max_position_embeddings=14, pad_token_id=1),
}
TWENTY = torch.arange(20)[None] + 5


def tiny_model(kind):
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(copy.deepcopy(CONFIGS[kind])).eval()


def table_of(model):
    return next(tensor for name, tensor in model.named_parameters() if name.endswith("position_embeddings.weight"))


@pytest.mark.parametrize("converted", [False, True], ids=["softmax", "converted"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_stretched_model_takes_longer_texts_and_is_loaded_as_such(kind, converted, tmp_path):
    model = tiny_model(kind)
    before, offset = table_of(model).detach().clone(), 2 if kind == "roberta" else 0
    with pytest.raises((IndexError, RuntimeError)):
        model(TWENTY)
    extend_positions_(model, 20)
    if converted:
        convert_to_favorpp(model)
    after = table_of(model).detach()
    assert model.config.max_position_embeddings == 20 + offset
    assert after.shape == (20 + offset, before.shape[1])
    assert after.is_contiguous()
    assert table_of(model).requires_grad
    torch.testing.assert_close(after[:offset], before[:offset])
    old, new = np.linspace(0, 1, 12), np.linspace(0, 1, 20)
    for column in range(before.shape[1]):
        expected = np.interp(new, old, before[offset:, column].numpy())
        np.testing.assert_allclose(after[offset:, column].numpy(), expected, atol=1e-6)
    with torch.no_grad():
        logits = model(TWENTY).logits
        model.save_pretrained(tmp_path)
        loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(loaded(TWENTY).logits, logits)
    extend_positions_(loaded, 20)
    assert torch.equal(table_of(loaded), after), "it stays as it is"
    require_positions(loaded, 20)
    with pytest.raises(ModelError, match=r"--max_length 21 is more than the 20 positions .* --max_positions 21"):
        require_positions(loaded, 21)


def test_buffers_are_stretched_and_stay_out_of_the_file():
    model = tiny_model("bert")
    names = set(model.state_dict())
    extend_positions_(model, 20)
    buffers = dict(model.bert.embeddings.named_buffers())
    assert torch.equal(buffers["position_ids"], torch.arange(20)[None])
    assert torch.equal(buffers["token_type_ids"], torch.zeros(1, 20, dtype=torch.long))
    assert set(model.state_dict()) == names


def test_fewer_positions_are_refused():
    with pytest.raises(ModelError, match=r"at least the 12 positions that Roberta.* got 11\. .*give --max_length"):
        extend_positions_(tiny_model("roberta"), 11)


@pytest.mark.parametrize(
    "config",
    [
        ModernBertConfig(**SIZES, pad_token_id=0, max_position_embeddings=12),
        DebertaV2Config(**SIZES, relative_attention=True, position_buckets=4, pos_att_type=["c2p"]),
    ],
    ids=lambda config: config.model_type,
)
def test_a_model_without_a_table_needs_none(config):
    model = AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(ModelError, match="rotary or relative positions needs none: leave it out"):
        extend_positions_(model, 20)
    require_positions(model, 10_000)


def arguments(model, folder, *more):
    files = [word for name, path in write_documents(folder).items() for word in (f"--{name}", str(path))]
    return [
        *("--task_name", "documents", *files, "--model_name_or_path", str(model), "--output_dir", str(folder / "out")),
        *("--max_train_steps", "1", "--num_features", "8", "--num_threads", "1", "--pad_to_max_length", *more),
    ]


def test_the_recipe_stretches_twin_and_converted_model_and_the_tokenizer(tiny_bert, tmp_path):
    glue.main(
        arguments(
            tiny_bert,
            tmp_path,
            *("--max_length", "160", "--max_positions", "160", "--twin", "--uptrain", "--kd_weight", "0.5"),
        )
    )
    for folder in (tmp_path / "out" / "softmax", tmp_path / "out"):
        assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 160
        assert AutoTokenizer.from_pretrained(folder).model_max_length == 160


def test_the_recipe_refuses_a_length_without_positions(tiny_bert, tmp_path):
    with pytest.raises(ModelError, match="--max_length 129 is more than the 128 positions"):
        glue.main(arguments(tiny_bert, tmp_path, "--max_length", "129"))
