"""Attention maps by one-hot values: they are what the layer applies, and looking changes nothing."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from tiny_models import NUM_HEADS, fingerprint, tiny_model, token_batch
from torch import nn
from transformers import AttentionInterface, AutoModelForSequenceClassification, ViTConfig, ViTModel

from hf_favorpp import FavorppConfig, attention_matrix, calibrate, convert_to_favorpp
from hf_favorpp.errors import ConversionError, InputError, UnsupportedModelError
from hf_favorpp.nn import converted_layers

LENGTH, SHORT = 20, 13  # head_dim is 8: two passes over columns and a part of a third
BATCH = token_batch(LENGTH, SHORT)
REAL = BATCH["attention_mask"].bool()


def eager_attentions(model_type, **options):
    """Return what Transformers itself computes, one (B, H, L, L) per layer, with rows of padding set to 0."""
    model = tiny_model(model_type, attn_implementation="eager", **options)
    with torch.no_grad():
        attentions = model(**BATCH, output_attentions=True).attentions
    return [weights.masked_fill(~REAL[:, None, :, None], 0) for weights in attentions]


def converted_model(model_type="bert", **options):
    return convert_to_favorpp(tiny_model(model_type), FavorppConfig(**{"num_features": 16, **options}))


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


# --- the converted map ------------------------------------------------------------------------------------------

CONFIGS = {
    "default": {},
    "paper": {"preconditioning": "none", "candidates": 1},
    "window and ends": {"exact_window": 4, "exact_ends": (1, 1)},
    "relu": {"kernel": "relu"},
    "trig": {"kernel": "trig"},
}


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_the_converted_map_times_the_values_is_what_the_layer_puts_out(options, layer):
    model = converted_model(**options)
    seen = []
    hook = converted_layers(model)[layer].register_forward_hook(lambda _, args, out: seen.append((args[2], out)))
    with torch.no_grad():
        model(**BATCH)
    hook.remove()
    maps = attention_matrix(model, BATCH, layer)
    [(value, out)] = seen
    for row, real in enumerate(REAL):
        close((maps.converted[row] @ value[row])[:, real], out[row][:, real])
    assert (maps.layer, maps.call) == (layer, 0)


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("model_type", ["bert", "esm"])
def test_rows_sum_to_one_over_real_keys_and_padding_gets_nothing(model_type, options):
    maps = attention_matrix(converted_model(model_type, **options), BATCH, 1)
    assert torch.equal(maps.key_mask, REAL)
    for weights in (maps.softmax, maps.converted):
        assert weights.shape == (2, NUM_HEADS, LENGTH, LENGTH)
        assert weights.dtype == torch.float32
        assert not weights.requires_grad
        assert torch.equal(weights[1, :, SHORT:], torch.zeros(NUM_HEADS, LENGTH - SHORT, LENGTH))
        assert torch.equal(weights[1, :, :, SHORT:], torch.zeros(NUM_HEADS, LENGTH, LENGTH - SHORT))
        close(weights.sum(-1), REAL[:, None].expand(-1, NUM_HEADS, -1).float(), 1e-4)
    assert (maps.converted - maps.softmax).abs().max() > 0.01


def test_a_window_over_everything_gives_the_softmax_map_and_that_of_the_original_model():
    model = converted_model(exact_window=LENGTH)
    for layer, expected in enumerate(eager_attentions("bert")):
        maps = attention_matrix(model, BATCH, layer)
        close(maps.converted, maps.softmax, 1e-6)
        close(maps.softmax, expected)


def test_a_calibrated_layer_with_fewer_key_heads():
    def grouped(**options):
        return tiny_model("eurobert", num_key_value_heads=2, **options)

    model = calibrate(convert_to_favorpp(grouped(), FavorppConfig(num_features=512, exact_ends=(1, 1))), [BATCH])
    maps = attention_matrix(model, BATCH, 0)
    with torch.no_grad():
        expected = grouped(attn_implementation="eager")(**BATCH, output_attentions=True).attentions[0]
    close(maps.softmax, expected.masked_fill(~REAL[:, None, :, None], 0))
    error = (maps.converted - maps.softmax).square().sum() / maps.softmax.square().sum()
    shuffled = (maps.converted.flip(1) - maps.softmax).square().sum() / maps.softmax.square().sum()
    assert error < 0.05 < shuffled  # heads are not mixed up


def test_packed_sequences_have_one_map_without_weights_between_them():
    model = converted_model()
    packed = {
        "input_ids": BATCH["input_ids"][REAL][None],
        "position_ids": torch.cat([torch.arange(LENGTH), torch.arange(SHORT)])[None],
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, LENGTH, LENGTH + SHORT])),
        **dict.fromkeys(("max_length_q", "max_length_k"), LENGTH),
    }
    padded, together = attention_matrix(model, BATCH, 1), attention_matrix(model, packed, 1)
    assert together.key_mask is None
    for name in ("softmax", "converted"):
        first, second = getattr(padded, name)
        expected = torch.stack([torch.block_diag(a, b[:SHORT, :SHORT]) for a, b in zip(first, second, strict=True)])
        close(getattr(together, name), expected[None])


def test_half_precision_gives_float32_maps():
    maps = attention_matrix(converted_model().to(torch.bfloat16), BATCH, 0)
    assert maps.converted.dtype == maps.softmax.dtype == torch.float32
    close(maps.converted, attention_matrix(converted_model(), BATCH, 0).converted, 0.05)


# --- the softmax map --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["bert", "distilbert", "esm"])
def test_the_softmax_maps_of_a_converted_model(model_type):
    model, expected = converted_model(model_type), eager_attentions(model_type)
    first, second = attention_matrix(model, BATCH, 0), attention_matrix(model, BATCH, 1)
    close(first.softmax, expected[0])
    assert (second.softmax - expected[1]).abs().max() > 1e-3  # the queries and keys are those of the converted model
    exact = attention_matrix(model, BATCH, 1, exact=True)
    close(exact.softmax, expected[1])
    assert (exact.converted - exact.softmax).abs().max() > 0.01
    assert (exact.converted - second.converted).abs().max() > 1e-3


def test_the_softmax_map_belongs_to_the_queries_and_keys_that_reach_the_layer():
    model = converted_model()
    seen = []
    hook = converted_layers(model)[1].register_forward_pre_hook(lambda _, args: seen.append(args))
    with torch.no_grad():
        model(**BATCH)
    hook.remove()
    [(query, key, _, _, scaling, *_)] = seen
    logits = (scaling * query @ key.mT).masked_fill(~REAL[:, None, None], float("-inf"))
    expected = logits.softmax(-1).masked_fill(~REAL[:, None, :, None], 0)
    close(attention_matrix(model, BATCH, 1).softmax, expected)


def test_calls_of_the_shared_layer_of_albert():
    model, expected = converted_model("albert"), eager_attentions("albert")
    for call, weights in enumerate(expected):
        maps = attention_matrix(model, BATCH, 0, exact=True, call=call)
        close(maps.softmax, weights)
        assert maps.call == call
    assert (expected[2] - expected[0]).abs().max() > 0.01
    with pytest.raises(InputError, match="call=3 is not one of the 3 calls of layer 0, 0 to 2"):
        attention_matrix(model, BATCH, 0, call=3)
    with pytest.raises(InputError, match="call=-1 is not one of"):
        attention_matrix(model, BATCH, 0, call=-1)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_local_layers_of_modernbert_keep_their_window(layer):
    maps = attention_matrix(converted_model("modernbert"), BATCH, layer, exact=True)
    close(maps.softmax, eager_attentions("modernbert")[layer])
    position = torch.arange(LENGTH)
    outside = maps.softmax[0][:, (position[:, None] - position).abs() > 4]
    if layer == 1:
        assert maps.converted is None
        assert not outside.any()
    else:
        assert maps.converted is not None
        assert outside.all()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["bert", "distilbert", "albert", "modernbert"])
def test_a_plain_model_has_softmax_maps_only(model_type, implementation):
    model = tiny_model(model_type, attn_implementation=implementation)
    for index, expected in enumerate(eager_attentions(model_type)):
        where = {"layer": 0, "call": index} if model_type == "albert" else {"layer": index}
        maps = attention_matrix(model, BATCH, **where)
        close(maps.softmax, expected)
        assert maps.converted is None
        assert torch.equal(maps.key_mask, REAL)


def test_without_padding_there_is_no_key_mask():
    ids = {"input_ids": BATCH["input_ids"][:1]}
    maps = attention_matrix(converted_model(), ids, 0)
    assert maps.key_mask is None
    close(maps.converted.sum(-1), torch.ones(1, NUM_HEADS, LENGTH))
    assert attention_matrix(tiny_model("bert"), ids, 0).key_mask is None


@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.float32).min])
def test_an_additive_mask_for_all_rows(hidden):
    mask = torch.zeros(1, 1, 1, SHORT).masked_fill(torch.arange(SHORT) > 8, hidden)
    inputs = {"input_ids": BATCH["input_ids"][:, :SHORT]}
    maps = attention_matrix(tiny_model("bert"), {**inputs, "attention_mask": mask}, 0)
    assert maps.key_mask.tolist() == [[True] * 9 + [False] * 4] * 2
    padded = {**inputs, "attention_mask": maps.key_mask.long()}
    close(maps.softmax, attention_matrix(tiny_model("bert"), padded, 0).softmax)


def test_layers_that_were_left_softmax_and_models_set_to_softmax():
    model = converted_model(layers=(1,))
    assert attention_matrix(model, BATCH, 0).converted is None
    assert attention_matrix(model, BATCH, 1).converted is not None
    model.set_attn_implementation("sdpa")
    maps = attention_matrix(model, BATCH, 1)
    assert maps.converted is None
    close(maps.softmax, eager_attentions("bert")[1])


def test_a_model_with_a_head():
    model = tiny_model("bert", auto=AutoModelForSequenceClassification)
    convert_to_favorpp(model, FavorppConfig(num_features=16))
    assert attention_matrix(model, {**BATCH, "labels": torch.tensor([0, 1])}, 1).converted is not None


# --- looking changes nothing ------------------------------------------------------------------------------------


def everything(model):
    """Return whatever a look could leave behind."""
    return (
        fingerprint(model),
        dict(AttentionInterface._global_mapping),
        [module.training for module in model.modules()],
        [(layer.exact, layer.probe) for layer in converted_layers(model)],
        torch.is_grad_enabled(),
        torch.get_rng_state().tolist(),
    )


def models():
    watched = converted_model()
    converted_layers(watched)[0].probe = lambda *_: pytest.fail("an observer of the layer was disturbed")
    return {
        "sdpa": tiny_model("bert"),
        "eager": tiny_model("bert", attn_implementation="eager"),
        "converted": converted_model(),
        "watched": watched,
    }


@pytest.mark.parametrize("kind", ["sdpa", "eager", "converted", "watched"])
def test_the_model_is_as_before(kind):
    model = models()[kind].train()
    model.encoder.layer[1].eval()
    before = everything(model)
    for exact in (False, True):
        attention_matrix(model, BATCH, 1, exact=exact)
    assert everything(model) == before
    assert model.training
    assert not model.encoder.layer[1].training


@pytest.mark.parametrize("kind", ["sdpa", "eager", "converted"])
def test_the_model_is_as_before_when_the_forward_fails(kind):
    model = models()[kind].train()
    before = everything(model)
    model.encoder.layer[1].register_forward_hook(_fail)
    with pytest.raises(ConversionError, match="on purpose"):
        attention_matrix(model, BATCH, 0, exact=True)
    assert everything(model) == before


def _fail(*_):
    raise ConversionError("on purpose")


def test_maps_are_those_of_the_evaluated_model():
    model = tiny_model("bert", hidden_dropout_prob=0.5)
    convert_to_favorpp(model, FavorppConfig(num_features=16))
    expected = attention_matrix(model, BATCH, 1)
    close(attention_matrix(model.train(), BATCH, 1).converted, expected.converted, 0)


def test_a_compiled_model_is_neither_compiled_anew_nor_misread():
    model, graphs = converted_model(), []
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    with torch.no_grad():
        compiled(**BATCH)
        before = len(graphs)
        maps = attention_matrix(compiled, BATCH, 1)
        compiled(**BATCH)
    assert len(graphs) == before > 0
    close(maps.converted, attention_matrix(model, BATCH, 1).converted, 0)


# --- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [2, -1, True, 0.0, "0", None])
def test_a_layer_that_does_not_exist(layer):
    with pytest.raises(InputError, match=rf"layer={layer!r} is not one of the 2 attention layers, 0 to 1"):
        attention_matrix(tiny_model("bert"), BATCH, layer)


def test_inputs_that_are_no_mapping():
    with pytest.raises(InputError, match="inputs must be a mapping of tensors, as the model takes them, got Tensor"):
        attention_matrix(tiny_model("bert"), BATCH["input_ids"], 0)


def test_a_model_without_attention():
    with pytest.raises(UnsupportedModelError, match=r"Linear has no attention layer of a supported family.* bert"):
        attention_matrix(nn.Linear(2, 2), BATCH, 0)


# --- plot -------------------------------------------------------------------------------------------------------

TOKENS = [f"t{i}" for i in range(LENGTH)]


@pytest.fixture(scope="module")
def maps():
    return attention_matrix(converted_model(), BATCH, 1)


@pytest.fixture
def drawn(monkeypatch):
    """Collect figures in place of writing them."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    return figures


def panels(figure):
    return [axis for axis in figure.axes if axis.images]


def labels(axis):
    return [label.get_text() for label in axis.get_xticklabels()], [t.get_text() for t in axis.get_yticklabels()]


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_plot_writes_a_file(maps, tmp_path, ending, magic):
    file = tmp_path / f"maps.{ending}"
    maps.plot(file, tokens=TOKENS if ending == "svg" else None, head=2, difference=ending == "png")
    assert file.read_bytes().startswith(magic)


def test_plot_shows_one_head_of_one_row_without_padding_on_one_scale(maps, drawn):
    maps.plot("maps.png", tokens=TOKENS, head=2, row=1)
    softmax, converted = panels(drawn[0])
    shown = [np.asarray(axis.images[0].get_array()) for axis in (softmax, converted)]
    np.testing.assert_array_equal(shown[0], maps.softmax[1, 2, :SHORT, :SHORT])
    np.testing.assert_array_equal(shown[1], maps.converted[1, 2, :SHORT, :SHORT])
    assert softmax.images[0].norm is converted.images[0].norm
    assert softmax.images[0].get_clim() == (0, max(shown[0].max(), shown[1].max()))
    assert softmax.get_title() == "softmax\nlayer 1, head 2"
    assert converted.get_title() == "converted\nlayer 1, head 2"
    for axis in (softmax, converted):
        assert labels(axis)[0] == TOKENS[:SHORT]
    assert labels(softmax)[1] == TOKENS[:SHORT]


def test_plot_shows_the_mean_of_heads_and_the_difference(maps, drawn):
    maps.plot("maps.png", difference=True)
    mean = (maps.converted - maps.softmax)[0].mean(0)
    _, _, difference = panels(drawn[0])
    image = difference.images[0]
    np.testing.assert_allclose(np.asarray(image.get_array()), mean, atol=1e-7)
    assert image.get_clim() == pytest.approx((-float(mean.abs().max()), float(mean.abs().max())))
    assert difference.get_title() == "converted \N{MINUS SIGN} softmax\nlayer 1, mean of 4 heads"
    assert labels(difference)[0] != TOKENS


def test_plot_of_a_softmax_layer_of_albert(drawn):
    maps = attention_matrix(tiny_model("albert"), BATCH, 0, call=2)
    maps.plot("maps.png", tokens=TOKENS)
    [axis] = panels(drawn[0])
    assert axis.get_title() == "softmax\nlayer 0 (call 2), mean of 4 heads"
    with pytest.raises(InputError, match="difference=True needs a converted layer; layer 0 attends by softmax"):
        maps.plot("maps.png", difference=True)


def test_plot_of_equal_maps_and_of_labels_that_look_like_formulas(tmp_path):
    maps = attention_matrix(tiny_model("bert"), token_batch(4), 0)
    maps = replace(maps, converted=maps.softmax)
    maps.plot(tmp_path / "maps.pdf", tokens=["$", "_", "$\\frac$", "\n"], difference=True)


def test_negative_weights_are_on_the_scale(drawn):
    maps = attention_matrix(converted_model(kernel="trig", num_features=4), BATCH, 0)
    maps.plot("maps.png", head=0)
    lowest, _ = panels(drawn[0])[0].images[0].get_clim()
    assert lowest < 0
    assert lowest == pytest.approx(float(maps.converted[0, 0].min()))


def test_labels_of_many_tokens_are_left_out(drawn):
    maps = attention_matrix(tiny_model("bert"), token_batch(50, 40), 0)
    tokens = [f"t{i}" for i in range(50)]
    maps.plot("maps.png", tokens=tokens, row=0)
    maps.plot("maps.png", tokens=tokens, row=1)
    many, few = (labels(panels(figure)[0])[0] for figure in drawn)
    assert "t1" not in many
    assert few == tokens[:40]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": 4}, "head=4 is not one of the 4 heads, 0 to 3"),
        ({"head": -1}, "head=-1 is not one of"),
        ({"head": True}, "head=True is not one of"),
        ({"row": 2}, "row=2 is not one of the 2 sequences, 0 to 1"),
        ({"row": None}, "row=None is not one of"),
        ({"tokens": TOKENS[:SHORT]}, r"tokens must be 20 labels, one per position with padding, got \['t0'"),
        ({"tokens": "a" * LENGTH}, "tokens must be 20 labels"),
    ],
)
def test_plot_refuses(maps, tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        maps.plot(tmp_path / "maps.png", **options)
    assert not list(tmp_path.iterdir())


def test_a_row_of_padding_cannot_be_drawn(tmp_path):
    maps = attention_matrix(converted_model(), token_batch(5, 0), 0)
    assert torch.isfinite(maps.converted).all()
    assert not maps.converted[1].any()
    with pytest.raises(InputError, match="row 1 is all padding"):
        maps.plot(tmp_path / "maps.png", row=1)


def test_plot_without_matplotlib_says_what_to_install(maps, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        maps.plot(tmp_path / "maps.png")


# --- over an image ----------------------------------------------------------------------------------------------

PHOTO = np.random.default_rng(0).random((24, 48, 3))


@pytest.fixture(scope="module")
def image_maps():
    """Of two images of 3 x 6 patches with a class token, by a Vision Transformer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            image_size=(24, 48),
            patch_size=8,
            initializer_range=0.2,
        )
        model = convert_to_favorpp(ViTModel(config).eval(), FavorppConfig(num_features=16))
        return attention_matrix(model, {"pixel_values": torch.randn(2, 3, 24, 48)}, 1)


@pytest.mark.parametrize(
    ("patch", "query", "title"), [(None, 0, "class token"), ((2, 4), 1 + 2 * 6 + 4, "patch (2, 4)")]
)
def test_a_query_over_the_image_shows_its_row_of_the_map(image_maps, drawn, patch, query, title):
    assert image_maps.grid == (1, 3, 6)
    image_maps.plot_on_image("maps.png", PHOTO, patch, head=2, row=1)
    photo, *overlays = panels(drawn[0])
    assert photo.get_title() == f"query: {title}"
    for axis, name in zip(overlays, ("softmax", "converted"), strict=True):
        weights = getattr(image_maps, name)[1, 2, query]
        background, heat = axis.images
        np.testing.assert_array_equal(np.asarray(background.get_array()), PHOTO)
        np.testing.assert_array_equal(np.asarray(heat.get_array()), weights[1:].reshape(3, 6))
        assert background.get_extent() == heat.get_extent()
        assert axis.get_title() == f"{name}, layer 1, head 2\n{weights[0]:.0%} on special tokens"
        marked = [(mark.get_xy(), mark.get_width(), mark.get_height()) for mark in axis.patches]
        assert marked == ([] if patch is None else [((3.5, 1.5), 1, 1)])
    assert overlays[0].images[1].norm is overlays[1].images[1].norm


def test_an_image_is_drawn_in_its_own_proportions_and_as_the_mean_of_heads(image_maps, drawn):
    wide = (255 * PHOTO).astype(np.uint8).repeat(4, axis=0)
    image_maps.plot_on_image("maps.png", wide)
    _, softmax, _ = panels(drawn[0])
    np.testing.assert_allclose(
        np.asarray(softmax.images[1].get_array()), image_maps.softmax[0].mean(0)[0, 1:].reshape(3, 6), atol=1e-7
    )
    assert softmax.get_aspect() == pytest.approx((96 / 3) / (48 / 6))  # height of a patch over its width


def test_an_overlay_is_written(image_maps, tmp_path):
    image_maps.plot_on_image(tmp_path / "overlay.png", PHOTO, (0, 0))
    assert (tmp_path / "overlay.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch": (3, 0)}, r"patch=\(3, 0\) is not one of the 3 x 6 patches, counted from \(0, 0\)"),
        ({"patch": (0, -1)}, r"patch=\(0, -1\) is not one of"),
        ({"head": 4}, "head=4 is not one of the 4 heads"),
        ({"row": 2}, "row=2 is not one of the 2"),
    ],
)
def test_an_overlay_refuses(image_maps, tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        image_maps.plot_on_image(tmp_path / "overlay.png", PHOTO, **options)
    assert not list(tmp_path.iterdir())


def test_an_overlay_needs_an_image(maps, image_maps, tmp_path):
    with pytest.raises(InputError, match="needs tokens that lie in one image; those of layer 1 do not"):
        maps.plot_on_image(tmp_path / "overlay.png", PHOTO)
    without = replace(image_maps, grid=image_maps.grid._replace(prefix=0, rows=1, columns=19))
    with pytest.raises(InputError, match=r"no class token: give patch=\(row, column\)"):
        without.plot_on_image(tmp_path / "overlay.png", PHOTO)
