"""Who runs the tests: worker processes for all of them, this process for what must not be shared."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from workers import MOST, available_cores, number_of_workers

FAST = "not slow and not gpu"


@pytest.mark.parametrize(
    ("mark_expression", "arguments", "cores", "workers"),
    [
        (FAST, ["tests"], 1, 0),
        (FAST, ["tests"], 2, 2),
        (FAST, ["tests"], 64, MOST),
        (FAST, ["tests/attention", "tests/features"], 2, 2),
        (FAST, ["tests/attention", "tests/test_workers.py"], 2, 0),
        (FAST, ["tests/test_workers.py::test_one_thread_each"], 2, 0),
        ("slow", ["tests"], 2, 0),
        ("gpu", ["tests"], 2, 0),
        ("not gpu", ["tests"], 2, 0),
        ("not slow", ["tests"], 2, 0),
        ("", ["tests"], 2, 0),
    ],
)
def test_number_of_workers(mark_expression, arguments, cores, workers, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    assert number_of_workers(mark_expression, arguments, cores) == workers


def decided(request, xdist=True, **options):
    """Return what tests/conftest.py makes of the command line, as (number of processes, how tests are shared)."""
    usual = {"numprocesses": None, "dist": "no", "usepdb": False, "markexpr": FAST}
    manager = SimpleNamespace(hasplugin=lambda name: xdist)
    config = SimpleNamespace(
        option=SimpleNamespace(**usual | options), args=[str(Path(__file__).parent)], pluginmanager=manager
    )
    request.config.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py"))).pytest_cmdline_main(config)
    return config.option.numprocesses, config.option.dist


def test_what_the_command_line_says_is_done(request, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    assert decided(request) == (2, "worksteal")
    assert decided(request, dist="loadfile") == (2, "loadfile")
    assert decided(request, numprocesses=0) == (0, "no")
    assert decided(request, numprocesses=8) == (8, "no")
    assert decided(request, usepdb=True) == (None, "no")
    assert decided(request, markexpr="slow")[0] == 0
    assert decided(request, xdist=False) == (None, "no")


def test_one_thread_each():
    assert torch.get_num_threads() == 1
    assert os.environ["OMP_NUM_THREADS"] == "1" or "PYTEST_XDIST_WORKER" not in os.environ
    assert available_cores() >= 1
