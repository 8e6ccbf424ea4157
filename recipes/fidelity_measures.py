"""What fidelity.py compares: mean-pooled embeddings, differences of them, or the hidden states themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from fidelity_inputs import POOL, Inputs
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from hf_favorpp.families import attention_layers

Scores = dict[str, float | None]  # None: not finite


@torch.no_grad()
def features_of(model: PreTrainedModel, inputs: Inputs) -> list[Tensor]:
    """Run a model over the batches to evaluate.

    Args:
        model: The model, in eval mode.
        inputs: Of the task.

    Returns:
        One tensor a batch, float32 on the CPU: mean-pooled hidden states, (B, D), or all of them, (B, L, D).
    """
    features = []
    for batch in inputs.evaluation:
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        pool = batch.pop(POOL, None)
        hidden = model(**batch).last_hidden_state.float()
        if pool is not None:
            hidden = (pool.unsqueeze(-1) * hidden).sum(1) / pool.sum(1, keepdim=True)
        features.append(hidden.cpu())
    return features


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
            special = _special_tokens(model, features[0].shape[1])
            class_tokens, patches = slice(0, 1), slice(special, None)
            scores = {
                "patch_cosine": _mean_cosine([f[:, patches] for f in features], [s[:, patches] for s in softmax]),
                "class_cosine": _mean_cosine(
                    [f[:, class_tokens] for f in features], [s[:, class_tokens] for s in softmax]
                ),
            }
        case _:
            scores = {"frame_cosine": _mean_cosine(features, softmax)}
    return {name: value if math.isfinite(value) else None for name, value in scores.items()}


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
