"""The model of imagenet.py: which weights it has, at which image size, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from imagenet_arguments import ImageNetArguments
from imagenet_model import (
    build_model,
    find_normalisation,
    freeze_all_but_head,
    image_size,
    make_average,
    make_processor,
)
from imagenet_resolution import at_image_size
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_images import CLASSES, photo, tiny_vision_model
from torch import nn
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTMAEModel
from uptraining import ModelError


def build(source, **options):
    options = {"attention": "softmax", "train_dir": "x", **options}
    args = ImageNetArguments(model_name_or_path=source and str(source), **options)
    return build_model(args, list(CLASSES)).eval()


def test_a_backbone_gets_a_head_with_the_names_of_the_classes(tiny_vision):
    model = build(tiny_vision["vit"])
    assert model.config.id2label == dict(enumerate(CLASSES))
    assert model.classifier.weight.shape == (6, 32)
    assert torch.equal(model.vit.layers[1].mlp.fc1.weight, tiny_vision_model("vit").layers[1].mlp.fc1.weight)
    again, other = build(tiny_vision["vit"]), build(tiny_vision["vit"], seed=1)
    assert torch.equal(model.classifier.weight, again.classifier.weight)
    assert not torch.equal(model.classifier.weight, other.classifier.weight)


def test_half_precision_weights_become_float32(tiny_vision, tmp_path):
    tiny_vision_model("vit").half().save_pretrained(tmp_path)
    model = build(tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_another_number_of_classes_needs_permission(tiny_vision):
    args = ImageNetArguments(model_name_or_path=str(tiny_vision["classifier"]), attention="softmax", train_dir="x")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        build_model(args, ["a", "b"])
    args.ignore_mismatched_sizes = True
    assert build_model(args, ["a", "b"]).classifier.weight.shape == (2, 32)


OLD_NAMES = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
    "vit.layers": "vit.encoder.layer",
}
"""How the checkpoints on the Hub, which are older than the models' present code, call their tensors."""


@pytest.mark.parametrize("names", ["present", "of the Hub"])
def test_the_mae_checkpoint_becomes_a_vit_with_the_encoders_weights(names, tiny_vision, tmp_path):
    tensors = load_file(tiny_vision["mae"] / "model.safetensors")
    if names == "of the Hub":
        renamed = {}
        for name, tensor in tensors.items():
            for new, old in OLD_NAMES.items():
                name = name.replace(new, old) if name.startswith("vit.") else name
            renamed[name] = tensor
        tensors = renamed
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((tiny_vision["mae"] / "config.json").read_text())
    model = build(tmp_path)
    assert (type(model).__name__, model.config.model_type) == ("ViTForImageClassification", "vit")
    encoder = tiny_vision_model("mae").vit.eval()
    assert isinstance(encoder, ViTMAEModel)
    encoder.config.mask_ratio = 0.0
    pixels = torch.randn(2, 3, 16, 16)
    noise = torch.arange(16.0).expand(2, 16)  # keeps the order of the patches
    with torch.no_grad():
        expected = encoder(pixels, noise=noise).last_hidden_state
        torch.testing.assert_close(model.vit(pixels).last_hidden_state, expected)
    assert model.vit.embeddings.position_embeddings.requires_grad
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(again(pixels).logits, model(pixels).logits)
    assert not hasattr(again.config, "mask_ratio")


def test_a_new_model_is_what_the_overrides_say():
    overrides = (
        "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=8,image_size=8,patch_size=4"
    )
    model = build(None, model_type="vit", config_overrides=overrides)
    assert (model.config.hidden_size, len(model.vit.layers), model.config.num_labels) == (16, 1, 6)


# --- image sizes ----------------------------------------------------------------------------------------------------


def test_interpolating_once_is_what_the_model_does_in_every_forward(tiny_vision):
    plain, resized = build(tiny_vision["classifier"]), build(tiny_vision["classifier"], image_size=24)
    assert resized.config.image_size == 24
    assert resized.vit.embeddings.position_embeddings.shape == (1, 37, 32)
    pixels = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        torch.testing.assert_close(resized(pixels).logits, plain(pixels, interpolate_pos_encoding=True).logits)
    assert at_image_size(plain, 16) is plain


def test_the_resized_model_is_saved_with_its_size(tiny_vision, tmp_path):
    resized = build(tiny_vision["classifier"], image_size=24, attention="favor++", num_features=8)
    resized.save_pretrained(tmp_path)
    pixels = torch.randn(1, 3, 24, 24)
    with torch.no_grad():
        again = AutoModelForImageClassification.from_pretrained(tmp_path)
        torch.testing.assert_close(again(pixels).logits, resized(pixels).logits)


def test_dinov2_interpolates_by_itself(tiny_vision):
    model = build(tiny_vision["dinov2"], image_size=16)
    assert model.config.image_size == 24
    assert image_size(model, ImageNetArguments(model_type="vit", train_dir="x", image_size=16)) == 16
    with torch.no_grad():
        assert model(torch.randn(1, 3, 16, 16)).logits.shape == (1, 6)


def test_a_size_that_is_no_number_of_patches_is_refused(tiny_vision):
    with pytest.raises(ModelError, match=r"multiple of the model's patches of 4 pixels, got 30\. Choose 28 or 32\."):
        build(tiny_vision["classifier"], image_size=30)


def test_a_model_that_cannot_interpolate_is_refused():
    model = nn.Module()
    model.config = type("Config", (), {"image_size": 16, "patch_size": 4})()
    with pytest.raises(ModelError, match="cannot interpolate its position embeddings"):
        at_image_size(model, 24)


def test_beit_whose_biases_depend_on_the_size_is_refused():
    sizes = "image_size=16,patch_size=4,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=48"
    more = "use_absolute_position_embeddings=true,use_relative_position_bias=true"
    with pytest.raises(ModelError, match=r"the shapes of \['beit\..*relative_position_bias"):
        build(None, model_type="beit", config_overrides=f"{sizes},{more}", image_size=24)


# --- drop path, linear probe, average -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["classifier", "dinov2"])
def test_drop_path_is_the_models_own_or_added(kind, tiny_vision):
    pixels = torch.randn(1, 3, 16, 16).expand(64, 3, 16, 16)
    for rate in (0.0, 0.5):
        model = build(tiny_vision[kind], image_size=16, drop_path=rate).train()
        kinds = len({tuple(row.tolist()) for row in model(pixels).logits.detach().round(decimals=3)})
        assert (kinds > 1) == (rate > 0)


def test_a_linear_probe_trains_the_head_only(tiny_vision):
    model = build(tiny_vision["vit"], linear_probe=True, attention="favor++")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["classifier.weight", "classifier.bias"]
    with pytest.raises(ModelError, match="cannot tell the head of ViTModel"):
        freeze_all_but_head(tiny_vision_model("vit"))


def test_the_average_follows_the_weights_slowly_and_the_features_at_once(tiny_vision):
    model = build(tiny_vision["classifier"], attention="favor++", num_features=4)
    average = make_average(model, 0.75)
    start = model.classifier.bias.detach().clone()
    average.update_parameters(model)
    with torch.no_grad():
        model.classifier.bias.add_(1)
    feature = dict(model.named_buffers())
    omega = next(buffer for name, buffer in feature.items() if name.endswith("omega"))
    omega.add_(1)
    average.update_parameters(model)
    torch.testing.assert_close(average.module.classifier.bias, start + 0.25)
    assert not any(parameter.requires_grad for parameter in average.parameters())
    copied = dict(average.module.named_buffers())
    assert all(torch.equal(buffer, copied[name]) for name, buffer in feature.items())


# --- what happens to pixels -----------------------------------------------------------------------------------------


def test_the_saved_processor_prepares_images_as_the_evaluation_does(tiny_vision, tmp_path):
    from imagenet_images import CentreView

    (tmp_path / "source").mkdir()
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.2, 0.3, 0.5],
    }
    (tmp_path / "source" / "preprocessor_config.json").write_text(json.dumps(settings))
    normalise = find_normalisation(str(tmp_path / "source"))
    assert normalise.mean == (0.5, 0.4, 0.3)
    assert find_normalisation(str(tiny_vision["vit"])).std == (0.229, 0.224, 0.225)
    make_processor(normalise, 16, 0.8).save_pretrained(tmp_path)
    image = photo(3, 1).resize((60, 40), Image.Resampling.BICUBIC)
    theirs = AutoImageProcessor.from_pretrained(tmp_path)(image, return_tensors="pt")["pixel_values"]
    ours = normalise(CentreView(16, 0.8)(image, (0, 0))[None])
    assert theirs.shape == ours.shape == (1, 3, 16, 16)
    assert (theirs - ours).abs().mean() < 0.05
