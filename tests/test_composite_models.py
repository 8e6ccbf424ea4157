"""Models made of several: towers of images and texts, and encoders within other models."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from test_media_families import MEDIA_MODELS, SMALL, features, media_batch, of_this_version, relative_error
from test_vision_families import logits, refused
from tiny_models import fingerprint
from transformers import (
    AutoConfig,
    AutoModel,
    PreTrainedModel,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
)

from hf_favorpp import FavorppConfig, approximation_report, calibrate, convert_to_favorpp, revert_to_softmax
from hf_favorpp.errors import ConversionError, InputError, UnsupportedModelError
from hf_favorpp.families import attention_layers
from hf_favorpp.nn import converted_layers

_TEXT = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    **{"vocab_size": 64, "max_position_embeddings": 40, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
}
TOWERS = {
    "clip": {"text_config": {**_TEXT, "initializer_factor": 1.5}, "vision_config": MEDIA_MODELS["clip_vision_model"]},
    "siglip": {
        "text_config": {**_TEXT, "projection_size": 32},
        "vision_config": MEDIA_MODELS["siglip_vision_model"],
    },
    "siglip2": {
        "text_config": {**_TEXT, "projection_size": 32},
        "vision_config": MEDIA_MODELS["siglip2_vision_model"],
    },
}
"""Models of an image and a text model, by ``config.model_type``."""
TEXTS = ("siglip_text_model", "siglip2_text_model")
every_towers = pytest.mark.parametrize("model_type", TOWERS)


def towers(model_type):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **TOWERS[model_type])
        return of_this_version(AutoModel.from_config(config, attn_implementation="sdpa").eval())


def towers_batch(model_type):
    ids = torch.randint(3, 64, (3, 30), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, **media_batch(f"{model_type}_vision_model")}


def similarities(model, batch):
    with torch.no_grad():
        return model(**batch).logits_per_image


def needs_parts(model):
    """Skip where the installed Transformers has no model of its own for the images."""
    if not isinstance(model.vision_model, PreTrainedModel):
        pytest.skip("the installed Transformers has towers that are no models")


@every_towers
def test_one_tower_is_converted_and_saved_with_the_whole(model_type, tmp_path):
    model, batch = towers(model_type), towers_batch(model_type)
    needs_parts(model)
    before, softmax = fingerprint(model), similarities(model, batch)
    assert convert_to_favorpp(model.vision_model, SMALL) is model.vision_model
    assert not torch.allclose(similarities(model, batch), softmax)
    assert model.config._attn_implementation == model.config.text_config._attn_implementation == "sdpa"
    revert_to_softmax(model.vision_model)
    assert fingerprint(model) == before
    assert torch.equal(similarities(model, batch), softmax)

    calibrate(convert_to_favorpp(model.vision_model, SMALL), [media_batch(f"{model_type}_vision_model")])
    converted = similarities(model, batch)
    model.save_pretrained(tmp_path / "once")
    written = json.loads((tmp_path / "once" / "config.json").read_text())
    assert written["attn_implementation"] == {"vision_config": "favorpp"}
    assert written["vision_config"]["favorpp"] == SMALL.calibrated().to_dict()
    assert not hasattr(model.config, "attn_implementation")
    assert not hasattr(model.config.vision_config, "attn_implementation")

    once, report = AutoModel.from_pretrained(tmp_path / "once", output_loading_info=True)
    assert not any(report.values())
    once.save_pretrained(tmp_path / "twice")
    for loaded in (once, AutoModel.from_pretrained(tmp_path / "twice")):
        assert torch.equal(similarities(loaded, batch), converted)
        assert len(converted_layers(loaded.vision_model)) == len(converted_layers(loaded)) == 2
    assert torch.equal(similarities(revert_to_softmax(once), batch), softmax)


@every_towers
def test_overridden_to_sdpa_both_towers_are_softmax_without_noise(model_type, tmp_path, caplog):
    model, batch = towers(model_type), towers_batch(model_type)
    softmax = similarities(model, batch)
    convert_to_favorpp(model, SMALL).save_pretrained(tmp_path)
    caplog.clear()
    loaded, report = AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa", output_loading_info=True)
    assert not any(report.values())
    assert not converted_layers(loaded)
    assert torch.equal(similarities(loaded, batch), softmax)
    assert caplog.text.count("it attends by softmax") == (1 if model_type == "clip" else 2)


def test_the_whole_of_clip_converts_its_image_model_and_says_why_not_the_other(caplog):
    model, batch = towers("clip"), towers_batch("clip")
    before, softmax = fingerprint(model), similarities(model, batch)
    convert_to_favorpp(model, SMALL)
    assert caplog.messages == [
        "converted 2 of 4 attention layers; the others stay softmax.",
        "text_config stays softmax: the text model of CLIP is causal; only its image model can be converted.",
    ]
    assert len(converted_layers(model.vision_model)) == len(converted_layers(model)) == 2
    assert not hasattr(model.config, "favorpp")
    converted = similarities(model, batch)
    assert not torch.allclose(converted, softmax)
    revert_to_softmax(model)
    assert fingerprint(model) == before
    assert torch.equal(similarities(model, batch), softmax)
    needs_parts(model)
    convert_to_favorpp(model.vision_model, SMALL)
    assert torch.equal(similarities(model, batch), converted)


def test_the_text_model_of_clip_is_refused_because_it_is_causal(tmp_path):
    model = towers("clip")
    refused(model, "layers names layer 0, which cannot be converted: the text model of CLIP is causal", layers=(0,))
    reason = r"no layer of CLIPTextModel can be converted: .* the text model of CLIP is causal; only its image model"
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        AutoModel.from_pretrained(tmp_path, attn_implementation="favorpp")
    loaded = AutoModel.from_pretrained(tmp_path, attn_implementation={"vision_config": "favorpp"})
    assert len(converted_layers(loaded.vision_model)) == 2
    convert_to_favorpp(model)
    batch = towers_batch("clip")
    assert torch.equal(similarities(loaded, batch), similarities(model, batch))
    needs_parts(model)
    refused(model.text_model, reason, UnsupportedModelError)


def test_both_towers_of_siglip_are_converted_and_saved(tmp_path):
    model, batch = towers("siglip"), towers_batch("siglip")
    before, softmax = fingerprint(model), similarities(model, batch)
    convert_to_favorpp(model, SMALL, calibration_data=[batch])
    assert [layer.layer for layer in converted_layers(model)] == [0, 1, 0, 1]
    revert_to_softmax(model)
    assert fingerprint(model) == before
    assert torch.equal(similarities(model, batch), softmax)
    convert_to_favorpp(model, SMALL, calibration_data=[batch])
    model.save_pretrained(tmp_path)
    loaded, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(similarities(loaded, batch), similarities(model, batch))
    with pytest.raises(ConversionError, match="SiglipModel is converted already"):
        convert_to_favorpp(loaded)
    texts = AutoModel.from_pretrained(tmp_path, attn_implementation={"vision_config": "sdpa"})
    assert len(converted_layers(texts.text_model)) == len(converted_layers(texts)) == 2


def test_a_softmax_checkpoint_of_two_towers_is_converted_while_it_is_loaded(tmp_path):
    model, batch = towers("siglip"), towers_batch("siglip")
    model.save_pretrained(tmp_path / "softmax")
    loaded = AutoModel.from_pretrained(tmp_path / "softmax", attn_implementation="favorpp")
    assert torch.equal(similarities(loaded, batch), similarities(convert_to_favorpp(model), batch))
    loaded.save_pretrained(tmp_path / "converted")
    again = AutoModel.from_pretrained(tmp_path / "converted")
    assert torch.equal(similarities(again, batch), similarities(model, batch))
    assert again.config._attn_implementation == "sdpa"
    revert_to_softmax(loaded)
    assert loaded.config._attn_implementation == loaded.config.vision_config._attn_implementation == "sdpa"


def test_layers_count_through_all_towers_and_each_keeps_its_own(tmp_path):
    model, batch = towers("siglip"), towers_batch("siglip")
    convert_to_favorpp(model, FavorppConfig(num_features=16, layers=(1, 2)))
    names = [layer.name.split(".")[0] for layer in attention_layers(model) if layer.features]
    assert names == ["text_model", "vision_model"]
    assert model.config.text_config.favorpp["layers"] == [1]
    assert model.config.vision_config.favorpp["layers"] == [0]
    model.save_pretrained(tmp_path)
    assert torch.equal(similarities(AutoModel.from_pretrained(tmp_path), batch), similarities(model, batch))


def test_a_tower_of_which_no_layer_keeps_to_the_budget_stays_softmax():
    model, batch = towers("siglip"), towers_batch("siglip")
    config = FavorppConfig(num_features=256, candidates=1)
    before = model.config.text_config.to_dict()
    with torch.no_grad():
        for layer in model.text_model.encoder.layers:
            layer.self_attn.q_proj.weight.mul_(8)
    convert_to_favorpp(model, config, calibration_data=[batch], keep_softmax="auto", error_budget=0.5)
    assert model.config.text_config.to_dict() == before
    assert model.config.text_config._attn_implementation == "sdpa"
    assert len(converted_layers(model.vision_model)) == len(converted_layers(model)) == 2


@every_towers
def test_images_alone_calibrate_and_measure_the_image_model(model_type, caplog):
    images = media_batch(f"{model_type}_vision_model")
    model = convert_to_favorpp(towers(model_type), SMALL, calibration_data=[images])
    expected = towers(model_type)
    calibrate(convert_to_favorpp(expected, SMALL).vision_model, [images])
    assert fingerprint(model) == fingerprint(expected)
    assert {layer.calibrated for layer in converted_layers(model.vision_model)} == {True}
    assert {layer.calibrated for layer in converted_layers(model.text_model)} <= {False}
    said = "calibrated 2 of 4 converted layers; for the others there were no data."
    assert (said in caplog.messages) == (model_type != "clip")
    report = approximation_report(model, images)
    alone = approximation_report(model.vision_model, images)
    assert report.layer_errors == alone.layer_errors
    assert report.end_to_end == alone.end_to_end
    assert {head.name.split(".")[0] for head in report.heads} == {"vision_model"}


def test_images_and_texts_calibrate_both_towers_in_any_order():
    batch = towers_batch("siglip")
    images, texts = {"pixel_values": batch["pixel_values"]}, {"input_ids": batch["input_ids"]}
    expected = fingerprint(convert_to_favorpp(towers("siglip"), SMALL, calibration_data=[batch]))
    assert fingerprint(convert_to_favorpp(towers("siglip"), SMALL, calibration_data=[texts, images])) == expected
    model = calibrate(convert_to_favorpp(towers("siglip"), SMALL), [images])
    assert fingerprint(calibrate(model, [texts])) == expected
    errors = [approximation_report(model, each).layer_errors for each in (texts, images)]
    assert errors[0] + errors[1] == approximation_report(model, batch).layer_errors


def test_texts_have_nothing_to_say_of_a_model_whose_text_model_stays_softmax():
    texts = [{"input_ids": towers_batch("clip")["input_ids"]}]
    model = towers("clip")
    before = fingerprint(model)
    with pytest.raises(InputError, match="calibration data never reached converted layer 0"):
        convert_to_favorpp(model, SMALL, calibration_data=texts)
    assert fingerprint(model) == before
    with pytest.raises(InputError, match="batch does not reach the converted layer vision_model"):
        approximation_report(convert_to_favorpp(model, SMALL), texts[0])


def test_a_budget_is_kept_by_the_tower_that_there_are_data_for():
    images = {"pixel_values": towers_batch("siglip")["pixel_values"]}
    with torch.no_grad():
        (model := towers("siglip")).vision_model.encoder.layers[1].self_attn.q_proj.weight.mul_(8)
    config = FavorppConfig(num_features=256, candidates=1)
    convert_to_favorpp(model, config, calibration_data=[images], keep_softmax="auto", error_budget=0.5)
    converted = [layer.name for layer in attention_layers(model) if layer.features]
    assert [name.split(".")[0] for name in converted] == ["text_model", "text_model", "vision_model"]


@pytest.mark.parametrize("name", ["CLIPVisionModel", "SiglipVisionModel", "SiglipTextModel", "Siglip2VisionModel"])
def test_a_converted_tower_loads_alone_from_the_checkpoint_of_the_whole(name, tmp_path):
    model_type = name.removesuffix("Model").removesuffix("Vision").removesuffix("Text").lower()
    model, batch = towers(model_type), towers_batch(model_type)
    needs_parts(model)
    convert_to_favorpp(model, SMALL).save_pretrained(tmp_path)
    tower = getattr(model, "text_model" if "Text" in name else "vision_model")
    inputs = {k: v for k, v in batch.items() if (k == "input_ids") == ("Text" in name)}
    loaded = getattr(transformers, name).from_pretrained(tmp_path)
    assert len(converted_layers(loaded)) == 2
    assert torch.equal(features(loaded, inputs), features(tower, inputs))
    alone = tmp_path / "alone"
    tower.save_pretrained(alone)
    assert torch.equal(features(type(tower).from_pretrained(alone), inputs), features(tower, inputs))


def test_without_this_package_two_towers_do_not_load_as_softmax(tmp_path):
    convert_to_favorpp(towers("clip"), SMALL).save_pretrained(tmp_path)
    program = f"from transformers import AutoModel; AutoModel.from_pretrained({str(tmp_path)!r})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert 'attn_implementation="favorpp"` is not supported' in result.stderr


@pytest.mark.parametrize("name", ["SiglipTextModel", "Siglip2TextModel"])
def test_a_text_is_summed_up_at_padding_as_by_softmax(name):
    model_type = name.removesuffix("TextModel").lower()
    model = towers(model_type).text_model
    ids = towers_batch(model_type)["input_ids"]
    batch = {"input_ids": ids, "attention_mask": (torch.arange(30) < torch.tensor([[30], [20], [9]])).long()}
    if not hasattr(sys.modules[type(model).__module__], "create_bidirectional_mask"):
        pytest.skip("the installed Transformers hides padding by a bias on all pairs")

    def pooled():
        with torch.no_grad():
            return model(**batch).pooler_output

    softmax, errors = pooled(), []
    for num_features in (16, 2048):
        convert_to_favorpp(model, FavorppConfig(num_features=num_features))
        errors.append([relative_error(*rows) for rows in zip(pooled(), softmax, strict=True)])
        revert_to_softmax(model)
    assert all(few > 3 * many for few, many in zip(*errors, strict=True))
    assert max(errors[1]) < 0.15
    near = {"exact_window": 8, "exact_ends": (1, 1)}  # of padding there is no block: features alone serve it
    convert_to_favorpp(model, FavorppConfig(num_features=2048, **near))
    assert max(relative_error(*rows) for rows in zip(pooled(), softmax, strict=True)) < 0.15
    revert_to_softmax(model)
    reason = "kernel='none' serves real tokens only, but the model reads what .* makes of padding"
    refused(model, reason, kernel="none", **near)


def test_padded_patches_are_read_neither_by_layers_nor_by_the_pooling():
    model, batch = towers("siglip2"), towers_batch("siglip2")
    images = {name: t for name, t in batch.items() if name != "input_ids"}
    needs_parts(model)
    convert_to_favorpp(model.vision_model, SMALL)
    alone = {name: t[1:, :20] if name != "spatial_shapes" else t[1:] for name, t in images.items()}
    garbage = torch.where(images["pixel_attention_mask"].bool().unsqueeze(-1), images["pixel_values"], 1e3)
    with torch.no_grad():
        single = model.vision_model(**alone)
        together = model.vision_model(**{**images, "pixel_values": garbage})
    torch.testing.assert_close(together.last_hidden_state[1, :20], single.last_hidden_state[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(together.pooler_output[1], single.pooler_output[0], rtol=0, atol=1e-5)


# --- encoders within other models ---------------------------------------------------------------------------------


def test_the_image_encoder_of_another_model_is_converted_and_saved(tmp_path, caplog):
    encoder = AutoConfig.for_model("vit", **MEDIA_MODELS["vit"])
    decoder = AutoConfig.for_model(
        "gpt2", n_embd=32, n_layer=1, n_head=4, vocab_size=64, bos_token_id=0, eos_token_id=1
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
        model = VisionEncoderDecoderModel(config).eval()
    batch = {**media_batch("vit"), "decoder_input_ids": torch.tensor([[0, 5, 6], [0, 7, 8]])}
    before, softmax = fingerprint(model), logits(model, batch)
    caplog.clear()
    convert_to_favorpp(model, FavorppConfig(num_features=16, exact_window=(3, 3)))
    assert "decoder stays softmax: it is a decoder, and only bidirectional encoders are converted." in caplog.messages
    converted = logits(model, batch)
    assert not torch.allclose(converted, softmax)
    assert fingerprint(revert_to_softmax(model)) == before
    assert torch.equal(logits(model, batch), softmax)

    convert_to_favorpp(model, FavorppConfig(num_features=16, exact_window=(3, 3))).save_pretrained(tmp_path)
    loaded = VisionEncoderDecoderModel.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, batch), converted)
    override = VisionEncoderDecoderModel.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert torch.equal(logits(override, batch), softmax)
