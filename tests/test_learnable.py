"""Projections that are parameters: where they begin, how they are saved, and what leaves them alone."""

import json

import pytest
import torch
from tiny_models import fingerprint, hidden_states, tiny_model, token_batch
from transformers import AutoModel, AutoModelForSequenceClassification, Trainer, TrainingArguments

from hf_favorpp import FavorppCallback, FavorppConfig, RedrawSchedule, calibrate, convert_to_favorpp, revert_to_softmax
from hf_favorpp.errors import CheckpointError, ConfigError, ConversionError
from hf_favorpp.nn import LEARNABLE, converted_layers
from hf_favorpp.training.parameter_groups import parameter_groups

LEARNABLE_CONFIG = FavorppConfig(num_features=16, learnable="projections")
BATCH = token_batch(24, 9)
CALIBRATION = [token_batch(24, 17, seed=seed) for seed in range(3)]
NAMES = {f"encoder.layer.{index}.attention.self.favorpp.{name}" for index in (0, 1) for name in LEARNABLE}


def converted(config=LEARNABLE_CONFIG, **options):
    return convert_to_favorpp(tiny_model("bert"), config, **options)


def feature_parameters(model):
    return [(name, p) for name, p in model.named_parameters() if "favorpp" in name]


@torch.no_grad()
def learn_something(model):
    """Move every learnable tensor, those of queries and keys apart."""
    for layer in converted_layers(model):
        for seed, parameter in enumerate(layer.parameters()):
            generator = torch.Generator().manual_seed(seed)
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(params=["drawn", "chosen"])
def learnt(request):
    options = {"calibration_data": CALIBRATION} if request.param == "chosen" else {}
    return learn_something(converted(**options))


def test_without_it_nothing_is_a_parameter():
    assert not feature_parameters(converted(FavorppConfig(num_features=16)))


@pytest.mark.parametrize("options", [{}, {"calibration_data": CALIBRATION}], ids=["drawn", "chosen"])
@pytest.mark.parametrize("kernel", ["favor++", "favor+"])
def test_learning_begins_where_fixed_projections_are(kernel, options):
    fixed = convert_to_favorpp(tiny_model("bert"), FavorppConfig(num_features=16, kernel=kernel), **options)
    config = FavorppConfig(num_features=16, kernel=kernel, learnable="projections")
    model = convert_to_favorpp(tiny_model("bert"), config, **options)
    assert {name for name, _ in feature_parameters(model)} == NAMES
    torch.testing.assert_close(hidden_states(model, BATCH), hidden_states(fixed, BATCH), rtol=1e-5, atol=1e-5)
    for layer, other in zip(converted_layers(model), converted_layers(fixed), strict=True):
        assert torch.equal(layer.omega, other.omega)
        assert torch.equal(layer.omega_key, other.omega)


@pytest.mark.parametrize("window", [0, 8])
def test_every_projection_has_a_gradient(window):
    config = FavorppConfig(num_features=16, learnable="projections", exact_window=window)
    model = converted(config, calibration_data=CALIBRATION)
    model(**BATCH).last_hidden_state[0].square().sum().backward()
    for name, parameter in feature_parameters(model):
        per_projection = parameter.grad.abs().reshape(*parameter.shape[:2], -1).amax(-1)
        assert (per_projection > 0).all(), name


def test_what_was_learnt_is_saved_and_loaded_to_the_last_bit(learnt, tmp_path):
    learnt.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert fingerprint(loaded)["tensors"] == fingerprint(learnt)["tensors"]
    assert {name for name, parameter in feature_parameters(loaded) if parameter.requires_grad} == NAMES
    assert torch.equal(hidden_states(loaded, BATCH), hidden_states(learnt, BATCH))
    softmax = AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert torch.equal(hidden_states(softmax, BATCH), hidden_states(tiny_model("bert"), BATCH))


def test_reverting_gives_back_the_softmax_model(learnt):
    assert fingerprint(revert_to_softmax(learnt)) == fingerprint(tiny_model("bert"))


def test_what_was_learnt_stays_float32_in_a_model_of_any_dtype(learnt, tmp_path):
    learnt.save_pretrained(tmp_path)
    before = {name: parameter.clone() for name, parameter in feature_parameters(learnt)}
    for model in (AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16), learnt.to(torch.bfloat16)):
        assert model.embeddings.word_embeddings.weight.dtype == torch.bfloat16
        assert {name: p.dtype for name, p in feature_parameters(model)} == dict.fromkeys(NAMES, torch.float32)
        assert all(torch.equal(parameter, before[name]) for name, parameter in feature_parameters(model))
    (out,) = learnt(**BATCH).last_hidden_state[0, 0].float().sum().reshape(1)
    out.backward()
    learnt.to(torch.float16)
    assert all(parameter.grad.dtype == torch.float32 for _, parameter in feature_parameters(learnt))


@pytest.mark.parametrize("name", ["omega_key", "log_weights"])
def test_a_checkpoint_without_a_part_of_what_was_learnt_is_refused(name, tmp_path):
    model = learn_something(converted())
    state = {
        key: tensor
        for key, tensor in model.state_dict().items()
        if not key.endswith(f"layer.1.attention.self.favorpp.{name}")
    }
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(
        CheckpointError, match=rf"favorpp\.omega of layer 1, which is learnt, but not its favorpp\.{name}"
    ):
        AutoModel.from_pretrained(tmp_path)


def test_a_checkpoint_of_fixed_projections_may_become_learnable(tmp_path):
    """Nothing of a softmax checkpoint, or of one that was saved without it, is missed: there it begins as drawn."""
    tiny_model("bert").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "favorpp": LEARNABLE_CONFIG.to_dict()}))
    loaded = AutoModel.from_pretrained(tmp_path, attn_implementation="favorpp")
    assert torch.equal(hidden_states(loaded, BATCH), hidden_states(converted(), BATCH))


def test_another_calibration_begins_anew(learnt):
    calibrate(learnt, CALIBRATION)
    fresh = converted(calibration_data=CALIBRATION)
    assert fingerprint(learnt)["tensors"] == fingerprint(fresh)["tensors"]


def test_they_are_never_redrawn(learnt):
    before = fingerprint(learnt)["tensors"]
    FavorppCallback().step(learnt.train(), 100)
    with pytest.raises(ConversionError, match="a redraw would undo what was learnt"):
        FavorppCallback(RedrawSchedule(every=1)).step(learnt, 100)
    assert fingerprint(learnt)["tensors"] == before


@pytest.mark.parametrize("name", ["redraw", "recalibrate"])
def test_options_that_would_undo_what_is_learnt_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name} must be None with learnable='projections'"):
        FavorppConfig(learnable="projections", statistics="calibrated", **{name: RedrawSchedule(every=5)})


@pytest.mark.parametrize("kernel", ["favor+hyperbolic", "relu", "elu", "trig", "uniform", "none"])
def test_other_kernels_have_nothing_to_learn(kernel):
    with pytest.raises(ConfigError, match=r"learnable='projections' needs kernel='favor\+\+' or 'favor\+'"):
        FavorppConfig(kernel=kernel, learnable="projections", exact_window=8 if kernel == "none" else 0)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match="learnable must be one of 'projections', got 'everything'"):
        FavorppConfig(learnable="everything")


# --- weight decay -------------------------------------------------------------------------------------------------


def test_they_do_not_decay_in_the_recipes():
    model = converted()
    groups = parameter_groups(model, 1e-3, 0.1)
    decaying = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    learning = {id(p) for group in groups for p in group["params"]}
    features = {id(parameter) for _, parameter in feature_parameters(model)}
    assert features <= learning
    assert not features & decaying
    assert id(model.encoder.layer[0].attention.self.query.weight) in decaying


def test_they_have_a_learning_rate_of_their_own_in_the_recipes():
    model = converted()
    features = {id(parameter) for _, parameter in feature_parameters(model)}
    for decay in (None, 0.5):
        groups = parameter_groups(model, 1e-3, 0.1, feature_learning_rate=0.02, layer_decay=decay)
        rates = {id(p): group["lr"] for group in groups for p in group["params"]}
        assert {rates[one] for one in features} == {0.02}
        assert max(rate for one, rate in rates.items() if one not in features) <= 1e-3


def test_they_do_not_decay_in_a_trainer(tmp_path):
    model = convert_to_favorpp(tiny_model("bert", AutoModelForSequenceClassification), LEARNABLE_CONFIG)
    before = {name: parameter.clone() for name, parameter in feature_parameters(model)}
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": 0} for row in BATCH["input_ids"][:1]]
    arguments = TrainingArguments(str(tmp_path), max_steps=1, weight_decay=0.1, report_to=[], use_cpu=True)
    trainer = Trainer(model, arguments, train_dataset=rows)
    decaying = trainer.get_decay_parameter_names(model)
    assert "bert.encoder.layer.0.attention.self.query.weight" in decaying
    assert not [name for name in decaying if "favorpp" in name]
    trainer.train()
    assert all(not torch.equal(parameter, before[name]) for name, parameter in feature_parameters(model))
