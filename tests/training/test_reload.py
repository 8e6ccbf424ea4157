"""A saved model is compared with the one in memory by what was saved."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCTC

from hf_favorpp.training.reload import check_reloaded

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


@pytest.fixture
def model():
    torch.manual_seed(0)
    more = {"feature_projection_input_dim": 6, "position_embeddings_type": "relative", "initializer_range": 0.3}
    return AutoModelForCTC.from_config(AutoConfig.for_model("wav2vec2-bert", vocab_size=5, **SIZES, **more)).eval()


def batch():
    return {"input_features": torch.randn(2, 30, 6, generator=torch.Generator().manual_seed(0))}


def test_a_table_that_autocast_left_rounded_is_no_difference(model, tmp_path):
    table = "wav2vec2_bert.encoder.embed_positions.pe"
    if table not in dict(model.named_buffers()):
        pytest.skip("this version of Transformers keeps the table out of the buffers")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(**batch())
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        rounded, fresh = (each(**batch()).logits for each in (model, AutoModelForCTC.from_pretrained(tmp_path).eval()))
    assert not torch.equal(rounded, fresh)
    before = model.get_buffer(table).clone()
    assert check_reloaded(model, tmp_path, batch(), AutoModelForCTC) is None
    assert torch.equal(model.get_buffer(table), before), "nothing is changed in the model"


def test_another_weight_is_a_difference(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert check_reloaded(model, tmp_path, batch(), AutoModelForCTC) is None
    with torch.no_grad():
        model.lm_head.bias[0] += 0.25
    assert check_reloaded(model, tmp_path, batch(), AutoModelForCTC) == pytest.approx(0.25, rel=1e-5)
