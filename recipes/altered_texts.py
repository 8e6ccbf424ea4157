"""More texts to learn attention from: altered copies of the training rows, which a teacher needs no labels for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from datasets import Dataset

MOST_CHANGED = 0.4
"""The share of the words of a copy that are changed is drawn from 0 to this."""
DROPPED = 1 / 3
"""The share of the changed words that are left out; each of the others becomes a word of some row."""


def altered_copies(train: Dataset, columns: Sequence[str], copies: int, seed: int) -> Dataset:
    """Alter every row several times.

    A row of one text keeps it but for some words. Of two texts it is, a third of the times each: the same two; the
    first one twice; the first one beside the second one of any row. Then words of both are changed, independently, and
    half of the pairs are swapped. So a layer sees words that match and words that do not, which are hardly ever those
    of the rows themselves: what it learns to match is not these rows alone.

    Args:
        train: With ``columns``, of strings.
        columns: The one or two texts of a row.
        copies: Of each row, >= 1.
        seed: The copies are a function of it.

    Returns:
        ``copies * len(train)`` rows of ``columns`` alone: nobody knows their labels.
    """
    generator = np.random.default_rng(seed)
    texts = [[text.split() for text in train[column]] for column in columns]
    words = [word for column in texts for text in column for word in text]
    altered: list[list[str]] = [[] for _ in columns]
    for _ in range(copies):
        for row in zip(*texts, strict=True):
            chosen = list(row) if len(row) == 1 else _pair(row, texts, generator)
            for column, text in zip(altered, chosen, strict=True):
                column.append(" ".join(_changed(text, words, generator)))
    return Dataset.from_dict(dict(zip(columns, altered, strict=True)))


def _pair(
    row: Sequence[list[str]], texts: Sequence[Sequence[list[str]]], generator: np.random.Generator
) -> list[list[str]]:
    """Return the two texts of a pair, or one of them with itself or with that of any row."""
    kind = generator.integers(3)
    if kind == 0:
        pair = list(row)
    elif kind == 1:
        pair = [row[0], row[0]]
    else:
        pair = [row[0], texts[1][generator.integers(len(texts[1]))]]
    return pair[::-1] if generator.random() < 0.5 else pair


def _changed(text: list[str], words: list[str], generator: np.random.Generator) -> list[str]:
    """Return a text some of whose words are dropped or others; at least one is left of what had any."""
    share = generator.random() * MOST_CHANGED
    kept: list[str] = []
    for word in text:
        if generator.random() >= share:
            kept.append(word)
        elif generator.random() >= DROPPED:
            kept.append(words[generator.integers(len(words))])
    return kept or text[:1]
