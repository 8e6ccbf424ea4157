"""Texts longer than an encoder with learnt absolute positions was trained on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from uptraining import ModelError


def extend_positions_(model: PreTrainedModel, number: int) -> None:
    """Interpolate the position embeddings of a BERT-like encoder, so that it takes texts of ``number`` tokens.

    The first and the last position keep their embeddings, and those between are interpolated linearly. The saved model
    has the new table. A model that takes as many tokens already stays as it is.

    Args:
        model: Softmax or converted; changed in place.
        number: Of tokens, with the special ones.

    Raises:
        ModelError: The model has no such table, or one of more positions.
    """
    embeddings = _embeddings(model)
    if embeddings is None:
        raise ModelError(
            f"--max_positions {number}: {type(model).__name__} has no table of learnt absolute positions, as BERT, "
            "DistilBERT, ELECTRA and RoBERTa have. One with rotary or relative positions needs none: leave it out."
        )
    table = embeddings.position_embeddings
    offset = _offset(table)
    present = table.num_embeddings - offset
    if number < present:
        raise ModelError(
            f"--max_positions must be at least the {present} positions that {type(model).__name__} has, got {number}. "
            "Shorter inputs need fewer tokens, not fewer positions: give --max_length."
        )
    if number == present:
        return
    rows = number + offset
    weight = table.weight.detach()
    stretched = torch.cat([weight[:offset], _interpolated(weight[offset:], number)])
    table.weight = nn.Parameter(stretched, requires_grad=table.weight.requires_grad)
    table.num_embeddings = rows
    for name, content in (
        ("position_ids", torch.arange(rows)),
        ("token_type_ids", torch.zeros(rows, dtype=torch.long)),
    ):
        if isinstance(getattr(embeddings, name, None), Tensor):
            setattr(embeddings, name, content.expand(1, -1).to(weight.device))
    model.config.max_position_embeddings = rows


def require_positions(model: PreTrainedModel, max_length: int) -> None:
    """Refuse inputs that are longer than the table of positions.

    Args:
        model: Any.
        max_length: Tokens after which the input is cut.

    Raises:
        ModelError: The model has a table of learnt absolute positions, and it is shorter.
    """
    embeddings = _embeddings(model)
    if embeddings is None:
        return
    present = embeddings.position_embeddings.num_embeddings - _offset(embeddings.position_embeddings)
    if max_length > present:
        raise ModelError(
            f"--max_length {max_length} is more than the {present} positions of {type(model).__name__}. Lower it, or "
            f"interpolate the position embeddings with --max_positions {max_length}."
        )


def _embeddings(model: PreTrainedModel) -> Any:
    """Return the module that has the table of learnt absolute positions; None without one."""
    if getattr(model.config, "relative_attention", False):  # DeBERTa has tables of relative ones beside it
        return None
    for module in model.modules():
        if isinstance(getattr(module, "position_embeddings", None), nn.Embedding):
            return module
    return None


def _offset(table: nn.Embedding) -> int:
    """Return the row of the first token: RoBERTa's rows up to that of padding are no positions of tokens."""
    return 0 if table.padding_idx is None else table.padding_idx + 1


def _interpolated(weight: Tensor, number: int) -> Tensor:
    """Interpolate rows linearly, from the first to the last one: (positions, width) -> (number, width)."""
    return nn.functional.interpolate(weight.T[None], size=number, mode="linear", align_corners=True)[0].T
