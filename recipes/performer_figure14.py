"""Figure 14 of the Performer's paper: how the error of attention adds up over the layers of a Transformer.

For example ``python recipes/performer_figure14.py --config configs/features/performer_figure14.yaml``. All attention
is replaced and nothing trained; the hidden states after each layer are compared with those of softmax. One model is a
new BERT with random weights, the other a checkpoint that reads text. Beside FAVOR+ with orthogonal projections, which
the paper has, there are FAVOR++, the same with centred queries and keys (the default of the library) and with balanced
ones, and as a control the mean of the values. Choromanski et al. 2021, arXiv:2009.14794, Figure 14.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import torch
from command_line import flag, parse_arguments, require_at_least
from fidelity_methods import CALIBRATED, LEARNT, METHODS, UNIFORM, Run, attention_replaced
from glue_data import GlueDataError
from glue_model import ModelError, resolve_model
from movie_reviews import MovieReviewsError, load_movie_reviews
from performer_report import COLOURS, GREY, Claim, FigureArguments, finish, use_threads
from quiet import quiet
from text_documents import read_documents
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedModel

from hf_favorpp import FavorppError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES: dict[str, dict[str, Any]] = {
    "favor+": {"label": "FAVOR+ (positive, orthogonal)", "color": COLOURS["positive"], "marker": "o"},
    "favor++": {"label": "FAVOR++", "color": COLOURS["FAVOR++"], "marker": "D"},
    "center": {"label": "FAVOR++, centred (the default)", "color": COLOURS["FAVOR++, centred"], "marker": "s"},
    "full-antithetic": {"label": "FAVOR++, full, antithetic", "color": COLOURS["FAVOR++, full"], "marker": "^"},
    UNIFORM: {"label": "mean of the values (control)", "color": GREY, "linestyle": "--"},
}
RANDOM = "random weights"
Batch = dict[str, Tensor]
Errors = dict[str, list[list[float]]]  # by method, by seed, by layer


@dataclass
class Figure14Arguments(FigureArguments):
    """Draw Figure 14 of the Performer's paper."""

    methods: list[str] = field(
        default_factory=lambda: ["favor+", "favor++", "center", "full-antithetic"],
        metadata={
            "help": "Of fidelity.py, those that need no calibration; the mean of the values is always measured."
        },
    )
    num_features: int = flag("M, random features per head.", 128)
    seeds: int = flag("Draws of the projections, and of the random weights and their input.", 5)
    length: int = flag("Tokens of a sequence; a text is cut there.", 256)
    sequences: int = flag("Texts for the checkpoint, random sequences for random weights.", 4)
    # the model with random weights
    hidden_size: int = flag("Of the random BERT.", 768)
    num_attention_heads: int = flag("Of the random BERT.", 12)
    num_hidden_layers: int = flag("Of the random BERT.", 12)
    initializer_range: float = flag("Standard deviation of the random weights.", 0.02)
    # the checkpoint
    model_name_or_path: str = flag("Hub id or folder of the checkpoint; this one is in a package.", "all-MiniLM-L6-v2")
    data_file: str | None = flag('JSON lines with a field "text"; None joins film reviews, which pip fetches once.')
    output_json: str = flag("File of results.", "outputs/features/performer_figure14.json")
    figure: str = flag("PNG or SVG to draw.", "outputs/features/performer_figure14.png")

    def __post_init__(self) -> None:
        """Check sizes and names.

        Raises:
            ValueError: A size is too small, or a method unknown or in need of calibration.
        """
        super().__post_init__()
        sizes = ("num_features", "sequences", "hidden_size", "num_attention_heads", "num_hidden_layers")
        require_at_least(self, seeds=2, length=2, initializer_range=0, **dict.fromkeys(sizes, 1))
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"--hidden_size must be a multiple of --num_attention_heads, got {self.hidden_size} and "
                f"{self.num_attention_heads}."
            )
        known = [name for name in METHODS if not name.startswith((CALIBRATED, LEARNT))]
        if unknown := [name for name in self.methods if name not in known]:
            raise ValueError(f"--methods must be of {', '.join(known)}; got {unknown[0]!r}.")


def random_models(args: Figure14Arguments) -> Iterator[tuple[PreTrainedModel, Batch]]:
    """Make new models with input of their own.

    Args:
        args: Of the program.

    Yields:
        A BERT in eval mode and a batch of random tokens, for each seed.
    """
    config = BertConfig(
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_hidden_layers=args.num_hidden_layers,
        intermediate_size=4 * args.hidden_size,
        initializer_range=args.initializer_range,
        max_position_embeddings=max(args.length, 512),
    )
    for seed in range(args.seed, args.seed + args.seeds):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = BertModel(config).eval()
            tokens = torch.randint(config.vocab_size, (args.sequences, args.length))
        yield model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def checkpoint(args: Figure14Arguments) -> tuple[PreTrainedModel, Batch]:
    """Load the checkpoint, in eval mode and float32, and a batch of texts for it."""
    source = resolve_model(args.model_name_or_path)
    model: PreTrainedModel = AutoModel.from_pretrained(source, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(source)
    encoded = tokenizer(texts(args), truncation=True, max_length=args.length, padding=True, return_tensors="pt")
    return model, dict(encoded)


def texts(args: Figure14Arguments) -> list[str]:
    """Return as many texts as there are sequences.

    Args:
        args: Of the program.

    Returns:
        The first of the file, or film reviews, of which as many are joined as fill a sequence.

    Raises:
        GlueDataError: The file has too few.
    """
    if args.data_file is None:
        sentences = [str(sentence) for sentence in load_movie_reviews()["validation"]["sentence"]]
        each = max(1, args.length // 8)  # a review has some 25 tokens
        found = [" ".join(sentences[start : start + each]) for start in range(0, len(sentences), each)]
    else:
        found = [row["text"] for _, row in read_documents(Path(args.data_file))]
    if len(found) < args.sequences:
        raise GlueDataError(f"--sequences {args.sequences} need as many texts, there are {len(found)}.")
    return found[: args.sequences]


@torch.no_grad()
def hidden_states(model: PreTrainedModel, batch: Batch) -> list[Tensor]:
    """Return what real tokens are after each layer.

    Args:
        model: The model.
        batch: With "attention_mask".

    Returns:
        One tensor a layer, (real tokens, hidden size), without the embeddings.
    """
    states = model(**batch, output_hidden_states=True).hidden_states[1:]
    return [state[batch["attention_mask"].bool()] for state in states]


def layer_errors(model: PreTrainedModel, batch: Batch, softmax: Sequence[Tensor], run: Run) -> list[float]:
    """Compare a model with its attention replaced with what it was.

    Args:
        model: The softmax model, which is one again afterwards.
        batch: Its input.
        softmax: Its hidden states, as :func:`hidden_states` returned them.
        run: The method.

    Returns:
        Of each layer the norm of the difference over all real tokens, divided by that of softmax's hidden states.
    """
    with quiet(), attention_replaced(model, run, 0, (0, 0), None):
        states = hidden_states(model, batch)
    return [((state - exact).norm() / exact.norm()).item() for state, exact in zip(states, softmax, strict=True)]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the program.

    Args:
        argv: Command line without the program's name; None takes it from ``sys.argv``.

    Returns:
        What the file of results holds.
    """
    args = parse_arguments(Figure14Arguments, argv)
    use_threads(args)
    names = list(dict.fromkeys([*args.methods, UNIFORM]))
    pretrained = Path(args.model_name_or_path).name
    model, batch = checkpoint(args)  # first, because it may fail
    found: dict[str, Errors] = {RANDOM: {name: [] for name in names}, pretrained: {name: [] for name in names}}
    bar = tqdm(total=args.seeds * (2 * len(args.methods) + 2) + 2, desc="passes")

    def measure(model: PreTrainedModel, batch: Batch, runs: Sequence[Run], errors: Errors) -> None:
        softmax = hidden_states(model, batch)
        bar.update()
        for run in runs:
            errors[run.method].append(layer_errors(model, batch, softmax, run))
            bar.update()

    seeds = range(args.seed, args.seed + args.seeds)
    draws = [Run(name, args.num_features, seed) for name in args.methods for seed in seeds]
    measure(model, batch, [*draws, Run(UNIFORM)], found[pretrained])
    for seed, (new, tokens) in zip(seeds, random_models(args), strict=True):
        runs = [Run(name, args.num_features, seed) for name in args.methods]
        measure(new, tokens, [*runs, Run(UNIFORM)], found[RANDOM])
    bar.close()
    measured = {"relative_error": found, "real_tokens": int(batch["attention_mask"].sum())}
    return finish(args, measured, check(args.methods, found), draw_figure(args, found))


def means(runs: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean error of each layer over seeds."""
    return [fmean(layer) for layer in zip(*runs, strict=True)]


def check(methods: Sequence[str], found: Mapping[str, Errors]) -> list[Claim]:
    """Check what the paper says of the figure, by means over seeds.

    Args:
        methods: Those with features.
        found: Errors by model.

    Returns:
        The claims.
    """
    claims = []
    for model, errors in found.items():
        curves = {name: means(errors[name]) for name in errors}
        last = len(curves[UNIFORM])
        for names, who in ((["favor+"], "favor+: the error"), (methods, "the error of every method")):
            ups = {name: sum(a < b for a, b in pairwise(curves[name])) for name in names if name in methods}
            shown = [
                f"{name} at {count} of {last - 1} steps, from {curves[name][0]:.2g} to {curves[name][-1]:.2g}"
                for name, count in ups.items()
            ]
            grows = bool(ups) and min(ups.values()) == last - 1
            claims.append(Claim(f"{model}, {who} grows with each layer", "; ".join(shown) or "not measured", grows))
        for better, worse in (("favor++", "favor+"), ("center", "favor++"), ("full-antithetic", "center")):
            if better in methods and worse in methods:
                below = sum(a < b for a, b in zip(curves[better], curves[worse], strict=True))
                statement = f"{model}, {better} is closer than {worse} after every layer (not in the paper)"
                claims.append(Claim(statement, f"after {below} of {last}", below == last))
        useful = {name: sum(a < b for a, b in zip(curves[name], curves[UNIFORM], strict=True)) for name in methods}
        shown = [f"{name} after {count} of {last}" for name, count in useful.items()]
        statement = f"{model}, closer than the mean of the values, {curves[UNIFORM][-1]:.2g} after {last} (likewise)"
        claims.append(Claim(statement, "; ".join(shown), all(count == last for count in useful.values())))
    return claims


def draw_figure(args: Figure14Arguments, found: Mapping[str, Errors]) -> Figure:
    """Draw the errors over the layers, means and standard deviations over seeds, a panel for each model.

    Args:
        args: Of the program.
        found: Errors by model.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4 * len(found) + 2.9, 4.2), layout="constrained")
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    lines: dict[str, Any] = {}
    for axis, (model, errors) in zip(axes, found.items(), strict=True):
        for name, runs in errors.items():
            layers = range(1, len(runs[0]) + 1)
            bars = [stdev(layer) if len(layer) > 1 else 0.0 for layer in zip(*runs, strict=True)]
            style = STYLES.get(name, {"label": name, "color": COLOURS["hyperbolic"], "marker": "v"})
            curve = axis.errorbar(layers, means(runs), bars, markersize=5, capsize=2.5, elinewidth=1, **style)
            lines[style["label"]] = curve
        axis.set_title(f"{model}, {len(layers)} layers", fontsize=10)
        axis.set_xticks(layers)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("layers")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("relative error of hidden states to softmax")
    figure.legend(list(lines.values()), list(lines), loc="outside center right", frameon=False, fontsize=9)
    figure.suptitle(
        f"M = {args.num_features}, sequences of {args.length} tokens; mean ± deviation of {args.seeds} seeds",
        fontsize=11,
    )
    return figure


if __name__ == "__main__":
    try:
        main()
    except (FavorppError, GlueDataError, ModelError, MovieReviewsError) as error:
        sys.exit(f"error: {error}")
