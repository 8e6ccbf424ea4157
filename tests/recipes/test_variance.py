"""variance.py: what it writes, the claims that it checks, and the digits it reads."""

import gzip
import json
import struct

import pytest
import torch
from handwritten_digits import IMAGES, DigitsError, load_digits, standardise
from variance import METHODS, check_claims, main, oprf_gain

from hf_favorpp.features.exponential import ExponentialFeatures
from hf_favorpp.features.gerf import oprf_coefficient


def write_mnist(folder, count=30):
    pixels = torch.randint(0, 256, (count, 28, 28), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    folder.mkdir()
    content = struct.pack(">IIII", 2051, count, 28, 28) + pixels.numpy().tobytes()
    (folder / IMAGES).write_bytes(gzip.compress(content))
    return pixels


def test_the_file_holds_what_other_programs_read(tmp_path, capsys):
    output, claims, figure, gain = (tmp_path / "new" / name for name in ("a.json", "b.json", "c.png", "d.png"))
    words = ["--output_json", str(output), "--claims_json", str(claims), "--figure", str(figure)]
    words += ["--gain_figure", str(gain), "--trials", "1", "--num_points", "8", "--sigmas", "0.3", "1.0"]
    main(words)
    found = json.loads(output.read_text())
    assert list(found) == ["normal", "sphere", "heterogen", "mnist"]
    for methods in found.values():
        assert set(methods) == set(METHODS)
        for entries in methods.values():
            assert list(entries) == ["0.3", "1.0"]
            assert all(set(entry) == {"mean", "std"} for entry in entries.values())
    recorded = json.loads(claims.read_text())
    assert {row["points"] for row in recorded["claims"]} >= {"normal", "heterogen", "mnist"}
    assert "GERF below TrigRF" in capsys.readouterr().out
    assert min(figure.stat().st_size, gain.stat().st_size) > 5000
    normal = found["normal"]
    assert normal["TrigRF"]["1.0"]["mean"] - normal["GERF"]["1.0"]["mean"] > 70
    assert normal["PosRF"]["1.0"]["mean"] - normal["OPRF"]["1.0"]["mean"] > 70
    heterogen = found["heterogen"]
    assert heterogen["PosRF"]["1.0"]["mean"] - heterogen["OPRF"]["1.0"]["mean"] > 120
    assert found["sphere"]["PosRF"]["1.0"]["mean"] - found["sphere"]["OPRF"]["1.0"]["mean"] < 1
    assert abs(normal["GERF"]["1.0"]["mean"] - normal["OPRF"]["1.0"]["mean"]) < 1


def test_a_claim_holds_where_the_difference_is_larger():
    values = {"TrigRF": -0.7, "GERF": -82.0, "PosRF": 0.0, "OPRF": -70.0}
    table = check_claims({"normal": {name: {"1.0": {"mean": mean, "std": 0.0}} for name, mean in values.items()}})
    assert table["holds"].tolist() == [True, False, True]
    assert table["here (nats)"].tolist()[:2] == [81.3, 70.0]


def test_the_gain_is_that_of_the_estimators():
    x, y = torch.full((64,), 0.5, dtype=torch.float64), torch.full((64,), 0.75, dtype=torch.float64)
    u = (x + y).square().sum()
    assert u == 100
    best = ExponentialFeatures(oprf_coefficient(u, 64).item(), 1)
    expected = ExponentialFeatures(0.0, 1).log_second_moment(x, y) - best.log_second_moment(x, y)
    assert oprf_gain(u, 64).item() == pytest.approx(expected.item(), abs=1e-6)
    assert oprf_gain(u, 64) > 60


def test_images_become_points_between_0_and_1(tmp_path):
    write_mnist(tmp_path / "mnist")
    digits = load_digits(tmp_path / "mnist")
    assert digits.shape == (30, 64)
    assert digits.min() >= 0
    assert digits.max() <= 1
    assert load_digits(None).shape == (1797, 64)
    assert load_digits(None).max() == 1


def test_standardised_points_have_mean_0_and_variance_1():
    points = standardise(load_digits(None))
    varying = points.std(0) > 0
    assert torch.allclose(points.mean(0), torch.zeros(64, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(points.std(0)[varying], torch.ones(int(varying.sum()), dtype=torch.float64))
    assert (~varying).any()


def test_what_is_no_mnist_is_refused(tmp_path):
    with pytest.raises(DigitsError, match="is no file"):
        load_digits(tmp_path)
    (tmp_path / IMAGES).write_bytes(gzip.compress(struct.pack(">IIII", 2049, 1, 2, 2) + bytes(4)))
    with pytest.raises(DigitsError, match="is no idx file of images: it begins with 2049"):
        load_digits(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--regimes", "uniform"], "--regimes must be some of normal, "),
        (["--methods", "FavorRF"], "--methods must be some of TrigRF, "),
        (["--sigmas", "-1.0"], "--sigmas must be positive, finite numbers"),
        (["--trials", "0"], "--trials must be at least 1, got 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert message in capsys.readouterr().err
