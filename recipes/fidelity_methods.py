"""What fidelity.py compares: conversions by name, and the two controls that use no features at all."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_favorpp import FavorppConfig, convert_to_favorpp, revert_to_softmax

WINDOW = "+window"
UNIFORM, WINDOW_ONLY = "uniform", "window-only"
CONTROLS = (UNIFORM, WINDOW_ONLY, WINDOW_ONLY + WINDOW)
CALIBRATED = "calibrated-"
LEARNT = "learnt-"
PRECONDITIONINGS = ("none", "center", "diagonal", "full")
METHODS: dict[str, dict[str, Any]] = {
    "favor+": {"kernel": "favor+"},
    "favor++": {},
    **{name: {"preconditioning": name} for name in PRECONDITIONINGS[1:]},
    "full-antithetic": {"preconditioning": "full", "projection": "antithetic"},
    **{f"{CALIBRATED}{name}-random": {"preconditioning": name} for name in PRECONDITIONINGS},
    **{f"{CALIBRATED}{name}": {"preconditioning": name, "candidates": None} for name in PRECONDITIONINGS},
    f"{LEARNT}favor+": {"kernel": "favor+", "learnable": "projections"},
    **{
        f"{LEARNT}{name}": {"preconditioning": name, "candidates": None, "learnable": "projections"}
        for name in PRECONDITIONINGS
    },
    "relu": {"kernel": "relu"},
    "elu": {"kernel": "elu"},
    "trig": {"kernel": "trig"},
}
"""What sets a method apart from FAVOR++ as published. The calibrated ones freeze their statistics, and unless they are
called random, choose their projections by the calibration too. Learnt ones begin as the calibrated ones, FAVOR+ as
drawn, and learn from softmax attention on the rows that the others calibrate on."""
WITHOUT_DRAWS = ("elu",)
"""Methods that have neither a number of features nor a seed."""


@dataclass(frozen=True)
class Run:
    """One measurement.

    Attributes:
        method: A control, or a key of :data:`METHODS` with or without ``+window``.
        num_features: M; of a window-only control the tokens that cost as much. None where it plays no part.
        seed: Of the projections; None where nothing is drawn.
    """

    method: str
    num_features: int | None = None
    seed: int | None = None

    def __str__(self) -> str:
        features = "" if self.num_features is None else f", M = {self.num_features}"
        return self.method + features + ("" if self.seed is None else f", seed {self.seed}")

    @property
    def windowed(self) -> bool:
        """Whether it has an exact neighbourhood."""
        return self.method.endswith(WINDOW)

    @property
    def calibrated(self) -> bool:
        """Whether it needs calibration data."""
        return self.method.startswith((CALIBRATED, LEARNT)) and "favor+" not in self.method

    @property
    def learnt(self) -> bool:
        """Whether its projections are learnt."""
        return self.method.startswith(LEARNT)


def plan_runs(methods: Iterable[str], num_features: Sequence[int], seeds: int) -> list[Run]:
    """Return all runs, the controls first: for methods with and without a window each the window of equal cost.

    Args:
        methods: Names.
        num_features: Numbers of features.
        seeds: How many draws.

    Returns:
        The runs, each once.
    """
    methods = list(methods)
    ends = [end for end in ("", WINDOW) if any(name.endswith(WINDOW) == bool(end) for name in methods)]
    runs = [Run(UNIFORM), *(Run(WINDOW_ONLY + end, count) for end in ends for count in num_features)]
    for name in methods:
        if name in WITHOUT_DRAWS:
            runs.append(Run(name))
        else:
            runs += [Run(name, count, seed) for count in num_features for seed in range(seeds)]
    return list(dict.fromkeys(runs))


def configuration(run: Run, window: int | tuple[int, int], ends: tuple[int, int]) -> FavorppConfig:
    """Return the library's options of a run.

    Args:
        run: The run.
        window: ``exact_window`` of methods with ``+window``.
        ends: ``exact_ends`` of them.

    Returns:
        The options.

    Raises:
        ValueError: There is no such method.
    """
    name = run.method.removesuffix(WINDOW)
    if name == UNIFORM:
        return FavorppConfig.paper(kernel="uniform")
    if name == WINDOW_ONLY:
        assert run.num_features is not None
        if not run.windowed:
            window, ends = run.num_features, (0, 0)
        elif isinstance(window, tuple):
            window = _tile(window[0] * window[1] + run.num_features)
        else:
            window += run.num_features
        return FavorppConfig.paper(kernel="none", exact_window=window, exact_ends=ends)
    if name not in METHODS:
        raise ValueError(f"--methods must be of {', '.join(METHODS)}, some with {WINDOW}; got {run.method!r}.")
    options = dict(METHODS[name])
    if run.windowed:
        options |= {"exact_window": window, "exact_ends": ends}
    if run.num_features is not None:
        options |= {"num_features": run.num_features}
    return FavorppConfig.paper(seed=run.seed or 0, **options)


@contextmanager
def attention_replaced(
    model: PreTrainedModel,
    run: Run,
    window: int | tuple[int, int],
    ends: tuple[int, int],
    calibration: Iterable[Mapping[str, Any]] | None,
) -> Generator[None]:
    """Let a softmax model attend by the method of a run for a while.

    Args:
        model: The model.
        run: The run.
        window: As for :func:`configuration`.
        ends: As for :func:`configuration`.
        calibration: Batches for calibrated methods.

    Yields:
        Nothing.
    """
    config = configuration(run, window, ends)
    convert_to_favorpp(model, config, calibration_data=calibration if run.calibrated else None)
    try:
        yield
    finally:
        revert_to_softmax(model)


def _tile(area: int) -> tuple[int, int]:
    """Return rows and columns of a tile of so many patches, or a few more where that makes it less oblong."""
    rows = next(rows for rows in range(math.isqrt(area), 0, -1) if area % rows == 0)
    if area > 3 * rows * rows:
        rows = round(math.sqrt(area))
    return rows, math.ceil(area / rows)
