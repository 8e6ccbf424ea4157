"""Every family on a tiny random model: convert, attend, differentiate, save, load, revert; and the refusals."""

import logging
import re

import pytest
import torch
from test_composite_models import TEXTS, TOWERS
from test_media_families import MEDIA_MODELS
from test_relative_families import RELATIVE_TYPES
from tiny_models import (
    PAD,
    TINY_MODELS,
    VOCABULARY,
    fingerprint,
    hidden_states,
    tiny_config,
    tiny_model,
    token_batch,
)
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    EncoderDecoderConfig,
    EncoderDecoderModel,
)

from hf_favorpp import FavorppConfig, FavorppError, convert_to_favorpp, revert_to_softmax
from hf_favorpp.errors import UnsupportedModelError
from hf_favorpp.families import REFUSED, supported_model_types
from hf_favorpp.nn import converted_layers

every_family = pytest.mark.parametrize("model_type", TINY_MODELS)
SMALL = FavorppConfig(num_features=16)
QKV_WEIGHT = re.compile(r"\.(query|key|value|[qkv]_lin|[qkv]_proj|Wqkv)\.weight$")


def relative_error(estimate, target):
    return float((estimate - target).norm() / target.norm())


def test_the_table_of_tiny_models_names_every_supported_model_type():
    assert {*TINY_MODELS, *MEDIA_MODELS, *TOWERS, *TEXTS, *RELATIVE_TYPES} == set(supported_model_types())


@every_family
def test_every_converted_layer_attends_through_its_features(model_type):
    model = convert_to_favorpp(tiny_model(model_type), SMALL)
    calls = []
    for layer in converted_layers(model):
        layer.register_forward_hook(lambda layer, *_: calls.append(layer.layer))
    hidden_states(model, token_batch(7))
    expected = {"albert": [0, 0, 0], "modernbert": [0, 2]}.get(model_type, [0, 1])
    assert calls == expected


@every_family
def test_the_output_converges_to_softmax_at_the_temperature_of_the_model(model_type):
    model, batch = tiny_model(model_type), token_batch(24, 17, 9)
    softmax = hidden_states(model, batch)
    errors = {}
    for num_features in (64, 4096):
        convert_to_favorpp(model, FavorppConfig(num_features=num_features))
        errors[num_features] = relative_error(hidden_states(model, batch), softmax)
        revert_to_softmax(model)
    assert errors[4096] < errors[64] / 3
    assert errors[4096] < 0.03  # logits off by a factor sqrt(head_dim), up or down, give 0.07 to 0.42


@every_family
def test_the_temperature_of_the_model_matters_to_that_test(model_type):
    model, batch = tiny_model(model_type), token_batch(24, 17, 9)
    softmax = hidden_states(model, batch)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if re.search(r"\.(query|q_lin|q_proj)\.(weight|bias)$", name):
                weight.div_(8**0.5)
            elif "Wqkv" in name:
                weight[:32].div_(8**0.5)
    assert relative_error(hidden_states(model, batch), softmax) > 0.06


@every_family
def test_padding_and_batch_mates_do_not_change_the_output(model_type):
    model = convert_to_favorpp(tiny_model(model_type), SMALL)
    alone = hidden_states(model, token_batch(9))
    padded = token_batch(9, 30, 4, length=40)
    together = hidden_states(model, padded)[:9]
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)

    garbage = torch.randint(PAD + 1, VOCABULARY, padded["input_ids"].shape)
    padded["input_ids"] = torch.where(padded["attention_mask"].bool(), padded["input_ids"], garbage)
    torch.testing.assert_close(hidden_states(model, padded)[:9], alone, rtol=0, atol=1e-5)


@every_family
def test_gradients_reach_the_projections_of_queries_keys_and_values(model_type):
    model = convert_to_favorpp(tiny_model(model_type), SMALL)
    batch = token_batch(9, 5)
    model(**batch).last_hidden_state[batch["attention_mask"].bool()].square().sum().backward()
    weights = {name: weight for name, weight in model.named_parameters() if QKV_WEIGHT.search(name)}
    layers = {"albert": 1, "modernbert": 3}.get(model_type, 2)
    assert len(weights) == layers * (1 if model_type == "modernbert" else 3)
    for name, weight in weights.items():
        assert weight.grad.isfinite().all(), name
        assert weight.grad.abs().max() > 1e-6, name


@every_family
def test_under_autocast_the_output_stays_close(model_type):
    model, batch = convert_to_favorpp(tiny_model(model_type), SMALL), token_batch(9, 5)
    exact = hidden_states(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        low = hidden_states(model, batch)
    assert 0 < relative_error(low.float(), exact) < 0.03


@every_family
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision_keeps_its_projections_in_float32(model_type, dtype):
    model, batch = convert_to_favorpp(tiny_model(model_type), SMALL), token_batch(9, 5)
    exact = hidden_states(model, batch)
    omegas = [layer.omega.clone() for layer in converted_layers(model)]
    low = hidden_states(model.to(dtype), batch)
    assert low.dtype == dtype
    assert relative_error(low.float(), exact) < 0.03
    for layer, omega in zip(converted_layers(model), omegas, strict=True):
        assert layer.omega.dtype == torch.float32
        assert layer.draw_index.dtype == torch.int64
        assert torch.equal(layer.omega, omega)


@every_family
def test_saved_and_loaded_the_output_is_the_same_to_the_last_bit(model_type, tmp_path):
    model, batch = convert_to_favorpp(tiny_model(model_type), SMALL), token_batch(9, 5)
    model.save_pretrained(tmp_path)
    loaded, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert loaded.config._attn_implementation == "favorpp"
    assert torch.equal(hidden_states(loaded, batch), hidden_states(model, batch))
    assert fingerprint(loaded)["tensors"] == fingerprint(model)["tensors"]


@every_family
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_reverting_gives_the_same_model_to_the_last_bit(model_type, implementation):
    model, batch = tiny_model(model_type, attn_implementation=implementation), token_batch(9, 5)
    before, softmax = fingerprint(model), hidden_states(model, batch)
    assert convert_to_favorpp(model, SMALL) is model
    assert not torch.equal(hidden_states(model, batch), softmax)
    assert revert_to_softmax(model) is model
    assert fingerprint(model) == before
    assert model.config._attn_implementation == implementation
    assert torch.equal(hidden_states(model, batch), softmax)


@every_family
def test_a_loaded_model_reverts_to_softmax(model_type, tmp_path):
    model, batch = tiny_model(model_type), token_batch(9, 5)
    softmax, names = hidden_states(model, batch), list(model.state_dict())
    convert_to_favorpp(model, SMALL).save_pretrained(tmp_path)
    loaded = revert_to_softmax(AutoModel.from_pretrained(tmp_path))
    assert torch.equal(hidden_states(loaded, batch), softmax)
    assert list(loaded.state_dict()) == names


def test_eurobert_with_grouped_queries_converges_to_softmax_and_differentiates():
    model, batch = tiny_model("eurobert", num_key_value_heads=2), token_batch(24, 9)
    softmax = hidden_states(model, batch)
    convert_to_favorpp(model, FavorppConfig(num_features=4096))
    assert converted_layers(model)[0].omega.shape == (4, 4096, 8)
    assert relative_error(hidden_states(model, batch), softmax) < 0.03
    model(**batch).last_hidden_state.square().sum().backward()
    key = model.layers[0].self_attn.k_proj.weight
    assert key.shape[0] == 16
    assert key.grad.isfinite().all()
    assert key.grad.abs().max() > 1e-6


def test_a_head_dimension_other_than_hidden_size_over_heads_is_read_from_the_model():
    model = convert_to_favorpp(tiny_model("eurobert", head_dim=16), SMALL)
    assert converted_layers(model)[0].omega.shape == (4, 16, 16)
    assert hidden_states(model, token_batch(9)).isfinite().all()


def test_local_layers_of_modernbert_stay_softmax_and_it_is_said(caplog):
    model = tiny_model("modernbert")
    with caplog.at_level(logging.INFO, logger="hf_favorpp"):
        convert_to_favorpp(model, SMALL)
    assert [layer.layer for layer in converted_layers(model)] == [0, 2]
    assert not hasattr(model.layers[1].attn, "favorpp")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["converted 2 of 3 attention layers; the others stay softmax."]
    assert (
        "layers.1.attn stays softmax: it is local (half-window 4 tokens) and linear in length already." in caplog.text
    )


def test_local_layers_of_modernbert_compute_what_they_did():
    model, batch, calls = tiny_model("modernbert"), token_batch(20, 15), []
    local = model.layers[1].attn
    local.register_forward_hook(lambda _, args, kwargs, out: calls.append((args, kwargs, out[0])), with_kwargs=True)
    hidden_states(model, batch)
    convert_to_favorpp(model, SMALL)
    hidden_states(model, batch)
    (_, softmax, _), (args, kwargs, converted) = calls
    assert torch.equal(kwargs["attention_mask"], softmax["attention_mask"])
    assert not kwargs["attention_mask"][0].all()
    revert_to_softmax(model)
    with torch.no_grad():
        assert torch.equal(local(*args, **kwargs)[0], converted)


def test_modernbert_with_local_layers_only_is_refused():
    model = tiny_model("modernbert", layer_types=["sliding_attention"] * 3)
    before = fingerprint(model)
    with pytest.raises(UnsupportedModelError, match=r"no layer of ModernBertModel can be converted.*it is local"):
        convert_to_favorpp(model)
    assert fingerprint(model) == before


_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
}
_SWIN = {"image_size": 8, "patch_size": 2, "embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 2}
REFUSED_TINY = {
    "deberta": {**_SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "deberta-v2": {**_SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "wavlm": {
        **_SIZES,
        "conv_dim": (8,),
        "conv_kernel": (4,),
        "conv_stride": (2,),
        "num_feat_extract_layers": 1,
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
    },
    "mpnet": _SIZES,
    "t5": {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4},
    "swin": _SWIN,
    "swinv2": _SWIN,
    "nystromformer": {**_SIZES, "segment_means_seq_len": 64, "num_landmarks": 8},
    "longformer": {**_SIZES, "attention_window": 4, "bos_token_id": 0, "eos_token_id": 2},
    "big_bird": {**_SIZES, "attention_type": "original_full", "sep_token_id": 2, "bos_token_id": 0, "eos_token_id": 2},
    "funnel": {
        "architectures": ["FunnelModel"],
        "vocab_size": VOCABULARY,
        "block_sizes": [1],
        "d_model": 32,
        "n_head": 4,
        "d_head": 8,
        "d_inner": 48,
    },
    "fnet": {**_SIZES, "bos_token_id": 0, "eos_token_id": 2},
    "roformer": {**_SIZES, "embedding_size": 32},
}
REASONS = {
    "deberta": "disentangled attention adds a bias that depends on query and key",
    "deberta-v2": "disentangled attention adds a bias that depends on query and key",
    "wavlm": "gated relative position bias",
    "mpnet": "relative position bias",
    "t5": "relative position bias",
    "swin": "attends within small windows",
    "swinv2": "attends within small windows",
    "nystromformer": "landmarks of its own",
    "longformer": "sparse attention",
    "big_bird": "sparse attention",
    "funnel": "pools its queries",
    "fnet": "has no attention",
    "roformer": "does not go through the attention interface",
}


def test_every_refusal_is_tested():
    assert set(REFUSED_TINY) == set(REASONS) == set(REFUSED)


@pytest.mark.parametrize("model_type", REFUSED_TINY)
def test_a_family_without_a_linear_form_is_refused_for_its_reason_and_left_as_it_was(model_type):
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **REFUSED_TINY[model_type]))
    before = fingerprint(model)
    with pytest.raises(UnsupportedModelError, match=REASONS[model_type]) as error:
        convert_to_favorpp(model)
    assert str(error.value).startswith(f"{model_type} cannot be converted: ")
    assert "Convertible model types: albert, audio-spectrogram-transformer, beit, bert" in str(error.value)
    assert fingerprint(model) == before


@pytest.mark.parametrize("model_type", REFUSED_TINY)
def test_asking_a_refused_family_for_favorpp_at_construction_raises(model_type):
    config = AutoConfig.for_model(model_type, **REFUSED_TINY[model_type])
    with pytest.raises(FavorppError, match=REASONS[model_type]):
        AutoModel.from_config(config, attn_implementation="favorpp")


def test_a_family_that_is_not_known_is_refused_by_its_name_and_left_as_it_was():
    config = AutoConfig.for_model("data2vec-text", **_SIZES)
    model = AutoModel.from_config(config)
    before = fingerprint(model)
    with pytest.raises(UnsupportedModelError, match=r"\(model_type 'data2vec-text'\) is not supported"):
        convert_to_favorpp(model)
    assert fingerprint(model) == before
    with pytest.raises(UnsupportedModelError, match="'data2vec-text'"):
        AutoModel.from_config(config, attn_implementation="favorpp")


def test_a_causal_language_model_is_refused_because_it_is_a_decoder():
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=4, vocab_size=VOCABULARY)
    with pytest.raises(UnsupportedModelError, match=r"^gpt2 cannot be converted: it is a decoder, and only bidir"):
        convert_to_favorpp(AutoModel.from_config(config))


def test_a_decoder_is_refused_and_left_as_it_was():
    model = tiny_model("bert", is_decoder=True)
    before = fingerprint(model)
    with pytest.raises(UnsupportedModelError, match=r"encoder\.layer\.0\.attention\.self .* belongs to a decoder"):
        convert_to_favorpp(model)
    assert fingerprint(model) == before


def test_a_model_that_does_not_use_the_attention_interface_is_refused_and_left_as_it_was(monkeypatch):
    model = tiny_model("bert")
    before = fingerprint(model)
    monkeypatch.setattr(BertModel, "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(UnsupportedModelError, match="does not let its attention be replaced"):
        convert_to_favorpp(model)
    assert fingerprint(model) == before


@pytest.mark.parametrize("own", ["in the whole one", "of the parts"])
def test_of_a_model_made_of_several_the_encoder_is_converted_and_the_decoder_named(own, caplog, tmp_path):
    encoder, decoder = tiny_config("bert"), tiny_config("bert", is_decoder=True, add_cross_attention=True)
    if own == "in the whole one":
        model = EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)).eval()
    else:
        model = EncoderDecoderModel(encoder=BertModel(encoder), decoder=BertLMHeadModel(decoder)).eval()
    batch = token_batch(9, 5)
    inputs = {**batch, "decoder_input_ids": batch["input_ids"]}
    before = fingerprint(model)
    with torch.no_grad():
        softmax = model(**inputs).logits
        caplog.clear()
        convert_to_favorpp(model, SMALL)
        converted = model(**inputs).logits
        assert caplog.messages == [
            "converted 2 of 4 attention layers; the others stay softmax.",
            "decoder stays softmax: it belongs to a decoder; only encoder self-attention is converted.",
        ]
        assert fingerprint(revert_to_softmax(model)) == before
        assert torch.equal(model(**inputs).logits, softmax)
        assert not torch.allclose(converted, softmax)
        convert_to_favorpp(model.encoder, SMALL)
        assert torch.equal(model(**inputs).logits, converted)
        model.save_pretrained(tmp_path)
        loaded, report = EncoderDecoderModel.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values())
        assert torch.equal(loaded(**inputs).logits, converted)


def test_a_layer_whose_configuration_is_not_that_of_the_model_is_refused():
    model = tiny_model("bert", AutoModelForSequenceClassification)
    model.bert.encoder.layer[1].attention.self.config = tiny_config("roberta")
    before = fingerprint(model)
    with pytest.raises(
        UnsupportedModelError, match=r"made of several models, and bert\.encoder\.layer\.1\..*convert that"
    ):
        convert_to_favorpp(model)
    assert fingerprint(model) == before
