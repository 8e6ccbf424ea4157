"""Every YAML in configs/speech runs, and what contradicts itself is an error."""

from __future__ import annotations

import json
import re

import pytest
import speech
import yaml
from command_line import parse_arguments
from speech_arguments import SpeechArguments
from stage_refusals import STAGES_REFUSED
from tiny_glue import ROOT
from tiny_speech import TINY_SPECTRA, save_encoder, write_digits
from transformers import AutoConfig
from uptraining import ModelError, override

CONFIGS = sorted((ROOT / "configs" / "speech").glob("*.yaml"))
CHECKPOINTS = {"conformer_rope": "rotary", "conformer_rel_pos": "relative"}
DIGITS = ("spoken_digits_softmax", "spoken_digits")


def stem(path):
    return path.stem


def test_every_config_is_known():
    assert {path.stem for path in CONFIGS} == {*CHECKPOINTS, "quickstart", *DIGITS}


@pytest.mark.parametrize("path", CONFIGS, ids=stem)
def test_header_tells_command_hardware_and_expectation(path):
    header = path.read_text().partition("\n\n")[0]
    assert all(line.startswith("#") and len(line) <= 125 for line in header.splitlines())
    for part in ("accelerate launch", f"--config configs/speech/{path.name}", "Hardware: ", "Expected: "):
        assert part in header


def test_checkpoints_differ_in_positions_only():
    one, other = (yaml.safe_load((ROOT / f"configs/speech/{name}.yaml").read_text()) for name in CHECKPOINTS)
    only = {"model_name_or_path", "output_dir"}
    assert {key for key in {*one, *other} if one.get(key) != other.get(key)} == only


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory, hub_speech):
    """Arguments of two steps of every configuration, with made-up recordings and tiny models."""
    folder = tmp_path_factory.mktemp("speech-configs")
    digits = write_digits(folder / "digits")
    tiny = ["--config_overrides", json.dumps(TINY_SPECTRA)]
    softmax = folder / "softmax"
    strings = ["--data_dir", str(digits), "--num_strings", "16"]
    more = {
        "quickstart": ["--num_strings", "16", *tiny],
        "spoken_digits_softmax": [*strings, *tiny],
        "spoken_digits": [*strings, "--model_name_or_path", str(softmax)],
    }
    splits = [
        "--train_split_name",
        "train",
        "--validation_split_name",
        "validation",
        "--dataset_config_name",
        "default",
    ]
    for name, positions in CHECKPOINTS.items():
        model = save_encoder(folder / name, "conformer", position_embeddings_type=positions)
        more[name] = ["--dataset_name", str(hub_speech), "--model_name_or_path", str(model), *splits]
    shared = ["--max_train_steps", "2", "--max_eval_samples", "5", "--per_device_train_batch_size", "4"]
    shared += ["--num_features", "8", "--num_workers", "0"]  # softmax leaves the first of them out
    words = {
        name: ["--config", str(ROOT / f"configs/speech/{name}.yaml"), *shared, *own] for name, own in more.items()
    }
    speech.main([*words["spoken_digits_softmax"], "--output_dir", str(softmax)])
    return words


@pytest.mark.parametrize("path", CONFIGS, ids=stem)
def test_two_steps_of_every_config(path, two_steps, tmp_path, capfd):
    speech.main([*two_steps[path.stem], "--output_dir", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["metrics"]) == {"wer", "cer"}
    assert results["completed_steps"] == 2
    assert results["train_frames"] > 0
    assert results["skipped_files"] == {"count": 0, "names": []}
    assert {"torch", "transformers", "jiwer", "soundfile", "soxr"} <= set(results["versions"])
    written = yaml.safe_load(path.read_text())
    assert ("softmax_metrics" in results) == written.get("twin", False)
    assert ("initial_metrics" in results) == written.get("evaluate_first", False)
    assert (results["favorpp"] or {}).get("num_features") == (None if written["attention"] == "softmax" else 8)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == (
        "wav2vec2-conformer" if path.stem in CHECKPOINTS else "wav2vec2-bert"
    )
    printed = capfd.readouterr().out
    assert "the same logits" in printed
    assert "training frames / s" in printed


CONTROLS = [
    ("spoken_digits", "--attention", "softmax"),
    ("spoken_digits", "--attention", "uniform"),
    ("spoken_digits", "--preconditioning", "full"),
    ("conformer_rope", "--attention", "softmax"),
    ("conformer_rope", "--attention", "favor+", "--preconditioning", "none"),
    ("conformer_rel_pos", "--attention", "softmax"),
    ("conformer_rel_pos", "--attention", "favor+", "--preconditioning", "none"),
]


@pytest.mark.parametrize("control", CONTROLS, ids=lambda words: f"{words[0]} {words[2]}")
def test_the_controls_that_the_headers_name_run(control, two_steps, tmp_path):
    name, *words = control
    results = speech.main([*two_steps[name], *words, "--output_dir", str(tmp_path)])
    assert results["arguments"][words[0].removeprefix("--")] == words[1]
    assert (results["favorpp"] is None) == (words[1] == "softmax")


def test_a_mapping_of_a_file_arrives_as_it_is(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "dataset_name: dial_tones\nmodel_type: wav2vec2\nconfig_overrides:\n  conv_dim: [4, 8]\n  a: x=1\n"
    )
    text = parse_arguments(SpeechArguments, ["--config", str(config)]).config_overrides
    assert yaml.safe_load(text) == {"conv_dim": [4, 8], "a": "x=1"}


@pytest.mark.parametrize("text", ["hidden_size=48,layerdrop=0.5", "{hidden_size: 48, layerdrop: 0.5}"])
def test_a_configuration_is_overridden(text):
    config = AutoConfig.for_model("wav2vec2")
    override(config, text)
    assert (config.hidden_size, config.layerdrop) == (48, 0.5)


@pytest.mark.parametrize("text", ["hiden_size=48", "{hiden_size: 48}", "{hidden_size", "hidden_size"])
def test_an_override_that_cannot_be_applied_is_refused(text):
    with pytest.raises(ModelError, match=re.escape("--config_overrides") + ".*hid"):
        override(AutoConfig.for_model("wav2vec2"), text)


def test_a_model_that_hears_nothing_is_refused(tmp_path):
    argv = ["--dataset_name", "dial_tones", "--num_strings", "4", "--model_type", "bert"]
    with pytest.raises(ModelError, match="--model_type bert takes no recordings"):
        speech.main([*argv, "--output_dir", str(tmp_path)])


SOURCES = ["--data_dir", "x", "--model_type", "wav2vec2"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model_type", "wav2vec2"], "give either --dataset_name or --data_dir"),
        ([*SOURCES, "--dataset_name", "y"], "give either --dataset_name or --data_dir"),
        (["--data_dir", "x"], "give either --model_name_or_path or --model_type"),
        ([*SOURCES, "--streaming"], "--streaming needs a --dataset_name"),
        (["--dataset_name", "y", "--model_type", "x", "--streaming", "--group_by_length"], "leave out --streaming"),
        ([*SOURCES, "--uptrain"], "add --twin"),
        ([*SOURCES, "--uptrain_epochs", "2"], "need --uptrain"),
        ([*SOURCES, "--train_val_split", "1"], "--train_val_split is a share and must be below 1"),
        ([*SOURCES, "--digits_per_string", "0"], "--digits_per_string must be at least 1, got 0"),
        ([*SOURCES, "--max_duration_s", "0"], "--max_duration_s must be above 0"),
        ([*SOURCES, "--text_case", "title"], "invalid choice"),
        *(([*SOURCES, *argv], message) for argv, message in STAGES_REFUSED),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(argv, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_arguments(SpeechArguments, argv)
    assert exit_info.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(("source", "task"), [({"data_dir": "/a/fsdd/"}, "fsdd"), ({"dataset_name": "a/b"}, "a/b")])
def test_results_say_what_the_data_are(source, task):
    assert SpeechArguments(model_type="wav2vec2", **source).task() == task
