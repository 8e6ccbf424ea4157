"""What a converted attention layer carries: its projections and how to use them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hf_favorpp.attention import favorpp_attention
from hf_favorpp.config import FavorppConfig
from hf_favorpp.features.projection import draw_projections


class FavorppFeatures(nn.Module):
    """The random features of one attention layer, attached to it as ``.favorpp``.

    Its buffers are saved with the checkpoint: the omega that a model was trained with is part of the model.

    Attributes:
        omega: (H, M, d), float32 always, also in a bf16 model.
        draw_index: How many redraws have been made, int64 scalar.
        replaced: The attention implementation that the conversion replaced; None where it is not known, as in a
            model loaded from a converted checkpoint.
    """

    omega: Tensor
    draw_index: Tensor
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

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None = None, scaling: float | None = None
    ) -> Tensor:
        """Attend; see :func:`hf_favorpp.favorpp_attention` for shapes and errors.

        Args:
            query: (B, H, Lq, d).
            key: (B, H_kv, Lk, d).
            value: (B, H_kv, Lk, D).
            key_mask: (B, Lk), bool, True = real token, or None.
            scaling: Factor of the logits; None means d^-1/2.

        Returns:
            (B, H, Lq, D).
        """
        return favorpp_attention(
            query,
            key,
            value,
            self.omega,
            scaling=scaling,
            key_mask=key_mask,
            kernel=self.config.kernel,
            preconditioning=str(self.config.preconditioning),
            backend=self.config.backend,
        )

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
            projection=self.config.projection,
            seed=self.config.seed,
            layer=self.layer,
            draw_index=draw_index,
        )
        self.omega.copy_(omega)
        self.draw_index.fill_(draw_index)

    def extra_repr(self) -> str:
        """Return what ``print(model)`` shows of this layer.

        Returns:
            Kernel, size and preconditioning.
        """
        num_heads, num_features, head_dim = self.omega.shape
        return (
            f"kernel={self.config.kernel!r}, preconditioning={self.config.preconditioning!r}, num_heads={num_heads}, "
            f"num_features={num_features}, head_dim={head_dim}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FavorppFeatures":
        """Move with the model, but keep float32: ``model.half()`` must not change which features are drawn."""
        omega = self.omega
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.omega.dtype != torch.float32:
            self.omega = omega.to(self.omega.device)
        return self
