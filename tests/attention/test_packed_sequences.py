"""Packed sequences against each sequence alone, and what is refused."""

import itertools

import pytest
import torch
from cases import F64, KERNELS, assert_agrees, mask_of, omega_for, run, statistics_of, tokens

from hf_favorpp import favorpp_attention
from hf_favorpp.attention.packing import pack, packing_mask, unpack
from hf_favorpp.errors import InputError

LENGTHS = {
    "several": (70, 1, 5, 129, 16),
    "one": (40,),
    "of one token": (1, 1, 1),
    "some empty": (0, 5, 0, 0, 66, 0),
    "none but empty around one": (0, 3, 0),
}
NEIGHBOURHOODS = [(0, (0, 0)), (0, (1, 1)), (1, (0, 0)), (4, (3, 2)), (16, (1, 1)), (1000, (0, 0)), (4, (1000, 1000))]


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr("hf_favorpp.attention.cpu.chunks.CHUNK_LOGITS", 1)


def starts(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)])


def one_by_one(tensors, omega, lengths, **options):
    """Attend within each sequence by the reference, and put outputs and gradients together again."""
    bounds, parts = starts(lengths).tolist(), []
    gradient = torch.randn(1, tensors[0].shape[1], sum(lengths), tensors[2].shape[3], dtype=F64)
    leaves = [t.detach().clone().requires_grad_() for t in (*tensors, omega)]
    for begin, end in itertools.pairwise(bounds):
        if begin < end:
            own = [t[:, :, begin:end] for t in leaves[:3]]
            parts.append(favorpp_attention(*own, leaves[3], backend="reference", **options))
    out = torch.cat(parts, dim=2)
    grads = torch.autograd.grad(out, leaves, gradient)
    return gradient, dict(zip(("output", "query", "key", "value", "omega"), (out.detach(), *grads), strict=True))


def packed(backend, tensors, omega, lengths, gradient, *, dtype=torch.int32, **options):
    leaves = [t.detach().clone().requires_grad_() for t in (*tensors, omega)]
    out = favorpp_attention(*leaves, cu_seqlens=starts(lengths).to(dtype), backend=backend, **options)
    grads = torch.autograd.grad(out, leaves, gradient, materialize_grads=True)
    return dict(zip(("output", "query", "key", "value", "omega"), (out.detach(), *grads), strict=True))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(("window", "ends"), NEIGHBOURHOODS)
@pytest.mark.parametrize("preconditioning", ["none", "full"])
def test_each_sequence_attends_as_if_alone(backend, lengths, window, ends, preconditioning):
    tensors = tokens(batch=1, queries=sum(lengths), kv_heads=2, value_dim=3)
    omega = omega_for(tensors[0])
    options = {"exact_window": window, "exact_ends": ends, "preconditioning": preconditioning}
    gradient, expected = one_by_one(tensors, omega, lengths, **options)
    assert_agrees(packed(backend, tensors, omega, lengths, gradient, **options), expected, 1e-11)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", ["sequence", "statistics", "preconditioner"])
def test_statistics_of_each_sequence_or_calibrated_ones(backend, kernel, kind):
    lengths = (30, 5, 41)
    tensors = tokens(batch=1, queries=sum(lengths))
    omega = omega_for(tensors[0])
    statistics = statistics_of(kind, *tokens(batch=3, queries=50, seed=1)[:2], kernel, "diagonal")
    options = {"kernel": kernel, "preconditioning": "diagonal", "statistics": statistics, "exact_window": 8}
    gradient, expected = one_by_one(tensors, omega, lengths, **options)
    assert_agrees(packed(backend, tensors, omega, lengths, gradient, **options), expected, 1e-11)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("max_seqlen", [None, 41, 60, 1000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_longest_may_be_given_or_more_than_it(backend, max_seqlen, dtype):
    lengths = (30, 5, 41)
    tensors = tokens(batch=1, queries=sum(lengths))
    omega = omega_for(tensors[0])
    options = {"exact_window": 8, "exact_ends": (1, 1), "preconditioning": "center"}
    gradient, expected = one_by_one(tensors, omega, lengths, **options)
    result = packed(backend, tensors, omega, lengths, gradient, dtype=dtype, max_seqlen=max_seqlen, **options)
    assert_agrees(result, expected, 1e-11)


@pytest.mark.parametrize("window", [0, 8])
def test_the_same_as_padded(window):
    """Packing changes where tokens lie, and nothing else."""
    lengths = torch.tensor([30, 5, 41])
    tensors = tokens(batch=1, queries=int(lengths.sum()), dtype=torch.float32)
    omega, cu_seqlens = omega_for(tensors[0]).float(), starts(lengths.tolist())
    mask = packing_mask(cu_seqlens, 41)
    padded = favorpp_attention(
        *(unpack(t, cu_seqlens, 41) for t in tensors), omega, key_mask=mask, exact_window=window, backend="cpu"
    )
    out = favorpp_attention(*tensors, omega, cu_seqlens=cu_seqlens, exact_window=window, backend="cpu")
    assert torch.allclose(out, pack(padded, cu_seqlens), rtol=0, atol=2e-6)


def test_the_cpu_backend_reads_packed_rows_in_place():
    """No padded copy: with one long sequence among many short ones it would be 50 times the row."""
    lengths = [1] * 99 + [100]
    tensors = tokens(batch=1, queries=sum(lengths), heads=1)
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            leaves = torch.utils._pytree.tree_leaves(out)
            sizes.extend(t.numel() for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point())
            return out

    for backend, is_padded in (("reference", True), ("cpu", False)):
        sizes.clear()
        with Sizes():
            favorpp_attention(*tensors, omega_for(tensors[0]), cu_seqlens=starts(lengths), backend=backend)
        assert (max(sizes) >= 100 * 100 * 5) == is_padded


def test_packed_and_padded_rows_give_the_same_layout():
    tensors = tokens(batch=1, queries=12)
    expected = run("cpu", tensors, omega_for(tensors[0]))["output"]
    out = favorpp_attention(*tensors, omega_for(tensors[0]), cu_seqlens=starts((12,)), backend="cpu")
    assert torch.equal(out, expected)
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("backend", ["auto", "reference", "cpu"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_mask": mask_of("right", 1, 12)}, "have no padding and no causal form; got a mask"),
        ({"query_mask": mask_of("right", 1, 12)}, "have no padding and no causal form; got a mask"),
        ({"is_causal": True, "kernel": "favor+"}, "have no padding and no causal form"),
        ({"batch": 2}, r"single row with as many queries as keys, got query \(2, 4, 12, 5\)"),
        ({"keys": 11}, r"single row with as many queries as keys, .*key \(1, 4, 11, 5\)"),
        ({"cu_seqlens": torch.tensor([[0, 12]])}, r"must be \(sequences \+ 1,\) int32 or int64, got .*\(1, 2\)"),
        ({"cu_seqlens": torch.tensor([0])}, r"got torch.int64 \(1,\)"),
        ({"cu_seqlens": torch.tensor([0.0, 12.0])}, "got torch.float32"),
        ({"cu_seqlens": torch.tensor([0, 5, 11])}, "row of 12 tokens, cu_seqlens from 0 to 11"),
        ({"cu_seqlens": torch.tensor([1, 12])}, "from 1 to 12"),
        ({"cu_seqlens": torch.tensor([0, 13])}, "from 0 to 13"),
        ({"cu_seqlens": torch.tensor([0, 8, 4, 12])}, "parts of -4 to 8 tokens"),
        ({"max_seqlen": 6}, "parts of 5 to 7 tokens, max_seqlen=6"),
        ({"max_seqlen": 0}, "max_seqlen=0"),
    ],
)
def test_what_does_not_fit_is_refused(backend, change, message):
    change = dict(change)
    tensors = tokens(batch=change.pop("batch", 1), queries=12, keys=change.pop("keys", 12))
    options = {"cu_seqlens": torch.tensor([0, 5, 12]), **change}
    with pytest.raises(InputError, match=message):
        favorpp_attention(*tensors, omega_for(tensors[0]), backend=backend, **options)
