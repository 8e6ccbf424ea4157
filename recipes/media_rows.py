"""Rows of files that the training recipes read: from the Hub, downloaded or streamed, and how many of them."""

from __future__ import annotations

from typing import Any

from datasets import Dataset, IterableDataset, concatenate_datasets, load_dataset
from media_arguments import MediaArguments
from skipped_files import MediaDataError

Rows = Dataset | IterableDataset


def read_hub(
    args: MediaArguments, columns: dict[str, str], undecoded: Any, otherwise: str
) -> tuple[Rows, Rows | None]:
    """Load a data set with ``datasets.load_dataset``, without decoding its files.

    Args:
        args: Name, configuration and splits; several splits that are joined by + are put one after the other.
        columns: What the columns are to be called, by the arguments that name them; that of the files comes first.
        undecoded: The feature of the files that leaves them encoded.
        otherwise: What to do without a network.

    Returns:
        Training rows, and those of the validation split or None where there is none.

    Raises:
        MediaDataError: If it cannot be had, or lacks a split or a column.
    """
    name = str(args.dataset_name)
    try:
        splits = load_dataset(name, args.dataset_config_name, streaming=args.streaming)
    except (ConnectionError, FileNotFoundError) as error:
        raise MediaDataError(f"{name} could not be loaded ({error}). Without a network, {otherwise}.") from error
    found: list[Rows | None] = []
    for wanted in (args.train_split_name, args.validation_split_name):
        missing = [split for split in wanted.split("+") if split not in splits]
        if not missing:
            parts = [_columns(splits[split], args, columns, undecoded) for split in wanted.split("+")]
            found.append(parts[0] if len(parts) == 1 else concatenate_datasets(parts))
        elif wanted == args.validation_split_name and not args.streaming:
            found.append(None)
        else:
            raise MediaDataError(
                f"{name} has no split {missing[0]!r} but {sorted(splits)}. Choose with --train_split_name and "
                "--validation_split_name."
            )
    return found[0], found[1]


def limited(args: MediaArguments, train: Rows, validation: Rows) -> tuple[Rows, Rows, int, int | None]:
    """Return at most as many rows as the arguments say, random ones where they lie in memory, and their numbers.

    Args:
        args: Limits, seed, and the names of the splits of a stream.
        train: Rows to train on.
        validation: Rows to evaluate on.

    Returns:
        Training rows, validation rows, the number of each; the second is None where a stream does not tell.

    Raises:
        MediaDataError: If a stream does not tell how many training rows it has.
    """
    train, num_train = _at_most(train, args.max_train_samples, args.train_split_name, args.seed)
    validation, num_validation = _at_most(validation, args.max_eval_samples, args.validation_split_name, args.seed)
    if num_train is None:
        raise MediaDataError(
            f"{args.dataset_name} does not tell how many training rows it has, which the length of an epoch needs. "
            "Give --max_train_samples that number, or leave out --streaming."
        )
    return train, validation, num_train, num_validation


def _at_most(rows: Rows, limit: int | None, split: str, seed: int) -> tuple[Rows, int | None]:
    number = _streamed_length(rows, split) if isinstance(rows, IterableDataset) else len(rows)
    if limit is None or (number is not None and limit >= number):
        return rows, number
    if isinstance(rows, IterableDataset):
        return rows.take(limit), limit
    return rows.shuffle(seed=seed).select(range(limit)), limit


def _streamed_length(rows: IterableDataset, split: str) -> int | None:
    """Return how many rows a stream says that it has."""
    splits = rows.info.splits or {}
    numbers = [splits[part].num_examples if part in splits else None for part in split.split("+")]
    return sum(numbers) if all(numbers) else None


def _columns(rows: Rows, args: MediaArguments, columns: dict[str, str], undecoded: Any) -> Rows:
    """Return the rows with the wanted columns alone, under their new names, the first of them undecoded."""
    wanted = {getattr(args, argument): name for argument, name in columns.items()}
    known = rows.column_names or []
    missing = [column for column in wanted if column not in known]
    if missing:
        choose = " and ".join(f"--{argument}" for argument in columns)
        raise MediaDataError(
            f"{args.dataset_name} lacks the column(s) {missing}; it has {known}. Choose with {choose}."
        )
    rows = rows.cast_column(next(iter(wanted)), undecoded).select_columns(list(wanted))
    return rows.rename_columns({old: new for old, new in wanted.items() if old != new})
