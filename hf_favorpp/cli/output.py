"""Where the command writes: results to standard output, for people or as JSON, everything else to standard error."""

import contextlib
import json
import logging
import math
import sys
import traceback
from collections.abc import Generator, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hf_favorpp.cli.failures import ExitCode, explain

WIDTH = 120
"""Columns where nothing is drawn on a terminal."""


class Output:
    """Standard output and standard error of one run of the command."""

    def __init__(self) -> None:
        """Begin."""
        self.begin()

    def begin(self, *, as_json: bool = False, debug: bool = False) -> None:
        """Forget the run before.

        Args:
            as_json: The result is one JSON document.
            debug: Errors have a traceback, and libraries may speak.
        """
        self.as_json, self.debug = as_json, debug
        self.notes: list[str] = []
        self.stack = contextlib.ExitStack()
        self._out = sys.stdout

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Turn what the library logs into notes for a while; with JSON keep everybody else off standard output.

        Yields:
            Nothing.
        """
        handler = _NotesHandler(self)
        logger = logging.getLogger("hf_favorpp")
        logger.addHandler(handler)
        propagate, logger.propagate = logger.propagate, False
        try:
            with self.stack, contextlib.redirect_stdout(sys.stderr) if self.as_json else contextlib.nullcontext():
                yield
        finally:
            logger.removeHandler(handler)
            logger.propagate = propagate

    @contextlib.contextmanager
    def without_notes(self) -> Generator[None]:
        """Leave out what the library tells meanwhile, such as at every one of many conversions.

        Yields:
            Nothing.
        """
        logger = logging.getLogger("hf_favorpp")
        before = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(before)

    def note(self, message: str) -> None:
        """Tell something that is no result.

        Args:
            message: One line.
        """
        self.notes.append(message)
        _console(sys.stderr).print(f"[yellow]note:[/] {escape(message)}", highlight=False, soft_wrap=True)

    def result(self, document: Mapping[str, Any], *shown: RenderableType) -> None:
        """Write the result, once.

        Args:
            document: JSON values; ``notes`` are added.
            *shown: The same for people.
        """
        if self.as_json:
            self._write_json({**document, "notes": self.notes})
            return
        console = _console(self._out)
        for each in shown:
            console.print(each)

    def error(self, error: BaseException) -> ExitCode:
        """Tell what ended the command.

        Args:
            error: What was raised.

        Returns:
            What to exit with.
        """
        message, code = explain(error)
        if self.debug and code != ExitCode.USAGE:  # what is wrong with a command line is in no traceback
            print("".join(traceback.format_exception(error)), end="", file=sys.stderr)
        _console(sys.stderr).print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
        if self.as_json:
            self._write_json({"error": {"type": type(error).__name__, "message": message, "exit_code": int(code)}})
        return code

    @contextlib.contextmanager
    def working(self, what: str) -> Generator[None]:
        """Show that something is being done, and for how long, where its steps cannot be counted.

        Args:
            what: What is done, such as ``"saving"``.

        Yields:
            Nothing.
        """
        console = _console(sys.stderr)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            progress.add_task(escape(what), total=None)
            yield

    def _write_json(self, document: Mapping[str, Any]) -> None:
        print(json.dumps(_finite(document), indent=2, ensure_ascii=False, allow_nan=False), file=self._out, flush=True)


output = Output()
"""That of this process."""


class _NotesHandler(logging.Handler):
    def __init__(self, to: Output) -> None:
        super().__init__(logging.WARNING)
        self.to = to

    def emit(self, record: logging.LogRecord) -> None:
        self.to.note(record.getMessage())


def _console(file: Any) -> Console:
    console = Console(file=file)
    if not console.is_terminal and "COLUMNS" not in console._environ:
        console.width = WIDTH
    return console


def _finite(value: Any) -> Any:
    """Return JSON values, with None where a number is not finite, which JSON cannot say."""
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
