r"""The two steps of feature attention as operators of PyTorch, one set of them for every fast backend.

*Summarise*: the features attend over the keys. *Attend*: the queries attend over the features and, in a
neighbourhood, over single keys beside them. Autograd, compilation, export and fake tensors see two operators a step,
forward and backward; what a backend does inside them is a few plain functions.

Tokens are addressed by rank. ``order`` (N, L) int32 holds, for each of N sequences, the positions of its tokens in
their row, ascending, ``count`` (N,) int32 how many there are; the rest of ``order`` is not looked at, and tokens that
no rank names are never read. Without them every row is one sequence of all its positions. There are as many rows as
sequences, or a single row that all of them share (packed sequences).
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.library import custom_op, infer_schema

from hf_favorpp.attention.layout import new_tokens


class Backend(Protocol):
    """The functions that compute the two steps and their gradients; a package beside this module has them."""

    @staticmethod
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
        r"""Let the features attend over the keys of each block.

        .. math:: z_{bm} = \log \sum_{j \in b} \phi_m(k_j), \qquad S_{bm} = \sum_{j \in b} \phi_m(k_j) e^{-z_{bm}} v_j

        with :math:`\log\phi_m(k) = P_m^\top k + g^\top (k - c) - \tfrac s2 |R (k - c)|^2`.

        Args:
            key: (N or 1, H_kv, L, d), any strides, float16, bfloat16, float32 (or float64 where the backend has it).
            value: (N or 1, H_kv, L, D), same dtype, any strides.
            projection: P, (N or 1, H, M, d), float32 (float64 for float64 keys), H a multiple of H_kv.
            center: c, (N or 1, H, d), dtype of ``projection``, or None for 0.
            root: R, (N or 1, H, d, d), or None for the identity.
            linear: g, (N or 1, H, d), or None for 0.
            scale: s.
            order: Positions by rank, or None.
            count: Tokens of each sequence, or None.
            block: Ranks per block, 0 for a single block of all.
            first: This many first ranks of each sequence belong to no block.
            last: This many last ranks of each sequence belong to no block.

        Returns:
            z, (N, H, blocks, M), nats, and S, (N, H, blocks, M, D), dtype of ``projection``; -inf and 0 for a block
            without a key. With ``block`` > 0 there are ceil(ranks / block) blocks, ranks being the last dimension of
            ``order`` or L.
        """

    @staticmethod
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
        """Return the gradients of key, value and projection; the last is empty, (0,), where it is not needed.

        center, root and linear are constants. Where z is -inf, the gradients that come in mean nothing.
        """

    @staticmethod
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
        r"""Let each query attend over the features, and over single keys beside them, in one softmax.

        The query of rank i has the logit :math:`P_m^\top q + b_{\lfloor i/w \rfloor m} + r(q)` for feature m, with
        value :math:`S_{\lfloor i/w \rfloor m}`, and, where keys are given, the logit :math:`s\, q^\top k_j` for the
        keys of rank j in its own block, j < first, or j >= count - last, each of them once.
        :math:`r(q) = g^\top (q - c) - \tfrac s2 |R (q - c)|^2`, and 0 where no keys are given: it would cancel.

        Args:
            query: (N or 1, H, L, d), any strides.
            key: (N or 1, H_kv, L, d), or None for no single keys. Its tokens are those of the queries.
            value: (N or 1, H_kv, L, D), or None.
            projection: P, (N or 1, H, M, d).
            bias: b, (N, H, blocks, M), nats, may be -inf, dtype of ``projection``.
            S: (N, H, blocks, M, D), dtype of ``projection``.
            center: c, (N or 1, H, d), or None for 0.
            root: R, (N or 1, H, d, d), or None for the identity.
            linear: g, (N or 1, H, d), or None for 0.
            scale: s.
            order: Positions by rank, or None.
            count: Tokens of each sequence, or None.
            block: w, ranks per block, 0 for a single block, which then has no single keys but first and last.
            first: This many first ranks are single keys of every query.
            last: This many last ranks are single keys of every query.

        Returns:
            (N or 1, H, L, D), dtype and rows of ``query``, 0 at positions that no rank names and for a query without
            any finite logit; and the logsumexp of each query's logits by rank, (N, H, ranks), dtype of
            ``projection``, or empty, (0,), from a backend whose backward does without.
        """

    @staticmethod
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
        """Return the gradients of query, key, value, projection, bias and S.

        Those of key and value are empty, (0,), where there are none, and so is that of projection where it is not
        needed. ``out`` is the output in the dtype of ``query``. The logsumexp has no gradient of its own.
        """

    @staticmethod
    def moments(
        tokens: Tensor, order: Tensor | None, count: Tensor | None, covariance: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return means and central second moments of each sequence.

        Args:
            tokens: (N or 1, H, L, d), any strides.
            order: Positions by rank, or None.
            count: Tokens of each sequence, or None.
            covariance: Whether the covariance is wanted.

        Returns:
            Mean (N, H, d), variance (N, H, d) and covariance (N, H, d, d), or empty, (0,); float32, or float64 for
            float64 tokens; 0 for a sequence without a token.
        """


class Operators(NamedTuple):
    """The operators of one backend, with the arguments of the functions of :class:`Backend`."""

    summarise: Callable[..., tuple[Tensor, Tensor]]
    attend: Callable[..., tuple[Tensor, Tensor]]
    moments: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _operators(name: str, *, saves_logsumexp: bool) -> Operators:
    """Define ``hf_favorpp::<name>_summarise`` and so on.

    Args:
        name: Of the package that has the functions. It is imported when one of them is called.
        saves_logsumexp: See :class:`Backend`.

    Returns:
        The operators that are to be called; their backward comes with them.
    """

    def define(step: str) -> Any:
        def run(*args: Any) -> Any:
            return getattr(_functions(name), step)(*args)

        schema = infer_schema(getattr(Backend, step), mutates_args=())
        return custom_op(f"hf_favorpp::{name}_{step}", run, mutates_args=(), schema=schema)

    summarise, summarise_backward = define("summarise"), define("summarise_backward")
    attend, attend_backward = define("attend"), define("attend_backward")
    moments = define("moments")
    summarise.register_fake(_fake_summarise)
    summarise_backward.register_fake(_fake_summarise_backward)
    attend.register_fake(_fake_attend(saves_logsumexp))
    attend_backward.register_fake(_fake_attend_backward)
    moments.register_fake(_fake_moments)

    def grad_of_summarise(ctx: Any, grad_z: Tensor, grad_S: Tensor) -> tuple[Any, ...]:
        key, value, projection, center, root, linear, order, count, z, S = ctx.saved_tensors
        scale, block, first, last = ctx.numbers
        shared = (projection, center, root, linear, scale, order, count, block, first, last)
        grads = summarise_backward(grad_z, grad_S, key, value, *shared, z, S, ctx.needs_input_grad[2])
        return *_wanted(grads, ctx.needs_input_grad), *(None,) * 9

    def save_for_summarise(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        key, value, projection, center, root, linear, scale, order, count, block, first, last = inputs
        ctx.save_for_backward(key, value, projection, center, root, linear, order, count, *output)
        ctx.numbers = scale, block, first, last

    def grad_of_attend(ctx: Any, grad_out: Tensor, _: Any) -> tuple[Any, ...]:
        *tensors, order, count, out, logsumexp = ctx.saved_tensors
        scale, block, first, last = ctx.numbers
        need = ctx.needs_input_grad
        grads = attend_backward(grad_out, *tensors, scale, order, count, block, first, last, out, logsumexp, need[3])
        return *_wanted(grads, need), *(None,) * 9

    def save_for_attend(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, scale, order, count, block, first, last = inputs
        ctx.save_for_backward(*tensors, order, count, *output)
        ctx.numbers = scale, block, first, last
        ctx.mark_non_differentiable(output[1])

    summarise.register_autograd(grad_of_summarise, setup_context=save_for_summarise)
    attend.register_autograd(grad_of_attend, setup_context=save_for_attend)
    return Operators(summarise, attend, moments)


@cache
def _functions(name: str) -> Any:
    return importlib.import_module(f"hf_favorpp.attention.{name}")


def _wanted(grads: tuple[Tensor, ...], needed: tuple[bool, ...]) -> list[Tensor | None]:
    return [grad if need else None for grad, need in zip(grads, needed, strict=False)]


def _fake_summarise(key: Tensor, value: Tensor, projection: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    order, block = rest[4], rest[6]
    rows, ranks = (key.shape[0], key.shape[2]) if order is None else order.shape
    shape = (rows, projection.shape[1], -(-ranks // block) if block else 1, projection.shape[2])
    return projection.new_empty(shape), projection.new_empty(*shape, value.shape[-1])


def _fake_summarise_backward(
    grad_z: Tensor, grad_S: Tensor, key: Tensor, value: Tensor, projection: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return new_tokens(key), new_tokens(value), projection.new_empty(projection.shape if rest[-1] else 0)


def _fake_attend(saves_logsumexp: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    def fake(
        query: Tensor, key: Tensor, value: Tensor, projection: Tensor, bias: Tensor, S: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        order = rest[4]
        rows, ranks = (query.shape[0], query.shape[2]) if order is None else order.shape
        logsumexp = projection.new_empty((rows, query.shape[1], ranks) if saves_logsumexp else 0)
        return new_tokens(query, S.shape[-1]), logsumexp

    return fake


def _fake_attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    projection: Tensor,
    bias: Tensor,
    S: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    of_key, of_value = (projection.new_empty(0) if t is None else new_tokens(t) for t in (key, value))
    of_projection = projection.new_empty(projection.shape if rest[-1] else 0)
    return new_tokens(query), of_key, of_value, of_projection, torch.empty_like(bias), torch.empty_like(S)


def _fake_moments(
    tokens: Tensor, order: Tensor | None, count: Tensor | None, covariance: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows = tokens.shape[0] if order is None else order.shape[0]
    _, heads, _, head_dim = tokens.shape
    dtype = torch.promote_types(tokens.dtype, torch.float32)
    mean = tokens.new_empty((rows, heads, head_dim), dtype=dtype)
    second = mean.new_empty((rows, heads, head_dim, head_dim) if covariance else 0)
    return mean, torch.empty_like(mean), second


OPERATORS = {"cpu": _operators("cpu", saves_logsumexp=False), "triton": _operators("triton", saves_logsumexp=True)}
"""Of each fast backend."""
