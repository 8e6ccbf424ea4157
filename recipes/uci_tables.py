"""The eight UCI data sets of "Chefs' Random Tables", Table 1, from CSV files without a header, the label last."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch
from sklearn.compose import ColumnTransformer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import LabelEncoder, OneHotEncoder, OrdinalEncoder, StandardScaler
from torch import Tensor

Encoding = Literal["onehot", "ordinal"]
CATEGORICAL: dict[str, tuple[int, ...]] = {
    "abalone": (0,),
    "banknote": (),
    "car": tuple(range(6)),
    "yeast": (),
    "cmc": (),
    "nursery": tuple(range(8)),
    "wifi": (),
    "chess": tuple(range(6)),
}
"""Columns that are names rather than numbers; all of a table whose columns are mostly such."""
FILES = {"chess": "chess_krkopt.csv"}
SHARES = (0.05, 0.05)
"""Of the rows, for validation and for the test."""


class UciError(ValueError):
    """A folder without the tables, or a table that is not what it should be."""


@dataclass(frozen=True)
class Split:
    """One random division of a table, scaled to mean 0 and variance 1 of the training rows.

    Attributes:
        train: Points, (L, d), float64.
        validation: Points.
        test: Points.
        labels: Classes of the three, int64, from 0.
        num_classes: Of the whole table.
    """

    train: Tensor
    validation: Tensor
    test: Tensor
    labels: tuple[Tensor, Tensor, Tensor]
    num_classes: int


def read_table(data_dir: Path, name: str) -> tuple[pd.DataFrame, np.ndarray]:
    """Read one data set.

    Args:
        data_dir: Folder of the CSV files.
        name: Key of :data:`CATEGORICAL`.

    Returns:
        The columns, and the classes as whole numbers.

    Raises:
        UciError: There is no such file, or a column that should hold numbers does not.
    """
    path = data_dir / FILES.get(name, f"{name}.csv")
    if not path.is_file():
        raise UciError(
            f"{path} is no file. --data_dir must hold {', '.join(FILES.get(n, f'{n}.csv') for n in CATEGORICAL)}."
        )
    table = pd.read_csv(path, header=None, dtype=str, skipinitialspace=True)
    columns = table.iloc[:, :-1].copy()
    for index in columns.columns:
        if index not in CATEGORICAL[name]:
            try:
                columns[index] = columns[index].astype(float)
            except ValueError as error:
                raise UciError(f"{path}: column {index + 1} of {name} must hold numbers: {error}.") from error
    return columns, LabelEncoder().fit_transform(table.iloc[:, -1])


def split_table(columns: pd.DataFrame, labels: np.ndarray, name: str, encoding: Encoding, seed: int) -> Split:
    """Divide a table at random, encode names, and scale.

    Args:
        columns: As :func:`read_table` returns them.
        labels: Likewise.
        name: Of the data set.
        encoding: ``"onehot"`` gives a name a column per value, ``"ordinal"`` its place in the alphabet.
        seed: Of the division.

    Returns:
        Training, validation and test rows in the shares 0.9, 0.05 and 0.05.
    """
    order = np.random.default_rng(seed).permutation(len(labels))
    sizes = [max(1, int(share * len(order))) for share in SHARES]
    parts = np.split(order, [len(order) - sum(sizes), len(order) - sizes[1]])
    encoder = OneHotEncoder(sparse_output=False) if encoding == "onehot" else OrdinalEncoder()
    encode = ColumnTransformer([("names", encoder, list(CATEGORICAL[name]))], remainder="passthrough")
    encoded = encode.fit_transform(columns)  # the values a column can have are known, not learnt
    scale = make_pipeline(StandardScaler()).fit(encoded[parts[0]])
    points = [torch.from_numpy(np.ascontiguousarray(scale.transform(encoded[part]))) for part in parts]
    classes = [torch.from_numpy(labels[part]) for part in parts]
    return Split(points[0], points[1], points[2], (classes[0], classes[1], classes[2]), int(labels.max()) + 1)
