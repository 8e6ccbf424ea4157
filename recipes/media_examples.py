"""From rows to examples: files are decoded in the workers of the data loader, and what cannot be read is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from media_rows import Rows
from skipped_files import MediaDataError, SkippedFiles
from torch.utils.data import Dataset, IterableDataset

Example = dict[str, Any]


class Reader(Protocol):
    """Makes an example of a row."""

    skipped: SkippedFiles

    def __call__(self, row: Mapping[str, Any], epoch: int) -> Example | None:
        """Return the example, as it is in an epoch; None if the file cannot be read."""

    def ignored(self) -> Example:
        """Return what takes the place of a file to evaluate on that cannot be read; it does not count."""


class Examples(Dataset[Example]):
    """Rows by index."""

    def __init__(self, rows: Any, reader: Reader, *, replace: bool) -> None:
        """Keep what is needed.

        Args:
            rows: By index.
            reader: Makes the examples.
            replace: Put the next readable file in the place of one that is not, so that a batch stays full;
                otherwise what the reader says.
        """
        self.rows, self.reader, self.replace, self.epoch = rows, reader, replace, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the changes of an epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        for place in range(index, index + (len(self) if self.replace else 1)):
            example = self.reader(self.rows[place % len(self)], self.epoch)
            if example is not None:
                return example
        if self.replace:
            raise MediaDataError(f"none of the {len(self)} training {self.reader.skipped.kind}s can be read.")
        return self.reader.ignored()


class StreamedExamples(IterableDataset[Example]):
    """Rows as they come; what cannot be read is left out."""

    def __init__(self, rows: Rows, reader: Reader, length: int | None) -> None:
        """Keep what is needed.

        Args:
            rows: A stream, which tells the workers of a data loader apart by itself.
            reader: Makes the examples.
            length: Of the stream, if known.
        """
        self.rows, self.reader, self.length, self.epoch = rows, reader, length, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order and the changes of an epoch."""
        self.epoch = epoch
        self.rows.set_epoch(epoch)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the length of this stream is not known")
        return self.length

    def __iter__(self) -> Iterator[Example]:
        for row in self.rows:
            example = self.reader(row, self.epoch)
            if example is not None:
                yield example
