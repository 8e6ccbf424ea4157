"""Drop path on a ViT: which examples lose which branch, how often, that the mean stays, and what is refused."""

import copy

import pytest
import torch
from transformers import BertConfig, BertModel, ViTConfig, ViTForImageClassification

from hf_favorpp import FavorppConfig, convert_to_favorpp
from hf_favorpp.errors import ConfigError, ConversionError
from hf_favorpp.training.drop_path import add_drop_path

SIZES = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 12}


def vit(**options):
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(**SIZES, image_size=8, patch_size=4, initializer_range=0.3, **options))


def branch(layer, x, kind):
    return (
        layer.attention(layer.layernorm_before(x))[0] if kind == "attention" else layer.mlp(layer.layernorm_after(x))
    )


def shares_kept(model, kind, examples=4000):
    """Return for each layer the share of examples that keep a branch, having checked what kept ones look like."""
    shares = []
    for layer in model.vit.layers:
        x = torch.randn(1, 3, 8).expand(examples, 3, 8)
        whole = branch(layer.eval(), x, kind)
        dropped = branch(layer.train(), x, kind)
        kept = dropped.flatten(1).abs().sum(1) > 0
        share = kept.float().mean().item()
        factor = 1.0 if share == 1 else dropped[kept][0].norm().item() / whole[0].norm().item()
        torch.testing.assert_close(dropped[kept], whole[kept] * factor)
        shares.append((share, factor))
    return shares


@pytest.mark.parametrize("kind", ["attention", "mlp"])
def test_the_rate_grows_linearly_with_depth_and_the_mean_stays(kind):
    model = vit()
    add_drop_path(model, 0.4)
    (first, _), (second, factor), (third, last_factor) = shares_kept(model, kind)
    assert first == 1
    assert second == pytest.approx(0.8, abs=0.03)
    assert third == pytest.approx(0.6, abs=0.03)
    assert (factor, last_factor) == (pytest.approx(1 / 0.8), pytest.approx(1 / 0.6))


def test_nothing_happens_in_eval_mode_and_a_copy_drops_too():
    model, pixels = vit().eval(), torch.randn(2, 3, 8, 8)
    plain = model(pixels).logits
    add_drop_path(model, 0.9)
    assert torch.equal(model(pixels).logits, plain)
    copied = copy.deepcopy(model).train()
    assert not torch.equal(copied(pixels).logits, plain)
    assert set(model.state_dict()) == set(vit().state_dict())


def test_it_stays_when_the_model_is_converted():
    model = vit()
    add_drop_path(model, 0.9)
    model = convert_to_favorpp(model, FavorppConfig(num_features=8)).train()
    pixels = torch.randn(1, 3, 8, 8).expand(16, 3, 8, 8)
    assert model(pixels).logits.unique(dim=0).shape[0] > 1
    assert model.eval()(pixels).logits.std(dim=0).max() < 1e-5


def test_a_layer_that_is_no_sum_of_its_input_and_two_branches_is_refused():
    model = BertModel(BertConfig(**SIZES, vocab_size=11))  # normalises after the sum
    with pytest.raises(ConversionError, match=r"drop path cannot be added to encoder\.layer\.0 \(BertLayer\)"):
        add_drop_path(model, 0.1)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_rates_outside_of_the_unit_interval_are_refused(rate):
    with pytest.raises(ConfigError, match=r"must lie in \[0, 1\)"):
        add_drop_path(vit(), rate)
