"""Checkpoints: saved and loaded to the last bit, by whatever road, and never softmax without a word."""

import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import fingerprint, hidden_states, tiny_config, tiny_model, token_batch
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from hf_favorpp import FavorppConfig, RedrawSchedule, convert_to_favorpp
from hf_favorpp.errors import CheckpointError, ConfigError, UnsupportedModelError
from hf_favorpp.nn import converted_layers

OPTIONS = FavorppConfig(num_features=16, kernel="favor+", layers=(1,), redraw=RedrawSchedule(every=10), seed=3)
OMEGA = "encoder.layer.{}.attention.self.favorpp.omega"
BATCH = token_batch(9, 5)


@pytest.fixture
def model():
    return convert_to_favorpp(tiny_model("bert"), FavorppConfig(num_features=16))


@pytest.fixture
def saved(model, tmp_path):
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def softmax_checkpoint(tmp_path):
    tiny_model("bert").save_pretrained(tmp_path)
    return tmp_path


def rewrite_tensors(folder, change):
    """Apply ``change`` to the tensors of a checkpoint, in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def rewrite_config(folder, change):
    """Apply ``change`` to the JSON of a checkpoint's configuration, in place."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def same_model(loaded, model):
    """Whether tensors and outputs agree to the last bit."""
    same_tensors = fingerprint(loaded)["tensors"] == fingerprint(model)["tensors"]
    return same_tensors and torch.equal(hidden_states(loaded, BATCH), hidden_states(model, BATCH))


# --- round trips --------------------------------------------------------------------------------------------------


def test_a_second_round_trip_changes_nothing_either(model, saved, tmp_path):
    once = AutoModel.from_pretrained(saved)
    once.save_pretrained(tmp_path / "again")
    twice = AutoModel.from_pretrained(tmp_path / "again")
    assert same_model(once, model)
    assert same_model(twice, model)
    first, second = (json.loads((folder / "config.json").read_text()) for folder in (saved, tmp_path / "again"))
    assert first == second


@pytest.mark.parametrize("projection", ["hadamard", "givens"])
def test_structured_projections_are_converted_calibrated_redrawn_saved_and_loaded(projection, tmp_path):
    options = {"num_features": 12, "projection": projection}
    drawn = convert_to_favorpp(tiny_model("bert"), FavorppConfig(**options))
    first = [layer.omega.clone() for layer in converted_layers(drawn)]
    for layer in converted_layers(drawn):
        layer.redraw_(1)
    assert all(
        not torch.equal(layer.omega, omega) for layer, omega in zip(converted_layers(drawn), first, strict=True)
    )
    data = [token_batch(40, 32, seed=seed) for seed in range(2)]
    chosen = convert_to_favorpp(tiny_model("bert"), FavorppConfig(**options), calibration_data=data)
    assert chosen.config.favorpp["projection"] == projection
    for model, name in ((drawn, "drawn"), (chosen, "chosen")):
        model.save_pretrained(tmp_path / name)
        assert same_model(AutoModel.from_pretrained(tmp_path / name), model)


def test_saving_leaves_the_model_as_it_was(model, tmp_path):
    before = fingerprint(model)
    model.save_pretrained(tmp_path)
    after = fingerprint(model)
    written = ("architectures", "dtype")  # what Transformers itself notes in the configuration at a save
    before["config"], after["config"] = (
        {name: value for name, value in config.items() if name not in written}
        for config in (before["config"], after["config"])
    )
    assert after == before


def test_the_saved_configuration_holds_implementation_and_options_as_plain_json(tmp_path):
    convert_to_favorpp(tiny_model("bert"), OPTIONS).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["attn_implementation"] == "favorpp"
    assert config["favorpp"] == OPTIONS.to_dict()
    loaded = AutoModel.from_pretrained(tmp_path)
    assert [layer.config for layer in converted_layers(loaded)] == [OPTIONS]
    assert loaded.config.favorpp == OPTIONS.to_dict()


def test_a_softmax_model_is_saved_as_before(softmax_checkpoint):
    config = json.loads((softmax_checkpoint / "config.json").read_text())
    assert "favorpp" not in config
    assert "attn_implementation" not in config


def test_a_sharded_checkpoint_loads(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert same_model(AutoModel.from_pretrained(tmp_path), model)


def test_the_base_model_loads_from_a_checkpoint_with_a_head(tmp_path):
    model = convert_to_favorpp(tiny_model("bert", AutoModelForSequenceClassification), FavorppConfig(num_features=16))
    model.save_pretrained(tmp_path)
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(whole(**BATCH).logits, model(**BATCH).logits)
    assert same_model(AutoModel.from_pretrained(tmp_path), model.bert)


@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModelForMaskedLM])
def test_a_base_checkpoint_loads_into_a_model_with_a_head(model, saved, auto):
    loaded, report = auto.from_pretrained(saved, output_loading_info=True)
    assert not any("favorpp" in name for name in report["missing_keys"])
    assert torch.equal(hidden_states(loaded.bert, BATCH), hidden_states(model, BATCH))
    assert loaded.config._attn_implementation == "favorpp"


def test_projections_that_were_redrawn_survive(model, tmp_path):
    first = converted_layers(model)[0].omega.clone()
    for layer in converted_layers(model):
        layer.redraw_(7)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert same_model(loaded, model)
    assert [int(layer.draw_index) for layer in converted_layers(loaded)] == [7, 7]
    assert not torch.isclose(converted_layers(loaded)[0].omega, first).any()


def test_projections_that_were_changed_by_hand_survive(model, tmp_path):
    converted_layers(model)[0].omega.mul_(2)
    model.save_pretrained(tmp_path)
    assert same_model(AutoModel.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loaded_in_half_precision_the_projections_stay_float32_and_the_draw_an_integer(model, saved, dtype):
    loaded = AutoModel.from_pretrained(saved, dtype=dtype)
    assert loaded.dtype == dtype
    for layer, original in zip(converted_layers(loaded), converted_layers(model), strict=True):
        assert torch.equal(layer.omega, original.omega)
        assert layer.omega.dtype == torch.float32
        assert layer.draw_index.dtype == torch.int64


def test_a_model_with_a_head_loaded_in_half_precision_keeps_its_projections(tmp_path):
    model = convert_to_favorpp(tiny_model("bert", AutoModelForSequenceClassification), FavorppConfig(num_features=16))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(layer.omega.dtype == torch.float32 for layer in converted_layers(loaded))
    assert torch.equal(converted_layers(loaded)[0].omega, converted_layers(model)[0].omega)


def test_a_model_saved_in_half_precision_loads_in_it(model, tmp_path):
    model.bfloat16().save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert converted_layers(loaded)[0].omega.dtype == torch.float32
    assert torch.equal(hidden_states(loaded, BATCH), hidden_states(model, BATCH))


def test_it_loads_through_a_device_map(model, saved):
    assert same_model(AutoModel.from_pretrained(saved, device_map="cpu"), model)


def test_a_configuration_loaded_first_keeps_the_implementation(model, saved):
    config = AutoConfig.from_pretrained(saved)
    assert same_model(AutoModel.from_pretrained(saved, config=config), model)


def test_a_state_dict_saved_by_torch_loads_into_a_converted_model(model, tmp_path):
    for layer in converted_layers(model):
        layer.redraw_(3)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = convert_to_favorpp(tiny_model("bert"), FavorppConfig(num_features=16))
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert same_model(other, model)


# --- from softmax to FAVOR++ and back -----------------------------------------------------------------------------


def test_a_softmax_checkpoint_loaded_as_favorpp_is_the_converted_model(softmax_checkpoint):
    loaded = AutoModel.from_pretrained(softmax_checkpoint, attn_implementation="favorpp")
    assert same_model(loaded, convert_to_favorpp(tiny_model("bert")))
    assert loaded.config.favorpp == FavorppConfig().to_dict()


def test_a_softmax_checkpoint_takes_its_options_from_the_configuration(softmax_checkpoint, tmp_path):
    config = AutoConfig.from_pretrained(softmax_checkpoint)
    config.favorpp = OPTIONS.to_dict()
    loaded, report = AutoModel.from_pretrained(
        softmax_checkpoint, config=config, attn_implementation="favorpp", output_loading_info=True
    )
    assert not any(report.values())
    assert same_model(loaded, convert_to_favorpp(tiny_model("bert"), OPTIONS))
    loaded.save_pretrained(tmp_path / "again")
    assert same_model(AutoModel.from_pretrained(tmp_path / "again"), loaded)


def test_what_a_softmax_checkpoint_loses_as_favorpp_is_said(tmp_path, caplog):
    tiny_model("modernbert", attention_dropout=0.1).save_pretrained(tmp_path)
    caplog.clear()
    AutoModel.from_pretrained(tmp_path, attn_implementation="favorpp")
    assert "attention_dropout=0.1 is not applied in converted layers" in caplog.text
    assert "converted 2 of 3 attention layers" in caplog.text


def test_a_new_model_can_be_built_as_favorpp():
    config = tiny_config("bert", favorpp=OPTIONS.to_dict())
    model = AutoModel.from_config(config, attn_implementation="favorpp").eval()
    assert [layer.config for layer in converted_layers(model)] == [OPTIONS]
    expected = converted_layers(convert_to_favorpp(tiny_model("bert"), OPTIONS))[0].omega
    assert torch.equal(converted_layers(model)[0].omega, expected)
    assert hidden_states(model, BATCH).isfinite().all()


def test_overridden_to_sdpa_it_is_the_softmax_model_again_without_unexpected_tensors(saved, caplog):
    loaded, report = AutoModel.from_pretrained(saved, attn_implementation="sdpa", output_loading_info=True)
    assert not any(report.values())
    assert not converted_layers(loaded)
    assert torch.equal(hidden_states(loaded, BATCH), hidden_states(tiny_model("bert"), BATCH))
    assert caplog.text.count("it attends by softmax") == 1


def test_a_head_on_a_checkpoint_overridden_to_sdpa_says_so_once(saved, caplog):
    _, report = AutoModelForSequenceClassification.from_pretrained(
        saved, attn_implementation="sdpa", output_loading_info=True
    )
    assert not report["unexpected_keys"]
    assert caplog.text.count("it attends by softmax") == 1


def test_a_model_set_to_sdpa_saves_softmax_and_its_projections_come_back_with_favorpp(model, tmp_path):
    converted = hidden_states(model, BATCH)
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path)
    softmax, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(hidden_states(softmax, BATCH), hidden_states(tiny_model("bert"), BATCH))
    again = AutoModel.from_pretrained(tmp_path, attn_implementation="favorpp")
    assert torch.equal(hidden_states(again, BATCH), converted)


def test_a_checkpoint_whose_implementation_was_lost_says_that_it_is_softmax(saved, caplog):
    rewrite_config(saved, lambda config: config.pop("attn_implementation"))
    loaded = AutoModel.from_pretrained(saved)
    assert loaded.config._attn_implementation == "sdpa"
    assert (
        "BertModel was converted to FAVOR++, but attn_implementation is 'sdpa': it attends by softmax" in caplog.text
    )


def test_without_this_package_loading_raises_and_is_not_softmax(saved):
    program = f"from transformers import AutoModel; AutoModel.from_pretrained({str(saved)!r})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert 'attn_implementation="favorpp"` is not supported' in result.stderr


def test_with_this_package_a_new_process_gives_the_same_output(model, saved, tmp_path):
    program = f"""
import hf_favorpp, torch
from transformers import AutoModel
torch.set_num_threads(1)
batch = torch.load({str(tmp_path / "batch.pt")!r})
with torch.no_grad():
    torch.save(AutoModel.from_pretrained({str(saved)!r})(**batch).last_hidden_state, {str(tmp_path / "out.pt")!r})
"""
    torch.save(BATCH, tmp_path / "batch.pt")
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    output = torch.load(tmp_path / "out.pt")[BATCH["attention_mask"].bool()]
    assert torch.equal(output, hidden_states(model, BATCH))


# --- checkpoints that do not fit ----------------------------------------------------------------------------------


def test_an_unknown_option_in_the_configuration_is_named(saved):
    rewrite_config(saved, lambda config: config["favorpp"].update(num_feature=3))
    with pytest.raises(ConfigError, match=r"unknown option 'num_feature'. Did you mean 'num_features'\?"):
        AutoModel.from_pretrained(saved)


def test_an_impossible_option_in_the_configuration_is_named(saved):
    rewrite_config(saved, lambda config: config["favorpp"].update(kernel="softmax"))
    with pytest.raises(ConfigError, match="kernel must be one of 'favor\\+\\+'"):
        AutoModel.from_pretrained(saved)


def test_options_that_are_no_object_are_refused(saved):
    rewrite_config(saved, lambda config: config.update(favorpp=True))
    with pytest.raises(ConfigError, match=r"config\.favorpp must be a JSON object"):
        AutoModel.from_pretrained(saved)


def test_layers_that_the_model_does_not_have_are_refused(saved):
    rewrite_config(saved, lambda config: config["favorpp"].update(layers=[5]))
    with pytest.raises(ConfigError, match="layers names layer 5, but BertModel has 2"):
        AutoModel.from_pretrained(saved)


def test_a_number_of_features_other_than_that_of_the_tensors_names_the_tensor(saved):
    rewrite_config(saved, lambda config: config["favorpp"].update(num_features=8))
    message = r"^encoder\.layer\.0\.attention\.self\.favorpp\.omega has shape \(4, 16, 8\) .* it must be \(4, 8, 8\)"
    with pytest.raises(CheckpointError, match=message):
        AutoModel.from_pretrained(saved)


def test_a_tensor_of_another_shape_is_named(saved):
    name = OMEGA.format(1)
    rewrite_tensors(saved, lambda tensors: tensors.update({name: torch.zeros(4, 3, 8)}))
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} has shape"):
        AutoModel.from_pretrained(saved)


def test_a_tensor_of_another_shape_is_not_replaced_even_where_mismatched_sizes_are_ignored(saved):
    rewrite_config(saved, lambda config: config["favorpp"].update(num_features=8))
    with pytest.raises(CheckpointError, match=r"favorpp\.omega has shape"):
        AutoModelForSequenceClassification.from_pretrained(saved, num_labels=3, ignore_mismatched_sizes=True)


def test_projections_without_their_draw_index_are_refused(saved):
    name = OMEGA.format(1).replace("omega", "draw_index")
    rewrite_tensors(saved, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=r"favorpp\.omega of layer 1 but not its favorpp\.draw_index"):
        AutoModel.from_pretrained(saved)


def test_missing_projections_are_drawn_again_from_seed_and_draw_index(model, tmp_path):
    for layer in converted_layers(model):
        layer.redraw_(5)
    model.save_pretrained(tmp_path)
    rewrite_tensors(tmp_path, lambda tensors: [tensors.pop(OMEGA.format(layer)) for layer in (0, 1)])
    assert same_model(AutoModel.from_pretrained(tmp_path), model)


def test_missing_features_are_drawn_from_the_start(model, saved):
    def remove(tensors):
        for name in [name for name in tensors if "favorpp" in name]:
            del tensors[name]

    rewrite_tensors(saved, remove)
    assert same_model(AutoModel.from_pretrained(saved), model)


def test_a_configuration_of_a_family_that_cannot_be_converted_is_refused(tmp_path):
    AutoModel.from_config(tiny_config("bert", is_decoder=True)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="belongs to a decoder"):
        AutoModel.from_pretrained(tmp_path, attn_implementation="favorpp")
