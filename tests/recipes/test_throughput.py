"""Images per second of a loader and of a model, against ones whose time is known."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import throughput
import torch
from clock import Clock
from torch import nn
from torch.utils.data import DataLoader, Dataset


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(throughput, "time", clock)
    return clock


class Slow(Dataset):
    def __init__(self, length, seconds, clock):
        self.length, self.seconds, self.clock, self.read = length, seconds, clock, 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.clock.sleep(self.seconds)
        self.read += 1
        return {"labels": index}


@pytest.mark.parametrize(("length", "read"), [(8, 8), (400, 24)], ids=["shorter than asked for", "longer"])
def test_a_loader_gives_as_many_images_as_its_rows_take_time(length, read, clock):
    rows = Slow(length, 0.005, clock)
    rate = throughput.loader_rate(DataLoader(rows, batch_size=4), num_batches=5)
    assert rate == pytest.approx(200, rel=1e-3)
    assert rows.read == read, "no more batches than asked for, after a first one"


def test_what_workers_had_prepared_is_not_counted(clock):
    class Ready:
        num_workers, prefetch_factor = 3, 2

        def __iter__(self):
            for number in range(20):
                clock.sleep(0.0 if number < 6 else 0.5)  # the first six lie ready
                yield {"labels": torch.zeros(4)}

    assert throughput.loader_rate(Ready(), num_batches=5) == pytest.approx(8, rel=1e-3)


def test_a_model_is_timed_without_its_first_pass_and_left_as_it_was(monkeypatch, clock):
    monkeypatch.setattr(throughput, "MODEL_SECONDS", 0.1)
    model, passes = nn.Linear(2, 1), []

    def loss(model, batch):
        clock.sleep(0.02 if passes else 0.3)
        passes.append(model.training)
        return model(torch.ones(1, 2)).sum()

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rate = throughput.model_rate(model.train(), loss, {"labels": torch.zeros(10)}, nullcontext)
    assert rate == pytest.approx(500, rel=1e-3)
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
