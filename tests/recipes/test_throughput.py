"""Images per second of a loader and of a model, against ones whose time is known."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest
import throughput
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __init__(self, length, seconds):
        self.length, self.seconds = length, seconds

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return {"labels": index}


@pytest.mark.parametrize("length", [8, 400], ids=["shorter than asked for", "longer"])
def test_a_loader_gives_as_many_images_as_its_rows_take_time(length):
    loader = DataLoader(Slow(length, 0.005), batch_size=4)
    started = time.perf_counter()
    rate = throughput.loader_rate(loader, num_batches=5)
    assert 100 < rate < 200
    assert time.perf_counter() - started < 0.5, "no more batches than asked for"


def test_a_model_is_timed_without_its_first_pass_and_left_as_it_was(monkeypatch):
    monkeypatch.setattr(throughput, "MODEL_SECONDS", 0.1)
    model, passes = nn.Linear(2, 1), []

    def loss(model, batch):
        time.sleep(0.02 if passes else 0.3)
        passes.append(model.training)
        return model(torch.ones(1, 2)).sum()

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rate = throughput.model_rate(model.train(), loss, {"labels": torch.zeros(10)}, nullcontext)
    assert 250 < rate <= 500
    assert not any(passes)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_verdict_names_the_bottleneck():
    assert "the loader is the bottleneck, raise --num_workers" in throughput.verdict(90.0, 100.0, 2)
    text = throughput.verdict(1234.0, 100.0, 2)
    assert text == (
        "loader alone 1,234 images/s with 2 workers, model alone 100 images/s: the loader is not the bottleneck"
    )
