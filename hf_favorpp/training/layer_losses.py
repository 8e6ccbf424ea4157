"""What one layer has to learn from its softmax attention: the same outputs, or the same weights."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_favorpp.errors import ConfigError
from hf_favorpp.features.gerf import feature_nodes
from hf_favorpp.features.pairs import divergence, real_tokens_first, sample_pairs
from hf_favorpp.features.preconditioning import precondition
from hf_favorpp.features.statistics import scaled, sequence_statistics
from hf_favorpp.nn import AttentionCall, FavorppFeatures

LONGEST = 4096
"""Tokens of a sequence whose attention weights are compared."""


class LayerLoss:
    """What one layer has to learn from one batch; a shared layer is called several times."""

    def __init__(self, layer: FavorppFeatures) -> None:
        """Begin with nothing, for a converted layer whose features can learn."""
        self.layer, self.called = layer, False

    def watch(self, call: AttentionCall) -> None:
        """See :data:`hf_favorpp.nn.Probe`; the softmax model runs without gradient, the features do not."""
        self.called = True
        with torch.enable_grad():
            self.add(call)

    def add(self, call: AttentionCall) -> None:
        """Add what one call of the layer shows."""
        raise NotImplementedError

    def value(self) -> Tensor:
        """Return the loss, 0 of a layer that was not called."""
        return torch.stack([parameter.sum() * 0 for parameter in self.layer.parameters()]).sum()


class OutputError(LayerLoss):
    """The squared relative error of the output, over all heads and real queries."""

    def __init__(self, layer: FavorppFeatures) -> None:
        """Begin with nothing."""
        super().__init__(layer)
        self.error = self.size = torch.zeros((), device=layer.omega.device)

    def add(self, call: AttentionCall) -> None:
        """Attend to the same through features."""
        query, key, value, key_mask, scaling, relative_positions, output = call
        exact = output.float()
        error = (self.layer(query, key, value, key_mask, scaling, relative_positions).float() - exact).square()
        size = exact.square()
        if key_mask is not None and query.shape[-2] == key.shape[-2]:
            padding = ~key_mask[:, None, :, None]
            error, size = error.masked_fill(padding, 0), size.masked_fill(padding, 0)
        self.error, self.size = self.error + error.sum(), self.size + size.sum()

    def value(self) -> Tensor:
        """Return the error."""
        return super().value() + self.error / self.size.clamp(min=torch.finfo(self.size.dtype).tiny)


class Divergence(LayerLoss):
    """How far the attention weights of some queries are from softmax, nats."""

    def __init__(self, layer: FavorppFeatures) -> None:
        """Begin with nothing."""
        super().__init__(layer)
        self.found: list[Tensor] = []

    def add(self, call: AttentionCall) -> None:
        """Draw queries, and compare their weights."""
        query, key, _, key_mask, scaling, relative_positions, _ = call
        if relative_positions is not None:
            raise ConfigError(
                "loss='weights' does not know positions that are added to the logits by distance: use loss='output'."
            )
        layer, config = self.layer, self.layer.config
        with torch.autocast(query.device.type, enabled=False):
            x, y = scaled(query, key, scaling)
            mask = x.new_ones(x.shape[0], x.shape[2], dtype=torch.bool) if key_mask is None else key_mask
            order, window, ends = layer.neighbourhood(x.shape[2], x.device)
            if order is not None:
                x, y, mask = x[:, :, order], y[:, :, order], mask[:, order]
            change, kind = layer.preconditioner, str(config.preconditioning)
            if change is None:
                change = precondition(sequence_statistics(x, y, mask, mask, covariance=kind == "full"), kind)
            x, y, mask = real_tokens_first(x, y, mask, LONGEST)
            # the loop seeds the default generator anew for each step, so that a resumed run draws the same
            sample = sample_pairs(x, y, mask, change, window, ends, torch.default_generator)
            nodes = feature_nodes(config.kernel, layer.omega, layer.omega_key, change.coefficient, layer.log_weights)
            self.found.append(divergence(sample, nodes))

    def value(self) -> Tensor:
        """Return the mean over the calls."""
        return super().value() + (torch.stack(self.found).mean() if self.found else 0)


LOSSES: dict[str, type[LayerLoss]] = {"output": OutputError, "weights": Divergence}
"""By the names that :func:`hf_favorpp.transfer_attention` has for them."""
