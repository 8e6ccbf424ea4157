"""Sentence pairs with gold scores, and documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fidelity_arguments import FidelityArguments
from fidelity_inputs import POOL, FidelityError, Inputs, existing, split
from glue_data import TASKS, read_tsv
from text_documents import read_documents
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase

Pair = tuple[str, str, float]


def sentence_pairs(args: FidelityArguments, source: str, model: PreTrainedModel) -> Inputs:
    """Read pairs of sentences in the layout of STS-B's train.tsv.

    Args:
        args: Files, lengths, sizes.
        source: Of the tokenizer.
        model: Not used.

    Returns:
        Batches, whose gold scores are from 0 to 5.
    """
    tokenizer = AutoTokenizer.from_pretrained(source)
    other = None if args.calibration_file is None else read_pairs(existing(args.calibration_file, "calibration_file"))
    evaluation, calibration = split(
        read_pairs(existing(str(args.data_file), "data_file")),
        other,
        args.max_samples,
        args.calibration_samples,
        contents=lambda pair: pair[:2],
    )
    # Pairs of a length beside each other: little padding, and no result depends on the order.
    evaluation = sorted(evaluation, key=lambda pair: max(map(len, pair[:2])))
    texts = [[sentence for pair in pairs for sentence in pair[:2]] for pairs in (evaluation, calibration)]
    return Inputs(*_loaders(args, tokenizer, *texts), gold=torch.tensor([pair[2] for pair in evaluation]))


def read_pairs(path: Path) -> list[Pair]:
    """Return the rows of an STS-B file."""
    columns = read_tsv(path, TASKS["stsb"])
    return list(zip(columns["sentence1"], columns["sentence2"], columns["label"], strict=True))  # type: ignore[arg-type]


def documents(args: FidelityArguments, source: str, model: PreTrainedModel) -> Inputs:
    """Read JSON lines with a field ``text``.

    Args:
        args: Files, lengths, sizes.
        source: Of the tokenizer.
        model: Not used.

    Returns:
        Batches.

    Raises:
        FidelityError: There are fewer than 3 documents, whose similarities could be correlated.
    """
    tokenizer = AutoTokenizer.from_pretrained(source)
    other = None if args.calibration_file is None else read_texts(existing(args.calibration_file, "calibration_file"))
    rows = read_texts(existing(str(args.data_file), "data_file"))
    evaluation, calibration = split(rows, other, args.max_samples, args.calibration_samples)
    if len(evaluation) < 3:
        raise FidelityError(
            f"the similarities of documents are correlated: at least 3 are needed, got {len(evaluation)}."
        )
    return Inputs(*_loaders(args, tokenizer, sorted(evaluation, key=len), calibration))


def read_texts(path: Path) -> list[str]:
    """Return the texts of a file of JSON lines."""
    return [row["text"] for _, row in read_documents(path)]


def _loaders(
    args: FidelityArguments, tokenizer: PreTrainedTokenizerBase, evaluation: Sequence[str], calibration: Sequence[str]
) -> list[DataLoader[Any]]:
    pad = DataCollatorWithPadding(tokenizer)

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return dict(pad(rows))

    def collate_with_pool(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = collate(rows)
        return {**batch, POOL: batch["attention_mask"]}

    loaders = []
    for texts, function in ((evaluation, collate_with_pool), (calibration, collate)):
        encoded = tokenizer(list(texts), truncation=True, max_length=args.max_length, return_attention_mask=True)
        rows = [{name: values[index] for name, values in encoded.items()} for index in range(len(texts))]
        loaders.append(DataLoader(rows, args.batch_size, collate_fn=function))  # type: ignore[arg-type]
    return loaders
