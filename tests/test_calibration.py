"""Calibration: float64 moments over real tokens, projections chosen by likelihood, and nothing half-done on errors."""

import copy

import pytest
import torch
from processes import run_two_ranks
from tiny_models import fingerprint, hidden_states, tiny_model, token_batch
from transformers import AutoModel

from hf_favorpp import FavorppCallback, FavorppConfig, RedrawSchedule, calibrate, convert_to_favorpp, revert_to_softmax
from hf_favorpp.errors import ConfigError, ConversionError, InputError
from hf_favorpp.features.projection import draw_projections
from hf_favorpp.nn import converted_layers
from hf_favorpp.observing import observing

F64 = torch.float64
DATA = [token_batch(9, 5, 12, seed=seed) for seed in range(4)]
SMALL = FavorppConfig(num_features=16, candidates=1, preconditioning="full")


def converted(config=SMALL, model_type="bert", **options):
    return convert_to_favorpp(tiny_model(model_type), config, **options)


def real_queries_and_keys(model, data, layer=0):
    """Scaled queries and keys of real tokens in the softmax model, (H, tokens, d) each, float64."""
    seen = []
    watch = [lambda call: None] * len(converted_layers(model))
    watch[layer] = seen.append
    with torch.no_grad(), observing(converted_layers(model), watch, exact=True):
        for batch in data:
            model(**batch)
    sides = []
    for side in ("query", "key"):
        tokens = [getattr(call, side).transpose(0, 1)[:, call.key_mask] * call.scaling**0.5 for call in seen]
        sides.append(torch.cat(tokens, dim=1).to(F64))
    return sides


def relative_error(model, data=DATA):
    """Error of the converted hidden states against those of the same model by softmax."""
    error, norm = 0.0, 0.0
    for batch in data:
        approximate = hidden_states(model, batch)
        with observing(converted_layers(model), exact=True):
            exact = hidden_states(model, batch)
        error += (approximate - exact).square().sum()
        norm += exact.square().sum()
    return (error / norm).sqrt().item()


@pytest.mark.parametrize("preconditioning", ["none", "center", "diagonal", "full"])
def test_the_moments_are_those_of_all_real_tokens(preconditioning):
    model = converted(FavorppConfig(num_features=16, candidates=1, preconditioning=preconditioning))
    x, y = real_queries_and_keys(model, DATA)
    calibrate(model, DATA)
    layer = converted_layers(model)[0]
    assert layer.config.statistics == "calibrated"
    if preconditioning == "none":
        psi = (x.unsqueeze(2) + y.unsqueeze(1)).square().sum(-1).mean((1, 2))
        rho = 1 / (1 - 8 * layer.coefficient.to(F64).squeeze(-1))
        d = x.shape[-1]
        expected = 2 * d / ((2 * psi + d).square().add(8 * d * psi).sqrt() + 2 * psi + d)  # CRT Theorem 3.3
        assert torch.allclose(rho, expected, rtol=1e-5)
        assert not hasattr(layer, "center_x")
        return
    assert torch.allclose(layer.center_x.to(F64), x.mean(1), atol=1e-6)
    assert torch.allclose(layer.center_y.to(F64), y.mean(1), atol=1e-6)
    if preconditioning == "full":
        x = (x - x.mean(1, keepdim=True)) @ layer.transform_x.to(F64).mT
        y = (y - y.mean(1, keepdim=True)) @ layer.transform_y.to(F64).mT
        for side in (x, y):
            covariance = side.mT @ side / side.shape[1]
            off_diagonal = covariance - torch.diag_embed(covariance.diagonal(dim1=1, dim2=2))
            assert off_diagonal.abs().max() < 0.1 * covariance.abs().max()  # the ridge is 5 / 104 tokens


def test_padding_and_batching_do_not_matter():
    wide = [token_batch(9, 5, 12, length=20, seed=seed) for seed in range(4)]
    single = [{name: t[row : row + 1, :12] for name, t in batch.items()} for batch in DATA for row in range(3)]
    models = [calibrate(converted(), data) for data in (DATA, wide, single)]
    for layers in zip(*(converted_layers(model) for model in models), strict=True):
        for name, buffer in layers[0].named_buffers():
            for other in layers[1:]:
                torch.testing.assert_close(getattr(other, name), buffer, rtol=0, atol=3e-4, msg=name)


def test_the_outcome_is_that_of_the_softmax_model_and_converting_with_data_is_the_same():
    apart, together = calibrate(converted(), DATA), converted(calibration_data=DATA)
    again = calibrate(
        copy.deepcopy(apart), DATA
    )  # what the features of the first calibration make of the data is moot
    for model in (together, again):
        for name, tensor in apart.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), name
    assert together.config.favorpp["statistics"] == "calibrated"


def test_evaluation_computes_no_statistics_afterwards(monkeypatch):
    model = calibrate(converted(), DATA)
    expected = hidden_states(model, DATA[0])
    monkeypatch.setattr("hf_favorpp.attention.reference.sequence_statistics", None)
    assert torch.equal(hidden_states(model, DATA[0]), expected)
    alone = {name: t[:1, :9] for name, t in DATA[0].items()}
    assert torch.allclose(hidden_states(model, alone), expected[:9], atol=1e-5)


def test_chosen_projections_explain_held_out_attention_better_than_random_ones():
    held_out = [token_batch(9, 5, 12, seed=seed) for seed in range(40, 44)]
    data = [token_batch(*[12] * 8, seed=seed) for seed in range(10)]
    errors = {}
    for candidates in (1, 4):
        errors[candidates] = 0.0
        for seed in (0, 1):
            options = {"preconditioning": "full", "projection": "orthogonal", "candidates": candidates}
            config = FavorppConfig(num_features=32, seed=seed, **options)
            errors[candidates] += relative_error(converted(config, calibration_data=data), held_out)
    assert errors[4] < 0.9 * errors[1]


def test_chosen_projections_are_rows_of_the_seeded_draw_with_weights():
    model = converted(FavorppConfig(num_features=16, seed=3), calibration_data=DATA)
    for layer in converted_layers(model):
        candidates = draw_projections(4, 8 * 16, 8, seed=3, layer=layer.layer)
        for head in range(4):
            distances = (layer.omega[head].unsqueeze(1) - candidates[head]).abs().amax(-1)
            assert (distances.amin(-1) == 0).all()
            assert len(set(distances.argmin(-1).tolist())) == 16
        assert layer.log_weights.std() > 0.1
        before = layer.omega.clone()
        layer.redraw_(1)
        assert (layer.log_weights == 0).all()
        assert not torch.equal(layer.omega, before)


def test_a_calibrated_checkpoint_is_saved_and_loaded(tmp_path):
    model = converted(FavorppConfig(num_features=16), calibration_data=DATA)
    expected = hidden_states(model, DATA[0])
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(hidden_states(loaded, DATA[0]), expected)
    assert all(layer.calibrated for layer in converted_layers(loaded))
    low = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert converted_layers(low)[0].transform_x.dtype == torch.float32
    softmax = AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert torch.equal(hidden_states(softmax, DATA[0]), hidden_states(tiny_model("bert"), DATA[0]))
    assert torch.equal(hidden_states(revert_to_softmax(loaded), DATA[0]), hidden_states(softmax, DATA[0]))


def test_a_checkpoint_without_its_calibration_asks_for_one(tmp_path):
    model = tiny_model("bert")
    model.config.favorpp = FavorppConfig(num_features=8, statistics="calibrated").to_dict()
    model.save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, attn_implementation="favorpp")
    with pytest.raises(ConversionError, match="needs a calibration, and there was none: call calibrate"):
        hidden_states(model, DATA[0])
    calibrate(model, DATA)
    assert torch.isfinite(hidden_states(model, DATA[0])).all()


def test_mode_and_gradients_are_as_before():
    model = converted()
    model.encoder.layer[1].train()
    modes = [module.training for module in model.modules()]
    calibrate(model, DATA)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(layer.exact or layer.probe for layer in converted_layers(model))


@pytest.mark.parametrize("num_batches", [1, 3])
def test_num_batches_limits_the_pass(num_batches):
    limited, short = calibrate(converted(), DATA, num_batches), calibrate(converted(), DATA[:num_batches])
    for name, tensor in short.state_dict().items():
        assert torch.equal(limited.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([], InputError, "held no real token: the dataloader is empty, used up"),
        (
            [{"input_ids": torch.ones(1, 4, dtype=torch.int64), "attention_mask": torch.zeros(1, 4)}],
            InputError,
            "no real",
        ),
        ([DATA[0]["input_ids"]], InputError, "must be a mapping of tensors, .* got Tensor"),
        ([{"inputs_embeds": torch.full((1, 5, 32), torch.nan)}], InputError, "finite queries and keys; .* layer 0"),
    ],
    ids=["empty", "masked", "tensor", "nan"],
)
def test_data_that_cannot_be_used_changes_nothing(data, error, message):
    model = converted()
    before = fingerprint(model)
    with pytest.raises(error, match=message):
        calibrate(model, data)
    assert fingerprint(model) == before
    plain = tiny_model("bert")
    before = fingerprint(plain)
    with pytest.raises(error, match=message):
        convert_to_favorpp(plain, SMALL, calibration_data=data)
    assert fingerprint(plain) == before


def test_what_cannot_be_calibrated_is_refused():
    with pytest.raises(ConversionError, match="BertModel is not converted; call convert_to_favorpp"):
        calibrate(tiny_model("bert"), DATA)
    with pytest.raises(ConfigError, match="num_batches must be an integer >= 1, got 0"):
        calibrate(converted(), DATA, 0)
    with pytest.raises(ConfigError, match=r"kernel=.relu. .* nothing to calibrate"):
        calibrate(converted(FavorppConfig(num_features=8, kernel="relu")), DATA)
    with pytest.raises(InputError, match=r"a single batch is passed as \[batch\]"):
        calibrate(converted(), DATA[0])
    model = converted()
    model.set_attn_implementation("sdpa")
    with pytest.raises(InputError, match=r"never reached converted layer 0: .* something else than 'favorpp'"):
        calibrate(model, DATA)


def test_data_inside_the_window_leave_the_projections_as_drawn_and_say_so(caplog):
    model = converted(FavorppConfig(num_features=16, exact_window=16), calibration_data=DATA)
    assert "no calibration sequence is longer than exact_window" in caplog.text
    layer = converted_layers(model)[0]
    assert torch.equal(layer.omega, draw_projections(4, 16, 8, layer=0))
    assert (layer.log_weights == 0).all()


def test_modes_of_the_caller_do_not_reach_the_calibration():
    expected = calibrate(converted(FavorppConfig(num_features=16)), DATA).state_dict()
    model = converted(FavorppConfig(num_features=16))
    with torch.inference_mode():
        calibrate(model, DATA)
    calibrate(model, DATA)  # what was written in inference mode could not be written again
    for name, tensor in expected.items():
        assert torch.equal(model.state_dict()[name], tensor), name
    with torch.autocast("cpu", torch.bfloat16):
        low = calibrate(converted(FavorppConfig(num_features=16)), DATA)
    assert relative_error(low) < 1.1 * relative_error(model)


def test_each_of_two_models_keeps_its_own_options():
    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = converted(FavorppConfig(num_features=8))
            self.second = converted(FavorppConfig(num_features=16))

        def forward(self, **batch):
            return self.first(**batch), self.second(**batch)

    both = calibrate(Both(), DATA)
    assert both.first.config.favorpp["num_features"] == 8
    assert both.second.config.favorpp["num_features"] == 16


def test_a_rank_whose_layer_did_not_run_still_takes_part_in_the_sum():
    config = FavorppConfig(num_features=16, statistics="calibrated", recalibrate=RedrawSchedule(every=2))
    layer = converted_layers(converted(config, calibration_data=DATA[:1]))[0]
    sums = []
    layer.absorb_(lambda total: sums.append(total.shape) or total)
    assert sums == [layer.moments.shape]


@pytest.mark.parametrize("model_type", ["albert", "eurobert", "modernbert", "esm"])
def test_families_calibrate(model_type):
    """A module that several layers share sees all of them; rotary positions and pre-scaled queries are in x and y."""
    model = converted(FavorppConfig(num_features=256, candidates=2), model_type, calibration_data=DATA)
    assert relative_error(model) < 0.8 * relative_error(converted(FavorppConfig.paper(num_features=256), model_type))


def test_a_neighbourhood_leaves_only_the_far_keys_to_the_projections():
    data = [token_batch(40, 33, seed=seed) for seed in range(6)]
    errors = []
    for config in ({}, {"exact_window": 8}, {"exact_window": 8, "exact_ends": (1, 1)}, {"exact_window": 40}):
        model = converted(FavorppConfig(num_features=16, **config), calibration_data=data)
        errors.append(relative_error(model, data[:2]))
    assert max(errors[1:]) < errors[0]
    assert errors[-1] < 1e-5


def calibrate_on_one_of_two_ranks(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    model = calibrate(converted(FavorppConfig(num_features=16)), DATA[rank::2])
    torch.save(model.state_dict(), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_agree_with_each_other_and_with_the_moments_of_one(tmp_path):
    run_two_ranks(calibrate_on_one_of_two_ranks, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    alone = calibrate(converted(FavorppConfig(num_features=16)), DATA).state_dict()
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor), name
        if "center" in name or "coefficient" in name:
            torch.testing.assert_close(tensor, alone[name], rtol=1e-4, atol=1e-5)


def test_recalibration_follows_the_training_batches():
    schedule = RedrawSchedule(every=2)
    config = FavorppConfig(num_features=16, statistics="calibrated", recalibrate=schedule)
    model = convert_to_favorpp(tiny_model("bert", hidden_dropout_prob=0.0), config, calibration_data=DATA[:1]).train()
    layer, callback = converted_layers(model)[0], FavorppCallback()
    first = layer.center_x.clone()
    assert not callback.step(model, 0)
    model(**DATA[2])
    assert not callback.step(model, 1)
    assert (layer.moments[:, 0] == 26).all()
    callback.end_step(model, 1)  # adds nothing twice
    assert (layer.moments[:, 0] == 26).all()
    state = copy.deepcopy(model.state_dict())
    model(**DATA[3])
    assert callback.step(model, 2)
    assert (layer.moments == 0).all()
    assert not torch.equal(layer.center_x, first)
    resumed = convert_to_favorpp(
        tiny_model("bert", hidden_dropout_prob=0.0), config, calibration_data=DATA[:1]
    ).train()
    resumed.load_state_dict(state)
    resumed(**DATA[3])
    FavorppCallback().step(resumed, 2)
    for name, tensor in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name
    # the first layer's queries and keys do not depend on the attention, so those of softmax are the same
    expected = converted_layers(converted(calibration_data=DATA[2:]))[0]
    for name in ("center_x", "center_y", "transform_x", "transform_y", "coefficient"):
        torch.testing.assert_close(getattr(layer, name), getattr(expected, name), atol=1e-4, rtol=1e-4)


def test_recalibration_does_nothing_in_eval():
    config = FavorppConfig(num_features=16, statistics="calibrated", recalibrate=RedrawSchedule(every=1))
    model = convert_to_favorpp(tiny_model("bert"), config, calibration_data=DATA[:1])
    hidden_states(model, DATA[1])
    assert all(layer.recent is None for layer in converted_layers(model))
