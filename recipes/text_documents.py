"""Documents in files of JSON lines, and those with a class as the splits of a task."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import DatasetDict
from glue_data import GlueDataError, make_split


def read_documents(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read a file of JSON lines.

    Args:
        path: The file.

    Yields:
        Number and object of each line, blank lines left out; each has a string ``text``.

    Raises:
        GlueDataError: The file does not exist, or a line is not such an object.
    """
    if not path.is_file():
        raise GlueDataError(f'{path} is no file. It must hold documents, one JSON object with a string "text" a line.')
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                raise GlueDataError(f'{path}, line {number} must be a JSON object with a string "text".')
            yield number, row


def load_documents(train_file: Path, validation_file: Path | None) -> DatasetDict:
    """Read documents to classify.

    Args:
        train_file: JSON lines with ``text`` and ``label``; its labels are the classes, 0 to K - 1.
        validation_file: Likewise; None for the training split alone.

    Returns:
        The splits "train" and "validation", with the columns "text" and "label".

    Raises:
        GlueDataError: A file is missing, a line or its label is not as it should be, a label of the validation file
            is not in the training file, or the labels of the training file are not K >= 2 consecutive ones.
    """
    documents = {"train": list(_labelled(train_file))}
    classes = {label for _, _, label in documents["train"]}
    if len(classes) < 2 or max(classes) != len(classes) - 1:
        raise GlueDataError(
            f"{train_file}: the labels must be 0 to K - 1 for at least 2 classes, got {sorted(classes)[:8]}."
        )
    if validation_file is not None:
        documents["validation"] = list(_labelled(validation_file))
        for number, _, label in documents["validation"]:
            if label not in classes:
                raise GlueDataError(
                    f"{validation_file}, line {number}: the label must be one of {train_file}, which are 0 to "
                    f"{max(classes)}, got {label}."
                )
    splits = {}
    for split, rows in documents.items():
        _, texts, labels = zip(*rows, strict=True)
        splits[split] = make_split({"text": texts, "label": labels}, [str(label) for label in sorted(classes)])
    return DatasetDict(splits)


def _labelled(path: Path) -> Iterator[tuple[int, str, int]]:
    """Read documents of which each has a class: line, text, class."""
    number = 0
    for number, row in read_documents(path):
        label = row.get("label")
        if not isinstance(label, int) or isinstance(label, bool) or label < 0:
            raise GlueDataError(f"{path}, line {number}: the label must be an integer of at least 0, got {label!r}.")
        yield number, row["text"], label
    if not number:
        raise GlueDataError(f"{path} holds no documents.")
