"""The first step on a GPU: features attend over keys."""

from typing import Any

import torch
from torch import Tensor

from hf_favorpp.attention.layout import new_tokens
from hf_favorpp.attention.triton.launch import launch
from hf_favorpp.attention.triton.settings import (
    alignment,
    ceil_div,
    input_precision,
    matmul,
    padded,
    ranks_of_a_program,
    rounded,
    row_stride,
    splits,
    unit_stride,
)
from hf_favorpp.attention.triton.summarise_backward_kernels import (
    key_gradient_kernel,
    prepare_kernel,
    projection_gradient_kernel,
)
from hf_favorpp.attention.triton.summarise_kernels import merge_kernel, summarise_kernel
from hf_favorpp.attention.triton.summarise_tiles import SummariseTiles, summarise_tiles, term_tiles
from hf_favorpp.attention.triton.term_kernels import term_kernel


def summarise(
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    center: Tensor | None,
    root: Tensor | None,
    linear: Tensor | None,
    scale: float,
    order: Tensor | None,
    count: Tensor | None,
    block: int,
    first: int,
    last: int,
) -> tuple[Tensor, Tensor]:
    """Let the features attend over the keys of each block: :meth:`Backend.summarise`."""
    heads, num_features = projection.shape[1:3]
    shared = _arguments(key, value, projection, order, count)
    shared["term"] = term = _term(key, heads, center, root, linear, scale, order, count, first, last)
    tiles = summarise_tiles("summarise", key, value, num_features, block)
    sequences, _, ranks = term.shape
    feature_tiles = ceil_div(num_features, tiles.features)
    piece = block or ranks_of_a_program(ranks, sequences * heads * feature_tiles, tiles.tokens, key.device)
    pieces = ceil_div(ranks, piece) if block else max(1, ceil_div(ranks, piece))
    z = term.new_empty((sequences, heads, pieces, num_features))
    S = term.new_empty((*z.shape, value.shape[-1]))
    launch(
        summarise_kernel,
        (sequences * pieces * feature_tiles, heads),
        tiles.num_warps,
        tiles.num_stages,
        z=z,
        S=S,
        piece=piece,
        pieces=pieces,
        TOKENS=tiles.tokens,
        FEATURES=tiles.features,
        **shared,
    )
    return (z, S) if block or pieces == 1 else _merge(z, S)


def summarise_backward(
    grad_z: Tensor,
    grad_S: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    center: Tensor | None,
    root: Tensor | None,
    linear: Tensor | None,
    scale: float,
    order: Tensor | None,
    count: Tensor | None,
    block: int,
    first: int,
    last: int,
    z: Tensor,
    S: Tensor,
    need_projection: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of key, value and projection: :meth:`Backend.summarise_backward`."""
    shared = _arguments(key, value, projection, order, count)
    shared |= _prepare(grad_z, grad_S, z, S, value.dtype)
    shared["term"] = _term(key, projection.shape[1], center, root, linear, scale, order, count, first, last)
    shared["blocks"] = z.shape[2]
    span = min(block, shared["ranks"]) or max(1, shared["ranks"])
    tiles = summarise_tiles("key_gradient", key, value, projection.shape[2], block)
    grad_key, grad_value = _key_gradient(key, value, center, root, linear, scale, span, tiles, shared)
    if not need_projection:
        return grad_key, grad_value, z.new_empty(0)
    tiles = summarise_tiles("projection_gradient", key, value, projection.shape[2], block)
    return grad_key, grad_value, _projection_gradient(projection, span, tiles, shared)


def _key_gradient(
    key: Tensor,
    value: Tensor,
    center: Tensor | None,
    root: Tensor | None,
    linear: Tensor | None,
    scale: float,
    block: int,
    tiles: SummariseTiles,
    shared: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return the gradients of key and value; ``block`` is that of all ranks where there is one."""
    gram = None if root is None else matmul(root.mT, root)
    unnamed = shared["order"] is not None or shared["count"] is not None
    grad_key, grad_value = new_tokens(key, zero=unnamed), new_tokens(value, zero=unnamed)
    launch(
        key_gradient_kernel,
        (shared["z"].shape[0] * shared["blocks"] * ceil_div(block, tiles.tokens), key.shape[1]),
        tiles.num_warps,
        tiles.num_stages,
        **_constants(center=center, gram=gram, linear=linear),
        grad_key=grad_key,
        grad_value=grad_value,
        scale=float(scale),
        grad_key_row_stride=row_stride(grad_key),
        grad_value_row_stride=row_stride(grad_value),
        block=block,
        TOKENS=tiles.tokens,
        FEATURES=tiles.features,
        CHUNK=tiles.chunk,
        **shared,
    )
    return grad_key, grad_value


def _projection_gradient(projection: Tensor, block: int, tiles: SummariseTiles, shared: dict[str, Any]) -> Tensor:
    """Sum over keys, split by split, and then over the splits and the sequences that share a projection."""
    sequences, blocks, (_, heads, num_features, head_dim) = shared["z"].shape[0], shared["blocks"], projection.shape
    feature_tiles = ceil_div(num_features, tiles.features)
    programs, device = sequences * heads * feature_tiles, projection.device
    if blocks == 1:
        piece = ranks_of_a_program(block, programs, tiles.tokens, device)
        pieces, steps = ceil_div(block, piece), 1
    else:
        piece, pieces, steps = block, blocks, max(1, ceil_div(blocks, splits(programs, device)))
    parts = ceil_div(pieces, steps)
    partial: Tensor = shared["z"].new_empty((sequences, parts, heads, num_features, head_dim))
    launch(
        projection_gradient_kernel,
        (sequences * parts * feature_tiles, heads),
        tiles.num_warps,
        tiles.num_stages,
        grad_projection=partial,
        piece=piece,
        pieces=pieces,
        steps=steps,
        TOKENS=tiles.tokens,
        FEATURES=tiles.features,
        **shared,
    )
    return partial.sum((0, 1)).unsqueeze(0) if projection.shape[0] == 1 else partial.sum(1)


def _arguments(
    key: Tensor, value: Tensor, projection: Tensor, order: Tensor | None, count: Tensor | None
) -> dict[str, Any]:
    """Return the arguments that all kernels over keys have in common, but for the term and the tiles."""
    key, value = unit_stride(key), unit_stride(value)
    arguments: dict[str, Any] = {
        "key": key,
        "value": value,
        **_constants(projection=rounded(projection, key.dtype)),
        "order": order if order is None else order.contiguous(),
        "count": count,
        "group": projection.shape[1] // key.shape[1],
        "ranks": key.shape[2] if order is None else order.shape[1],
        "num_features": projection.shape[2],
        "HEAD_DIM": key.shape[-1],
        "VALUE_DIM": value.shape[-1],
        "HEAD_PADDED": padded(key.shape[-1]),
        "VALUE_PADDED": padded(value.shape[-1]),
        "PRECISION": input_precision(key.dtype),
        "ALIGNMENT": alignment(key, value),
    }
    for name, tokens in (("key", key), ("value", value)):
        arguments[f"{name}_row_stride"] = row_stride(tokens)
        arguments[f"{name}_head_stride"], arguments[f"{name}_token_stride"] = tokens.stride()[1:3]
    return arguments


def _constants(**tensors: Tensor | None) -> dict[str, Any]:
    """Return tensors (N or 1, ...) made contiguous by name, and their strides from one sequence to the next."""
    arguments: dict[str, Any] = {name: t if t is None else t.contiguous() for name, t in tensors.items()}
    return arguments | {f"{name}_stride": 0 if t is None else row_stride(t) for name, t in arguments.items()}


def _term(
    key: Tensor,
    heads: int,
    center: Tensor | None,
    root: Tensor | None,
    linear: Tensor | None,
    scale: float,
    order: Tensor | None,
    count: Tensor | None,
    first: int,
    last: int,
) -> Tensor:
    """Return what all features of a key share, (N, H, ranks), log2, -inf for ranks that belong to no block.

    One number a key and head: computed once, and not for every tile of features, where it would take the registers
    that hold R, c and g as well.
    """
    key = unit_stride(key)
    sequences, ranks = (key.shape[0], key.shape[2]) if order is None else order.shape
    term = torch.empty((sequences, heads, ranks), dtype=torch.float32, device=key.device)
    tokens, chunk, num_warps = term_tiles(key)
    launch(
        term_kernel,
        (sequences * ceil_div(ranks, tokens), heads),
        num_warps,
        2,
        tokens=key,
        **_constants(center=center, root=root, linear=linear),
        order=order if order is None else order.contiguous(),
        count=count,
        term=term,
        scale=float(scale),
        row_stride=row_stride(key),
        head_stride=key.stride(1),
        token_stride=key.stride(2),
        group=heads // key.shape[1],
        ranks=ranks,
        first=first,
        last=last,
        WIDTH=key.shape[-1],
        TOKENS=tokens,
        CHUNK=chunk,
        PRECISION=input_precision(key.dtype),
        ALIGNMENT=alignment(key),
    )
    return term


def _prepare(grad_z: Tensor, grad_S: Tensor, z: Tensor, S: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Return what the keys need of the gradients that come in, by the kernels' names."""
    grad_z, grad_S, z, S = (t.contiguous() for t in (grad_z, grad_S, z, S))
    prepared = {"amplitude": torch.empty_like(z), "delta": torch.empty_like(z)}
    prepared["direction"] = torch.empty_like(S, dtype=dtype)
    width = padded(S.shape[-1])
    rows = max(1, 2048 // width)
    launch(
        prepare_kernel,
        (ceil_div(z.numel(), rows),),
        4,
        1,
        grad_z=grad_z,
        grad_S=grad_S,
        z=z,
        S=S,
        num_rows=z.numel(),
        VALUE_DIM=S.shape[-1],
        VALUE_PADDED=width,
        ROWS=rows,
        **prepared,
    )
    return {"z": z, **prepared}


def _merge(z: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the pieces of the only block: (N, H, pieces, M) and (N, H, pieces, M, D) become one of each."""
    sequences, heads, pieces, num_features = z.shape
    merged_z = z.new_empty((sequences, heads, 1, num_features))
    merged_S = S.new_empty((*merged_z.shape, S.shape[-1]))
    width = padded(S.shape[-1])
    features = max(1, 2048 // width)
    launch(
        merge_kernel,
        (sequences * heads * ceil_div(num_features, features),),
        4,
        1,
        z_pieces=z,
        S_pieces=S,
        z=merged_z,
        S=merged_S,
        num_features=num_features,
        pieces=pieces,
        VALUE_DIM=S.shape[-1],
        VALUE_PADDED=width,
        FEATURES=features,
    )
    return merged_z, merged_S
