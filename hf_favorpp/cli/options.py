"""Options that several commands have, and how their values are read."""

import re
from pathlib import Path
from typing import Annotated

import typer

from hf_favorpp.cli.failures import UsageError

_DATA, _LOADING, _OUTPUT = "Data", "Loading", "Output"

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of tables.", rich_help_panel=_OUTPUT)
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=_OUTPUT)]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace DST where it holds a checkpoint.", rich_help_panel=_OUTPUT)
]

Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit on the Hub.", rich_help_panel=_LOADING, show_default=False)
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code of the checkpoint's own.", rich_help_panel=_LOADING)
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1; by default a GPU where there is one.", rich_help_panel=_LOADING)
]

DATA_HELP = (
    "Texts: .txt, one a line; .jsonl, .csv or .tsv with a field; or a folder of .txt. Images: a folder of png, jpg, "
    "webp, bmp. Recordings: a folder of wav, flac. CLIP and SigLIP are given images; SigLIP's text model, texts."
)
Data = Annotated[Path, typer.Option("--data", help=DATA_HELP, rich_help_panel=_DATA, show_default=False)]
CalibrationData = Annotated[
    Path | None,
    typer.Option("--calibration-data", help=DATA_HELP, rich_help_panel=_DATA, show_default=False),
]
Field = Annotated[
    str, typer.Option(help="Field of a JSON line, or column, that holds the text.", rich_help_panel=_DATA)
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Cut texts after so many tokens, recordings after so many samples. By default what the model takes.",
        rich_help_panel=_DATA,
        show_default=False,
    ),
]
BaseModel = Annotated[
    str | None,
    typer.Option(
        help="Hub id of the softmax model, for the model card. By default what its own card or its name tells.",
        show_default=False,
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Inputs at a time.", rich_help_panel=_DATA)]
MaxSamples = Annotated[int, typer.Option(min=1, help="Use so many inputs, evenly spaced.", rich_help_panel=_DATA)]


def parse_window(text: str) -> int | tuple[int, int]:
    """Read ``--exact-window``.

    Args:
        text: Such as ``64`` or ``8x8``.

    Returns:
        Tokens a block, or rows and columns of a tile.

    Raises:
        UsageError: It is neither.
    """
    if match := re.fullmatch(r"\s*(\d+)\s*(?:[x,]\s*(\d+))?\s*", text, re.IGNORECASE):
        first, second = match.groups()
        return int(first) if second is None else (int(first), int(second))
    raise UsageError(
        f"--exact-window must be a number of tokens such as 64, or rows x columns such as 8x8, got {text!r}."
    )


def parse_numbers(option: str, text: str) -> list[int]:
    """Read a list of numbers and ranges.

    Args:
        option: Its name, for the message.
        text: Such as ``0,1,4-7``.

    Returns:
        The numbers, ascending, each once.

    Raises:
        UsageError: It is no such list.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise UsageError(f"{option} must be numbers and ranges such as 0,2,4-7, got {text!r}.")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"{option} has the range {first}-{last}, which ends before it begins.")
        numbers.update(range(first, last + 1))
    return sorted(numbers)
