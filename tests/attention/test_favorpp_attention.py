"""The attention function against the plainest float64 form, and what must hold for any input."""

import itertools

import pytest
import torch
from plain import plain_attention, softmax_attention

from hf_favorpp import favorpp_attention
from hf_favorpp.attention import backends
from hf_favorpp.errors import ConfigError, InputError
from hf_favorpp.features.projection import draw_projections
from hf_favorpp.features.statistics import Statistics, sequence_statistics


@pytest.fixture(autouse=True, params=["reference", "cpu"])
def backend(request, monkeypatch):
    """What is so short is left to the reference by default."""
    monkeypatch.setattr(backends, "LEAST_LOGITS", 0 if request.param == "cpu" else 2**60)
    return request.param


POSITIVE = ("favor++", "favor+", "favor+hyperbolic")
PRECONDITIONINGS = ("none", "center", "diagonal", "full")
SOFTMAX_MAPS = list(itertools.product(POSITIVE, PRECONDITIONINGS))
TRIG_MAPS = [("trig", preconditioning) for preconditioning in PRECONDITIONINGS]
MAPS = [*SOFTMAX_MAPS, *TRIG_MAPS, ("relu", "none"), ("elu", "none"), ("uniform", "none")]
F64 = torch.float64


def inputs(batch=2, heads=4, num_queries=9, num_keys=9, head_dim=6, value_dim=None, kv_heads=None, dtype=F64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=F64).to(dtype)

    kv_heads = kv_heads or heads
    return (
        normal(batch, heads, num_queries, head_dim),
        normal(batch, kv_heads, num_keys, head_dim),
        normal(batch, kv_heads, num_keys, value_dim or head_dim),
    )


def omega_for(query, num_features=10, seed=0):
    return draw_projections(query.shape[1], num_features, query.shape[-1], seed=seed).to(F64)


def padding(*lengths, total):
    return torch.arange(total) < torch.tensor(lengths).unsqueeze(-1)


@pytest.mark.parametrize(("kernel", "preconditioning"), MAPS)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"num_queries": 5, "num_keys": 13},
        {"num_queries": 1, "num_keys": 1},
        {"heads": 4, "kv_heads": 2, "head_dim": 7, "value_dim": 3},
        {"batch": 1, "heads": 1, "num_queries": 33, "num_keys": 2, "head_dim": 1},
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_plain_form(kernel, preconditioning, shape, masked):
    query, key, value = inputs(**shape)
    omega = omega_for(query)
    masks = {}
    if masked:
        masks["key_mask"] = torch.rand(key.shape[0], key.shape[2], generator=torch.Generator().manual_seed(1)) < 0.7
        masks["key_mask"][:, 0] = True
        masks["query_mask"] = torch.rand(query.shape[0], query.shape[2]) < 0.7
        masks["query_mask"][:, 0] = True
    options = {"scaling": 0.3, "kernel": kernel, "preconditioning": preconditioning, **masks}
    out = favorpp_attention(query, key, value, omega, **options)
    expected = plain_attention(query, key, value, omega, **options)
    real = masks["query_mask"][:, None, :, None] if masked else torch.tensor(True)
    # relu and trig divide by what can be next to nothing; a query with no active feature gets zeros, not 0 / 0
    expected = expected.nan_to_num(0.0)
    assert ((out - expected) * real).abs().max() <= 1e-8 * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize(
    ("kernel", "preconditioning"), [("favor++", "none"), ("favor++", "full"), ("favor+", "center")]
)
def test_keys_with_projections_of_their_own_equal_the_plain_form(kernel, preconditioning):
    query, key, value = inputs()
    omega, omega_key = omega_for(query), omega_for(query, seed=1)
    options = {"scaling": 0.3, "kernel": kernel, "preconditioning": preconditioning, "omega_key": omega_key}
    out = favorpp_attention(query, key, value, omega, **options)
    torch.testing.assert_close(out, plain_attention(query, key, value, omega, **options), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(out, favorpp_attention(query, key, value, omega, **{**options, "omega_key": omega}))


def test_projections_of_the_keys_must_fit_and_need_positive_features():
    query, key, value = inputs()
    omega = omega_for(query)
    with pytest.raises(InputError, match=r"omega_key must have a shape that fits omega, .* got \(2, 3\)"):
        favorpp_attention(query, key, value, omega, omega_key=torch.zeros(2, 3))
    with pytest.raises(ConfigError, match="omega_key needs kernel='favor"):
        favorpp_attention(query, key, value, omega, omega_key=omega, kernel="relu")


@pytest.mark.parametrize(("kernel", "preconditioning"), [pair for pair in MAPS if pair[0] != "trig"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
)
def test_dtypes_and_gradients_against_float64(kernel, preconditioning, dtype, tolerance):
    tensors = inputs(num_queries=12, num_keys=12, dtype=dtype)
    mask = padding(12, 7, total=12)
    omega = omega_for(tensors[0])

    def run(tensors):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        out = favorpp_attention(*leaves, omega, kernel=kernel, preconditioning=preconditioning, key_mask=mask)
        generator = torch.Generator().manual_seed(3)
        out.backward(torch.randn(out.shape, generator=generator, dtype=F64).to(out.dtype))
        return {"output": out, **dict(zip(("query", "key", "value"), (leaf.grad for leaf in leaves), strict=True))}

    result, expected = run(tensors), run([t.to(F64) for t in tensors])
    for name, tensor in result.items():
        assert tensor.dtype == dtype, name
        error = (tensor.to(F64) - expected[name]).norm()
        assert error <= tolerance * expected[name].norm(), f"{name}: {error:.1e}"


@pytest.mark.parametrize(("kernel", "preconditioning"), MAPS)
def test_gradcheck(backend, kernel, preconditioning):
    """Statistics carry no gradient by design, so they are held fixed while the inputs are perturbed.

    Every entry of the reference's Jacobian; of the other only random directions, since ``test_backends_agree.py``
    compares its gradients with the reference's.
    """
    query, key, value = (t.requires_grad_() for t in inputs(batch=2, heads=2, num_queries=3, num_keys=4, head_dim=3))
    omega = omega_for(query, num_features=5).requires_grad_()
    mask = padding(4, 2, total=4)
    fixed = sequence_statistics(query * 3**-0.25, key * 3**-0.25, None, mask, covariance=True)

    def attend(query, key, value, omega):
        return favorpp_attention(
            query, key, value, omega, key_mask=mask, kernel=kernel, preconditioning=preconditioning, statistics=fixed
        )

    assert torch.autograd.gradcheck(attend, (query, key, value, omega), fast_mode=backend != "reference")


def test_no_gradient_flows_through_the_statistics():
    query, key, value = inputs(dtype=F64)
    omega = omega_for(query)
    grads = []
    for statistics in (None, sequence_statistics(query * 6**-0.25, key * 6**-0.25)):
        leaf = query.clone().requires_grad_()
        out = favorpp_attention(leaf, key, value, omega, preconditioning="center", statistics=statistics)
        out.square().sum().backward()
        grads.append(leaf.grad)
    assert torch.allclose(*grads, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scaling", [0.125, 1.0])
@pytest.mark.parametrize(("kernel", "preconditioning"), SOFTMAX_MAPS)
def test_converges_to_softmax_at_the_right_temperature(scaling, kernel, preconditioning):
    """Not to softmax(QK / d), which scaling both sides twice gives, nor to any other scale."""
    query, key, value = inputs(batch=1, heads=64, num_queries=6, num_keys=6, head_dim=4)
    query, key, value = (t[:, :1].expand(-1, 64, -1, -1) for t in (query, key, value))
    query, key = (0.5 * t / scaling**0.5 for t in (query, key))
    mean_error = {}
    for num_features in (64, 4096):
        omega = draw_projections(64, num_features, 4).to(F64)
        out = favorpp_attention(
            query, key, value, omega, scaling=scaling, kernel=kernel, preconditioning=preconditioning
        )
        target = softmax_attention(query, key, value, scaling)
        mean_error[num_features] = ((out - target).norm() / target.norm()).item()
    assert mean_error[4096] < 0.05
    rate = mean_error[64] / mean_error[4096]
    assert 4 < rate < 16, f"64 times the features must give about 8 times less error, gave {rate:.1f}"
    for wrong in (scaling / 4, scaling / 2, scaling * 2):
        target = softmax_attention(query, key, value, wrong)
        assert (out - target).norm() / target.norm() > 2 * mean_error[4096]


@pytest.mark.parametrize(("kernel", "preconditioning"), MAPS)
def test_padding_may_hold_anything(kernel, preconditioning):
    query, key, value = inputs(batch=2, num_queries=8, num_keys=8, dtype=torch.float32)
    omega = omega_for(query)
    mask = padding(8, 5, total=8)
    options = {"kernel": kernel, "preconditioning": preconditioning}
    alone = favorpp_attention(query[1:, :, :5], key[1:, :, :5], value[1:, :, :5], omega, **options)
    for garbage in (1e4, float("nan"), float("inf"), -float("inf")):
        for extra in (0, 64):
            padded = [torch.nn.functional.pad(t, (0, 0, 0, extra)) for t in (query, key, value)]
            wide = torch.nn.functional.pad(mask, (0, extra))
            padded = [torch.where(wide[:, None, :, None], t, torch.tensor(garbage)) for t in padded]
            leaves = [t.requires_grad_() for t in padded]
            out = favorpp_attention(*leaves, omega, key_mask=wide, **options)
            scale = alone.abs().max().clamp(min=1)  # trig's quotient can be large
            assert (out[1:, :, :5] - alone).abs().max() < 1e-6 * scale * (100 if kernel == "trig" else 1)
            assert torch.isfinite(out).all()
            out[1:, :, :5].sum().backward()
            assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)
            assert all((leaf.grad[1:, :, 5:] == 0).all() for leaf in leaves)


def test_statistics_ignore_padding():
    x, y = inputs(batch=1)[:2]
    mask = padding(5, total=9)
    real = sequence_statistics(x[:, :, :5], y[:, :, :5], covariance=True)
    for moment, expected in zip(sequence_statistics(x, y, mask, mask, covariance=True), real, strict=True):
        assert torch.allclose(moment, expected, atol=1e-14)


@pytest.mark.parametrize(("kernel", "preconditioning"), MAPS)
def test_batch_mates_do_not_matter(kernel, preconditioning):
    """The stabiliser of some implementations is a maximum over the whole batch: a loud sequence silences the rest."""
    query, key, value = inputs(batch=3, dtype=torch.float32)
    loud = torch.tensor([1.0, 30.0, 1.0])[:, None, None, None]
    omega = omega_for(query)
    options = {"kernel": kernel, "preconditioning": preconditioning}
    together = favorpp_attention(query * loud, key * loud, value * loud, omega, **options)
    alone = favorpp_attention(query[:1], key[:1], value[:1], omega, **options)
    assert torch.allclose(together[:1], alone, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("kernel", "preconditioning"), MAPS)
def test_the_order_of_keys_does_not_matter(kernel, preconditioning):
    query, key, value = inputs(num_queries=5, num_keys=11)
    omega = omega_for(query)
    order = torch.randperm(11)
    options = {"kernel": kernel, "preconditioning": preconditioning}
    out = favorpp_attention(query, key, value, omega, **options)
    permuted = favorpp_attention(query, key[:, :, order], value[:, :, order], omega, **options)
    assert torch.allclose(out, permuted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("kernel", "preconditioning"), [pair for pair in MAPS if pair[0] != "relu"])
def test_all_zero_input_is_the_mean_of_the_values(kernel, preconditioning):
    value = inputs(dtype=torch.float32)[2]
    zeros = torch.zeros_like(value).requires_grad_()
    omega = omega_for(value)
    out = favorpp_attention(zeros, zeros, value, omega, kernel=kernel, preconditioning=preconditioning)
    assert torch.allclose(out, value.mean(-2, keepdim=True).expand_as(value), atol=1e-6)
    out.sum().backward()
    assert torch.isfinite(zeros.grad).all()


def test_relu_without_an_active_feature_is_zero_with_finite_gradients():
    value = inputs(dtype=torch.float32)[2]
    zeros = torch.zeros_like(value).requires_grad_()
    out = favorpp_attention(zeros, zeros, value, omega_for(value), kernel="relu")
    assert (out == 0).all()
    out.sum().backward()
    assert torch.isfinite(zeros.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("kernel", "preconditioning"), [*SOFTMAX_MAPS, ("relu", "none")])
def test_large_norms_stay_finite(dtype, kernel, preconditioning):
    """|x| = 100 in one direction and in all: features of e^5000 and e^-5000 side by side."""
    query, key, value = inputs(num_queries=20, num_keys=20, head_dim=16, dtype=F64)
    query, key = (100 * t / t.norm(dim=-1, keepdim=True) for t in (query, key))
    leaves = [t.to(dtype).requires_grad_() for t in (query, key, value)]
    out = favorpp_attention(*leaves, omega_for(query, 64), scaling=1.0, kernel=kernel, preconditioning=preconditioning)
    assert torch.isfinite(out).all()
    out.sum().backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)
    spread = out.std(-2).mean()
    assert spread > 0.02, "an epsilon in the denominator would give every query the mean of the values"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kernel", "preconditioning"), [pair for pair in MAPS if pair[0] != "trig"])
def test_output_is_a_convex_combination_of_values(dtype, kernel, preconditioning):
    query, key, value = inputs(num_queries=30, num_keys=30, head_dim=8, dtype=F64)
    query, key, value = (3 * query).to(dtype), (3 * key).to(dtype), value.abs().to(dtype)
    omega = omega_for(query, 32)
    out = favorpp_attention(query, key, value, omega, kernel=kernel, preconditioning=preconditioning)
    slack = 4 * torch.finfo(dtype).eps * value.max()
    assert (out <= value.amax(-2, keepdim=True) + slack).all()
    assert (out >= value.amin(-2, keepdim=True) - slack).all()
    ones = favorpp_attention(query, key, torch.ones_like(value), omega, kernel=kernel, preconditioning=preconditioning)
    assert torch.allclose(ones, torch.ones_like(ones), atol=float(torch.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kernel", "preconditioning"), MAPS)
def test_a_sequence_without_real_keys_gives_zeros(dtype, kernel, preconditioning):
    leaves = [t.requires_grad_() for t in inputs(batch=3, dtype=dtype)]
    mask = padding(9, 0, 4, total=9)
    out = favorpp_attention(
        *leaves, omega_for(leaves[0]), key_mask=mask, kernel=kernel, preconditioning=preconditioning
    )
    assert (out[1] == 0).all()
    assert torch.isfinite(out).all()
    out.sum().backward()
    for leaf in leaves:
        assert torch.isfinite(leaf.grad).all()
        assert (leaf.grad[1] == 0).all()


@pytest.mark.parametrize("kernel", ["favor++", "favor+", "favor+hyperbolic", "relu", "elu", "uniform"])
@pytest.mark.parametrize("length", [1, 16, 37])
def test_causal_sees_exactly_the_past(kernel, length):
    query, key, value = inputs(num_queries=length, num_keys=length)
    omega = omega_for(query)
    scaled = [t * 6**-0.25 for t in (query, key)]
    fixed = sequence_statistics(*scaled)
    preconditioning = "center" if kernel in POSITIVE else "none"
    options = {"kernel": kernel, "preconditioning": preconditioning, "statistics": fixed}
    out = favorpp_attention(query, key, value, omega, is_causal=True, **options)
    for i in range(length):
        past = favorpp_attention(query[:, :, i : i + 1], key[:, :, : i + 1], value[:, :, : i + 1], omega, **options)
        assert torch.allclose(out[:, :, i : i + 1], past, rtol=1e-9, atol=1e-9)


def test_causal_refuses_statistics_that_look_ahead():
    query, key, value = inputs()
    with pytest.raises(InputError, match="would look ahead"):
        favorpp_attention(query, key, value, omega_for(query), is_causal=True)
    favorpp_attention(query, key, value, omega_for(query), is_causal=True, kernel="favor+")
    with pytest.raises(InputError, match="9 queries and 4 keys"):
        favorpp_attention(query, key[:, :, :4], value[:, :, :4], omega_for(query), is_causal=True, kernel="favor+")


def test_given_statistics_replace_those_of_the_sequence():
    query, key, value = inputs(batch=2)
    omega = omega_for(query)
    head = Statistics(*torch.ones(4, 1, 4, 6, dtype=F64), num_tokens=torch.tensor([[50.0]]))
    both = favorpp_attention(query, key, value, omega, preconditioning="center", statistics=head)
    first = favorpp_attention(query[:1], key[:1], value[:1], omega, preconditioning="center", statistics=head)
    assert torch.allclose(both[:1], first, atol=1e-12)
    own = favorpp_attention(query, key, value, omega, preconditioning="center")
    assert not torch.allclose(both, own)


def test_one_set_of_projections_may_serve_all_heads():
    query, key, value = inputs()
    omega = omega_for(query)[0]
    shared = favorpp_attention(query, key, value, omega)
    assert torch.equal(shared, favorpp_attention(query, key, value, omega.expand(4, -1, -1)))


def test_training_in_float16_stays_finite():
    """With an epsilon under e^-|x|^2/2 this ends in NaN after a few steps."""
    weights = [w.mul(4).requires_grad_() for w in inputs(batch=1, heads=1, head_dim=16, dtype=torch.float32)]
    omega = omega_for(weights[0], 32)
    for _ in range(20):
        out = favorpp_attention(*(w.half() for w in weights), omega)
        out.float().square().mean().backward()
        for w in weights:
            assert torch.isfinite(w.grad).all()
            w.data -= 0.5 * w.grad
            w.grad = None
    assert torch.isfinite(out).all()


def test_autocast_does_not_lower_the_precision():
    query, key, value = inputs(dtype=torch.float32, num_queries=40, num_keys=40)
    omega = omega_for(query).float()
    expected = favorpp_attention(query, key, value, omega)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(favorpp_attention(query, key, value, omega), expected)


def test_query_mask_defaults_to_the_key_mask_of_equal_lengths():
    query, key, value = inputs()
    omega, mask = omega_for(query), padding(9, 4, total=9)
    default = favorpp_attention(query, key, value, omega, key_mask=mask)
    assert torch.equal(default, favorpp_attention(query, key, value, omega, key_mask=mask, query_mask=mask))
    every = torch.ones_like(mask)
    assert not torch.allclose(default, favorpp_attention(query, key, value, omega, key_mask=mask, query_mask=every))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros(2, 4, 0, 6)}, InputError, "every dimension must be at least 1"),
        ({"key": torch.zeros(2, 4, 0, 6), "value": torch.zeros(2, 4, 0, 6)}, InputError, "at least 1"),
        ({"query": torch.zeros(4, 9, 6)}, InputError, r"\(batch, heads, length, head_dim\)"),
        ({"query": torch.zeros(2, 4, 9, 6, dtype=torch.int64)}, InputError, "floating dtype"),
        ({"query": torch.zeros(2, 4, 9, 6, dtype=torch.float16)}, InputError, "share one floating dtype"),
        ({"query": torch.zeros(2, 4, 9, 5)}, InputError, "share batch and head_dim"),
        ({"value": torch.zeros(2, 4, 8, 6)}, InputError, "key and value batch, heads and length"),
        ({"query": torch.zeros(2, 5, 9, 6)}, InputError, "multiple of the number of key heads"),
        ({"omega": torch.zeros(4, 10, 5)}, InputError, "with d = 6"),
        ({"omega": torch.zeros(4, 0, 6)}, InputError, "M >= 1"),
        ({"omega": None}, InputError, "got None"),
        ({"omega": torch.zeros(3, 10, 6)}, InputError, "3 heads, the query has 4"),
        ({"key_mask": torch.ones(2, 9)}, InputError, "must be a bool tensor"),
        ({"key_mask": torch.ones(2, 9, 9, dtype=torch.bool)}, InputError, "has no linear form"),
        ({"query_mask": torch.ones(2, 8, dtype=torch.bool)}, InputError, r"= \(2, 9\)"),
        ({"scaling": 0.0}, InputError, "must be positive"),
        ({"scaling": float("nan")}, InputError, "must be positive"),
        ({"kernel": "softmax"}, ConfigError, "kernel must be one of"),
        ({"preconditioning": "whiten"}, ConfigError, "preconditioning must be"),
        ({"backend": "cuda"}, ConfigError, "backend must be"),
        ({"kernel": "relu", "preconditioning": "center"}, ConfigError, "only softmax is invariant"),
        ({"kernel": "trig", "is_causal": True}, ConfigError, "positive features"),
    ],
)
def test_bad_input_is_refused_with_the_rule_and_the_value(change, error, message):
    query, key, value = inputs(dtype=torch.float32)
    arguments = {"query": query, "key": key, "value": value, "omega": omega_for(query), **change}
    with pytest.raises(error, match=message):
        favorpp_attention(**arguments)
