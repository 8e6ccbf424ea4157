"""glue.py from end to end on a tiny model: two ranks, and SIGKILL in the middle with the same end."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import redirect_stdout
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import glue
import pytest
import torch
import uptraining
from huggingface_hub.utils import filter_repo_objects
from processes import exit_code_of, run_two_ranks
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification
from uptraining import ModelError

from hf_favorpp.training import loop

RECALIBRATED = ("--statistics", "calibrated", "--calibration_samples", "16", "--recalibrate_every", "3")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def arguments(model: Path, data: Path, output: Path, *more: str, task: str = "cola") -> list[str]:
    """Return a short run's command line: 44 rows in micro-batches of 4 make 11 a pass, 6 optimizer steps of 2."""
    words = {
        "task_name": task,
        "model_name_or_path": model,
        "data_dir": data,
        "output_dir": output,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "num_warmup_steps": 2,
        "num_features": 16,
        "redraw_every": 2,
        "num_threads": 1,
    }
    return [word for name, value in words.items() for word in (f"--{name}", str(value))] + list(more)


def run_and_kill(folder: Path, step: int, argv: list[str]) -> None:
    """Run glue.py in a process that dies by SIGKILL after so many optimizer steps of the run in the folder."""
    assert exit_code_of(glue_until, str(folder), step, argv) == -signal.SIGKILL
    assert not (folder / "results.json").exists()


def glue_until(folder: str, step: int, argv: list[str]) -> None:
    """Be that process."""
    end_step = loop._Run._end_step

    def end_step_and_die(self: Any, loss: torch.Tensor) -> None:
        end_step(self, loss)
        if str(self.settings.output_dir) == folder and self.progress.completed_steps == step:
            os.kill(os.getpid(), signal.SIGKILL)

    loop._Run._end_step = end_step_and_die
    glue.main(argv)


def assert_same_end(one: Path, other: Path) -> None:
    """Compare what must not depend on interruptions: metrics and losses of all epochs, tokens, weights, all exact."""
    first, second = (json.loads((folder / "results.json").read_text()) for folder in (one, other))
    for key in ("metrics", "history", "train_tokens", "completed_steps"):
        assert first[key] == second[key], key
    weights, others = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, others[name]), name


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("checkpointing", "step", "more"),
    [
        pytest.param("4", 5, (), id="first epoch", marks=pytest.mark.slow),
        pytest.param("4", 9, ("--group_by_length",), id="second epoch"),
        pytest.param("epoch", 8, ("--max_grad_norm", "1"), id="epochs", marks=pytest.mark.slow),
        pytest.param("4", 9, RECALIBRATED, id="recalibrated"),
    ],
)
def test_killed_and_resumed_run_ends_like_an_uninterrupted_one(
    checkpointing, step, more, tiny_bert, glue_dir, tmp_path
):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    more = ("--checkpointing_steps", checkpointing, *more)
    glue.main(arguments(tiny_bert, glue_dir, whole, *more))
    argv = arguments(tiny_bert, glue_dir, killed, *more)
    run_and_kill(killed, step, argv)
    glue.main([*argv, "--resume_from_checkpoint", "latest"])
    assert_same_end(whole, killed)
    state = load_file(killed / "model.safetensors")
    assert {tensor.item() for name, tensor in state.items() if name.endswith("draw_index")} == {
        5
    }  # redraws took place


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "killed_run",
    [pytest.param("softmax", id="in the twin", marks=pytest.mark.slow), pytest.param("", id="after the twin")],
)
def test_a_killed_comparison_goes_on_where_it_was(killed_run, tiny_bert, glue_dir, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    more = ("--checkpointing_steps", "4", "--twin")
    glue.main(arguments(tiny_bert, glue_dir, whole, *more))
    argv = arguments(tiny_bert, glue_dir, killed, *more)
    run_and_kill(killed / killed_run if killed_run else killed, 9, argv)
    finished = killed / "softmax" / "results.json"
    written = finished.stat().st_mtime_ns if not killed_run else None
    results = glue.main([*argv, "--resume_from_checkpoint", "latest"])
    assert written in (None, finished.stat().st_mtime_ns)  # a finished twin does not run again
    assert results["softmax_metrics"] == json.loads(finished.read_text())["metrics"]
    assert_same_end(whole / "softmax", killed / "softmax")
    assert_same_end(whole, killed)


def test_a_finished_twin_with_other_arguments_is_refused(tiny_bert, glue_dir, tmp_path):
    argv = arguments(tiny_bert, glue_dir, tmp_path, "--twin", "--max_train_steps", "1")
    glue.main(argv)
    with pytest.raises(ModelError, match=r"finished with other values of \['learning_rate'\]"):
        glue.main([*argv, "--learning_rate", "1e-3", "--resume_from_checkpoint", "latest"])


def run_on_two_ranks(argv: list[str], folder: Path) -> str:
    """Run glue.py on two CPU ranks and return what they printed."""
    run_two_ranks(glue_on_rank, argv, folder)
    return "".join((folder / f"printed{rank}.txt").read_text() for rank in range(2))


def glue_on_rank(rank: int, argv: list[str], folder: Path) -> None:
    """Be one of them."""
    with (folder / f"printed{rank}.txt").open("w") as file, redirect_stdout(file):
        glue.main(argv)


def test_two_ranks_train_and_evaluate_like_one_with_twice_the_batch(tiny_bert, glue_dir, tmp_path):
    model = tmp_path / "model"  # without dropout, which differs between the ranks
    shutil.copytree(tiny_bert, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **NO_DROPOUT}))
    more = ("--max_train_samples", "40", "--redraw_until", "3", "--learning_rate", "1e-3", "--twin")
    one, two = tmp_path / "one", tmp_path / "two"
    printed = run_on_two_ranks(arguments(model, glue_dir, two, *more, task="stsb"), tmp_path)
    glue.main(arguments(model, glue_dir, one, *more, "--per_device_train_batch_size", "8", task="stsb"))
    single, double = (json.loads((folder / "results.json").read_text()) for folder in (one, two))
    assert printed.count("training tokens / s") == 1  # only one rank reports
    assert double["softmax_metrics"] == pytest.approx(single["softmax_metrics"], abs=1e-4)
    assert double["metrics"] == pytest.approx(single["metrics"], abs=1e-4)  # 21 rows: the ranks share them unevenly
    assert double["train_tokens"] == single["train_tokens"]
    weights, others = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-3, atol=1e-4, msg=name)


def test_the_saved_model_is_converted_and_knows_its_labels(tiny_bert, glue_dir, tmp_path):
    glue.main(arguments(tiny_bert, glue_dir, tmp_path, "--max_train_steps", "1", task="rte"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert model.config._attn_implementation == "favorpp"
    assert model.config.favorpp["num_features"] == 16
    assert model.config.id2label == {0: "entailment", 1: "not_entailment"}


def test_a_model_that_is_not_the_saved_one_fails_loudly(tiny_bert, glue_dir, tmp_path, monkeypatch):
    save = BertForSequenceClassification.save_pretrained

    def save_something_else(self, folder, **options):
        with torch.no_grad():
            self.classifier.bias.add_(1e-3)
        save(self, folder, **options)
        with torch.no_grad():
            self.classifier.bias.sub_(1e-3)

    monkeypatch.setattr(BertForSequenceClassification, "save_pretrained", save_something_else)
    with pytest.raises(ModelError, match="does not predict what the trained one does"):
        glue.main(arguments(tiny_bert, glue_dir, tmp_path, "--max_train_steps", "1"))


def test_tracking_writes_what_the_tracker_shows(tiny_bert, glue_dir, tmp_path):
    pytest.importorskip("tensorboard")
    argv = arguments(tiny_bert, glue_dir, tmp_path, "--max_train_steps", "1", "--with_tracking")
    glue.main([*argv, "--report_to", "tensorboard"])
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_pushing_makes_the_repository_first_and_leaves_checkpoints_at_home(tiny_bert, glue_dir, tmp_path, monkeypatch):
    calls = []

    class Hub:
        def __init__(self, token):
            calls.append(token)

        def create_repo(self, name, exist_ok):
            assert not (tmp_path / "config.json").exists()
            return SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, *, repo_id, folder_path, commit_message, ignore_patterns):
            files = [str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()]
            calls.append((repo_id, set(filter_repo_objects(files, ignore_patterns=ignore_patterns))))

    monkeypatch.setattr("publish.HfApi", Hub)
    monkeypatch.setattr("publish.CROSSOVER_LENGTHS", (16, 32))
    monkeypatch.setattr("publish.SECONDS_PER_LENGTH", 0.1)
    more = ("--max_train_steps", "1", "--checkpointing_steps", "1", "--twin")
    more += ("--push_to_hub", "--hub_model_id", "bert", "--hub_token", "secret")
    glue.main(arguments(tiny_bert, glue_dir, tmp_path, *more))
    uploaded = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "results.json"}
    uploaded |= {"README.md", "modeling_favorpp.py"}
    assert calls == ["secret", "secret", ("me/bert", uploaded)]
    assert "secret" not in (tmp_path / "results.json").read_text()
    results, card = json.loads((tmp_path / "results.json").read_text()), (tmp_path / "README.md").read_text()
    assert 'from_pretrained("me/bert")' in card
    assert f"| converted | {fmean(results['fidelity']['layer_errors']):.4f} |" in card
    assert "| matthews correlation | " in card
    assert "Attention alone beside" in card


@pytest.mark.usefixtures("one_thread")
def test_the_one_thread_that_accelerate_launch_leaves_on_a_cpu_becomes_all_cores(monkeypatch):
    processes = SimpleNamespace(device=torch.device("cpu"), num_processes=2)
    monkeypatch.setattr(uptraining, "available_cores", lambda: 6)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    torch.set_num_threads(1)
    uptraining.set_threads(None, processes)
    assert torch.get_num_threads() == 1, "the environment of a plain python is respected"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    uptraining.set_threads(None, processes)
    assert torch.get_num_threads() == 3
    uptraining.set_threads(2, processes)
    assert torch.get_num_threads() == 2
