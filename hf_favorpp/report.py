"""How well converted attention stands in for softmax: measured per head on one batch, and end to end."""

import logging
import math
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from hf_favorpp.attention import observed_backends
from hf_favorpp.attention.relative_positions import RelativePositions
from hf_favorpp.errors import ConversionError, InputError
from hf_favorpp.features.preconditioning import precondition
from hf_favorpp.features.statistics import sequence_statistics
from hf_favorpp.features.variance import gerf_log_second_moment, hyperbolic_log_second_moment
from hf_favorpp.nn import AttentionCall, FavorppFeatures, converted_layers, named_layers
from hf_favorpp.observing import evaluating, observing, tower_for
from hf_favorpp.report_table import ApproximationReport, HeadReport, judge

_log = logging.getLogger(__name__)
LOGITS_AT_ONCE = 2**23
"""Exact logits in memory at a time: softmax runs over as many queries at once."""


def approximation_report(model: nn.Module, batch: Mapping[str, Any]) -> ApproximationReport:
    """Measure how well the converted attention of a model stands in for softmax on a batch.

    The batch goes through the softmax model, where each converted layer is compared with softmax on the same queries,
    keys and values, and then through the converted model. Time is quadratic in length, as softmax is; memory is
    linear. Nothing of the model is changed.

    Args:
        model: A converted model, on any device, in any dtype and mode; it runs in eval mode and without gradient.
        batch: Tensors as the model takes them, at least one; they are moved to its device. Of a model of images and
            texts, such as CLIP, images or texts alone measure that part.

    Returns:
        The report.

    Raises:
        ConversionError: The model is not converted, or its calibration is missing.
        InputError: ``batch`` is not a mapping with tensors, holds no real token, or does not reach some converted
            layer.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    layers = named_layers(model)
    if not layers:
        raise ConversionError(f"{type(model).__name__} is not converted; call convert_to_favorpp(model) first.")
    if not isinstance(batch, Mapping) or not any(isinstance(t, Tensor) for t in batch.values()):
        raise InputError(
            f"batch must be a mapping of tensors, as the model takes them, got {type(batch).__name__}; of a tokenizer "
            f"ask return_tensors='pt'."
        )
    tower = tower_for(model, batch)
    if own := converted_layers(tower):
        layers = {name: layer for name, layer in layers.items() if layer in own}
    device = next(model.parameters()).device
    batch = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in batch.items()}
    observers = [_Observer(layer) for layer in layers.values()]
    with evaluating(model), torch.compiler.set_stance("force_eager"):
        with observing(list(layers.values()), [observer.watch for observer in observers], exact=True):
            exact = tower(**batch)
        for name, observer in zip(layers, observers, strict=True):
            observer.require_tokens(name)
        if not any(observer.saw_far for observer in observers):
            _log.warning(
                "no sequence of the batch is longer than exact_window: its attention is exact, and the report says "
                "nothing of the features. Measure longer inputs."
            )
        with observing(list(layers.values()), exact=False), observed_backends() as backends:
            converted = tower(**batch)
    return ApproximationReport(
        heads=tuple(head for name, observer in zip(layers, observers, strict=True) for head in observer.heads(name)),
        layer_errors=tuple(observer.layer_error("error") for observer in observers),
        layer_uniform_errors=tuple(observer.layer_error("uniform") for observer in observers),
        end_to_end=_compare_outputs(converted, exact, observers[0].first_mask),
        num_tokens=observers[0].first_tokens,
        backends=tuple(dict.fromkeys(backends)),
    )


class _Observer:
    """Watches one layer during the softmax pass; a shared one is called several times."""

    def __init__(self, layer: FavorppFeatures) -> None:
        self.layer = layer
        self.sums: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
        self.calls = 0
        self.first_mask: Tensor | None = None
        self.first_tokens = 0
        self.saw_far = False

    def watch(self, call: AttentionCall) -> None:
        """Add what one call of the layer shows; see :data:`hf_favorpp.nn.Probe`."""
        query, key, value, key_mask, scaling, relative_positions, _ = call
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        real_key = query.new_ones(key.shape[0], key.shape[2], dtype=torch.bool) if key_mask is None else key_mask
        square = query.shape[2] == key.shape[2]
        real = real_key if square else query.new_ones(query.shape[0], query.shape[2], dtype=torch.bool)
        if self.calls == 0:
            self.first_mask, self.first_tokens = key_mask, int(real.sum())
        self.calls += 1
        _, window, _ = self.layer.neighbourhood(query.shape[2], query.device)
        self.saw_far |= not window or int(real.sum(-1).max()) > window
        out = self.layer(query, key, value, key_mask, scaling, relative_positions)
        with torch.autocast(query.device.type, enabled=False):
            dtype = torch.promote_types(query.dtype, torch.float32)
            groups = query.shape[1] // key.shape[1]
            x = _zero_padding(query.to(dtype), real) * scaling**0.5
            y, v = (_zero_padding(t.to(dtype), real_key).repeat_interleave(groups, dim=1) for t in (key, value))
            y = y * scaling**0.5
            exact = _softmax_attention(x, y, v, real_key, scaling, relative_positions)
            self._add_outputs(x, y, v, exact, out.to(dtype), real, real_key)
            self._add_variance(x, y, real, real_key)

    def _add_outputs(
        self,
        x: Tensor,
        y: Tensor,
        v: Tensor,
        softmax: tuple[Tensor, Tensor],
        out: Tensor,
        real: Tensor,
        real_key: Tensor,
    ) -> None:
        exact, entropy = softmax
        count = real_key.sum(-1)
        uniform = v.sum(-2, keepdim=True) / count.clamp(min=1)[:, None, None, None]
        for name, t in (("error", out - exact), ("uniform", uniform - exact), ("exact", exact), ("x", x)):
            self._add(name, _zero_padding(t, real).square().sum((0, 2, 3)))
        self._add("y", y.square().sum((0, 2, 3)))
        self._add("entropy", _zero_padding(entropy.unsqueeze(-1), real).sum((0, 2, 3)))
        self._add("max entropy", (real.sum(-1) * count.clamp(min=1).to(x.dtype).log()).sum())
        self._add("queries", real.sum())
        self._add("keys", real_key.sum())

    def _add_variance(self, x: Tensor, y: Tensor, real: Tensor, real_key: Tensor) -> None:
        """Add psi and the logarithm of the second moment of one estimate, both at the mean pair of each sequence."""
        kind = str(self.layer.config.preconditioning)
        change = self.layer.preconditioner
        if change is None:
            change = precondition(sequence_statistics(x, y, real, real_key, covariance=kind == "full"), kind)
        change = change.to(x.dtype)
        x, y, _ = change.shift(x, y)
        x, y = change.transform(x, y)
        moments = sequence_statistics(_zero_padding(x, real), _zero_padding(y, real_key), real, real_key)
        u = moments.variance_x + moments.variance_y + (moments.mean_x + moments.mean_y).square()
        there = real.any(-1) & real_key.any(-1)
        self._add("psi", u.sum(-1)[there].sum(0))
        self._add("log moment", _log_second_moment(self.layer.config.kernel, u, change.coefficient)[there].sum(0))
        self._add("sequences", there.sum())

    def _add(self, name: str, amount: Tensor) -> None:
        self.sums[name] = self.sums[name] + amount.cpu().double()

    def require_tokens(self, name: str) -> None:
        """Refuse a batch that shows nothing of the layer."""
        if not self.calls:
            raise InputError(
                f"the batch does not reach the converted layer {name}; pass one that uses every converted part of the "
                f"model, or convert fewer layers with FavorppConfig(layers=...)."
            )
        if not self.sums["sequences"]:
            raise InputError("the batch holds no real token: everything is masked. Check attention_mask: 1 is real.")

    def layer_error(self, kind: str) -> float:
        """Return the relative error over all heads, of ``"error"`` or ``"uniform"``."""
        return float(_relative(self.sums[kind].sum(), self.sums["exact"].sum()))

    def heads(self, name: str) -> list[HeadReport]:
        """Return one record per head."""
        total, num_features = self.sums, self.layer.omega.shape[1]
        moment = (total["log moment"] / total["sequences"]).clamp(min=0)
        log_variance = moment + torch.log(-torch.expm1(-moment)) - math.log(num_features)
        columns = {
            "psi": total["psi"] / total["sequences"],
            "norm_x": (total["x"] / total["queries"]).sqrt(),
            "norm_y": (total["y"] / total["keys"]).sqrt(),
            "entropy": total["entropy"] / total["queries"],
            "max_entropy": (total["max entropy"] / total["queries"]).expand_as(log_variance),
            "predicted_log_variance": log_variance,
            "error": _relative(total["error"], total["exact"]),
            "uniform_error": _relative(total["uniform"], total["exact"]),
        }
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        records = (dict(zip(columns, row, strict=True)) for row in rows)
        return [
            HeadReport(self.layer.layer, name, head, **record, verdict=judge(record["error"], record["uniform_error"]))
            for head, record in enumerate(records)
        ]


def _softmax_attention(
    x: Tensor,
    y: Tensor,
    value: Tensor,
    real_key: Tensor,
    scaling: float,
    relative_positions: RelativePositions | None,
) -> tuple[Tensor, Tensor]:
    """Attend exactly: the output (B, H, Lq, D) and the entropy of each query's weights in nats, (B, H, Lq)."""
    batch, heads, length, _ = y.shape
    padded = ~real_key[:, None, None]
    outputs, entropies = [], []
    first = 0
    for part in torch.split(x, max(1, LOGITS_AT_ONCE // (batch * heads * length)), dim=-2):
        logits = part @ y.mT
        if relative_positions is not None:
            logits = logits + relative_positions.logits(part / scaling**0.5, scaling, length, first)
        first += part.shape[-2]
        weights = torch.softmax(logits.masked_fill(padded, float("-inf")), dim=-1)
        outputs.append(weights @ value)
        entropies.append(torch.special.entr(weights).sum(-1))
    return torch.cat(outputs, dim=-2), torch.cat(entropies, dim=-1)


def _log_second_moment(kernel: str, u: Tensor, coefficient: Tensor | None) -> Tensor:
    """Return log E[estimate^2] / exp(x.y)^2 for one projection, (B, H), from u_c = mean (x_c + y_c)^2, (B, H, d)."""
    if kernel == "favor++":
        assert coefficient is not None
        return gerf_log_second_moment(u, coefficient.expand_as(u), 1).sum(-1)
    if kernel == "favor+hyperbolic":
        return hyperbolic_log_second_moment(u.sum(-1))
    return u.sum(-1) if kernel == "favor+" else torch.full_like(u[..., 0], math.nan)


def _relative(sq_error: Tensor, sq_norm: Tensor) -> Tensor:
    """Return the ratio of two norms from their squares; 0 where there is no error, even of nothing."""
    return torch.where(sq_error == 0, 0, sq_error / sq_norm).sqrt()


def _zero_padding(t: Tensor, real: Tensor) -> Tensor:
    return t.masked_fill(~real[:, None, :, None], 0)


def _compare_outputs(converted: Any, exact: Any, mask: Tensor | None) -> dict[str, float]:
    """Return the numbers of ``ApproximationReport.end_to_end`` from two outputs of the model."""
    if not isinstance(exact, Mapping):
        return {}
    if "logits" in exact:
        approximate, softmax = (output["logits"].float() for output in (converted, exact))
        if softmax.ndim == 3:
            approximate, softmax = (torch.cat(_sequences(t, mask)) for t in (approximate, softmax))
        numbers = {"logits_distance": _distance(approximate, softmax)}
        if softmax.ndim > 1 and softmax.shape[1] > 1:
            agreement = approximate.argmax(1) == softmax.argmax(1)
            numbers["argmax_agreement"] = agreement.double().mean().item()
        return numbers
    if "last_hidden_state" in exact:
        approximate, softmax = (_sequences(output["last_hidden_state"].float(), mask) for output in (converted, exact))
        pooled = ((a.mean(0), b.mean(0)) for a, b in zip(approximate, softmax, strict=True))
        return {
            "hidden_distance": _distance(torch.cat(approximate), torch.cat(softmax)),
            "pooled_cosine": fmean(cosine_similarity(a, b, dim=0).item() for a, b in pooled),
        }
    return {}


def _distance(approximate: Tensor, exact: Tensor) -> float:
    return float(_relative((approximate - exact).double().square().sum(), exact.double().square().sum()))


def _sequences(tokens: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Take apart what the model returned, (B, L, C), into the real tokens of each sequence, by the mask of a layer."""
    if mask is None:
        return list(tokens)
    if mask.shape == tokens.shape[:2]:
        rows = zip(tokens, mask, strict=True)
        return [row[real] for row, real in rows if real.any()]
    lengths: list[int] = mask.sum(-1).tolist()
    if tokens.shape[0] == 1 and tokens.shape[1] == sum(lengths):  # packed sequences, which the layer saw side by side
        return list(torch.split(tokens[0], lengths))
    return list(tokens)  # at another resolution than the layer
