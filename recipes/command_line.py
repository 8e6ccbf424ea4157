"""Arguments of a recipe: a dataclass, a YAML file for its defaults, and the command line, which wins."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from transformers import HfArgumentParser

Arguments = TypeVar("Arguments")


def flag(text: str, default: Any = None, **more: Any) -> Any:
    """Return a dataclass field with a help text.

    Args:
        text: The help.
        default: Of the field.
        **more: Further options of the parser, such as choices.

    Returns:
        The field.
    """
    return dataclasses.field(default=default, metadata={"help": text, **more})


def parse_arguments(kind: type[Arguments], argv: Sequence[str] | None = None) -> Arguments:
    """Parse the command line into a dataclass; ``--config FILE.yaml`` gives values that the command line overrides.

    The file's entries pass the same parser as the command line, so types and choices are checked alike.

    Args:
        kind: Dataclass with a ``config`` field. Its ``__post_init__`` may raise ValueError.
        argv: Without the program's name; None takes it from ``sys.argv``.

    Returns:
        The arguments. Whatever is wrong ends the program with a message, as argparse does.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = HfArgumentParser(kind, allow_abbrev=False)
    try:
        config = _config_option(argv)
        from_file = [] if config is None else yaml_as_argv(Path(config), kind)
        (arguments,) = parser.parse_args_into_dataclasses([*from_file, *argv], look_for_args_file=False)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return arguments


def yaml_as_argv(path: Path, kind: type[Any]) -> list[str]:
    """Turn a YAML mapping of arguments into command-line words.

    Args:
        path: The file.
        kind: Dataclass of the arguments.

    Returns:
        The words; an entry that is null is left out, one that is a mapping becomes JSON.

    Raises:
        ValueError: If a key is unknown (the nearest known one is suggested) or the file is no mapping.
    """
    entries = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if not isinstance(entries, Mapping):
        kind_found = type(entries).__name__
        raise ValueError(f"{path} must be a mapping of arguments, one `name: value` a line, got {kind_found}.")
    known = [field.name for field in dataclasses.fields(kind) if field.name != "config"]
    words: list[str] = []
    for key, value in entries.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            raise ValueError(f"{path}: unknown key {key!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        if isinstance(value, list):
            words += [f"--{key}", *map(str, value)]
        elif isinstance(value, Mapping):
            words.append(f"--{key}={json.dumps(value)}")
        elif value is not None:
            words.append(f"--{key}={value}")
    return words


def require_at_least(arguments: Any, **least: float) -> None:
    """Refuse numbers below a bound; None passes.

    Args:
        arguments: Dataclass.
        **least: The bounds by the names of the arguments, which may be lists.

    Raises:
        ValueError: A number is below its bound, or a list is empty.
    """
    for name, bound in least.items():
        value = getattr(arguments, name)
        if value == []:
            raise ValueError(f"--{name} must hold at least one value, got none.")
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(each < bound for each in values):
            raise ValueError(f"--{name} must be at least {bound}, got {value}.")


def require_positive(arguments: Any, *names: str) -> None:
    """Refuse lists of numbers that are not all positive and finite, and empty ones.

    Args:
        arguments: Dataclass.
        *names: Of its lists.

    Raises:
        ValueError: The message names the argument and what was given.
    """
    for name in names:
        values = getattr(arguments, name)
        if not values or not all(0 < value < math.inf for value in values):
            raise ValueError(f"--{name} must be positive, finite numbers, one or more, got {values}.")


def require_known(arguments: Any, **known: Sequence[str]) -> None:
    """Refuse lists of names of which one is unknown, and empty ones.

    Args:
        arguments: Dataclass.
        **known: The names that there are, by those of the lists.

    Raises:
        ValueError: The message lists them.
    """
    for name, choices in known.items():
        values = getattr(arguments, name)
        unknown = sorted(set(values) - set(choices))
        if unknown or not values:
            raise ValueError(f"--{name} must be some of {', '.join(choices)}, got {', '.join(unknown) or 'none'}.")


def _config_option(argv: Sequence[str]) -> str | None:
    """Return the value of the last ``--config`` on the command line."""
    found = None
    for place, word in enumerate(argv):
        if word.startswith("--config="):
            found = word.partition("=")[2]
        elif word == "--config" and place + 1 < len(argv):
            found = argv[place + 1]
    return found
