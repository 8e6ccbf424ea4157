"""The distance of a student to its teacher, against the plainest form of each part, over real tokens alone."""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_model, token_batch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from hf_favorpp import FavorppConfig, RedrawSchedule, calibrate, convert_to_favorpp
from hf_favorpp.errors import ConfigError, InputError
from hf_favorpp.nn import converted_layers
from hf_favorpp.training.distillation import Distillation, compare_outputs, real_tokens

BATCH = {**token_batch(15, 9, 4), "labels": torch.tensor([0, 1, 0])}
MASK = BATCH["attention_mask"].bool()


def pair(auto=AutoModelForSequenceClassification, **options):
    """Return a converted model and its teacher."""
    student = convert_to_favorpp(tiny_model("bert", auto, **options), FavorppConfig(num_features=8))
    return student, tiny_model("bert", auto, **options)


def outputs(model):
    with torch.no_grad():
        inputs = {name: tensor for name, tensor in BATCH.items() if name != "labels"}
        return model(**inputs, output_hidden_states=True)


def relative_error(hidden, target):
    rows = [(hidden[row, column], target[row, column]) for row, column in MASK.nonzero().tolist()]
    error = sum(float((h.double() - t.double()).square().sum()) for h, t in rows)
    return error / sum(float(t.double().square().sum()) for _, t in rows)


def divergence(logits, target, temperature):
    p, q = (torch.softmax(t.double() / temperature, -1) for t in (target, logits))
    return temperature**2 * float((p * (p / q).log()).sum())


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_both_parts_equal_the_plain_form(auto, temperature):
    student, teacher = pair(auto, num_labels=3)
    with torch.no_grad():
        found = Distillation(teacher, temperature=temperature).losses(student, BATCH)
    one, other = outputs(student), outputs(teacher)
    blocks = [relative_error(h, t) for h, t in zip(one.hidden_states[1:], other.hidden_states[1:], strict=True)]
    assert found["hidden"].item() == pytest.approx(sum(blocks) / 2 + blocks[-1], rel=1e-5)
    rows = MASK if one.logits.ndim == 3 else torch.ones(3, dtype=torch.bool)
    plain = [divergence(x, y, temperature) for x, y in zip(one.logits[rows], other.logits[rows], strict=True)]
    assert found["logits"].item() == pytest.approx(sum(plain) / len(plain), rel=1e-3)


def test_a_single_logit_is_a_score():
    student, teacher = pair(num_labels=1)
    with torch.no_grad():
        found = Distillation(teacher).losses(student, BATCH)["logits"]
    difference = (outputs(student).logits - outputs(teacher).logits).double()
    assert found.item() == pytest.approx(float(difference.square().mean() / 2), rel=1e-5)


def test_the_student_learns_and_the_teacher_does_not():
    student, teacher = pair()
    distillation = Distillation(teacher.train())
    assert not teacher.training
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    distillation(student, BATCH).backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad.abs().sum() > 0 for parameter in student.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    inputs = {name: tensor for name, tensor in BATCH.items() if name != "labels"}
    with torch.no_grad():
        logits = distillation.of_logits(student(**inputs).logits, inputs)
        assert logits.item() == pytest.approx(distillation.losses(student, BATCH)["logits"].item())


def test_dropout_adds_nothing_and_every_module_keeps_its_mode():
    student, teacher = pair(hidden_dropout_prob=0.5)
    distillation = Distillation(teacher)
    losses = distillation.losses(student, BATCH)
    student.train().bert.pooler.eval()
    modes = {name: module.training for name, module in student.named_modules()}
    found = distillation.losses(student, BATCH)
    torch.testing.assert_close(found, losses)
    assert {name: module.training for name, module in student.named_modules()} == modes
    sum(found.values()).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in student.parameters())


def test_layers_see_what_recalibration_needs():
    model, teacher = (tiny_model("bert") for _ in range(2))
    config = FavorppConfig(num_features=8, statistics="calibrated", recalibrate=RedrawSchedule(2))
    student = calibrate(convert_to_favorpp(model, config), [BATCH]).train()
    Distillation(teacher).losses(student, BATCH)
    assert all(layer.recent is not None for layer in converted_layers(student))


def test_equal_models_have_no_distance():
    _, teacher = pair()
    with torch.no_grad():
        found = Distillation(tiny_model("bert", AutoModelForSequenceClassification)).losses(teacher, BATCH)
    assert all(loss.item() == pytest.approx(0, abs=1e-6) for loss in found.values())


def test_half_precision_is_compared_in_single():
    hidden = torch.full((1, 4, 8), 300.0, dtype=torch.float16)  # whose square overflows
    one, other = (SimpleNamespace(hidden_states=(hidden, hidden * factor)) for factor in (1.0, 0.5))
    assert float(compare_outputs(one, other, {}, 1.0)["hidden"]) == pytest.approx(2.0)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(InputError, match="compares hidden states and logits, and SimpleNamespace has neither"):
        compare_outputs(SimpleNamespace(), SimpleNamespace(), {}, 1.0)
    with pytest.raises(ConfigError, match=r"temperature must be above 0, got 0\.0"):
        Distillation(tiny_model("bert"), temperature=0.0)


def test_real_tokens_are_those_of_the_mask():
    assert torch.equal(real_tokens(tiny_model("bert"), BATCH)[15], MASK)
    assert real_tokens(tiny_model("bert"), {"pixel_values": torch.zeros(1)}) == {}
