"""Every YAML in configs/fidelity runs, and what is unknown or contradicts itself is an error."""

from __future__ import annotations

import re

import fidelity
import pytest
import yaml
from command_line import parse_arguments
from fidelity_arguments import FidelityArguments
from fidelity_methods import plan_runs
from tiny_fidelity import command, write_data, write_vit
from tiny_glue import ROOT

CONFIGS = sorted((ROOT / "configs" / "fidelity").glob("*.yaml"))


def test_there_is_a_config_of_each_kind():
    names = {path.stem for path in CONFIGS}
    assert names >= {"minilm_stsb", "minilm_imdb", "minilm_far", "vit_hymenoptera"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_header_tells_command_hardware_and_expectation(path):
    header = path.read_text().partition("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    for part in (f"python recipes/fidelity.py --config configs/fidelity/{path.name}", "Hardware: ", "Expected: "):
        assert part in header
    assert "shared/data" not in path.read_text()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_one_draw_of_every_config(path, tiny_bert, tmp_path, capsys, one_thread):
    config = yaml.safe_load(path.read_text())
    task = config["task"]
    if task == "audio":
        pytest.skip("tested in test_fidelity_run.py")
    files = write_data(tmp_path / "data")[task] if (tmp_path / "data").mkdir() is None else {}
    model = write_vit(tmp_path / "vit") if task == "image" else tiny_bert
    more = {} if task == "image" else {"max_length": 96}
    if "transfer_steps" in config:
        more |= {"transfer_steps": 3, "align_steps": 2}
    argv = command(task, model, files, tmp_path / "out.json", figure=tmp_path / "out.png", **more)
    results = fidelity.main(["--config", str(path), *argv])
    assert len(results["runs"]) == len(plan_runs(config["methods"], [8], 1))
    assert (tmp_path / "out.png").is_file()
    printed = capsys.readouterr().out
    assert all(name in printed for name in config["methods"])


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_info:
        parse_arguments(FidelityArguments, argv)
    assert exit_info.value.code == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--task sts needs --data_file"),
        (["--task", "far", "--data_file", "x"], "--task far needs --filler_file"),
        (["--task", "words"], "invalid choice: 'words'"),
        (["--data_file", "x", "--dat_file", "x"], "unrecognized arguments|not used"),
        (["--data_file", "x", "--methods", "favor"], "--methods must be of favor.*got 'favor'"),
        (["--data_file", "x", "--methods", "full+window"], "full.window needs --exact_window"),
        (["--data_file", "x", "--methods", "relu+window", "--exact_window", "8"], "kernel='relu'"),
        (["--data_file", "x", "--exact_window", "8"], "there is none"),
        (["--data_file", "x", "--methods", "full+window", "--exact_window", "8", "8"], "must be a number of tokens"),
        (["--data_file", "x", "--exact_ends", "1"], "--exact_ends must be two numbers"),
        (["--data_file", "x", "--num_features", "0"], "--num_features must be at least 1"),
        (["--data_file", "x", "--seeds", "0"], "--seeds must be at least 1"),
        (["--data_file", "x", "--filler_file", "y"], "--filler_file is for --task far"),
        (["--task", "image", "--data_file", "x", "--max_length", "9"], "no meaning for images"),
        (["--task", "audio", "--data_file", "x", "--batch_size", "2"], "one recording at a time"),
        (["--task", "audio", "--data_file", "x", "--joined_seconds", "0"], "must be positive"),
        (["--task", "audio", "--data_file", "x", "--joined_seconds", "2", "--max_length", "9"], "not both"),
        (["--data_file", "x", "--joined_seconds", "2"], "--joined_seconds is for --task audio"),
        (["--task", "far", "--data_file", "x", "--filler_file", "y", "--max_length", "9"], "at least 64 for far"),
        (
            ["--data_file", "x", "--methods", "learnt-full"],
            r"learnt, \['learnt-full'\], and --transfer_steps .* need each",
        ),
        (["--data_file", "x", "--methods", "full", "--transfer_steps", "5"], r"learnt, \[\], and --transfer_steps"),
        (
            ["--data_file", "x", "--methods", "learnt-full", "--transfer_steps", "0"],
            "--transfer_steps must be at least 1",
        ),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(argv, message, capsys):
    assert re.search(message, refusal(argv, capsys))


def test_an_unknown_key_is_refused(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("num_feature: 8\n")
    message = refusal(["--config", str(tmp_path / "config.yaml")], capsys)
    assert "unknown key 'num_feature'. Did you mean 'num_features'?" in message


def test_the_task_fills_in_what_is_not_given():
    sts = parse_arguments(FidelityArguments, ["--data_file", "x", "--methods", "full"])
    assert (sts.max_length, sts.batch_size, sts.output_json) == (128, 64, "outputs/fidelity/sts.json")
    audio = parse_arguments(FidelityArguments, ["--task", "audio", "--data_file", "x", "--methods", "full"])
    assert (audio.max_length, audio.batch_size) == (None, 1)
    assert sts.window() == 0
    tile = ["--task", "image", "--data_file", "x", "--methods", "full+window", "--exact_window", "4", "8"]
    assert parse_arguments(FidelityArguments, tile).window() == (4, 8)
