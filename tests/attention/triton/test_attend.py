"""The second step and its gradients against plain float64 formulas and autograd, one head of a sequence at a time."""

import pytest
import torch

from hf_favorpp.attention.triton.attend import attend, attend_backward

F64 = torch.float64
INF = float("inf")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
GRADIENTS = ("query", "key", "value", "projection", "bias", "S")


def plain_attend(problem):
    """Return out, (rows, H, L, D), and the logsumexps of all named queries, one (count,) each."""
    p = problem
    rows, heads, length, _ = p["query"].shape
    out = torch.zeros(rows, heads, length, p["S"].shape[-1], dtype=F64)
    logsumexps = []
    for n in range(p["S"].shape[0]):
        row = n if rows > 1 else 0
        positions = positions_of(p, n)
        for h in range(heads):
            q = p["query"][row, h, positions]
            logits, values = logits_and_values(p, n, row, h, q, positions)
            lse = logits.logsumexp(-1)
            weights = (logits - lse.masked_fill(lse == -INF, 0).unsqueeze(-1)).exp()
            out = out.index_put(
                (torch.tensor(row), torch.tensor(h), positions), torch.einsum("ij,ijd->id", weights, values)
            )
            logsumexps.append(lse)
    return out, logsumexps


def positions_of(p, n):
    ranks = torch.arange(p["query"].shape[2] if p["order"] is None else p["order"].shape[1])
    real = ranks if p["count"] is None else ranks[: p["count"][n]]
    return real if p["order"] is None else p["order"][n, : len(real)].long()


def logits_and_values(p, n, row, h, q, positions):
    """Return the logits of each query, (count, M + count), and a value for each, (count, M + count, D)."""
    count = len(positions)
    own = of_head(p["projection"], n, h)
    ranks = torch.arange(count)
    blocks = ranks // p["block"] if p["block"] else torch.zeros_like(ranks)
    logits = q @ own.T + p["bias"][n, h][blocks]
    values = p["S"][n, h][blocks]
    if p["key"] is None:
        return logits, values
    u = q if p["center"] is None else q - of_head(p["center"], n, h)
    y = u if p["root"] is None else u @ of_head(p["root"], n, h).T
    r = -p["scale"] / 2 * y.square().sum(-1)
    if p["linear"] is not None:
        r = r + u @ of_head(p["linear"], n, h)
    h_kv = h // (p["query"].shape[1] // p["key"].shape[1])
    k, v = p["key"][row, h_kv, positions], p["value"][row, h_kv, positions]
    end = (ranks < p["first"]) | (ranks >= count - p["last"])
    seen = end.expand(count, count)
    if p["block"]:
        seen = seen | (blocks.unsqueeze(1) == blocks)
    exact = (p["scale"] * q @ k.T).masked_fill(~seen, -INF)
    return torch.cat((logits + r.unsqueeze(-1), exact), -1), torch.cat((values, v.expand(count, -1, -1)), 1)


def of_head(t, n, h):
    return t[n if t.shape[0] > 1 else 0, h]


def make_problem(
    *,
    sequences=2,
    rows=None,
    heads=2,
    kv_heads=None,
    length=37,
    d=16,
    D=None,
    M=7,
    counts=None,
    shuffled=False,
    block=0,
    ends=(0, 0),
    keys=None,
    shared=False,
    term=(True, True, True),
    dtype=torch.float32,
    size=1.0,
):
    """Draw arguments of attend as float64 tensors that ``dtype`` holds exactly, by name."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, like=dtype):
        return torch.randn(*shape, generator=generator).to(like).to(F64)

    rows = rows or sequences
    kv_heads = kv_heads or heads
    D = D or d
    order = count = None
    ranks = length
    if counts is not None:
        count = torch.tensor(counts, dtype=torch.int32)
        if rows == sequences:
            order = torch.stack([torch.randperm(length, generator=generator) for _ in range(sequences)])
            order = order if shuffled else order.sort().values
        else:  # several sequences in one row, their tokens scattered over it
            ranks = max(counts)
            places = torch.randperm(length, generator=generator).split([*counts, length - sum(counts)])
            order = torch.stack([torch.cat((p, torch.full((ranks - len(p),), 10**6))) for p in places[:-1]])
        order = order.int()
    blocks = -(-ranks // block) if block else 1
    some = 1 if shared else sequences
    keys = (block > 0 or any(ends)) if keys is None else keys
    return {
        "query": size * draw(rows, heads, length, d),
        "key": draw(rows, kv_heads, length, d) if keys else None,
        "value": draw(rows, kv_heads, length, D) if keys else None,
        "projection": draw(some, heads, M, d),
        "bias": draw(sequences, heads, blocks, M, like=torch.float32),
        "S": draw(sequences, heads, blocks, M, D),
        "center": 0.3 * draw(some, heads, d, like=torch.float32) if term[0] else None,
        "root": 0.3 * draw(some, heads, d, d, like=torch.float32) if term[1] else None,
        "linear": draw(some, heads, d, like=torch.float32) if term[2] else None,
        "scale": d**-0.5,
        "order": order,
        "count": count,
        "block": block,
        "first": ends[0],
        "last": ends[1],
    }


def to_device(problem, dtype, device):
    """Return the arguments as the kernels take them."""
    kinds = dict.fromkeys(("query", "key", "value"), dtype)
    return {
        name: t.to(device, kinds.get(name, torch.float32 if t.dtype == F64 else t.dtype)) if torch.is_tensor(t) else t
        for name, t in problem.items()
    }


def assert_near(found, wanted, tolerance, name):
    assert found.shape == wanted.shape, name
    assert torch.isfinite(found).all(), name
    scale = max(1e-3, wanted.abs().max().item()) if wanted.numel() else 1
    assert (found.to("cpu", F64) - wanted).abs().max().item() <= tolerance * scale, name


def check(problem, dtype, device, need_projection=True, tolerance=None):
    """Compare output, logsumexp and every gradient with float64; positions that no rank names hold NaN for kernels."""
    tolerance = tolerance or TOLERANCE[dtype]
    leaves = {name: problem[name].requires_grad_() for name in GRADIENTS if problem[name] is not None}
    wanted, logsumexps = plain_attend(problem)
    grad_out = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = torch.autograd.grad(wanted, list(leaves.values()), grad_out.to(F64), allow_unused=True)
    grads = {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), grads, strict=True)}
    problem = {name: t.detach() if torch.is_tensor(t) else t for name, t in problem.items()}
    arguments = to_device(problem, dtype, device)
    grad_out = grad_out.to(device)
    named = torch.zeros(wanted.shape[0], wanted.shape[2], dtype=torch.bool)
    for n in range(problem["S"].shape[0]):
        named[n if len(named) > 1 else 0, positions_of(problem, n)] = True
    hidden = ~named[:, None, :, None].to(device)
    for name in ("query", "key", "value"):
        if arguments[name] is not None:
            arguments[name] = arguments[name].masked_fill(hidden, float("nan"))

    out, logsumexp = attend(**arguments)
    assert out.dtype == dtype
    assert logsumexp.dtype == torch.float32
    assert_near(out, wanted.detach(), tolerance, "out")
    by_rank = [logsumexp[n, h].cpu() for n in range(logsumexp.shape[0]) for h in range(logsumexp.shape[1])]
    for found, lse in zip(by_rank, logsumexps, strict=True):
        torch.testing.assert_close(found[: len(lse)].to(F64), lse.detach(), atol=30 * tolerance, rtol=1e-2)

    found = attend_backward(
        grad_out.masked_fill(hidden, float("nan")),
        **arguments,
        out=out,
        logsumexp=logsumexp,
        need_projection=need_projection,
    )
    for name, gradient in zip(GRADIENTS, found, strict=True):
        if name in grads and (need_projection or name != "projection"):
            assert gradient.dtype == arguments[name].dtype, name
            assert_near(gradient, grads[name], tolerance, name)
        else:
            assert gradient.shape == (0,), name
    return out, found


CASES = {
    "features alone": {"d": 5, "D": 3, "length": 3, "M": 40},
    "features alone, many queries": {"length": 150, "d": 16, "D": 40, "M": 7},
    "one token": {"length": 1, "d": 40, "M": 16, "block": 4, "ends": (1, 1)},
    "masked": {"counts": (20, 0), "shuffled": True, "d": 16, "D": 5},
    "packed": {"sequences": 3, "rows": 1, "counts": (17, 0, 9), "length": 30, "block": 4, "ends": (1, 1)},
    "packed, features alone": {"sequences": 3, "rows": 1, "counts": (17, 3, 9), "length": 30},
    "blocks": {"block": 16, "length": 37, "term": (True, False, False)},
    "blocks of one": {"block": 1, "length": 4, "ends": (1, 0), "M": 3, "heads": 1},
    "blocks of no whole tile": {"block": 20, "length": 70, "d": 5, "D": 16, "M": 20, "sequences": 1},
    "a block longer than the sequence": {"block": 100, "length": 17, "ends": (0, 2)},
    "ends alone": {"ends": (2, 1), "length": 70, "counts": (70, 33), "sequences": 2, "heads": 1},
    "ends that overlap": {"ends": (3, 4), "length": 9, "counts": (5, 2, 9), "sequences": 3, "block": 4, "heads": 1},
    "more ends than a tile holds": {"ends": (18, 3), "length": 40, "block": 8, "sequences": 1},
    "grouped heads": {
        "sequences": 1,
        "heads": 4,
        "kv_heads": 2,
        "block": 4,
        "ends": (1, 1),
        "length": 17,
        "term": (False,) * 3,
    },
    "shared projections": {"shared": True, "block": 4, "ends": (1, 1), "length": 17},
    "shared projections, one block": {"shared": True, "length": 70},
    "keys without a neighbourhood": {"keys": True, "length": 17, "sequences": 1},
    "a wide head": {"d": 72, "D": 40, "length": 20, "sequences": 1, "heads": 1, "block": 16, "ends": (1, 0)},
    "a count without an order": {"length": 20, "block": 4, "ends": (1, 1), "counts": (13, 20)},
}


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients(case, device):
    problem = make_problem(**CASES[case])
    if case == "a count without an order":
        problem["order"] = None
    check(problem, torch.float32, device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("neighbourhood", [{}, {"block": 8, "ends": (1, 1), "counts": (21, 30)}])
def test_half_precision(dtype, neighbourhood, device):
    check(make_problem(length=30, d=16, D=24, M=20, dtype=dtype, **neighbourhood), dtype, device)


def test_projection_gradient_is_left_out(device):
    check(make_problem(length=20, block=16, ends=(1, 1), heads=1), torch.float32, device, need_projection=False)
    check(make_problem(length=20, heads=1), torch.float32, device, need_projection=False)


def test_a_program_may_run_over_several_blocks(device, monkeypatch):
    monkeypatch.setitem(attend.__globals__, "splits", lambda *_: 2)
    check(make_problem(length=40, block=4, sequences=1, M=20), torch.float32, device)


def test_features_without_keys_behind_them_have_no_gradient(device):
    problem = make_problem(length=20, block=4, ends=(1, 0), M=20)
    problem["bias"][:, :, 1] = -INF  # a block that meets no other key through features
    problem["bias"][0, 0, 2, :17] = -INF
    problem["S"] = problem["S"].masked_fill((problem["bias"] == -INF).unsqueeze(-1), 0)
    _, gradients = check(problem, torch.float32, device)
    for name in ("bias", "S"):
        gradient = gradients[GRADIENTS.index(name)]
        assert (gradient[:, :, 1] == 0).all(), name
        assert (gradient[0, 0, 2, :17] == 0).all(), name


@pytest.mark.parametrize("keys", [False, True])
def test_a_query_without_a_finite_logit_gets_nothing(keys, device):
    problem = make_problem(length=5, keys=keys)
    problem["bias"][0] = -INF
    arguments = to_device(problem, torch.float32, device)
    out, logsumexp = attend(**arguments)
    assert (out[0] == 0).all()
    assert (logsumexp[0] == -INF).all()
    assert torch.isfinite(out[1]).all()
    grads = attend_backward(torch.ones_like(out), **arguments, out=out, logsumexp=logsumexp, need_projection=True)
    for name, gradient in zip(GRADIENTS, grads, strict=True):
        assert torch.isfinite(gradient).all(), name
        if name not in {"key", "value"}:
            assert (gradient[0] == 0).all(), name


@pytest.mark.parametrize("neighbourhood", [{}, {"block": 8, "ends": (1, 1)}])
def test_large_norms(neighbourhood, device):
    problem = make_problem(length=20, size=60.0, heads=1, **neighbourhood)
    assert (problem["query"][0, 0] @ problem["projection"][0, 0].mT).abs().max() > 500
    # Logits of 1000 have rounding errors of 1e-4 and more.
    out, _ = check(problem, torch.float32, device, tolerance=2e-3)
    assert out.abs().max() > 0.1


def test_any_strides(device):
    problem = to_device(make_problem(length=20, block=16, ends=(1, 1)), torch.float32, device)
    wanted = attend(**problem)
    grad_out = torch.randn_like(wanted[0])
    gradients = attend_backward(grad_out, **problem, out=wanted[0], logsumexp=wanted[1], need_projection=True)
    changed = dict(problem)
    changed["query"] = problem["query"].transpose(0, 2).contiguous().transpose(0, 2)
    changed["key"] = torch.stack((problem["key"], problem["key"]), dim=3)[:, :, :, 1]
    changed["value"] = problem["value"].mT.contiguous().mT  # the last dimension has another stride than 1
    found = attend(**changed)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    strided = grad_out.transpose(1, 2).contiguous().transpose(1, 2)
    again = attend_backward(strided, **changed, out=found[0], logsumexp=found[1], need_projection=True)
    for name, a, b in zip(GRADIENTS, again, gradients, strict=True):
        assert torch.equal(a, b), name


def test_without_queries(device):
    problem = make_problem(sequences=1, length=3)
    problem["query"] = problem["query"][:, :, :0]
    arguments = to_device(problem, torch.float32, device)
    out, logsumexp = attend(**arguments)
    assert out.shape == (1, 2, 0, 16)
    assert logsumexp.shape == (1, 2, 0)
    grads = attend_backward(out, **arguments, out=out, logsumexp=logsumexp, need_projection=True)
    assert all((gradient == 0).all() for gradient in grads)
