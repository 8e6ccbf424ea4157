"""AdamW's groups: every trainable parameter once, its decay by its shape and its learning rate by its depth."""

import pytest
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from hf_favorpp.errors import ConversionError
from hf_favorpp.training.depth import encoder_layers, parameter_depths
from hf_favorpp.training.parameter_groups import parameter_groups

LAYERS = 3


@pytest.fixture
def model():
    config = ViTConfig(
        hidden_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=12,
        image_size=8,
        patch_size=4,
    )
    return ViTForImageClassification(config)


def options_by_name(model, groups):
    """Return (lr, weight_decay) by name; a parameter in two groups is an error."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = [(names[p], (group["lr"], group["weight_decay"])) for group in groups for p in group["params"]]
    assert len(found) == len(dict(found))
    return dict(found)


def test_layers_learn_slower_the_deeper_they_lie(model):
    options = options_by_name(model, parameter_groups(model, 1.0, 0.05, layer_decay=0.5))
    assert options.keys() == dict(model.named_parameters()).keys()
    expected = {
        "vit.embeddings.patch_embeddings.projection.weight": (0.5**4, 0.05),
        "vit.embeddings.patch_embeddings.projection.bias": (0.5**4, 0.0),
        "vit.layers.0.attention.q_proj.weight": (0.5**3, 0.05),
        "vit.layers.1.mlp.fc2.bias": (0.5**2, 0.0),
        "vit.layers.2.mlp.fc1.weight": (0.5, 0.05),
        "vit.layers.2.layernorm_after.weight": (0.5, 0.0),
        "vit.layernorm.weight": (1.0, 0.0),
        "classifier.weight": (1.0, 0.05),
        "classifier.bias": (1.0, 0.0),
    }
    assert {name: options[name] for name in expected} == expected


def test_named_parameters_do_not_decay(model):
    name = "vit.embeddings.position_embeddings"
    assert options_by_name(model, parameter_groups(model, 1.0, 0.1))[name] == (1.0, 0.1)
    kept = parameter_groups(model, 1.0, 0.1, no_decay=("position_embeddings",))
    assert options_by_name(model, kept)[name] == (1.0, 0.0)


def test_without_layer_decay_there_are_two_groups_and_nothing_frozen(model):
    model.vit.requires_grad_(False)
    groups = parameter_groups(model, 0.1, 0.2)
    assert options_by_name(model, groups) == {"classifier.weight": (0.1, 0.2), "classifier.bias": (0.1, 0.0)}
    torch.optim.AdamW(groups)


def test_depths_count_from_the_embeddings_to_the_head(model):
    assert encoder_layers(model)[0] == "vit.layers"
    depths = parameter_depths(model)
    assert (depths["vit.embeddings.cls_token"], depths["classifier.bias"]) == (0, LAYERS + 1)
    assert {depth for name, depth in depths.items() if name.startswith("vit.layers.1.")} == {2}


def test_a_model_without_layers_is_refused(model):
    model.vit.layers = nn.ModuleList(list(model.vit.layers)[:2])
    with pytest.raises(ConversionError, match=r"no list of config.num_hidden_layers = 3 layers"):
        parameter_groups(model, 1.0, 0.0, layer_decay=0.9)
