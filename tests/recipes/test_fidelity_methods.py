"""Methods by name, runs by plan, and the two controls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fidelity_methods import (
    METHODS,
    UNIFORM,
    WINDOW_ONLY,
    Run,
    _tile,
    attention_replaced,
    configuration,
    plan_runs,
)
from tiny_models import fingerprint, hidden_states, tiny_model, token_batch

from hf_favorpp import FavorppConfig

NO_WINDOW = (0, (0, 0))


def test_names_stand_for_what_they_say():
    paper = FavorppConfig.paper(num_features=8, seed=2)
    assert configuration(Run("favor++", 8, 2), *NO_WINDOW) == paper
    assert configuration(Run("favor+", 8, 0), *NO_WINDOW).kernel == "favor+"
    for name in ("relu", "elu", "trig"):
        assert configuration(Run(name, 8, 0), *NO_WINDOW).kernel == name
    for preconditioning in ("center", "diagonal", "full"):
        config = configuration(Run(preconditioning, 8, 0), *NO_WINDOW)
        assert (config.preconditioning, config.statistics, config.kernel) == (preconditioning, "sequence", "favor++")
    for preconditioning in ("none", "center", "diagonal", "full"):
        chosen, drawn = (
            configuration(Run(f"calibrated-{preconditioning}{end}", 8, 0), *NO_WINDOW) for end in ("", "-random")
        )
        assert chosen.preconditioning == drawn.preconditioning == preconditioning
        assert chosen.candidates_per_feature == FavorppConfig().candidates_per_feature > 1
        assert drawn.candidates_per_feature == 1
    config = configuration(Run("favor+++window", 8, 0), 16, (1, 2))
    assert (config.exact_window, config.exact_ends, config.preconditioning) == (16, (1, 2), "none")
    assert configuration(Run(UNIFORM), *NO_WINDOW).kernel == "uniform"


def test_calibrated_and_learnt_names_and_no_others_ask_for_a_calibration():
    begins = ("calibrated-", "learnt-")
    wanted = {name for name in METHODS if name.startswith(begins)} - {"learnt-favor+"}
    assert {name for name in METHODS if Run(name).calibrated} == wanted


def test_learnt_names_begin_as_calibrated_ones():
    for preconditioning in ("none", "center", "diagonal", "full"):
        fixed, learnt = (
            configuration(Run(f"{begin}-{preconditioning}", 8, 0), *NO_WINDOW) for begin in ("calibrated", "learnt")
        )
        assert (fixed.learnable, learnt.learnable) == (None, "projections")
        assert replace(learnt, learnable=None) == fixed
    assert configuration(Run("learnt-favor+", 8, 0), *NO_WINDOW).kernel == "favor+"
    assert {name for name in METHODS if Run(name).learnt} == {name for name in METHODS if "learnt" in name}


def test_every_method_without_a_window_has_its_control_and_so_has_every_method_with_one():
    runs = plan_runs(["full", "elu"], [8, 16], 2)
    assert runs[:3] == [Run(UNIFORM), Run(WINDOW_ONLY, 8), Run(WINDOW_ONLY, 16)]
    assert runs[3:] == [*(Run("full", count, seed) for count in (8, 16) for seed in (0, 1)), Run("elu")]
    assert plan_runs(["full+window"], [8], 1)[:2] == [Run(UNIFORM), Run(WINDOW_ONLY + "+window", 8)]
    both = plan_runs(["full", "full+window"], [8, 8], 1)
    assert [str(run) for run in both] == [
        *("uniform", "window-only, M = 8", "window-only+window, M = 8"),
        *("full, M = 8, seed 0", "full+window, M = 8, seed 0"),
    ]


def test_the_window_of_a_control_costs_as_much_as_what_it_stands_for():
    alone, ends = (
        configuration(Run(WINDOW_ONLY, 12), 8, (1, 1)),
        configuration(Run(WINDOW_ONLY + "+window", 12), 8, (1, 2)),
    )
    assert (alone.kernel, alone.exact_window, alone.exact_ends) == ("none", 12, (0, 0))
    assert (ends.kernel, ends.exact_window, ends.exact_ends) == ("none", 20, (1, 2))
    assert configuration(Run(WINDOW_ONLY + "+window", 128), (8, 8), (0, 0)).exact_window == (12, 16)


def test_the_ends_are_seen_with_a_window_only():
    model, batch = tiny_model(), token_batch(24)
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, -1] += 1
    for run, seen in ((Run(WINDOW_ONLY, 12), False), (Run(WINDOW_ONLY + "+window", 4), True)):
        with attention_replaced(model, run, 8, (1, 1), None):
            same = torch.equal(hidden_states(model, batch)[:12], hidden_states(model, changed)[:12])
        assert same != seen


@pytest.mark.parametrize("name", ["bert", "modernbert", "albert"])
def test_a_window_as_long_as_the_text_leaves_the_model_as_it_is(name):
    model, batch = tiny_model(name), token_batch(20, 13)
    before, state = hidden_states(model, batch), fingerprint(model)
    with attention_replaced(model, Run(WINDOW_ONLY, 20), *NO_WINDOW, None):
        torch.testing.assert_close(hidden_states(model, batch), before, rtol=1e-5, atol=1e-5)
    with attention_replaced(model, Run(WINDOW_ONLY + "+window", 12), 8, (1, 1), None):
        torch.testing.assert_close(hidden_states(model, batch), before, rtol=1e-5, atol=1e-5)
    with attention_replaced(model, Run(WINDOW_ONLY, 5), *NO_WINDOW, None):
        narrow = hidden_states(model, batch)
    with attention_replaced(model, Run(UNIFORM), *NO_WINDOW, None):
        uniform = hidden_states(model, batch)
    assert not torch.allclose(narrow, before, atol=1e-2)
    assert not torch.allclose(uniform, before, atol=1e-2)
    assert torch.equal(hidden_states(model, batch), before)
    assert fingerprint(model) == state


def test_padding_changes_no_control():
    model = tiny_model()
    alone, padded = token_batch(13), token_batch(13, length=19)
    for run in (Run(UNIFORM), Run(WINDOW_ONLY, 5)):
        with attention_replaced(model, run, *NO_WINDOW, None):
            torch.testing.assert_close(hidden_states(model, padded), hidden_states(model, alone))


def test_a_failed_run_reverts_the_model():
    model = tiny_model()
    state = fingerprint(model)
    for run in (Run(UNIFORM), Run("full", 8, 0), Run("calibrated-none", 8, 0)):
        with pytest.raises(ZeroDivisionError), attention_replaced(model, run, *NO_WINDOW, [token_batch(9)]):
            raise ZeroDivisionError
        assert fingerprint(model) == state


@pytest.mark.parametrize(("area", "tile"), [(128, (8, 16)), (192, (12, 16)), (113, (11, 11)), (1, (1, 1))])
def test_tiles_hold_at_least_what_they_should(area, tile):
    assert _tile(area) == tile
    assert tile[0] * tile[1] >= area
