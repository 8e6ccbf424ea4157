"""The operators of the CPU path as PyTorch sees them: schemas, fake tensors, compilation, autograd, threads."""

import itertools
import threading

import pytest
import torch
from cases import F64, assert_agrees, errors, log_weights_for, mask_of, omega_for, run, statistics_of, tokens
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_favorpp import favorpp_attention
from hf_favorpp.attention.cpu.chunks import scratch
from hf_favorpp.attention.two_steps import packed_tokens, real_tokens

OPS = torch.ops.hf_favorpp
ROWS, HEADS, KV_HEADS, LENGTH, FEATURES, HEAD_DIM, VALUE_DIM = 2, 4, 2, 11, 3, 5, 4


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr("hf_favorpp.attention.cpu.chunks.CHUNK_LOGITS", 1)


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype)


def sequences_of(kind):
    if kind == "none":
        return None, None
    if kind == "mask":
        return real_tokens(torch.tensor([[True] * LENGTH, [False, True] * 5 + [False]]))
    return packed_tokens(torch.tensor([0, 4, LENGTH]), 7)


def shared_term(kind):
    center, linear, root = normal(1, HEADS, HEAD_DIM), normal(1, HEADS, HEAD_DIM), normal(1, HEADS, HEAD_DIM, HEAD_DIM)
    return {"none": (None, None, None), "center": (center, None, linear), "full": (center, root, linear)}[kind]


def arguments(kind, term, block, ends, dtype=torch.float32):
    """Return the arguments of summarise and of attend."""
    rows = 1 if kind == "packed" else ROWS
    order, count = sequences_of(kind)
    ranks = LENGTH if order is None else order.shape[1]
    blocks = -(-ranks // block) if block else 1
    query = normal(rows, HEADS, LENGTH, HEAD_DIM, dtype=dtype)
    key, value = (normal(rows, KV_HEADS, LENGTH, width, dtype=dtype) for width in (HEAD_DIM, VALUE_DIM))
    projection, bias = normal(1, HEADS, FEATURES, HEAD_DIM), normal(ROWS, HEADS, blocks, FEATURES)
    S = normal(ROWS, HEADS, blocks, FEATURES, VALUE_DIM)
    rest = (*shared_term(term), 0.4, order, count, block, *ends)
    single = (key, value) if block or any(ends) else (None, None)
    return (key, value, projection, *rest), (query, *single, projection, bias, S, *rest)


CASES = [
    ("none", "none", 0, (0, 0)),
    ("mask", "full", 0, (0, 0)),
    ("none", "center", 0, (1, 1)),
    ("mask", "center", 4, (1, 2)),
    ("packed", "full", 4, (0, 0)),
]


def requiring_grad(args, count):
    """Let the first tensors require grad."""
    return tuple(
        t.requires_grad_() if i < count and isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for i, t in enumerate(args)
    )


QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize(
    ("case", "dtype", "checks"),
    [
        *((case, torch.float32, QUICK) for case in CASES),
        (CASES[3], torch.bfloat16, QUICK),
        (CASES[0], torch.float32, ("test_aot_dispatch_dynamic",)),
        (CASES[3], torch.bfloat16, ("test_aot_dispatch_dynamic",)),
    ],
)
def test_every_operator_keeps_the_contract_of_pytorch(case, dtype, checks):
    """Of schemas (nothing is mutated or aliased), autograd registration, fake tensors and AOT autograd."""
    of_summarise, of_attend = arguments(*case, dtype=dtype)
    z, S = OPS.cpu_summarise(*of_summarise)
    out, logsumexp = OPS.cpu_attend(*of_attend)
    need = case[1] != "center"
    grads = torch.randn_like(z), torch.randn_like(S), torch.randn_like(out)
    check(OPS.cpu_moments, (of_summarise[0], *sequences_of(case[0]), need), checks)
    check(OPS.cpu_summarise_backward, (*grads[:2], *of_summarise, z, S, need), checks)
    check(OPS.cpu_attend_backward, (grads[2], *of_attend, out, logsumexp, need), checks)
    check(OPS.cpu_summarise, requiring_grad(of_summarise, 3), checks)
    check(OPS.cpu_attend, requiring_grad(of_attend, 6), checks)


def check(operator, args, checks):
    torch.library.opcheck(operator.default, args, test_utils=checks)


@pytest.mark.parametrize("kind", ["none", "mask", "packed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, F64])
def test_moments_are_those_of_real_tokens(kind, dtype):
    token = (normal(1 if kind == "packed" else ROWS, HEADS, LENGTH, HEAD_DIM) + 100).to(dtype)
    order, count = sequences_of(kind)
    for covariance in (True, False):
        mean, variance, second = OPS.cpu_moments(token, order, count, covariance)
        assert mean.dtype == torch.promote_types(dtype, torch.float32)
        for n in range(ROWS):
            own = token[n if len(token) > 1 else 0].to(F64)
            own = own if order is None else own[:, order[n, : count[n]]]
            tolerance = {"rtol": 1e-5, "atol": 1e-6}
            assert torch.allclose(mean[n].to(F64), own.mean(1), **tolerance)
            assert torch.allclose(variance[n].to(F64), own.var(1, correction=0), **tolerance)
            for h in range(HEADS if covariance else 0):
                assert torch.allclose(second[n, h].to(F64), own[h].T.cov(correction=0), **tolerance)
        assert covariance or second.shape == (0,)


def test_what_comes_back_to_a_block_without_keys_means_nothing():
    """All of the first block are ends, and so are some of the second; NaN comes back to the features of the first."""
    of_summarise, _ = arguments("none", "full", 4, (5, 0))
    z, S = OPS.cpu_summarise(*of_summarise)
    empty = z == -float("inf")
    assert empty[:, :, 0].all()
    assert not empty[:, :, 1:].any()
    grad_z, grad_S = torch.randn_like(z), torch.randn_like(S)
    expected = OPS.cpu_summarise_backward(grad_z, grad_S, *of_summarise, z, S, True)
    grad_z[empty], grad_S[empty] = float("nan"), float("nan")
    result = OPS.cpu_summarise_backward(grad_z, grad_S, *of_summarise, z, S, True)
    for grad, wanted in zip(result, expected, strict=True):
        assert torch.isfinite(grad).all()
        assert torch.equal(grad, wanted)
    assert all((grad[:, :, :5] == 0).all() for grad in result[:2])


def attend(query, key, value, omega, mask=None, **options):
    options = {"preconditioning": "full", "exact_window": 4, "exact_ends": (1, 1), **options}
    return favorpp_attention(query, key, value, omega, key_mask=mask, backend="cpu", **options)


COMPILED = [
    {},
    {"exact_window": 0, "exact_ends": (0, 0), "preconditioning": "none"},
    {"exact_window": 0, "kernel": "favor+hyperbolic", "preconditioning": "center"},
]
EACH = pytest.mark.parametrize("options", COMPILED, ids=["window", "plain", "ends"])
DYNAMIC = pytest.mark.parametrize(
    "options",
    [
        pytest.param(COMPILED[0], id="window"),
        pytest.param(COMPILED[1], id="plain"),
        pytest.param(COMPILED[2], id="ends"),
    ],
)


@pytest.mark.parametrize(
    ("options", "dynamic", "kind"),
    [
        pytest.param(COMPILED[0], False, "holes", id="window"),
        pytest.param(COMPILED[0], True, "none", id="window-dynamic"),
        pytest.param(COMPILED[1], True, "holes", id="plain-dynamic"),
        pytest.param(COMPILED[2], True, "none", id="hyperbolic-dynamic"),
    ],
)
def test_compiles_to_one_graph_forward_and_backward(options, dynamic, kind):
    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (11, 18) if dynamic else (11,):
        tensors = tokens(batch=2, queries=length, kv_heads=2)
        omega, mask = omega_for(tensors[0]), mask_of(kind, 2, length)
        results = []
        for function in (compiled, attend):
            leaves = [t.clone().requires_grad_() for t in (*tensors, omega)]
            out = function(*leaves, mask, **options)
            grads = torch.autograd.grad(out.square().sum(), leaves)
            results.append(
                dict(zip(("output", "query", "key", "value", "omega"), (out.detach(), *grads), strict=True))
            )
        assert_agrees(*results, 1e-12)


@DYNAMIC
def test_one_graph_serves_all_lengths(options):
    torch.compiler.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(attend, fullgraph=True, backend=count, dynamic=True)
    for length in (12, 20, 33, 70):
        tensors = tokens(batch=2, queries=length)
        omega = omega_for(tensors[0])
        assert torch.allclose(compiled(*tensors, omega, **options), attend(*tensors, omega, **options), atol=1e-12)
    assert len(graphs) == 1


def test_packed_sequences_compile_to_one_graph_where_the_longest_is_given():
    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=False)
    tensors, cu_seqlens = tokens(batch=1, queries=20), torch.tensor([0, 7, 20])
    omega, options = omega_for(tensors[0]), {"cu_seqlens": cu_seqlens, "max_seqlen": 13}
    assert torch.allclose(compiled(*tensors, omega, **options), attend(*tensors, omega, **options), atol=1e-12)


class Layer(torch.nn.Module):
    def __init__(self, options):
        super().__init__()
        self.options = options
        self.register_buffer("omega", omega_for(torch.empty(1, 4, 1, 5)))

    def forward(self, query, key, value, mask):
        return attend(query, key, value, self.omega, mask, **self.options)


@DYNAMIC
def test_exports_with_a_dynamic_length(options):
    layer, length = Layer(options), torch.export.Dim("length", min=8, max=512)

    def example(length):
        return *tokens(batch=2, queries=length), mask_of("holes", 2, length)

    dims = ({2: length}, {2: length}, {2: length}, {1: length})
    exported = torch.export.export(layer, example(16), dynamic_shapes=dims)
    for other in (16, 70):
        assert torch.allclose(exported.module()(*example(other)), layer(*example(other)), atol=1e-12)


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_fake_tensors_have_the_shapes_strides_and_dtypes_of_real_ones(options, dtype):
    tensors = tokens(batch=2, queries=11, kv_heads=2, value_dim=3, dtype=dtype)
    omega, mask = omega_for(tensors[0]).float(), mask_of("holes", 2, 11)

    def step(tensors, omega, mask):
        leaves = [t.detach().requires_grad_() for t in (*tensors, omega)]
        out = attend(*leaves, mask, **options)
        return out, *torch.autograd.grad(out.float().sum(), leaves)

    real = step(tensors, omega, mask)
    with FakeTensorMode() as mode:
        fake = step([mode.from_tensor(t) for t in tensors], mode.from_tensor(omega), mode.from_tensor(mask))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_changes_neither_dtype_nor_bits(options, dtype):
    tensors = tokens(batch=2, queries=70, dtype=dtype)
    omega = omega_for(tensors[0]).float()
    results = []
    for enabled in (False, True):
        leaves = [t.detach().clone().requires_grad_() for t in (*tensors, omega)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = attend(*leaves, mask_of("holes", 2, 70), **options)
            assert out.dtype == dtype
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
        assert [grad.dtype for grad in grads] == [dtype] * 3 + [torch.float32]
        results.append((out.detach(), *grads))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_layer_under_autocast_gets_the_gradients_of_its_weights():
    """Where a linear layer in bfloat16 makes queries and keys, as in training."""
    linear, x = torch.nn.Linear(20, 60), normal(2, 30, 20)
    omega = omega_for(torch.empty(1, 4, 1, 5)).float()
    grads = []
    for backend in ("cpu", "reference"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            query, key, value = linear(x).unflatten(-1, (3, 4, 5)).permute(2, 0, 3, 1, 4)
            out = favorpp_attention(query, key, value, omega, exact_window=8, backend=backend)
            assert out.dtype == torch.bfloat16
        grads.append({"weight": torch.autograd.grad(out.float().square().sum(), linear.weight)[0]})
    assert_agrees(*grads, 1e-2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_bits(use_reentrant):
    tensors = tokens(batch=2, queries=70, dtype=torch.float32)
    omega = omega_for(tensors[0]).float()
    grads = []
    for checkpointed in (False, True):
        leaves = [t.clone().requires_grad_() for t in tensors]
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(attend, *leaves, omega, use_reentrant=use_reentrant)
        else:
            out = attend(*leaves, omega)
        grads.append(torch.autograd.grad(out.sum(), leaves) if not use_reentrant else backward(out, leaves))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def backward(out, leaves):
    out.sum().backward()
    return [leaf.grad for leaf in leaves]


def test_without_gradients_it_keeps_nothing_and_gives_the_same_bits():
    tensors = [t.requires_grad_() for t in tokens(queries=70)]
    omega = omega_for(tensors[0])
    out = attend(*tensors, omega)
    assert out.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            other = attend(*tensors, omega)
        assert not other.requires_grad
        assert torch.equal(other, out.detach())


def in_new_thread(function):
    """Run where no scratch memory exists yet."""
    outcome = []

    def target():
        try:
            outcome.append(function())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def test_training_after_inference_mode():
    """What inference mode allocates cannot be written to afterwards: scratch memory must not be of that kind."""
    tensors = tokens(queries=70)
    omega = omega_for(tensors[0])

    def infer_then_train():
        with torch.inference_mode():
            attend(*tensors, omega)
        leaf = tensors[0].clone().requires_grad_()
        attend(leaf, *tensors[1:], omega).sum().backward()
        return leaf.grad

    assert torch.isfinite(in_new_thread(infer_then_train)).all()


WANTED = [names for n in range(1, 5) for names in itertools.combinations(("query", "key", "value", "omega"), n)]


@pytest.mark.parametrize("wanted", [names for names in WANTED if len(names) in (1, 3)], ids="+".join)
@EACH
def test_only_some_inputs_may_require_grad(wanted, options):
    tensors = tokens(queries=20, kv_heads=2)
    inputs = dict(zip(("query", "key", "value", "omega"), (*tensors, omega_for(tensors[0])), strict=True))

    def grads_of(names):
        leaves = {name: t.detach().clone().requires_grad_(name in names) for name, t in inputs.items()}
        attend(**leaves, **options).square().sum().backward()
        return {name: leaves[name].grad for name in inputs}

    expected = grads_of(list(inputs))
    for name, grad in grads_of(wanted).items():
        assert (grad is None) == (name not in wanted)
        assert grad is None or torch.equal(grad, expected[name])


@pytest.mark.parametrize("of", [0, 1, 2, 3], ids=["query", "key", "value", "omega"])
@EACH
def test_differentiating_twice_is_refused(of, options):
    tensors = tokens(queries=20)
    leaves = [*tensors, omega_for(tensors[0])]
    leaves[of].requires_grad_()
    (grad,) = torch.autograd.grad(attend(*leaves, **options).square().sum(), leaves[of], create_graph=True)
    with pytest.raises(RuntimeError, match=r"backward through hf_favorpp.cpu_(attend|summarise)_backward"):
        torch.autograd.grad(grad.square().sum(), leaves[of])


def test_the_gradient_of_an_unused_output_is_zero_or_none():
    query, key, value = (t.requires_grad_() for t in tokens(queries=20))
    out = attend(query, key, value, omega_for(query))
    grads = torch.autograd.grad((out * 0).sum(), (query, key, value))
    assert all((grad == 0).all() for grad in grads)


def test_threads_do_not_share_scratch_memory():
    """Many small chunks each, of other sizes in each thread, so that both are inside an operator at once."""
    cases, expected = [], []
    for seed, (length, window) in enumerate([(300, 16), (410, 0), (333, 48)]):
        tensors = tokens(batch=4, queries=length, head_dim=8, seed=seed, dtype=torch.float32)
        cases.append((tensors, omega_for(tensors[0]).float(), {"exact_window": window, "preconditioning": "center"}))
        expected.append(run("cpu", *cases[-1][:2], **cases[-1][2]))
    results, start = {}, threading.Barrier(len(cases))

    def work(index):
        tensors, omega, options = cases[index]
        start.wait()
        results[index] = [run("cpu", tensors, omega, **options) for _ in range(4)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, wanted in enumerate(expected):
        for result in results[index]:
            assert all(torch.equal(result[name], wanted[name]) for name in wanted)


def test_scratch_memory_belongs_to_a_thread():
    attend(*tokens(queries=20), omega_for(torch.empty(1, 4, 1, 5)))
    assert scratch.pieces
    assert in_new_thread(lambda: len(scratch.pieces)) == 0


@pytest.fixture
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_deterministic")
@EACH
def test_deterministic_algorithms_are_all_it_uses(options):
    """They fill new memory with NaN, too: nothing that is not written may be read."""
    tensors = tokens(queries=90)
    omega, mask = omega_for(tensors[0]), mask_of("holes", 3, 90)
    options = {"preconditioning": "full", "exact_window": 4, "exact_ends": (1, 1), "key_mask": mask, **options}
    scratch.pieces.clear()
    assert_agrees(run("cpu", tensors, omega, **options), run("reference", tensors, omega, **options), 1e-11)


@pytest.fixture
def _doubles():
    torch.set_default_dtype(F64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_doubles")
@EACH
def test_the_default_dtype_does_not_matter(options):
    tensors = tokens(queries=90, dtype=torch.float32)
    omega, mask = omega_for(tensors[0]).float(), mask_of("holes", 3, 90)
    options = {"preconditioning": "full", "exact_window": 4, "exact_ends": (1, 1), "key_mask": mask, **options}
    doubled = run("cpu", tensors, omega, **options)
    torch.set_default_dtype(torch.float32)
    single = run("cpu", tensors, omega, **options)
    for name, tensor in single.items():
        assert tensor.dtype == doubled[name].dtype == torch.float32
        assert torch.equal(tensor, doubled[name])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("of", [0, 1, 2], ids=["query", "key", "value"])
@EACH
def test_what_is_not_finite_in_a_real_token_shows_where_it_does_in_the_reference(bad, of, options):
    tensors = tokens(batch=2, queries=70)
    tensors[of][1, 2, 5, 3] = bad
    omega = omega_for(tensors[0])
    finite = {}
    for backend in ("cpu", "reference"):
        leaves = [t.detach().clone().requires_grad_() for t in (*tensors, omega)]
        options = {"preconditioning": "full", "exact_window": 4, "exact_ends": (1, 1), **options}
        out = favorpp_attention(*leaves, backend=backend, **options)
        out.sum().backward()
        finite[backend] = [torch.isfinite(t) for t in (out, *(leaf.grad for leaf in leaves))]
    assert not finite["cpu"][0].all()
    assert all(torch.equal(a, b) for a, b in zip(*finite.values(), strict=True))


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e30])
@EACH
@pytest.mark.parametrize("kind", ["right", "left", "holes", "empty row"])
def test_padding_is_never_read(garbage, options, kind):
    tensors = tokens(queries=70)
    omega, mask = omega_for(tensors[0]), mask_of(kind, 3, 70)
    options = {"preconditioning": "full", "exact_window": 4, "exact_ends": (1, 1), "key_mask": mask, **options}
    expected = run("cpu", tensors, omega, **options)
    result = run("cpu", [t.masked_fill(~mask[:, None, :, None], garbage) for t in tensors], omega, **options)
    assert all(torch.equal(result[name], expected[name]) for name in result)


def test_with_a_window_padded_queries_are_never_read_where_other_keys_are_padded():
    query, key, value = tokens(queries=20)
    mask = mask_of("right", 3, 20)
    options = {"query_mask": mask, "exact_window": 4}
    expected = run("cpu", (query, key, value), omega_for(query), **options)
    query = query.masked_fill(~mask[:, None, :, None], float("nan"))
    assert max(errors(run("cpu", (query, key, value), omega_for(query), **options), expected).values()) < 1e-12


def test_many_features_and_a_long_sequence():
    tensors = tokens(batch=1, heads=1, queries=300, dtype=torch.float32)
    for num_features, window in ((513, 0), (1024, 16)):
        omega = omega_for(tensors[0], num_features)
        expected = run("reference", [t.to(F64) for t in tensors], omega, exact_window=window)
        assert_agrees(run("cpu", tensors, omega, exact_window=window), expected, 5e-6)
    query = normal(1, 1, 100_000, 4).requires_grad_()
    out = favorpp_attention(query, query, query, omega_for(query), exact_window=64, exact_ends=(1, 1), backend="cpu")
    assert torch.isfinite(torch.autograd.grad(out.sum(), query)[0]).all()


def test_long_sums_in_half_precision_are_as_good_as_the_reference():
    """Gradients of features are sums over all tokens; those of tokens are rounded once for each way they are seen."""
    tensors = tokens(batch=1, heads=1, queries=8192, head_dim=8, dtype=torch.bfloat16)
    omega = omega_for(tensors[0], 16)
    for window in (0, 64):
        options = {"exact_window": window, "statistics": statistics_of("statistics", *tensors[:2], "favor++", "none")}
        log_weights = log_weights_for(omega)
        expected = run("reference", [t.to(F64) for t in tensors], omega, log_weights, **options)
        own = errors(run("reference", tensors, omega, log_weights, **options), expected)
        found = errors(run("cpu", tensors, omega, log_weights, **options), expected)
        assert all(found[name] <= 1.5 * max(own[name], 1e-5) for name in own), (found, own)
