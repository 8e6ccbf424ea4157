"""Which options there are, and which go together: rules that a configuration and a single call of attention share."""

from hf_favorpp.errors import ConfigError

KERNELS = ("favor++", "favor+", "favor+hyperbolic", "relu", "elu", "trig", "uniform", "none")
"""The values of ``FavorppConfig.kernel``."""
SOFTMAX_KERNELS = ("favor++", "favor+", "favor+hyperbolic", "trig")
"""The kernels that estimate softmax attention. ``relu`` and ``elu`` are attentions of their own, and the last two
are controls."""
POSITIVE_KERNELS = ("favor++", "favor+", "favor+hyperbolic")
"""Those of them whose features are positive, so that they stand beside exact logits in one softmax."""
WITHOUT_PROJECTIONS = {
    "elu": "head_dim features by definition",
    "uniform": "one constant feature",
    "none": "no features",
}
"""The kernels that draw no projections, and what they have instead."""

CHOSEN_KERNELS = ("favor++", "favor+")
"""The kernels whose projections have weights of their own, and can be chosen or learnt one by one."""

PROJECTIONS = ("orthogonal", "antithetic", "iid", "hadamard", "givens")
"""The values of ``FavorppConfig.projection``."""
NORMS = ("chi", "sqrt_d")
"""The norms that rows of projections can have: those of normal vectors, or all sqrt(d)."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "kernel": KERNELS,
    "projection": PROJECTIONS,
    "norms": NORMS,
    "preconditioning": ("none", "center", "diagonal", "full"),
    "statistics": ("sequence", "calibrated"),
    "learnable": ("projections",),
    "backend": ("auto", "reference", "cpu", "triton"),
}


def require_preconditioning_fits(kernel: str, preconditioning: str) -> None:
    """Refuse to precondition a kernel that does not estimate softmax.

    Args:
        kernel: One of :data:`KERNELS`.
        preconditioning: The preconditioning asked for.

    Raises:
        ConfigError: It would change what the kernel computes, since only softmax is invariant under it.
    """
    if preconditioning != "none" and kernel not in SOFTMAX_KERNELS:
        raise ConfigError(
            f"preconditioning={preconditioning!r} needs a kernel that estimates softmax "
            f"({', '.join(SOFTMAX_KERNELS)}), got kernel={kernel!r}: only softmax is invariant under a change "
            f"of variables. Use preconditioning='none' with it."
        )


def require_statistics_are_used(kernel: str, preconditioning: str) -> None:
    """Refuse to calibrate what has no use for statistics.

    Args:
        kernel: One of :data:`KERNELS`.
        preconditioning: The preconditioning.

    Raises:
        ConfigError: Neither the kernel's coefficient nor the preconditioning is computed from statistics.
    """
    if kernel != "favor++" and preconditioning == "none":
        raise ConfigError(
            f"kernel={kernel!r} with preconditioning='none' uses no statistics, so there is nothing to calibrate. Use "
            f"statistics='sequence', kernel='favor++', or a preconditioning."
        )


def require_neighbourhood_fits(kernel: str, exact_window: object, exact_ends: object) -> bool:
    """Refuse an exact neighbourhood of an impossible size, or beside features that are on another scale.

    Args:
        kernel: One of :data:`KERNELS`.
        exact_window: Tokens per block, or rows and columns of a tile of patches.
        exact_ends: How many first and last tokens every query sees exactly.

    Returns:
        Whether there is a neighbourhood at all.

    Raises:
        ConfigError: A size is negative or not an integer, ``kernel`` has no positive features for softmax, or it is
            ``"none"`` and there is no neighbourhood.
    """
    sides = exact_window if isinstance(exact_window, tuple) else (exact_window,)
    if isinstance(exact_window, tuple) and len(exact_window) != 2:
        raise ConfigError(f"exact_window must be a number of tokens or (rows, columns), got {exact_window!r}.")
    for side in sides:
        require_int("exact_window", side, minimum=1 if isinstance(exact_window, tuple) else 0)
    if not isinstance(exact_ends, tuple) or len(exact_ends) != 2:
        raise ConfigError(f"exact_ends must be (first, last), two numbers of tokens, got {exact_ends!r}.")
    for count in exact_ends:
        require_int("every entry of exact_ends", count, minimum=0)
    if isinstance(exact_window, tuple) and exact_ends != (0, 0):
        raise ConfigError(
            f"exact_ends must be (0, 0) with a tile of patches, got {exact_ends!r}: the class token is exact for all."
        )
    neighbourhood = sides != (0,) or exact_ends != (0, 0)
    if kernel == "none" and not neighbourhood:
        raise ConfigError(
            "kernel='none' attends to the exact neighbourhood alone, and there is none: exact_window and exact_ends "
            "are 0. Give one of them, or choose another kernel."
        )
    if neighbourhood and kernel not in (*POSITIVE_KERNELS, "none"):
        raise ConfigError(
            f"exact_window and exact_ends put exact logits beside features, so they need a kernel that estimates "
            f"softmax by positive features ({', '.join(POSITIVE_KERNELS)}), got kernel={kernel!r}."
        )
    return neighbourhood


def require_choice(name: str, value: object) -> None:
    """Refuse a value that an option does not have.

    Args:
        name: The option, such as ``"kernel"``.
        value: What was given for it.

    Raises:
        ConfigError: The message lists the choices.
    """
    if value in _CHOICES[name]:
        return
    choices = ", ".join(repr(choice) for choice in _CHOICES[name])
    raise ConfigError(f"{name} must be one of {choices}, got {value!r}.")


def require_int(name: str, value: object, minimum: int) -> None:
    """Refuse what is not an integer, or too small.

    Args:
        name: The option.
        value: What was given for it.
        minimum: The smallest value allowed.

    Raises:
        ConfigError: The message names the rule and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} must be an integer >= {minimum}, got {value!r}.")
