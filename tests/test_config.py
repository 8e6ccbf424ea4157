"""Options validate themselves, say what to do, and are plain JSON."""

import dataclasses
import json

import pytest

from hf_favorpp import FavorppConfig, FavorppError, RedrawSchedule
from hf_favorpp.errors import ConfigError
from hf_favorpp.rules import SOFTMAX_KERNELS

EVERYTHING = FavorppConfig(
    num_features=64,
    kernel="favor+",
    projection="iid",
    preconditioning="diagonal",
    statistics="calibrated",
    exact_window=(8, 4),
    layers=(3, 1),
    redraw=RedrawSchedule(every=100, until=900),
    recalibrate=RedrawSchedule(every=50),
    candidates=1,
    backend="reference",
    seed=7,
)


def test_the_defaults():
    assert FavorppConfig().to_dict() == {
        "num_features": 128,
        "kernel": "favor++",
        "projection": "orthogonal",
        "preconditioning": None,
        "statistics": "sequence",
        "exact_window": 0,
        "exact_ends": [0, 0],
        "layers": None,
        "redraw": None,
        "recalibrate": None,
        "candidates": None,
        "learnable": None,
        "backend": "auto",
        "seed": 0,
    }


def test_paper_is_the_published_method_and_leaves_the_rest_open():
    paper = FavorppConfig.paper(num_features=64, seed=3)
    assert (paper.kernel, paper.projection, paper.preconditioning) == ("favor++", "orthogonal", "none")
    assert (paper.statistics, paper.exact_window, paper.exact_ends) == ("sequence", 0, (0, 0))
    assert (paper.num_features, paper.seed) == (64, 3)


def test_the_default_preconditioning_is_chosen_by_what_it_costs_and_what_the_kernel_estimates():
    for statistics, best in (("sequence", "center"), ("calibrated", "full")):
        chosen = {k: FavorppConfig(kernel=k, statistics=statistics).preconditioning for k in SOFTMAX_KERNELS}
        assert chosen == dict.fromkeys(SOFTMAX_KERNELS, best)
    assert FavorppConfig(kernel="relu").preconditioning == FavorppConfig(kernel="elu").preconditioning == "none"


def test_pairs_are_drawn_where_they_were_measured_to_be_better():
    assert FavorppConfig().projection == FavorppConfig.paper().projection == "orthogonal"
    assert FavorppConfig(preconditioning="full").projection == "antithetic"
    assert FavorppConfig(preconditioning="full", projection="iid").projection == "iid"
    assert FavorppConfig(preconditioning="full", statistics="calibrated").projection == "orthogonal"
    # what was drawn stays what the configuration says
    assert FavorppConfig(preconditioning="full").calibrated().projection == "antithetic"


def test_calibration_chooses_a_preconditioning_that_was_left_open():
    assert FavorppConfig().calibrated() == FavorppConfig(statistics="calibrated", preconditioning="full")
    assert FavorppConfig(preconditioning="center").calibrated().preconditioning == "center"
    loaded = FavorppConfig.from_dict(json.loads(json.dumps(FavorppConfig().to_dict())))
    assert loaded.calibrated().preconditioning == "full"


def test_candidates_are_eight_where_they_can_be_chosen_from():
    assert FavorppConfig().candidates_per_feature == 8
    assert FavorppConfig(candidates=3).candidates_per_feature == 3
    assert FavorppConfig(redraw=RedrawSchedule(10)).candidates_per_feature == 1
    assert FavorppConfig(kernel="trig").candidates_per_feature == 1
    assert FavorppConfig.paper().candidates_per_feature == 1


@pytest.mark.parametrize(
    "config", [FavorppConfig(), FavorppConfig.paper(), EVERYTHING], ids=["default", "paper", "all"]
)
def test_options_survive_json(config):
    assert FavorppConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_dictionary_holds_plain_json_values_of_every_option():
    assert EVERYTHING.to_dict() == {
        "num_features": 64,
        "kernel": "favor+",
        "projection": "iid",
        "preconditioning": "diagonal",
        "statistics": "calibrated",
        "exact_window": [8, 4],
        "exact_ends": [0, 0],
        "layers": [1, 3],
        "redraw": {"every": 100, "until": 900},
        "recalibrate": {"every": 50, "until": None},
        "candidates": 1,
        "learnable": None,
        "backend": "reference",
        "seed": 7,
    }


def test_an_older_dictionary_without_newer_options_takes_their_defaults():
    assert FavorppConfig.from_dict({"num_features": 64}) == FavorppConfig(num_features=64)


def test_options_are_frozen_and_hashable():
    config = FavorppConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_features = 3
    assert hash(config) == hash(FavorppConfig())


def test_layers_and_ends_may_be_lists_and_are_sorted():
    config = FavorppConfig(layers=[2, 0], exact_ends=[0, 1])
    assert (config.layers, config.exact_ends) == ((0, 2), (0, 1))
    assert FavorppConfig(exact_window=[8, 8]).exact_window == (8, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_features": 0}, "num_features must be an integer >= 1, got 0"),
        ({"num_features": 64.0}, r"num_features must be an integer >= 1, got 64\.0"),
        ({"num_features": True}, "num_features must be an integer >= 1, got True"),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
        ({"kernel": "softmax"}, r"kernel must be one of 'favor\+\+', 'favor\+', .*'none', got 'softmax'"),
        ({"projection": "gaussian"}, "projection must be one of .*'iid', 'hadamard', 'givens', got 'gaussian'"),
        ({"preconditioning": "whiten"}, "preconditioning must be one of 'none', 'center', 'diagonal', 'full', got"),
        ({"statistics": "batch"}, "statistics must be one of 'sequence', 'calibrated', got 'batch'"),
        ({"backend": "cuda"}, "backend must be one of 'auto', 'reference', 'cpu', 'triton', got 'cuda'"),
        ({"exact_window": -1}, "exact_window must be an integer >= 0, got -1"),
        ({"exact_window": 8.0}, r"exact_window must be an integer >= 0, got 8\.0"),
        ({"exact_window": (8, 8, 8)}, r"must be a number of tokens or \(rows, columns\), got \(8, 8, 8\)"),
        ({"exact_window": (8, 0)}, "exact_window must be an integer >= 1, got 0"),
        ({"exact_ends": (1, -1)}, "every entry of exact_ends must be an integer >= 0, got -1"),
        ({"kernel": "relu", "exact_window": 8}, r"exact_window .* positive features \(.*\), got kernel='relu'"),
        ({"kernel": "trig", "exact_ends": (1, 0)}, "positive features .* got kernel='trig'"),
        ({"candidates": 0}, "candidates must be an integer >= 1, got 0"),
        ({"candidates": 4, "kernel": "trig"}, "candidates must be 1 or None, got 4: kernel='trig'"),
        ({"candidates": 4, "redraw": RedrawSchedule(10)}, "candidates must be 1 or None, got 4: a redraw would"),
        ({"recalibrate": 100}, r"recalibrate must be a RedrawSchedule\(every=\.\.\., until=\.\.\.\) or None, got 100"),
        ({"recalibrate": RedrawSchedule(10)}, "recalibrate needs statistics='calibrated', got 'sequence'"),
        ({"exact_window": (8, 8), "exact_ends": (1, 0)}, r"exact_ends must be \(0, 0\) with a tile .* got \(1, 0\)"),
        ({"kernel": "relu", "statistics": "calibrated"}, "kernel='relu' .* uses no statistics"),
        (
            {"candidates": 4, "statistics": "calibrated", "recalibrate": RedrawSchedule(10)},
            "candidates must be 1 or None, got 4: a recalibration would",
        ),
        ({"layers": ()}, r"layers must name at least one layer and none twice, got \(\)"),
        ({"layers": (1, 1)}, r"layers must name at least one layer and none twice, got \(1, 1\)"),
        ({"layers": (0, -1)}, "every entry of layers must be an integer >= 0, got -1"),
        ({"layers": "12"}, "layers must be None or a sequence of layer indices .* got '12'"),
        ({"layers": 3}, "layers must be None or a sequence of layer indices .* got 3"),
        ({"redraw": 100}, r"redraw must be a RedrawSchedule\(every=\.\.\., until=\.\.\.\) or None, got 100"),
        (
            {"kernel": "relu", "preconditioning": "center"},
            "needs a kernel that estimates softmax .* got kernel='relu'",
        ),
    ],
)
def test_an_impossible_value_is_refused_with_the_rule_and_the_value(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        FavorppConfig(**options)
    assert isinstance(error.value, FavorppError)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("projection", ["hadamard", "givens"])
def test_structured_projections_are_asked_for_and_never_chosen(projection):
    config = FavorppConfig(projection=projection, preconditioning="full")
    assert FavorppConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.calibrated().projection == projection


@pytest.mark.parametrize("ends", [3, None, "ab"])
def test_ends_that_are_no_pair_are_refused(ends):
    with pytest.raises(ConfigError, match="exact_ends"):
        FavorppConfig(exact_ends=ends)


@pytest.mark.parametrize("name", ["kernel", "projection", "statistics", "backend"])
@pytest.mark.parametrize("value", [False, 3, ["auto"]])
def test_a_choice_of_another_type_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be one of"):
        FavorppConfig(**{name: value})


def test_a_misspelt_option_gets_the_nearest_name():
    with pytest.raises(ConfigError, match=r"unknown option 'num_feature'\. Did you mean 'num_features'\?"):
        FavorppConfig.from_dict({"num_feature": 64})


def test_an_option_without_a_near_name_gets_all_names():
    with pytest.raises(ConfigError, match=r"unknown option 'xyzzy'\. Known options: num_features, kernel, projection"):
        FavorppConfig.from_dict({"xyzzy": 1})


@pytest.mark.parametrize("options", [None, 3, ["num_features"], True])
def test_a_dictionary_of_another_type_is_refused(options):
    with pytest.raises(ConfigError, match="must be a JSON object"):
        FavorppConfig.from_dict(options)


@pytest.mark.parametrize("redraw", [{"until": 3}, {"every": 3, "untl": 4}, {}])
def test_a_redraw_schedule_with_other_keys_is_refused(redraw):
    with pytest.raises(ConfigError, match=r"config\.favorpp\['redraw'\] must have 'every' and may have 'until'"):
        FavorppConfig.from_dict({"redraw": redraw})


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"every": 0}, r"RedrawSchedule\.every must be an integer >= 1, got 0"),
        ({"every": 2.5}, r"RedrawSchedule\.every must be an integer >= 1, got 2\.5"),
        ({"every": 3, "until": -1}, r"RedrawSchedule\.until must be an integer >= 0, got -1"),
    ],
)
def test_an_impossible_redraw_schedule_is_refused(schedule, message):
    with pytest.raises(ConfigError, match=message):
        RedrawSchedule(**schedule)
