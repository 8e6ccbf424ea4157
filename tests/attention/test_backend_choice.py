"""Which backend computes what, and what is said where the one that was asked for cannot."""

import importlib.util
import re

import pytest
import torch
from cases import KERNELS, log_weights_for, omega_for, statistics_of, tokens
from tiny_models import tiny_model, token_batch

from hf_favorpp import FavorppConfig, convert_to_favorpp, favorpp_attention
from hf_favorpp.attention import backends
from hf_favorpp.attention.backends import choose_backend, observed_backends
from hf_favorpp.attention.operators import OPERATORS, Backend
from hf_favorpp.errors import ConfigError


@pytest.fixture
def _short_ones_too(monkeypatch):
    monkeypatch.setattr(backends, "LEAST_LOGITS", 0)


short_ones_too = pytest.mark.usefixtures("_short_ones_too")


def attend(backend="auto", dtype=torch.float32, head_dim=5, num_features=7, **options):
    """Return which backends ran."""
    tensors = tokens(batch=1, queries=6, head_dim=head_dim, dtype=dtype)
    with observed_backends() as names:
        favorpp_attention(*tensors, omega_for(tensors[0], num_features), backend=backend, **options)
    return names


def learned_statistics():
    statistics = statistics_of("statistics", *tokens(batch=1, queries=6)[:2], "favor++", "center")
    return statistics._replace(mean_x=statistics.mean_x.clone().requires_grad_())


REFERENCE_ONLY = {
    "causal": ({"is_causal": True, "kernel": "favor+"}, "has no causal form, got is_causal=True"),
    "relu": ({"kernel": "relu"}, r"needs one of the kernels favor\+\+, .*, got 'relu'"),
    "elu": ({"kernel": "elu"}, "needs one of the kernels .*, got 'elu'"),
    "trig": ({"kernel": "trig"}, "needs one of the kernels .*, got 'trig'"),
    "learned statistics": ({"statistics": learned_statistics()}, "gives no gradient to statistics"),
}


@short_ones_too
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("neighbourhood", [{}, {"exact_window": 2}, {"exact_ends": (1, 0)}])
def test_auto_on_a_cpu_is_cpu(kernel, dtype, neighbourhood):
    assert attend(kernel=kernel, dtype=dtype, **neighbourhood) == ["cpu"]


@short_ones_too
@pytest.mark.parametrize("head_dim", [1, backends.MOST_HEAD_DIM + 1])
@pytest.mark.parametrize("num_features", [1, backends.MOST_FEATURES + 1])
def test_limits_of_the_kernels_are_none_of_the_cpu(head_dim, num_features):
    assert attend(head_dim=head_dim, num_features=num_features) == ["cpu"]


@short_ones_too
@pytest.mark.parametrize("kind", ["statistics", "preconditioner", "preconditioner of each row"])
def test_given_statistics_without_gradient_are_no_obstacle(kind):
    statistics = statistics_of(kind, *tokens(batch=1, queries=6)[:2], "favor++", "full")
    assert attend(statistics=statistics, preconditioning="full") == ["cpu"]


@short_ones_too
@pytest.mark.parametrize(("options", "reason"), REFERENCE_ONLY.values(), ids=REFERENCE_ONLY)
def test_what_only_the_reference_has_falls_back_or_is_refused(options, reason):
    assert attend(**options) == ["reference"]
    assert attend("reference", **options) == ["reference"]
    for backend in ("cpu", "triton"):
        with pytest.raises(ConfigError, match=f"^backend='{backend}' {reason}.*Use backend='auto'"):
            attend(backend, **options)


@short_ones_too
def test_a_preconditioner_that_requires_grad_gets_its_gradient():
    query, key, value = tokens(batch=1, queries=6)
    change = statistics_of("preconditioner", query, key, "favor++", "center")
    change = change._replace(center_y=change.center_y.clone().requires_grad_())
    with observed_backends() as names:
        favorpp_attention(query, key, value, omega_for(query), statistics=change).sum().backward()
    assert names == ["reference"]
    assert change.center_y.grad is not None


@short_ones_too
def test_log_weights_and_projections_may_require_grad_on_the_cpu():
    query, key, value = tokens(batch=1, queries=6)
    omega = omega_for(query)
    log_weights = log_weights_for(omega)
    leaves = [omega.requires_grad_(), log_weights.requires_grad_()]
    with observed_backends() as names:
        favorpp_attention(query, key, value, omega, log_weights=log_weights).square().sum().backward()
    assert names == ["cpu"]
    assert all(leaf.grad.abs().max() > 0 for leaf in leaves)


@pytest.mark.parametrize(("kernel", "shortest"), [("favor++", 86), ("favor+hyperbolic", 43)])
@pytest.mark.parametrize(("batch", "sequences"), [(1, None), (8, None), (1, 1), (1, 4)])
def test_auto_on_a_cpu_is_the_reference_below_the_length_that_the_table_gives(batch, sequences, kernel, shortest):
    """With 12 heads and 128 features, whatever the batch; (1, 4) are four packed sequences."""
    assert "86 tokens with 12 heads and 128 features" in " ".join(backends.__doc__.split())
    options = {"kernel": kernel, "is_causal": False, "statistics": None, "sequences": sequences}
    for length, chosen in ((shortest - 1, "reference"), (shortest, "cpu")):
        query = torch.empty(1).expand(batch, 12, length * (sequences or 1), 64)
        assert choose_backend("auto", query, query, 128, **options) == chosen
        assert choose_backend("cpu", query, query, 128, **options) == "cpu"


def triton(monkeypatch, *, installed=True, interprets=False, capability=None):
    monkeypatch.setattr(backends, "_has_triton", lambda: installed)
    monkeypatch.setattr(backends, "_interprets", lambda: interprets)
    monkeypatch.setattr(backends, "_compute_capability", lambda device: capability)


def refusal_of_triton(query, **options):
    options = {"num_features": 7, "kernel": "favor++", "is_causal": False, "statistics": None, **options}
    with pytest.raises(ConfigError) as error:
        choose_backend("triton", query, query, **options)
    return str(error.value)


class OnGpu:
    """As much of a tensor on a GPU as the choice looks at."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, dtype=torch.bfloat16, head_dim=64):
        self.dtype, self.shape = dtype, (1, 1, 1, head_dim)


def test_triton_says_what_it_needs(monkeypatch):
    on_cpu = torch.zeros(1, 1, 1, 4)
    triton(monkeypatch, installed=False)
    assert "needs Triton, which is not installed (pip install" in refusal_of_triton(on_cpu)
    triton(monkeypatch)
    assert "needs a CUDA device, or TRITON_INTERPRET=1 for tests, got tensors on cpu" in refusal_of_triton(on_cpu)
    triton(monkeypatch, capability=(7, 5))
    assert "needs compute capability 8.0 or more, cuda:0 has less" in refusal_of_triton(OnGpu())
    triton(monkeypatch, capability=(9, 0))
    assert "takes no float64" in refusal_of_triton(OnGpu(torch.float64))
    assert "takes head_dim up to 256, got 257" in refusal_of_triton(OnGpu(head_dim=257))
    assert "takes up to 512 features, got 513" in refusal_of_triton(OnGpu(), num_features=513)
    twice = refusal_of_triton(OnGpu(), num_features=257, kernel="favor+hyperbolic")
    assert "takes up to 512 features, got 514" in twice
    for message in (twice, refusal_of_triton(OnGpu(), is_causal=True)):
        assert message.endswith("Use backend='auto', which then takes another one.")


def test_auto_on_a_gpu_is_triton_where_it_can(monkeypatch):
    options = {"kernel": "favor++", "is_causal": False, "statistics": None}
    triton(monkeypatch, capability=(8, 0))
    for head_dim, num_features, chosen in ((256, 512, "triton"), (257, 512, "reference"), (256, 513, "reference")):
        query = OnGpu(head_dim=head_dim)
        assert choose_backend("auto", query, query, num_features, **options) == chosen
    query = OnGpu(torch.float64)
    assert choose_backend("auto", query, query, 7, **options) == "reference"
    triton(monkeypatch, capability=(7, 5))
    assert choose_backend("auto", OnGpu(), OnGpu(), 7, **options) == "reference"
    triton(monkeypatch, installed=False)
    assert choose_backend("auto", OnGpu(), OnGpu(), 7, **options) == "reference"
    with pytest.raises(ConfigError, match="needs tensors on a CPU, got some on cuda:0"):
        choose_backend("cpu", OnGpu(), OnGpu(), 7, **options)


def test_auto_on_another_device_is_the_reference():
    meta = torch.zeros(1, 1, 1, 4, device="meta")
    options = {"kernel": "favor++", "is_causal": False, "statistics": None}
    assert choose_backend("auto", meta, meta, 7, **options) == "reference"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_triton_on_cpu_tensors_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr(backends, "_interprets", lambda: False)
    with pytest.raises(ConfigError, match="needs a CUDA device, or TRITON_INTERPRET=1"):
        attend("triton")


@short_ones_too
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_derivatives_that_no_operator_has_are_those_of_the_reference():
    query, key, value = tokens(batch=1, queries=6, dtype=torch.float64)
    omega, direction = omega_for(query), torch.randn_like(query)

    def attend_to(query, backend="auto"):
        return favorpp_attention(query, key, value, omega, kernel="favor+", preconditioning="none", backend=backend)

    expected = torch.func.jvp(lambda q: attend_to(q, "reference"), (query,), (direction,))[1]
    with observed_backends() as names:
        assert torch.equal(torch.func.jvp(attend_to, (query,), (direction,))[1], expected)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(query, direction)
            assert torch.equal(torch.autograd.forward_ad.unpack_dual(attend_to(dual)).tangent, expected)
    assert names == ["reference", "reference"]


@short_ones_too
def test_observers_nest_and_end():
    with observed_backends() as outer:
        attend()
        with observed_backends() as inner:
            attend("reference")
        assert attend() == ["cpu"]
    attend()
    assert inner == ["reference"]
    assert outer == ["cpu", "reference", "cpu"]


def test_an_observer_ends_with_an_error_too():
    with pytest.raises(KeyError), observed_backends() as names:
        raise KeyError
    attend()
    assert names == []
    assert backends._observers == []


@short_ones_too
def test_observers_with_equal_notes_are_told_apart():
    with observed_backends() as outer:
        with observed_backends() as inner:
            pass
        attend()
    assert (outer, inner) == (["cpu"], [])


@short_ones_too
@pytest.mark.parametrize(("asked", "runs"), [("auto", "cpu"), ("cpu", "cpu"), ("reference", "reference")])
def test_every_layer_of_a_converted_model_runs_on_what_its_config_asks_for(asked, runs):
    model = convert_to_favorpp(tiny_model("bert"), FavorppConfig(num_features=8, backend=asked))
    with observed_backends() as names, torch.no_grad():
        model(**token_batch(5, 9))
    assert names == [runs] * model.config.num_hidden_layers


def test_a_converted_model_gives_the_same_on_both_backends():
    outputs = []
    for backend in ("cpu", "reference"):
        model = convert_to_favorpp(tiny_model("bert"), FavorppConfig(num_features=8, exact_window=4, backend=backend))
        outputs.append(model(**token_batch(5, 9)).last_hidden_state[0, :5])
    assert torch.allclose(*outputs, atol=1e-5)


@short_ones_too
def test_a_converted_model_with_a_kernel_of_the_reference_runs_on_it():
    model = convert_to_favorpp(tiny_model("bert"), FavorppConfig.paper(num_features=8, kernel="relu"))
    with observed_backends() as names, torch.no_grad():
        model(**token_batch(5, 9))
    assert set(names) == {"reference"}


def test_the_table_of_backends_says_what_the_code_does():
    table = " ".join(backends.__doc__.split())
    assert set(re.findall(r'``"(cpu|triton|reference|auto)"``', table)) == {"cpu", "triton", "reference", "auto"}
    assert f"head_dim <= {backends.MOST_HEAD_DIM}" in table
    assert f"num_features <= {backends.MOST_FEATURES}" in table
    assert set(re.findall(r'``"(favor[^"]*)"``', table)) == set(backends.POSITIVE_KERNELS)
    assert "8.0 or more" in table


def test_every_backend_has_the_functions_that_its_operators_call():
    steps = [name for name in vars(Backend) if not name.startswith("_")]
    assert set(OPERATORS) == {"cpu", "triton"}
    for name in OPERATORS:
        assert all(hasattr(torch.ops.hf_favorpp, f"{name}_{step}") for step in steps)
    module = importlib.import_module("hf_favorpp.attention.cpu")
    assert sorted(module.__all__) == sorted(steps)
