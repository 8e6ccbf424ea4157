"""Images and sound: conversion of encoders whose inputs are not token ids, and neighbourhoods in two dimensions."""

import pytest
import torch
from tiny_models import fingerprint
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel

from hf_favorpp import FavorppConfig, attention_matrix, calibrate, convert_to_favorpp, revert_to_softmax
from hf_favorpp.attention.tiles import Grid, tile_order
from hf_favorpp.errors import ConfigError, InputError
from hf_favorpp.families import attention_layers
from hf_favorpp.nn import converted_layers

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_IMAGE = {**_SIZES, "image_size": 48, "patch_size": 8}
_DECODER = {
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 2,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 24,
}
_SPEECH = {
    **_SIZES,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "feat_extract_norm": "layer",
    "attention_dropout": 0.0,
    "initializer_range": 0.1,
}
_STABLE = {**_SPEECH, "do_stable_layer_norm": True}
_CONFORMER = {**_SPEECH, "position_embeddings_type": "rotary", "conv_depthwise_kernel_size": 3}
_LASR = {
    **{**_SIZES, "conv_kernel_size": 5, "subsampling_conv_channels": 16, "subsampling_conv_kernel_size": 3},
    **{"num_mel_bins": 12, "attention_dropout": 0.0, "initializer_range": 0.2},
}
_WORDS = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 0}
_HALF = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
_BEIT = {"layer_scale_init_value": 1.0, "drop_path_rate": 0.0, "use_absolute_position_embeddings": True}
PATCHES = {
    "vit": {**_IMAGE, "initializer_range": 0.2},
    "deit": {**_IMAGE, "initializer_range": 0.2},
    "vit_msn": {**_IMAGE, "initializer_range": 0.2},
    "dinov2": {**_IMAGE, "initializer_range": 0.14},
    "dinov2_with_registers": {**_IMAGE, "initializer_range": 0.14, "num_register_tokens": 3},
    "dinov3_vit": {**_IMAGE, "initializer_range": 0.14, "num_register_tokens": 3},
    "ijepa": {**_IMAGE, "initializer_range": 0.2},
    "beit": {**_IMAGE, **_BEIT, "initializer_range": 0.2},
    "clip_vision_model": {**_IMAGE, "initializer_factor": 1.5},
    "siglip_vision_model": _IMAGE,
    "videomae": {**_IMAGE, **_DECODER, "image_size": 24, "num_frames": 8, "initializer_range": 0.2},
    "audio-spectrogram-transformer": {
        **{**_SIZES, "patch_size": 8, "frequency_stride": 6, "time_stride": 6},
        **{"max_length": 44, "num_mel_bins": 32, "initializer_range": 0.2},
    },
}
"""Encoders of patches in the order of an image, a video or a spectrogram."""
SPEECH = {
    "wav2vec2": _STABLE,
    "hubert": _STABLE,
    "sew": _SPEECH,
    "unispeech": _STABLE,
    "unispeech-sat": _STABLE,
    "data2vec-audio": {**_SPEECH, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 5},
    "wav2vec2-conformer": _CONFORMER,
    "whisper": {
        **{"d_model": 32, "num_mel_bins": 8, "max_source_positions": 40, "max_target_positions": 20, "init_std": 0.18},
        **{f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in _HALF.items()},
        **_WORDS,
    },
    "moonshine": {
        **{"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.16, "pad_head_dim_to_multiple_of": 6},
        **{"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2},
        **{"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4},
        **_WORDS,
    },
    "lasr_encoder": _LASR,
    "lasr_ctc": {"encoder_config": _LASR, "vocab_size": 16},
}
"""Encoders of waveforms or of their spectra."""
MEDIA_MODELS = {
    **PATCHES,
    **SPEECH,
    "vit_mae": {**_IMAGE, **_DECODER, "initializer_range": 0.2, "mask_ratio": 0.25},
    "siglip2_vision_model": {**_SIZES, "patch_size": 8, "num_patches": 36},
}
"""What makes each model type tiny, by ``config.model_type``; those of text are in tiny_models.py."""
every_media = pytest.mark.parametrize("model_type", MEDIA_MODELS)
SMALL = FavorppConfig(num_features=16)


def media_model(model_type, auto=AutoModel, **options):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"the installed Transformers has no {model_type}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **{**MEDIA_MODELS[model_type], **options})
        return of_this_version(auto.from_config(config).eval())


def of_this_version(model):
    """Return the model, or skip the test where the installed Transformers is too old to convert it."""
    for layer in attention_layers(model):
        if "this version of Transformers" in (reason := layer.stays_softmax() or ""):
            pytest.skip(reason)
    return model


def media_batch(model_type, size=(48, 48)):
    generator = torch.Generator().manual_seed(1)
    if model_type == "whisper":
        return {"input_features": torch.randn(2, 8, 80, generator=generator), "decoder_input_ids": _words()}
    if model_type == "moonshine":
        batch = sound(torch.randn(2, 12000, generator=generator), 7000)
        return batch | {"decoder_input_ids": _words()}
    if model_type in ("lasr_encoder", "lasr_ctc"):
        batch = sound(torch.randn(2, 83, 12, generator=generator), 51)
        return {"input_features": batch["input_values"], "attention_mask": batch["attention_mask"]}
    if model_type in SPEECH:
        return sound(torch.randn(2, 400, generator=generator), 250)
    if model_type == "audio-spectrogram-transformer":
        return {"input_values": torch.randn(2, 44, 32, generator=generator)}
    if model_type == "videomae":
        return {"pixel_values": torch.randn(2, 8, 3, 24, 24, generator=generator)}
    if model_type == "siglip2_vision_model":
        mask = (torch.arange(36) < torch.tensor([[36], [20]])).long()
        patches = torch.randn(2, 36, 192, generator=generator)
        return {
            "pixel_values": patches,
            "pixel_attention_mask": mask,
            "spatial_shapes": torch.tensor([[6, 6], [4, 5]]),
        }
    images = {"pixel_values": torch.randn(2, 3, *size, generator=generator)}
    return images | ({"noise": torch.rand(2, 36, generator=generator)} if model_type == "vit_mae" else {})


def sound(waves, real):
    """Return two recordings, of which the second ends after some samples."""
    mask = (torch.arange(waves.shape[1]) < torch.tensor([[waves.shape[1]], [real]])).long()
    return {"input_values": torch.einsum("bt...,bt->bt...", waves, mask), "attention_mask": mask}


def _words():
    return torch.tensor([[0, 5, 6], [0, 7, 8]])


def encoded(outputs):
    """Return what the encoder of a model made of its inputs, or the logits of a head."""
    names = ("encoder_last_hidden_state", "last_hidden_state", "logits")
    return next(outputs[name] for name in names if name in outputs)


def features(model, batch, **options):
    with torch.no_grad():
        return encoded(model(**batch, **options))


def watched_calls(model):
    """Return a list that fills with the indices of the converted layers as they are called."""
    calls = []
    for layer in converted_layers(model):
        layer.register_forward_hook(lambda layer, *_: calls.append(layer.layer))
    return calls


def relative_error(estimate, target):
    return float((estimate - target).norm() / target.norm())


@every_media
def test_more_features_come_closer_to_softmax_and_reverting_restores_it(model_type):
    model, batch = media_model(model_type), media_batch(model_type)
    before, softmax = fingerprint(model), features(model, batch)
    rows = 1 if any("mask" in name for name in batch) else 2  # the second is padded
    errors = []
    for num_features in (16, 2048):
        convert_to_favorpp(model, FavorppConfig(num_features=num_features))
        calls = watched_calls(model)
        errors.append(relative_error(features(model, batch)[:rows], softmax[:rows]))
        assert calls == [0, 1]
        revert_to_softmax(model)
    assert errors[1] < errors[0] / 3
    assert errors[1] < 0.1
    assert fingerprint(model) == before
    assert torch.equal(features(model, batch), softmax)


@every_media
def test_a_calibrated_conversion_is_saved_and_loaded(model_type, tmp_path):
    batch = media_batch(model_type)
    model = calibrate(convert_to_favorpp(media_model(model_type), SMALL), [batch])
    model.save_pretrained(tmp_path)
    loaded, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(features(loaded, batch), features(model, batch))


@pytest.mark.parametrize(("rows", "columns", "tile"), [(6, 6, (2, 3)), (4, 8, (4, 4)), (3, 3, (3, 3)), (1, 5, (1, 2))])
def test_a_run_of_tokens_is_a_tile_of_the_image(rows, columns, tile):
    order = tile_order(Grid(1, rows, columns), tile, torch.device("cpu"))
    assert sorted(order.tolist()) == list(range(1 + rows * columns))
    assert order[-1] == 0
    patches = order[:-1] - 1
    for run in patches.split(tile[0] * tile[1]):
        row, column = run // columns, run % columns
        assert row.max() - row.min() < tile[0]
        assert column.max() - column.min() < tile[1]


@pytest.mark.parametrize("size", [7, 10, 37])
def test_tiles_that_do_not_divide_the_image_still_hold_neighbours(size):
    patches = tile_order(Grid(0, size, size), (4, 4), torch.device("cpu"))
    for run in patches.split(16):
        row, column = run // size, run % size
        assert row.max() - row.min() < 2 * 4
        assert column.max() - column.min() < 3 * 4


def test_patches_of_one_tile_and_the_class_token_attend_exactly():
    model = convert_to_favorpp(media_model("vit"), FavorppConfig(num_features=16, exact_window=(3, 2)))
    maps = attention_matrix(model, media_batch("vit"), 0)
    tile = torch.tensor([-1] + [(i // 6 // 3) * 3 + i % 6 // 2 for i in range(36)])
    same = tile.unsqueeze(1) == tile
    same[:, 0] = True
    ratio = maps.converted / maps.softmax
    for row in range(1, 37):  # exact logits share one normaliser, so the ratio is one number along the tile
        exact = ratio[:, :, row, same[row]]
        assert (exact / exact[..., :1] - 1).abs().max() < 5e-3
        others = ratio[:, :, row, ~same[row]]
        assert (others / exact[..., :1] - 1).abs().max() > 0.05


@pytest.mark.parametrize(("size", "image_size"), [((48, 48), 48), ((80, 80), 48), ((48, 64), (48, 64))])
def test_a_tile_as_large_as_the_image_is_softmax(size, image_size):
    model, batch = media_model("vit", image_size=image_size), media_batch("vit", size)
    resized = {"interpolate_pos_encoding": size not in {(48, 48), image_size}}
    softmax = features(model, batch, **resized)
    convert_to_favorpp(model, FavorppConfig(num_features=16, exact_window=(16, 16)))
    assert relative_error(features(model, batch, **resized), softmax) < 1e-5


def test_tiles_calibrate_and_survive_saving(tmp_path):
    batch = media_batch("vit")
    softmax = features(media_model("vit"), batch)
    errors = []
    for window in (0, (6, 3)):
        config = FavorppConfig(num_features=16, exact_window=window)
        model = convert_to_favorpp(media_model("vit"), config, calibration_data=[batch])
        errors.append(relative_error(features(model, batch), softmax))
    assert errors[1] < errors[0]
    model.save_pretrained(tmp_path)
    assert torch.equal(features(AutoModel.from_pretrained(tmp_path), batch), features(model, batch))


def test_an_image_of_unknown_shape_is_refused():
    model = convert_to_favorpp(media_model("vit"), FavorppConfig(num_features=8, exact_window=(2, 2)))
    with pytest.raises(InputError, match="needs the configured image shape or a square, got 48 patches"):
        features(model, media_batch("vit", (48, 64)), interpolate_pos_encoding=True)


def test_a_tile_needs_an_image():
    model = media_model("wav2vec2")
    before = fingerprint(model)
    with pytest.raises(ConfigError, match=r"exact_window=\(2, 2\) is a tile of patches, but .* has no image grid"):
        convert_to_favorpp(model, FavorppConfig(exact_window=(2, 2)))
    assert fingerprint(model) == before
