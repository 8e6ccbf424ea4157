"""A Hub of each test's own, in a thread, which this process talks to instead of the real one."""

import huggingface_hub
import pytest
import transformers.dynamic_module_utils
import transformers.utils.hub
from hub_server import TOKEN, Hub
from huggingface_hub import constants, hf_api


@pytest.fixture
def hub(monkeypatch, tmp_path):
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
