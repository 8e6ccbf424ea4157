"""What a converted attention layer carries: its projections and how to use them."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_favorpp.attention import favorpp_attention
from hf_favorpp.attention.relative_positions import RelativePositions
from hf_favorpp.attention.tiles import Grid, attend_exactly, tile_neighbourhood
from hf_favorpp.config import FavorppConfig
from hf_favorpp.errors import ConversionError
from hf_favorpp.features.preconditioning import Preconditioner, precondition
from hf_favorpp.features.projection import draw_projections
from hf_favorpp.features.statistics import RunningMoments

Probe = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None, RelativePositions | None], None]
"""Sees query, key, value, key_mask, scaling and relative positions of a layer, as :meth:`FavorppFeatures.forward`."""

CALIBRATION_BUFFERS = (*Preconditioner._fields, "log_weights")
FLOAT_BUFFERS = ("omega", *CALIBRATION_BUFFERS, "moments")
"""Buffers that stay float32 in a model of any dtype."""
TOWERS = {"pixel_values": "vision_model", "input_ids": "text_model"}
"""What a model of images and texts, such as CLIP, calls the models that it is made of, by what each of them takes."""


class FavorppFeatures(nn.Module):
    """The random features of one attention layer, attached to it as ``.favorpp``.

    Its buffers are saved with the checkpoint: the omega that a model was trained with is part of the model, and so
    is what was calibrated.

    Attributes:
        omega: (H, M, d), float32 always, also in a bf16 model.
        draw_index: How many redraws have been made, int64 scalar.
        coefficient: With calibrated statistics, the fields of a
            :class:`~hf_favorpp.features.preconditioning.Preconditioner` without the batch dimension; so are
            ``center_x``, ``center_y``, ``transform_x`` and ``transform_y``, as far as the preconditioning has them.
        log_weights: Of the projections, (H, M), nats, where a calibration chose them among ``candidates``.
        moments: With ``recalibrate``, the running moments since the last recalibration, float64, and
            ``calibration_index``, how many there were.
        calibrated: Whether those are there. False with statistics of each sequence.
        exact: Attend by softmax, as before the conversion.
        probe: Called with the inputs of every forward, exact or not; None does nothing.
        grid: How the tokens lie in the image, given their number, for a two-dimensional ``exact_window``.
        reads_padding: Serve padded queries too, through features alone, because the model reads what comes of them.
        replaced: The attention implementation that the conversion replaced; None where it is not known, as in a
            model loaded from a converted checkpoint.
    """

    omega: Tensor
    draw_index: Tensor
    log_weights: Tensor
    moments: Tensor
    calibration_index: Tensor
    grid: Callable[[int], Grid] | None
    probe: Probe | None
    reads_padding: bool
    replaced: str | None

    def __init__(self, config: FavorppConfig, layer: int, num_heads: int, head_dim: int) -> None:
        """Allocate without drawing, so that a checkpoint can be loaded into it (on the meta device too).

        Args:
            config: Options of the conversion.
            layer: Index of the attention layer, part of the seed.
            num_heads: H.
            head_dim: d.
        """
        super().__init__()
        self.config = config
        self.layer = layer
        self.replaced = None
        self.register_buffer("omega", torch.empty(num_heads, config.num_features, head_dim, dtype=torch.float32))
        self.register_buffer("draw_index", torch.zeros((), dtype=torch.int64))
        self.calibrated = False
        self.exact = False
        self.probe = None
        self.grid = None
        self.reads_padding = False
        self.recent: RunningMoments | None = None
        if config.recalibrate is not None:
            self.register_buffer("moments", RunningMoments(num_heads, head_dim).totals)
            self.register_buffer("calibration_index", torch.zeros((), dtype=torch.int64))
        if config.statistics == "calibrated":
            self._allocate_preconditioner()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None = None,
        scaling: float | None = None,
        relative_positions: RelativePositions | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Attend; see :func:`hf_favorpp.favorpp_attention` for shapes and errors.

        Args:
            query: (B, H, Lq, d).
            key: (B, H_kv, Lk, d).
            value: (B, H_kv, Lk, D).
            key_mask: (B, Lk), bool, True = real token, or None.
            scaling: Factor of the logits; None means d^-1/2.
            relative_positions: What is added to the logits by distance, or None.
            cu_seqlens: Of packed sequences, (N + 1,), int, or None; not with a two-dimensional ``exact_window``.
            max_seqlen: Tokens of the longest packed sequence, or None.

        Returns:
            (B, H, Lq, D).

        Raises:
            ConversionError: Calibrated statistics are configured and were never computed.
        """
        if self.config.statistics == "calibrated" and not self.calibrated:
            raise ConversionError(
                "statistics='calibrated' needs a calibration, and there was none: call calibrate(model, dataloader), "
                "or convert with convert_to_favorpp(model, config, calibration_data=dataloader)."
            )
        if self.training and self.config.recalibrate is not None:
            if self.recent is None:
                num_heads, _, head_dim = self.omega.shape
                self.recent = RunningMoments(num_heads, head_dim, query.device)
            self.recent.watch(query, key, key_mask, scaling)
        order, window, ends = self.neighbourhood(query.shape[-2], query.device)
        if order is not None:
            query, key, value = (t[..., order, :] for t in (query, key, value))
            key_mask = None if key_mask is None else key_mask[:, order]
        attend = partial(
            favorpp_attention,
            query,
            key,
            value,
            self.omega,
            scaling=scaling,
            key_mask=key_mask,
            kernel=self.config.kernel,
            preconditioning=str(self.config.preconditioning),
            statistics=self.preconditioner,
            log_weights=getattr(self, "log_weights", None),
            relative_positions=relative_positions,
            backend=self.config.backend,
        )
        out = attend(exact_window=window, exact_ends=ends, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        if self.reads_padding and key_mask is not None:
            padded = attend(query_mask=torch.ones_like(key_mask))
            out = torch.where(key_mask[:, None, :, None], out, padded)
        if order is None:
            return out
        if special := ends[1]:  # the last in this order
            exact = attend_exactly(query[..., -special:, :], key, value, key_mask, scaling)
            out = torch.cat((out[..., :-special, :], exact), dim=-2)
        return out[..., order.argsort(), :]

    def neighbourhood(self, length: int, device: torch.device) -> tuple[Tensor | None, int, tuple[int, int]]:
        """Return which tokens attend to each other exactly.

        Args:
            length: L.
            device: Of the result.

        Returns:
            The order that the tokens are brought into first, (L,) int64 or None to leave them as they are, the tokens
            per block, and how many first and last ones all others see.
        """
        window, ends = self.config.exact_window, self.config.exact_ends
        if isinstance(window, int):
            return None, window, ends
        assert self.grid is not None
        return tile_neighbourhood(self.grid(length), window, device)

    @property
    def preconditioner(self) -> Preconditioner | None:
        """What was calibrated, with a batch dimension of 1; None where nothing was."""
        if not self.calibrated:
            return None
        fields = (getattr(self, name, None) for name in Preconditioner._fields)
        return Preconditioner(*(None if field is None else field.unsqueeze(0) for field in fields))

    @torch.no_grad()
    def set_preconditioner_(self, preconditioner: Preconditioner) -> None:
        """Fix the change of variables, in place: nothing is recompiled. The statistics are calibrated from now on.

        Args:
            preconditioner: Fields with a batch dimension of 1, as the configured preconditioning has them.
        """
        if self.config.statistics != "calibrated":
            self.config = self.config.calibrated()
            self._allocate_preconditioner()
        for name, field in zip(Preconditioner._fields, preconditioner, strict=True):
            if field is not None:
                getattr(self, name).copy_(field.squeeze(0))
        self.calibrated = True

    @torch.no_grad()
    def absorb_(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Add to ``moments`` what all processes saw in training since the last call.

        ``moments`` is then equal on all of them and part of a checkpoint: a resumed run goes on as it was.

        Args:
            reduce: Sums a tensor over all processes.
        """
        if self.config.recalibrate is not None:  # on every process, also where the layer did not run
            recent = torch.zeros_like(self.moments) if self.recent is None else self.recent.totals
            self.moments += reduce(recent.to(self.moments))
            self.recent = None

    @torch.no_grad()
    def recalibrate_(self, index: int) -> bool:
        """Renew the statistics from ``moments`` where that is due, in place.

        Args:
            index: Which recalibration is in force.

        Returns:
            Whether the statistics were renewed.
        """
        if index == int(self.calibration_index) or not (self.moments[:, 0] > 0).all():
            return False
        statistics = RunningMoments.of(self.moments, self.omega.shape[-1]).statistics()
        self.set_preconditioner_(precondition(statistics, str(self.config.preconditioning)))
        self.moments.zero_()
        self.calibration_index.fill_(index)
        return True

    @torch.no_grad()
    def set_projections_(self, omega: Tensor, log_weights: Tensor) -> None:
        """Replace the projections by some that were chosen for the data, in place, after the preconditioner was set.

        Args:
            omega: (H, M, d).
            log_weights: (H, M), nats.
        """
        self.omega.copy_(omega)
        self.log_weights.copy_(log_weights)

    @torch.no_grad()
    def forget_calibration_(self) -> None:
        """Clear what was calibrated, or what a checkpoint left unfilled. Without a calibration it does nothing."""
        self.calibrated = False
        for name in CALIBRATION_BUFFERS:
            if (buffer := getattr(self, name, None)) is not None:
                buffer.zero_()

    def _allocate_preconditioner(self) -> None:
        """Register the buffers of a calibration, as far as the preconditioning has them."""
        (num_heads, _, head_dim), kind = self.omega.shape, self.config.preconditioning
        matrix = kind in ("diagonal", "full")
        shapes: dict[str, tuple[int, ...]] = {"coefficient": (num_heads, head_dim if matrix else 1)}
        if kind != "none":
            shapes |= dict.fromkeys(("center_x", "center_y"), (num_heads, head_dim))
        if matrix:
            shapes |= dict.fromkeys(("transform_x", "transform_y"), (num_heads, head_dim, head_dim))
        if self.config.candidates_per_feature > 1:
            shapes["log_weights"] = self.omega.shape[:-1]
        for name, shape in shapes.items():
            self.register_buffer(name, self.omega.new_zeros(shape))

    @torch.no_grad()
    def redraw_(self, draw_index: int) -> None:
        """Replace the projections by draw number ``draw_index``, in place: nothing is recompiled.

        Args:
            draw_index: 0 for the first draw.
        """
        num_heads, num_features, head_dim = self.omega.shape
        omega = draw_projections(
            num_heads,
            num_features,
            head_dim,
            projection=str(self.config.projection),
            seed=self.config.seed,
            layer=self.layer,
            draw_index=draw_index,
        )
        self.omega.copy_(omega)
        self.draw_index.fill_(draw_index)
        if (log_weights := getattr(self, "log_weights", None)) is not None:
            log_weights.zero_()

    def extra_repr(self) -> str:
        """Return what ``print(model)`` shows of this layer.

        Returns:
            Kernel, size, preconditioning and neighbourhood.
        """
        num_heads, num_features, head_dim = self.omega.shape
        config = self.config
        return (
            f"kernel={config.kernel!r}, preconditioning={config.preconditioning!r}, statistics={config.statistics!r}, "
            f"exact_window={config.exact_window}, exact_ends={config.exact_ends}, num_heads={num_heads}, "
            f"num_features={num_features}, head_dim={head_dim}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FavorppFeatures":
        """Move with the model, but keep the dtypes: ``model.half()`` must not change which features are drawn."""
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            if (after := getattr(self, name)).dtype != buffer.dtype:
                setattr(self, name, buffer.to(after.device))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Note whether a calibration comes with the state."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.config.statistics == "calibrated" and f"{prefix}coefficient" in state_dict:
            self.calibrated = True


def converted_layers(model: nn.Module) -> list[FavorppFeatures]:
    """Return the features of every converted layer, in order.

    Args:
        model: Any module, wrapped or not.

    Returns:
        The feature modules; empty where nothing is converted.
    """
    return [module for module in model.modules() if isinstance(module, FavorppFeatures)]


def has_towers(model: nn.Module) -> bool:
    """Return whether a model has a model of images and one of texts side by side, of which each runs alone."""
    return all(hasattr(model, name) for name in TOWERS.values())


def tower_for(model: nn.Module, batch: Mapping[str, Any]) -> nn.Module:
    """Return what of a model a batch is for.

    Args:
        model: Any model.
        batch: Inputs of all of it, or of one of its towers.

    Returns:
        The tower; the model where it has none, or the batch is for both.
    """
    given = [tower for name, tower in TOWERS.items() if name in batch]
    if len(given) == 1 and has_towers(model):
        tower: nn.Module = getattr(model, given[0])
        return tower
    return model


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Switch to eval mode without gradients for a while, and give every module its own mode back.

    Args:
        model: Any module.

    Yields:
        Nothing.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def observing(layers: list[FavorppFeatures], probes: list[Probe] | None = None, *, exact: bool) -> Generator[None]:
    """Let converted layers attend exactly, or be watched, for a while.

    Args:
        layers: The converted layers.
        probes: One per layer, called with its inputs; None for none.
        exact: Whether the layers attend by softmax meanwhile, as before the conversion.

    Yields:
        Nothing.
    """
    before = [(layer.exact, layer.probe) for layer in layers]
    try:
        for index, layer in enumerate(layers):
            layer.exact, layer.probe = exact, None if probes is None else probes[index]
        yield
    finally:
        for layer, (was_exact, probe) in zip(layers, before, strict=True):
            layer.exact, layer.probe = was_exact, probe
