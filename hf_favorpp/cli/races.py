"""What ``hf-favorpp bench`` measures and shows; the measuring is that of ``hf_favorpp.benchmarking``."""

import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from tqdm.auto import tqdm

from hf_favorpp.benchmarking.attention import attention_lineup
from hf_favorpp.benchmarking.checkpoints import kind_of_checkpoint
from hf_favorpp.benchmarking.lineup import Lineup, Shape
from hf_favorpp.benchmarking.models import MODELS, model_lineup
from hf_favorpp.benchmarking.rows import PASSES, TITLES, crossovers, make_rows
from hf_favorpp.benchmarking.timing import NOT_ASKED, Race
from hf_favorpp.cli.data import positions_of
from hf_favorpp.cli.failures import UsageError
from hf_favorpp.cli.inspection import facts_table, new_table
from hf_favorpp.cli.output import output
from hf_favorpp.cli.sources import converted_options, find_device, find_source, load_config, options_of
from hf_favorpp.config import FavorppConfig
from hf_favorpp.training.results import describe_hardware, installed_versions

DTYPES = ("float32", "bfloat16", "float16")
MakeLineup = Callable[[int], Lineup]


@dataclass(frozen=True)
class Plan:
    """How is timed.

    Attributes:
        device: Where.
        dtype: Of queries, keys and values, and of weights.
        batch_size: Inputs at a time.
        seconds_per_length: Samples are taken for so long.
        max_seconds: Calls that would take longer are left out.
        passes: Of :data:`hf_favorpp.benchmarking.rows.PASSES`.
    """

    device: torch.device
    dtype: torch.dtype
    batch_size: int
    seconds_per_length: float
    max_seconds: float
    passes: tuple[str, ...]

    @classmethod
    def on(
        cls,
        device: str | None,
        dtype: str | None,
        num_threads: int | None,
        batch_size: int,
        seconds_per_length: float,
        max_seconds: float,
        train: bool,
    ) -> "Plan":
        """Make a plan for a device.

        Args:
            device: As torch names it; None is a GPU where there is one.
            dtype: One of :data:`DTYPES`; None is what the device is used with.
            num_threads: Of the CPU; None leaves them as they are. They are set until the command ends.
            batch_size: Inputs at a time.
            seconds_per_length: Samples are taken for so long.
            max_seconds: Calls that would take longer are left out.
            train: Forward and backward too.

        Returns:
            The plan.

        Raises:
            UsageError: Device or dtype are not there.
        """
        where = find_device(device)
        name = dtype or ("bfloat16" if where.type == "cuda" else "float32")
        if name not in DTYPES:
            raise UsageError(f"--dtype must be one of {', '.join(DTYPES)}, got {name!r}.")
        if num_threads is not None:
            output.stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(num_threads)
        passes = PASSES if train else PASSES[:1]
        return cls(where, getattr(torch, name), batch_size, seconds_per_length, max_seconds, passes)

    def shape(self, num_heads: int = 0, head_dim: int = 0) -> Shape:
        """Return what all inputs share; heads are 0 for a model, which has its own."""
        return Shape(self.batch_size, num_heads, head_dim, self.dtype, self.device)


def plan_attention(plan: Plan, num_heads: int, head_dim: int, config: FavorppConfig) -> MakeLineup:
    """Return what makes the contestants of attention alone.

    Args:
        plan: How is timed.
        num_heads: H.
        head_dim: d.
        config: Options.

    Returns:
        From a length to its lineup.
    """
    return functools.partial(attention_lineup, shape=plan.shape(num_heads, head_dim), configs=[config])


def plan_model(plan: Plan, name: str, config: FavorppConfig) -> tuple[str, MakeLineup, bool, int | None]:
    """Return what makes the contestants of a model.

    Args:
        plan: How is timed.
        name: Of one that is built in, or of a checkpoint; of a converted one its own options are timed.
        config: Options for any other.

    Returns:
        Its title, what makes the lineup of a size, whether sizes are those of images, and the most tokens that the
        checkpoint takes, where that is known.
    """
    longest = None
    if name in MODELS and not Path(name).is_dir():
        kind = MODELS[name]
    else:
        source = find_source(name)
        found = load_config(source)
        stored = list(converted_options(found).values())
        kind = kind_of_checkpoint(found, name)
        longest = None if kind.images else positions_of(found)
        if stored:
            with options_of(source):
                config = FavorppConfig.from_dict({**stored[0], "recalibrate": None, "redraw": None})
            output.note(f"{name} is converted: its own options are timed.")
    shape = plan.shape()
    return kind.title, lambda size: model_lineup(kind, size, shape, [config]), kind.images, longest


def race(plan: Plan, title: str, make_lineup: MakeLineup, sizes: Sequence[int]) -> dict[str, Any]:
    """Measure all sizes.

    Args:
        plan: How is timed.
        title: Of what is timed.
        make_lineup: Makes the contestants of a size.
        sizes: Ascending.

    Returns:
        JSON values: one row per size as recipes/benchmark.py writes them, crossover lengths, machine.
    """
    races = Race(
        plan.device,
        seconds_per_length=plan.seconds_per_length,
        max_seconds=plan.max_seconds,
        say=lambda message: None,  # the rows hold the reasons
    )
    rows: list[dict[str, Any]] = []
    with tqdm(sizes, "sizes", leave=False) as bar:
        for size in bar:
            bar.set_postfix_str(str(size))
            with output.without_notes():
                lineup = make_lineup(size)
            rows += make_rows(lineup, races.run(lineup.length, lineup.contestants, plan.passes))
            del lineup
            gc.collect()
    return {
        "title": title,
        "device": str(plan.device),
        "dtype": str(plan.dtype).removeprefix("torch."),
        "batch_size": plan.batch_size,
        "passes": list(plan.passes),
        "rows": rows,
        "crossovers": crossovers(rows),
        "hardware": describe_hardware(),
        "versions": installed_versions(("hf-favorpp", "torch", "transformers", "triton")),
    }


def show_race(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Draw what was measured.

    Args:
        document: As :func:`race` returned it.

    Yields:
        Facts, a table per pass, and the crossover lengths.
    """
    hardware = document["hardware"]
    machine = (
        ", ".join(hardware["gpus"])
        if document["device"] != "cpu"
        else f"{hardware['cpu']}, {hardware['threads']} threads"
    )
    facts = facts_table()
    facts.add_row("timed", f"{document['title']}, {document['dtype']}, batch {document['batch_size']}")
    facts.add_row("on", machine)
    (first, *_), (entry,) = document["rows"], document["crossovers"]
    kernel = "" if first["kernel"] == "favor++" else f"{first['kernel']}, "
    window = "" if not first["exact_window"] else f", exact window {first['exact_window']}"
    facts.add_row(
        "FAVOR++",
        f"{kernel}{first['num_features']} features, preconditioning {first['preconditioning']}, statistics "
        f"{first['statistics']}{window}; backend {entry['backend']}",
    )
    yield facts
    for kind in document["passes"]:
        yield _table(document["rows"], kind)
    for row in document["rows"]:
        for key, reason in row["reasons"].items():
            if reason != NOT_ASKED:
                yield Text(f"{row['length']} tokens: no {key}: {reason}", style="dim")
    for kind in document["passes"]:
        yield Text.assemble((f"{TITLES[kind].capitalize()}: ", "bold"), describe_crossover(entry, kind))


def describe_crossover(entry: Mapping[str, Any], kind: str) -> str:
    """Return from which length on FAVOR++ is faster than softmax, as a sentence.

    Args:
        entry: One of :func:`hf_favorpp.benchmarking.rows.crossovers`.
        kind: The pass.

    Returns:
        The sentence.
    """
    if entry[f"{kind}_measured"] is None:
        return "not timed beside softmax at any length."
    (shortest, longest), length = entry[f"{kind}_measured"], entry[kind]
    if length is None:
        return f"not faster than softmax up to {longest} tokens."
    if length == shortest:
        return f"faster than softmax from {shortest} tokens on, the shortest length that was timed."
    return f"faster than softmax from about {length:.0f} tokens on."


def _table(rows: Sequence[Mapping[str, Any]], kind: str) -> Table:
    table = new_table(TITLES[kind].capitalize())
    peak = "peak_mib" if kind == "train" else f"{kind}_peak_mib"
    columns = {
        "tokens": "length",
        "softmax, ms": f"sdpa_{kind}_ms",
        "FAVOR++, ms": f"{kind}_ms",
        "speed-up": f"{kind}_speedup",
        "no attention, ms": f"identity_{kind}_ms",
        "softmax, MiB": f"sdpa_{peak}",
        "FAVOR++, MiB": peak,
    }
    shown = {title: key for title, key in columns.items() if any(row.get(key) is not None for row in rows)}
    for title in shown:
        table.add_column(title, justify="right")
    for row in rows:
        speedup = row[f"{kind}_speedup"]
        style = "" if speedup is None else "green" if speedup > 1 else "yellow"
        cells = (
            Text(_number(row.get(key)), style=style if title == "speed-up" else "") for title, key in shown.items()
        )
        table.add_row(*cells)
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
