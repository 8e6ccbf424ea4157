"""``hf-favorpp bench``."""

from typing import Annotated

import typer

from hf_favorpp.cli import options
from hf_favorpp.cli.failures import UsageError
from hf_favorpp.cli.output import output
from hf_favorpp.config import FavorppConfig
from hf_favorpp.rules import KERNELS

LENGTHS, MODEL_LENGTHS, IMAGE_SIZES = "256,512,1024,2048,4096", "256,512,1024,2048", "224,384,518,768"
_HOW, _WHAT = "How FAVOR++ attends", "What is timed"


def bench(
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help=f"Tokens, or pixels along the side of images. By default {LENGTHS}; of models fewer.",
            rich_help_panel=_WHAT,
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Time a whole model too: bert, vit, vit-small, wav2vec2, conformer-rotary, conformer-relative, "
            "conformer-relative-key, or one of the shape of a checkpoint. "
            "Weights are random.",
            rich_help_panel=_WHAT,
            show_default=False,
        ),
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="Forward and backward too.", rich_help_panel=_WHAT)] = False,
    batch_size: Annotated[int, typer.Option(min=1, rich_help_panel=_WHAT)] = 1,
    num_heads: Annotated[int, typer.Option(min=1, help="Of attention alone.", rich_help_panel=_WHAT)] = 12,
    head_dim: Annotated[int, typer.Option(min=1, help="Of attention alone.", rich_help_panel=_WHAT)] = 64,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, float16. By default float32 on a CPU, bfloat16 on a GPU.",
            rich_help_panel=_WHAT,
            show_default=False,
        ),
    ] = None,
    device: options.Device = None,
    num_threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads.", rich_help_panel=_WHAT, show_default=False)
    ] = None,
    num_features: Annotated[int, typer.Option(help="Random features per head.", rich_help_panel=_HOW)] = 128,
    kernel: Annotated[str, typer.Option(help=f"One of {', '.join(KERNELS)}.", rich_help_panel=_HOW)] = "favor++",
    preconditioning: Annotated[
        str | None, typer.Option(help="none, center, diagonal, full.", rich_help_panel=_HOW, show_default=False)
    ] = None,
    calibrated: Annotated[
        bool, typer.Option("--calibrated", help="Statistics are not computed in each call.", rich_help_panel=_HOW)
    ] = False,
    exact_window: Annotated[
        str, typer.Option(metavar="N|RxC", help="Exact block, or tile of patches.", rich_help_panel=_HOW)
    ] = "0",
    exact_ends: Annotated[
        tuple[int, int], typer.Option(metavar="A B", help="Exact first and last tokens.", rich_help_panel=_HOW)
    ] = (0, 0),
    seconds_per_length: Annotated[
        float, typer.Option(min=0, help="Repeat for so long at each length.", rich_help_panel=_WHAT)
    ] = 3.0,
    max_seconds: Annotated[
        float, typer.Option(min=0, help="Leave out calls that would take longer.", rich_help_panel=_WHAT)
    ] = 20.0,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Time FAVOR++ beside PyTorch's softmax attention on this machine, and tell from which length on it pays.

    Attention alone, and with --model a whole model. Of a converted checkpoint its own options are timed. Both are
    measured in turns in one run, so that ratios hold where the machine is not quiet.

    Example: `hf-favorpp bench --lengths 512,2048,8192 --model minilm-favorpp`
    """
    window = options.parse_window(exact_window)
    sizes = None if lengths is None else options.parse_numbers("--lengths", lengths)
    if sizes and sizes[0] < 1:
        _refuse(f"--lengths must be at least 1, got {sizes[0]}.")
    if isinstance(window, tuple) and model is None:
        _refuse("--exact-window RxC needs a model of images; attention alone has no image grid.")
    config = FavorppConfig(
        num_features=num_features,
        kernel=kernel,
        preconditioning=preconditioning,
        statistics="calibrated" if calibrated else "sequence",
        exact_window=window,
        exact_ends=exact_ends,
    )
    with output.working("starting"):
        from hf_favorpp.cli.races import Plan, plan_attention, plan_model, race, show_race
        from hf_favorpp.cli.sources import prepare_libraries
    prepare_libraries()
    plan = Plan.on(device, dtype, num_threads, batch_size, seconds_per_length, max_seconds, train)
    if model is None:
        title, makers = "attention alone", plan_attention(plan, num_heads, head_dim, config)
        default = LENGTHS
    else:
        title, makers, images, longest = plan_model(plan, model, config)
        default = IMAGE_SIZES if images else MODEL_LENGTHS
    sizes = sizes or options.parse_numbers("--lengths", default)
    if model is not None and longest is not None and (beyond := [str(size) for size in sizes if size > longest]):
        output.note(
            f"{model} takes {longest} tokens at most: a model of its shape with more positions is timed at "
            f"{', '.join(beyond)}."
        )
    document = race(plan, title, makers, sizes)
    output.result(document, *show_race(document))


def _refuse(message: str) -> None:
    raise UsageError(message)
