"""The Performer's figures: closed forms against draws, equal numbers of features, what is claimed, and the files."""

from __future__ import annotations

import json
import math
import re

import performer_figure2
import performer_figure4
import performer_figure14
import pytest
import torch
from command_line import parse_arguments
from performer_figure2 import FEATURES_PER_PROJECTION, KINDS, Figure2Arguments, estimates, log_mse, pairs
from performer_figure4 import METHODS, Figure4Arguments, check, output_error, projections_of
from performer_figure14 import RANDOM, Figure14Arguments
from tiny_glue import ROOT
from torch.nn.functional import scaled_dot_product_attention

from hf_favorpp.features.variance import (
    gerf_log_second_moment,
    hyperbolic_log_second_moment,
    relative_variance,
)

CONFIGS = {
    "performer_figure2": Figure2Arguments,
    "performer_figure4": Figure4Arguments,
    "performer_figure14": Figure14Arguments,
}
TINY_BERT = ["--hidden_size", "32", "--num_attention_heads", "2", "--num_hidden_layers", "3"]


def outputs(folder, suffix=".png"):
    return ["--output_json", str(folder / "new" / "out.json"), "--figure", str(folder / "fig" / f"out{suffix}")]


# --- Figure 2 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("phi", "length"), [(0.5, 0.5), (2.0, 0.8), (2.9, 1.2)])
def test_lemma_2_is_what_draws_give(kind, phi, length):
    angle = torch.tensor([phi], dtype=torch.float64)
    x, y = pairs(angle, length, 5)
    estimate = estimates(kind, x, y, 16, 20_000, seed=3)
    kernel = math.exp(length**2 * math.cos(phi))
    squared = (estimate - kernel).square()
    deviation = estimate.std() / math.sqrt(len(estimate)), squared.std() / math.sqrt(len(squared))
    assert abs(estimate.mean() - kernel) < 5 * deviation[0]
    exact = log_mse(kind, angle, torch.tensor(length, dtype=torch.float64), 16).exp()
    assert abs(squared.mean() - exact) < 5 * deviation[1]
    assert 5 * deviation[1] < 0.3 * exact  # a factor of 2, such as of projections for features, would be seen


@pytest.mark.parametrize("kind", KINDS)
def test_the_closed_form_is_that_of_the_paper(kind):
    angle, length = torch.tensor([[0.3, 1.2, 2.2, 3.0], [0.9] * 4], dtype=torch.float64)
    x, y = pairs(angle, 0.9, 2)
    z, delta, sm = (x + y).square().sum(-1), (x - y).square().sum(-1), (x * y).sum(-1).exp()
    m = 32 / FEATURES_PER_PROJECTION[kind]
    positive = z.exp() * sm**2 * (1 - (-z).exp()) / m
    expected = {
        "trigonometric": z.exp() / sm**2 * (1 - (-delta).exp()) ** 2 / (2 * m),
        "positive": positive,
        "hyperbolic": positive * (1 - (-z).exp()) / 2,
    }
    torch.testing.assert_close(log_mse(kind, angle, length, 32).exp(), expected[kind])
    if kind != "trigonometric":
        moment = gerf_log_second_moment(z, 0.0, 2) if kind == "positive" else hyperbolic_log_second_moment(z)
        torch.testing.assert_close(expected[kind], sm**2 * relative_variance(moment) / m)


def test_nothing_overflows_or_cancels():
    angle = torch.tensor([1e-9, math.pi - 1e-9], dtype=torch.float64)
    for kind in KINDS:
        assert torch.isfinite(log_mse(kind, angle, torch.tensor(50.0).double(), 8)).all()
    near = log_mse("positive", angle[1:], torch.tensor(1.0).double(), 1)
    assert near.item() == pytest.approx(2 * math.log(1e-9) - 2, abs=1e-6)  # |x + y|^2 SM^2


def test_figure_2_runs(tmp_path, capsys):
    argv = ["--grid", "20", "--angles", "5", "--draws", "300", "--num_features", "16", "--head_dim", "4"]
    results = performer_figure2.main([*argv, *outputs(tmp_path)])
    assert json.loads((tmp_path / "new" / "out.json").read_text()) == json.loads(json.dumps(results))
    assert (tmp_path / "fig" / "out.png").read_bytes().startswith(b"\x89PNG")
    assert [len(results["drawn"][kind]["mse"]) for kind in KINDS] == [5, 5, 5]
    assert {len(curve) for curve in results["log_mse"].values()} == {20}
    claims = {claim["statement"]: claim for claim in results["claims"]}
    held = [claim["holds"] for claim in claims.values()]
    assert held == [True, True, False, True, True, True], claims
    printed = capsys.readouterr().out
    assert all(statement in printed for statement in claims)


# --- Figure 4 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_methods_have_equally_many_features(name):
    method = METHODS[name]
    omega = projections_of(method, 24, 8, seed=0, draw=1)
    assert omega.shape == (1, 24 // method.features_per_projection, 8)
    assert (method.features_per_projection == 2) == (method.kernel == "trig")
    gram = omega[0, :8] @ omega[0, :8].T
    off_diagonal = (gram - gram.diagonal().diag()).abs().max()
    assert (off_diagonal < 1e-4) == (method.projection == "orthogonal")
    assert not torch.equal(omega, projections_of(method, 24, 8, seed=0, draw=2))


def test_the_error_is_that_of_the_plainest_formula():
    query, key, value = torch.randn(3, 1, 1, 20, 4, generator=torch.Generator().manual_seed(0)).double()
    exact = scaled_dot_product_attention(query, key, value)
    method = METHODS["positive, iid"]
    omega = projections_of(method, 6, 4, seed=0, draw=0)
    x, y, w = query[0, 0] / 2**0.5, key[0, 0] / 2**0.5, omega[0].double()
    weights = (
        torch.exp(x @ w.T - x.square().sum(-1, keepdim=True) / 2)
        @ torch.exp(y @ w.T - y.square().sum(-1, keepdim=True) / 2).T
    )
    expected = (weights @ value[0, 0] / weights.sum(-1, keepdim=True) - exact[0, 0]).square().mean()
    assert output_error(query, key, value, exact, omega, method) == pytest.approx(expected.item())


def test_figure_4_runs_and_its_order_is_found_where_there_are_many_draws(tmp_path, capsys):
    argv = ["--num_features", "16", "32", "--stds", "0.6", "--length", "96", "--head_dim", "8", "--draws", "60"]
    results = performer_figure4.main([*argv, *outputs(tmp_path, ".svg")])
    assert json.loads((tmp_path / "new" / "out.json").read_text()) == json.loads(json.dumps(results))
    assert "<svg" in (tmp_path / "fig" / "out.svg").read_text()
    (panel,) = results["panels"]
    assert list(panel["mse"]) == list(METHODS)
    assert all(len(draws) == 60 for errors in panel["mse"].values() for draws in errors)
    held = {claim["statement"]: claim["holds"] for claim in results["claims"]}
    assert held["orthogonal projections are better than iid ones, positive features"]
    assert held["positive features are better than trigonometric ones, iid"]
    assert held["FAVOR++ is better than positive features, orthogonal (not in the paper)"]
    assert "| claim" in capsys.readouterr().out


def test_a_claim_that_is_not_met_does_not_hold():
    errors = {name: [[1.0, 1.1], [1.0, 1.2]] for name in METHODS}
    errors["positive, orthogonal"] = [[0.5, 0.5], [2.0, 2.0]]
    claims = check([8, 16], [{"std": 1.0, "mse": errors, "mse_of_mean_value": [0.9, 0.9]}])
    assert not claims[0].holds
    assert re.search(r"lower at 1 of 2 M, .* at 1 \(higher so at 1\), 1.8 times", claims[0].measured)
    assert "positive, orthogonal from M = 8 on" in claims[-1].measured


# --- Figure 14 ----------------------------------------------------------------------------------------------------


def test_figure_14_runs(tiny_bert, tmp_path, capsys):
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": "a " * n}) + "\n" for n in (3, 9)))
    argv = ["--model_name_or_path", str(tiny_bert), "--data_file", str(data), "--sequences", "2", "--seeds", "2"]
    argv += ["--length", "16", "--num_features", "8", "--initializer_range", "0.2", *TINY_BERT]
    results = performer_figure14.main([*argv, *outputs(tmp_path)])
    assert json.loads((tmp_path / "new" / "out.json").read_text()) == json.loads(json.dumps(results))
    random, pretrained = (results["relative_error"][name] for name in (RANDOM, tiny_bert.name))
    assert [[len(layers) for layers in runs] for runs in random.values()] == [[3, 3]] * 5
    assert [len(runs) for runs in pretrained.values()] == [2, 2, 2, 2, 1]
    assert all(0 < error < 2 for runs in random.values() for layers in runs for error in layers)
    assert random["favor+"][0] != random["favor+"][1]
    assert results["real_tokens"] == 3 + 9 + 2 * 2  # with [CLS] and [SEP]
    assert f"{RANDOM}, favor+: the error grows with each layer" in capsys.readouterr().out


def test_padding_is_not_compared_and_the_model_is_itself_again():
    args = Figure14Arguments(hidden_size=32, num_attention_heads=2, num_hidden_layers=2, length=12, sequences=2)
    model, batch = next(performer_figure14.random_models(args))
    softmax = performer_figure14.hidden_states(model, batch)
    run = performer_figure14.Run("favor++", 4, 0)
    own = performer_figure14.layer_errors(model, batch, softmax, run)
    padded = {name: torch.nn.functional.pad(tensor, (0, 5)) for name, tensor in batch.items()}
    softmax_of_padded = performer_figure14.hidden_states(model, padded)
    torch.testing.assert_close(softmax_of_padded, softmax)
    assert performer_figure14.layer_errors(model, padded, softmax_of_padded, run) == pytest.approx(own, rel=1e-3)


def test_too_few_texts_end_the_program(tmp_path):
    data = tmp_path / "texts.jsonl"
    data.write_text('{"text": "one"}\n')
    with pytest.raises(performer_figure14.GlueDataError, match="--sequences 4 need as many texts, there are 1"):
        performer_figure14.texts(Figure14Arguments(data_file=str(data)))


def test_film_reviews_are_joined_where_no_file_is_given(review_archive):
    found = performer_figure14.texts(Figure14Arguments(length=16, sequences=2))
    sentences = performer_figure14.load_movie_reviews()["validation"]["sentence"]
    assert found == [" ".join(sentences[:2]), " ".join(sentences[2:4])]


# --- configurations and arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_parses_and_its_header_tells_what_it_does(name):
    path = ROOT / "configs" / "features" / f"{name}.yaml"
    args = parse_arguments(CONFIGS[name], ["--config", str(path)])
    assert args.output_json == f"outputs/features/{name}.json"
    header = path.read_text().partition("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    for part in (f"python recipes/{name}.py --config configs/features/{name}.yaml", "Hardware: ", "Expected: "):
        assert part in header


@pytest.mark.parametrize(
    ("kind", "argv", "message"),
    [
        (Figure2Arguments, ["--num_features", "7"], "--num_features must be even.*got 7"),
        (Figure2Arguments, ["--length", "0"], "--length must be positive and finite, got 0"),
        (Figure2Arguments, ["--head_dim", "1"], "--head_dim must be at least 2, got 1"),
        (Figure2Arguments, ["--figure", "x.jpg"], "--figure must end with .png or .svg, got 'x.jpg'"),
        (Figure2Arguments, ["--seed", "-1"], "--seed must be at least 0"),
        (Figure4Arguments, ["--num_features", "8", "9"], "--num_features must be even.*got 9"),
        (Figure4Arguments, ["--stds", "1", "-1"], "--stds must be positive, finite numbers"),
        (Figure4Arguments, ["--draws", "1"], "--draws must be at least 2, got 1"),
        (Figure14Arguments, ["--methods", "calibrated-full"], "--methods must be of favor.*; got 'calibrated-full'"),
        (Figure14Arguments, ["--hidden_size", "50"], "--hidden_size must be a multiple of --num_attention_heads"),
        (Figure14Arguments, ["--seeds", "1"], "--seeds must be at least 2, got 1"),
        (Figure14Arguments, ["--layers", "3"], "unrecognized arguments|not used"),
    ],
)
def test_wrong_arguments_are_refused(kind, argv, message, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(kind, argv)
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
