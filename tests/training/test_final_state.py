"""What distillation compares beside the blocks: the state that a head reads, by real frames."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DeiTConfig,
    DeiTForImageClassification,
    Dinov2Config,
    Dinov2ForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2BertConfig,
    Wav2Vec2BertForCTC,
    Wav2Vec2ConformerConfig,
    Wav2Vec2ConformerForCTC,
)

from hf_favorpp.errors import InputError
from hf_favorpp.training.distillation import Distillation, compare_outputs, outputs_with_states, real_tokens

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGE = {"image_size": 8, "patch_size": 4, "num_labels": 3}
FRONT = {"conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [8, 4], "num_feat_extract_layers": 2}
FRONT |= {"feat_extract_norm": "layer", "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
SPEECH = {"conv_depthwise_kernel_size": 5, "vocab_size": 5, "output_hidden_size": 16, "adapter_kernel_size": 3}


def noisy(model):
    """Return it in eval mode; norms that are none yet would hide that they are left out."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def vit():
    return noisy(ViTForImageClassification(ViTConfig(**SIZES, **IMAGE, intermediate_size=24)))


def conformer(**options):
    return noisy(Wav2Vec2ConformerForCTC(Wav2Vec2ConformerConfig(**{**SIZES, **FRONT, **SPEECH, **options})))


def first_token(state):
    return state[:, 0]


def dinov2_features(state):
    return torch.cat([state[:, 0], state[:, 1:].mean(1)], dim=-1)


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (vit, first_token),
        (lambda: noisy(DeiTForImageClassification(DeiTConfig(**SIZES, **IMAGE, intermediate_size=24))), first_token),
        (lambda: noisy(Dinov2ForImageClassification(Dinov2Config(**SIZES, **IMAGE))), dinov2_features),
    ],
    ids=["vit", "deit", "dinov2"],
)
def test_the_head_of_a_vision_transformer_reads_the_final_state_and_not_the_last_block(make, read):
    model = make()
    outputs = outputs_with_states(model, {"pixel_values": torch.randn(2, 3, 8, 8)})
    torch.testing.assert_close(model.classifier(read(outputs.last_hidden_state)), outputs.logits)
    assert not torch.allclose(model.classifier(read(outputs.hidden_states[-1])), outputs.logits, atol=1e-2)
    assert not model.base_model._forward_hooks


def test_the_final_state_of_bert_is_that_of_its_last_block():
    model = noisy(BertForSequenceClassification(BertConfig(**SIZES, intermediate_size=24, vocab_size=9)))
    outputs = outputs_with_states(model, {"input_ids": torch.arange(8).reshape(2, 4)})
    assert torch.equal(outputs.last_hidden_state, outputs.hidden_states[-1])


def test_a_student_that_differs_behind_its_blocks_alone_is_told_so():
    student, batch = vit(), {"pixel_values": torch.randn(2, 3, 8, 8)}
    distillation = Distillation(copy.deepcopy(student))
    assert distillation.losses(student, batch)["hidden"].item() == 0
    with torch.no_grad():
        student.vit.layernorm.weight.mul_(2)
        student.vit.layernorm.bias.mul_(2)
    losses = distillation.losses(student, batch)
    torch.testing.assert_close(losses["hidden"], torch.tensor(1.0))  # |2h - h|^2 / |h|^2, and 0 of every block
    losses["hidden"].backward()
    assert student.vit.layernorm.weight.grad.abs().sum() > 0


def padded(lengths, channels=()):
    """Return values and mask of rows of these lengths, (B, L, ...) and (B, L)."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    values = torch.randn(len(lengths), max(lengths), *channels)
    return values * mask.reshape(*mask.shape, *(1 for _ in channels)), mask


def speech_case(kind, adapter):
    """Return a model, a padded batch, and how many frames are real behind the blocks and behind the adapter."""
    options = {"add_adapter": adapter, "num_adapter_layers": 1}
    if kind == "conformer":
        values, mask = padded([400, 230])  # (400 - 8) // 5 + 1 = 79, (79 - 4) // 2 + 1 = 38; 45, 21
        return conformer(**options), {"input_values": values, "attention_mask": mask}, [38, 21], [19, 11]
    config = Wav2Vec2BertConfig(**SIZES, **SPEECH, **options, position_embeddings_type="rotary", intermediate_size=24)
    values, mask = padded([30, 17], (160,))
    batch = {"input_features": values, "attention_mask": mask}
    return noisy(Wav2Vec2BertForCTC(config)), batch, [30, 17], [15, 9]


@pytest.mark.parametrize("adapter", [False, True], ids=["plain", "adapter"])
@pytest.mark.parametrize("kind", ["conformer", "bert"])
def test_frames_of_padding_are_not_compared(kind, adapter):
    model, batch, frames, adapted = speech_case(kind, adapter)
    real = real_tokens(model, batch)
    with torch.no_grad():
        teacher, student = (outputs_with_states(model, batch) for _ in range(2))
    assert real[teacher.hidden_states[-1].shape[1]].sum(-1).tolist() == frames
    assert real[teacher.logits.shape[1]].sum(-1).tolist() == (adapted if adapter else frames)
    assert teacher.last_hidden_state.shape[1] == teacher.logits.shape[1]
    for states, last in ((student.hidden_states, frames), ([student.logits], adapted if adapter else frames)):
        for state in states:
            state[1, last[1] :] += 1e3
    losses = compare_outputs(student, teacher, real, 2.0)
    assert max(losses.values()) == 0
    student.hidden_states[-1][1, frames[1] - 1] += 1e3
    assert compare_outputs(student, teacher, real, 2.0)["hidden"] > 0


def test_nothing_random_and_no_batch_statistic_is_compared():
    noise = {"layerdrop": 0.5, "mask_time_prob": 0.5, "mask_time_length": 2, "hidden_dropout": 0.5}
    teacher, student = conformer(), conformer(**noise).train()
    student.load_state_dict(teacher.state_dict(), strict=False)  # all but the embedding of masked frames
    values, mask = padded([400, 230])
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    for _ in range(3):
        losses = Distillation(teacher).losses(student, {"input_values": values, "attention_mask": mask})
        assert {name: value.item() for name, value in losses.items()} == pytest.approx(
            dict.fromkeys(losses, 0), abs=1e-6
        )
    assert all(torch.equal(tensor, before[name]) for name, tensor in student.state_dict().items())
    assert all(module.training for module in student.modules())


def test_models_of_different_depth_are_refused():
    values, mask = padded([400, 230])
    teacher, student = conformer(), conformer(num_hidden_layers=1)
    with pytest.raises(InputError, match=r"of 1 blocks and the teacher those of 2: .* Give a student of as many"):
        Distillation(teacher)(student, {"input_values": values, "attention_mask": mask})
