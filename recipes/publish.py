"""Uploading a finished run to the Hub, and what the model card says of it beside its scores."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from torch import Tensor
from transformers import PreTrainedModel

from hf_favorpp import approximation_report
from hf_favorpp.benchmarking.attention import attention_lineup
from hf_favorpp.benchmarking.lineup import Shape
from hf_favorpp.benchmarking.rows import crossovers, make_rows
from hf_favorpp.benchmarking.timing import Race
from hf_favorpp.hub.measured import WEIGHTS_KEY, weights_digest
from hf_favorpp.hub.upload import prepare_upload
from hf_favorpp.nn import converted_layers

NOT_UPLOADED = ["step_*/**", "epoch_*/**", ".*", "softmax/**", "transfer/**", "distil/**", "stages.json"]
CROSSOVER_LENGTHS = (128, 256, 512, 1024, 2048, 4096)
SECONDS_PER_LENGTH = 1.0


def create_repository(name: str, token: str | None) -> str:
    """Make the repository before the training, so that a missing permission shows at once.

    Args:
        name: ``user/name``, or a name in the user's own namespace.
        token: Access token; None uses the stored one.

    Returns:
        Its full id.
    """
    return HfApi(token=token).create_repo(name, exist_ok=True).repo_id


def push_folder(repository: str, folder: Path, token: str | None, model: PreTrainedModel) -> None:
    """Upload model, tokenizer, results and model card, without checkpoints, stages and twin.

    Args:
        repository: As :func:`create_repository` returned it.
        folder: Output folder of the run.
        token: Access token; None uses the stored one.
        model: As saved in the folder.
    """
    if converted_layers(model):
        prepare_upload(model, folder, repository, token)
    HfApi(token=token).upload_folder(
        repo_id=repository, folder_path=folder, commit_message="Upload the trained model", ignore_patterns=NOT_UPLOADED
    )


def measure_fidelity(model: PreTrainedModel, folder: Path, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Return what results.json says of a saved model's attention, and of which weights it says so.

    Args:
        model: Converted, as saved in ``folder``.
        folder: Output folder of the run.
        batch: Of the task's validation data, on any device.

    Returns:
        ``fidelity``, the approximation report without its single heads, and ``weights_sha256``.
    """
    report = approximation_report(model, batch)
    summary = {name: value for name, value in report.to_dict().items() if name != "heads"}
    return {"fidelity": {**summary, "layer_verdicts": report.layer_verdicts}, WEIGHTS_KEY: weights_digest(folder)}


def measure_crossover(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Measure from which length on the attention of a converted layer is faster than PyTorch's fused softmax.

    Args:
        model: Converted. The heads, features and options of its first converted layer are measured, in its dtype and
            on its device, one sequence at a time, until it is faster at two of :data:`CROSSOVER_LENGTHS` in a row.

    Returns:
        ``crossovers`` as ``recipes/benchmark.py`` writes them, with the shape that was measured.
    """
    layer = converted_layers(model)[0]
    num_heads, _, head_dim = layer.omega.shape
    shape = Shape(1, num_heads, head_dim, model.dtype, torch.device(model.device))
    race = Race(shape.device, seconds_per_length=SECONDS_PER_LENGTH)
    rows: list[dict[str, Any]] = []
    faster = 0
    for length in CROSSOVER_LENGTHS:
        lineup = attention_lineup(length, shape, [layer.config])
        rows += make_rows(lineup, race.run(lineup.length, lineup.contestants, ("forward", "train")))
        speedups = [rows[-1][name] for name in rows[-1] if name.endswith("_speedup") and rows[-1][name] is not None]
        faster = faster + 1 if speedups and min(speedups) > 1 else 0
        if faster == 2:
            break
    return [{**entry, "shape": _plain(shape)} for entry in crossovers(rows)]


def _plain(shape: Shape) -> dict[str, Any]:
    return {name: value if isinstance(value, int) else str(value) for name, value in asdict(shape).items()}
