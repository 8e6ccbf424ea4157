"""The options of a conversion: a frozen dataclass that validates itself and is plain JSON in ``config.json``."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from hf_favorpp.errors import ConfigError

KERNELS = ("favor++", "favor+", "favor+hyperbolic", "relu", "elu", "trig")
SOFTMAX_KERNELS = ("favor++", "favor+", "favor+hyperbolic", "trig")
"""The kernels that estimate softmax attention. ``relu`` and ``elu`` are attentions of their own."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "kernel": KERNELS,
    "projection": ("orthogonal", "iid"),
    "preconditioning": ("none", "center"),
    "statistics": ("sequence",),
    "backend": ("auto", "reference"),
}
_PLANNED: dict[str, tuple[str, ...]] = {
    "projection": ("hadamard", "givens"),
    "preconditioning": ("diagonal", "full"),
    "statistics": ("calibrated",),
    "backend": ("cpu", "triton"),
}


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
        _require_int("RedrawSchedule.every", self.every, minimum=1)
        if self.until is not None:
            _require_int("RedrawSchedule.until", self.until, minimum=0)

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

    Attributes:
        num_features: M, the number of random projections per head, >= 1. Cost grows linearly with it, the variance
            of the estimate falls as 1/M. ``favor+hyperbolic`` and ``trig`` evaluate two features per projection.
            ``elu`` has ``head_dim`` features by definition and draws none.
        kernel: ``"favor++"`` (CRT Theorem 3.3), ``"favor+"`` (Performer Lemma 1), and for comparison
            ``"favor+hyperbolic"`` (Performer Lemma 1, second form), ``"trig"`` (random Fourier features), ``"relu"``
            (Performer-ReLU) and ``"elu"`` (elu + 1, Katharopoulos et al. 2020). The last two do not estimate softmax.
        projection: ``"orthogonal"`` (blocks of head_dim orthogonal rows with chi(d) norms) or ``"iid"``.
        preconditioning: ``"center"`` shifts queries and keys by their means, which leaves softmax as it is and
            shrinks the variance; ``"none"`` is the paper. None chooses ``"center"`` where the kernel estimates
            softmax, else ``"none"``.
        statistics: ``"sequence"``: per sequence and head over real tokens, without gradient.
        exact_window: Tokens per exactly attended block; 0, the only value of this version, is the paper.
        exact_ends: How many first and last real tokens every query sees exactly; (0, 0), the only value of this
            version, is the paper.
        layers: Indices of the attention layers to convert, counted from 0; None converts all that can be. The rest
            stay softmax.
        redraw: When projections are drawn anew in training; None keeps the first draw.
        backend: ``"auto"`` or ``"reference"``.
        seed: Seed of the projections. They depend on (seed, layer, draw) alone, not on any global random state.

    Raises:
        ConfigError: An option has an impossible value, or two options contradict each other.
    """

    num_features: int = 128
    kernel: str = "favor++"
    projection: str = "orthogonal"
    preconditioning: str | None = None
    statistics: str = "sequence"
    exact_window: int = 0
    exact_ends: tuple[int, int] = (0, 0)
    layers: tuple[int, ...] | None = None
    redraw: RedrawSchedule | None = None
    backend: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        _require_int("num_features", self.num_features, minimum=1)
        _require_int("seed", self.seed, minimum=0)
        require_choice("kernel", self.kernel)
        if self.preconditioning is None:
            object.__setattr__(self, "preconditioning", "center" if self.kernel in SOFTMAX_KERNELS else "none")
        for name in ("projection", "preconditioning", "statistics", "backend"):
            require_choice(name, getattr(self, name))
        require_preconditioning_fits(self.kernel, str(self.preconditioning))
        _require_int("exact_window", self.exact_window, minimum=0)
        if self.exact_window or self.exact_ends not in ((0, 0), [0, 0]):
            raise ConfigError(
                f"exact neighbourhoods are not available in this version: exact_window must be 0 and exact_ends "
                f"(0, 0), got {self.exact_window!r} and {self.exact_ends!r}."
            )
        object.__setattr__(self, "exact_ends", tuple(self.exact_ends))
        if self.layers is not None:
            object.__setattr__(self, "layers", _layer_indices(self.layers))
        if self.redraw is not None and not isinstance(self.redraw, RedrawSchedule):
            raise ConfigError(f"redraw must be a RedrawSchedule(every=..., until=...) or None, got {self.redraw!r}.")

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
        return cls(**{"kernel": "favor++", "projection": "orthogonal", "preconditioning": "none", **options})

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
        if isinstance(redraw := values.get("redraw"), Mapping):
            if set(redraw) - {"every", "until"} or "every" not in redraw:
                raise ConfigError(f"config.favorpp['redraw'] must have 'every' and may have 'until', got {redraw!r}.")
            values["redraw"] = RedrawSchedule(**redraw)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON values, the inverse of :meth:`from_dict`.

        Returns:
            One entry per option.
        """
        options = asdict(self)
        options["exact_ends"] = list(self.exact_ends)
        options["layers"] = None if self.layers is None else list(self.layers)
        return options


def require_preconditioning_fits(kernel: str, preconditioning: str) -> None:
    """Refuse to precondition a kernel that does not estimate softmax.

    Args:
        kernel: One of :data:`KERNELS`.
        preconditioning: The preconditioning asked for.

    Raises:
        ConfigError: Centring would change what the kernel computes, since only softmax is invariant under it.
    """
    if preconditioning != "none" and kernel not in SOFTMAX_KERNELS:
        raise ConfigError(
            f"preconditioning={preconditioning!r} needs a kernel that estimates softmax "
            f"({', '.join(SOFTMAX_KERNELS)}), got kernel={kernel!r}: only softmax is invariant under a shift of the "
            f"keys. Use preconditioning='none' with it."
        )


def require_choice(name: str, value: object) -> None:
    """Refuse a value that an option does not have, or does not have yet.

    Args:
        name: The option, such as ``"kernel"``.
        value: What was given for it.

    Raises:
        ConfigError: The message lists the choices.
    """
    if value in _CHOICES[name]:
        return
    choices = ", ".join(repr(choice) for choice in _CHOICES[name])
    if value in _PLANNED.get(name, ()):
        raise ConfigError(f"{name}={value!r} is not available in this version; choose one of {choices}.")
    raise ConfigError(f"{name} must be one of {choices}, got {value!r}.")


def _require_int(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} must be an integer >= {minimum}, got {value!r}.")


def _layer_indices(layers: object) -> tuple[int, ...]:
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise ConfigError(f"layers must be None or a sequence of layer indices such as (0, 1, 2), got {layers!r}.")
    indices = tuple(layers)
    for index in indices:
        _require_int("every entry of layers", index, minimum=0)
    if len(set(indices)) != len(indices) or not indices:
        raise ConfigError(f"layers must name at least one layer and none twice, got {indices!r}.")
    return tuple(sorted(indices))
