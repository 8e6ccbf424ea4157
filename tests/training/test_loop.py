"""The training loop on a model of one matrix: what happens once per optimizer step, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader

from hf_favorpp.errors import ConfigError
from hf_favorpp.training.checkpoints import list_checkpoints
from hf_favorpp.training.loop import train
from hf_favorpp.training.settings import LoopSettings

ROWS = [{"x": torch.tensor([float(i), 1.0]), "attention_mask": torch.tensor(1 + i % 3)} for i in range(10)]


def weight(model):
    return {"weight": sum(p.sum().item() for p in model.parameters())}


def run(folder, *, accumulation=1, batch=2, on_step_begin=None, loss=None, evaluate=None, dropout=0.0, **settings):
    """Train on 10 rows: 5 batches of 2 an epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(dropout), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    configuration = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, dataloader_config=configuration)
    report = train(
        accelerator,
        model,
        optimizer,
        DataLoader(ROWS, batch, shuffle=True),
        None if evaluate is False else evaluate or weight,
        LoopSettings(output_dir=folder, show_progress=False, **settings),
        on_step_begin=on_step_begin,
        compute_loss=loss or (lambda model, batch: model(batch["x"] / 10).square().mean()),
    )
    return report, optimizer


def test_step_begins_once_per_optimizer_step_whatever_the_accumulation(tmp_path):
    seen = []
    report, _ = run(tmp_path, accumulation=2, num_epochs=2, on_step_begin=lambda model, step: seen.append(step))
    assert seen == [0, 1, 2, 3, 4, 5]  # 5 batches are 3 optimizer steps, the last of one batch
    assert report.completed_steps == 6


def test_the_model_is_in_training_when_a_step_begins_and_in_eval_without_gradients_when_scored(tmp_path):
    modes = []

    def score(model):
        modes.append((model.training, torch.is_grad_enabled()))
        return {}

    run(tmp_path, num_epochs=2, on_step_begin=lambda model, step: modes.append(model.training), evaluate=score)
    assert modes == ([True] * 5 + [(False, False)]) * 2


def test_learning_rate_falls_to_zero_over_the_optimizer_steps(tmp_path):
    _, optimizer = run(tmp_path, accumulation=2, num_epochs=2, warmup_steps=2, max_steps=4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)
    _, optimizer = run(tmp_path, lr_scheduler_type="constant_with_warmup", warmup_ratio=0.9, max_steps=5)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_max_steps_wins_over_epochs_and_ends_with_an_evaluation(tmp_path):
    report, _ = run(tmp_path, num_epochs=1, max_steps=7)
    assert report.completed_steps == 7
    assert [(entry["epoch"], entry["completed_steps"]) for entry in report.history] == [(1, 5), (2, 7)]
    assert report.metrics == {"weight": report.history[-1]["weight"]}


def test_no_steps_evaluate_alone(tmp_path):
    report, _ = run(tmp_path, max_steps=0)
    torch.manual_seed(0)
    start = sum(p.sum().item() for p in nn.Linear(2, 1).parameters())
    assert (report.completed_steps, report.metrics) == (0, {"weight": start})


def test_a_run_without_evaluation_has_a_checkpoint_at_its_end_where_that_is_asked_for(tmp_path):
    options = {"max_steps": 7, "evaluate": False, "checkpoint_at_end": True, "checkpoint_every": 3}
    report, _ = run(tmp_path, **options)
    assert (report.metrics, report.history, report.completed_steps) == ({}, [], 7)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_3", "step_6", "finished"]
    written = (tmp_path / "finished" / "progress.json").stat().st_mtime_ns
    again, _ = run(tmp_path, **options, resume_from="latest")
    assert again.completed_steps == 7
    assert (tmp_path / "finished" / "progress.json").stat().st_mtime_ns == written
    with pytest.raises(ConfigError, match="checkpoints need an output_dir, got None"):
        run(None, checkpoint_at_end=True)


def test_evaluations_between_epochs_change_nothing_but_the_history(tmp_path):
    options = {"num_epochs": 3, "accumulation": 2, "dropout": 0.5, "checkpoint_every": 1}
    plain, _ = run(tmp_path / "plain", **options)
    often, _ = run(tmp_path / "often", **options, evaluate_every=2)  # 3 steps an epoch, the last of one batch
    assert [(entry["epoch"], entry["completed_steps"]) for entry in often.history] == [
        *((0.8, 2), (1, 3), (1.2 + 0.2, 4), (2, 6), (2.8, 8), (3, 9)),
    ]
    assert [entry["weight"] for entry in often.history if entry["epoch"] in (1, 2, 3)] == [
        entry["weight"] for entry in plain.history
    ]
    first, second = (entry["train_loss"] for entry in often.history[:2])
    assert (4 * first + second) / 5 == pytest.approx(plain.history[0]["train_loss"])
    for checkpoint in list_checkpoints(tmp_path / "often"):
        folder = tmp_path / "again" / checkpoint.name
        again, _ = run(folder, **options, evaluate_every=2, resume_from=str(checkpoint))
        assert (again.history, again.tokens) == (often.history, often.tokens), checkpoint.name


def test_tokens_are_the_real_ones(tmp_path):
    report, _ = run(tmp_path, num_epochs=2)
    assert report.tokens == 2 * sum(1 + i % 3 for i in range(10))
    assert report.tokens_per_second == report.tokens / report.train_seconds
    assert 0 < report.train_seconds <= report.wall_seconds


def test_clipping_bounds_the_step(tmp_path):
    plain, _ = run(tmp_path, max_steps=1, loss=lambda model, batch: 1e3 * model(batch["x"]).sum())
    torch.manual_seed(0)
    start = sum(p.sum().item() for p in nn.Linear(2, 1).parameters())
    clipped, _ = run(tmp_path, max_steps=1, max_grad_norm=1.0, loss=lambda model, batch: 1e3 * model(batch["x"]).sum())
    assert abs(plain.metrics["weight"] - start) > 10
    assert abs(clipped.metrics["weight"] - start) <= 0.01 * math.sqrt(3) + 1e-6


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    with pytest.raises(FloatingPointError, match=r"loss is nan at optimizer step 5.*Lower the learning rate"):
        run(tmp_path, loss=lambda model, batch: model(batch["x"]).sum() * float("nan"))


def test_oldest_checkpoints_are_pruned_and_half_written_ones_are_no_checkpoints(tmp_path):
    run(tmp_path, num_epochs=2, checkpoint_every=2, checkpoint_limit=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_8", "step_10"]
    (tmp_path / "step_10").rename(tmp_path / ".step_10.tmp")
    (tmp_path / "step_99").mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_8"]


@pytest.mark.parametrize("every", [1, 2, 3, "epoch"])
def test_resuming_from_every_checkpoint_ends_the_same(tmp_path, every):
    options = {"num_epochs": 3, "accumulation": 2, "checkpoint_every": every, "dropout": 0.5}
    whole, _ = run(tmp_path / "whole", **options)
    for checkpoint in list_checkpoints(tmp_path / "whole"):
        again, _ = run(tmp_path / "again" / checkpoint.name, **options, resume_from=str(checkpoint))
        assert (again.history, again.tokens) == (whole.history, whole.tokens), checkpoint.name


def test_dropout_differs_between_steps_and_seeds(tmp_path):
    losses = []

    def loss(model, batch):
        losses.append(model[0](torch.ones(64)).sum().item())
        return model(batch["x"]).mean()

    run(tmp_path, dropout=0.5, num_epochs=2, loss=loss)
    first, losses = losses, []
    run(tmp_path, dropout=0.5, num_epochs=2, loss=loss)
    second, losses = losses, []
    run(tmp_path, dropout=0.5, num_epochs=2, loss=loss, seed=1)
    assert first == second != losses
    assert len(set(first)) > 3


def test_latest_begins_anew_where_nothing_is(tmp_path):
    report, _ = run(tmp_path, num_epochs=1, resume_from="latest")
    assert report.completed_steps == 5


def test_what_would_not_continue_the_run_is_refused(tmp_path):
    run(tmp_path, num_epochs=1, checkpoint_every=2, identity={"rate": 1})
    with pytest.raises(ConfigError, match="rate was 1 and is now 2"):
        run(tmp_path, num_epochs=1, resume_from="latest", identity={"rate": 2})
    with pytest.raises(ConfigError, match="batches_per_epoch was 5 and is now 10"):
        run(tmp_path, num_epochs=1, batch=1, resume_from="latest", identity={"rate": 1})
    with pytest.raises(ConfigError, match="holds checkpoints of an earlier run"):
        run(tmp_path, num_epochs=1)
    with pytest.raises(ConfigError, match=r"step_3 is no checkpoint .*'step_2', 'step_4'"):
        run(tmp_path, num_epochs=1, resume_from=str(tmp_path / "step_3"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_epochs", 0),
        ("max_steps", -1),
        ("checkpoint_every", "often"),
        ("checkpoint_every", 0),
        ("checkpoint_limit", 0),
        ("warmup_steps", -1),
        ("warmup_ratio", 1.0),
        ("max_grad_norm", 0.0),
        ("seed", -1),
    ],
)
def test_impossible_settings_are_refused(tmp_path, name, value):
    with pytest.raises(ConfigError, match=name):
        LoopSettings(output_dir=tmp_path, **{name: value})
