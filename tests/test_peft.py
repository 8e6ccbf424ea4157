"""LoRA on a converted model, and the conversion of a model that has LoRA."""

import copy

import pytest
import torch
from tiny_models import tiny_model, token_batch
from transformers import AutoModelForSequenceClassification

from hf_favorpp import FavorppConfig, approximation_report, convert_to_favorpp, revert_to_softmax
from hf_favorpp.errors import ConversionError
from hf_favorpp.nn import converted_layers

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing. is deprecated:FutureWarning")  # of PEFT
BATCH = {**token_batch(9, 5), "labels": torch.tensor([0, 1])}
OPTIONS = FavorppConfig(num_features=16)


def softmax_model():
    return tiny_model("bert", AutoModelForSequenceClassification)


def with_lora(model):
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=8, target_modules=["query", "key", "value"])
    return peft.get_peft_model(model, config)


def train(model):
    """Take three steps of the adapters."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(**BATCH).loss.backward()
        optimizer.step()
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(**BATCH).logits


def test_lora_on_a_converted_model_trains_saves_loads_and_merges(tmp_path):
    base = convert_to_favorpp(softmax_model(), OPTIONS)
    base.save_pretrained(tmp_path / "base")
    before, omega = logits(base), converted_layers(base)[0].omega.clone()
    model = train(with_lora(AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")))
    after = logits(model)
    assert (after - before).abs().max() > 1e-3
    assert torch.equal(converted_layers(model)[0].omega, omega)
    model.save_pretrained(tmp_path / "adapter")
    assert not [name for name in peft.get_peft_model_state_dict(model) if "favorpp" in name]
    loaded = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter").eval()
    assert len(converted_layers(loaded)) == 2
    assert torch.equal(logits(loaded), after)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(logits(merged), after)
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", trust_remote_code=True)
    assert torch.equal(logits(again), logits(merged))


def test_converting_a_peft_model_converts_its_base():
    model = train(with_lora(softmax_model()))
    exact = logits(model)
    assert convert_to_favorpp(model, OPTIONS) is model
    assert len(converted_layers(model)) == 2
    assert model.get_base_model().config._attn_implementation == "favorpp"
    merged = revert_to_softmax(copy.deepcopy(model)).merge_and_unload()
    torch.testing.assert_close(logits(model), logits(convert_to_favorpp(merged, OPTIONS)))
    assert approximation_report(model, BATCH).end_to_end["logits_distance"] > 0
    with pytest.raises(ConversionError, match="is converted already"):
        convert_to_favorpp(model, OPTIONS)
    assert revert_to_softmax(model) is model
    assert torch.equal(logits(model), exact)


def test_a_peft_model_is_calibrated_while_it_is_converted():
    model = convert_to_favorpp(train(with_lora(softmax_model())), OPTIONS, calibration_data=[BATCH])
    assert {layer.config.statistics for layer in converted_layers(model)} == {"calibrated"}


@pytest.mark.filterwarnings("ignore:Could not find a config file in :UserWarning")  # PEFT 0.18, of a model never saved
def test_adapters_within_transformers_are_saved_alone(tmp_path):
    model = convert_to_favorpp(softmax_model(), OPTIONS)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["query"]))
    model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
