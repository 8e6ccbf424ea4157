"""Every YAML in configs/benchmark runs, and what is unknown or contradicts itself is an error."""

from __future__ import annotations

import re

import benchmark
import pytest
import torch
import yaml
from benchmark_arguments import BenchmarkArguments
from command_line import parse_arguments
from tiny_benchmark import make_models_tiny
from tiny_glue import ROOT

from hf_favorpp.benchmarking.models import MODELS

CONFIGS = sorted((ROOT / "configs" / "benchmark").glob("*.yaml"))
every_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


def parse(*argv: str) -> BenchmarkArguments:
    return parse_arguments(BenchmarkArguments, list(argv))


def test_there_is_a_config_of_each_kind():
    assert {path.stem for path in CONFIGS} >= {"attention_cpu", "attention_gpu", "bert", "vit", "speech"}


@every_config
def test_header_tells_command_hardware_and_expectation(path):
    header = path.read_text().partition("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    for part in (f"python recipes/benchmark.py --config configs/benchmark/{path.name}", "Hardware: ", "Expected: "):
        assert part in header


@every_config
def test_every_config_runs_at_tiny_sizes(path, tmp_path, monkeypatch, capsys, one_thread):
    make_models_tiny(monkeypatch)
    config = yaml.safe_load(path.read_text())
    images = config["model"] in MODELS and MODELS[config["model"]].images
    argv = [
        "--config",
        str(path),
        "--image_sizes" if images else "--lengths",
        *(["24", "40"] if images else ["16", "40"]),
    ]
    if config["model"] == "attention":
        argv += ["--num_heads", "2", "--head_dim", "8", "--peers", "false"]
    argv += ["--device", "cpu", "--num_threads", "1", "--num_features", "8", "--seconds_per_length", "0"]
    argv += ["--output_json", str(tmp_path / "out.json"), "--figure", str(tmp_path / "out.png")]
    results = benchmark.main(argv)
    assert len(results["rows"]) == 2 * len(config.get("backends", ["auto"]))
    assert all(row["forward_ms"] > 0 and row["train_ms"] > 0 for row in results["rows"])
    assert (tmp_path / "out.png").is_file()
    assert "Faster than SDPA from this length on" in capsys.readouterr().out


def test_defaults_are_those_of_the_device(monkeypatch):
    cpu = parse("--device", "cpu")
    assert (cpu.batch_size, cpu.num_heads, cpu.head_dim, cpu.dtype, cpu.num_threads) == (1, 12, 64, "float32", 2)
    assert cpu.sizes() == [128, 256, 512, 1024, 2048, 4096, 8192, 16384]
    assert cpu.output_json == "outputs/benchmark/attention_cpu.json"
    (config,) = cpu.configurations()
    assert (config.num_features, config.preconditioning, config.statistics) == (128, "center", "sequence")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu = parse()
    assert (gpu.device, gpu.batch_size, gpu.num_heads, gpu.head_dim, gpu.dtype) == ("cuda", 8, 16, 64, "bfloat16")
    assert gpu.sizes()[-1] == 65536
    assert gpu.num_threads is None
    assert parse("--config", str(ROOT / "configs" / "benchmark" / "attention_gpu.yaml")).device == "cuda"


def test_sizes_are_sorted_and_every_combination_is_one_configuration():
    args = parse("--device", "cpu", "--lengths", "64", "16", "64", "--num_features", "8", "16", "--backends", "auto")
    assert args.sizes() == [16, 64]
    args.preconditioning = ["none", "full"]
    args.backends = ["auto", "reference"]
    configs = args.configurations()
    assert len(configs) == len(set(configs)) == 8
    calibrated = parse("--device", "cpu", "--statistics", "calibrated").configurations()
    assert [config.preconditioning for config in calibrated] == ["full"]
    vit = parse("--device", "cpu", "--model", "vit", "--exact_window", "2", "3")
    assert vit.configurations()[0].exact_window == (2, 3)
    assert vit.sizes() == [224, 384, 518, 768, 1036, 1540]
    assert parse("--device", "cpu", "--model", "bert").sizes() == [512, 1024, 2048, 4096]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "cuda"], "needs a GPU.*use --device cpu"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--model", "gpt2"], "invalid choice: 'gpt2'"),
        (["--lengths", "0"], "--lengths must be at least 1"),
        (["--num_features", "8", "0"], "--num_features must be at least 1"),
        (["--max_seconds", "0"], "--max_seconds must be positive"),
        (["--passes", "backward"], "invalid choice: 'backward'"),
        (["--image_sizes", "32"], "--image_sizes has no meaning for --model attention; use --lengths"),
        (["--model", "vit", "--lengths", "32"], "--lengths has no meaning for --model vit; use --image_sizes"),
        (["--model", "bert", "--num_heads", "2"], "--num_heads is for --model attention"),
        (["--model", "bert", "--peers"], "--peers is for --model attention"),
        (["--exact_ends", "1"], "--exact_ends must be two numbers"),
        (["--exact_window", "2", "2"], "--exact_window must be a number of tokens"),
        (["--backends", "cuda"], "backend must be one of"),
        (["--kernel", "relu", "--preconditioning", "full"], "needs a kernel that estimates softmax"),
        (["--preconditioning", "whiten"], "preconditioning must be one of"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(argv, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_info:
        parse(*argv)
    assert exit_info.value.code == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


def test_an_unknown_key_is_refused(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("length: [8]\n")
    with pytest.raises(SystemExit):
        parse("--config", str(tmp_path / "config.yaml"))
    assert "unknown key 'length'. Did you mean 'lengths'?" in " ".join(capsys.readouterr().err.split())
