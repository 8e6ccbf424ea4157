"""The approximation report: every number against a plain float64 computation, and a model that is left as it was."""

import json
import math
import sys
from dataclasses import FrozenInstanceError, asdict, fields, replace

import pytest
import torch
from tiny_models import NUM_HEADS, fingerprint, tiny_model, token_batch
from torch import nn
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

import hf_favorpp.report
from hf_favorpp import FavorppConfig, approximation_report, calibrate, convert_to_favorpp
from hf_favorpp.attention.tiles import Grid
from hf_favorpp.errors import ConversionError, InputError
from hf_favorpp.features.gerf import oprf_coefficient, quadrature
from hf_favorpp.features.preconditioning import precondition
from hf_favorpp.features.projection import draw_projections
from hf_favorpp.features.statistics import sequence_statistics
from hf_favorpp.nn import converted_layers
from hf_favorpp.observing import observing
from hf_favorpp.report_table import HeadReport, judge

SMALL = FavorppConfig(num_features=16)
LENGTHS = (23, 9, 5)
NUMBERS = [field.name for field in fields(HeadReport) if field.type is float]


@pytest.fixture
def model():
    return convert_to_favorpp(tiny_model("bert"), SMALL)


@pytest.fixture
def batch():
    return token_batch(*LENGTHS)


def numbers(report):
    """Return all numbers of the heads, (heads, fields)."""
    return torch.tensor([[getattr(head, name) for name in NUMBERS] for head in report.heads], dtype=torch.float64)


def assert_same_numbers(report, expected, tolerance=2e-5):
    torch.testing.assert_close(numbers(report), numbers(expected), rtol=tolerance, atol=tolerance, equal_nan=True)
    assert report.layer_errors == pytest.approx(expected.layer_errors, rel=tolerance, abs=tolerance)
    assert report.layer_uniform_errors == pytest.approx(expected.layer_uniform_errors, rel=tolerance, abs=tolerance)
    assert report.end_to_end == pytest.approx(expected.end_to_end, rel=tolerance, abs=tolerance)
    assert report.num_tokens == expected.num_tokens


def captured(model, batch):
    """Return, per layer, the sequences that its calls saw: scaled x, y, value and output, (H, n, d) float64 each."""
    layers, seen = converted_layers(model), {}

    def probe_of(layer):
        def probe(call):
            query, key, value, key_mask, scaling, *_ = call
            out = layer(query, key, value, key_mask, scaling)
            root = (query.shape[-1] ** -0.5 if scaling is None else scaling) ** 0.5
            groups = query.shape[1] // key.shape[1]
            real = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool) if key_mask is None else key_mask
            for row, mask in enumerate(real):
                q, o = query[row][:, mask].double(), out[row][:, mask].double()
                k, v = (t[row][:, mask].double().repeat_interleave(groups, dim=0) for t in (key, value))
                seen.setdefault(layer, []).append((q * root, k * root, v, o))

        return probe

    with torch.no_grad(), observing(layers, [probe_of(layer) for layer in layers], exact=True):
        model(**batch)
    return [seen[layer] for layer in layers]


def frobenius(tensors):
    return math.sqrt(sum(float((t**2).sum()) for t in tensors))


# --- the numbers of a head ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["bert", "albert", "modernbert", "eurobert"])
@pytest.mark.parametrize("options", [{}, {"kernel": "relu"}, {"exact_window": 4, "exact_ends": (1, 1)}], ids=str)
def test_errors_norms_and_entropies_are_those_of_a_plain_computation(model_type, options, batch):
    grouped = {"num_key_value_heads": 2} if model_type == "eurobert" else {}
    model = convert_to_favorpp(tiny_model(model_type, **grouped), FavorppConfig(num_features=16, **options))
    report = approximation_report(model, batch)
    calls = {"albert": 3}.get(model_type, 1)
    assert report.num_tokens == sum(LENGTHS)
    assert len(report.layers) == len(converted_layers(model)) == (1 if model_type == "albert" else 2)
    for sequences, heads, layer_errors in zip(
        captured(model, batch),
        report.layers,
        zip(report.layer_errors, report.layer_uniform_errors, strict=True),
        strict=True,
    ):
        assert len(sequences) == calls * len(LENGTHS)
        exact, uniform, entropy, of_layer = [], [], [], []
        for x, y, v, out in sequences:
            p = torch.softmax(x @ y.mT, dim=-1)
            exact.append(p @ v)
            uniform.append(v.mean(-2, keepdim=True) - p @ v)
            of_layer.append(out - p @ v)
            entropy.append(-(p * p.log()).sum(-1))
        assert layer_errors[0] == pytest.approx(frobenius(of_layer) / frobenius(exact), rel=1e-4)
        assert layer_errors[1] == pytest.approx(frobenius(uniform) / frobenius(exact), rel=1e-4)
        tokens = calls * sum(LENGTHS)
        for head in heads:
            h = head.head
            norm = frobenius(t[h] for t in exact)
            expected = {
                "error": frobenius(t[h] for t in of_layer) / norm,
                "uniform_error": frobenius(t[h] for t in uniform) / norm,
                "norm_x": frobenius(x[h] for x, *_ in sequences) / tokens**0.5,
                "norm_y": frobenius(y[h] for _, y, *_ in sequences) / tokens**0.5,
                "entropy": float(sum(t[h].sum() for t in entropy)) / tokens,
                "max_entropy": sum(n * math.log(n) for n in LENGTHS) / sum(LENGTHS),
            }
            assert {name: getattr(head, name) for name in expected} == pytest.approx(expected, rel=1e-4)
            assert head.verdict == judge(head.error, head.uniform_error)
            assert head.entropy < head.max_entropy


@pytest.mark.parametrize("preconditioning", ["none", "center", "diagonal", "full"])
@pytest.mark.parametrize("statistics", ["sequence", "calibrated"])
def test_psi_and_the_variance_belong_to_the_preconditioning_in_use(preconditioning, statistics, batch):
    config = FavorppConfig(num_features=16, preconditioning=preconditioning, candidates=1)
    model = convert_to_favorpp(tiny_model("bert"), config)
    if statistics == "calibrated":
        calibrate(model, [token_batch(30, 12, seed=1)])
    report = approximation_report(model, batch)
    for layer, sequences, heads in zip(converted_layers(model), captured(model, batch), report.layers, strict=True):
        for head in heads:
            psi, log_moment = [], []
            for x, y, _, _ in sequences:
                change = layer.preconditioner
                if statistics == "sequence":
                    moments = sequence_statistics(x.unsqueeze(0), y.unsqueeze(0), covariance=True)
                    change = precondition(moments, preconditioning)
                A, cx, cy, tx, ty = (None if t is None else t[0, head.head].double() for t in change)
                xs, ys = x[head.head], y[head.head]
                if cx is not None:
                    xs, ys = xs - cx, ys - cy
                if tx is not None:
                    xs, ys = xs @ tx.mT, ys @ ty.mT
                u = (xs[:, None] + ys).square().mean((0, 1))
                A = A.expand(8)
                psi.append(float(u.sum()))
                log_moment.append(float(((1 - 4 * A).log() - (1 - 8 * A).log() / 2 + u / (1 - 8 * A)).sum()))
            assert head.psi == pytest.approx(sum(psi) / len(LENGTHS), rel=1e-4)
            expected = math.log(math.expm1(sum(log_moment) / len(LENGTHS)) / 16)
            assert head.predicted_log_variance == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("kernel", ["favor++", "favor+", "favor+hyperbolic"])
def test_the_predicted_variance_is_that_of_independent_draws(kernel):
    """With one token there is one pair, so the mean pair is the pair itself."""
    config = FavorppConfig(num_features=16, kernel=kernel, preconditioning="none")
    model = convert_to_favorpp(tiny_model("bert", initializer_range=0.1), config)  # psi that draws can follow
    one_token = token_batch(1)
    heads = approximation_report(model, one_token).layers[1]
    (x, y, _, _) = captured(model, one_token)[1][0]
    psi = (x + y).square().sum((-2, -1))
    A = oprf_coefficient(psi, 8).unsqueeze(-1)
    draws = 20000
    omega = draw_projections(NUM_HEADS, 16 * draws, 8, projection="iid", seed=3).double()
    nodes, weights = quadrature(kernel, omega, A)
    log_terms = weights + (nodes @ (x + y).mT).squeeze(-1) - (x.square() + y.square()).sum((-2, -1)).unsqueeze(-1) / 2
    ratios = (log_terms - (x * y).sum((-2, -1)).unsqueeze(-1)).exp() * draws
    parts = ratios.unflatten(-1, (2 if kernel == "favor+hyperbolic" else 1, 16, draws)).sum(1)
    measured = parts.sum(-2).var(-1).log()
    predicted = [head.predicted_log_variance for head in heads]
    assert [head.psi for head in heads] == pytest.approx(psi.tolist(), rel=1e-4)
    assert predicted == pytest.approx(measured.tolist(), abs=0.1)


@pytest.mark.parametrize("kernel", ["relu", "elu", "trig"])
def test_other_kernels_have_no_predicted_variance(kernel, batch):
    report = approximation_report(
        convert_to_favorpp(tiny_model("bert"), replace(SMALL, kernel=kernel, preconditioning=None)), batch
    )
    assert all(math.isnan(head.predicted_log_variance) for head in report.heads)
    assert "not finite" not in {head.verdict for head in report.heads}
    assert all(math.isfinite(head.psi) for head in report.heads)


def test_a_huge_psi_gives_a_finite_logarithm(batch):
    plain = tiny_model("bert", initializer_range=8.0)
    report = approximation_report(convert_to_favorpp(plain, FavorppConfig(num_features=16, kernel="favor+")), batch)
    worst = max(report.heads, key=lambda head: head.psi)
    assert worst.psi > 1000
    assert all(math.isfinite(head.predicted_log_variance) for head in report.heads)
    assert worst.predicted_log_variance == pytest.approx(worst.psi - math.log(16), rel=1e-3)


def test_a_window_as_long_as_the_sequence_leaves_no_error(batch):
    model = convert_to_favorpp(tiny_model("bert"), replace(SMALL, exact_window=23))
    report = approximation_report(model, batch)
    assert max(head.error for head in report.heads) < 1e-5
    assert {head.verdict for head in report.heads} == {"good"}
    assert max(report.layer_errors) < 1e-5 < min(report.layer_uniform_errors)
    assert report.end_to_end["hidden_distance"] < 1e-5
    assert report.end_to_end["pooled_cosine"] == pytest.approx(1, abs=1e-6)


def test_a_two_dimensional_window_is_measured_as_it_is_used():
    model, single = convert_to_favorpp(tiny_model("bert"), replace(SMALL, exact_window=8)), token_batch(17)
    for layer in converted_layers(model):
        layer.config = replace(layer.config, exact_window=(4, 4))
        layer.grid = lambda length: Grid(1, 4, 4)
    assert max(approximation_report(model, single).layer_errors) < 0.2
    for layer in converted_layers(model):
        layer.config = replace(layer.config, exact_window=(5, 5))
    assert max(approximation_report(model, single).layer_errors) < 1e-5


def test_more_features_make_the_error_smaller(batch):
    few, many = (
        approximation_report(convert_to_favorpp(tiny_model("bert"), FavorppConfig(num_features=m)), batch)
        for m in (8, 512)
    )
    assert all(b < a / 3 for a, b in zip(few.layer_errors, many.layer_errors, strict=True))
    for a, b in zip(few.heads, many.heads, strict=True):
        assert b.predicted_log_variance == pytest.approx(a.predicted_log_variance - math.log(64), abs=1e-6)


def test_values_that_are_all_zero_are_reproduced(model, batch):
    value = model.encoder.layer[0].attention.self.value
    with torch.no_grad():
        value.weight[:8] = 0
        value.bias[:8] = 0
    head = approximation_report(model, batch).heads[0]
    assert (head.error, head.uniform_error, head.verdict) == (0, 0, "good")


def test_the_softmax_runs_over_few_queries_at_once(model, batch, monkeypatch):
    expected = approximation_report(model, batch)
    sizes, softmax = [], torch.softmax

    def watched(t, dim, *, out=None):  # that of the converted attention writes in place
        if out is None:
            sizes.append(t.numel())
        return softmax(t, dim, out=out)

    monkeypatch.setattr(torch, "softmax", watched)
    monkeypatch.setattr(hf_favorpp.report, "LOGITS_AT_ONCE", 2000)
    assert_same_numbers(approximation_report(model, batch), expected)
    assert max(sizes) <= 2000
    assert sum(sizes) == 2 * len(LENGTHS) * NUM_HEADS * max(LENGTHS) ** 2


# --- which tokens count -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preconditioning", ["none", "full"])
def test_padding_changes_no_number(preconditioning, batch):
    model = convert_to_favorpp(tiny_model("bert"), replace(SMALL, preconditioning=preconditioning))
    padded = token_batch(*LENGTHS, length=40)
    padded["input_ids"][0, 30] = 7
    assert_same_numbers(approximation_report(model, padded), approximation_report(model, batch))


def test_a_row_of_nothing_but_padding_changes_no_number(model, batch):
    more = {name: torch.cat((t, t[:1])) for name, t in batch.items()}
    more["attention_mask"][-1] = 0
    assert_same_numbers(approximation_report(model, more), approximation_report(model, batch))


def test_packed_sequences_are_measured_one_by_one(model, batch):
    real = batch["attention_mask"].bool()
    boundaries = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    packed = {
        "input_ids": batch["input_ids"][real].unsqueeze(0),
        "position_ids": torch.arange(real.shape[1]).expand_as(real)[real].unsqueeze(0),
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
    }
    assert_same_numbers(approximation_report(model, packed), approximation_report(model, batch))


def test_a_batch_without_a_mask_is_all_real(model):
    full = token_batch(9, 9)
    assert_same_numbers(
        approximation_report(model, {"input_ids": full["input_ids"]}), approximation_report(model, full)
    )


# --- end to end ---------------------------------------------------------------------------------------------------


def test_hidden_states_end_to_end_are_those_of_the_two_models(model, batch):
    with torch.no_grad():
        exact = tiny_model("bert")(**batch).last_hidden_state
        converted = model(**batch).last_hidden_state
    real = batch["attention_mask"].bool()
    distance = (converted[real] - exact[real]).norm() / exact[real].norm()
    means = [torch.stack([row[:n].mean(0) for row, n in zip(t, LENGTHS, strict=True)]) for t in (converted, exact)]
    cosine = (means[0] * means[1]).sum(-1) / means[0].norm(dim=-1) / means[1].norm(dim=-1)
    assert approximation_report(model, batch).end_to_end == pytest.approx(
        {"hidden_distance": distance.item(), "pooled_cosine": cosine.mean().item()}, rel=1e-5
    )


@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModelForMaskedLM])
def test_logits_end_to_end_are_those_of_the_two_models(auto):
    batch = token_batch(*range(5, 25))
    model = convert_to_favorpp(tiny_model("bert", auto, num_labels=3), replace(SMALL, num_features=2))
    with torch.no_grad():
        exact, converted = tiny_model("bert", auto, num_labels=3)(**batch).logits, model(**batch).logits
    if auto is AutoModelForMaskedLM:
        exact, converted = (t[batch["attention_mask"].bool()] for t in (exact, converted))
    agreement = (exact.argmax(-1) == converted.argmax(-1)).double().mean().item()
    assert 0 < agreement < 1
    assert approximation_report(model, batch).end_to_end == pytest.approx(
        {"logits_distance": ((converted - exact).norm() / exact.norm()).item(), "argmax_agreement": agreement},
        rel=1e-4,
    )


def test_one_logit_has_no_argmax_to_agree_on(batch):
    model = convert_to_favorpp(tiny_model("bert", AutoModelForSequenceClassification, num_labels=1), SMALL)
    assert list(approximation_report(model, batch).end_to_end) == ["logits_distance"]


class Pair(nn.Module):
    """Two models, of which a forward may use one; it returns no mapping."""

    def __init__(self, *models, used=2):
        super().__init__()
        self.models, self.used = nn.ModuleList(models), used

    def forward(self, **batch):
        return tuple(model(**batch).last_hidden_state for model in self.models[: self.used])


def test_two_converted_models_in_one_are_kept_apart(model, batch):
    other = convert_to_favorpp(tiny_model("bert"), FavorppConfig(num_features=16, layers=(1,)))
    report, alone = approximation_report(Pair(model, other), batch), approximation_report(model, batch)
    assert [heads[0].name for heads in report.layers] == [
        "models.0.encoder.layer.0.attention.self",
        "models.0.encoder.layer.1.attention.self",
        "models.1.encoder.layer.1.attention.self",
    ]
    assert [heads[0].layer for heads in report.layers] == [0, 1, 1]
    assert report.layer_errors == (*alone.layer_errors, alone.layer_errors[1])
    assert report.end_to_end == {}
    assert "Converted model" not in str(report)


# --- the model is left as it was ----------------------------------------------------------------------------------


def state(model):
    layers = converted_layers(model)
    return (
        fingerprint(model),
        [module.training for module in model.modules()],
        [(layer.exact, layer.probe, layer.config, layer.calibrated) for layer in layers],
        torch.is_grad_enabled(),
        torch.get_rng_state().tolist(),
    )


def test_nothing_of_the_model_or_of_the_batch_is_changed(model, batch):
    model.train()
    model.pooler.eval()
    converted_layers(model)[1].probe = probe = lambda *seen: None
    before, given = state(model), {name: t.clone() for name, t in batch.items()}
    approximation_report(model, batch)
    assert state(model) == before
    assert converted_layers(model)[1].probe is probe
    assert all(torch.equal(batch[name], t) for name, t in given.items())


@pytest.mark.parametrize(
    ("mask", "error"), [((3, 23, 23), InputError), ((3, 23), InputError), (None, ConversionError)], ids=str
)
def test_nothing_is_changed_where_it_raises(batch, mask, error):
    """Before the first layer, after both passes would have been possible, and in the middle of a pass."""
    config = SMALL if mask else replace(SMALL, statistics="calibrated")
    model = convert_to_favorpp(tiny_model("bert"), config).train()
    before = state(model)
    with pytest.raises(error):
        approximation_report(model, {**batch, "attention_mask": torch.zeros(mask)} if mask else batch)
    assert state(model) == before


def test_the_mode_of_the_model_does_not_matter(batch):
    model = convert_to_favorpp(tiny_model("bert", hidden_dropout_prob=0.5), SMALL)
    expected = approximation_report(model, batch)
    assert approximation_report(model.train(), batch) == expected
    for layer in converted_layers(model):
        layer.exact = True
    assert approximation_report(model, batch) == expected


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_a_compiled_model_is_measured_without_compiling(model, batch, how):
    expected = approximation_report(model, batch)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = model
    if how == "wrapped":
        compiled = torch.compile(model, backend="eager", fullgraph=True)
    else:
        model.compile(backend="eager", fullgraph=True)
    assert approximation_report(compiled, batch) == expected
    assert not torch._dynamo.utils.counters["stats"]


# --- dtypes, and what is not finite -------------------------------------------------------------------------------


def test_a_bfloat16_model_is_measured_in_float32(batch):
    expected = approximation_report(convert_to_favorpp(tiny_model("bert"), SMALL), batch)
    report = approximation_report(convert_to_favorpp(tiny_model("bert").bfloat16(), SMALL), batch)
    assert_same_numbers(report, expected, tolerance=0.06)
    captured_in_bf16 = captured(convert_to_favorpp(tiny_model("bert").bfloat16(), SMALL), batch)[0]
    entropy = torch.cat([
        torch.special.entr(torch.softmax(x[0] @ y[0].mT, -1)).sum(-1) for x, y, *_ in captured_in_bf16
    ])
    assert report.heads[0].entropy == pytest.approx(entropy.mean().item(), rel=1e-5)


@pytest.mark.parametrize("statistics", ["sequence", "calibrated"])
def test_a_float64_model_gives_the_numbers_of_float32(batch, statistics):
    single, double = (
        convert_to_favorpp(tiny_model("bert").to(dtype), SMALL) for dtype in (torch.float32, torch.float64)
    )
    if statistics == "calibrated":
        calibrate(single, [batch])
        calibrate(double, [batch])
    assert_same_numbers(approximation_report(double, batch), approximation_report(single, batch), tolerance=1e-3)


@pytest.mark.parametrize("preconditioning", ["center", "full"])
def test_what_is_not_finite_is_reported_as_it_is(batch, preconditioning, tmp_path):
    model = convert_to_favorpp(tiny_model("bert"), replace(SMALL, preconditioning=preconditioning))
    embeddings = model.embeddings.word_embeddings(batch["input_ids"]).detach()
    embeddings[1, 2] = float("nan")
    report = approximation_report(model, {"inputs_embeds": embeddings, "attention_mask": batch["attention_mask"]})
    assert {head.verdict for head in report.heads} == set(report.layer_verdicts) == {"not finite"}
    assert all(math.isnan(getattr(head, name)) for head in report.heads for name in NUMBERS if name != "max_entropy")
    assert all(math.isnan(number) for number in (*report.layer_errors, *report.end_to_end.values()) if number != 0)
    written = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert written["layer_errors"] == [None, None]
    assert written["heads"][0]["psi"] is None
    assert written["heads"][0]["verdict"] == "not finite"
    assert "nan" in str(report)
    report.plot(tmp_path / "heads.png")


@pytest.mark.parametrize(
    ("error", "uniform_error", "expected"),
    [
        (0.0, 0.0, "good"),
        (0.25, 0.9, "good"),
        (0.25, 0.1, "good"),
        (0.26, 0.9, "fair"),
        (0.5, 0.51, "fair"),
        (0.4, 0.4, "worse than uniform"),
        (0.51, 0.9, "poor"),
        (1.5, 1.6, "poor"),
        (0.9, 0.9, "worse than uniform"),
        (float("nan"), 0.9, "not finite"),
        (0.1, float("nan"), "not finite"),
        (float("inf"), 0.9, "not finite"),
    ],
)
def test_the_verdict(error, uniform_error, expected):
    assert judge(error, uniform_error) == expected


# --- what is refused, with its remedy -----------------------------------------------------------------------------


def test_a_softmax_model_is_refused(batch):
    with pytest.raises(ConversionError, match=r"BertModel is not converted; call convert_to_favorpp\(model\) first"):
        approximation_report(tiny_model("bert"), batch)


@pytest.mark.parametrize("given", [[torch.ones(1)], torch.ones(1), {"input_ids": [[1, 2]]}, {}, None], ids=str)
def test_what_is_no_mapping_of_tensors_is_refused(model, given):
    with pytest.raises(InputError, match=r"batch must be a mapping of tensors.*return_tensors='pt'"):
        approximation_report(model, given)


def test_a_layer_that_the_batch_does_not_reach_is_named(model, batch):
    pair = Pair(model, convert_to_favorpp(tiny_model("bert"), SMALL), used=1)
    with pytest.raises(InputError, match=r"does not reach the converted layer models\.1\.encoder\.layer\.0"):
        approximation_report(pair, batch)


def test_a_batch_of_nothing_but_padding_is_refused(model, batch):
    with pytest.raises(
        InputError, match=r"holds no real token: everything is masked\. Check attention_mask: 1 is real"
    ):
        approximation_report(model, {**batch, "attention_mask": torch.zeros_like(batch["attention_mask"])})


def test_a_missing_calibration_is_said(batch):
    model = convert_to_favorpp(tiny_model("bert"), replace(SMALL, statistics="calibrated"))
    with pytest.raises(ConversionError, match="needs a calibration"):
        approximation_report(model, batch)


# --- how it is shown ----------------------------------------------------------------------------------------------


@pytest.fixture
def report(model, batch):
    return approximation_report(model, batch)


def test_a_report_is_a_record(report):
    assert [(head.layer, head.head) for head in report.heads] == [(i, h) for i in range(2) for h in range(NUM_HEADS)]
    assert report.heads[-1].name == "encoder.layer.1.attention.self"
    with pytest.raises(FrozenInstanceError):
        report.num_tokens = 1
    with pytest.raises(FrozenInstanceError):
        report.heads[0].psi = 1.0


def test_the_layers_that_are_measured_are_those_that_are_converted(batch):
    report = approximation_report(convert_to_favorpp(tiny_model("bert"), replace(SMALL, layers=(1,))), batch)
    assert {(head.layer, head.name) for head in report.heads} == {(1, "encoder.layer.1.attention.self")}
    assert len(report.layer_errors) == len(report.layer_uniform_errors) == len(report.layer_verdicts) == 1


def test_to_dict_is_json_with_the_same_numbers(report):
    written = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert written == report.to_dict()
    assert written.keys() == {field.name for field in fields(report)}
    assert written["heads"] == [asdict(head) for head in report.heads]
    assert written["layer_errors"] == list(report.layer_errors)
    assert written["end_to_end"] == report.end_to_end


def test_to_pandas_has_one_row_per_head(report):
    table = report.to_pandas()
    assert list(table.columns) == [field.name for field in fields(HeadReport)]
    assert table.to_dict("records") == [asdict(head) for head in report.heads]


def test_print_shows_layers_the_worst_heads_and_the_whole(report):
    # errors such that no two are equal to two digits, and neither order nor median is accidental
    errors = (0.2, 0.7, 0.3, 1.2, 0.6, 0.1, 0.9, 0.05)
    heads = tuple(
        replace(
            head, error=error, uniform_error=0.8, entropy=1.5, max_entropy=2.25, psi=17.04, verdict=judge(error, 0.8)
        )
        for head, error in zip(report.heads, errors, strict=True)
    )
    text = str(
        replace(
            report, heads=heads, layer_errors=(0.81, 0.44), layer_uniform_errors=(0.8, 0.82), end_to_end={"a": 0.12345}
        )
    )
    lines = text.splitlines()
    assert lines[0] == "Relative output error of each layer against softmax, 37 tokens, computed by backend reference"
    first, second = (" ".join(line.split()) for line in lines[2:4])
    assert first == "0 encoder.layer.0.attention.self 0.20 0.50 1.20 0.81 0.80 1.50/2.25 17.0 worse than uniform"
    assert second == "1 encoder.layer.1.attention.self 0.05 0.35 0.90 0.44 0.82 1.50/2.25 17.0 fair"
    worst = lines[lines.index("Worst heads") + 2 :][:5]
    assert [tuple(line.split()[:3]) for line in worst] == [
        ("0", "3", "1.20"),
        ("1", "2", "0.90"),
        ("0", "1", "0.70"),
        ("1", "0", "0.60"),
        ("0", "2", "0.30"),
    ]
    assert lines[-2:] == ["Converted model against softmax model", "a  0.1235"]
    starts = [line.index(word) for line, word in zip(lines[1:4], ("verdict", "worse than", "fair"), strict=True)]
    assert len(set(starts)) == 1
    assert not any(line != line.rstrip() for line in lines)


def test_print_names_a_head_that_is_not_finite_first(report):
    heads = list(report.heads)
    heads[5] = replace(heads[5], error=float("nan"), verdict=judge(float("nan"), 1.0))
    lines = str(replace(report, heads=tuple(heads))).splitlines()
    assert lines[3].split()[4] == "nan"  # of the layer's heads the worst
    worst = lines[lines.index("Worst heads") + 2]
    assert worst.split()[:3] == ["1", "1", "nan"]
    assert worst.endswith("not finite")


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_plot_writes_the_figure(report, tmp_path, suffix, start):
    path = tmp_path / f"heads.{suffix}"
    report.plot(path)
    assert path.read_bytes().startswith(start)
    assert path.stat().st_size > 5000


def test_plot_shows_every_error_on_one_scale(report):
    figure = report.plot()
    left, right = figure.axes[:2]
    for axis, name in ((left, "error"), (right, "uniform_error")):
        expected = [[getattr(head, name) for head in heads] for heads in report.layers]
        image = axis.images[0]
        torch.testing.assert_close(torch.tensor(image.get_array().tolist()), torch.tensor(expected))
        assert image.get_clim() == (0, 1)
        assert [text.get_text() for text in axis.texts] == [f"{number:.2f}" for row in expected for number in row]
        assert len(axis.get_xticks()) == NUM_HEADS
    assert [label.get_text() for label in left.get_yticklabels()] == ["0", "1"]
    assert left.get_title() != right.get_title()
    assert figure.axes[2].get_ylabel() == "relative output error"


@pytest.mark.parametrize(("module", "method"), [("pandas", "to_pandas"), ("matplotlib.figure", "plot")])
def test_a_missing_package_is_named_with_its_extra(report, monkeypatch, module, method):
    monkeypatch.setitem(sys.modules, module, None)
    name = module.partition(".")[0]
    with pytest.raises(ImportError, match=rf"{method}\(\) needs {name}: pip install 'hf-favorpp\[recipes\]'"):
        getattr(report, method)()
