"""benchmark.py from end to end at tiny sizes: the fixed command and its JSON, models, limits, reports."""

from __future__ import annotations

import json
import subprocess
import sys

import benchmark
import pytest
import torch
from benchmark import BenchmarkError
from tiny_benchmark import make_models_tiny
from tiny_glue import RECIPES, ROOT

from hf_favorpp.benchmarking import attention as benchmark_attention
from hf_favorpp.benchmarking.lineup import softmax_attend
from hf_favorpp.benchmarking.models import MODELS

FIXED = {
    **{"length": int, "backend": str, "forward_ms": float, "sdpa_forward_ms": float, "forward_speedup": float},
    **{"train_ms": float, "sdpa_train_ms": float, "train_speedup": float, "peak_mib": float},
}
SMALL = ["--num_heads", "2", "--head_dim", "8", "--num_threads", "1", "--seconds_per_length", "0"]


def command(output, *more, small=True):
    return ["--device", "cpu", "--output_json", str(output), *(SMALL if small else SMALL[4:]), *more]


def require_schema(row):
    for key, kind in FIXED.items():
        assert isinstance(row[key], kind), key
    assert row["forward_speedup"] == pytest.approx(row["sdpa_forward_ms"] / row["forward_ms"])
    assert row["train_speedup"] == pytest.approx(row["sdpa_train_ms"] / row["train_ms"])


def test_the_fixed_command_writes_the_fixed_rows(tmp_path, child_environment):
    output = tmp_path / "out.json"
    argv = ["--device", "cpu", "--lengths", "24", "16", "--num_features", "8", "--output_json", str(output)]
    argv += ["--seconds_per_length", "0"]
    run = subprocess.run(
        [sys.executable, "-W", "error", "recipes/benchmark.py", *argv],
        cwd=ROOT,
        env=child_environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    results = json.loads(output.read_text())
    assert [row["length"] for row in results["rows"]] == [16, 24]
    for row in results["rows"]:
        require_schema(row)
    assert results["command"] == f"python recipes/benchmark.py {' '.join(argv)}"
    assert {"torch", "transformers"} <= set(results["versions"])
    assert results["hardware"]["threads"] == 2
    assert str(RECIPES) not in output.read_text()
    assert "Faster than SDPA from this length on:" in run.stdout


def test_one_row_per_length_and_configuration(tmp_path, one_thread):
    more = ["--lengths", "8", "16", "--num_features", "4", "8", "--backends", "auto", "reference"]
    results = benchmark.main(command(tmp_path / "out.json", *more, "--preconditioning", "none", "full"))
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(json.dumps(results))
    keys = [
        (row["length"], row["requested_backend"], row["num_features"], row["preconditioning"])
        for row in results["rows"]
    ]
    assert len(keys) == len(set(keys)) == 16
    assert len(results["crossovers"]) == 8
    assert all(row["backend"] == "reference" for row in results["rows"] if row["requested_backend"] == "reference")
    for row in results["rows"]:
        require_schema(row)
        assert row["error_to_reference"] < 1e-3
        assert 0 < row["forward_min_ms"] <= row["forward_ms"] <= row["forward_max_ms"]
        assert row["forward_repetitions"] >= 2
        assert row["sdpa_peak_mib"] > 0
        assert row["reasons"] == {}
    by_length = {(row["length"], row["sdpa_forward_ms"]) for row in results["rows"]}
    assert len(by_length) == 2, "SDPA is timed once at each length"


@pytest.mark.parametrize("name", MODELS)
def test_models(name, tmp_path, monkeypatch, capsys, one_thread):
    make_models_tiny(monkeypatch)
    sizes = ["--image_sizes", "16", "32"] if MODELS[name].images else ["--lengths", "8", "20"]
    argv = command(tmp_path / "out.json", "--model", name, *sizes, "--num_features", "8", small=False)
    results = benchmark.main([*argv, "--figure", str(tmp_path / "out.png")])
    assert [row["length"] for row in results["rows"]] == ([5, 17] if MODELS[name].images else [8, 20])
    for row in results["rows"]:
        require_schema(row)
        for kind in ("forward", "train"):
            assert row[f"{kind}_over_identity"] == pytest.approx(row[f"{kind}_ms"] / row[f"identity_{kind}_ms"])
    if MODELS[name].images:
        assert [row["image_size"] for row in results["rows"]] == [16, 32]
    printed = capsys.readouterr().out
    assert MODELS[name].title in printed
    assert "identity" in printed


def test_only_what_is_asked_for_is_measured(tmp_path, one_thread):
    argv = command(tmp_path / "out.json", "--lengths", "8", "--num_features", "4", "--passes", "forward")
    (row,) = benchmark.main(argv)["rows"]
    assert row["forward_ms"] > 0
    assert row["train_ms"] is row["peak_mib"] is None
    assert row["reasons"] == {"train_ms": "not asked for", "sdpa_train_ms": "not asked for"}


def test_where_softmax_runs_out_of_memory_the_others_finish(tmp_path, monkeypatch, capsys, one_thread):
    def attend(query, key, value):
        if query.shape[-2] > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return softmax_attend(query, key, value)

    monkeypatch.setattr("hf_favorpp.benchmarking.lineup.softmax_attend", attend)
    results = benchmark.main(command(tmp_path / "out.json", "--lengths", "8", "16", "32", "--num_features", "4"))
    first, second, third = results["rows"]
    require_schema(first)
    for row, reason in ((second, "out of memory"), (third, "out of memory (at length 16)")):
        assert row["sdpa_forward_ms"] is row["train_speedup"] is None
        assert row["forward_ms"] > 0
        assert row["train_ms"] > 0
        assert row["reasons"] == {"sdpa_forward_ms": reason, "sdpa_train_ms": reason}
    assert "length 16: sdpa, forward: out of memory" in capsys.readouterr().out


def test_lengths_that_would_take_too_long_are_left_out(tmp_path, monkeypatch, one_thread):
    import time

    def attend(query, key, value):
        time.sleep(0.05)
        return softmax_attend(query, key, value)

    monkeypatch.setattr("hf_favorpp.benchmarking.lineup.softmax_attend", attend)
    more = ["--lengths", "8", "80", "--num_features", "4", "--max_seconds", "2"]
    first, second = benchmark.main(command(tmp_path / "out.json", *more))["rows"]
    assert first["sdpa_forward_ms"] >= 50
    assert second["sdpa_forward_ms"] is None
    assert " s a call expected from length 8, more than 2 s" in second["reasons"]["sdpa_forward_ms"]
    assert second["forward_ms"] > 0


def test_rows_are_written_as_they_are_measured(tmp_path, monkeypatch, one_thread):
    lineup = benchmark_attention.attention_lineup

    def stop_at_16(length, **options):
        if length == 16:
            raise KeyboardInterrupt
        return lineup(length, **options)

    monkeypatch.setattr(benchmark, "attention_lineup", stop_at_16)
    with pytest.raises(KeyboardInterrupt):
        benchmark.main(command(tmp_path / "out.json", "--lengths", "8", "16", "--num_features", "4"))
    assert [row["length"] for row in json.loads((tmp_path / "out.json").read_text())["rows"]] == [8]


def test_peers_take_part_and_those_that_are_missing_are_named(tmp_path, monkeypatch, capsys, one_thread):
    peers = {"peer": lambda shape, num_features: softmax_attend}
    monkeypatch.setattr(benchmark, "installed_peers", lambda: (peers, {"other": "left out, cannot be imported"}))
    results = benchmark.main(command(tmp_path / "out.json", "--lengths", "8", "--num_features", "4", "--peers"))
    (row,) = results["rows"]
    assert row["peers"]["peer"]["forward_speedup"] == pytest.approx(
        row["peers"]["peer"]["forward_ms"] / row["forward_ms"]
    )
    assert row["peers"]["peer"]["train_ms"] > 0
    assert results["left_out"] == {"other": "left out, cannot be imported"}
    assert "other: left out, cannot be imported" in capsys.readouterr().out


def test_report_only_measures_nothing(tmp_path, monkeypatch, capsys, one_thread):
    output = tmp_path / "out.json"
    benchmark.main(command(output, "--lengths", "8", "16", "--num_features", "4"))
    capsys.readouterr()
    monkeypatch.setattr(benchmark, "measure", None)
    figure = tmp_path / "out.svg"
    argv = ["--output_json", str(output), "--report_only", "--markdown", "--figure", str(figure)]
    assert len(benchmark.main(argv)["rows"]) == 2
    assert "| length   |" in capsys.readouterr().out.replace("|   length |", "| length   |")
    assert figure.read_text().startswith("<?xml")
    with pytest.raises(BenchmarkError, match=r"missing\.json does not exist"):
        benchmark.main(["--report_only", "--output_json", str(tmp_path / "missing.json")])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["attention", "bert"])
def test_on_a_gpu(name, tmp_path, monkeypatch):
    make_models_tiny(monkeypatch)
    argv = ["--device", "cuda", "--model", name, "--lengths", "128", "256", "--num_features", "16"]
    results = benchmark.main([*argv, "--seconds_per_length", "1", "--output_json", str(tmp_path / "out.json")])
    for row in results["rows"]:
        require_schema(row)
        assert row["sdpa_forward_backend"] in ("flash", "efficient", "cudnn")
        assert row["flash_forward_ms"] > 0
        if name == "attention":
            assert 0 < row["floor_fraction"] < 1
