"""What is timed of attention alone is attention: layouts, outputs, gradients, backends, floor, peers."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from benchmark_peers import PEERS, installed_peers
from tiny_benchmark import CPU, tiny_shape

from hf_favorpp import FavorppConfig, FavorppError
from hf_favorpp.benchmarking import attention as benchmark_attention
from hf_favorpp.benchmarking import lineup as benchmark_lineup
from hf_favorpp.benchmarking.attention import (
    attention_lineup,
    attention_steps,
    error_to_reference,
    favorpp_attend,
    make_inputs,
)
from hf_favorpp.benchmarking.floor import Machine, attention_bytes, attention_flops, floor_ms, measure_machine
from hf_favorpp.benchmarking.lineup import (
    GPU_BACKENDS,
    SDPA,
    Observer,
    config_name,
    sdpa_contestants,
    softmax_attend,
    told,
)
from hf_favorpp.benchmarking.memory import is_out_of_memory
from hf_favorpp.benchmarking.timing import CannotRunError


def softmax(inputs):
    q, k, v = (tensor.detach().double() for tensor in (inputs.query, inputs.key, inputs.value))
    return ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1) @ v


def distance(out, target):
    return float((out.detach().double() - target).norm() / target.norm())


def easy_inputs(length=64, **shape):
    """Small logits and values with a mean, which few features estimate well."""
    inputs = make_inputs(length, tiny_shape(**shape))
    with torch.no_grad():
        inputs.query.mul_(0.7)
        inputs.key.mul_(0.7)
        inputs.value.add_(1)
    return inputs


def test_inputs_lie_in_memory_as_a_model_makes_them():
    inputs = make_inputs(7, tiny_shape(torch.bfloat16))
    for tensor in (inputs.query, inputs.key, inputs.value, inputs.grad_out):
        assert tensor.shape == (2, 3, 7, 16)
        assert tensor.stride() == (7 * 3 * 16, 16, 3 * 16, 1)
        assert tensor.dtype == torch.bfloat16
    assert all(tensor.is_leaf and tensor.requires_grad for tensor in (inputs.query, inputs.key, inputs.value))
    assert not inputs.grad_out.requires_grad
    assert torch.equal(make_inputs(7, tiny_shape()).query, make_inputs(7, tiny_shape()).query)


def test_softmax_is_sdpa_and_its_gradients_are_those_of_softmax():
    inputs = easy_inputs()
    (contestant,) = sdpa_contestants(CPU, lambda attend: attention_steps(attend, inputs))
    assert (contestant.name, contestant.growth) == (SDPA, 2)
    out = contestant.steps["forward"]()
    assert not out.requires_grad
    assert distance(out, softmax(inputs)) < 1e-6
    qkv = [tensor.detach().double().requires_grad_() for tensor in (inputs.query, inputs.key, inputs.value)]
    plain = ((qkv[0] @ qkv[1].mT) * 16**-0.5).softmax(-1) @ qkv[2]
    expected = torch.autograd.grad(plain, qkv, inputs.grad_out.double())
    for name, gradient, target in zip(("query", "key", "value"), contestant.steps["train"](), expected, strict=True):
        assert distance(gradient, target) < 1e-5, name
    assert all(tensor.grad is None for tensor in (inputs.query, inputs.key, inputs.value))


def test_on_a_gpu_every_backend_of_sdpa_takes_part():
    contestants = sdpa_contestants(torch.device("cuda"), lambda attend: {"forward": lambda: None})
    assert [each.name for each in contestants] == [f"{SDPA} {name}" for name in ("flash", "efficient", "cudnn")]
    for each, backend in zip(contestants, GPU_BACKENDS.values(), strict=True):
        with each.context():
            assert torch._C._get_flash_sdp_enabled() == (backend.name == "FLASH_ATTENTION")
            assert torch._C._get_mem_efficient_sdp_enabled() == (backend.name == "EFFICIENT_ATTENTION")
            assert not torch._C._get_math_sdp_enabled()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"preconditioning": "none"},
        {"preconditioning": "full", "statistics": "calibrated"},
        {"kernel": "favor+"},
        {"exact_window": 8, "exact_ends": (1, 1)},
    ],
    ids=str,
)
def test_favorpp_estimates_softmax(options):
    inputs = easy_inputs()
    target = softmax(inputs)
    distances = {}
    for num_features in (16, 1024):
        steps = attention_steps(favorpp_attend(FavorppConfig(num_features=num_features, **options), inputs), inputs)
        out = steps["forward"]()
        assert torch.isfinite(out).all()
        assert all(torch.isfinite(gradient).all() for gradient in steps["train"]())
        distances[num_features] = distance(out, target)
    uniform = distance(inputs.value.mean(-2, keepdim=True).expand_as(target), target)
    assert 1e-6 < distances[1024] < distances[16] / 2  # 1 / 8 by the rate of the estimate
    assert distances[1024] < uniform / (1 if options.get("kernel") == "favor+" else 2)


def test_calibrated_statistics_are_not_computed_in_the_timed_call(monkeypatch):
    inputs = easy_inputs()
    attend = favorpp_attend(FavorppConfig(num_features=8, statistics="calibrated"), inputs)
    monkeypatch.setattr("hf_favorpp.attention.reference.sequence_statistics", None)
    assert torch.isfinite(attend(inputs.query, inputs.key, inputs.value)).all()
    with pytest.raises(TypeError):
        favorpp_attend(FavorppConfig(num_features=8, backend="reference"), inputs)(
            inputs.query, inputs.key, inputs.value
        )


def test_a_wrong_answer_is_not_timed(monkeypatch):
    config = FavorppConfig(num_features=8)
    error, refusal = error_to_reference(1000, tiny_shape(torch.bfloat16), config)
    assert error < 0.02
    assert refusal is None
    attention = benchmark_attention.favorpp_attention

    def wrong(*args, backend, **options):
        return attention(*args, backend="reference", **options) * (1.01 if backend == "auto" else 1)

    monkeypatch.setattr(benchmark_attention, "favorpp_attention", wrong)
    error, refusal = error_to_reference(64, tiny_shape(), config)
    assert error == pytest.approx(0.01, rel=1e-3)
    with pytest.raises(CannotRunError, match=r"differs from the reference by 1\.0e-02, more than 0\.001"):
        refusal(None, None, None)
    lineup = attention_lineup(64, tiny_shape(), [config])
    assert lineup.entries[0].more["error_to_reference"] == error
    for step in lineup.contestants[1].steps.values():
        with pytest.raises(CannotRunError, match="differs from the reference"):
            step()


def test_a_backend_that_refuses_says_why(monkeypatch):
    def refuse(*args, **options):
        raise FavorppError("this backend needs a GPU")

    monkeypatch.setattr(benchmark_attention, "favorpp_attention", refuse)
    error, refusal = error_to_reference(64, tiny_shape(), FavorppConfig(num_features=8))
    assert error is None
    with pytest.raises(CannotRunError, match="this backend needs a GPU"):
        refusal(None, None, None)


def test_a_lineup_has_one_contestant_per_configuration_and_each_peer_once_per_number_of_features():
    configs = [FavorppConfig(num_features=m, preconditioning=p) for m in (4, 8) for p in ("none", "center")]
    lineup = attention_lineup(16, tiny_shape(), configs, peers={"peer": lambda shape, m: softmax_attend})
    names = [contestant.name for contestant in lineup.contestants]
    assert len(names) == len(set(names)) == 1 + 4 + 2
    assert [entry.name for entry in lineup.entries] == [config_name(config) for config in configs]
    assert [entry.peers for entry in lineup.entries] == [{"peer": "peer M=4"}] * 2 + [{"peer": "peer M=8"}] * 2
    assert lineup.entries[0].more["floor_forward_ms"] is None


def test_the_backend_is_the_one_that_ran(monkeypatch):
    from contextlib import contextmanager

    opened = []

    @contextmanager
    def observed_backends():
        opened.append(names := [])
        yield names

    monkeypatch.setattr(benchmark_lineup, "observed_backends", observed_backends)
    observer = Observer("auto")
    step = observer.watch(lambda: opened[-1].append("cpu"))
    assert observer.backend == "auto", "nothing ran yet"
    for _ in range(3):
        step()
    assert observer.backend == "cpu"
    assert len(opened) == 1, "the first call only, which is not timed"
    observer.watch(lambda: opened[-1].append("reference"))()
    assert observer.backend == "cpu+reference"


def test_errors_of_rivals_are_told_but_not_those_of_memory():
    def fail():
        raise RuntimeError("No available kernel.\nAborting.")

    def exhaust():
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(CannotRunError, match=r"^cannot run: No available kernel\.$"):
        told(fail, RuntimeError)()
    with pytest.raises(torch.OutOfMemoryError) as error:
        told(exhaust, RuntimeError)()
    assert is_out_of_memory(error.value)


def test_the_floor_counts_four_tensors_and_four_products():
    B, H, L, d, M = 2, 3, 5, 4, 7
    assert attention_bytes(B, H, L, d, itemsize=2) == 4 * B * H * L * d * 2  # q, k, v and the output
    products = [(L, d, M), (L, d, M), (M, L, d), (L, M, d)]  # two projections, S, and the output
    assert attention_flops(B, H, L, d, M) == B * H * sum(2 * a * b * c for a, b, c in products)
    exact = [(L, d, 3), (L, 3, d)]
    with_window = B * H * sum(2 * a * b * c for a, b, c in products + exact)
    assert attention_flops(B, H, L, d, M, exact_keys=3) == with_window
    machine = Machine(bytes_per_second=1e9, flops_per_second=1e12)
    assert floor_ms(machine, traffic=2 * 10**9, flops=10**12) == pytest.approx(2000)
    assert floor_ms(machine, traffic=10**9, flops=3 * 10**12) == pytest.approx(3000)


def test_the_machine_is_measured():
    machine = measure_machine(CPU, torch.float32, copied_bytes=2**20, size=64)
    assert 1e7 < machine.bytes_per_second < 1e13
    assert 1e7 < machine.flops_per_second < 1e14
    lineup = attention_lineup(16, tiny_shape(), [FavorppConfig(num_features=8, exact_window=4)], machine=machine)
    flops = attention_flops(2, 3, 16, 16, 8, exact_keys=4)
    expected = floor_ms(machine, attention_bytes(2, 3, 16, 16, 4), flops)
    assert lineup.entries[0].more["floor_forward_ms"] == expected


def test_peers_that_are_not_installed_are_left_out_with_the_reason(monkeypatch):
    for module_name, _ in PEERS.values():
        monkeypatch.setitem(sys.modules, module_name, None)
    found, missing = installed_peers()
    assert found == {}
    assert set(missing) == {"performer-pytorch", "pytorch-fast-transformers"}
    assert missing["performer-pytorch"].endswith("pip install performer-pytorch")


class FastAttention(torch.nn.Module):
    """The signature of performer-pytorch's."""

    def __init__(self, dim_heads, nb_features=None):
        super().__init__()
        self.sizes = (dim_heads, nb_features)

    def forward(self, q, k, v):
        return softmax_attend(q, k, v)


def test_a_peer_gets_the_same_tensors_and_number_of_features(monkeypatch):
    monkeypatch.setitem(sys.modules, "performer_pytorch", types.SimpleNamespace(FastAttention=FastAttention))
    found, _ = installed_peers()
    attend = found["performer-pytorch"](tiny_shape(), 24)
    assert attend.sizes == (16, 24)
    inputs = easy_inputs()
    assert distance(attention_steps(attend, inputs)["forward"](), softmax(inputs)) < 1e-6


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.filterwarnings("default")
def test_an_installed_peer_estimates_softmax(name):
    found, missing = installed_peers()
    if name in missing:
        pytest.skip(missing[name])
    inputs = easy_inputs()
    steps = attention_steps(found[name](tiny_shape(), 2048), inputs)
    assert distance(steps["forward"](), softmax(inputs)) < 0.05
    assert all(torch.isfinite(gradient).all() for gradient in steps["train"]())
