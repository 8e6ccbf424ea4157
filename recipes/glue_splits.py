"""What a run trains and evaluates on: the splits of its task as token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict
from glue_arguments import GlueArguments
from glue_data import load_task
from text_documents import load_documents
from transformers import PreTrainedTokenizerBase


def load_tokenized(args: GlueArguments, tokenizer: PreTrainedTokenizerBase) -> DatasetDict:
    """Load the splits of the task that ``args`` name, cut to the wanted rows and turned into token ids.

    Args:
        args: Task, files, lengths.
        tokenizer: Of the model.

    Returns:
        The split "train" and then those to evaluate on, with the columns that the model takes, and "labels".
    """
    data = _load_texts(args)
    for split in data:
        limit = args.max_train_samples if split == "train" else args.max_eval_samples
        if limit is not None:
            data[split] = data[split].select(range(min(limit, data[split].num_rows)))
    texts = [column for column in data["train"].column_names if column != "label"]

    def tokenize(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return dict(tokenizer(*(rows[column] for column in texts), max_length=args.max_length, truncation=True))

    return data.map(tokenize, batched=True, remove_columns=texts, desc="tokenising").rename_column("label", "labels")


def label_names(train: Dataset) -> list[str] | None:
    """Return the names of the classes in the order of the integers in "labels"; None for a regression."""
    labels = train.features["labels"]
    return list(labels.names) if isinstance(labels, ClassLabel) else None


def _load_texts(args: GlueArguments) -> DatasetDict:
    """Load the splits of a task, the column "label" beside those of one or two texts."""
    if args.task_name == "documents":
        validation_file = None if args.validation_file is None else Path(args.validation_file)
        return load_documents(Path(str(args.train_file)), validation_file)
    return load_task(args.task_name, args.data_dir)
