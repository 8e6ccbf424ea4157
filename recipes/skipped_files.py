"""The files that were skipped, whoever met them: worker processes, ranks, or the run before it was interrupted."""

from __future__ import annotations

import json
import os
from pathlib import Path

FILE = ".skipped_files.jsonl"
SHOWN = 20


class MediaDataError(ValueError):
    """The files are missing, cannot be read, or are not laid out as they should be."""


class SkippedFiles:
    """A list in a file: every process appends to it, a line at a time, and a name counts once."""

    def __init__(self, folder: Path, strict: bool, kind: str = "image") -> None:
        """Choose the folder.

        Args:
            folder: Of the run; all processes of a machine share it.
            strict: Raise instead.
            kind: What the files should be.
        """
        self.path, self.strict, self.kind = folder / FILE, strict, kind

    def clear(self) -> None:
        """Begin anew."""
        self.path.unlink(missing_ok=True)

    def add(self, name: str, reason: str) -> None:
        """Record a file.

        Args:
            name: Path, or what else tells which file it is.
            reason: Why it was skipped.

        Raises:
            MediaDataError: If files are not to be skipped.
        """
        if self.strict:
            raise MediaDataError(f"{name} is not a readable {self.kind} ({reason}). Remove it, or leave out --strict.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps([name, reason]) + "\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())  # one write, which other processes cannot cut in two
        finally:
            os.close(file)

    def names(self) -> dict[str, str]:
        """Return the names with their reasons, sorted."""
        if not self.path.is_file():
            return {}
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return dict(sorted(json.loads(line) for line in lines))

    def summary(self) -> str:
        """Return the count and the first names for a person to read; empty where nothing was skipped."""
        names = self.names()
        if not names:
            return ""
        lines = [f"  {name}: {reason}" for name, reason in list(names.items())[:SHOWN]]
        more = [] if len(names) <= SHOWN else [f"  and {len(names) - SHOWN} more, in results.json"]
        return "\n".join([f"skipped {len(names)} files that are no readable {self.kind}s:", *lines, *more])
