"""The two ways to summarise all other blocks, against autograd through the plain one."""

import pytest
import torch
from cases import F64

from hf_favorpp.attention.cpu.other_blocks import other_blocks as one_by_one
from hf_favorpp.attention.cpu.other_blocks import other_blocks_backward as one_by_one_backward
from hf_favorpp.attention.neighbourhood import other_blocks
from hf_favorpp.attention.other_blocks import by_pairs, by_pairs_backward

WAYS = {"by pairs": (by_pairs, by_pairs_backward), "one by one": (one_by_one, one_by_one_backward)}


def summaries(blocks, spread, empty):
    generator = torch.Generator().manual_seed(0)
    z = spread * torch.randn(2, 3, blocks, 5, generator=generator, dtype=F64)
    S = torch.randn(2, 3, blocks, 5, 4, generator=generator, dtype=F64)
    for block in empty:
        if block < blocks:
            z[:, :, block], S[:, :, block] = float("-inf"), 0
    return z, S


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("blocks", [2, 3, 4, 7, 8, 17])
@pytest.mark.parametrize("spread", [1, 300])
@pytest.mark.parametrize("empty", [(), (0,), (1,), (0, 2), (0, 1, 2, 3)])
def test_values_and_gradients(way, blocks, spread, empty, monkeypatch):
    monkeypatch.setattr("hf_favorpp.attention.cpu.chunks.CHUNK_LOGITS", 150)  # two blocks at a time
    forward, backward = WAYS[way]
    z, S = summaries(blocks, spread, empty)
    leaves = z.clone().requires_grad_(), S.clone().requires_grad_()
    expected = other_blocks(leaves)
    found = forward(z, S)
    torch.testing.assert_close(found, tuple(t.detach() for t in expected), atol=1e-12, rtol=1e-10)
    nothing, gone = torch.isneginf(found[0]), torch.isneginf(z)
    grads = [torch.randn_like(t) for t in found]
    outputs = torch.where(nothing, 0, expected[0]), expected[1]
    of_z, of_S = torch.autograd.grad(outputs, leaves, [grads[0], grads[1].masked_fill(nothing.unsqueeze(-1), 0)])
    for garbage in (0.0, float("nan")):  # what comes back to the summary of nothing
        given = grads[0].masked_fill(nothing, garbage), grads[1].masked_fill(nothing.unsqueeze(-1), garbage)
        to_z, to_S = backward(*given, z, S, *found)
        torch.testing.assert_close(to_z[~gone], of_z[~gone], atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(to_S[~gone], of_S[~gone], atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("way", WAYS)
def test_a_single_block_has_no_others(way):
    forward, backward = WAYS[way]
    z, S = summaries(1, 1, ())
    found = forward(z, S)
    assert torch.isneginf(found[0]).all()
    assert (found[1] == 0).all()
    assert all((t == 0).all() for t in backward(torch.ones_like(z), torch.ones_like(S), z, S, *found))
