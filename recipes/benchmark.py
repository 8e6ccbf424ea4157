"""Time FAVOR++ beside softmax: attention alone or whole models, forward and training, at growing lengths.

For example ``python recipes/benchmark.py --device cpu --lengths 512 4096 --num_features 128``. Everything is measured
in one run, in turns, so that ratios hold also where the machine is not quiet. Rows are written as they are measured.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmark_arguments import ATTENTION, BenchmarkArguments
from benchmark_figure import draw
from benchmark_peers import installed_peers
from benchmark_report import print_report
from command_line import parse_arguments
from quiet import quiet
from tqdm.auto import tqdm

from hf_favorpp import FavorppError
from hf_favorpp.benchmarking.attention import attention_lineup
from hf_favorpp.benchmarking.floor import measure_machine
from hf_favorpp.benchmarking.lineup import Lineup
from hf_favorpp.benchmarking.models import MODELS, model_lineup
from hf_favorpp.benchmarking.rows import crossovers, make_rows
from hf_favorpp.benchmarking.timing import Race
from hf_favorpp.training.results import describe_run, write_results

RECORDED_PACKAGES = ("triton", "performer-pytorch", "pytorch-fast-transformers")


class BenchmarkError(Exception):
    """Nothing can be measured or shown; the message says why."""


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the program.

    Args:
        argv: Command line without the program's name; None takes it from ``sys.argv``.

    Returns:
        What the file of results holds.

    Raises:
        BenchmarkError: A report is asked for of a file that does not exist.
    """
    args = parse_arguments(BenchmarkArguments, argv)
    path = Path(str(args.output_json))
    if args.report_only:
        if not path.is_file():
            raise BenchmarkError(f"--report_only: {path} does not exist; measure it first, or give --output_json.")
        results = json.loads(path.read_text(encoding="utf-8"))
    else:
        results = measure(args, path)
    print_report(results, args.markdown)
    if args.figure is not None:
        draw(results, Path(args.figure))
        print(f"drawn: {args.figure}")
    return results


def measure(args: BenchmarkArguments, path: Path) -> dict[str, Any]:
    """Measure all lengths, and write the rows of each as soon as it is done.

    Args:
        args: All arguments.
        path: File of results.

    Returns:
        Its content.
    """
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    results: dict[str, Any] = {
        "model": args.model,
        "title": "attention" if args.model == ATTENTION else MODELS[args.model].title,
        "settings": args.settings(),
        **describe_run(args.settings(), RECORDED_PACKAGES),
        "machine": None,
        "left_out": {},
        "rows": [],
        "crossovers": [],
    }
    make_lineup = _lineup_maker(args, results)
    race = Race(
        args.shape().device,
        seconds_per_length=args.seconds_per_length,
        max_seconds=args.max_seconds,
        max_memory_mib=args.max_memory_mib,
        say=tqdm.write,
    )
    bar = tqdm(args.sizes(), "sizes")
    for size in bar:
        bar.set_postfix_str(str(size))
        with quiet():
            lineup = make_lineup(size)
        measured = race.run(lineup.length, lineup.contestants, args.passes)
        results["rows"] += make_rows(lineup, measured)
        results["crossovers"] = crossovers(results["rows"])
        write_results(path, results)
        del lineup
        gc.collect()
    return results


def _lineup_maker(args: BenchmarkArguments, results: dict[str, Any]) -> Callable[[int], Lineup]:
    """Return what makes the contestants of a size; note in the results what else is measured or left out."""
    shape, configs = args.shape(), args.configurations()
    if args.model != ATTENTION:
        kind = MODELS[args.model]
        return lambda size: model_lineup(kind, size, shape, configs, seed=args.seed)
    peers, missing = installed_peers() if args.peers else ({}, {})
    for name, reason in missing.items():
        print(f"{name}: {reason}")
    results["left_out"] = missing
    machine = measure_machine(shape.device, shape.dtype) if shape.device.type == "cuda" else None
    results["machine"] = None if machine is None else vars(machine)
    return functools.partial(
        attention_lineup, shape=shape, configs=configs, peers=peers, machine=machine, seed=args.seed
    )


if __name__ == "__main__":
    try:
        main()
    except (BenchmarkError, FavorppError) as error:
        sys.exit(f"error: {error}")
