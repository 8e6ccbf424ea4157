"""Attention maps of a layer that never forms one, by one-hot values."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from hf_favorpp.attention.tiles import Grid
from hf_favorpp.convert import IMPLEMENTATION
from hf_favorpp.errors import InputError, UnsupportedModelError
from hf_favorpp.families import AttentionLayer, attention_layers, supported_model_types
from hf_favorpp.nn import converted_layers
from hf_favorpp.observing import evaluating, observing

MAX_LABELS = 40  # of more tokens, labels would not be readable


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """The attention of one layer to one batch, from the same queries and keys by softmax and as it was converted.

    Attributes:
        layer: Index of the layer.
        call: Which call of the layer in one forward; 0 except where several layers share one module.
        softmax: (B, H, L, L), float32: row i holds the weights of query i. Rows and columns of padding are 0.
        converted: The same shape, or None where the layer attends by softmax. The ``trig`` kernel may give negative
            weights.
        key_mask: (B, L), bool, True = real token; None where all are.
        grid: How the tokens lie in an image; None where they do not, or where that is not known.
    """

    layer: int
    call: int
    softmax: Tensor
    converted: Tensor | None
    key_mask: Tensor | None
    grid: Grid | None = None

    def plot(
        self,
        path: str | PathLike[str],
        tokens: Sequence[str] | None = None,
        head: int | None = None,
        row: int = 0,
        *,
        difference: bool = False,
    ) -> None:
        """Draw the maps side by side, on one colour scale, without padding.

        Args:
            path: File to write; its ending chooses the format: png, pdf or svg.
            tokens: L labels, those of padding too; shown where at most 40 tokens are real.
            head: Index of the head; None draws the mean over heads.
            row: Index of the sequence in the batch.
            difference: Whether to add a panel with converted - softmax. It needs a converted layer.

        Raises:
            ImportError: matplotlib is not installed.
            InputError: There is no such head or row, the labels are not L, all of the row is padding, or there is no
                difference to draw.
        """
        Figure, PowerNorm, _ = _matplotlib()
        real = self._checked_tokens(tokens, head, row)
        panels = {name: weights[real][:, real].numpy() for name, weights in self._matrices(head, row).items()}
        if difference and len(panels) == 1:
            raise InputError(f"difference=True needs a converted layer; layer {self.layer} attends by softmax.")
        lowest, highest = min(p.min() for p in panels.values()), max(p.max() for p in panels.values())
        scale = PowerNorm(0.5, min(lowest, 0), highest)  # a few tokens draw most of the attention: show the rest too
        count = len(panels) + difference
        figure = Figure(figsize=(3.6 * count + 0.8, 4.4), layout="compressed")
        axes = list(figure.subplots(1, count, sharex=True, sharey=True, squeeze=False)[0])
        for axis, weights in zip(axes, panels.values(), strict=False):
            image = axis.imshow(weights, cmap="viridis", norm=scale, interpolation="nearest")
        figure.colorbar(image, ax=axes[: len(panels)], label="attention weight")
        if difference:
            change = panels["converted"] - panels["softmax"]
            limit = abs(change).max()
            image = axes[-1].imshow(change, cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
            figure.colorbar(image, ax=axes[-1], label="difference of weights")
        where = self._where(head)
        axes[0].set_ylabel("query")
        for axis, name in zip(axes, (*panels, "converted \N{MINUS SIGN} softmax"), strict=False):
            axis.set_title(f"{name}\n{where}", fontsize="medium")
            axis.set_xlabel("key")
            if tokens is not None and len(real) <= MAX_LABELS:
                labels, size = [tokens[i] for i in real], min(8.0, 220 / len(real))
                axis.set_xticks(range(len(real)), labels, rotation=90, fontsize=size, parse_math=False)
                axis.set_yticks(range(len(real)), labels, fontsize=size, parse_math=False)
        figure.savefig(path, dpi=300, bbox_inches="tight")

    def plot_on_image(
        self,
        path: str | PathLike[str],
        image: Any,
        patch: tuple[int, int] | None = None,
        head: int | None = None,
        row: int = 0,
    ) -> None:
        """Draw what one query attends to over the image, softmax and converted side by side on one colour scale.

        Args:
            path: File to write; its ending chooses the format: png, pdf or svg.
            image: What the model saw, cropped as it was: a PIL image, or an array (height, width, 3) of uint8 or of
                floats in [0, 1], of any resolution.
            patch: Row and column of the query among the patches; None takes the first special token, which is the
                class token where there is one.
            head: Index of the head; None draws the mean over heads.
            row: Index of the image in the batch.

        Raises:
            ImportError: matplotlib is not installed.
            InputError: The layer's tokens do not lie in an image, or there is no such patch, head or row.
        """
        Figure, PowerNorm, Rectangle = _matplotlib()
        self._checked_tokens(None, head, row)
        grid, query = self._query_of(patch)
        matrices = {name: weights[query] for name, weights in self._matrices(head, row).items()}
        panels = {name: w[grid.prefix :].reshape(grid.rows, grid.columns).numpy() for name, w in matrices.items()}
        lowest, highest = min(p.min() for p in panels.values()), max(p.max() for p in panels.values())
        scale = PowerNorm(0.5, min(lowest, 0), highest)
        figure = Figure(figsize=(3.3 * (len(panels) + 1) + 0.6, 3.9), layout="compressed")
        axes = list(figure.subplots(1, len(panels) + 1, squeeze=False)[0])
        height, width = np.shape(image)[:2]
        place = {
            "extent": (-0.5, grid.columns - 0.5, grid.rows - 0.5, -0.5),
            "aspect": height / grid.rows * grid.columns / width,
        }
        for axis in axes:
            axis.imshow(image, **place)
            axis.set_axis_off()
            if patch is not None:
                corner = patch[1] - 0.5, patch[0] - 0.5
                axis.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="white", linewidth=1.5))
        axes[0].set_title("query: " + ("class token" if patch is None else f"patch {patch}"), fontsize="medium")
        for axis, (name, weights) in zip(axes[1:], panels.items(), strict=True):
            drawn = axis.imshow(weights, cmap="inferno", norm=scale, alpha=0.7, interpolation="nearest", **place)
            elsewhere = f"{matrices[name][: grid.prefix].sum():.0%} on special tokens"
            axis.set_title(f"{name}, {self._where(head)}\n{elsewhere}", fontsize="medium")
        figure.colorbar(drawn, ax=axes, label="attention weight", shrink=0.8)
        figure.savefig(path, dpi=200, bbox_inches="tight")

    def _matrices(self, head: int | None, row: int) -> dict[str, Tensor]:
        """Return the maps of a row by name, (L, L), of one head or as the mean over heads."""
        maps = {"softmax": self.softmax} | ({} if self.converted is None else {"converted": self.converted})
        return {name: (m[row].mean(0) if head is None else m[row, head]).cpu() for name, m in maps.items()}

    def _where(self, head: int | None) -> str:
        layer = f"layer {self.layer}{f' (call {self.call})' if self.call else ''}"
        return layer + (f", mean of {self.softmax.shape[1]} heads" if head is None else f", head {head}")

    def _query_of(self, patch: tuple[int, int] | None) -> tuple[Grid, int]:
        """Return the grid, and the token that a patch is, or the first special one."""
        if self.grid is None:
            raise InputError(
                f"plot_on_image needs tokens that lie in one image; those of layer {self.layer} do not, or their "
                f"grid is not known. Use plot(path) for the whole matrix."
            )
        prefix, rows, columns = self.grid
        if patch is None:
            if prefix == 0:
                raise InputError("this model has no class token: give patch=(row, column) of a query.")
            return self.grid, 0
        if not (0 <= patch[0] < rows and 0 <= patch[1] < columns):
            raise InputError(f"patch={patch!r} is not one of the {rows} x {columns} patches, counted from (0, 0).")
        return self.grid, prefix + patch[0] * columns + patch[1]

    def _checked_tokens(self, tokens: Sequence[str] | None, head: int | None, row: int) -> list[int]:
        """Return the positions of the real tokens of a row."""
        batch, num_heads, _, length = self.softmax.shape
        _require_index("row", row, batch, "sequences")
        if head is not None:
            _require_index("head", head, num_heads, "heads")
        if tokens is not None and (isinstance(tokens, str) or len(tokens) != length):
            raise InputError(f"tokens must be {length} labels, one per position with padding, got {tokens!r}.")
        real = torch.arange(length) if self.key_mask is None else self.key_mask[row].nonzero().flatten()
        if not len(real):
            raise InputError(f"row {row} is all padding: there is nothing to draw.")
        return [int(i) for i in real]


def attention_matrix(
    model: nn.Module, inputs: Mapping[str, Any], layer: int, *, exact: bool = False, call: int = 0
) -> AttentionMaps:
    """Return the attention that a layer applies, converted or not, and that of softmax beside it.

    A map is what the layer's own attention function makes of one-hot values, head_dim columns at a time: features,
    exact neighbourhoods, padding and sliding windows are in it as they are applied, in the precision of the model.
    By nature a map takes 4 B H L^2 bytes, and L / head_dim passes of the layer.

    Both maps come from the same queries and keys: those that reach the layer in a forward of the model as it is, where
    converted layers below feed this one. With ``exact=True`` the layers below attend by softmax, so that the softmax
    map is that of the model before its conversion, and the converted one what this layer alone would make of it.

    Args:
        model: A converted model, or a softmax model of a supported family, in any attention implementation.
        inputs: Tensors by name, as the model takes them, on any device.
        layer: Index among all attention layers, converted or not, from 0, as in ``FavorppConfig.layers``.
        exact: Whether the layers below attend by softmax meanwhile.
        call: Which call of the layer in a forward, for layers that share one module: ALBERT's only module is layer 0,
            and its k-th layer is ``call=k``.

    Returns:
        The maps, without gradient, on the device of the model. The model is as before, its training mode too.

    Raises:
        InputError: There is no such layer or call, or ``inputs`` is not a mapping.
        UnsupportedModelError: The model has no attention layer of a supported family, or this one looks no attention
            function up, as in the decoder of SpeechT5.

    Source:
        Choromanski et al. 2021, arXiv:2009.14794, Appendix C.4.
    """
    found = list(attention_layers(model))
    modules = [each.module for each in found]
    if not modules:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no attention layer of a supported family. Supported model types: "
            f"{', '.join(supported_model_types())}."
        )
    _require_index("layer", layer, len(modules), "attention layers")
    if not isinstance(inputs, Mapping):
        raise InputError(f"inputs must be a mapping of tensors, as the model takes them, got {type(inputs).__name__}.")
    found[layer].prepare()
    device = next(model.parameters()).device
    inputs = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in inputs.items()}
    features, eager = converted_layers(model), torch.compiler.set_stance("force_eager")
    with eager, evaluating(model), observing(features, exact=exact), _recording(modules[layer], call) as recorder:
        model(**inputs)
    if recorder.calls == 0:
        raise UnsupportedModelError(
            f"layer {layer} ({found[layer].name}) does not go through the attention interface of Transformers, or the "
            f"inputs do not reach it. Choose a layer of the encoder."
        )
    _require_index("call", call, recorder.calls, f"calls of layer {layer}")
    grid = _grid(found[layer], recorder.softmax.shape[-1])
    return AttentionMaps(layer, call, recorder.softmax, recorder.converted, recorder.key_mask, grid)


class _Recorder:
    """Stands in for an attention function, and takes the maps of one call of one module."""

    softmax: Tensor

    def __init__(self, attend: Callable[..., tuple[Tensor, Any]], module: nn.Module, call: int) -> None:
        self.attend, self.module, self.call = attend, module, call
        self.calls = 0
        self.converted: Tensor | None = None
        self.key_mask: Tensor | None = None

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        def attend(value: Tensor) -> tuple[Tensor, Any]:
            return self.attend(module, query, key, value, attention_mask, **kwargs)

        if module is self.module:
            if self.calls == self.call:
                self.key_mask = _real_keys(attention_mask, len(value))
                self._record(attend, query, value)
            self.calls += 1
        return attend(value)

    def _record(self, attend: Callable[[Tensor], tuple[Tensor, Any]], query: Tensor, value: Tensor) -> None:
        config: Any = self.module.config
        features = converted_layers(self.module) if config._attn_implementation == IMPLEMENTATION else []
        with observing(features, exact=True):
            self.softmax = self._matrix(attend, query, value)
        with observing(features, exact=False):
            self.converted = self._matrix(attend, query, value) if features else None

    def _matrix(self, attend: Callable[[Tensor], tuple[Tensor, Any]], query: Tensor, value: Tensor) -> Tensor:
        """Attend to the identity, as many of its columns at a time as a value has numbers."""
        length, width = value.shape[-2:]
        matrix = torch.empty(*query.shape[:3], length, dtype=torch.float32, device=query.device)
        for start in range(0, length, width):
            one_hot = torch.zeros_like(value)
            one_hot.diagonal(-start, -2, -1).fill_(1)
            out, _ = attend(one_hot)
            matrix[..., start : start + width] = out.transpose(1, 2)[..., : length - start]
        if self.key_mask is not None:
            matrix.masked_fill_(~self.key_mask[:, None, :, None], 0)
        return matrix


@contextmanager
def _recording(module: nn.Module, call: int) -> Generator[_Recorder]:
    """Put a recorder in the place of the attention function that a module looks up."""
    config: Any = module.config
    before = config._attn_implementation
    name = "sdpa" if before == "eager" else before  # an eager function is not looked up by name
    functions: Any = AttentionInterface
    recorder = _Recorder(functions()[name], module, call)
    try:
        config._attn_implementation = name
        functions.register(name, recorder)
        yield recorder
    finally:
        functions.register(name, recorder.attend)
        config._attn_implementation = before


def _real_keys(mask: Any, batch: int) -> Tensor | None:
    """Return which keys any query may attend to, (B, L) bool, from the mask of any attention implementation."""
    if not isinstance(mask, Tensor):
        return None
    allowed = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask.bool()
    return (allowed.any(1).any(1) if mask.ndim == 4 else allowed).expand(batch, -1)


def _grid(layer: AttentionLayer, length: int) -> Grid | None:
    """Return how the tokens of a layer lie in an image, or None."""
    family = layer.family
    if family.grid is None or family.no_tiles is not None or layer.optional:  # a video, or patches in another order
        return None
    try:
        return family.grid(layer.module, length)
    except InputError:
        return None


def _matplotlib() -> tuple[Any, Any, Any]:
    """Return Figure, PowerNorm and Rectangle."""
    try:
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ImportError("attention maps are drawn with matplotlib: pip install matplotlib") from error
    return Figure, PowerNorm, Rectangle


def _require_index(name: str, index: object, count: int, of_what: str) -> None:
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
        raise InputError(f"{name}={index!r} is not one of the {count} {of_what}, 0 to {count - 1}.")
