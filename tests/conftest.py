"""What all tests share: worker processes of one thread each, no network, and a known random state before each test."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # NumPy's threads too, and those of child processes

import pytest
import torch
from versions import skip_what_is_too_new
from workers import available_cores, number_of_workers

torch.set_num_threads(1)
if not torch.cuda.is_available():  # kernels run in Triton's interpreter: to be said before anything imports Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config):
    """Share the tests among workers, unless -n says how many, -p no:xdist that there are none, or this is one."""
    distributes = config.pluginmanager.hasplugin("xdist") and not hasattr(config, "workerinput")
    if not distributes or config.option.numprocesses is not None or config.option.usepdb:
        return
    config.option.numprocesses = number_of_workers(config.option.markexpr, config.args, available_cores())
    if config.option.dist == "no":  # neighbours stay together, for the sake of their fixtures, until a worker is idle
        config.option.dist = "worksteal"


def pytest_collection_modifyitems(items):
    """Skip, with the reason, what the installed versions are too old for."""
    skip_what_is_too_new({item.nodeid.removeprefix("tests/"): item for item in items})


@pytest.fixture(autouse=True)
def _known_random_state():
    torch.manual_seed(0)
