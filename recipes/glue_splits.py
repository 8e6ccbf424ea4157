"""What a run trains and evaluates on: the splits of its task as token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from altered_texts import altered_copies
from datasets import ClassLabel, Dataset, DatasetDict, concatenate_datasets
from far_answers import load_far_answers
from glue_arguments import GlueArguments
from glue_data import GlueDataError, load_task
from text_documents import load_documents
from transformers import PreTrainedTokenizerBase

UNLABELLED = "unlabelled"
"""The split that transfer and distillation learn from, where it is another one than "train"."""


def load_tokenized(args: GlueArguments, tokenizer: PreTrainedTokenizerBase) -> DatasetDict:
    """Load the splits of the task that ``args`` name, cut to the wanted rows and turned into token ids.

    Args:
        args: Task, files, lengths.
        tokenizer: Of the model.

    Returns:
        The split "train" and then those to evaluate on, with the columns that the model takes, and "labels"; with
        ``altered_copies`` also :data:`UNLABELLED`, the training rows and their copies, without labels.
    """
    if args.task_name == "far_answers":
        folder, filler = Path(str(args.data_dir)), Path(str(args.filler_file))
        return _limited(load_far_answers(folder, filler, tokenizer, args.max_length), args)
    data = _load_texts(args)
    if args.validation_every is not None:
        data = hold_out(data["train"], args.validation_every)
    data = _limited(data, args).rename_column("label", "labels")
    texts = [column for column in data["train"].column_names if column != "labels"]
    if args.altered_copies:
        unlabelled = data["train"].select_columns(texts)
        data[UNLABELLED] = concatenate_datasets([
            unlabelled,
            altered_copies(unlabelled, texts, args.altered_copies, args.seed),
        ])

    def tokenize(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return dict(tokenizer(*(rows[column] for column in texts), max_length=args.max_length, truncation=True))

    return data.map(tokenize, batched=True, remove_columns=texts, desc="tokenising")


def hold_out(train: Dataset, every: int) -> DatasetDict:
    """Take some training rows to evaluate on.

    Args:
        train: In its order.
        every: N. The rows N - 1, 2N - 1 and so on are held out, counted from 0.

    Returns:
        The splits "train", without them, and "validation".

    Raises:
        GlueDataError: There are fewer than N rows.
    """
    held_out = range(every - 1, train.num_rows, every)
    if not held_out:
        raise GlueDataError(
            f"--validation_every {every} holds out no row of the {train.num_rows} to train on. "
            f"Choose a number from 2 to {train.num_rows}."
        )
    kept = [row for row in range(train.num_rows) if row not in held_out]
    return DatasetDict({"train": train.select(kept), "validation": train.select(held_out)})


def label_names(train: Dataset) -> list[str] | None:
    """Return the names of the classes in the order of the integers in "labels"; None for a regression."""
    labels = train.features["labels"]
    return list(labels.names) if isinstance(labels, ClassLabel) else None


def _limited(data: DatasetDict, args: GlueArguments) -> DatasetDict:
    """Cut the splits to the wanted rows."""
    for split in data:
        limit = args.max_train_samples if split == "train" else args.max_eval_samples
        if limit is not None:
            data[split] = data[split].select(range(min(limit, data[split].num_rows)))
    return data


def _load_texts(args: GlueArguments) -> DatasetDict:
    """Load the splits of a task, or that alone of which rows are held out: one or two texts, and "label"."""
    if args.task_name == "documents":
        validation_file = None if args.validation_file is None else Path(args.validation_file)
        return load_documents(Path(str(args.train_file)), validation_file)
    return load_task(args.task_name, args.data_dir, train_only=args.validation_every is not None)
