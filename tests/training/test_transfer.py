"""Attention transfer: features come closer to softmax, nothing else changes, and an interrupted run ends the same."""

import pytest
import torch
from accelerate import Accelerator, debug_launcher
from accelerate.state import AcceleratorState, GradientState, PartialState
from tiny_models import fingerprint, tiny_model, token_batch
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from hf_favorpp import FavorppConfig, approximation_report, convert_to_favorpp, revert_to_softmax, transfer_attention
from hf_favorpp.errors import ConfigError, ConversionError, InputError
from hf_favorpp.nn import converted_layers
from hf_favorpp.training import loop

CONFIG = FavorppConfig(num_features=8, learnable="projections")
CALIBRATION = [token_batch(30, 24, seed=seed) for seed in range(3)]
ROWS = [{name: t[0] for name, t in token_batch(20, seed=seed).items()} for seed in range(12)]
BATCH = token_batch(30, 17, 8, seed=50)


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def converted(config=CONFIG, auto=AutoModelForSequenceClassification, model_type="bert", **options):
    model = tiny_model(model_type, auto, **options)
    return convert_to_favorpp(model, config, calibration_data=CALIBRATION)


def drawn():
    """Not calibrated: ranks that calibrate on the same data would choose other projections than one process."""
    return convert_to_favorpp(tiny_model("bert", AutoModelForSequenceClassification), CONFIG)


def errors(model):
    return approximation_report(model, BATCH).layer_errors


def features(model):
    return {name: t.clone() for name, t in model.state_dict().items() if "favorpp" in name}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in one.items())


# --- what is learnt -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["output", "weights"])
@pytest.mark.parametrize(
    "options",
    [{}, {"exact_window": 8, "exact_ends": (1, 1)}, {"kernel": "favor+", "preconditioning": "none", "candidates": 1}],
    ids=["features", "window", "favor+"],
)
def test_every_layer_comes_closer_to_softmax(options, loss):
    config = FavorppConfig(**{**CONFIG.to_dict(), "exact_ends": (0, 0), **options})
    if config.preconditioning == "none" and config.kernel == "favor+":
        model = convert_to_favorpp(tiny_model("bert", AutoModelForSequenceClassification), config)
    else:
        model = converted(config)
    before = errors(model)
    logged = {}
    assert transfer_attention(model, [BATCH], 40, loss=loss, on_log=logged.__setitem__) is model
    after = errors(model)
    assert all(new < 0.9 * old for new, old in zip(after, before, strict=True)), (before, after)
    assert list(logged) == [10, 20, 30, 40]
    assert list(logged[10]) == [f"bert.encoder.layer.{index}.attention.self" for index in (0, 1)]
    assert all(logged[40][name] < logged[10][name] for name in logged[10])


@pytest.mark.parametrize("model_type", ["bert", "albert"])
def test_the_logged_error_is_that_of_the_report(model_type):
    """Padding counts in neither: both are over real tokens, and over all calls of a layer that is shared."""
    model, logged = converted(model_type=model_type), {}
    expected = errors(model)
    transfer_attention(model, [BATCH], 10, learning_rate=1e-12, on_log=logged.__setitem__)
    assert list(logged[10].values()) == pytest.approx(expected, rel=1e-4)


def test_what_stands_at_padded_positions_is_not_learnt():
    strange = {**BATCH, "input_ids": torch.where(BATCH["attention_mask"].bool(), BATCH["input_ids"], 7)}
    found = []
    for batch in (BATCH, strange):
        model = converted()
        transfer_attention(model, [batch], 3)
        found.append(features(model))
    assert same(*found)


@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_aligning_brings_hidden_states_and_logits_closer(auto):
    model, logged = converted(auto=auto), {}
    with torch.no_grad():
        before = model(**BATCH).logits
        exact = tiny_model("bert", auto)(**BATCH).logits
    transfer_attention(model, [BATCH], 0, align_steps=40, on_log=logged.__setitem__)
    assert list(logged[10]) == ["hidden", "logits"]
    assert all(logged[40][name] < logged[10][name] for name in logged[10])
    with torch.no_grad():
        after = model(**BATCH).logits
    real = BATCH["attention_mask"].bool() if before.ndim == 3 else slice(None)
    assert (after - exact)[real].norm() < 0.8 * (before - exact)[real].norm()


def test_a_shared_layer_learns_from_all_its_calls():
    model = converted(model_type="albert")
    before = errors(model)
    transfer_attention(model, [BATCH], 40)
    assert errors(model)[0] < 0.9 * before[0]


# --- what is left alone -------------------------------------------------------------------------------------------


def test_nothing_but_projections_changes():
    softmax = fingerprint(tiny_model("bert", AutoModelForSequenceClassification))
    model = converted().train()
    model.classifier.bias.requires_grad_(False)
    modes = {name: module.training for name, module in model.named_modules()}
    before = model.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    transfer_attention(model, [BATCH], 2, align_steps=2)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    learnt = {name for name, _ in model.named_parameters() if "favorpp" in name}
    assert changed == learnt
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["classifier.bias"]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(not layer.exact and layer.probe is None for layer in converted_layers(model))
    assert fingerprint(revert_to_softmax(model.eval())) == softmax


def test_an_error_on_the_way_leaves_the_model_as_usable_as_before():
    model = converted().train()
    with pytest.raises(InputError, match="a batch must be a mapping of"):
        transfer_attention(model, [BATCH["input_ids"]], 2)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(not layer.exact and layer.probe is None for layer in converted_layers(model))


def test_the_user_s_accelerator_keeps_its_accumulation():
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    logged = {}
    transfer_attention(converted(), [BATCH] * 4, 10, on_log=logged.__setitem__)
    assert accelerator.gradient_accumulation_steps == 2
    assert list(logged) == [10]


# --- interrupted, and on several processes ------------------------------------------------------------------------


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("loss", ["output", "weights"])
@pytest.mark.parametrize(("part", "step"), [("attention", 5), ("outputs", 3)])
def test_an_interrupted_run_goes_on_to_the_same_end(part, step, loss, tmp_path, monkeypatch):
    def run(folder):
        model = converted()
        options = {"align_steps": 6, "loss": loss, "checkpoint_dir": folder, "checkpoint_every": 2, "seed": 3}
        transfer_attention(model, DataLoader(ROWS, 3, shuffle=True), 8, **options)
        return features(model)

    whole = run(tmp_path / "whole")
    end_step = loop._Run._end_step

    def end_step_and_die(self, loss):
        end_step(self, loss)
        if self.settings.output_dir.name == part and self.progress.completed_steps == step:
            raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_end_step", end_step_and_die)
        with pytest.raises(_Killed):
            run(tmp_path / "killed")
    assert same(run(tmp_path / "killed"), whole)
    assert same(run(tmp_path / "whole"), whole), "a finished run has nothing left to do"
    with pytest.raises(ConfigError, match=r"learning_rate was 0\.1 and is now 0\.5"):
        transfer_attention(converted(), DataLoader(ROWS, 3), 8, learning_rate=0.5, checkpoint_dir=tmp_path / "whole")


def _learn_on_two_ranks(path):
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = drawn()
    transfer_attention(model, DataLoader(ROWS, 2), 6, align_steps=4)
    if accelerator.is_main_process:
        torch.save(features(model), path)


def test_two_ranks_learn_what_one_learns_from_batches_of_twice_the_size(tmp_path):
    """Sequences of one length, so that the mean over ranks is that over the batch but for the norm of the outputs."""
    debug_launcher(_learn_on_two_ranks, args=(str(tmp_path / "two.pt"),), num_processes=2)
    two = torch.load(tmp_path / "two.pt")
    model = drawn()
    start = features(model)
    transfer_attention(model, DataLoader(ROWS, 4), 6, align_steps=4)
    one = features(model)
    learnt = [name for name, tensor in start.items() if not torch.equal(tensor, one[name])]
    assert len(learnt) == 6
    for name in learnt:
        moved, difference = (one[name] - start[name]).norm(), (one[name] - two[name]).norm()
        assert difference < 0.3 * moved, name


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["output", "weights", "outputs of the model"])
def test_no_tensor_grows_with_the_square_of_the_length(part):
    model = tiny_model("bert", AutoModelForSequenceClassification, max_position_embeddings=2048)
    convert_to_favorpp(model, FavorppConfig(num_features=8, learnable="projections", exact_window=16))
    aligned = part.startswith("outputs")
    options = {"align_steps": 1} if aligned else {"loss": part}
    largest = []
    for length in (1024, 2048):
        batch = token_batch(length - 7, length=length)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            transfer_attention(model, [batch], 0 if aligned else 1, **options)
        events = profile.profiler.kineto_results.events()
        largest.append(max(event.nbytes() for event in events if event.name() == "[memory]"))
    assert largest[1] <= 2.1 * largest[0]
    assert largest[1] < 4 * 2048 * 2048


# --- what is refused ----------------------------------------------------------------------------------------------


def test_a_model_with_nothing_to_learn_is_refused():
    with pytest.raises(ConversionError, match="is not converted; call convert_to"):
        transfer_attention(tiny_model("bert"), [BATCH], 1)
    fixed = convert_to_favorpp(tiny_model("bert"), FavorppConfig(num_features=8))
    with pytest.raises(ConversionError, match=r"encoder\.layer\.0\.attention\.self cannot learn: .*learnable='proj"):
        transfer_attention(fixed, [BATCH], 1)
    waiting = FavorppConfig(num_features=8, learnable="projections", statistics="calibrated")
    with pytest.raises(ConversionError, match="needs a calibration"):
        transfer_attention(convert_to_favorpp(tiny_model("bert"), waiting), [BATCH], 1)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([BATCH], -1), {}, "steps must be an integer >= 0"),
        (([BATCH], 1), {"align_steps": -1}, "align_steps must be an integer >= 0"),
        (([BATCH], 1), {"loss": "mse"}, "loss must be one of 'output', 'weights', got 'mse'"),
        (([BATCH], 1), {"learning_rate": 0.0}, "learning_rate must be above 0, got 0.0"),
        (([BATCH], 1), {"checkpoint_every": 5}, "checkpoint_every=5 needs a checkpoint_dir"),
        ((BATCH, 1), {}, r"a single batch is passed as \[batch\]"),
        (([], 1), {}, "there is no batch to learn from"),
    ],
)
def test_bad_arguments_are_refused(arguments, options, message):
    model = converted()
    before = fingerprint(model)
    with pytest.raises((ConfigError, InputError), match=message):
        transfer_attention(model, *arguments, **options)
    assert fingerprint(model) == before
