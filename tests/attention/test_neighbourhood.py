"""One softmax over the own block, the ends and features of the rest, against a dense kernel matrix in float64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_favorpp import FavorppConfig, favorpp_attention
from hf_favorpp.attention.chained import feature_attention
from hf_favorpp.attention.neighbourhood import neighbourhood_attention
from hf_favorpp.errors import ConfigError

F64 = torch.float64
NAMES = ("log_phi_q", "log_phi_k", "x", "y", "value")
MASKS = ("none", "right", "left", "holes", "empty row")


def plain_neighbourhood(log_phi_q, log_phi_k, x, y, value, key_mask, window, ends):
    """The kernel between each query and each key, one number at a time, and a division."""
    batch, heads, length, _ = x.shape
    rows = []
    for b in range(batch):
        real = [j for j in range(length) if key_mask is None or key_mask[b, j]]
        for h in range(heads):
            for i in range(length):
                row = 0 * value[b, h, i]
                if i in real:
                    far = (log_phi_q[b, h, i] + log_phi_k[b, h, real]).exp().sum(-1)
                    exact = (x[b, h, i] * y[b, h, real]).sum(-1).exp()
                    rank = real.index(i)
                    near = torch.tensor([is_near(rank, j, len(real), window, ends) for j in range(len(real))])
                    kernel = torch.where(near, exact, far)
                    if kernel.sum() > 0:
                        row = kernel @ value[b, h, real] / kernel.sum()
                rows.append(row)
    return torch.stack(rows).reshape(batch, heads, length, -1)


def is_near(i, j, n, window, ends):
    return (window > 0 and i // window == j // window) or j < ends[0] or j >= n - ends[1]


def inputs(batch=3, heads=2, length=13, features=5, head_dim=3, value_dim=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    widths = (features, features, head_dim, head_dim, value_dim)
    return [torch.randn(batch, heads, length, width, generator=generator, dtype=F64) for width in widths]


def mask_of(kind, batch, length):
    if kind == "none":
        return None
    lengths = torch.tensor([length, length // 2 + 1, length - 1])[:batch].clamp(min=1).unsqueeze(-1)
    ranks = torch.arange(length).expand(batch, -1)
    if kind == "left":
        return ranks >= length - lengths
    if kind == "holes":
        return torch.rand(batch, length, generator=torch.Generator().manual_seed(length)) < 0.6
    mask = ranks < lengths
    mask[-1] &= kind != "empty row"
    return mask


def run(attend, tensors, key_mask, window, ends, seed=1):
    """Output at real queries and the gradients of all tensors for a random gradient there."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = attend(*leaves, key_mask, window, ends)
    assert torch.isfinite(out).all()
    if key_mask is not None:
        out = out * key_mask[:, None, :, None]
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=F64)
    grads = torch.autograd.grad(out, leaves, gradient.to(out.dtype), materialize_grads=True)
    return {"output": out.detach(), **dict(zip(NAMES, grads, strict=True))}


def assert_close(result, expected, tolerance):
    for name, tensor in result.items():
        assert torch.isfinite(tensor).all(), name
        error = (tensor.to(F64) - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-3)
        assert error <= tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    ("shape", "window", "ends"),
    [
        ({}, 4, (0, 0)),
        ({}, 4, (1, 1)),
        ({}, 4, (5, 3)),  # ends longer than a block
        ({}, 5, (0, 2)),
        ({"heads": 1, "features": 1}, 3, (2, 0)),
        ({"batch": 1}, 1, (1, 1)),
        ({"batch": 2, "length": 12, "value_dim": 1}, 6, (1, 0)),
        ({"length": 21, "features": 2, "head_dim": 1}, 2, (1, 2)),  # 11 blocks: odd at two levels of the tree
        ({}, 0, (0, 0)),
        ({}, 0, (2, 1)),
        ({}, 4, (9, 8)),  # first and last overlap
        ({}, 4, (50, 0)),
        ({}, 0, (0, 50)),
        ({}, 40, (1, 1)),
        ({"length": 1}, 1, (0, 0)),
        ({"length": 1}, 1, (1, 1)),
    ],
)
def test_output_and_gradients_equal_the_plain_form(shape, window, ends, kind):
    tensors = inputs(**shape)
    mask = mask_of(kind, *tensors[0].shape[::2])
    expected = run(plain_neighbourhood, tensors, mask, window, ends)
    assert_close(run(neighbourhood_attention, tensors, mask, window, ends), expected, 1e-11)
    single = [t.float() for t in tensors]
    result = run(neighbourhood_attention, single, mask, window, ends)
    assert all(t.dtype == torch.float32 for t in result.values())
    assert_close(result, expected, 3e-5)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("window", "ends"), [(4, (1, 1)), (4, (0, 0)), (1, (0, 0)), (0, (0, 0)), (0, (1, 0))])
@pytest.mark.parametrize("dead", [0.7, 1.0])
def test_features_may_be_exactly_zero(window, ends, kind, dead):
    """ReLU-like maps: log 0 = -inf on both sides, in the end for every key."""
    tensors = inputs()
    mask = mask_of(kind, *tensors[0].shape[::2])
    for t in tensors[:2]:
        t[torch.rand(t.shape, generator=torch.Generator().manual_seed(2)) < dead] = -float("inf")
    tensors[1][0] = -float("inf")
    expected = run(plain_neighbourhood, tensors, mask, window, ends)
    assert_close(run(neighbourhood_attention, tensors, mask, window, ends), expected, 1e-11)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    ("length", "window", "ends"), [(7, 7, (0, 0)), (7, 7, (1, 1)), (7, 64, (3, 3)), (7, 2, (4, 4))]
)
def test_exact_where_everything_is_near(kind, length, window, ends):
    """Whatever the features say."""
    tensors = inputs(length=length)
    mask = mask_of(kind, 3, length)

    def softmax(log_phi_q, log_phi_k, x, y, value, key_mask, window, ends):
        logits = x @ y.mT
        if key_mask is not None:
            seen = key_mask | ~key_mask.any(-1, keepdim=True)
            logits = logits.masked_fill(~seen[:, None, None], -float("inf"))
        return logits.softmax(-1) @ value * (1 if key_mask is None else key_mask.any(-1)[:, None, None, None])

    expected = run(softmax, tensors, mask, window, ends)
    assert_close(run(neighbourhood_attention, tensors, mask, window, ends), expected, 1e-12)


def test_without_neighbourhood_it_is_plain_feature_attention():
    tensors = inputs()
    out = neighbourhood_attention(*tensors, None, 0, (0, 0))
    assert torch.allclose(out, feature_attention(tensors[0], tensors[1], tensors[4]), rtol=0, atol=1e-14)


def test_rows_without_a_real_token_give_zeros():
    tensors = inputs()
    mask = mask_of("empty row", 3, 13)
    for window in (0, 4, 13):
        assert (neighbourhood_attention(*tensors, mask, window, (1, 1))[2] == 0).all()


@pytest.mark.parametrize(("window", "ends"), [(4, (1, 1)), (4, (0, 0)), (3, (2, 5)), (0, (1, 1)), (16, (0, 0))])
@pytest.mark.parametrize("positions", ["right", "far right", "left", "holes"])
def test_padding_and_batch_mates_do_not_matter(positions, window, ends):
    """One sequence alone, and the same one laid among garbage beside a loud mate with other padding."""
    tensors = inputs(batch=1, length=11)
    alone = run(neighbourhood_attention, tensors, None, window, ends)
    total, at = {
        "right": (12, torch.arange(11)),
        "far right": (75, torch.arange(11)),
        "left": (30, torch.arange(19, 30)),
        "holes": (24, torch.arange(1, 23, 2)),
    }[positions]
    mask = torch.rand(3, total) < 0.5
    mask[1] = False
    mask[1, at] = True
    wide = [100 * torch.randn(3, t.shape[1], total, t.shape[3], dtype=F64) for t in tensors]
    for t, w in zip(tensors, wide, strict=True):
        w[1, :, at] = t[0]
    leaves = [w.requires_grad_() for w in wide]
    out = neighbourhood_attention(*leaves, mask, window, ends)
    gradient = torch.randn(alone["output"].shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    grads = torch.autograd.grad(out[1:2, :, at], leaves, gradient, materialize_grads=True)
    result = {name: grad[1:2, :, at] for name, grad in zip(NAMES, grads, strict=True)}
    assert_close({"output": out[1:2, :, at].detach(), **result}, alone, 1e-13)
    for grad in (each.detach() for each in grads):
        grad[1, :, at] = 0
        assert (grad == 0).all()


@pytest.mark.parametrize("features", [-300.0, 0.0, 300.0])
@pytest.mark.parametrize("exact", [0.1, 30.0])
@pytest.mark.parametrize("window", [0, 4])
def test_logits_hundreds_of_nats_apart(features, exact, window):
    """Some groups of keys outweigh others by e^300 or e^600; the plain form still holds that in float64."""
    tensors = inputs(head_dim=8)
    tensors[0] = 10 * tensors[0] + features
    tensors[1] = 50 * tensors[1]  # one feature, one block outweighs all others
    tensors[2] = exact * tensors[2]
    mask = mask_of("holes", 3, 13)
    expected = run(plain_neighbourhood, tensors, mask, window, (1, 1))
    assert_close(run(neighbourhood_attention, tensors, mask, window, (1, 1)), expected, 1e-12)
    result = run(neighbourhood_attention, [t.float() for t in tensors], mask, window, (1, 1))
    assert_close(result, expected, 5e-5)
    for sign in (-1, 1):
        bound = (sign * tensors[4]).amax(-2, keepdim=True)
        assert (sign * result["output"][:1] <= bound[:1].clamp(min=0) + 1e-6).all()


class Sizes(TorchDispatchMode):
    """Numbers of elements of all tensors that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numels = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numels += [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        return out


@pytest.mark.parametrize("window", [0, 2, 16])
@pytest.mark.parametrize("kind", ["none", "holes"])
def test_memory_and_work_are_linear_in_length(window, kind):
    """Of forward and backward, of the largest tensor and of all together: a scan of L log L would give 2.2."""
    largest, total = [], []
    for length in (512, 1024):
        tensors = inputs(batch=1, heads=1, length=length, features=8, value_dim=8)
        mask = mask_of(kind, 1, length)
        with Sizes() as sizes:
            run(neighbourhood_attention, tensors, mask, window, (1, 1))
        largest.append(max(sizes.numels))
        total.append(sum(sizes.numels))
    assert largest[0] <= 512 * max(2 * 8, window, 8 * 8 // max(window, 1))
    assert largest[1] <= 2 * largest[0]
    assert total[1] <= 2.05 * total[0]


@pytest.mark.parametrize(("kind", "window", "ends"), [("none", 4, (1, 1)), ("holes", 4, (1, 2)), ("left", 0, (1, 0))])
def test_compiles_to_one_graph(kind, window, ends):
    torch.compiler.reset()
    tensors = inputs()
    mask = mask_of(kind, 3, 13)
    compiled = torch.compile(neighbourhood_attention, fullgraph=True, backend="eager")
    result = run(compiled, tensors, mask, window, ends)
    assert_close(result, run(neighbourhood_attention, tensors, mask, window, ends), 1e-14)


def heads(kv_heads, length=11, head_dim=3):
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(3, count, length, head_dim, generator=generator, dtype=F64) for count in (2, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    ("kv_heads", "window", "ends"), [(2, 4, (0, 0)), (1, 4, (1, 2)), (2, 0, (1, 0)), (2, 64, (0, 0))]
)
def test_without_features_the_neighbourhood_is_all_there_is(kind, kv_heads, window, ends):
    """Softmax over the own block and the ends; zeros for queries that see nothing."""
    leaves = [t.requires_grad_() for t in heads(kv_heads)]
    mask = mask_of(kind, 3, 11)
    real = torch.ones(3, 11, dtype=torch.bool) if mask is None else mask
    options = {"kernel": "none", "exact_window": window, "exact_ends": ends, "scaling": 0.7, "key_mask": mask}
    out = favorpp_attention(*leaves, None, **options) * real[:, None, :, None]

    rank, count = real.cumsum(-1) - 1, real.sum(-1, keepdim=True)
    near = (rank[:, :, None] // window == rank[:, None] // window) if window else real[:, :, None] & False
    near = near | ((rank < ends[0]) | (rank >= count - ends[1]))[:, None]
    near = (near & real[:, None] & real[:, :, None])[:, None]
    query, key, value = (t.repeat_interleave(2 // t.shape[1], dim=1) for t in leaves)
    weights = torch.where(near, (0.7 * query @ key.mT).exp(), 0)
    expected = weights @ value / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    assert torch.allclose(out, expected, rtol=1e-9, atol=1e-9)
    grads = (torch.autograd.grad(o.square().sum(), leaves) for o in (out, expected))
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(*grads, strict=True))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        rounded = favorpp_attention(*(t.detach().to(dtype) for t in leaves), None, **options)
        assert rounded.dtype == dtype
        assert torch.allclose((rounded * real[:, None, :, None]).double(), expected, rtol=tolerance, atol=tolerance)


def test_neither_features_nor_a_neighbourhood_is_refused():
    query, key, value = heads(2)
    with pytest.raises(ConfigError, match=r"kernel='none' .* there is none.*Give one of them"):
        favorpp_attention(query, key, value, None, kernel="none")
    with pytest.raises(ConfigError, match=r"Give one of them"):
        FavorppConfig(kernel="none")
    with pytest.raises(ConfigError, match="uses no statistics"):
        FavorppConfig(kernel="none", exact_window=4, statistics="calibrated")
