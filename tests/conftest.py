"""What all tests share: worker processes of one thread each, no network, and a known random state before each test."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # NumPy's threads too, and those of child processes

import huggingface_hub
import pytest
import torch
import transformers.dynamic_module_utils
import transformers.utils.hub
from hub_server import TOKEN, Hub
from huggingface_hub import constants, hf_api
from versions import needs_transformers, skip_what_is_too_new
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


def pytest_collection_finish():
    """Spare garbage collections the libraries and the thousands of tests, all of which stay."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _known_random_state():
    torch.manual_seed(0)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub of the test's own, in a thread, which this process talks to instead of the real one."""
    needs_transformers("5.14", "whose client of the Hub is led to a server of the test's own")
    server = Hub()
    cache = tmp_path / "hf_home"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setattr(hf_api.api, "endpoint", server.url)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(cache / "modules"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    huggingface_hub.close_session()
    yield server
    huggingface_hub.close_session()
    server.close()
