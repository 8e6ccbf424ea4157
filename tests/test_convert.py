"""Conversion in place: what is refused, what is said, and how a converted model trains and compiles."""

import copy

import pytest
import torch
from tiny_models import fingerprint, hidden_states, tiny_model, token_batch
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification

from hf_favorpp import FavorppConfig, approximation_report, convert_to_favorpp, revert_to_softmax
from hf_favorpp.errors import ConfigError, ConversionError, InputError
from hf_favorpp.nn import converted_layers

SMALL = FavorppConfig(num_features=16)


@pytest.fixture
def model():
    return convert_to_favorpp(tiny_model("bert"), SMALL)


@pytest.fixture
def single_process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


# --- what is refused, with its remedy ---------------------------------------------------------------------------


def test_converting_twice_is_refused_and_leaves_the_first_conversion(model):
    before = fingerprint(model)
    with pytest.raises(ConversionError, match=r"converted already; call revert_to_softmax\(model\) first"):
        convert_to_favorpp(model, FavorppConfig(num_features=8))
    assert fingerprint(model) == before
    convert_to_favorpp(revert_to_softmax(model), FavorppConfig(num_features=8))
    assert converted_layers(model)[0].omega.shape == (4, 8, 8)


def test_reverting_a_softmax_model_is_refused():
    with pytest.raises(ConversionError, match="BertModel is not converted; there is nothing to revert"):
        revert_to_softmax(tiny_model("bert"))


def test_a_model_wrapped_for_distributed_training_is_refused(single_process_group):
    wrapped = nn.parallel.DistributedDataParallel(tiny_model("bert"))
    with pytest.raises(ConversionError, match=r"wraps the model; convert or revert model\.module before"):
        convert_to_favorpp(wrapped)
    with pytest.raises(ConversionError, match=r"wraps the model; convert or revert model\.module before"):
        revert_to_softmax(wrapped)
    convert_to_favorpp(wrapped.module)


def test_a_model_wrapped_in_data_parallel_is_refused():
    with pytest.raises(ConversionError, match=r"DataParallel wraps the model"):
        convert_to_favorpp(nn.DataParallel(tiny_model("bert")))


def test_a_compiled_model_is_refused():
    plain = tiny_model("bert")
    with pytest.raises(
        ConversionError, match=r"is compiled; convert or revert the model first, then call torch\.comp"
    ):
        convert_to_favorpp(torch.compile(plain, backend="eager"))
    plain.compile(backend="eager")
    with pytest.raises(ConversionError, match=r"BertModel is compiled"):
        convert_to_favorpp(plain)


def test_a_peft_model_is_refused_with_what_to_do():
    class PeftModel(nn.Module):
        def get_base_model(self):
            return None

    with pytest.raises(ConversionError, match="got PeftModel; convert its base model before get_peft_model"):
        convert_to_favorpp(PeftModel())


def test_a_module_that_is_no_transformers_model_is_refused():
    with pytest.raises(
        ConversionError, match=r"must be a transformers\.PreTrainedModel, got Linear; pass the model that"
    ):
        convert_to_favorpp(nn.Linear(2, 2))


def test_a_config_of_another_type_is_refused():
    with pytest.raises(ConfigError, match="config must be a FavorppConfig, got dict"):
        convert_to_favorpp(tiny_model("bert"), {"num_features": 16})


@pytest.mark.parametrize(
    ("model_type", "layers", "message"),
    [
        ("bert", (0, 2), r"layers names layer 2, but BertModel has 2 attention layers \(0 to 1\)"),
        ("albert", (1,), r"AlbertModel has 1 attention layers .* A module that several layers share counts once"),
        ("modernbert", (0, 1), "layers names layer 1, which cannot be converted: it is local"),
    ],
)
def test_layers_that_do_not_exist_or_cannot_be_converted_are_refused(model_type, layers, message):
    plain = tiny_model(model_type)
    before = fingerprint(plain)
    with pytest.raises(ConfigError, match=message):
        convert_to_favorpp(plain, FavorppConfig(layers=layers))
    assert fingerprint(plain) == before


# --- which layers are converted, and what is said ---------------------------------------------------------------


def test_layers_that_are_not_chosen_compute_softmax_as_before(caplog):
    plain, batch = tiny_model("bert"), token_batch(9, 5)
    with torch.no_grad():
        softmax = plain(**batch, output_hidden_states=True).hidden_states
    convert_to_favorpp(plain, FavorppConfig(num_features=16, layers=(1,)))
    with torch.no_grad():
        converted = plain(**batch, output_hidden_states=True).hidden_states
    real = batch["attention_mask"].bool()
    assert torch.equal(converted[1][real], softmax[1][real])
    assert not torch.allclose(converted[2][real], softmax[2][real])
    assert [layer.layer for layer in converted_layers(plain)] == [1]
    assert "converted 1 of 2 attention layers; the others stay softmax." in caplog.text


def test_projections_differ_between_layers_and_heads_and_between_directions_and_norms(model):
    first, second = (layer.omega for layer in converted_layers(model))
    assert not torch.isclose(first, second).any()
    assert not torch.isclose(first[0], first[1]).any()
    assert not torch.isclose(first[0].norm(dim=-1), first[1].norm(dim=-1)).any()


def test_the_projections_of_a_layer_do_not_depend_on_which_other_layers_are_converted(model):
    alone = convert_to_favorpp(tiny_model("bert"), FavorppConfig(num_features=16, layers=(1,)))
    assert torch.equal(converted_layers(alone)[0].omega, converted_layers(model)[1].omega)


def test_attention_dropout_that_is_no_longer_applied_is_said_once(caplog):
    convert_to_favorpp(tiny_model("bert", attention_probs_dropout_prob=0.1), SMALL)
    messages = [message for message in caplog.messages if "not applied" in message]
    assert len(messages) == 1
    assert messages[0].startswith("attention_probs_dropout_prob=0.1 is not applied in converted layers")


def test_without_attention_dropout_nothing_is_said(caplog):
    convert_to_favorpp(tiny_model("bert"), SMALL)
    assert not caplog.records


def test_converted_layers_apply_no_attention_dropout():
    dropout = {"attention_probs_dropout_prob": 0.5, "hidden_dropout_prob": 0.0}
    model, batch = convert_to_favorpp(tiny_model("bert", **dropout), SMALL), token_batch(9, 5)
    evaluated = hidden_states(model, batch)
    assert torch.equal(hidden_states(model.train(), batch), evaluated)


def test_the_layers_that_stay_softmax_keep_their_attention_dropout():
    dropout = {"attention_probs_dropout_prob": 0.5, "hidden_dropout_prob": 0.0}
    config = FavorppConfig(num_features=16, layers=(0,))
    model, batch = convert_to_favorpp(tiny_model("bert", **dropout), config), token_batch(9, 5)
    evaluated = hidden_states(model, batch)
    assert not torch.allclose(hidden_states(model.train(), batch), evaluated)


@pytest.mark.parametrize(
    ("options", "features"),
    [
        ({"kernel": "elu"}, "head_dim features"),
        ({"kernel": "uniform"}, "one constant feature"),
        ({"kernel": "none", "exact_window": 4}, "no features"),
    ],
)
def test_kernels_that_draw_nothing_are_explained(caplog, options, features):
    convert_to_favorpp(tiny_model("bert"), FavorppConfig(**options))
    assert f"has {features}" in caplog.text
    assert "num_features does not apply" in caplog.text


@pytest.mark.parametrize("kernel", ["favor++", "favor+", "favor+hyperbolic", "relu", "elu", "trig", "uniform", "none"])
def test_every_kernel_runs_in_a_model_forward_and_backward(kernel):
    model, batch = (
        convert_to_favorpp(
            tiny_model("bert"), FavorppConfig(num_features=16, kernel=kernel, exact_window=4 * (kernel == "none"))
        ),
        token_batch(9),
    )
    output = model(**batch).last_hidden_state
    output.square().sum().backward()
    assert output.isfinite().all()
    assert model.encoder.layer[0].attention.self.value.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    "options",
    [
        {"kernel": "favor+"},
        {"preconditioning": "none"},
        {"projection": "iid"},
        {"seed": 1},
        {"num_features": 17},
    ],
    ids=str,
)
def test_every_option_reaches_the_layers(model, options):
    batch = token_batch(9, 5)
    other = convert_to_favorpp(tiny_model("bert"), FavorppConfig(**{"num_features": 16, **options}))
    assert not torch.allclose(hidden_states(other, batch), hidden_states(model, batch), atol=1e-4)


def test_print_shows_what_was_done(model):
    assert "kernel='favor++', preconditioning='center', statistics='sequence', exact_window=0" in str(model)


def test_a_task_model_and_its_base_model_are_converted_alike():
    whole = convert_to_favorpp(tiny_model("bert", AutoModelForSequenceClassification), SMALL)
    assert whole.bert.config._attn_implementation == "favorpp"
    part = tiny_model("bert", AutoModelForSequenceClassification)
    convert_to_favorpp(part.bert, SMALL)
    batch = token_batch(9, 5)
    assert torch.equal(part(**batch).logits, whole(**batch).logits)


# --- evaluation, training, compilation ----------------------------------------------------------------------------


def test_evaluation_is_deterministic(model):
    batch = token_batch(9, 5)
    assert torch.equal(hidden_states(model, batch), hidden_states(model, batch))


def test_conversion_neither_reads_nor_changes_the_global_random_state():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = convert_to_favorpp(tiny_model("bert"), SMALL)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second = convert_to_favorpp(tiny_model("bert"), SMALL)
    assert torch.equal(converted_layers(first)[0].omega, converted_layers(second)[0].omega)


def test_the_seed_chooses_the_projections(model):
    other = convert_to_favorpp(tiny_model("bert"), FavorppConfig(num_features=16, seed=1))
    assert not torch.isclose(converted_layers(model)[0].omega, converted_layers(other)[0].omega).any()


def test_conversion_keeps_the_mode_of_the_model():
    assert not any(layer.training for layer in converted_layers(convert_to_favorpp(tiny_model("bert"), SMALL)))
    assert all(layer.training for layer in converted_layers(convert_to_favorpp(tiny_model("bert").train(), SMALL)))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_gradient_checkpointing_gives_the_same_gradients(use_reentrant):
    model, batch = convert_to_favorpp(tiny_model("bert", hidden_dropout_prob=0.0), SMALL).train(), token_batch(9, 5)
    weight = model.encoder.layer[0].attention.self.query.weight
    model(**batch).last_hidden_state.square().sum().backward()
    expected = weight.grad.clone()
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    model(**batch).last_hidden_state.square().sum().backward()
    assert torch.equal(weight.grad, expected)


def test_a_deep_copy_is_a_model_of_its_own(model):
    batch, twin = token_batch(9, 5), copy.deepcopy(model)
    before = hidden_states(model, batch)
    assert torch.equal(hidden_states(twin, batch), before)
    converted_layers(twin)[0].redraw_(1)
    assert not torch.allclose(hidden_states(twin, batch), before)
    assert torch.equal(hidden_states(model, batch), before)
    revert_to_softmax(twin)
    assert converted_layers(model)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no mask"])
def test_it_compiles_without_a_graph_break_and_a_redraw_does_not_recompile(model, fresh_compiler, backend, masked):
    batch = token_batch(9, 5)
    inputs = batch if masked else {"input_ids": batch["input_ids"]}
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for draw_index in range(3):
        for layer in converted_layers(model):
            layer.redraw_(draw_index)
        with torch.no_grad():
            expected = model(**inputs).last_hidden_state
            torch.testing.assert_close(compiled(**inputs).last_hidden_state, expected, rtol=0, atol=1e-5)
    assert fresh_compiler["stats"]["unique_graphs"] == 1


def test_a_compiled_model_trains(model, fresh_compiler):
    batch, weight = token_batch(9, 5), model.encoder.layer[0].attention.self.query.weight
    model(**batch).last_hidden_state.square().sum().backward()
    expected = weight.grad.clone()
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(**batch).last_hidden_state.square().sum().backward()
    torch.testing.assert_close(weight.grad, expected, rtol=1e-4, atol=1e-5)


def test_a_compiled_model_takes_any_length_in_one_graph(model, fresh_compiler):
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for length in (9, 20, 31):
        batch = token_batch(length, 5)
        torch.testing.assert_close(hidden_states(compiled, batch), hidden_states(model, batch), rtol=0, atol=1e-5)
    assert fresh_compiler["stats"]["unique_graphs"] == 1


def test_it_exports_for_any_batch_and_length(model, fresh_compiler):
    sizes = {0: torch.export.Dim("batch", min=2, max=8), 1: torch.export.Dim("length", min=2, max=64)}
    shapes = {"input_ids": sizes, "attention_mask": sizes}
    program = torch.export.export(model, (), token_batch(9, 5), dynamic_shapes=shapes).module()
    batch = token_batch(13, 5, 7)
    torch.testing.assert_close(hidden_states(program, batch), hidden_states(model, batch), rtol=0, atol=1e-5)


# --- what may stay softmax ----------------------------------------------------------------------------------------


CALIBRATION = [token_batch(9, 5, 12, seed=seed) for seed in range(3)]


def test_layers_beyond_the_error_budget_stay_softmax(caplog, tmp_path):
    config = FavorppConfig(num_features=8, preconditioning="none", candidates=1)
    probe = convert_to_favorpp(tiny_model("bert", num_hidden_layers=3), config, calibration_data=CALIBRATION)
    errors = approximation_report(probe, CALIBRATION[0]).layer_errors
    budget = (sorted(errors)[0] + sorted(errors)[1]) / 2
    model = tiny_model("bert", num_hidden_layers=3)
    convert_to_favorpp(model, config, calibration_data=CALIBRATION, keep_softmax="auto", error_budget=budget)
    kept = errors.index(min(errors))
    assert [layer.layer for layer in converted_layers(model)] == [kept]
    assert model.config.favorpp["layers"] == [kept]
    assert caplog.text.count("stays softmax: its relative output error is") == 2
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(hidden_states(loaded, CALIBRATION[0]), hidden_states(model, CALIBRATION[0]))


def test_a_generous_budget_converts_every_layer():
    model = tiny_model("bert")
    convert_to_favorpp(model, SMALL, calibration_data=CALIBRATION, keep_softmax="auto", error_budget=10)
    assert len(converted_layers(model)) == 2
    assert model.config.favorpp["layers"] is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keep_softmax": "best"}, ConfigError, "keep_softmax must be 'auto' or None, got 'best'"),
        ({"error_budget": 0.3}, ConfigError, r"error_budget=0\.3 needs keep_softmax='auto'"),
        ({"keep_softmax": "auto"}, ConfigError, "keep_softmax='auto' needs calibration_data"),
        (
            {"keep_softmax": "auto", "error_budget": -1, "calibration_data": CALIBRATION},
            ConfigError,
            "error_budget must be a positive number, got -1",
        ),
        (
            {"keep_softmax": "auto", "error_budget": 1e-9, "calibration_data": CALIBRATION},
            ConversionError,
            r"no layer keeps to error_budget=1e-09: the smallest relative output error is 0\.\d\d",
        ),
        (
            {"keep_softmax": "auto", "calibration_data": iter(CALIBRATION)},
            InputError,
            "reads calibration_data twice: pass a DataLoader or a list",
        ),
    ],
)
def test_a_budget_that_cannot_be_kept_changes_nothing(options, error, message):
    model = tiny_model("bert")
    before = fingerprint(model)
    with pytest.raises(error, match=message):
        convert_to_favorpp(model, SMALL, **options)
    assert fingerprint(model) == before
