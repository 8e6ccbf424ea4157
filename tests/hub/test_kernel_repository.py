"""The attention as a repository of the Kernel Hub: ``attn_implementation="owner/repo:function"``.

``LOCAL_KERNELS`` is how the package ``kernels`` takes a folder for a repository; nothing is sent or fetched but where
the test has a Hub of its own.
"""

import ast
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import hidden_states, tiny_model, token_batch
from transformers.integrations import hub_kernels

from hf_favorpp import FavorppConfig, convert_to_favorpp
from hf_favorpp.errors import ConfigError
from hf_favorpp.hub.kernel import favorpp
from hf_favorpp.hub.kernel_repository import write_kernel_repository
from hf_favorpp.nn import converted_layers

kernels = pytest.importorskip("kernels")
GUIDE = Path(__file__).parents[2] / "hf_favorpp" / "guides" / "publishing.md"
NAME = "me/favorpp:favorpp"
BATCH = token_batch(9, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel") / "repository"
    write_kernel_repository(folder)
    return folder


@pytest.fixture
def kernel(folder, monkeypatch):
    """Return the module as ``kernels`` loads it, and let Transformers do so too, whatever versions it asks for."""
    monkeypatch.setenv("LOCAL_KERNELS", f"me/favorpp={folder}")
    if not hub_kernels.is_kernels_available():
        monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda *versions: True)
        monkeypatch.setattr(hub_kernels, "get_kernel_hub", kernels.get_kernel, raising=False)
    return kernels.get_kernel("me/favorpp", version=1)


@pytest.mark.usefixtures("kernel")
def test_a_softmax_model_attends_as_if_it_had_been_converted():
    model = tiny_model("bert", attn_implementation=NAME)
    assert not converted_layers(model)
    expected = hidden_states(convert_to_favorpp(tiny_model("bert")), BATCH)
    assert torch.equal(hidden_states(model, BATCH), expected)


@pytest.mark.usefixtures("kernel")
def test_the_options_in_the_configuration_count():
    options = FavorppConfig(num_features=16, seed=3, preconditioning="none")
    model = tiny_model("bert", attn_implementation=NAME, favorpp=options.to_dict())
    expected = hidden_states(convert_to_favorpp(tiny_model("bert"), options), BATCH)
    assert torch.equal(hidden_states(model, BATCH), expected)


@pytest.mark.usefixtures("kernel")
def test_a_converted_model_keeps_its_own_features():
    model = convert_to_favorpp(tiny_model("bert"), FavorppConfig(num_features=16), calibration_data=[BATCH])
    expected = hidden_states(model, BATCH)
    model.set_attn_implementation(NAME)
    assert torch.equal(hidden_states(model, BATCH), expected)


@pytest.mark.usefixtures("kernel")
def test_it_trains():
    model = tiny_model("bert", attn_implementation=NAME).train()
    model(**BATCH).last_hidden_state.sum().backward()
    assert model.encoder.layer[0].attention.self.query.weight.grad.abs().sum() > 0


def test_packed_sequences_are_kept_apart(kernel):
    module = torch.nn.Module()
    module.is_causal = False
    qkv = torch.randn(3, 1, 2, 12, 8).unbind(0)
    cu_seqlens = torch.tensor([0, 5, 12])
    out, _ = kernel.favorpp(module, *qkv, None, cu_seq_lens_q=cu_seqlens, max_length_q=7)
    for begin, end in ((0, 5), (5, 12)):
        alone, _ = kernel.favorpp(module, *(t[:, :, begin:end] for t in qkv), None)
        torch.testing.assert_close(out[:, begin:end], alone)


def test_the_fused_operators_are_those_of_the_repository(kernel):
    attention = sys.modules[f"{kernel.__name__}.attention"]
    assert attention.favorpp_attention.__module__ == f"{kernel.__name__}.attention.dispatch"
    q, k, v = torch.randn(3, 1, 2, 40, 8).unbind(0)
    omega = torch.randn(2, 16, 8)
    fused, plain = (attention.favorpp_attention(q, k, v, omega, backend=backend) for backend in ("cpu", "reference"))
    torch.testing.assert_close(fused, plain)
    assert f"{kernel.__name__}.attention.cpu" in sys.modules
    assert hasattr(getattr(torch.ops, kernel.__name__.removeprefix("_")), "cpu_attend")


def test_nothing_in_it_imports_the_package(folder):
    files = list(folder.rglob("*.py"))
    assert len(files) > 60
    for file in files:
        text = file.read_text()
        for node in ast.walk(ast.parse(text)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            outside = {"hf_favorpp", "transformers", "huggingface_hub", "accelerate"}
            assert not outside & {name.split(".")[0] for name in names if names}, file
        assert "hf_favorpp::" not in text


def test_what_it_cannot_do_is_refused(kernel):
    module = torch.nn.Module()
    module.is_causal = False
    qkv = torch.randn(3, 1, 2, 5, 8).unbind(0)
    with pytest.raises(Exception, match=r"attention_mask must be \(batch, length\), got \(1, 1, 5, 5\)"):
        kernel.favorpp(module, *qkv, torch.ones(1, 1, 5, 5, dtype=torch.bool))
    with pytest.raises(Exception, match="asks for sliding_window"):
        kernel.favorpp(module, *qkv, None, sliding_window=4)
    refused = {"statistics": "calibrated", "layers": [1], "learnable": "projections", "redraw": {"every": 2}}
    for name, value in refused.items():
        options = {name: value}
        module.config = type("Config", (), {"favorpp": options})
        with pytest.raises(Exception, match=f"config.favorpp has .*{name}.*Install hf-favorpp"):
            kernel.favorpp(module, *qkv, None)
    with pytest.raises(Exception, match="asks for causal attention, or does not say that it is not"):
        kernel.favorpp(torch.nn.Module(), *qkv, None)


def test_a_folder_with_files_and_an_impossible_version_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="must be an empty folder"):
        write_kernel_repository(folder)
    with pytest.raises(ConfigError, match="version must be an integer of at least 1, got 0"):
        write_kernel_repository(tmp_path, version=0)


def test_what_the_guide_uploads_is_loaded_from_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(GUIDE.read_text(encoding="utf-8").rpartition("```python\n")[2].partition("```")[0], {})
    repository = hub.repositories["me/favorpp-attention"]
    assert (repository.kind, set(repository.branches)) == ("kernel", {"main", "v1"})
    files = {str(path.relative_to("favorpp-attention")) for path in Path("favorpp-attention").rglob("*.*")}
    assert set(hub.files("me/favorpp-attention", "v1")) == files
    kernel = kernels.get_kernel("me/favorpp-attention", version=1, trust_remote_code=True)
    assert Path(kernel.__file__).is_relative_to(tmp_path / "hf_home")
    module = torch.nn.Module()
    module.is_causal = False
    qkv = torch.randn(3, 1, 2, 40, 8).unbind(0)
    assert torch.equal(kernel.favorpp(module, *qkv, None)[0], favorpp(module, *qkv, None)[0])
