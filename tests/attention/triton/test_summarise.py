"""The first step and its gradients against the plainest float64, in every shape that tokens come in."""

import sys

import pytest
import torch
from comparison import compare, order_and_count, to

from hf_favorpp.attention.triton import summarise, summarise_backward

TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def plain_summarise(key, value, projection, center, root, linear, scale, order, count, block, first, last):
    """Do one sequence, one head, one block after the other."""
    sequences = key.shape[0] if order is None else order.shape[0]
    ranks = key.shape[2] if order is None else order.shape[1]
    heads = projection.shape[1]
    blocks = [(b * block, (b + 1) * block) for b in range(-(-ranks // block))] if block else [(0, ranks)]
    z, S = [], []
    for n in range(sequences):
        length = ranks if count is None else int(count[n])
        positions = torch.arange(ranks) if order is None else order[n]
        for h in range(heads):
            P, c, R, g = (
                None if t is None else t[min(n, t.shape[0] - 1), h] for t in (projection, center, root, linear)
            )
            row, kv_head = min(n, key.shape[0] - 1), h // (heads // key.shape[1])
            for low, high in blocks:
                mine = positions[max(low, first) : max(0, min(high, length - last))]
                k, v = key[row, kv_head, mine], value[row, kv_head, mine]
                u = k if center is None else k - c
                y = u if root is None else u @ R.mT
                r = -scale / 2 * (y * y).sum(-1) + (0 if linear is None else u @ g)
                log_phi = k @ P.mT + r.unsqueeze(-1)
                z.append(log_phi.logsumexp(0))
                S.append(log_phi.softmax(0).mT @ v)
    z, S = torch.stack(z), torch.stack(S)
    shape = (sequences, heads, len(blocks))
    return z.unflatten(0, shape), S.unflatten(0, shape)


def make(
    rows=2,
    heads=2,
    kv_heads=2,
    length=17,
    head_dim=16,
    value_dim=16,
    num_features=16,
    dtype=torch.float32,
    terms="crg",
    mask=None,
    projections=1,
    constants=1,
    block=0,
    ends=(0, 0),
    layout="projected",
):
    """Return the arguments of ``summarise``, projections rounded to the dtype of the tokens as a converted model's."""
    order, count = order_and_count(mask, rows, length)
    sequences = rows if order is None else order.shape[0]
    projections, constants = (sequences if n == "N" else n for n in (projections, constants))

    def tokens(width):
        if layout == "projected":
            t = torch.randn(rows, length, kv_heads, width).transpose(1, 2)
        elif layout == "columns":  # the last stride is not 1
            t = torch.randn(rows, kv_heads, width, length).mT
        else:
            t = torch.randn(rows, kv_heads, length + 2, width + 3)[:, :, 1:-1, 2:-1]
        t = t.to(dtype)
        if mask is not None:  # what no rank names is never read
            for row in range(rows):
                of_row = range(sequences) if rows == 1 else [row]
                named = [(torch.arange(length) if order is None else order[n])[: count[n]] for n in of_row]
                unnamed = torch.ones(length, dtype=torch.bool).index_fill(0, torch.cat(named).long(), False)
                t[row, :, unnamed] = float("nan")
        return t

    return {
        "key": tokens(head_dim) + 0.5,
        "value": tokens(value_dim),
        "projection": (torch.randn(projections, heads, num_features, head_dim) / head_dim**0.25).to(dtype).float(),
        "center": torch.randn(constants, heads, head_dim) if "c" in terms else None,
        "root": torch.randn(constants, heads, head_dim, head_dim) / head_dim**0.5 if "r" in terms else None,
        "linear": torch.randn(constants, heads, head_dim) / head_dim**0.5 if "g" in terms else None,
        "scale": head_dim**-0.5,
        "order": order,
        "count": count,
        "block": block,
        "first": ends[0],
        "last": ends[1],
    }


CASES = {
    "odd sizes": {"length": 35, "head_dim": 5, "value_dim": 7, "num_features": 7},
    "several tiles": {
        "rows": 1,
        "heads": 1,
        "kv_heads": 1,
        "length": 100,
        "head_dim": 40,
        "value_dim": 16,
        "num_features": 40,
    },
    "wide": {"rows": 1, "heads": 1, "kv_heads": 1, "length": 17, "head_dim": 72, "value_dim": 80, "num_features": 16},
    "one token": {"length": 1, "head_dim": 1, "value_dim": 1, "num_features": 1},
    "three tokens": {"length": 3, "num_features": 40},
    "no terms": {"terms": ""},
    "center only": {"terms": "c"},
    "root only": {"terms": "r"},
    "linear only": {"terms": "g"},
    "constants of each sequence": {"constants": "N", "projections": "N"},
    "grouped heads": {"heads": 6, "kv_heads": 2, "length": 20},
    "mask": {"mask": "padding", "length": 40},
    "row without tokens": {"mask": "empty row"},
    "count alone": {"mask": "shorter", "length": 20},
    "packed": {"rows": 1, "mask": "packed", "length": 41},
    "packed, constants of each sequence": {
        "rows": 1,
        "mask": "packed",
        "length": 41,
        "constants": "N",
        "projections": "N",
    },
    "rows of columns": {"layout": "columns"},
    "slices": {"layout": "slices"},
    "ends": {"ends": (2, 1)},
    "ends that overlap": {"length": 3, "ends": (2, 2)},
    "blocks of 1": {"block": 1, "length": 5},
    "blocks of 4": {"block": 4, "length": 18, "mask": "padding", "ends": (1, 1)},
    "blocks of 16, grouped": {"block": 16, "length": 39, "ends": (1, 2), "heads": 4, "kv_heads": 1, "rows": 1},
    "blocks of 24": {"block": 24, "length": 70, "mask": "padding", "projections": "N", "constants": "N"},
    "blocks, packed": {
        "block": 4,
        "rows": 1,
        "heads": 1,
        "kv_heads": 1,
        "mask": "packed",
        "length": 25,
        "ends": (1, 1),
    },
    "block larger than all": {"block": 64, "length": 17},
    "float16": {"dtype": torch.float16, "length": 40, "head_dim": 40},
    "bfloat16": {"dtype": torch.bfloat16, "length": 40, "head_dim": 40},
    "bfloat16, blocks": {"dtype": torch.bfloat16, "length": 40, "block": 16, "ends": (1, 1)},
}


@pytest.mark.parametrize("case", CASES)
def test_summaries_and_gradients(case, device):
    arguments = make(**CASES[case])
    check(arguments, device, TOLERANCE[arguments["key"].dtype])


def check(arguments, device, tolerance, scale_of_gradients=1.0):
    """Compare outputs and every gradient with those of the plain float64."""
    wide = {name: double(value) for name, value in arguments.items()}
    leaves = [wide[name].requires_grad_() for name in ("key", "value", "projection")]
    z, S = plain_summarise(**wide)
    present = z > float("-inf")
    grad_z, grad_S = (scale_of_gradients * torch.randn_like(t) for t in (z, S))
    loss = (z.masked_fill(~present, 0) * grad_z).sum() + (S * grad_S).sum()
    expected = torch.autograd.grad(loss, leaves)

    there = {name: to(value, device) for name, value in arguments.items()}
    saved = dict(zip("zS", summarise(**there), strict=True))
    compare("z", saved["z"], z, tolerance)
    compare("S", saved["S"], S, tolerance)
    # What comes in for a block without a key means nothing: not even a NaN may pass.
    grad_z = grad_z.masked_fill(~present, float("nan")).float().to(device)
    grad_S = grad_S.masked_fill(~present.unsqueeze(-1), float("nan")).float().to(device)
    found = summarise_backward(grad_z, grad_S, **there, **saved, need_projection=True)
    for name, actual, of in zip(("grad_key", "grad_value", "grad_projection"), found, expected, strict=True):
        compare(name, actual, of, tolerance)
    again = summarise_backward(grad_z, grad_S, **there, **saved, need_projection=False)
    assert again[2].shape == (0,)
    assert torch.equal(again[0], found[0])
    assert torch.equal(again[1], found[1])
    assert found[0].dtype == found[1].dtype == arguments["key"].dtype
    assert {t.dtype for t in (*saved.values(), found[2])} == {torch.float32}


def test_a_program_over_several_blocks(device, monkeypatch):
    monkeypatch.setattr(sys.modules["hf_favorpp.attention.triton.summarise"], "splits", lambda programs, device: 2)
    check(make(length=40, block=8, mask="padding", ends=(1, 1)), device, TOLERANCE[torch.float32])


def test_gradients_of_summaries_may_exceed_float16(device):
    arguments = make(length=100, dtype=torch.float16, rows=1, terms="")
    arguments["key"] *= 0.2
    check(arguments, device, TOLERANCE[torch.float16], scale_of_gradients=1e5)


def test_large_logits(device):
    arguments = make(length=40, rows=1)
    arguments["key"] *= 10
    check(arguments, device, 1e-3)


def double(value):
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().double() if is_float else value
