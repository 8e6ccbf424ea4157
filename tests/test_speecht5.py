"""SpeechT5 as a whole: its encoder is converted, and its decoder goes on by itself, as do models beside it."""

import pytest
import torch
from test_media_families import of_this_version, relative_error
from transformers import (
    AutoConfig,
    SpeechT5ForSpeechToSpeech,
    SpeechT5ForSpeechToText,
    SpeechT5ForTextToSpeech,
    SpeechT5Model,
)
from transformers.models.speecht5 import modeling_speecht5

from hf_favorpp import FavorppConfig, attention_matrix, convert_to_favorpp, revert_to_softmax
from hf_favorpp.errors import ConfigError, UnsupportedModelError
from hf_favorpp.families import attention_layers
from hf_favorpp.nn import converted_layers

SIZES = {
    **{"hidden_size": 16, "vocab_size": 24, "initializer_range": 0.25, "encoder_max_relative_position": 6},
    **{"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "encoder_layerdrop": 0.0},
    **{"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24, "decoder_layerdrop": 0.0},
    **{"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4), "feat_extract_norm": "layer"},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0},
    **{"num_mel_bins": 6, "speech_decoder_prenet_units": 12, "speech_decoder_prenet_dropout": 0.0},
    **{"speech_decoder_postnet_units": 8, "speaker_embedding_dim": 5, "guided_attention_loss_num_heads": 1},
    **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "positional_dropout": 0.0},
}
CHECKPOINTING = "ignore:.gradient_checkpointing_enable:FutureWarning"
FEW = FavorppConfig(num_features=16)
EXACT = FavorppConfig(num_features=16, exact_window=64)
"""A window that is as long as the inputs."""


def speecht5(architecture=SpeechT5ForSpeechToText, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return of_this_version(architecture(AutoConfig.for_model("speecht5", **{**SIZES, **options})).eval())


def recordings():
    """Two, the second padded, with the beginning of what is said."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, 900, dtype=torch.long)
    mask[1, 600:] = 0
    batch = {"input_values": torch.randn(2, 900, generator=generator), "attention_mask": mask}
    return batch, torch.randint(3, 24, (2, 7), generator=generator)


def logits(model, decoder_mask=None):
    batch, words = recordings()
    with torch.no_grad():
        return model(**batch, decoder_input_ids=words, decoder_attention_mask=decoder_mask).logits


def generated(model):
    return model.generate(**recordings()[0], max_new_tokens=8, min_new_tokens=8, do_sample=False)


@pytest.mark.parametrize("layers", [None, (1,)])
def test_with_a_window_of_the_whole_input_it_recognises_as_before(layers):
    model, decoder_mask = speecht5(), torch.ones(2, 7, dtype=torch.long)
    decoder_mask[0, 5:] = 0
    softmax, masked, words = logits(model), logits(model, decoder_mask), generated(model)
    convert_to_favorpp(model, FavorppConfig(num_features=16, layers=layers))
    assert relative_error(logits(model), softmax) > 1e-3
    convert_to_favorpp(revert_to_softmax(model), FavorppConfig(num_features=16, exact_window=64, layers=layers))
    assert relative_error(logits(model), softmax) < 1e-5
    assert relative_error(logits(model, decoder_mask), masked) < 1e-5
    assert torch.equal(generated(model), words)
    revert_to_softmax(model)
    assert torch.equal(logits(model), softmax)
    assert torch.equal(generated(model), words)


def test_the_decoder_is_as_before(caplog):
    model, (batch, words) = speecht5(), recordings()
    with torch.no_grad():
        encoded = model.get_encoder()(**batch)
        inputs = {"attention_mask": batch["attention_mask"], "encoder_outputs": encoded, "decoder_input_ids": words}
        softmax = model(**inputs).logits
        with caplog.at_level("INFO", logger="hf_favorpp"):
            convert_to_favorpp(model, FEW)
        assert torch.equal(model(**inputs).logits, softmax)
        shorter = {**inputs, "decoder_input_ids": words[:, :3]}
        torch.testing.assert_close(model(**shorter).logits, softmax[:, :3])
    assert "converted 2 of 6 attention layers; the others stay softmax." in caplog.messages
    names = [layer.name for layer in attention_layers(model) if layer.features]
    assert names == [f"speecht5.encoder.wrapped_encoder.layers.{layer}.attention" for layer in (0, 1)]
    with pytest.raises(ConfigError, match=r"which cannot be converted: it belongs to a decoder"):
        convert_to_favorpp(revert_to_softmax(model), FavorppConfig(layers=(2,)))
    with pytest.raises(UnsupportedModelError, match="it belongs to a decoder"):
        convert_to_favorpp(model.get_decoder())


def test_a_decoder_loaded_alone_from_a_converted_checkpoint_looks_at_no_later_word(tmp_path):
    decoder = speecht5().get_decoder()
    decoder.config.attn_implementation = "favorpp"
    decoder.save_pretrained(tmp_path)
    loaded, words = modeling_speecht5.SpeechT5DecoderWithTextPrenet.from_pretrained(tmp_path).eval(), recordings()[1]
    assert loaded.config._attn_implementation == "favorpp"
    with torch.no_grad():
        whole, beginning = (loaded(tokens).last_hidden_state for tokens in (words, words[:, :3]))
    torch.testing.assert_close(whole[:, :3], beginning)


@pytest.mark.filterwarnings(CHECKPOINTING)
def test_others_of_the_process_are_as_before(monkeypatch):
    """As without this package, whose functions are taken out for that."""

    def results(model):
        found = [logits(model), generated(model)]
        model.gradient_checkpointing_enable()
        model.train()(**recordings()[0], labels=recordings()[1]).loss.backward()
        return [*found, *(p.grad for p in model.parameters() if p.grad is not None)]

    logits(convert_to_favorpp(speecht5(), FEW))
    found = results(speecht5())
    hooked = [
        (modeling_speecht5, "create_causal_mask"),
        (modeling_speecht5, "create_bidirectional_mask"),
        (modeling_speecht5.SpeechT5Attention, "forward"),
        (modeling_speecht5.SpeechT5RelativePositionalEncoding, "forward"),
    ]
    for owner, name in hooked:
        assert getattr(owner, name).serves_favorpp
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    expected = results(speecht5())
    assert len(found) == len(expected) > 80
    assert all(map(torch.equal, found, expected))


@pytest.mark.filterwarnings(CHECKPOINTING)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_trains_with_the_gradients_of_softmax(checkpointing):
    model, (batch, words) = speecht5().double().train(), recordings()
    batch["input_values"] = batch["input_values"].double()
    if checkpointing:
        model.gradient_checkpointing_enable()
    grads = []
    for convert in (False, True):
        if convert:
            convert_to_favorpp(model, EXACT)
        model.zero_grad()
        model(**batch, labels=words).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    wanted, found = grads
    assert wanted.keys() == found.keys()
    assert wanted["speecht5.encoder.wrapped_encoder.embed_positions.pe_k.weight"].norm() > 1e-6
    for name, grad in wanted.items():
        assert (found[name] - grad).norm() <= 1e-4 * grad.norm() + 1e-8, name


@pytest.mark.parametrize("architecture", [SpeechT5ForTextToSpeech, SpeechT5ForSpeechToSpeech])
def test_those_that_speak(architecture, tmp_path):
    model, (batch, words) = speecht5(architecture, use_guided_attention_loss=True), recordings()
    if architecture is SpeechT5ForTextToSpeech:
        mask = torch.ones_like(words)
        mask[1, 4:] = 0
        batch = {"input_ids": words, "attention_mask": mask}
    generator = torch.Generator().manual_seed(2)
    labels, speaker = torch.randn(2, 8, 6, generator=generator), torch.randn(2, 5, generator=generator)

    def outputs(model):
        with torch.no_grad():
            spoken = model.generate_speech(**batch, speaker_embeddings=speaker, maxlenratio=2.0, threshold=2.0)
            told = model(**batch, labels=labels, speaker_embeddings=speaker)
            return [t for t in (spoken, told.spectrogram, told.loss) if t is not None]

    softmax = outputs(model)
    convert_to_favorpp(model, EXACT)
    assert len(converted_layers(model)) == 2
    found = outputs(model)
    torch.testing.assert_close(found, softmax, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = architecture.from_pretrained(tmp_path).eval()
    assert all(map(torch.equal, outputs(loaded), found))
    assert all(map(torch.equal, outputs(revert_to_softmax(loaded)), softmax))


def test_the_model_without_prenets_is_converted_whole_or_by_its_encoder():
    model = speecht5(SpeechT5Model)
    states = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        softmax = model(input_values=states, decoder_input_values=states[:, :5]).last_hidden_state
        for part in (model, model.encoder, model.encoder.wrapped_encoder):
            convert_to_favorpp(part, EXACT)
            converted = model(input_values=states, decoder_input_values=states[:, :5]).last_hidden_state
            assert relative_error(converted, softmax) < 1e-5
            assert len(converted_layers(model)) == 2
            revert_to_softmax(part)
            again = model(input_values=states, decoder_input_values=states[:, :5]).last_hidden_state
            assert torch.equal(again, softmax)


def test_attention_maps_are_those_of_transformers():
    model, (batch, words) = speecht5(), recordings()
    batch["decoder_input_ids"] = words
    with torch.no_grad():
        weights = model(**batch, output_attentions=True).encoder_attentions
    for layer in (0, 1):
        found = attention_matrix(model, batch, layer=layer)
        real = found.key_mask[:, None, :, None]
        torch.testing.assert_close(found.softmax, weights[layer] * real, rtol=1e-4, atol=1e-6)
    with pytest.raises(
        UnsupportedModelError, match=r"layer 2 .*decoder.* does not go through the attention interface"
    ):
        attention_matrix(model, batch, layer=2)


def test_before_masks_or_biases_of_positions_it_stays_softmax(monkeypatch):
    from transformers.integrations import sdpa_attention

    model = speecht5()
    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", lambda module, query: None)
    with pytest.raises(UnsupportedModelError, match="no attention function that takes a bias of positions"):
        convert_to_favorpp(model)
