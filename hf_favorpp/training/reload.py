"""Whether a saved model is the one that was saved."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def check_reloaded(model: PreTrainedModel, folder: Path, batch: Mapping[str, Tensor], auto: Any) -> float | None:
    """Load the saved model back and compare its logits with those of the model in memory.

    Args:
        model: As trained, in memory, on any device.
        folder: Where it was saved.
        batch: A batch of the task, on any device.
        auto: Class whose ``from_pretrained`` loads the model, such as ``AutoModelForImageClassification``.

    Returns:
        None if all logits are equal, bit by bit; else the largest difference. Buffers that are not saved, such as
        tables of positions, are those of the loaded model in both: Transformers leaves some of them rounded to
        bfloat16 in a model that was trained so.
    """
    reloaded = auto.from_pretrained(folder).to(model.device)
    inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
    # Copies, because loaded weights lie in the file's memory map, and their alignment there changes the last bit of
    # a matrix product.
    trained, loaded = (copy.deepcopy(each).eval() for each in (model, reloaded))
    unsaved = dict(trained.named_buffers()).keys() - trained.state_dict().keys()
    for name in unsaved & dict(loaded.named_buffers()).keys():
        owner, _, own_name = name.rpartition(".")
        setattr(trained.get_submodule(owner), own_name, loaded.get_buffer(name).clone())
    before, after = (each(**inputs).logits for each in (trained, loaded))
    return None if torch.equal(before, after) else float((before - after).abs().max())
