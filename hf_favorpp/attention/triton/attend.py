"""The second step on a GPU: queries attend over features, and over single keys beside them."""

from typing import Any

import torch
from torch import Tensor

from hf_favorpp.attention.layout import new_tokens
from hf_favorpp.attention.triton.attend_backward_kernels import landmarks_backward_kernel, query_backward_kernel
from hf_favorpp.attention.triton.attend_kernels import attend_kernel
from hf_favorpp.attention.triton.attend_keys_kernels import ends_kernel, single_keys_backward_kernel
from hf_favorpp.attention.triton.attend_tiles import AttendTiles, attend_tiles
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


def attend(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    projection: Tensor,
    bias: Tensor,
    S: Tensor,
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
    """Let each query attend over features and single keys: :meth:`Backend.attend`."""
    constants = {"projection": projection, "center": center, "root": root, "linear": linear}
    landmarks = {"bias": bias, "S": S}
    ranks = {"order": order, "count": count, "block": block, "first": first, "last": last}
    out = new_tokens(query, S.shape[-1], zero=order is not None or count is not None)
    tokens = {"query": query, "key": key, "value": value, "out": out}
    arguments = _arguments(tokens, constants, landmarks, ranks) | {"scale": float(scale)}
    arguments["logsumexp"] = S.new_empty((*S.shape[:2], arguments["ranks"]))
    _start_queries(attend_kernel, "attend", arguments)
    return out, arguments["logsumexp"]


def attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    projection: Tensor,
    bias: Tensor,
    S: Tensor,
    center: Tensor | None,
    root: Tensor | None,
    linear: Tensor | None,
    scale: float,
    order: Tensor | None,
    count: Tensor | None,
    block: int,
    first: int,
    last: int,
    out: Tensor,
    logsumexp: Tensor,
    need_projection: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, projection, bias and S: :meth:`Backend.attend_backward`."""
    constants = {"projection": projection, "center": center, "root": root, "linear": linear}
    constants["gram"] = None if root is None or key is None else matmul(root.mT, root)
    landmarks = {"bias": bias, "S": S, "logsumexp": logsumexp}
    ranks = {"order": order, "count": count, "block": block, "first": first, "last": last}
    unnamed = order is not None or count is not None
    grad_query = new_tokens(query, zero=unnamed)
    tokens = {"query": query, "key": key, "value": value, "out": out, "grad_out": grad_out, "grad_query": grad_query}
    if key is not None and value is not None:
        tokens["grad_key"] = new_tokens(key, zero=unnamed or block == 0)
        tokens["grad_value"] = new_tokens(value, zero=unnamed or block == 0)
    arguments = _arguments(tokens, constants, landmarks, ranks) | {"scale": float(scale)}
    arguments |= {name: torch.empty_like(arguments["logsumexp"]) for name in ("delta", "shift")}
    _start_queries(query_backward_kernel, "query_gradient", arguments)
    landmark_gradients = _landmark_gradients(arguments, need_projection)
    if key is None:
        return grad_query, query.new_empty(0), query.new_empty(0), *landmark_gradients
    if block:
        _own_key_gradients(arguments)
    if first + last:
        _end_gradients(arguments)
    return grad_query, arguments["grad_key"], arguments["grad_value"], *landmark_gradients


def _start_queries(kernel: Any, name: str, arguments: dict[str, Any]) -> None:
    """Start a kernel whose programs own queries."""
    tiles, block = _tiles(name, arguments), arguments["block"]
    sizes = {
        "OWN_BLOCK": block > 0,
        "KEYS": min(tiles.features, padded(block)) if block else tiles.features,
        "END_KEYS": min(tiles.features, padded(arguments["first"] + arguments["last"])),
        "tiles": ceil_div(arguments["width"], tiles.tokens),
    }
    programs = arguments["sequences"] * ceil_div(arguments["ranks"], arguments["width"]) * sizes["tiles"]
    _start(kernel, (programs, arguments["heads"]), tiles, arguments | sizes)


def _landmark_gradients(arguments: dict[str, Any], need_projection: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of projection, bias and S.

    The features of a block of queries get theirs at once. A single block is cut into parts, whose sum they get.
    """
    sequences, heads, _, num_features, value_dim = arguments["S"].shape
    projection, bias, ranks, block = (arguments[name] for name in ("projection", "bias", "ranks", "block"))
    tiles = _tiles("landmark_gradient", arguments)
    feature_tiles = ceil_div(num_features, tiles.features)
    programs = sequences * heads * feature_tiles
    width = arguments["width"] if block else ranks_of_a_program(ranks, programs, tiles.tokens, bias.device)
    parts = ceil_div(ranks, width)
    run = max(1, ceil_div(parts, splits(programs, bias.device))) if block and need_projection else 1
    runs = ceil_div(parts, run)
    grad_bias = bias.new_empty((sequences, heads, parts, num_features))
    grad_S = bias.new_empty((*grad_bias.shape, value_dim))
    grad_projection = bias.new_empty((sequences, heads, runs, *projection.shape[2:])) if need_projection else None
    own = {"width": width, "run": run, "grad_bias": grad_bias, "grad_S": grad_S, "grad_projection": grad_projection}
    _start(landmarks_backward_kernel, (sequences * runs * feature_tiles, heads), tiles, arguments | own)
    if not block and parts != 1:
        grad_bias, grad_S = grad_bias.sum(2, keepdim=True), grad_S.sum(2, keepdim=True)
    if grad_projection is None:
        return bias.new_empty(0), grad_bias, grad_S
    if projection.shape[0] < sequences:
        return grad_projection.sum((0, 2)).unsqueeze(0), grad_bias, grad_S
    return grad_projection.sum(2), grad_bias, grad_S


def _own_key_gradients(arguments: dict[str, Any]) -> None:
    """Write the gradients of all keys and values but the ends, each of which the queries of its own block see."""
    tiles = _tiles("key_gradient", arguments)
    key_tiles = ceil_div(arguments["width"], tiles.features)
    programs = arguments["sequences"] * ceil_div(arguments["ranks"], arguments["width"]) * key_tiles
    own = {"ENDS": False, "KEYS": tiles.features, "tiles": key_tiles}
    _start(single_keys_backward_kernel, (programs, arguments["key"].shape[1]), tiles, arguments | own)


def _end_gradients(arguments: dict[str, Any]) -> None:
    """Write the gradients of the ends, which all queries see: part by part of the queries, then summed."""
    sequences, ranks, key, value = (arguments[name] for name in ("sequences", "ranks", "key", "value"))
    ends, key_heads, device = arguments["first"] + arguments["last"], key.shape[1], key.device
    tiles = _tiles("key_gradient", arguments | {"block": 0})
    tiles = tiles._replace(features=min(tiles.features, padded(ends)))
    key_tiles = ceil_div(ends, tiles.features)
    width = ranks_of_a_program(ranks, sequences * key_heads * key_tiles, tiles.tokens, device)
    parts = ceil_div(ranks, width)
    shape = (sequences, key_heads, parts, ends)
    part_key = torch.empty((*shape, key.shape[-1]), dtype=torch.float32, device=device)
    part_value = torch.empty((*shape, value.shape[-1]), dtype=torch.float32, device=device)
    own = {"ENDS": True, "KEYS": tiles.features, "tiles": key_tiles, "width": width, "parts": parts}
    written = {"grad_key": part_key, "grad_value": part_value}
    grid = (sequences * parts * key_tiles, key_heads)
    _start(single_keys_backward_kernel, grid, tiles, arguments | own | written)
    read = {"part_key": part_key, "part_value": part_value}
    _start(ends_kernel, (sequences * key_tiles, key_heads), tiles, arguments | own | read)


def _start(kernel: Any, grid: tuple[int, int], tiles: AttendTiles, arguments: dict[str, Any]) -> None:
    """Start a kernel with those of the arguments that it takes."""
    arguments = arguments | {"TOKENS": tiles.tokens, "FEATURES": tiles.features, "CHUNK": tiles.chunk}
    taken = {name: arguments[name] for name in kernel.arg_names}
    launch(kernel, grid, tiles.num_warps, tiles.num_stages, **taken)


def _tiles(kernel: str, arguments: dict[str, Any]) -> AttendTiles:
    """Return the tiles of a kernel."""
    width = max(arguments["HEAD_DIM"], arguments["VALUE_DIM"])
    return attend_tiles(kernel, arguments["query"].dtype, width, arguments["block"])


def _arguments(
    tokens: dict[str, Tensor | None],
    constants: dict[str, Tensor | None],
    landmarks: dict[str, Tensor],
    ranks: dict[str, Any],
) -> dict[str, Any]:
    """Return the arguments that kernels have in common, and the sizes that they follow from, by name.

    Args:
        tokens: Tensors (N or 1, heads, L, width) that kernels read or write by their strides.
        constants: projection, center, root and linear, (N or 1, H, ...).
        landmarks: Tensors (N, H, ...) of float32.
        ranks: order, count, block, first and last.

    Returns:
        Whatever a kernel may take, except what is its own.
    """
    tokens = {name: None if t is None else unit_stride(t) for name, t in tokens.items()}
    query, key, projection = tokens["query"], tokens["key"], constants["projection"]
    assert query is not None
    assert projection is not None
    arguments: dict[str, Any] = {**tokens, **ranks}
    for name, t in tokens.items():
        strides = (0, 0, 0) if t is None else (row_stride(t), t.stride(1), t.stride(2))
        arguments |= {f"{name}_{s}_stride": n for s, n in zip(("row", "head", "token"), strides, strict=True)}
    constants = {name: None if t is None else t.contiguous() for name, t in constants.items()}
    constants["projection"] = rounded(projection, query.dtype)
    arguments |= constants | {f"{name}_stride": 0 if t is None else row_stride(t) for name, t in constants.items()}
    order, count, S = ranks["order"], ranks["count"], landmarks["S"]
    arguments |= {name: t.contiguous() for name, t in landmarks.items()}
    if not ranks["block"]:  # every tile of queries reads the same S: better half as much of it
        arguments["S"] = arguments["S"].to(query.dtype)
    num_ranks = query.shape[2] if order is None else order.shape[1]
    return arguments | {
        "order": None if order is None else order.contiguous(),
        "count": None if count is None else count.contiguous(),
        "sequences": S.shape[0],
        "heads": S.shape[1],
        "landmark_blocks": S.shape[2],
        "num_features": S.shape[3],
        "ranks": num_ranks,
        "width": max(1, min(ranks["block"] or num_ranks, num_ranks)),
        "group": 1 if key is None else S.shape[1] // key.shape[1],
        "HEAD_DIM": query.shape[-1],
        "VALUE_DIM": S.shape[-1],
        "HEAD_PADDED": padded(query.shape[-1]),
        "VALUE_PADDED": padded(S.shape[-1]),
        "ALIGNMENT": alignment(*tokens.values()),
        "PRECISION": input_precision(query.dtype),
    }
