"""Whole models: all contestants share their weights, and differ in their attention alone."""

from __future__ import annotations

import pytest
import torch
from tiny_benchmark import CPU, TINY_OPTIONS, tiny_kind, tiny_shape

from hf_favorpp import FavorppConfig
from hf_favorpp.benchmarking.models import (
    IDENTITY,
    build_model,
    model_lineup,
    model_steps,
    twin,
    with_identity_attention,
)
from hf_favorpp.benchmarking.timing import Race
from hf_favorpp.nn import converted_layers

SIZES = {name: 48 if "vit" in name else 40 for name in TINY_OPTIONS} | {"conformer-relative": 200}
"""With relative positions what is near is exact."""
every_model = pytest.mark.parametrize("name", TINY_OPTIONS)


def outputs(lineup):
    return {contestant.name: contestant.steps["forward"]() for contestant in lineup.contestants}


def distance(out, target):
    return float((out - target).norm() / target.norm())


@every_model
def test_the_identity_differs_from_softmax_and_favorpp_comes_closer(name):
    configs = [FavorppConfig(num_features=m) for m in (8, 2048)]
    lineup = model_lineup(tiny_kind(name), SIZES[name], tiny_shape(), configs)
    found = outputs(lineup)
    few, many = (found[entry.name] for entry in lineup.entries)
    softmax, identity = found["sdpa"], found[IDENTITY]
    assert softmax.shape == (2, lineup.length, 32)
    assert all(torch.isfinite(out).all() for out in found.values())
    assert not any(out.requires_grad for out in found.values())
    assert distance(identity, softmax) > 0.1
    assert distance(many, softmax) < distance(few, softmax) / 2
    assert distance(many, softmax) < 0.1


@every_model
def test_every_size_has_the_tokens_that_it_says(name):
    for size in (SIZES[name], SIZES[name] + 5):
        lineup = model_lineup(tiny_kind(name), size, tiny_shape(), [])
        assert outputs(lineup)["sdpa"].shape[1] == lineup.length
    assert lineup.length == ((53 // 8) ** 2 + 1 if tiny_kind(name).images else SIZES[name] + 5)


@every_model
def test_contestants_share_their_weights_and_leave_no_gradients(name):
    kind, shape = tiny_kind(name), tiny_shape()
    model = build_model(kind, SIZES[name], shape)
    copied = with_identity_attention(model)
    assert copied.config is not model.config
    assert [id(p) for p in copied.parameters()] == [id(p) for p in model.parameters()]
    assert model.config._attn_implementation == "sdpa"
    before = [parameter.detach().clone() for parameter in model.parameters()]
    lineup = model_lineup(kind, SIZES[name], shape, [FavorppConfig(num_features=8)])
    for contestant in lineup.contestants:
        contestant.steps["train"]()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_training_reaches_the_weights(monkeypatch):
    kind, shape = tiny_kind("bert"), tiny_shape()
    model = build_model(kind, 8, shape)
    seen = []
    monkeypatch.setattr(
        model, "zero_grad", lambda set_to_none: seen.extend(p.grad for p in model.encoder.parameters())
    )
    inputs = {"input_ids": torch.zeros(2, 8, dtype=torch.int64)}
    model_steps(model, inputs, torch.randn(2, 8, 32))["train"]()
    assert seen
    assert all(gradient.abs().max() > 0 for gradient in seen if gradient.ndim == 2)


def test_identity_attention_hands_out_the_values():
    kind = tiny_kind("bert")
    model = build_model(kind, 8, tiny_shape())
    attention = with_identity_attention(model).encoder.layer[0].attention.self
    hidden = torch.randn(2, 8, 32)
    assert torch.equal(attention(hidden)[0], attention.value(hidden))


def test_identity_attention_computes_nothing_of_relative_positions():
    model = build_model(tiny_kind("conformer-relative"), 40, tiny_shape())
    attention = with_identity_attention(model).encoder.layers[0].self_attn
    hidden = torch.randn(2, 40, 32)
    values = attention.linear_out(attention.linear_v(hidden))
    torch.testing.assert_close(attention(hidden)[0], values)  # without the embeddings of positions
    assert model.encoder.layers[0].self_attn.position_embeddings_type == "relative"


def test_weights_and_random_state_do_not_depend_on_each_other():
    kind, shape = tiny_kind("bert"), tiny_shape()
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first = build_model(kind, 8, shape)
    assert torch.equal(torch.rand(1), expected)
    second = build_model(kind, 8, shape)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@every_model
def test_calibrated_models_are_calibrated_before_they_are_timed(name):
    config = FavorppConfig(num_features=16, statistics="calibrated")
    lineup = model_lineup(tiny_kind(name), SIZES[name], tiny_shape(), [config])
    found = outputs(lineup)
    assert 0 < distance(found[lineup.entries[0].name], found["sdpa"]) < 0.8


def test_a_tile_of_patches_and_half_precision():
    shape = tiny_shape(torch.bfloat16)
    lineup = model_lineup(tiny_kind("vit"), 48, shape, [FavorppConfig(num_features=64, exact_window=(2, 3))])
    found = outputs(lineup)
    out = found[lineup.entries[0].name]
    assert out.dtype == torch.bfloat16
    assert distance(out.float(), found["sdpa"].float()) < 0.3
    assert lineup.entries[0].more == {"image_size": 48}


def test_a_twin_is_converted_alone():
    from hf_favorpp import convert_to_favorpp

    model = build_model(tiny_kind("bert"), 8, tiny_shape())
    copied = convert_to_favorpp(twin(model), FavorppConfig(num_features=8))
    assert len(converted_layers(copied)) == 2
    assert not converted_layers(model)


def test_memory_of_training_holds_the_gradients_of_the_weights():
    kind = tiny_kind("bert")
    lineup = model_lineup(kind, 16, tiny_shape(), [])
    weights = sum(p.numel() for p in build_model(kind, 16, tiny_shape()).encoder.parameters()) * 4 / 2**20
    found = Race(CPU, seconds_per_length=0.0).run(16, lineup.contestants, ["train"])
    assert found["sdpa"]["train"].peak_mib > weights
