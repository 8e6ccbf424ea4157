"""The options of a conversion: a frozen dataclass that validates itself and is plain JSON in ``config.json``."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Self

from hf_favorpp.errors import ConfigError
from hf_favorpp.rules import (
    CHOSEN_KERNELS,
    SOFTMAX_KERNELS,
    require_choice,
    require_int,
    require_neighbourhood_fits,
    require_preconditioning_fits,
    require_statistics_are_used,
)

DEFAULT_CANDIDATES = 8


@dataclass(frozen=True)
class RedrawSchedule:
    """When the random projections are drawn anew during training.

    Attributes:
        every: Optimizer steps between two draws, >= 1.
        until: Optimizer step after which the projections stay as they are; None redraws to the end. The last part
            of a run is best spent with the projections that will be saved.
    """

    every: int
    until: int | None = None

    def __post_init__(self) -> None:
        require_int("RedrawSchedule.every", self.every, minimum=1)
        if self.until is not None:
            require_int("RedrawSchedule.until", self.until, minimum=0)

    def draw_index(self, completed_steps: int) -> int:
        """Return which draw is in force.

        Args:
            completed_steps: Optimizer steps completed so far, >= 0.

        Returns:
            The number of redraws made so far. It depends on the step alone: a resumed run and every rank agree.
        """
        step = completed_steps if self.until is None else min(completed_steps, self.until)
        return step // self.every


@dataclass(frozen=True)
class FavorppConfig:
    """How attention is replaced. The defaults are what was measured to be best; :meth:`paper` is FAVOR++ as published.

    It pays with long inputs. On 2 CPU cores, with 12 heads of 64 and 128 features, attention alone is faster than
    PyTorch's ``scaled_dot_product_attention`` from about 450 tokens on, forward and backward from 360
    (recipes/benchmark.py); with ``exact_window=64`` from 960 and 860. On a GPU it was not timed.

    Attributes:
        num_features: M, the number of random projections per head, >= 1. Cost grows linearly with it, the variance
            of the estimate falls as 1/M. ``favor+hyperbolic`` and ``trig`` evaluate two features per projection.
            ``elu`` has ``head_dim`` features by definition and draws none.
        kernel: ``"favor++"`` (CRT Theorem 3.3), ``"favor+"`` (Performer Lemma 1), and for comparison
            ``"favor+hyperbolic"`` (Performer Lemma 1, second form), ``"trig"`` (random Fourier features), ``"relu"``
            (Performer-ReLU) and ``"elu"`` (elu + 1, Katharopoulos et al. 2020). The last two do not estimate softmax.
            Two are controls: ``"uniform"`` averages the values, whatever queries and keys are, which tells what a
            model does without attention; ``"none"`` has no features at all, and a query sees its exact neighbourhood
            and nothing else, which tells what the features beside a neighbourhood are worth.
        projection: ``"orthogonal"`` (blocks of head_dim orthogonal rows with chi(d) norms), ``"antithetic"`` (half as
            many of those, and their negatives), ``"iid"``, ``"hadamard"`` or ``"givens"`` (blocks made by fast
            transforms, see :mod:`hf_favorpp.features.structured`; attention costs the same with all). None chooses
            ``"antithetic"`` with ``"diagonal"`` and ``"full"`` of each sequence, where it was measured to be closer to
            softmax at the same cost, else ``"orthogonal"``, the paper's.
        preconditioning: A change of variables that leaves softmax as it is and shrinks the variance. ``"center"``
            shifts queries and keys by their means; ``"diagonal"`` also balances their scales, one coefficient per
            coordinate; ``"full"`` balances their covariances by a matrix per head. ``"none"`` is the paper. None
            chooses ``"full"`` with calibrated statistics, where it costs nothing, and ``"center"`` with those of each
            sequence, where a decomposition per sequence and head would take longer than the attention; or ``"none"``
            where the kernel does not estimate softmax.
        statistics: What the preconditioning and the coefficient are computed from. ``"sequence"``: each sequence and
            head by itself, over real tokens, without gradient. ``"calibrated"``: per head, once, by
            :func:`hf_favorpp.calibrate`; nothing is computed per call.
        exact_window: Tokens per block that attend to each other exactly, the rest through features, under one
            normalisation; 0 is the paper. For images (rows, columns) of a tile of patches; the class token and other
            special ones then attend exactly to all patches, and all patches to them.
        exact_ends: How many first and last real tokens every query sees exactly; (0, 0) is the paper.
        layers: Indices of the attention layers to convert, counted from 0; None converts all that can be. The rest
            stay softmax.
        redraw: When projections are drawn anew in training; None keeps the first draw.
        recalibrate: When calibrated statistics are renewed in training, from the queries and keys of the training
            batches since the last time: both drift as the weights are trained. None keeps the first calibration,
            which was measured to train as well.
        candidates: Projections drawn per feature, >= 1, of which a calibration keeps those that explain the attention
            of the calibration data best, with weights
            (:func:`hf_favorpp.features.fitting.fit_quadrature`). 1 keeps every projection as it was drawn. None
            chooses 8 where that is possible: with ``"favor++"`` and ``"favor+"``, and neither ``redraw``, which would
            replace what was chosen, nor ``recalibrate``, which would turn the coordinates away from it.
        learnable: ``"projections"`` makes parameters of the projections, with ``"favor++"`` and ``"favor+"``: those of
            the queries, those of the keys, which are equal to begin with, and their weights. They begin as drawn or,
            after a calibration, as chosen; :func:`hf_favorpp.transfer_attention` learns them from the softmax
            attention. Centres and transforms of the preconditioning stay constants: all that they do to a projection,
            the projection can learn itself. Weight decay leaves them out, and ``redraw`` and ``recalibrate`` must be
            None. None keeps the projections fixed.
        backend: ``"auto"`` takes fused code for the device where it can; ``"cpu"``, ``"triton"`` or ``"reference"``
            ask for one implementation, see :mod:`hf_favorpp.attention.backends`.
        seed: Seed of the projections. They depend on (seed, layer, draw) alone, not on any global random state.

    Raises:
        ConfigError: An option has an impossible value, or two options contradict each other.
    """

    num_features: int = 128
    kernel: str = "favor++"
    projection: str | None = None
    preconditioning: str | None = None
    statistics: str = "sequence"
    exact_window: int | tuple[int, int] = 0
    exact_ends: tuple[int, int] = (0, 0)
    layers: tuple[int, ...] | None = None
    redraw: RedrawSchedule | None = None
    recalibrate: RedrawSchedule | None = None
    candidates: int | None = None
    learnable: str | None = None
    backend: str = "auto"
    seed: int = 0
    _left_open: ClassVar[bool]

    def __post_init__(self) -> None:
        require_int("num_features", self.num_features, minimum=1)
        require_int("seed", self.seed, minimum=0)
        require_choice("kernel", self.kernel)
        object.__setattr__(self, "_left_open", self.preconditioning is None)
        if self.preconditioning is None:
            best = "full" if self.statistics == "calibrated" else "center"
            object.__setattr__(self, "preconditioning", best if self.kernel in SOFTMAX_KERNELS else "none")
        if self.projection is None:
            balanced = self.preconditioning in ("diagonal", "full") and self.statistics == "sequence"
            object.__setattr__(self, "projection", "antithetic" if balanced else "orthogonal")
        for name in ("projection", "preconditioning", "statistics", "backend"):
            require_choice(name, getattr(self, name))
        require_preconditioning_fits(self.kernel, str(self.preconditioning))
        if isinstance(self.exact_window, list):  # what JSON makes of a tuple
            object.__setattr__(self, "exact_window", tuple(self.exact_window))
        if isinstance(self.exact_ends, list):
            object.__setattr__(self, "exact_ends", tuple(self.exact_ends))
        require_neighbourhood_fits(self.kernel, self.exact_window, self.exact_ends)
        if self.candidates is not None:
            require_int("candidates", self.candidates, minimum=1)
            if self.candidates > 1 and (reason := self._why_not_fitted()):
                raise ConfigError(f"candidates must be 1 or None, got {self.candidates}: {reason}.")
        if self.learnable is not None:
            self._require_learnable()
        if self.layers is not None:
            object.__setattr__(self, "layers", _layer_indices(self.layers))
        for name in ("redraw", "recalibrate"):
            schedule = getattr(self, name)
            if schedule is not None and not isinstance(schedule, RedrawSchedule):
                raise ConfigError(f"{name} must be a RedrawSchedule(every=..., until=...) or None, got {schedule!r}.")
        if self.statistics == "calibrated":
            require_statistics_are_used(self.kernel, str(self.preconditioning))
        if self.recalibrate is not None and self.statistics != "calibrated":
            raise ConfigError(f"recalibrate needs statistics='calibrated', got {self.statistics!r}.")

    def calibrated(self) -> Self:
        """Return the same options with ``statistics="calibrated"``.

        Returns:
            The configuration. A preconditioning that was left open is chosen anew.
        """
        return replace(
            self, statistics="calibrated", preconditioning=None if self._left_open else self.preconditioning
        )

    @property
    def candidates_per_feature(self) -> int:
        """``candidates``, or what None stands for."""
        if self.candidates is not None:
            return self.candidates
        return 1 if self._why_not_fitted() else DEFAULT_CANDIDATES

    def _require_learnable(self) -> None:
        require_choice("learnable", self.learnable)
        if self.kernel not in CHOSEN_KERNELS:
            raise ConfigError(
                f"learnable={self.learnable!r} needs kernel={' or '.join(map(repr, CHOSEN_KERNELS))}, got "
                f"kernel={self.kernel!r}."
            )
        for name in ("redraw", "recalibrate"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{name} must be None with learnable={self.learnable!r}, got {getattr(self, name)!r}: it would "
                    f"undo what was learnt."
                )

    def _why_not_fitted(self) -> str | None:
        if self.kernel not in CHOSEN_KERNELS:
            return f"kernel={self.kernel!r} has features that are not chosen one by one"
        if self.redraw is not None:
            return "a redraw would replace the projections that were chosen"
        if self.recalibrate is not None:
            return "a recalibration would turn the coordinates away from the projections that were chosen"
        return None

    @classmethod
    def paper(cls, **options: Any) -> Self:
        """Return FAVOR++ exactly as published, whatever the defaults become.

        Args:
            **options: Options that the paper leaves open, such as ``num_features`` or ``seed``.

        Returns:
            The configuration.

        Source:
            Likhosherstov et al. 2022, arXiv:2205.15317, Section 3.1.
        """
        published: dict[str, Any] = {
            "kernel": "favor++",
            "projection": "orthogonal",
            "preconditioning": "none",
            "statistics": "sequence",
            "candidates": 1,
            "exact_window": 0,
            "exact_ends": (0, 0),
        }
        return cls(**{**published, **options})

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Build a configuration from what :meth:`to_dict` returned, as read from ``config.json``.

        Args:
            options: Option names and JSON values.

        Returns:
            The configuration.

        Raises:
            ConfigError: A name is unknown or a value impossible; the message names the key.
        """
        if not isinstance(options, Mapping):
            raise ConfigError(f"config.favorpp must be a JSON object of FavorppConfig options, got {options!r}.")
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                nearest = difflib.get_close_matches(str(name), known, n=1)
                hint = f" Did you mean {nearest[0]!r}?" if nearest else f" Known options: {', '.join(known)}."
                raise ConfigError(f"config.favorpp has an unknown option {name!r}.{hint}")
        values = dict(options)
        for name in ("redraw", "recalibrate"):
            if isinstance(schedule := values.get(name), Mapping):
                if set(schedule) - {"every", "until"} or "every" not in schedule:
                    raise ConfigError(
                        f"config.favorpp[{name!r}] must have 'every' and may have 'until', got {schedule!r}."
                    )
                values[name] = RedrawSchedule(**schedule)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON values, the inverse of :meth:`from_dict`.

        Returns:
            One entry per option.
        """
        options = asdict(self)
        options["exact_ends"] = list(self.exact_ends)
        if self._left_open and self.statistics == "sequence":
            options["preconditioning"] = None  # a later calibration chooses anew
        if isinstance(self.exact_window, tuple):
            options["exact_window"] = list(self.exact_window)
        options["layers"] = None if self.layers is None else list(self.layers)
        return options


def _layer_indices(layers: object) -> tuple[int, ...]:
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise ConfigError(f"layers must be None or a sequence of layer indices such as (0, 1, 2), got {layers!r}.")
    indices = tuple(layers)
    for index in indices:
        require_int("every entry of layers", index, minimum=0)
    if len(set(indices)) != len(indices) or not indices:
        raise ConfigError(f"layers must name at least one layer and none twice, got {indices!r}.")
    return tuple(sorted(indices))
