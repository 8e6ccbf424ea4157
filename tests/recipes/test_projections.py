"""projections.py at tiny sizes: closed forms against sampling, what orthogonality is worth, and what is refused."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from command_line import parse_arguments
from projections import ProjectionArguments, different_pairs, main, mean_factor
from scipy.special import hyp0f1

from hf_favorpp.features.gerf import oprf_coefficient, quadrature
from hf_favorpp.features.projection import draw_projections
from hf_favorpp.rules import NORMS, PROJECTIONS

ROOT = Path(__file__).parents[2]
PATH = ROOT / "configs" / "features" / "projections.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("projections")
    words = "--head_dims 4 16 --multiples 1 --sum_sq_norms 2 --num_pairs 20000 --timed_head_dims 4 8 --repeats 2"
    main([*words.split(), "--output_json", str(folder / "p.json"), "--figure", str(folder / "new" / "p.png")])
    return folder


@pytest.fixture(scope="module")
def results(folder):
    return json.loads((folder / "p.json").read_text())


@pytest.fixture(scope="module")
def errors(results):
    return {
        tuple(row[name] for name in ("projection", "norms", "estimator", "head_dim")): row for row in results["errors"]
    }


def test_there_is_one_row_for_each_measurement(results, errors):
    assert len(results["errors"]) == len(errors) == len(PROJECTIONS) * len(NORMS) * 2 * 2
    assert {(row["projection"], row["head_dim"]) for row in results["times"]} == {
        (projection, d) for projection in PROJECTIONS for d in (4, 8)
    }
    assert all(row["ms_per_block"] > 0 for row in results["times"])
    assert results["arguments"]["seed"] == 0
    assert results["hardware"]["threads"] >= 1


@pytest.mark.parametrize("d", [4, 16])
@pytest.mark.parametrize("estimator", ["FAVOR+", "OPRF"])
def test_orthogonal_projections_err_less_and_independent_ones_as_the_closed_form_says(errors, estimator, d):
    def ratio(projection, norms="chi"):
        row = errors[projection, norms, estimator, d]
        return row["mse_ratio"], row["standard_error"]

    independent, error = ratio("iid")
    assert abs(independent - 1) < 4 * error
    orthogonal, error = ratio("orthogonal")
    assert orthogonal < 1 - 4 * error
    for projection in ("hadamard", "givens"):  # the same angles and norms
        assert ratio(projection)[0] == pytest.approx(orthogonal, abs=4 * (error + ratio(projection)[1]))
        assert ratio(projection, "sqrt_d")[0] == pytest.approx(ratio("orthogonal", "sqrt_d")[0], abs=1e-4)


def test_only_norms_of_sqrt_d_are_biased_in_all_directions(errors):
    for (projection, norms, estimator, d), row in errors.items():
        assert (row["bias"] == 0) == (norms == "chi")
        if projection != "hadamard":  # near enough to uniform: no direction is special
            assert row["axis_bias"] == pytest.approx(row["bias"], abs=4.5 * row["axis_bias_error"]), (estimator, d)
    assert errors["hadamard", "chi", "FAVOR+", 4]["axis_bias"] < -0.005


@pytest.mark.parametrize("d", [4, 16])
def test_errors_of_rows_of_equal_norm_are_their_variance_and_their_bias(errors, d):
    """Rows are independent and uniform on a sphere: the moments of one give those of the mean of M = d."""
    u, row = 2, errors["iid", "sqrt_d", "FAVOR+", d]
    first, second = hyp0f1(d / 2, d * u / 4) * math.exp(-u / 2), hyp0f1(d / 2, d * u) * math.exp(-u)
    assert row["bias"] == pytest.approx(first - 1, abs=1e-6)
    expected = ((second - first**2) / d + (first - 1) ** 2) / (math.expm1(u) / d)
    assert row["mse_ratio"] == pytest.approx(expected, abs=4 * row["standard_error"])


@pytest.mark.parametrize("kernel", ["favor+", "favor++"])
def test_means_over_directions_are_those_of_sampled_ones(kernel):
    d, u = 4, 1.5
    omega = draw_projections(1, 6, d, seed=3).double()
    A = oprf_coefficient(torch.tensor([[u]], dtype=torch.float64), d) * (kernel == "favor++")
    nodes, log_weights = quadrature("favor++", omega, A)
    s = torch.randn(400_000, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    s = u**0.5 * torch.nn.functional.normalize(s, dim=-1)
    features = (log_weights[0] + s @ nodes[0].mT - u / 2).exp()
    torch.testing.assert_close(features.mean(0), mean_factor(nodes[0], log_weights[0], u), rtol=0.01, atol=0)
    squares = features.sum(-1).square() - features.square().sum(-1)
    torch.testing.assert_close(squares.mean(), different_pairs(nodes, log_weights, u)[0], rtol=0.01, atol=0)


def test_tables_and_figure_are_made_again_from_the_file(folder, results, capsys):
    figure = folder / "again.png"
    main(["--report_only", "true", "--output_json", str(folder / "p.json"), "--figure", str(figure)])
    printed = capsys.readouterr().out
    shown = re.search(r"\| orthogonal, chi\(d\) +\|(.*)\|\n", printed).group(1).split("|")
    assert [float(cell) for cell in shown] == [
        pytest.approx(row["mse_ratio"], abs=0.00501)
        for estimator in ("FAVOR+", "OPRF")
        for row in results["errors"]
        if (row["projection"], row["norms"], row["estimator"]) == ("orthogonal", "chi", estimator)
    ]
    assert figure.read_bytes() == (folder / "new" / "p.png").read_bytes()
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_the_configuration_says_how_it_is_run():
    header = PATH.read_text(encoding="utf-8")
    for part in (f"python recipes/projections.py --config configs/features/{PATH.name}", "Hardware: ", "Expected: "):
        assert part in header
    assert parse_arguments(ProjectionArguments, ["--config", str(PATH)]).head_dims == [4, 16, 64]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--head_dims", "4", "6"], r"--head_dims must be powers of two from 2 on, got \[4, 6\]"),
        (["--head_dims", "1"], "--head_dims must be powers of two"),
        (["--sum_sq_norms", "0"], r"--sum_sq_norms must be positive, finite numbers, one or more, got \[0.0\]"),
        (["--multiples", "-1"], "--multiples must be positive, finite numbers"),
        (["--num_pairs", "0"], "--num_pairs must be at least 1, got 0"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (
            ["--report_only", "true", "--output_json", "nothing.json"],
            "needs a file of results; .* nothing.json is none",
        ),
        (["--projection", "iid"], "unrecognized arguments|not used by the HfArgumentParser"),
    ],
)
def test_what_is_wrong_ends_the_program(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert re.search(message, capsys.readouterr().err)
