"""The stages of glue.py before its task: killed in each of them with the same end, on two ranks, and begun anew."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import glue
import pytest
import test_glue_run
import torch
from safetensors.torch import load_file
from test_glue_run import NO_DROPOUT, assert_same_end, run_and_kill, run_on_two_ranks
from transformers import AutoModelForSequenceClassification

from hf_favorpp.errors import ConfigError

THREE = ("--transfer_steps", "12", "--distil_steps", "12", "--kd_weight", "0.5", "--evaluate_first")
THREE += ("--max_train_steps", "8", "--checkpointing_steps", "5", "--distil_learning_rate", "1e-3")
THREE += ("--altered_copies", "2")

NOT_CALIBRATED = ("--statistics", "sequence")
"""Each rank calibrates on all rows, and what is chosen depends on how many there are."""


def arguments(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    """Return the command line of the other runs without redraws, which would undo what is learnt."""
    argv = test_glue_run.arguments(model, data, output, *more)
    place = argv.index("--redraw_every")
    return argv[:place] + argv[place + 2 :]


@pytest.fixture(scope="module")
def teacher(tiny_bert, glue_dir, tmp_path_factory) -> Path:
    """A softmax model of the task."""
    folder = tmp_path_factory.mktemp("teacher")
    glue.main(arguments(tiny_bert, glue_dir, folder, "--attention", "softmax", "--max_train_steps", "4"))
    return folder


@pytest.fixture(scope="module")
def uninterrupted(teacher, tiny_bert, glue_dir, tmp_path_factory) -> Path:
    """A run of three stages from begin to end."""
    folder = tmp_path_factory.mktemp("stages") / "whole"
    threads = torch.get_num_threads()
    glue.main(arguments(tiny_bert, glue_dir, folder, "--teacher", str(teacher), *THREE))
    torch.set_num_threads(threads)
    return folder


@pytest.mark.usefixtures("one_thread")
def test_the_stages_learn_from_the_altered_copies_too(teacher, tiny_bert, glue_dir, tmp_path, monkeypatch):
    loaders = []
    monkeypatch.setattr(glue.Stages, "run", lambda self, model, loader, score: loaders.append(loader))
    glue.main(arguments(tiny_bert, glue_dir, tmp_path, "--teacher", str(teacher), *THREE))
    rows = [len(loader.dataset) for loader in loaders]
    plain = [value for value in THREE if value not in ("--altered_copies", "2")]
    glue.main(arguments(tiny_bert, glue_dir, tmp_path / "plain", "--teacher", str(teacher), *plain))
    assert rows == [3 * len(loaders[1].dataset)]
    assert "labels" not in loaders[0].dataset.column_names


def stage_reports(folder: Path) -> dict[str, Any]:
    """Return what results.json says of the stages, without their seconds."""
    results = json.loads((folder / "results.json").read_text())
    stages = {stage: dict(results[stage]) for stage in ("transfer", "distil")}
    assert all(stage.pop("seconds") > 0 for stage in stages.values())
    return {"initial_metrics": results["initial_metrics"], **stages}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("stage", "step"),
    [
        pytest.param("transfer/attention", 11, id="transfer"),
        pytest.param("distil", 11, id="distillation"),
        pytest.param("", 2, id="begin of task", marks=pytest.mark.slow),
        pytest.param("", 7, id="task", marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_in_any_stage_ends_like_an_uninterrupted_one(
    stage, step, teacher, uninterrupted, tiny_bert, glue_dir, tmp_path
):
    argv = arguments(tiny_bert, glue_dir, tmp_path, "--teacher", str(teacher), *THREE)
    run_and_kill(tmp_path / stage, step, argv)
    glue.main([*argv, "--resume_from_checkpoint", "latest"])
    assert_same_end(uninterrupted, tmp_path)
    reports = stage_reports(tmp_path)
    assert reports == stage_reports(uninterrupted)
    assert set(reports["transfer"]["layer_losses"]) == set(reports["distil"]["losses"]) == {"10"}


def test_a_finished_run_that_is_resumed_reports_its_stages_again(
    uninterrupted, teacher, tiny_bert, glue_dir, tmp_path
):
    folder = tmp_path / "again"
    shutil.copytree(uninterrupted, folder)
    argv = arguments(tiny_bert, glue_dir, folder, "--teacher", str(teacher), *THREE)
    glue.main([*argv, "--resume_from_checkpoint", "latest"])
    assert_same_end(uninterrupted, folder)
    assert stage_reports(folder) == stage_reports(uninterrupted)


@pytest.mark.parametrize("stage", ["transfer", "distil"])
def test_checkpoints_of_the_stages_of_an_earlier_run_are_refused_before_anything_is_learnt(
    stage, uninterrupted, teacher, tiny_bert, glue_dir, tmp_path
):
    shutil.copytree(uninterrupted / stage, tmp_path / stage)
    argv = arguments(tiny_bert, glue_dir, tmp_path, "--teacher", str(teacher), *THREE)
    with pytest.raises(ConfigError, match=rf"{stage}.* holds checkpoints of an earlier run"):
        glue.main(argv)
    assert {path.name for path in tmp_path.iterdir()} == {stage}


def test_a_checkpoint_of_the_distillation_is_none_of_the_task(uninterrupted, teacher, tiny_bert, glue_dir, tmp_path):
    argv = arguments(tiny_bert, glue_dir, tmp_path, "--teacher", str(teacher), *THREE, "--max_train_steps", "12")
    with pytest.raises(ConfigError, match="stage was distil and is now None"):
        glue.main([*argv, "--resume_from_checkpoint", str(uninterrupted / "distil" / "finished")])


def test_a_new_run_forgets_the_stages_of_an_earlier_one(teacher, tiny_bert, glue_dir, tmp_path):
    more = ("--teacher", str(teacher), "--transfer_steps", "1", "--max_train_steps", "1")
    assert "transfer" in glue.main(arguments(tiny_bert, glue_dir, tmp_path, *more))
    more = ("--max_train_steps", "1", "--checkpointing_steps", "1", "--attention", "softmax")
    glue.main(arguments(tiny_bert, glue_dir, tmp_path, *more))
    resumed = glue.main(arguments(tiny_bert, glue_dir, tmp_path, *more, "--resume_from_checkpoint", "latest"))
    assert "transfer" not in resumed


def test_metrics_after_the_conversion_survive_a_resumption_without_stages(tiny_bert, glue_dir, tmp_path):
    more = ("--max_train_steps", "1", "--checkpointing_steps", "1", "--evaluate_first")
    first = glue.main(arguments(tiny_bert, glue_dir, tmp_path, *more))
    again = glue.main(arguments(tiny_bert, glue_dir, tmp_path, *more, "--resume_from_checkpoint", "latest"))
    assert again["initial_metrics"] == first["initial_metrics"]


def without_dropout(model: Path, folder: Path) -> Path:
    """Return a copy of a model that draws nothing, which would differ between the ranks."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("step_*", "results.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **NO_DROPOUT}))
    return folder


def test_two_ranks_learn_in_every_stage_like_one_that_accumulates_both_their_batches(teacher, glue_dir, tmp_path):
    model = without_dropout(teacher, tmp_path / "model")
    stages = ("--transfer_steps", "6", "--distil_steps", "6", "--kd_weight", "0.5", "--max_train_steps", "3")
    more = ("--teacher", str(model), *stages, "--evaluate_first", "--max_train_samples", "40", "--learning_rate")
    more += ("1e-3", "--feature_learning_rate", "1e-3", *NOT_CALIBRATED)
    one, two = tmp_path / "one", tmp_path / "two"
    run_on_two_ranks(arguments(model, glue_dir, two, *more, "--gradient_accumulation_steps", "1"), tmp_path)
    glue.main(arguments(model, glue_dir, one, *more))
    single, double = (json.loads((folder / "results.json").read_text()) for folder in (one, two))
    for stage in ("transfer", "distil"):
        assert double[stage]["metrics"] == pytest.approx(single[stage]["metrics"], abs=1e-4)
    assert double["metrics"] == pytest.approx(single["metrics"], abs=1e-4)
    weights, others = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-3, atol=1e-4, msg=name)


def test_all_that_the_transfer_learns_is_features(teacher, glue_dir, tmp_path):
    more = ("--teacher", str(teacher), "--transfer_steps", "4", "--max_train_steps", "1", "--learning_rate", "1e-12")
    glue.main(arguments(teacher, glue_dir, tmp_path, *more))
    softmax = AutoModelForSequenceClassification.from_pretrained(teacher).state_dict()
    learnt = AutoModelForSequenceClassification.from_pretrained(tmp_path).state_dict()
    for name, tensor in softmax.items():
        torch.testing.assert_close(learnt[name], tensor, rtol=0, atol=1e-9, msg=name)
    assert set(learnt) - set(softmax)
