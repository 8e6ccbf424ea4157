"""How attention reaches the features through Transformers: masks, packed sequences, and what has no linear form."""

import pytest
import torch
from tiny_models import hidden_states, tiny_model, token_batch
from torch import nn
from transformers import DataCollatorWithFlattening, PreTrainedModel

from hf_favorpp import FavorppConfig, convert_to_favorpp
from hf_favorpp.errors import ConversionError, InputError, UnsupportedModelError
from hf_favorpp.nn import converted_layers
from hf_favorpp.registration import register

SMALL = FavorppConfig(num_features=16)


@pytest.fixture
def model():
    return convert_to_favorpp(tiny_model("bert"), SMALL)


def test_registering_again_changes_nothing():
    post_init = PreTrainedModel.post_init
    register()
    assert PreTrainedModel.post_init is post_init


def test_a_model_set_to_favorpp_without_conversion_raises_instead_of_being_softmax():
    plain = tiny_model("bert")
    plain.set_attn_implementation("favorpp")
    with pytest.raises(ConversionError, match=r"was never converted. Call convert_to_favorpp\(model\)"):
        hidden_states(plain, token_batch(5))


# --- masks --------------------------------------------------------------------------------------------------------


def test_padding_is_masked_and_not_attended_to(model):
    batch = token_batch(9, length=12)
    unmasked = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    alone = hidden_states(model, token_batch(9))
    torch.testing.assert_close(hidden_states(model, batch), alone, rtol=0, atol=1e-5)
    assert not torch.allclose(hidden_states(model, unmasked)[:9], alone, atol=1e-2)


def test_without_a_mask_every_token_is_real(model):
    batch = token_batch(9)
    with torch.no_grad():
        unmasked = model(input_ids=batch["input_ids"]).last_hidden_state[0]
    torch.testing.assert_close(unmasked, hidden_states(model, batch), rtol=0, atol=2e-6)


def test_a_boolean_mask_that_does_not_depend_on_the_query_is_accepted(model):
    batch = token_batch(9, 5)
    with torch.no_grad():
        expanded = model(batch["input_ids"], attention_mask=batch["attention_mask"][:, None, None].bool())
    assert torch.equal(expanded.last_hidden_state[batch["attention_mask"].bool()], hidden_states(model, batch))


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(torch.zeros(2, 1, 9, 9), id="additive L x L"),
        pytest.param(torch.zeros(2, 1, 1, 9), id="additive per key"),
        pytest.param(torch.ones(2, 1, 9, 9, dtype=torch.bool), id="boolean L x L"),
        pytest.param(torch.ones(2, 4, 1, 9, dtype=torch.bool), id="per head"),
    ],
)
def test_a_four_dimensional_mask_that_may_depend_on_the_query_is_refused(model, mask):
    with pytest.raises(InputError, match=r"takes a padding mask, \(batch, length\).*attn_implementation='sdpa'"):
        model(token_batch(9, 5)["input_ids"], attention_mask=mask)


def test_a_three_dimensional_mask_is_refused(model):
    with pytest.raises(InputError, match=r"attention_mask must be \(batch, length\), got \(2, 9, 9\)"):
        model(token_batch(9, 5)["input_ids"], attention_mask=torch.ones(2, 9, 9))


def test_no_mask_of_length_squared_is_built(model):
    seen = []
    converted_layers(model)[0].register_forward_pre_hook(lambda _, args: seen.append(args[3].shape))
    hidden_states(model, token_batch(9, 5))
    assert seen == [(2, 9)]


@pytest.mark.parametrize("term", ["position_bias", "softcap", "sliding_window"])
def test_terms_that_change_every_logit_are_refused(model, term):
    with pytest.raises(UnsupportedModelError, match=f"BertSelfAttention asks for {term}, which changes every logit"):
        model(**token_batch(5), **{term: 1.0})


def test_a_call_that_asks_for_causal_attention_is_refused(model):
    with pytest.raises(UnsupportedModelError, match="asks for causal attention"):
        model(**token_batch(5), is_causal=True)


# --- packed sequences ---------------------------------------------------------------------------------------------


def packed(batch):
    """Return the batch as one row without padding, as DataCollatorWithFlattening makes it."""
    lengths = batch["attention_mask"].sum(-1)
    boundaries = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return {
        "input_ids": batch["input_ids"][batch["attention_mask"].bool()][None],
        "position_ids": torch.cat([torch.arange(int(length)) for length in lengths])[None],
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": int(lengths.max()),
        "max_length_k": int(lengths.max()),
    }


@pytest.mark.parametrize("layers", [None, (0,)], ids=["all layers", "one layer"])
@pytest.mark.parametrize("model_type", ["bert", "eurobert", "modernbert"])
def test_packed_sequences_equal_the_padded_batch(model_type, layers):
    model = convert_to_favorpp(tiny_model(model_type), FavorppConfig(num_features=16, layers=layers))
    batch = token_batch(24, 9, 17)
    with torch.no_grad():
        together = model(**packed(batch)).last_hidden_state[0]
    torch.testing.assert_close(together, hidden_states(model, batch), rtol=0, atol=1e-6)


@pytest.mark.parametrize("model_type", ["bert", "modernbert"])
def test_packed_sequences_have_the_gradients_of_the_padded_batch(model_type):
    model, batch = convert_to_favorpp(tiny_model(model_type), SMALL), token_batch(24, 9)
    real = batch["attention_mask"].bool()
    model(**batch).last_hidden_state[real].square().sum().backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    model(**packed(batch)).last_hidden_state.square().sum().backward()
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-4, atol=1e-4, msg=name)


def test_the_longest_length_of_packed_sequences_may_be_left_out(model):
    batch = token_batch(9, 5)
    inputs = {name: value for name, value in packed(batch).items() if "max_length" not in name}
    with torch.no_grad():
        together = model(**inputs).last_hidden_state[0]
    torch.testing.assert_close(together, hidden_states(model, batch), rtol=0, atol=1e-6)


def test_the_collator_of_transformers_packs_what_the_model_takes(model):
    batch = token_batch(9, 5)
    rows = [{"input_ids": ids[real.bool()].tolist()} for ids, real in zip(*batch.values(), strict=True)]
    inputs = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")(rows)
    inputs.pop("labels")
    with torch.no_grad():
        together = model(**inputs).last_hidden_state[0]
    torch.testing.assert_close(together, hidden_states(model, batch), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"cu_seq_lens_q": torch.tensor([0, 9])}, id="a part of the row"),
        pytest.param({"max_length_q": 8}, id="a longest length that is too short"),
    ],
)
def test_lengths_that_do_not_cover_the_packed_row_are_refused(model, change):
    with pytest.raises(InputError, match=r"packed sequences must be one row .* got a row of 14 tokens"):
        model(**{**packed(token_batch(9, 5)), **change})


def test_packed_sequences_in_more_than_one_row_are_refused(model):
    inputs = packed(token_batch(9, 5))
    inputs.update({name: inputs[name].expand(2, -1) for name in ("input_ids", "position_ids")})
    with pytest.raises(InputError, match=r"packed sequences .* must be a single row"):
        model(**inputs)
