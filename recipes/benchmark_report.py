"""What benchmark.py prints of its results: tables, why numbers are missing, and the crossover lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from tabulate import tabulate

from hf_favorpp.benchmarking.rows import PASSES, TITLES, describe_crossover, label, peak_key, speedup_key
from hf_favorpp.benchmarking.timing import NOT_ASKED

WIDTH = 140
"""Columns of a table that is not printed to a terminal."""


def print_report(results: Mapping[str, Any], markdown: bool) -> None:
    """Print a table for each pass, why numbers are missing, and the crossover lengths.

    Args:
        results: Content of the file.
        markdown: As Markdown rather than as drawn tables.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for kind in PASSES:
        if all(row[f"{kind}_ms"] is None and row[f"sdpa_{kind}_ms"] is None for row in results["rows"]):
            continue
        header, cells = _table(results["rows"], kind)
        title = f"{results['title']}, {results['settings']['device']}: {TITLES[kind]}"
        if markdown:
            print(f"\n{title}\n\n{tabulate(cells, header, tablefmt='github', disable_numparse=True)}")
            continue
        drawn = Table(title=title)
        for name in header:
            drawn.add_column(name, justify="right", no_wrap=True)
        for line in cells:
            drawn.add_row(*line)
        console.print(drawn)
    for row in results["rows"]:
        for key, reason in row["reasons"].items():
            if reason != NOT_ASKED:
                print(f"length {row['length']}, {label(row)}: no {key}: {reason}")
    print("\nFaster than SDPA from this length on:")
    for entry in results["crossovers"]:
        lengths = "; ".join(f"{TITLES[kind]} {describe_crossover(entry, kind)}" for kind in PASSES)
        print(f"  {label(entry)}, ran on {entry['backend']}: {lengths}")


def _table(rows: Sequence[Mapping[str, Any]], kind: str) -> tuple[list[str], list[list[str]]]:
    """Return header and cells of a pass; columns that hold nothing at all are left out."""
    columns = {
        "length": lambda row: str(row["length"]),
        "M": lambda row: str(row["num_features"]),
        "precond.": lambda row: row["preconditioning"],
        "backend": lambda row: row["backend"],
        "ms": lambda row: _number(row[f"{kind}_ms"]),
        "SDPA": lambda row: _number(row[f"sdpa_{kind}_ms"]),
        "speed-up": lambda row: _number(row[speedup_key(kind)]),
        "identity": lambda row: _number(row.get(f"identity_{kind}_ms")),
        "of floor": lambda row: _number(row["floor_fraction"] if kind == "forward" else None),
        "MiB": lambda row: _number(row[peak_key(kind)]),
        "SDPA MiB": lambda row: _number(row[f"sdpa_{peak_key(kind)}"]),
        **{
            peer: lambda row, peer=peer: _number(row["peers"].get(peer, {}).get(f"{kind}_ms"))
            for peer in dict.fromkeys(peer for row in rows for peer in row["peers"])
        },
    }
    filled = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    filled = {name: cells for name, cells in filled.items() if any(cells)}
    return list(filled), [list(line) for line in zip(*filled.values(), strict=True)]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
