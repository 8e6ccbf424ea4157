"""What a converted attention layer carries: its projections and how to use them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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


class AttentionCall(NamedTuple):
    """What a layer was called with, as :meth:`FavorppFeatures.forward` takes it, and what it made of that.

    Attributes:
        query: (B, H, Lq, d).
        key: (B, H_kv, Lk, d).
        value: (B, H_kv, Lk, D).
        key_mask: (B, Lk), bool, True = real token, or None.
        scaling: Factor of the logits; None means d^-1/2.
        relative_positions: What is added to the logits by distance, or None.
        output: (B, H, Lq, D).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    scaling: float | None
    relative_positions: RelativePositions | None
    output: Tensor


Probe = Callable[[AttentionCall], None]
"""Sees every call of a layer."""

CALIBRATION_BUFFERS = (*Preconditioner._fields, "log_weights")
LEARNABLE = ("omega", "omega_key", "log_weights")
"""What is a parameter with ``FavorppConfig.learnable``."""
FLOAT_TENSORS = ("omega", "omega_key", *CALIBRATION_BUFFERS, "moments")
"""Tensors that stay float32 in a model of any dtype."""


class FavorppFeatures(nn.Module):
    """The random features of one attention layer, attached to it as ``.favorpp``.

    Its buffers are saved with the checkpoint: the omega that a model was trained with is part of the model, and so
    is what was calibrated. With ``learnable`` some of them are parameters: omega, omega_key and log_weights.

    Attributes:
        omega: (H, M, d), float32 always, also in a bf16 model.
        omega_key: Projections of the keys, (H, M, d), where they are learnt; elsewhere omega serves both.
        draw_index: How many redraws have been made, int64 scalar.
        coefficient: With calibrated statistics, the fields of a
            :class:`~hf_favorpp.features.preconditioning.Preconditioner` without the batch dimension; so are
            ``center_x``, ``center_y``, ``transform_x`` and ``transform_y``, as far as the preconditioning has them.
        log_weights: Of the projections, (H, M), nats, where a calibration chose them among ``candidates``.
        moments: With ``recalibrate``, the running moments since the last recalibration, float64, and
            ``calibration_index``, how many there were.
        calibrated: Whether those are there. False with statistics of each sequence.
        exact: Attend by softmax, as before the conversion.
        probe: Sees every forward, exact or not; None does nothing.
        grid: How the tokens lie in the image, given their number, for a two-dimensional ``exact_window``.
        reads_padding: Serve padded queries too, through features alone, because the model reads what comes of them.
        replaced: The attention implementation that the conversion replaced; None where it is not known, as in a
            model loaded from a converted checkpoint.
    """

    omega: Tensor
    omega_key: Tensor
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
        of_projections = (num_heads, config.num_features)
        if config.learnable:
            for name, shape in zip(LEARNABLE, ((head_dim,), (head_dim,), ()), strict=True):
                values = torch.empty(*of_projections, *shape, dtype=torch.float32)
                self.register_parameter(name, nn.Parameter(values))
        else:
            self.register_buffer("omega", torch.empty(*of_projections, head_dim, dtype=torch.float32))
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
        self.require_calibrated()
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
            omega_key=getattr(self, "omega_key", None),
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

    def require_calibrated(self) -> None:
        """Refuse to attend without the statistics that are configured.

        Raises:
            ConversionError: Calibrated statistics are configured and were never computed.
        """
        if self.config.statistics == "calibrated" and not self.calibrated:
            raise ConversionError(
                "statistics='calibrated' needs a calibration, and there was none: call calibrate(model, dataloader), "
                "or convert with convert_to_favorpp(model, config, calibration_data=dataloader)."
            )

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

        Where they are learnable, learning begins with these.

        Args:
            omega: (H, M, d).
            log_weights: (H, M), nats.
        """
        self._set_omega(omega)
        self.log_weights.copy_(log_weights)

    def _set_omega(self, omega: Tensor) -> None:
        self.omega.copy_(omega)
        if self.config.learnable:
            self.omega_key.copy_(omega)

    @torch.no_grad()
    def forget_calibration_(self) -> None:
        """Clear what was calibrated, or what a checkpoint left unfilled. Without a calibration it does nothing."""
        self.calibrated = False
        for name, buffer in self.named_buffers():
            if name in CALIBRATION_BUFFERS:
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
        if self.config.candidates_per_feature > 1 and not self.config.learnable:
            shapes["log_weights"] = self.omega.shape[:-1]
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=self.omega.dtype, device=self.omega.device))

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
        self._set_omega(omega)
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
            f"exact_window={config.exact_window}, exact_ends={config.exact_ends}, learnable={config.learnable!r}, "
            f"num_heads={num_heads}, "
            f"num_features={num_features}, head_dim={head_dim}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FavorppFeatures":
        """Move with the model, but keep the dtypes: ``model.half()`` must not change which features are drawn."""
        buffers = dict(self.named_buffers())
        parameters = {name: (p.data, None if p.grad is None else p.grad.data) for name, p in self.named_parameters()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in buffers.items():
            if (after := getattr(self, name)).dtype != buffer.dtype:
                setattr(self, name, buffer.to(after.device))
        for name, (values, grad) in parameters.items():
            parameter = getattr(self, name)
            if parameter.dtype != values.dtype:
                parameter.data = values.to(parameter.device)
                parameter.grad = None if grad is None else grad.to(parameter.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Note whether a calibration comes with the state."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.config.statistics == "calibrated" and f"{prefix}coefficient" in state_dict:
            self.calibrated = True


def named_layers(model: nn.Module) -> dict[str, FavorppFeatures]:
    """Return the features of every converted layer by the names of their attention modules, in order."""
    return {name.rpartition(".")[0]: m for name, m in model.named_modules() if isinstance(m, FavorppFeatures)}


def learnable_parameters(model: nn.Module) -> set[int]:
    """Return the ``id`` of every parameter of a model that is a learnable projection, or the weight of one."""
    return {id(parameter) for layer in converted_layers(model) for parameter in layer.parameters()}


def converted_layers(model: nn.Module) -> list[FavorppFeatures]:
    """Return the features of every converted layer, in order.

    Args:
        model: Any module, wrapped or not.

    Returns:
        The feature modules; empty where nothing is converted.
    """
    return [module for module in model.modules() if isinstance(module, FavorppFeatures)]
