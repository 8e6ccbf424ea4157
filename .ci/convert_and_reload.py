"""Convert a tiny model with the package that is installed, save it and load it back; run from another folder."""

import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModel, BertConfig, BertModel

import hf_favorpp

assert "site-packages" in Path(hf_favorpp.__file__).parts, f"{hf_favorpp.__file__} is not an installed package"
assert version("hf-favorpp") == hf_favorpp.__version__

torch.manual_seed(0)
config = BertConfig(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    initializer_range=1.0,
    attention_probs_dropout_prob=0.0,
)
softmax = BertModel(config).eval()
tokens = {"input_ids": torch.arange(24).reshape(2, 12)}
with torch.no_grad():
    expected = softmax(**tokens).last_hidden_state
    converted = hf_favorpp.convert_to_favorpp(softmax)
    features = converted(**tokens).last_hidden_state
    assert features.isfinite().all()
    assert not torch.allclose(features, expected)
    with tempfile.TemporaryDirectory() as folder:
        converted.save_pretrained(folder)
        loaded = AutoModel.from_pretrained(folder).eval()
    assert torch.equal(loaded(**tokens).last_hidden_state, features)
    assert torch.equal(hf_favorpp.revert_to_softmax(loaded)(**tokens).last_hidden_state, expected)
print(f"hf-favorpp {hf_favorpp.__version__}, installed alone: converted, saved, loaded, reverted")
