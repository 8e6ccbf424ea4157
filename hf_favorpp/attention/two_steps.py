"""Feature attention through the operators of a fast backend."""

import torch
from torch import Tensor

from hf_favorpp.attention.folding import SharedTerm, fold
from hf_favorpp.attention.operators import OPERATORS
from hf_favorpp.attention.options import Options
from hf_favorpp.attention.other_blocks import other_blocks_operator
from hf_favorpp.features.gerf import feature_nodes
from hf_favorpp.features.statistics import Statistics

Sequences = tuple[Tensor, Tensor] | tuple[None, None]
"""order and count, see :mod:`hf_favorpp.attention.operators`."""


def real_tokens(mask: Tensor | None) -> Sequences:
    """Return the real tokens by rank.

    Args:
        mask: True = real token, (B, L), bool, or None for all.

    Returns:
        order (B, L) and count (B,), int32, or None twice.
    """
    if mask is None:
        return None, None
    order = mask.logical_not().byte().argsort(dim=-1, stable=True)
    return order.int(), mask.sum(-1, dtype=torch.int32)


def packed_tokens(cu_seqlens: Tensor, max_seqlen: int) -> Sequences:
    """Return the tokens of sequences that lie one after another in a single row.

    Args:
        cu_seqlens: Where each begins, and where the last ends, (N + 1,), int.
        max_seqlen: Tokens of the longest, or more.

    Returns:
        order (N, max_seqlen) and count (N,), int32.
    """
    order = cu_seqlens[:-1, None] + torch.arange(max_seqlen, device=cu_seqlens.device)
    return order.int(), cu_seqlens.diff().int()


def two_step_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    omega: Tensor,
    queries: Sequences,
    keys: Sequences,
    options: Options,
    backend: str,
) -> Tensor:
    """Compute :func:`hf_favorpp.favorpp_attention` on validated arguments by the operators of a backend.

    Args:
        query: (N, H, Lq, d), or one row of N packed sequences.
        key: (N, H_kv, Lk, d), or one row.
        value: (N, H_kv, Lk, D), or one row.
        omega: (H, M, d) or (M, d).
        queries: Real queries by rank; with a neighbourhood they are ``keys``.
        keys: Real keys by rank.
        options: With a positive kernel that estimates softmax.
        backend: Which operators.

    Returns:
        (N, H, Lq, D) or one row, dtype of ``query``, 0 at padded queries.
    """
    operators, scaling = OPERATORS[backend], options.scaling
    compute = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        of_heads = (query.shape[1], *omega.shape[-2:])
        omega = omega.to(compute).expand(of_heads)
        omega_key = None if options.omega_key is None else options.omega_key.to(compute).expand(of_heads)
        change = options.preconditioner(
            lambda covariance: _statistics(backend, query, key, queries, keys, scaling, covariance=covariance)
        ).to(compute)
        multiplied_in = query.dtype if backend == "triton" else compute
        nodes = feature_nodes(options.kernel, omega, omega_key, change.coefficient, options.log_weights)
        features = fold(nodes, change, scaling, multiplied_in)
        ranks = key.shape[-2] if keys[0] is None else keys[0].shape[1]
        block, (first, last) = min(options.exact_window, ranks), options.exact_ends
        ranges = (block, first, last)
        z, S = operators.summarise(key, value, features.key_projection, *features.key_term, scaling, *keys, *ranges)
        if block:
            z, S = other_blocks_operator(z, S)
        bias = z + features.bias.unsqueeze(2)
        if any(ranges):
            single = (key, value, features.query_projection, bias, S, *features.query_term, scaling, *keys, *ranges)
            out, _ = operators.attend(query, *single)
        else:
            no_keys = (None, None, features.query_projection, bias, S, *SharedTerm(), scaling, *queries, *ranges)
            out, _ = operators.attend(query, *no_keys)
        return out


def _statistics(
    backend: str,
    query: Tensor,
    key: Tensor,
    queries: Sequences,
    keys: Sequences,
    scaling: float,
    *,
    covariance: bool,
) -> Statistics:
    """Return the moments of each sequence, without gradient."""
    moments, groups = OPERATORS[backend].moments, query.shape[1] // key.shape[1]
    mean_x, variance_x, covariance_x = moments(query.detach(), *queries, covariance)
    mean_y, variance_y, covariance_y = moments(key.detach(), *keys, covariance)
    if groups > 1:
        mean_y, variance_y = (t.repeat_interleave(groups, dim=1) for t in (mean_y, variance_y))
    num_tokens = mean_x.new_full((mean_x.shape[0], 1), min(query.shape[-2], key.shape[-2]))
    for _, count in (queries, keys):
        if count is not None:
            num_tokens = torch.minimum(num_tokens, count.to(num_tokens.dtype).unsqueeze(-1))
    root = scaling**0.5
    return Statistics(
        mean_x * root,
        mean_y * root,
        variance_x * scaling,
        variance_y * scaling,
        num_tokens,
        covariance_x * scaling if covariance else None,
        covariance_y.repeat_interleave(groups, dim=1) * scaling if covariance else None,
    )
