"""How the command fails: exit codes, and any error as one line."""

import enum
import re

from hf_favorpp.errors import ConfigError, FavorppError

LONGEST = 600
"""Characters of the message of an error that is not ours."""
_NAMES = r"num_features|exact_window|exact_ends|error_budget"
_WORDS = r"kernel|projection|preconditioning|statistics|layers|seed"
"""Options of ``hf-favorpp convert`` by their names in Python: words of no other meaning, and those that have one."""


class ExitCode(enum.IntEnum):
    """What the command exits with."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    CHECK_FAILED = 4
    INTERRUPTED = 130


EXIT_CODES = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "the model, its checkpoint or the data were refused, or something broke",
    ExitCode.USAGE: "the command line is wrong: an option, or DST is not empty",
    ExitCode.NOT_FOUND: "a file, a folder or a model is not there, or the Hub cannot be reached",
    ExitCode.CHECK_FAILED: "a check failed: the saved model does not reload as it was, or report --fail-above",
    ExitCode.INTERRUPTED: "interrupted",
}


class CommandError(Exception):
    """What the user is told in one line."""

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILED) -> None:
        """Keep the message.

        Args:
            message: The rule, the value given and the remedy.
            code: What the command exits with.
        """
        super().__init__(message)
        self.code = code


class UsageError(CommandError):
    """A command line that is wrong."""

    def __init__(self, message: str) -> None:
        """Keep the message."""
        super().__init__(message, ExitCode.USAGE)


class NotFoundError(CommandError):
    """Something that is not there."""

    def __init__(self, message: str) -> None:
        """Keep the message."""
        super().__init__(message, ExitCode.NOT_FOUND)


def explain(error: BaseException) -> tuple[str, ExitCode]:
    """Return an error as one line, and what to exit with.

    Args:
        error: Whatever ended the command.

    Returns:
        The message without line breaks, and the code.
    """
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", ExitCode.INTERRUPTED
    line = " ".join(str(error).split())
    if isinstance(error, ConfigError) or (isinstance(error, UsageError) and isinstance(error.__cause__, ConfigError)):
        return name_options(line), ExitCode.USAGE
    if isinstance(error, CommandError):
        return line, error.code
    if isinstance(error, FavorppError):
        return line, ExitCode.FAILED
    if hasattr(error, "format_message"):  # of the parser of the command line; its classes moved between versions
        return _explain_usage(error), ExitCode.USAGE
    line = line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."
    if isinstance(error, MemoryError) or "OutOfMemoryError" in type(error).__name__:
        return f"out of memory: {line}", ExitCode.FAILED
    return f"{type(error).__name__}: {line} (--debug shows where)", ExitCode.FAILED


def name_options(message: str) -> str:
    """Write options as the command line has them.

    Args:
        message: Of a ``ConfigError``, such as ``"num_features must be at least 1"``.

    Returns:
        Such as ``"--num-features must be at least 1"``.
    """

    def option(match: re.Match[str]) -> str:
        return f"--{match[1].replace('_', '-')}{' ' + match[2] if match.lastindex == 2 else ''}"

    message = re.sub(r"\b(exact_window)=\((\d+), (\d+)\)", r"--exact-window \2x\3", message)
    message = re.sub(rf"\b({_NAMES}|{_WORDS})='([^']*)'", option, message)
    return re.sub(rf"(?<![\w-])((?:{_NAMES})\b|(?:{_WORDS})(?= (?:must|names) ))", option, message)


def _explain_usage(error: BaseException) -> str:
    message = " ".join(str(error.format_message()).split())  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    path = "hf-favorpp" if context is None else context.command_path
    return f"{message}{'' if message.endswith(('.', '?')) else '.'} See '{path} --help'."
