"""The public function: checks its arguments, then chooses the implementation."""

import math

import torch
from torch import Tensor

from hf_favorpp.attention.backends import choose_backend, note
from hf_favorpp.attention.options import Options
from hf_favorpp.attention.packing import pack, packing_mask, unpack
from hf_favorpp.attention.reference import reference_attention
from hf_favorpp.attention.relative_positions import RelativePositions
from hf_favorpp.attention.two_steps import packed_tokens, real_tokens, two_step_attention
from hf_favorpp.errors import ConfigError, InputError
from hf_favorpp.features.preconditioning import Preconditioner
from hf_favorpp.features.statistics import Statistics
from hf_favorpp.rules import (
    CHOSEN_KERNELS,
    POSITIVE_KERNELS,
    WITHOUT_PROJECTIONS,
    require_choice,
    require_neighbourhood_fits,
    require_preconditioning_fits,
)

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def favorpp_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    omega: Tensor | None,
    *,
    scaling: float | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    kernel: str = "favor++",
    preconditioning: str = "none",
    statistics: Statistics | Preconditioner | None = None,
    omega_key: Tensor | None = None,
    log_weights: Tensor | None = None,
    is_causal: bool = False,
    exact_window: int = 0,
    exact_ends: tuple[int, int] = (0, 0),
    relative_positions: RelativePositions | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attend in time and memory linear in length: softmax(scaling Q K^T) V estimated by random features.

    Sums and statistics are taken in float32 (float64 for float64 input), also under autocast. Padded positions are
    never read: they may hold anything, NaN included.

    Args:
        query: (B, H, Lq, d), float16, bfloat16, float32 or float64.
        key: (B, H_kv, Lk, d), same dtype; H must be a multiple of H_kv (grouped-query attention).
        value: (B, H_kv, Lk, D), same dtype.
        omega: Projections, (H, M, d) or (M, d), any float dtype. None only with ``"elu"``, ``"uniform"`` and
            ``"none"``, which draw none.
        scaling: Factor of the logits; None means d^-1/2.
        key_mask: (B, Lk), bool, True = real token; None means all.
        query_mask: (B, Lq), bool, True = real token; None means ``key_mask`` where Lq = Lk, else all. Padded
            queries stay out of the statistics.
        kernel: Feature map, see :class:`hf_favorpp.FavorppConfig`. ``"trig"`` has features of either sign, so its
            denominator can come near 0; it is there for comparison.
        preconditioning: ``"none"``, ``"center"``, ``"diagonal"`` or ``"full"``, see
            :func:`hf_favorpp.features.preconditioning.precondition`.
        statistics: Calibrated moments of scaled queries and keys, broadcastable to (B, H, ...), or the
            preconditioner that was made of them, which ``preconditioning`` does not change any more; None takes those
            of each sequence.
        omega_key: Projections of the keys where they are not those of the queries, shape of ``omega``, with
            ``"favor++"`` and ``"favor+"``. Only learnt projections have use for it.
        log_weights: Logarithms of the weights of the projections, one for each of omega, nats, with ``"favor++"`` and
            ``"favor+"``; None means equal ones. Projections that were chosen for the data have them, see
            :func:`hf_favorpp.features.fitting.fit_quadrature`.
        is_causal: Whether query i sees keys 0..i only; needs Lq = Lk, and ``statistics`` where the kernel or the
            preconditioning uses them, because those of a sequence look ahead.
        exact_window: w; a query attends exactly to the real keys of its own block of w real tokens, and through
            features to the others, under one normalisation. 0 for no block. Needs Lq = Lk and a positive kernel
            that estimates softmax. With w >= Lk the result is softmax attention.
        exact_ends: How many of the first and of the last real tokens every query attends to exactly.
        relative_positions: What is added to the logits by distance: exactly in the block of a query and those beside
            it, of ``exact_window`` tokens or as long as the positions ask for, and beyond as
            :mod:`hf_favorpp.attention.relative_positions` says. Needs Lq = Lk and a positive kernel that estimates
            softmax.
        cu_seqlens: Where each of N packed sequences begins in the single row of tokens, and where the last ends,
            (N + 1,), int32 or int64: B = 1, and there is no mask. Each attends to itself and has statistics of its
            own. None for rows that are one sequence each.
        max_seqlen: Tokens of the longest packed sequence, which may be given to spare looking.
        backend: ``"auto"``, ``"cpu"``, ``"triton"`` or ``"reference"``, see :mod:`hf_favorpp.attention.backends`.
            All but the reference keep no (L x M) tensor, and can be differentiated once.

    Returns:
        (B, H, Lq, D), dtype of ``query``. Zeros for a sequence without any real key; some finite number at padded
        queries.

    Raises:
        ConfigError: ``kernel``, ``preconditioning`` or ``backend`` is unknown, or they do not go together, or the
            backend cannot compute this.
        InputError: Shapes, dtypes or masks do not fit.

    Source:
        Likhosherstov et al. 2022, arXiv:2205.15317, Theorems 3.1 and 3.3; Choromanski et al. 2021, arXiv:2009.14794.
    """
    for name, choice in (("kernel", kernel), ("preconditioning", preconditioning), ("backend", backend)):
        require_choice(name, choice)
    require_preconditioning_fits(kernel, preconditioning)
    neighbourhood = require_neighbourhood_fits(kernel, exact_window, exact_ends)
    if relative_positions is not None:
        _check_relative_positions(relative_positions, query, key, kernel, is_causal, cu_seqlens)
    _check_tensors(query, key, value)
    omega = _checked_omega(omega, query, kernel)
    _check_mask("key_mask", key_mask, key)
    _check_mask("query_mask", query_mask, query)
    if query_mask is None and query.shape[-2] == key.shape[-2]:
        query_mask = key_mask
    for name, tensor, shape in (("log_weights", log_weights, omega.shape[:-1]), ("omega_key", omega_key, omega.shape)):
        if tensor is not None:
            _check_of_projections(name, tensor, tuple(shape), kernel)
    if scaling is None:
        scaling = float(query.shape[-1] ** -0.5)
    if not 0 < scaling < math.inf:
        raise InputError(
            f"scaling must be positive and finite, got {scaling!r}; negate the queries if it is negative."
        )
    if is_causal:
        _check_causal(query, key, kernel, preconditioning, statistics)
    if neighbourhood:
        _check_neighbourhood(query, key, exact_window, is_causal)
    if statistics is not None:
        _check_statistics(statistics, query, kernel, preconditioning)
    if cu_seqlens is not None:
        max_seqlen = _checked_packing(cu_seqlens, max_seqlen, query, key, key_mask, query_mask, is_causal)
    backend = choose_backend(
        backend,
        query,
        value,
        omega.shape[-2],
        kernel=kernel,
        is_causal=is_causal,
        statistics=statistics,
        relative=relative_positions is not None,
        sequences=None if cu_seqlens is None else cu_seqlens.shape[0] - 1,
    )
    note(backend)
    options = Options(
        scaling,
        kernel,
        preconditioning,
        statistics,
        log_weights,
        int(exact_window),
        (exact_ends[0], exact_ends[1]),
        relative_positions,
        omega_key,
    )
    packing = None if cu_seqlens is None or max_seqlen is None else (cu_seqlens, max_seqlen)
    if backend != "reference":
        keys = real_tokens(key_mask) if packing is None else packed_tokens(*packing)
        queries = keys if packing is not None or query_mask is key_mask else real_tokens(query_mask)
        if neighbourhood and query_mask is not None and query_mask is not key_mask:
            # there queries go by the rank of the keys, and padded ones among them are not to be read
            query = query.masked_fill(~query_mask[:, None, :, None], 0)
        return two_step_attention(query, key, value, omega, queries, keys, options, backend)
    if packing is not None:
        query, key, value = (unpack(t, *packing) for t in (query, key, value))
        key_mask = query_mask = packing_mask(*packing)
    out = reference_attention(query, key, value, omega, key_mask, query_mask, options, is_causal=is_causal)
    return out if packing is None else pack(out, packing[0])


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = f"got query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise InputError(f"query, key and value must be (batch, heads, length, head_dim); {shapes}.")
    if query.dtype not in _DTYPES or not query.dtype == key.dtype == value.dtype:
        raise InputError(
            f"query, key and value must share one floating dtype (float16, bfloat16, float32, float64), got "
            f"{query.dtype}, {key.dtype}, {value.dtype}."
        )
    if 0 in (*query.shape, *key.shape, *value.shape):
        raise InputError(f"empty tensors cannot be attended to: every dimension must be at least 1; {shapes}.")
    if query.shape[0] != key.shape[0] or query.shape[-1] != key.shape[-1] or key.shape[:-1] != value.shape[:-1]:
        raise InputError(
            f"query and key must share batch and head_dim, key and value batch, heads and length; {shapes}."
        )
    if query.shape[1] % key.shape[1]:
        raise InputError(f"the number of query heads must be a multiple of the number of key heads; {shapes}.")


def _checked_omega(omega: Tensor | None, query: Tensor, kernel: str) -> Tensor:
    heads, head_dim = query.shape[1], query.shape[-1]
    if omega is None and kernel in WITHOUT_PROJECTIONS:
        return query.new_zeros(1, head_dim)
    if omega is None or omega.ndim not in (2, 3) or omega.shape[-1] != head_dim or omega.shape[-2] < 1:
        got = None if omega is None else tuple(omega.shape)
        raise InputError(f"omega must be (H, M, d) or (M, d) with d = {head_dim} and M >= 1, got {got}.")
    if omega.ndim == 3 and omega.shape[0] != heads:
        raise InputError(f"omega has projections for {omega.shape[0]} heads, the query has {heads}.")
    return omega


def _check_statistics(
    statistics: Statistics | Preconditioner, query: Tensor, kernel: str, preconditioning: str
) -> None:
    if not isinstance(statistics, Statistics | Preconditioner):
        raise InputError(
            f"statistics must be Statistics (see hf_favorpp.features.statistics) or the Preconditioner made of them, "
            f"got {type(statistics).__name__}."
        )
    if isinstance(statistics, Statistics) and preconditioning == "full" and statistics.covariance_x is None:
        raise InputError("preconditioning='full' needs statistics with covariances; these hold variances only.")
    if isinstance(statistics, Preconditioner) and kernel == "favor++" and statistics.coefficient is None:
        raise InputError("kernel='favor++' needs a preconditioner with a coefficient, got one without.")
    moment = statistics.mean_x if isinstance(statistics, Statistics) else statistics.coefficient
    batch, heads, _, head_dim = query.shape
    if moment is None:
        return
    fits = moment.ndim == 3 and moment.shape[0] in (1, batch) and moment.shape[1] == heads
    if not fits or moment.shape[-1] not in (1, head_dim):
        raise InputError(
            f"statistics must be those of (batch or 1, heads, head_dim) = ({batch} or 1, {heads}, {head_dim}), got "
            f"{tuple(moment.shape)}."
        )


def _check_of_projections(name: str, tensor: object, shape: tuple[int, ...], kernel: str) -> None:
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name} must be a tensor, got {type(tensor).__name__}.")
    if kernel not in CHOSEN_KERNELS:
        raise ConfigError(f"{name} needs kernel='favor++' or 'favor+', got kernel={kernel!r}.")
    if tensor.shape != shape:
        raise InputError(f"{name} must have a shape that fits omega, {shape}, got {tuple(tensor.shape)}.")


def _check_mask(name: str, mask: Tensor | None, tokens: Tensor) -> None:
    if mask is None:
        return
    expected = (tokens.shape[0], tokens.shape[-2])
    if mask.dtype != torch.bool or tuple(mask.shape) != expected:
        raise InputError(
            f"{name} must be a bool tensor of shape (batch, length) = {expected}, True at real tokens, got "
            f"{mask.dtype} {tuple(mask.shape)}. A mask or bias that depends on query and key has no linear form."
        )


def _check_causal(
    query: Tensor, key: Tensor, kernel: str, preconditioning: str, statistics: Statistics | Preconditioner | None
) -> None:
    if kernel == "trig":
        raise ConfigError("is_causal=True needs a kernel with positive features, got kernel='trig'.")
    if query.shape[-2] != key.shape[-2]:
        raise InputError(
            f"is_causal=True needs as many queries as keys, got {query.shape[-2]} queries and {key.shape[-2]} keys."
        )
    if statistics is None and (kernel == "favor++" or preconditioning != "none"):
        raise InputError(
            f"is_causal=True with kernel={kernel!r} and preconditioning={preconditioning!r} needs calibrated "
            f"statistics: those of the sequence itself would look ahead. Pass statistics=Statistics(...), or use "
            f"kernel='favor+' with preconditioning='none'."
        )


def _check_neighbourhood(query: Tensor, key: Tensor, exact_window: object, is_causal: bool) -> None:
    if not isinstance(exact_window, int):
        raise InputError(
            f"exact_window must be a number of tokens here, got {exact_window!r}: queries do not say how their "
            f"tokens lie in an image. Order them by tile first, see hf_favorpp.attention.tiles."
        )
    if is_causal:
        raise ConfigError("exact_window and exact_ends are for bidirectional attention; got is_causal=True.")
    if query.shape[-2] != key.shape[-2]:
        raise InputError(
            f"exact_window and exact_ends need as many queries as keys, got {query.shape[-2]} queries and "
            f"{key.shape[-2]} keys."
        )


def _check_relative_positions(
    positions: RelativePositions, query: Tensor, key: Tensor, kernel: str, is_causal: bool, cu_seqlens: Tensor | None
) -> None:
    if kernel not in (*POSITIVE_KERNELS, "uniform", "none"):
        raise ConfigError(f"relative_positions need a positive kernel that estimates softmax, got kernel={kernel!r}.")
    if is_causal or cu_seqlens is not None or query.shape[-2] != key.shape[-2]:
        raise InputError(
            f"relative_positions are for bidirectional attention of each row to itself, got is_causal={is_causal}, "
            f"{query.shape[-2]} queries and {key.shape[-2]} keys, cu_seqlens={cu_seqlens}."
        )
    positions.require_fit(query)


def _checked_packing(
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    is_causal: bool,
) -> int:
    """Return the length of the longest packed sequence, or what is given for it."""
    if key_mask is not None or query_mask is not None or is_causal:
        raise InputError("packed sequences (cu_seqlens) have no padding and no causal form; got a mask or is_causal.")
    length = query.shape[-2]
    if query.shape[0] != 1 or key.shape[-2] != length:
        raise InputError(
            f"packed sequences (cu_seqlens) must be a single row with as many queries as keys, got query "
            f"{tuple(query.shape)} and key {tuple(key.shape)}."
        )
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"cu_seqlens must be (sequences + 1,) int32 or int64, got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}."
        )
    if torch.compiler.is_compiling() and max_seqlen is not None:
        return max_seqlen  # to look at the numbers would break the graph
    lengths = cu_seqlens.diff()
    longest, shortest = int(lengths.max()), int(lengths.min())
    covered = int(cu_seqlens[0]) == 0 and int(cu_seqlens[-1]) == length
    if not covered or shortest < 0 or (max_seqlen is not None and longest > max_seqlen):
        raise InputError(
            f"packed sequences must be one row that cu_seqlens covers from its start to its end, in parts no longer "
            f"than max_seqlen; got a row of {length} tokens, cu_seqlens from {int(cu_seqlens[0])} to "
            f"{int(cu_seqlens[-1])}, parts of {shortest} to {longest} tokens, max_seqlen={max_seqlen}."
        )
    return max_seqlen or max(longest, 1)
