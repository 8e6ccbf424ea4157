"""Images, videos and spectrograms: where the patches of every family are, what is refused, and decoders."""

from functools import partial

import pytest
import torch
from test_media_families import (
    PATCHES,
    SMALL,
    features,
    media_batch,
    media_model,
    relative_error,
)
from tiny_models import fingerprint
from transformers import (
    AutoModel,
    VideoMAEForPreTraining,
    ViTMAEForPreTraining,
)

from hf_favorpp import FavorppConfig, attention_matrix, calibrate, convert_to_favorpp, revert_to_softmax
from hf_favorpp.attention.tiles import Grid, attend_exactly
from hf_favorpp.errors import ConfigError, InputError, UnsupportedModelError
from hf_favorpp.families import attention_layers
from hf_favorpp.nn import converted_layers

every_patches = pytest.mark.parametrize("model_type", PATCHES)
every_image = pytest.mark.parametrize("model_type", sorted({*PATCHES} - {"videomae", "audio-spectrogram-transformer"}))

FLEXIBLE = ("dinov2", "dinov2_with_registers", "dinov3_vit", "beit")
"""Take images of any size without being told to."""


# --- where the patches are ----------------------------------------------------------------------------------------


def laid_out(model, batch):
    """Return the grid that the model's own convolution makes of its inputs, and the number of tokens."""
    shapes = []
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
            module.register_forward_hook(lambda _, args, out: shapes.append(out.shape[2:]))
    length = features(model, batch).shape[1]
    *slices, rows, columns = shapes[0]
    rows *= slices[0] if slices else 1
    return Grid(length - rows * columns, rows, columns), length


@every_patches
def test_a_family_knows_where_its_patches_and_its_special_tokens_are(model_type):
    model, batch = media_model(model_type), media_batch(model_type)
    grid, length = laid_out(model, batch)
    layers = list(attention_layers(model))
    assert [layer.family.grid(layer.module, length) for layer in layers] == [grid, grid]
    expected = {"deit": 2, "ijepa": 0, "siglip_vision_model": 0, "videomae": 0, "audio-spectrogram-transformer": 2}
    registers = 3 if model_type in ("dinov2_with_registers", "dinov3_vit") else 0
    assert grid.prefix == expected.get(model_type, 1) + registers


@every_patches
def test_patches_of_one_tile_and_the_special_tokens_attend_exactly(model_type):
    model, batch = media_model(model_type), media_batch(model_type)
    (prefix, rows, columns), length = laid_out(model, batch)
    tile = (3, 2)  # of 6 x 6 patches, of 4 slices of 3 x 3, of 5 x 7
    convert_to_favorpp(model, FavorppConfig(num_features=16, exact_window=tile))
    maps = attention_matrix(model, batch, 0)
    down, across = -(-rows // tile[0]), -(-columns // tile[1])
    row, column = torch.arange(rows).unsqueeze(-1), torch.arange(columns)
    patch = (row * down // rows * across + column * across // columns).flatten()
    if rows % tile[0] == columns % tile[1] == 0:  # else some runs of tokens reach into the next tile
        of = torch.cat((torch.full((prefix,), -1), patch))
        same = of.unsqueeze(1) == of
        same[:, :prefix] = True
    else:
        same = torch.zeros(length, length, dtype=torch.bool)
        same[:, :prefix] = True
        same.fill_diagonal_(True)
    ratio = maps.converted / maps.softmax
    for query in range(prefix, length):  # exact logits share one normaliser, so the ratio is one number along the tile
        exact = ratio[:, :, query, same[query]]
        assert (exact / exact[..., :1] - 1).abs().max() < 5e-3
        others = ratio[:, :, query, ~same[query]]
        assert (others / exact[..., :1] - 1).abs().max() > 0.05


@every_patches
def test_special_tokens_see_all_patches_exactly(model_type):
    model, batch = media_model(model_type), media_batch(model_type)
    (prefix, *_), _ = laid_out(model, batch)
    convert_to_favorpp(model, FavorppConfig(num_features=16, exact_window=(3, 2)))
    maps = attention_matrix(model, batch, 0)
    torch.testing.assert_close(maps.converted[..., :prefix, :], maps.softmax[..., :prefix, :], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(maps.converted[..., prefix:, :], maps.softmax[..., prefix:, :], rtol=1e-2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_few_queries_attend_exactly_to_real_keys(heads, kv_heads, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, heads, 2, 5), (3, kv_heads, 9, 5), (3, kv_heads, 9, 4))
    leaves = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
    ]
    mask = torch.arange(9) < torch.tensor([[9], [4], [0]])
    leaves[2].data[1, :, 4:] = float("nan")  # padding may hold anything
    out = attend_exactly(*leaves, mask, 0.7)
    query, key, value = (t.double().repeat_interleave(heads // t.shape[1], dim=1) for t in leaves)
    value = value.nan_to_num()
    weights = (0.7 * query @ key.mT).exp() * mask[:, None, None]
    expected = weights @ value / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    assert out.dtype == dtype
    assert (out[2] == 0).all()
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    grads = torch.autograd.grad(out.double().square().sum(), leaves)
    wanted = torch.autograd.grad(expected.square().sum(), leaves)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.nan_to_num(), want.nan_to_num(), rtol=5 * tolerance, atol=5 * tolerance)
    torch.testing.assert_close(attend_exactly(*leaves, None, 0.7)[0], out[0], rtol=tolerance, atol=tolerance)


def test_without_features_a_patch_sees_its_tile_and_the_class_token_alone():
    model, batch = media_model("vit"), media_batch("vit")
    (prefix, rows, columns), length = laid_out(model, batch)
    convert_to_favorpp(model, FavorppConfig(kernel="none", exact_window=(3, 2)))
    row, column = torch.arange(rows).unsqueeze(-1), torch.arange(columns)
    tile = (row // 3 * columns + column // 2).flatten()
    seen = torch.ones(length, length, dtype=torch.bool)
    seen[prefix:, prefix:] = tile.unsqueeze(1) == tile
    maps = attention_matrix(model, batch, 0)
    assert (rows, columns) == (6, 6)
    assert torch.equal(maps.converted > 0, seen.expand_as(maps.converted))
    expected = torch.where(seen, maps.softmax, 0)
    torch.testing.assert_close(maps.converted, expected / expected.sum(-1, keepdim=True), rtol=1e-4, atol=1e-6)


@every_image
@pytest.mark.parametrize("size", [(48, 48), (80, 80)])
def test_a_tile_as_large_as_the_image_is_softmax_at_any_resolution(model_type, size):
    model, batch = media_model(model_type), media_batch(model_type, size)
    options = {} if model_type in FLEXIBLE or size == (48, 48) else {"interpolate_pos_encoding": True}
    softmax = features(model, batch, **options)
    convert_to_favorpp(model, FavorppConfig(num_features=16, exact_window=(16, 16)))
    assert relative_error(features(model, batch, **options), softmax) < 1e-5
    revert_to_softmax(model)
    convert_to_favorpp(model, FavorppConfig(num_features=16))
    assert 1e-3 < relative_error(features(model, batch, **options), softmax) < 1


@every_image
def test_images_that_are_not_square_have_a_grid_where_the_configuration_names_it(model_type):
    model, batch = media_model(model_type), media_batch(model_type, (48, 80))
    options = {} if model_type in FLEXIBLE else {"interpolate_pos_encoding": True}
    softmax = features(model, batch, **options)
    convert_to_favorpp(model, FavorppConfig(num_features=16, exact_window=(16, 16)))
    with pytest.raises(InputError, match="needs the configured image shape or a square, got 60 patches"):
        features(model, batch, **options)
    model.config.image_size = (48, 80)
    assert relative_error(features(model, batch, **options), softmax) < 1e-5
    layer = next(attention_layers(model))
    assert layer.family.grid(layer.module, softmax.shape[1])[1:] == (6, 10)


def test_a_tile_as_large_as_the_spectrogram_is_softmax():
    model, batch = media_model("audio-spectrogram-transformer"), media_batch("audio-spectrogram-transformer")
    softmax = features(model, batch)
    convert_to_favorpp(model, FavorppConfig(num_features=16, exact_window=(5, 7)))
    assert relative_error(features(model, batch), softmax) < 1e-5


def test_a_tile_of_a_video_stays_in_its_slice():
    model, batch = media_model("videomae", num_frames=2), media_batch("videomae")
    batch = {"pixel_values": batch["pixel_values"][:, :2]}
    softmax = features(model, batch)
    convert_to_favorpp(model, FavorppConfig(num_features=16, exact_window=(3, 3)))
    assert relative_error(features(model, batch), softmax) < 1e-5  # the only slice is one tile
    model, batch = media_model("videomae"), media_batch("videomae")
    convert_to_favorpp(model, FavorppConfig(num_features=16, exact_window=(3, 3)))
    by_tile = features(model, batch)
    revert_to_softmax(model)
    convert_to_favorpp(model, FavorppConfig(num_features=16, exact_window=9))
    assert relative_error(features(model, batch), by_tile) < 1e-5  # a slice is 9 tokens in a row


# --- what is refused ----------------------------------------------------------------------------------------------


def refused(model, message, error=ConfigError, **options):
    before = fingerprint(model)
    with pytest.raises(error, match=message):
        convert_to_favorpp(model, FavorppConfig(**options))
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("model_type", "tile", "reason"),
    [
        ("vit_mae", (2, 2), "masking puts the patches into a random order, with mask_ratio=0 too"),
        ("siglip2_vision_model", (2, 2), r"every image of a batch has a grid of its own \(spatial_shapes\)"),
        (
            "videomae",
            (2, 3),
            "within one slice of a video, so their rows must divide its 3; exact_window=9 is a whole",
        ),
        ("videomae", (6, 3), "within one slice of a video, so their rows must divide its 3"),
    ],
)
def test_patches_that_have_no_tiles_are_refused_with_the_reason(model_type, tile, reason):
    model = media_model(model_type)
    refused(model, rf"is a tile of patches, but .*{reason}.*\. Give a number of tokens", exact_window=tile)
    convert_to_favorpp(model, FavorppConfig(num_features=8, exact_window=6))


def test_a_video_of_which_a_part_is_masked_has_no_tiles():
    model, batch = media_model("videomae"), media_batch("videomae")
    convert_to_favorpp(model, FavorppConfig(num_features=8, exact_window=(3, 3)))
    masked = torch.zeros(2, 36, dtype=torch.bool)
    masked[:, :6] = True
    with pytest.raises(InputError, match=r"a tile of patches needs all 4 x 3 x 3 patches of a video, got 30"):
        features(model, batch, bool_masked_pos=masked)


@pytest.mark.parametrize("option", ["use_relative_position_bias", "use_shared_relative_position_bias"])
def test_beit_with_a_relative_position_bias_is_refused(option, tmp_path):
    model = media_model("beit", **{option: True})
    reason = f"no layer of BeitModel can be converted: .*{option} adds a bias that depends on query and key"
    refused(model, reason, UnsupportedModelError)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        AutoModel.from_pretrained(tmp_path, attn_implementation="favorpp")


# --- decoders of masked autoencoders ------------------------------------------------------------------------------

DECODERS = {"vit_mae": ViTMAEForPreTraining, "videomae": VideoMAEForPreTraining}
every_decoder = pytest.mark.parametrize("model_type", DECODERS)


def pretraining(model_type):
    auto = partial(media_model, model_type)
    model = auto(auto=type("Auto", (), {"from_config": DECODERS[model_type]._from_config}))
    batch = media_batch(model_type)
    if model_type == "videomae":
        batch["bool_masked_pos"] = (torch.arange(36) % 4 == 0).expand(2, -1)
    return model, batch


def logits(model, batch):
    with torch.no_grad():
        return model(**batch).logits


@every_decoder
def test_the_decoder_of_a_masked_autoencoder_stays_softmax_unless_it_is_asked_for(model_type, caplog):
    model, batch = pretraining(model_type)
    before, softmax = fingerprint(model), logits(model, batch)
    with caplog.at_level("INFO", logger="hf_favorpp"):
        convert_to_favorpp(model, SMALL)
    assert [layer.name.startswith("decoder.") for layer in attention_layers(model) if layer.features] == [False] * 2
    assert "it is in the decoder, converted only where FavorppConfig(layers=...) names it" in caplog.text
    encoder_only = logits(model, batch)
    revert_to_softmax(model)
    assert fingerprint(model) == before
    assert torch.equal(logits(model, batch), softmax)
    convert_to_favorpp(model, FavorppConfig(num_features=16, layers=(0, 1, 2, 3)))
    assert [layer.layer for layer in converted_layers(model)] == [0, 1, 2, 3]
    assert not torch.allclose(logits(model, batch), encoder_only)
    revert_to_softmax(model)
    assert fingerprint(model) == before
    assert torch.equal(logits(model, batch), softmax)
    refused(model, "a decoder has no image grid", layers=(3,), exact_window=(3, 3))


@every_decoder
@pytest.mark.parametrize("layers", [(0, 1, 3), (2,)])
def test_a_converted_decoder_is_saved_and_loaded(model_type, layers, tmp_path):
    model, batch = pretraining(model_type)
    softmax = logits(model, batch)
    calibrate(convert_to_favorpp(model, FavorppConfig(num_features=16, layers=layers)), [batch])
    model.save_pretrained(tmp_path / "once")
    once, report = type(model).from_pretrained(tmp_path / "once", output_loading_info=True)
    assert not any(report.values())
    once.save_pretrained(tmp_path / "twice")
    twice = type(model).from_pretrained(tmp_path / "twice")
    for loaded in (once, twice):
        assert tuple(layer.layer for layer in converted_layers(loaded)) == layers
        assert torch.equal(logits(loaded, batch), logits(model, batch))
    assert torch.equal(logits(revert_to_softmax(once), batch), softmax)
    assert torch.equal(
        logits(type(model).from_pretrained(tmp_path / "once", attn_implementation="sdpa"), batch), softmax
    )


@every_decoder
def test_the_encoder_of_a_checkpoint_with_a_converted_decoder_loads_alone(model_type, tmp_path):
    model, batch = pretraining(model_type)
    convert_to_favorpp(model, FavorppConfig(num_features=16, layers=(1, 3))).save_pretrained(tmp_path)
    encoder = AutoModel.from_pretrained(tmp_path)
    assert [layer.layer for layer in converted_layers(encoder)] == [1]
    assert torch.equal(features(encoder, batch), features(model.base_model, batch))
    with pytest.raises(ConfigError, match=r"layers names layer 3, but ViT\w+ has 2|VideoMAEModel has 2"):
        convert_to_favorpp(revert_to_softmax(encoder), FavorppConfig(layers=(1, 3)))
