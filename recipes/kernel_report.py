"""Compile every Triton kernel as it would be launched and report what it takes of a GPU; none is needed.

Command:  python recipes/kernel_report.py
Hardware: one CPU core, about half an hour for all; `--cases default --architectures 90` takes seconds.
Expected: recipes/results/kernels/kernels.json; exit status 1 if registers spill or shared memory does not suffice.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import triton
from command_line import parse_arguments
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_favorpp.attention.triton import attend, attend_backward, moments, summarise, summarise_backward
from hf_favorpp.attention.triton.launch import OPTIONS, Compilation, record
from hf_favorpp.attention.triton.settings import INTERPRETED

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory of a block at most, by architecture."""
BATCH, HEADS, LENGTH = 8, 12, 4096


@dataclass(frozen=True)
class Case:
    """A situation that the kernels are compiled for, one compilation or more each.

    Attributes:
        dtype: Of the tokens.
        head_dim: d, and D.
        num_features: M.
        order: Whether there is a mask.
        block: Tokens of a block of the exact neighbourhood, which then has ends too; 0 for none.
        statistics: Whether centres and transforms are there.
    """

    dtype: str = "bfloat16"
    head_dim: int = 64
    num_features: int = 128
    order: bool = False
    block: int = 0
    statistics: bool = True


DEFAULT = Case()
CASES = {
    "default": DEFAULT,
    "neighbourhood": replace(DEFAULT, block=64),
    "neighbourhood_masked": replace(DEFAULT, block=64, order=True),
    "small_neighbourhood": replace(DEFAULT, block=16),
    "masked": replace(DEFAULT, order=True),
    "no_statistics": replace(DEFAULT, statistics=False),
    **{f"{m}_features": replace(DEFAULT, num_features=m) for m in (16, 64, 512)},
    **{f"{d}_wide": replace(DEFAULT, head_dim=d) for d in (16, 40, 72, 80, 128, 256)},
    **{f"{d}_wide_neighbourhood": replace(DEFAULT, head_dim=d, block=64) for d in (128, 256)},
    "float16": replace(DEFAULT, dtype="float16"),
    "float16_neighbourhood": replace(DEFAULT, dtype="float16", block=64),
    "float32": replace(DEFAULT, dtype="float32"),
    "float32_neighbourhood": replace(DEFAULT, dtype="float32", block=64),
    "float32_128_wide": replace(DEFAULT, dtype="float32", head_dim=128),
    "float32_256_wide": replace(DEFAULT, dtype="float32", head_dim=256),
}
MAY_SPILL = {"float32_256_wide"}
"""Three products of TF32 for one of float32 take three times the registers; such heads in float32 are rare."""


@dataclass
class KernelReportArguments:
    """Compile the Triton kernels and report registers, spills and shared memory."""

    config: str | None = field(default=None, metadata={"help": "YAML file of arguments; the command line wins."})
    architectures: list[int] = field(
        default_factory=lambda: [80, 90, 100], metadata={"help": "Compute capabilities times 10."}
    )
    cases: list[str] = field(default_factory=lambda: [*CASES], metadata={"help": "Which ones, of " + ", ".join(CASES)})
    output_json: str = field(default="recipes/results/kernels/kernels.json", metadata={"help": "File of results."})

    def __post_init__(self) -> None:
        """Check the names.

        Raises:
            ValueError: If a case is unknown.
        """
        unknown = sorted(set(self.cases) - set(CASES))
        if unknown:
            raise ValueError(f"unknown cases {unknown}; there are {', '.join(CASES)}.")


def compilations(case: Case, architecture: int) -> list[Compilation]:
    """Note what one forward and backward pass, and its statistics, would ask the compiler for."""
    dtype = getattr(torch, case.dtype)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def constants(*shape: int) -> torch.Tensor | None:
        return empty(1, HEADS, *shape) if case.statistics else None

    d, m = case.head_dim, case.num_features
    tokens = empty(BATCH, LENGTH, HEADS, d, dtype=dtype).transpose(1, 2)
    order = empty(BATCH, LENGTH, dtype=torch.int32) if case.order else None
    count = empty(BATCH, dtype=torch.int32) if case.order else None
    ends = int(case.block > 0)
    arguments = (constants(d), constants(d, d), constants(d), d**-0.5, order, count, case.block, ends, ends)
    single = tokens if case.block else None
    projection = empty(1, HEADS, m, d)
    with record(capability=architecture // 10) as noted:
        moments(tokens, order, count, covariance=True)
        moments(tokens, order, count, covariance=False)
        z, S = summarise(tokens, tokens, projection, *arguments)
        summarise_backward(z, S, tokens, tokens, projection, *arguments, z, S, need_projection=True)
        out, logsumexp = attend(tokens, single, single, projection, z, S, *arguments)
        attend_backward(
            out, tokens, single, single, projection, z, S, *arguments, out, logsumexp, need_projection=True
        )
        attend_backward(
            out, tokens, single, single, projection, z, S, *arguments, out, logsumexp, need_projection=False
        )
    return noted


def resources(compilation: Compilation, architecture: int) -> dict[str, Any]:
    """Compile for an architecture and read off the binary what a program takes."""
    names = list(compilation.signature)
    source = ASTSource(
        fn=compilation.kernel,
        signature=compilation.signature,
        constexprs=compilation.constexprs,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in compilation.divisible},
    )
    shape = {"num_warps": compilation.num_warps, "num_stages": compilation.num_stages}
    options = {**shape, **OPTIONS}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    return {
        "registers": max(int(registers) for registers, _ in found),
        "spilled_bytes": max(
            int(stack) for _, stack in found
        ),  # a kernel without arrays needs its stack for nothing else
        "shared_kib": round(compiled.metadata.shared / 1024, 1),
        **shape,
    }


def report(names: list[str], architectures: list[int]) -> Iterator[dict[str, Any]]:
    """Compile what the cases ask for, each compilation once.

    Args:
        names: Of cases.
        architectures: Compute capabilities times 10.

    Yields:
        One row for each compilation: the first case that asked for it, and what it takes.
    """
    seen = set()
    for architecture in architectures:
        for name in names:
            for compilation in compilations(CASES[name], architecture):
                key = (architecture, *map(str, compilation))
                if key in seen:
                    continue
                seen.add(key)
                row = {"kernel": compilation.name, "architecture": architecture, "case": name}
                tiles = {n: v for n, v in compilation.constexprs.items() if n in {"TOKENS", "FEATURES", "CHUNK"}}
                yield {**row, "tiles": tiles, **resources(compilation, architecture)}


def is_fine(row: dict[str, Any]) -> bool:
    """Say whether nothing spills and shared memory suffices."""
    fits = row["shared_kib"] <= SHARED_KIB.get(row["architecture"], 227)
    return fits and (row["spilled_bytes"] == 0 or row["case"] in MAY_SPILL)


def table(rows: list[dict[str, Any]]) -> Table:
    """Lay the rows out for a terminal."""
    columns = ("kernel", "case", "sm", "warps", "stages", "registers", "spilled B", "shared KiB")
    drawn = Table(*columns, title="Kernels as they are launched")
    for row in rows:
        numbers = ("architecture", "num_warps", "num_stages", "registers", "spilled_bytes", "shared_kib")
        style = "" if is_fine(row) else "bold red"
        drawn.add_row(row["kernel"], row["case"], *(str(row[name]) for name in numbers), style=style)
    return drawn


def main(argv: list[str] | None = None) -> int:
    """Run the report.

    Args:
        argv: Without the program's name; None takes it from ``sys.argv``.

    Returns:
        The exit status.
    """
    arguments = parse_arguments(KernelReportArguments, argv)
    if INTERPRETED or not CUOBJDUMP.is_file():
        sys.exit("kernel_report.py needs Triton 3.3 or newer with its NVIDIA tools, and TRITON_INTERPRET unset.")
    rows = []
    for row in report(arguments.cases, arguments.architectures):
        rows.append(row)
        print(f"{row['architecture']} {row['case']} {row['kernel']}: {row['registers']}", file=sys.stderr)
    output = Path(arguments.output_json)
    output.parent.mkdir(parents=True, exist_ok=True)
    results = {"triton": triton.__version__, "cases": {name: asdict(CASES[name]) for name in arguments.cases}}
    lines = ",\n".join(map(json.dumps, rows))  # one a line: a change shows in a diff
    output.write_text(f'{json.dumps(results)[:-1]}, "kernels": [\n{lines}\n]}}\n', encoding="utf-8")
    Console().print(table(rows))
    wrong = [row for row in rows if not is_fine(row)]
    if wrong:
        print(f"{len(wrong)} of {len(rows)} kernels spill registers or need too much shared memory.", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
