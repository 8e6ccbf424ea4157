"""What fidelity.py compares: mean-pooled embeddings, differences of them, hidden states, or what probes see there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import torch
from fidelity_inputs import POOL, Inputs
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from hf_favorpp import approximation_report
from hf_favorpp.families import attention_layers

Scores = dict[str, float | None]  # None: not finite


@torch.no_grad()
def features_of(model: PreTrainedModel, inputs: Inputs) -> list[Tensor]:
    """Run a model over the batches to evaluate.

    Args:
        model: The model, in eval mode.
        inputs: Of the task.

    Returns:
        One tensor a batch, float32 on the CPU: mean-pooled hidden states, (B, D), or all of them, (B, L, D). Before
        them the class tokens of images to train on, (B, D).
    """
    features = []
    for batch in inputs.training or ():
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        features.append(model(**batch).last_hidden_state[:, 0].float().cpu())
    for batch in inputs.evaluation:
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        pool = batch.pop(POOL, None)
        hidden = model(**batch).last_hidden_state.float()
        if pool is not None:
            hidden = (pool.unsqueeze(-1) * hidden).sum(1) / pool.sum(1, keepdim=True)
        features.append(hidden.cpu())
    return features


def attention_error(model: PreTrainedModel, inputs: Inputs) -> float:
    """Return the relative error of the output of attention to softmax of the same queries, keys and values.

    Args:
        model: A converted model.
        inputs: Of the task.

    Returns:
        The mean over converted layers and batches, over real tokens.
    """
    reports = [
        approximation_report(model, {name: tensor for name, tensor in batch.items() if name != POOL})
        for batch in inputs.evaluation
    ]
    return fmean(error for report in reports for error in report.layer_errors)


def scores_of(
    task: str, features: Sequence[Tensor], softmax: Sequence[Tensor], inputs: Inputs, model: PreTrainedModel
) -> Scores:
    """Compare a model's features with those of the softmax model.

    Args:
        task: Of fidelity.py.
        features: As :func:`features_of` returned them.
        softmax: The same of the softmax model.
        inputs: Of the task.
        model: Tells how many tokens of an image are special.

    Returns:
        The scores by name, none of them a percentage.
    """
    match task:
        case "sts":
            assert inputs.gold is not None
            scores = {"spearman": spearman(torch.cat(list(features)), inputs.gold)}
        case "text":
            scores = _document_scores(torch.cat(list(features)), torch.cat(list(softmax)))
        case "far":
            scores = _delta_scores(torch.cat(list(features)), torch.cat(list(softmax)))
        case "image":
            scores = _image_scores(features, softmax, model)
        case "probe":
            assert inputs.training is not None
            first = len(inputs.training)
            scores = _image_scores(features[first:], softmax[first:], model) | _probe_scores(features, softmax, inputs)
        case _:
            scores = {"frame_cosine": _mean_cosine(features, softmax)}
    return {name: value if math.isfinite(value) else None for name, value in scores.items()}


def _image_scores(features: Sequence[Tensor], softmax: Sequence[Tensor], model: PreTrainedModel) -> dict[str, float]:
    special = _special_tokens(model, features[0].shape[1])
    tokens = {"patch_cosine": slice(special, None), "class_cosine": slice(0, 1)}
    return {
        name: _mean_cosine([f[:, which] for f in features], [s[:, which] for s in softmax])
        for name, which in tokens.items()
    }


def _probe_scores(features: Sequence[Tensor], softmax: Sequence[Tensor], inputs: Inputs) -> dict[str, float]:
    """Return the accuracies of the probe of softmax features, and of one trained on the features themselves."""
    assert inputs.training is not None
    assert inputs.training_gold is not None
    assert inputs.gold is not None
    first = len(inputs.training)
    if not all(torch.isfinite(f).all() for f in features):
        return {"zero_shot_accuracy": math.nan, "probe_accuracy": math.nan}
    evaluated = torch.cat([f[:, 0] for f in features[first:]]).numpy()
    accuracies = {}
    for name, trained_on in (("zero_shot_accuracy", softmax), ("probe_accuracy", features)):
        probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
        probe.fit(torch.cat(list(trained_on[:first])).numpy(), inputs.training_gold.numpy())
        accuracies[name] = float(probe.score(evaluated, inputs.gold.numpy()))
    return accuracies


def spearman(embeddings: Tensor, gold: Tensor) -> float:
    """Return the rank correlation of cosine similarities with gold scores.

    Args:
        embeddings: (2 N, D), the two of a pair after each other.
        gold: (N,).

    Returns:
        Spearman's correlation; NaN where an embedding is not finite.
    """
    similarity = cosine_similarity(embeddings[0::2], embeddings[1::2], dim=-1)
    if not torch.isfinite(similarity).all():
        return math.nan
    return float(spearmanr(similarity.numpy(), gold.numpy()).statistic)


def _document_scores(embeddings: Tensor, softmax: Tensor) -> dict[str, float]:
    pairs = torch.triu_indices(len(embeddings), len(embeddings), 1)
    similarities = [cosine_similarity(e[pairs[0]], e[pairs[1]], dim=-1) for e in (embeddings, softmax)]
    return {
        "cosine": _mean_cosine([embeddings], [softmax]),
        "correlation": float(torch.corrcoef(torch.stack(similarities))[0, 1]),
    }


def _delta_scores(embeddings: Tensor, softmax: Tensor) -> dict[str, float]:
    """Compare what the evidence changes: embeddings (2 N, D), of N questions with their own sentence, then another."""
    delta, softmax_delta = (own - other for own, other in (embeddings.chunk(2), softmax.chunk(2)))
    ratio = delta.norm(dim=-1) / softmax_delta.norm(dim=-1)
    # cosine_similarity is 0 where nothing arrives
    return {"delta_cosine": _mean_cosine([delta], [softmax_delta]), "delta_norm_ratio": float(ratio.median())}


def _mean_cosine(features: Sequence[Tensor], softmax: Sequence[Tensor]) -> float:
    cosines = [cosine_similarity(f, s, dim=-1).flatten() for f, s in zip(features, softmax, strict=True)]
    return float(torch.cat(cosines).mean())


def _special_tokens(model: PreTrainedModel, length: int) -> int:
    """Return how many tokens stand before the patches."""
    layer = next(attention_layers(model))
    return 1 if layer.family.grid is None else layer.family.grid(layer.module, length).prefix
