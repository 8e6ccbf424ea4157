"""Every fast backend against the reference in float64: outputs and each gradient, by name.

Chunks of the CPU path are made as short as they get, 64 tokens, so that lengths of 65 to 150 go through several of
them, the last one short, with several blocks in each.
"""

import itertools

import pytest
import torch
from cases import (
    F64,
    FAST_BACKENDS,
    KERNELS,
    MASKS,
    PRECONDITIONINGS,
    STATISTICS,
    assert_agrees,
    device_of,
    errors,
    exactest_dtype,
    log_weights_for,
    mask_of,
    omega_for,
    run,
    statistics_of,
    to,
    tokens,
)

from hf_favorpp import favorpp_attention

BOUNDS = {
    F64: {"error": 1e-12, "of the reference's": None},
    torch.float32: {"error": 1e-5, "of the reference's": 2.0},
    torch.float16: {"error": 8e-4, "of the reference's": 1.6},
    torch.bfloat16: {"error": 6e-3, "of the reference's": 1.6},
}
"""Of each dtype, for tokens of unit variance: the relative error against float64 of the same rounded inputs, of the
output and of every gradient, and how much of the reference's own error in this dtype that may be.

Measured on the CPU: 4e-14, 3e-6, 4e-4 and 3e-3; 1.3 times the reference's in half precision, where the gradient of a
key that is seen both exactly and through features is rounded twice, and 1.0 times without exact keys.
"""

FAR = {"output": 5e-4, "query": 3e-3, "key": 3e-3, "value": 1e-3, "omega": 1e-2}
"""Relative errors in float32 where all tokens share a mean of 50 standard deviations. Raw tokens are multiplied by the
projections before the centre is taken off, which costs about 50 times the error that centred tokens have."""

pytestmark = pytest.mark.parametrize("backend", FAST_BACKENDS)


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr("hf_favorpp.attention.cpu.chunks.CHUNK_LOGITS", 1)


def compare(backend, tensors, omega, log_weights=None, **options):
    """Assert that a backend agrees with the reference in float64, in the widest dtype that it takes."""
    dtype, tolerance = exactest_dtype(backend)
    narrow = [t.to(dtype) for t in tensors]
    expected = run("reference", [t.to(F64) for t in narrow], omega, log_weights, **options)
    result = run(backend, narrow, omega, log_weights, **options)
    assert all(result[name].dtype == dtype for name in ("output", "query", "key", "value"))
    assert_agrees(result, expected, tolerance)


@pytest.mark.parametrize(("kernel", "preconditioning"), list(itertools.product(KERNELS, PRECONDITIONINGS)))
@pytest.mark.parametrize(
    ("shape", "num_features"),
    [
        ({"queries": 1, "keys": 1, "head_dim": 1}, 1),
        ({"queries": 1, "keys": 150, "value_dim": 3}, 7),
        ({"queries": 150, "keys": 1, "value_dim": 1}, 7),
        ({"queries": 64, "keys": 128, "batch": 1, "heads": 1}, 40),
        ({"queries": 130, "keys": 67, "heads": 2, "head_dim": 40, "value_dim": 72}, 40),
        ({"queries": 5, "keys": 130, "heads": 1, "head_dim": 72, "value_dim": 40}, 7),
        ({"queries": 65, "keys": 129, "kv_heads": 2, "value_dim": 3}, 7),
        ({"queries": 150, "keys": 150, "heads": 6, "kv_heads": 1}, 40),
    ],
)
def test_any_shape(backend, kernel, preconditioning, shape, num_features):
    tensors = tokens(**shape)
    omega = omega_for(tensors[0], num_features)
    log_weights = None if kernel == "favor+hyperbolic" else log_weights_for(omega)
    compare(backend, tensors, omega, log_weights, kernel=kernel, preconditioning=preconditioning)


@pytest.mark.parametrize(("window", "ends"), [(0, (0, 0)), (0, (2, 1)), (16, (1, 1))])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("kernel", "preconditioning"), list(itertools.product(("favor++", "favor+"), PRECONDITIONINGS))
)
def test_projections_of_the_keys(backend, kernel, preconditioning, mask, window, ends):
    """As learnt ones are: other than those of the queries, with weights, and with a gradient each."""
    tensors = tokens(queries=75, heads=4, kv_heads=2, value_dim=3)
    omega = omega_for(tensors[0])
    options = {"kernel": kernel, "preconditioning": preconditioning, "exact_window": window, "exact_ends": ends}
    options |= {"omega_key": omega_for(tensors[0], seed=1), "key_mask": mask_of(mask, 3, 75)}
    compare(backend, tensors, omega, log_weights_for(omega), **options)


@pytest.mark.parametrize("preconditioning", ["none", "full"])
@pytest.mark.parametrize("query_mask", MASKS)
@pytest.mark.parametrize("key_mask", MASKS)
def test_any_padding_of_queries_and_keys(backend, preconditioning, key_mask, query_mask):
    tensors = tokens(queries=90, keys=70)
    masks = {"key_mask": mask_of(key_mask, 3, 70), "query_mask": mask_of(query_mask, 3, 90, seed=1)}
    compare(backend, tensors, omega_for(tensors[0]), preconditioning=preconditioning, **masks)


NEIGHBOURHOODS = [
    (window, ends)
    for window, ends in itertools.product((0, 1, 4, 16, 1000), ((0, 0), (1, 1), (3, 2), (1000, 1000)))
    if window or any(ends)
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("window", "ends"), NEIGHBOURHOODS)
@pytest.mark.parametrize("preconditioning", ["none", "full"])
def test_any_neighbourhood(backend, preconditioning, window, ends, mask):
    tensors = tokens(queries=75, heads=4, kv_heads=2, value_dim=3)
    options = {"exact_window": window, "exact_ends": ends, "key_mask": mask_of(mask, 3, 75)}
    compare(backend, tensors, omega_for(tensors[0]), preconditioning=preconditioning, **options)


@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize(("window", "ends"), [(4, (0, 0)), (16, (3, 2)), (48, (1, 1)), (64, (0, 1)), (100, (70, 70))])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_neighbourhood_over_several_chunks(backend, kernel, window, ends, mask):
    """Blocks of 48 do not fill a chunk of 64, blocks of 100 are longer; ends of 70 span chunks and blocks."""
    tensors = tokens(queries=211, batch=2, heads=2)
    options = {"exact_window": window, "exact_ends": ends, "key_mask": mask_of(mask, 2, 211), "kernel": kernel}
    omega = omega_for(tensors[0])
    log_weights = None if kernel == "favor+hyperbolic" else log_weights_for(omega)
    compare(backend, tensors, omega, log_weights, preconditioning="diagonal", **options)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize(("window", "ends"), [*NEIGHBOURHOODS, (0, (0, 2)), (2, (0, 2)), (2, (2, 0)), (0, (0, 1000))])
def test_a_neighbourhood_of_next_to_no_tokens(backend, length, window, ends):
    tensors = tokens(queries=length)
    options = {"exact_window": window, "exact_ends": ends, "preconditioning": "center"}
    compare(backend, tensors, omega_for(tensors[0]), **options)


@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize("kind", STATISTICS)
@pytest.mark.parametrize(("kernel", "preconditioning"), list(itertools.product(KERNELS[:2], PRECONDITIONINGS)))
def test_any_statistics(backend, kernel, preconditioning, kind, window):
    """Also of keys in groups: what is calibrated is one transform for each head, those of a group differ."""
    tensors = tokens(queries=70, kv_heads=2)
    statistics = statistics_of(kind, *tensors[:2], kernel, preconditioning)
    options = {"kernel": kernel, "preconditioning": preconditioning, "statistics": statistics}
    options |= {"exact_window": window, "exact_ends": (1, 0), "key_mask": mask_of("holes", 3, 70)} if window else {}
    compare(backend, tensors, omega_for(tensors[0]), **options)


@pytest.mark.parametrize("window", [0, 16])
def test_one_set_of_projections_for_all_heads_and_another_scaling(backend, window):
    tensors = tokens(queries=70, keys=70)
    omega = omega_for(tensors[0])[0]
    options = {"exact_window": window, "preconditioning": "full", "scaling": 0.9}
    compare(backend, tensors, omega, log_weights_for(omega), **options)


def transposed(t):
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def strided(t):
    wide = torch.full((*t.shape[:2], 2 * t.shape[2], 3 * t.shape[3]), float("nan"), dtype=t.dtype)
    wide[:, :, ::2, 1::3] = t
    return wide[:, :, ::2, 1::3]


def columns(t):
    return t.mT.contiguous().mT


def expanded(t):
    return t[:1, :1].expand_as(t)


def one_token(t):
    return t[:, :, :1].expand_as(t)


@pytest.mark.parametrize("layout", [transposed, strided, columns, expanded, one_token])
@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("window", [0, 16])
def test_any_strides(backend, layout, window, mask):
    """Of tokens, of the mask and of the gradient that comes in; what lies in the gaps is NaN."""
    dtype, tolerance = exactest_dtype(backend)
    base = [t.to(dtype) for t in tokens(queries=70, kv_heads=2)]
    omega, key_mask = omega_for(base[0]), mask_of(mask, 3, 70)
    results = {}
    for name, dtype_, layout_ in (("reference", F64, lambda t: layout(t).contiguous()), (backend, dtype, layout)):
        device = device_of(name)
        leaves = [layout_(t.to(device, dtype_)).detach().requires_grad_() for t in base]
        wide = None if key_mask is None else key_mask.to(device).repeat_interleave(2, dim=-1)[:, ::2]
        out = favorpp_attention(
            *leaves,
            omega.to(device),
            key_mask=wide,
            exact_window=window,
            exact_ends=(1, 1),
            preconditioning="center",
            backend=name,
        )
        gradient = layout_(base[0].to(device, dtype_))
        if key_mask is not None:
            out = out * key_mask.to(device)[:, None, :, None]
        grads = torch.autograd.grad(out, leaves, gradient)
        results[name] = dict(zip(("output", "query", "key", "value"), (out.detach().cpu(), *grads), strict=True))
        results[name] = {part: t.cpu() for part, t in results[name].items()}
    assert_agrees(results[backend], results["reference"], tolerance)


@pytest.mark.parametrize("window", [0, 16])
def test_gradients_of_views_reach_what_they_are_views_of(backend, window):
    """A key that all sequences share, a value that all heads share, and one tensor for query and key."""
    dtype, tolerance = exactest_dtype(backend)
    results = {}
    for name, dtype_ in (("reference", F64), (backend, dtype)):
        base = [t.to(device_of(name), dtype_).requires_grad_() for t in tokens(queries=70, batch=1, heads=1)]
        query, key, value = (t.expand(3, 4, -1, -1) for t in base)
        out = favorpp_attention(
            query, key, value, omega_for(query).to(query.device), exact_window=window, exact_ends=(1, 1), backend=name
        )
        out.square().sum().backward()
        results[name] = dict(zip(("query", "key", "value"), (t.grad.cpu() for t in base), strict=True))
    assert_agrees(results[backend], results["reference"], tolerance)


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize(("window", "ends"), [(0, (0, 0)), (0, (1, 1)), (16, (1, 1))])
def test_query_key_and_value_may_be_the_same_tensor(backend, window, ends, leaf):
    """Once the gradient of a key that was the query itself was left with whatever its memory held."""
    dtype, tolerance = exactest_dtype(backend)
    results = {}
    for name, dtype_ in (("reference", F64), (backend, dtype)):
        base = tokens(queries=70)[0].to(device_of(name), dtype_).requires_grad_()
        x, omega = base if leaf else base * 1, omega_for(base).to(base.device)
        out = favorpp_attention(x, x, x, omega, exact_window=window, exact_ends=ends, backend=name)
        results[name] = {"x": torch.autograd.grad(out.square().sum(), base)[0].cpu()}
    assert_agrees(results[backend], results["reference"], tolerance)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("kernel", "preconditioning"), [("favor++", "none"), ("favor++", "full"), ("favor+", "center")]
)
@pytest.mark.parametrize(("window", "ends"), [(0, (0, 0)), (0, (2, 1)), (16, (1, 1))])
def test_error_of_each_dtype(backend, dtype, kernel, preconditioning, window, ends):
    if backend == "triton" and dtype == F64:
        pytest.skip("takes no float64")
    tensors = tokens(queries=150, head_dim=16, dtype=dtype)
    omega = omega_for(tensors[0], 40)
    options = {"kernel": kernel, "preconditioning": preconditioning, "exact_window": window, "exact_ends": ends}
    options["key_mask"] = mask_of("holes", 3, 150)
    expected = run("reference", [t.to(F64) for t in tensors], omega, **options)
    found = errors(run(backend, tensors, omega, **options), expected)
    bound, ratio = BOUNDS[dtype].values()
    assert max(found.values()) <= bound, found
    if ratio is not None:
        own = errors(run("reference", tensors, omega, **options), expected)
        assert all(found[name] <= ratio * max(own[name], bound / 50) for name in found), (found, own)


@pytest.mark.parametrize("preconditioning", PRECONDITIONINGS)
@pytest.mark.parametrize("window", [0, 16])
def test_squared_norms_of_hundreds_are_as_accurate_as_in_the_reference(backend, preconditioning, window):
    query, key, value = tokens(queries=150, head_dim=16)
    query, key = (t * (20 * 16**0.25 / t.norm(dim=-1, keepdim=True)) for t in (query, key))  # |x|^2 = |y|^2 = 400
    found, own = errors_in_float32(backend, (query, key, value), preconditioning, window)
    assert all(found[name] <= max(4 * own[name], 1e-5) for name in found), (found, own)


@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize("growth", [(30, 1, 1), (1, 1, 30), (1, 30, 1), (0.1, 4, 30)])
@pytest.mark.parametrize("mask", ["none", "left"])
def test_norms_that_change_along_the_sequence_cost_little_accuracy(backend, mask, growth, window):
    factors = torch.tensor(growth, dtype=F64).repeat_interleave(64)[:150, None]  # by 64 tokens, as the chunks are
    query, key, value = tokens(queries=150, head_dim=16)
    options = {"key_mask": mask_of(mask, 3, 150)}
    found, own = errors_in_float32(backend, (query * factors, key * factors, value), "none", window, **options)
    assert all(found[name] <= max(8 * own[name], 5e-5) for name in found), (found, own)


def test_keys_whose_features_underflow_are_as_if_they_were_not_there(backend):
    query, key, value = (t.float().to(device_of(backend)) for t in tokens(queries=150, head_dim=16))
    omega = omega_for(query, 40)
    key[:, :, :70] *= 1e20  # the logarithms of their features are -inf, those of the others below -200
    key[:, :, 70:] *= 12
    there, gone = (
        favorpp_attention(query, key[:, :, begin:], value[:, :, begin:], omega, kernel="favor+", backend=backend)
        for begin in (0, 70)
    )
    torch.testing.assert_close(there, gone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("preconditioning", ["center", "diagonal", "full"])
@pytest.mark.parametrize("window", [0, 16])
def test_a_large_common_mean_costs_little_accuracy(backend, preconditioning, window):
    query, key, value = tokens(queries=150, head_dim=16)
    found, _ = errors_in_float32(backend, (query + 50, key + 50, value), preconditioning, window)
    assert all(found[name] <= FAR[name] for name in found), found


def errors_in_float32(backend, tensors, preconditioning, window, **options):
    tensors = [t.float() for t in tensors]
    omega = omega_for(tensors[0], 40)
    options |= {"preconditioning": preconditioning, "exact_window": window}
    expected = run("reference", [t.to(F64) for t in tensors], omega, **options)
    return (errors(run(name, tensors, omega, **options), expected) for name in (backend, "reference"))


@pytest.mark.parametrize("preconditioning", ["none", "full"])
@pytest.mark.parametrize(("window", "ends"), [(0, (0, 0)), (0, (1, 1)), (16, (1, 1))])
@pytest.mark.parametrize("mask", MASKS)
def test_run_to_run_and_row_by_row_results_are_the_same_bits(backend, preconditioning, window, ends, mask):
    device = device_of(backend)
    tensors = [t.to(device) for t in tokens(queries=150, batch=4, dtype=torch.float32)]
    omega, key_mask = omega_for(tensors[0]).to(device), to(mask_of(mask, 4, 150), device)
    options = {"preconditioning": preconditioning, "exact_window": window, "exact_ends": ends}

    def attend(rows):
        query, key, value = (t[rows].requires_grad_() for t in tensors)
        own = None if key_mask is None else key_mask[rows]
        out = favorpp_attention(query, key, value, omega, key_mask=own, backend=backend, **options)
        return out.detach(), *torch.autograd.grad(out.square().sum(), (query, key, value))

    every = attend([0, 1, 2, 3])
    order = [2, 0, 3, 1]
    for name, first, again, permuted, alone in zip(
        ("output", "query", "key", "value"), every, attend([0, 1, 2, 3]), attend(order), attend([2]), strict=True
    ):
        assert torch.equal(first, again), name
        assert torch.equal(first[order], permuted), name
        assert torch.equal(first[2:3], alone), name
