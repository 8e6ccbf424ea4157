"""Memory of one training step, by what the allocator is asked for: every tensor, also those inside operators."""

import pytest
import torch
from cases import omega_for

from hf_favorpp import favorpp_attention
from hf_favorpp.attention.cpu.chunks import scratch

HEADS, HEAD_DIM, FEATURES = 2, 8, 128
LENGTHS = (4096, 8192, 16384)
MATRIX = 4 * HEADS * FEATURES
"""Bytes of a float32 matrix of logits, per token."""

NEIGHBOURHOODS = [(0, (0, 0)), (0, (1, 1)), (32, (1, 1))]


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr("hf_favorpp.attention.cpu.chunks.CHUNK_LOGITS", 128 * HEADS * FEATURES)


def step(backend, length, window=0, ends=(0, 0), mask=None):
    """Return a training step on given inputs, its gradients included."""
    query, key, value = (torch.randn(1, HEADS, length, HEAD_DIM, requires_grad=True) for _ in range(3))
    omega = omega_for(query, FEATURES).float()
    options = {"exact_window": window, "exact_ends": ends, "preconditioning": "center", "key_mask": mask}

    def run():
        out = favorpp_attention(query, key, value, omega, backend=backend, **options)
        return torch.autograd.grad(out.sum(), (query, key, value))

    return run


def allocations(function):
    """Return the bytes of each allocation (positive) and release (negative) in order."""
    scratch.pieces.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def peak(sizes):
    total = most = 0
    for size in sizes:
        total += size
        most = max(most, total)
    return most


@pytest.mark.parametrize(("window", "ends", "masked"), [(0, (0, 0), False), (0, (1, 1), True), (32, (1, 1), True)])
def test_peak_memory_grows_by_a_constant_per_token(window, ends, masked):
    peaks = {}
    for backend in ("cpu", "reference"):
        peaks[backend] = []
        for length in LENGTHS:
            mask = torch.arange(length).remainder(3).gt(0).unsqueeze(0) if masked else None
            peaks[backend].append(peak(allocations(step(backend, length, window, ends, mask))))
    for backend, (short, middle, long) in peaks.items():
        assert abs((long - middle) - 2 * (middle - short)) <= 0.02 * long, f"{backend} is not linear: {peaks[backend]}"
    per_token = {name: (sizes[2] - sizes[1]) / (LENGTHS[2] - LENGTHS[1]) for name, sizes in peaks.items()}
    # What a block sums up is as large as w rows of logits: with w = 32 and d = 8, a quarter of a matrix each time.
    assert per_token["cpu"] < (1 if window == 0 else 8) * MATRIX, per_token
    assert per_token["reference"] > 2 * per_token["cpu"], per_token


@pytest.mark.parametrize(("length", "window", "ends"), [(2048, 0, (0, 0)), (4096, 0, (1, 1)), (4096, 32, (1, 1))])
def test_no_matrix_of_logits_is_ever_allocated(length, window, ends):
    assert max(allocations(step("cpu", length, window, ends))) < MATRIX * length
    assert max(allocations(step("reference", length, window, ends))) >= MATRIX * length


@pytest.mark.parametrize(("window", "ends"), NEIGHBOURHOODS)
def test_no_matrix_of_logits_is_kept_for_the_backward(window, ends):
    kept = {}
    for backend in ("cpu", "reference"):
        sizes = []

        def note(t, sizes=sizes):
            sizes.append(t.numel())
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            step(backend, 2048, window, ends)()
        kept[backend] = max(sizes)
    assert kept["cpu"] < HEADS * FEATURES * 2048 <= kept["reference"]


def test_scratch_memory_is_that_of_one_chunk_whatever_the_length_and_the_batch():
    held = []
    for length, batch in ((4096, 1), (8192, 1), (4096, 3)):
        scratch.pieces.clear()
        tensors = [torch.randn(batch, HEADS, length, HEAD_DIM, requires_grad=True) for _ in range(3)]
        favorpp_attention(*tensors, omega_for(tensors[0], FEATURES), backend="cpu").sum().backward()
        held.append(sum(piece.nbytes for piece in scratch.pieces.values()))
    assert held[0] == held[1] == held[2]
    assert held[0] <= 6 * 128 * MATRIX
