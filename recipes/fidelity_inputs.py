"""What fidelity.py runs a model on: rows to evaluate, other rows to calibrate on, and the batches of both."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

POOL = "pool"
"""Key of a batch of evaluation that the model does not see: the tokens whose mean is compared, (B, L)."""

Row = TypeVar("Row")


class FidelityError(ValueError):
    """Files or arguments that are not what the recipe needs."""


@dataclass(frozen=True)
class Inputs:
    """Batches of one task.

    Attributes:
        evaluation: Batches as the model takes them, some with :data:`POOL` beside.
        calibration: Batches of other rows, without it.
        gold: Scores of sentence pairs, which are two sequences each, or classes of images, in the order of
            ``evaluation``; else None.
        training: Images to train probes on; else None.
        training_gold: Their classes, in that order.
    """

    evaluation: DataLoader[Any]
    calibration: DataLoader[Any]
    gold: Tensor | None = None
    training: DataLoader[Any] | None = None
    training_gold: Tensor | None = None


def split(
    rows: Sequence[Row],
    other_rows: Sequence[Row] | None,
    max_samples: int | None,
    calibration_samples: int | None,
    contents: Callable[[Row], Iterable[Hashable]] = lambda row: (row,),
) -> tuple[list[Row], list[Row]]:
    """Divide rows into those to evaluate and those to calibrate on, which share nothing.

    Args:
        rows: Of the data file. Odd ones evaluate and even ones calibrate, unless there are ``other_rows``.
        other_rows: Of the calibration file, or None.
        max_samples: How many to evaluate, evenly spaced; None for all.
        calibration_samples: How many to calibrate on, likewise.
        contents: What a row consists of; no part of a row that calibrates occurs in one that evaluates.

    Returns:
        The two lists.

    Raises:
        FidelityError: One of them is empty.
    """
    evaluation, calibration = (rows, other_rows) if other_rows is not None else (rows[1::2], rows[::2])
    seen = {part for row in evaluation for part in contents(row)}
    calibration = [row for row in calibration if seen.isdisjoint(contents(row))]
    for name, chosen in (("evaluate", evaluation), ("calibrate", calibration)):
        if not chosen:
            raise FidelityError(
                f"there is nothing to {name} on: of {len(rows)} rows of --data_file"
                + ("" if other_rows is None else f" and {len(other_rows)} of --calibration_file")
                + " none is left. Rows of which a part occurs among those to evaluate do not calibrate."
            )
    return spread(evaluation, max_samples), spread(calibration, calibration_samples)


def spread(rows: Sequence[Row], count: int | None) -> list[Row]:
    """Return ``count`` evenly spaced rows, since files are sorted by genre or class; all of them where it is None."""
    if count is None or count >= len(rows):
        return list(rows)
    return [rows[index * len(rows) // count] for index in range(count)]


def existing(path: str, option: str) -> Path:
    """Return a path that exists.

    Args:
        path: As given.
        option: Name of the argument, for the message.

    Returns:
        The path.

    Raises:
        FidelityError: It does not exist.
    """
    if not Path(path).exists():
        raise FidelityError(f"--{option}: {path} does not exist.")
    return Path(path)


def stack(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Collate rows of equal shapes."""
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}
