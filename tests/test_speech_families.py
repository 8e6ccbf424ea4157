"""Speech: padding, positions and convolutions of every family, and recognisers whose decoder stays softmax."""

import copy
import subprocess
import sys
from functools import partial

import pytest
import torch
from test_media_families import SMALL, SPEECH, encoded, features, media_batch, media_model, relative_error
from test_vision_families import refused
from tiny_models import fingerprint, tiny_config
from transformers import (
    AutoConfig,
    AutoModelForCTC,
    AutoModelForSpeechSeq2Seq,
    SpeechEncoderDecoderConfig,
    SpeechEncoderDecoderModel,
)

from hf_favorpp import FavorppConfig, approximation_report, calibrate, convert_to_favorpp, revert_to_softmax
from hf_favorpp.errors import ConfigError, UnsupportedModelError
from hf_favorpp.families import attention_layers
from hf_favorpp.nn import converted_layers

every_speech = pytest.mark.parametrize("model_type", SPEECH)
MASKED = [model_type for model_type in SPEECH if model_type != "whisper"]
RECOGNISERS = ["whisper", "moonshine"]
FRAMES = {"moonshine": 19, "lasr_encoder": 12, "lasr_ctc": 12, "whisper": 40}
"""Of the second recording, which ends before the first; 24 where nothing else is said."""


def real_frames(model_type, hidden):
    """Return what was made of real frames, (frames, width)."""
    return torch.cat((hidden[0], hidden[1, : FRAMES.get(model_type, 24)]))


def seen_masks(model):
    """Return a list that fills with the padding masks that reach the converted layers."""
    masks = []
    for layer in converted_layers(model):
        layer.register_forward_pre_hook(lambda _, args: masks.append(args[3]))
    return masks


# --- attention ----------------------------------------------------------------------------------------------------


@every_speech
@pytest.mark.parametrize("options", [{}, {"exact_window": 8, "exact_ends": (1, 1)}], ids=["features", "window"])
def test_real_frames_of_a_padded_batch_come_close_to_those_of_softmax(model_type, options):
    model, batch = media_model(model_type), media_batch(model_type)
    softmax, errors = real_frames(model_type, features(model, batch)), []
    for num_features in (16, 2048):
        convert_to_favorpp(model, FavorppConfig(num_features=num_features, **options))
        errors.append(relative_error(real_frames(model_type, features(model, batch)), softmax))
        revert_to_softmax(model)
    assert errors[1] < errors[0] / 2.5
    assert errors[1] < 0.1


@every_speech
def test_a_window_of_all_frames_is_softmax(model_type):
    model, batch = media_model(model_type), media_batch(model_type)
    softmax = features(model, batch)
    convert_to_favorpp(model, FavorppConfig(num_features=16, exact_window=64))
    assert relative_error(features(model, batch)[0], softmax[0]) < 1e-5


@every_speech
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_gradients_are_those_of_feature_matrices_in_float64(model_type, backend):
    def plain(layer, query, key, value, key_mask, scaling, *_):
        def phi(x):
            return (x @ layer.omega.double().mT - x.square().sum(-1, keepdim=True) / 2).exp()

        phi_q, phi_k = phi(scaling**0.5 * query), phi(scaling**0.5 * key)
        if key_mask is not None:
            phi_k = phi_k * key_mask[:, None, :, None]
        return phi_q @ (phi_k.mT @ value) / (phi_q @ phi_k.sum(-2).unsqueeze(-1))

    config = FavorppConfig(num_features=16, kernel="favor+", preconditioning="none", backend=backend)
    model, batch = convert_to_favorpp(media_model(model_type), config), media_batch(model_type)
    expected = copy.deepcopy(model).double()
    for layer in converted_layers(expected):
        layer.forward = partial(plain, layer)
    doubled = {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}
    hidden = [real_frames(model_type, encoded(m(**b))) for m, b in ((model, batch), (expected, doubled))]
    assert relative_error(*(out.detach() for out in hidden)) < 1e-5
    probe = torch.randn(hidden[0].shape, generator=torch.Generator().manual_seed(2))
    for out in hidden:
        (out * probe).sum().backward()
    compared = 0
    for layer in attention_layers(model):
        for name, weight in layer.module.named_parameters(layer.name) if layer.features else ():
            wanted = expected.get_parameter(name).grad
            if not name.endswith(("k_proj.bias", "linear_k.bias")):  # which softmax and features do not depend on
                assert relative_error(weight.grad, wanted) < 1e-3, name
                assert wanted.abs().max() > 1e-6, name
                compared += 1
    assert compared >= 8


@every_speech
def test_the_report_measures_the_layers(model_type):
    model, batch = convert_to_favorpp(media_model(model_type), SMALL), media_batch(model_type)
    report = approximation_report(model, batch)
    assert len(report.layer_errors) == 2
    assert all(0.01 < error < 2 for error in report.layer_errors)
    assert report.num_tokens > 0
    assert 0 < next(iter(report.end_to_end.values())) < 1


@every_speech
def test_layers_are_chosen_by_name_or_by_their_error(model_type):
    model, batch = media_model(model_type), media_batch(model_type)
    before = fingerprint(model)
    convert_to_favorpp(model, FavorppConfig(num_features=16, layers=(1,)))
    assert [layer.index for layer in attention_layers(model) if layer.features] == [1]
    assert fingerprint(revert_to_softmax(model)) == before
    config = FavorppConfig(num_features=16, candidates=1)
    errors = approximation_report(convert_to_favorpp(model, config, calibration_data=[batch]), batch).layer_errors
    revert_to_softmax(model)
    budget = {"keep_softmax": "auto", "error_budget": sum(errors) / 2}
    convert_to_favorpp(model, config, calibration_data=[batch], **budget)
    assert [layer.index for layer in attention_layers(model) if layer.features] == [errors.index(min(errors))]


# --- padding ------------------------------------------------------------------------------------------------------

PADDED = {
    "wav2vec2-conformer": ({"conv_depthwise_kernel_size": 1}, 250),  # its convolutions do not know of padding
    "data2vec-audio": ({"num_conv_pos_embeddings": 1}, 250),  # nor do all but the first of these
    "moonshine": ({}, 18 * 384 + 895),  # samples that the last real frame is made of
    "lasr_encoder": ({}, 51),
    "lasr_ctc": ({"encoder_config": {**SPEECH["lasr_encoder"]}}, 51),
}
"""What makes the softmax model itself independent of padding, and how many samples or spectra are read."""


@pytest.mark.parametrize("model_type", MASKED)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("window", [0, 8])
def test_padding_is_never_read(model_type, backend, window):
    options, read = PADDED.get(model_type, ({}, 250))
    model, batch = media_model(model_type, **options), media_batch(model_type)
    if model_type == "moonshine":
        model.encoder.groupnorm = torch.nn.Identity()  # over all samples, padded or not
    convert_to_favorpp(model, FavorppConfig(num_features=16, backend=backend, exact_window=window))
    masks, name = seen_masks(model), model.main_input_name
    batch[name][1, read:] = torch.randn_like(batch[name][1, read:])
    together = features(model, batch)[1]
    frames = FRAMES.get(model_type, 24)
    assert all(int(mask[1].sum()) == frames // (2 if model_type == "sew" else 1) for mask in masks)
    short = {name: t[1:, :read] if name != "decoder_input_ids" else t[1:] for name, t in batch.items()}
    alone = features(model, short)[0]
    assert len(alone) == frames
    torch.testing.assert_close(together[:frames], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model_type", ["lasr_encoder", "lasr_ctc"])
def test_the_convolutions_of_lasr_leave_out_padding_as_beside_softmax(model_type):
    model, batch = media_model(model_type), media_batch(model_type)
    convolutions = [module for name, module in model.named_modules() if name.endswith(".conv.depthwise_conv")]
    heard = []
    for convolution in convolutions:
        convolution.register_forward_pre_hook(lambda _, args: heard.append(args[0]))
    features(model, batch)
    features(convert_to_favorpp(model, SMALL), batch)
    assert len(heard) == 4
    for inputs in heard:
        assert (inputs[1, :, 12:] == 0).all()
        assert (inputs[1, :, :12] != 0).any(0).all()


def test_whisper_hears_all_of_its_thirty_seconds():
    model, batch = convert_to_favorpp(media_model("whisper"), SMALL), media_batch("whisper")
    masks, unmasked = seen_masks(model), features(model, batch)
    mask = (torch.arange(80) < torch.tensor([[80], [50]])).long()
    assert torch.equal(features(model, {**batch, "attention_mask": mask}), unmasked)
    assert masks == [None] * 4


# --- positions ----------------------------------------------------------------------------------------------------


def test_a_conformer_without_positions_is_converted():
    model, batch = media_model("wav2vec2-conformer", position_embeddings_type=None), media_batch("wav2vec2-conformer")
    softmax = real_frames("wav2vec2-conformer", features(model, batch))
    convert_to_favorpp(model, FavorppConfig(num_features=2048))
    assert relative_error(real_frames("wav2vec2-conformer", features(model, batch)), softmax) < 0.02


def test_the_features_of_moonshine_have_the_width_of_its_padded_heads():
    model = convert_to_favorpp(media_model("moonshine"), SMALL)
    assert [layer.omega.shape for layer in converted_layers(model)] == [(4, 16, 12)] * 2
    plain = convert_to_favorpp(media_model("moonshine", pad_head_dim_to_multiple_of=None), SMALL)
    assert [layer.omega.shape for layer in converted_layers(plain)] == [(4, 16, 8)] * 2


# --- decoders and heads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", RECOGNISERS)
def test_decoder_and_cross_attention_stay_softmax_and_it_is_said(model_type, caplog):
    model, batch = media_model(model_type), media_batch(model_type)
    with torch.no_grad():
        encoder_outputs = model.get_encoder()(batch[model.main_input_name])
        words = {"encoder_outputs": encoder_outputs, "decoder_input_ids": batch["decoder_input_ids"]}
        softmax = model(**words).last_hidden_state
        caplog.clear()
        with caplog.at_level("INFO", logger="hf_favorpp"):
            convert_to_favorpp(model, SMALL)
        assert torch.equal(model(**words).last_hidden_state, softmax)
    assert [layer.name.split(".")[0] for layer in attention_layers(model) if layer.features] == ["encoder"] * 2
    assert "converted 2 of 6 attention layers; the others stay softmax." in caplog.messages
    for layer in (0, 1):
        assert f"decoder.layers.{layer}.self_attn stays softmax: it belongs to a decoder" in caplog.text
        assert f"decoder.layers.{layer}.encoder_attn stays softmax: it is cross-attention" in caplog.text
    revert_to_softmax(model)
    refused(model, "layers names layer 2, which cannot be converted: it belongs to a decoder", layers=(0, 2))
    refused(model, "layers names layer 3, which cannot be converted: it is cross-attention", layers=(3,))
    refused(model.get_decoder(), "can be converted: .* it belongs to a decoder", UnsupportedModelError)
    with pytest.raises(ConfigError, match=r"layers names layer 1, .* it is cross-attention"):
        convert_to_favorpp(model.get_decoder(), FavorppConfig(layers=(1,)))


@pytest.mark.parametrize("model_type", RECOGNISERS)
def test_a_converted_recogniser_generates_saves_and_loads(model_type, tmp_path):
    def generated(model):
        return model.generate(**batch, max_new_tokens=8, do_sample=False)

    model, batch = media_model(model_type, AutoModelForSpeechSeq2Seq), media_batch(model_type)
    batch.pop("decoder_input_ids")
    softmax = generated(model)
    calibrated = calibrate(convert_to_favorpp(model, SMALL), [media_batch(model_type)])
    words = generated(calibrated)
    assert words.shape[0] == 2
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(generated(loaded), words)
    assert torch.equal(generated(revert_to_softmax(model)), softmax)
    exact = FavorppConfig(num_features=16, exact_window=64)
    assert torch.equal(generated(convert_to_favorpp(model, exact)), softmax)


@pytest.mark.parametrize("model_type", ["wav2vec2", "wav2vec2-conformer", "data2vec-audio", "lasr_ctc"])
def test_a_model_with_a_ctc_head_trains(model_type):
    options = {} if model_type == "lasr_ctc" else {"vocab_size": 16, "mask_time_prob": 0.0, "layerdrop": 0.0}
    model, batch = media_model(model_type, AutoModelForCTC, **options), media_batch(model_type)
    convert_to_favorpp(model, SMALL).train()
    model(**batch, labels=torch.tensor([[3, 4, 5], [6, 7, 8]])).loss.backward()
    for layer in attention_layers(model):
        gradients = {name: weight.grad for name, weight in layer.module.named_parameters()}
        assert all(gradient.isfinite().all() for gradient in gradients.values())
        assert gradients[next(name for name in gradients if "q" in name)].abs().max() > 0


def test_the_speech_encoder_of_another_model_is_converted_and_saved(tmp_path, caplog):
    encoder = AutoConfig.for_model("wav2vec2", **SPEECH["wav2vec2"])
    decoder = tiny_config("bert", is_decoder=True, add_cross_attention=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = SpeechEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
        model = SpeechEncoderDecoderModel(config).eval()
    batch = {**media_batch("wav2vec2"), "decoder_input_ids": torch.tensor([[0, 5, 6], [0, 7, 8]])}
    before, softmax = fingerprint(model), features(model, batch)
    caplog.clear()
    converted = features(convert_to_favorpp(model, SMALL), batch)
    assert "decoder stays softmax: it belongs to a decoder; only encoder self-attention is converted." in caplog.text
    assert not torch.allclose(converted, softmax)
    assert fingerprint(revert_to_softmax(model)) == before
    assert torch.equal(features(model, batch), softmax)
    convert_to_favorpp(model, SMALL).save_pretrained(tmp_path)
    assert torch.equal(features(SpeechEncoderDecoderModel.from_pretrained(tmp_path), batch), converted)


def test_without_this_package_no_family_loads_as_softmax(tmp_path):
    for model_type in SPEECH:
        convert_to_favorpp(media_model(model_type), SMALL).save_pretrained(tmp_path / model_type)
    program = f"""
from transformers import AutoModel
for model_type in {list(SPEECH)!r}:
    try:
        AutoModel.from_pretrained({str(tmp_path)!r} + "/" + model_type)
    except ValueError as error:
        assert 'attn_implementation="favorpp"` is not supported' in str(error)
    else:
        raise SystemExit(model_type + " was loaded")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
