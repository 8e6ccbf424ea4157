"""kernel_regression.py on small tables, and its parts against plain formulas."""

import json

import kernel_regression
import numpy as np
import pandas as pd
import pytest
import torch
from crt_table import beside, published_accuracies
from kernel_regression import main, regression
from uci_tables import CATEGORICAL, UciError, read_table, split_table

from hf_favorpp.features.estimators import ESTIMATORS, draw_omega, fit_estimator

WIDTHS = {"abalone": 8, "banknote": 4, "car": 6, "yeast": 8, "cmc": 9, "nursery": 8, "wifi": 7, "chess": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every table at 80 rows, whose label is a threshold of the first column, so that it can be learnt."""
    path = tmp_path_factory.mktemp("uci")
    generator = np.random.default_rng(0)
    for name, width in WIDTHS.items():
        table = pd.DataFrame(generator.normal(size=(80, width)))
        label = np.where(table[0] > 0, "high", "low")
        for index in CATEGORICAL[name]:
            table[index] = np.where(table[index] > 0, "b", "a")
        table[width] = label
        table.to_csv(path / ("chess_krkopt.csv" if name == "chess" else f"{name}.csv"), header=False, index=False)
    return path


def test_the_file_holds_what_other_programs_read(folder, tmp_path, capsys):
    output, details, figure = (tmp_path / "new" / name for name in ("out.json", "details.json", "figure.png"))
    methods, names = [*ESTIMATORS[:8], "exact"], ["banknote", "car"]
    words = ["--data_dir", str(folder), "--output_json", str(output), "--details_json", str(details), "--seeds", "2"]
    words += [
        "--methods",
        *methods,
        "--figure",
        str(figure),
        "--sigmas",
        "0.3",
        "1.0",
        "--datasets",
        *names,
        "--num_features",
        "64",
    ]
    main(words)
    found = json.loads(output.read_text())
    assert set(found) == {"accuracy", "average"}
    assert set(found["accuracy"]) == set(names)
    for row in found["accuracy"].values():
        assert list(row) == methods
        assert all(0 <= percent <= 100 for percent in row.values())
    for method, average in found["average"].items():
        assert average == pytest.approx(np.mean([found["accuracy"][name][method] for name in names]))
    assert found["accuracy"]["car"]["exact"] == 100, "a label that is a column can be learnt"
    cell = json.loads(details.read_text())["scores"]["car"]["OPRF"]
    assert np.mean(cell["test"]) == pytest.approx(found["accuracy"]["car"]["OPRF"])
    assert cell["sigma"] in (0.3, 1.0)
    assert figure.stat().st_size > 5000
    assert "(92.6)" in capsys.readouterr().out, "the paper's figure stands beside ours"


def test_sigma_is_chosen_by_the_validation_rows(folder, tmp_path, monkeypatch):
    """The best on the test rows is another."""
    scores = np.array([(50.0, 99.0), (80.0, 70.0), (60.0, 90.0)])
    monkeypatch.setattr(kernel_regression, "accuracies", lambda *_: scores)
    words = ["--data_dir", str(folder), "--output_json", str(tmp_path / "out.json"), "--sigmas", "0.1", "0.2", "0.4"]
    found = main([*words, "--datasets", "wifi", "--methods", "OPRF", "--seeds", "2"])
    assert found["accuracy"]["wifi"]["OPRF"] == 70


@pytest.mark.parametrize("name", ["TrigRF", "OPRF", "GeomRF", "GeomRF+"])
def test_the_summary_is_the_sum_over_all_keys(name):
    generator = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(count, 3, generator=generator, dtype=torch.float64) for count in (5, 11))
    values = torch.rand(11, 2, generator=generator, dtype=torch.float64)
    estimator = fit_estimator(name, queries, keys)
    omega = draw_omega(estimator, 40, 3, seed=1)
    plain = estimator.log_features(queries, omega).values() @ (
        estimator.log_features(keys, omega, of_keys=True).values().mT @ values
    )
    found = regression(estimator, omega, queries, keys, values)
    factors = found / plain
    assert torch.allclose(factors[:, 0], factors[:, 1], rtol=1e-8), "up to one factor of a query"
    assert (factors > 0).all()


def test_features_beyond_the_range_of_floats_still_classify():
    """At these distances every positive feature is 0 in float64, and the nearest key has no rival."""
    keys = 600 * torch.eye(4, dtype=torch.float64)
    queries = keys + 0.1
    estimator = fit_estimator("OPRF", queries, keys)
    omega = draw_omega(estimator, 4000, 4, seed=0)
    assert (estimator.log_features(queries, omega).values() == 0).all()
    scores = regression(estimator, omega, queries, keys, torch.eye(4, dtype=torch.float64))
    assert torch.equal(scores.argmax(-1), torch.arange(4))


def test_splits_are_scaled_by_the_training_rows_and_share_none(folder):
    columns, labels = read_table(folder, "banknote")
    split = split_table(columns, labels, "banknote", "onehot", seed=3)
    assert [len(split.train), len(split.validation), len(split.test)] == [72, 4, 4]
    assert torch.allclose(split.train.mean(0), torch.zeros(4, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(split.train.std(0, correction=0), torch.ones(4, dtype=torch.float64))
    rows = torch.cat((split.train, split.validation, split.test))
    assert len(torch.unique(rows, dim=0)) == 80
    assert not torch.equal(split.train, split_table(columns, labels, "banknote", "onehot", seed=4).train)


def test_names_become_columns_or_numbers(folder):
    columns, labels = read_table(folder, "abalone")
    assert split_table(columns, labels, "abalone", "onehot", seed=0).train.shape[1] == 9
    assert split_table(columns, labels, "abalone", "ordinal", seed=0).train.shape[1] == 8


def test_the_published_columns_that_are_complete_have_the_published_averages():
    table = published_accuracies()
    assert table[["TrigRF", "PosRF", "GERF"]].mean().round(1).tolist() == [35.5, 54.3, 56.1]


def test_cells_near_the_paper_are_counted():
    ours = pd.DataFrame({"OPRF": {"banknote": 90.0, "yeast": 50.0, "average": 70.0}, "exact": {"banknote": 1.0}})
    cells, summary = beside(ours.reindex(["banknote", "yeast", "average"]))
    assert cells.loc["banknote", "OPRF"] == "90.0 (92.6)"
    assert cells.loc["average", "OPRF"] == "70.0"
    assert summary == "1 of 2 published cells lie within 3 points."


def test_a_missing_table_is_refused_before_anything_is_computed(folder, tmp_path):
    with pytest.raises(UciError, match=r"banknote.csv is no file. --data_dir must hold abalone.csv"):
        main(["--data_dir", str(tmp_path), "--output_json", str(tmp_path / "out.json"), "--datasets", "banknote"])
    (tmp_path / "wifi.csv").write_text("1,2,x,1\n")
    with pytest.raises(UciError, match="column 3 of wifi must hold numbers"):
        read_table(tmp_path, "wifi")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "FavorRF"], "--methods must be some of TrigRF, "),
        (["--datasets", "iris"], "--datasets must be some of abalone, "),
        (["--sigmas", "0.0"], "--sigmas must be positive, finite numbers"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        main(["--data_dir", "somewhere", *words])
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([])
    assert "--data_dir is missing" in capsys.readouterr().err
