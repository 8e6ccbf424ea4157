"""Calibration: moments of queries and keys on data of the user's, and projections chosen for them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sized
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm.auto import tqdm

from hf_favorpp.errors import ConversionError, InputError
from hf_favorpp.features.fitting import fit_quadrature
from hf_favorpp.features.gerf import quadrature
from hf_favorpp.features.pairs import PairSample, real_tokens_first, sample_pairs
from hf_favorpp.features.preconditioning import Preconditioner, precondition
from hf_favorpp.features.projection import draw_projections
from hf_favorpp.features.statistics import RunningMoments, scaled
from hf_favorpp.nn import AttentionCall, FavorppFeatures, converted_layers
from hf_favorpp.observing import evaluating, has_towers, observing, tower_for
from hf_favorpp.rules import require_int, require_statistics_are_used

_log = logging.getLogger(__name__)
TOKENS_PER_DIMENSION = 5
"""With fewer tokens than so many times head_dim a covariance is mostly its ridge."""
SAMPLE_TOKENS, SAMPLE_LENGTH = 8192, 1024
"""Tokens of a layer by whose attention the projections are chosen, and the longest part of a sequence among them."""

Model = TypeVar("Model", bound=nn.Module)


def calibrate(model: Model, dataloader: Iterable[Mapping[str, Any]], num_batches: int | None = None) -> Model:
    """Fix the preconditioning of a converted model by one pass of its softmax attention over data, in place.

    Means and covariances of queries and keys are accumulated in float64, per layer and head, over real tokens only
    and over all processes of ``torch.distributed``. The projections are then chosen among
    ``FavorppConfig.candidates`` times as many, by the attention of up to 8192 tokens per layer. Afterwards a forward
    computes no statistics, and its outputs do not depend on them. A few hundred sequences like those of the task are
    enough; no labels are used.

    Args:
        model: A converted model, on any device, wrapped (DDP) or not; its training mode is as before afterwards.
        dataloader: Batches, mappings of tensors as the model takes them; every process its own part. To a model of
            images and texts, such as CLIP, a batch may bring images or texts alone; of a tower for which there are
            none, every layer stays as it was.
        num_batches: How many to use, >= 1; None uses all.

    Returns:
        The same model, whose ``statistics`` are ``"calibrated"`` now, in its saved configuration too.

    Raises:
        ConfigError: ``num_batches`` is not a positive integer, or the kernel uses no statistics.
        ConversionError: The model is not converted.
        InputError: There is no batch, a batch is not a mapping, or queries or keys are not finite. Nothing has
            changed then.
    """
    layers = converted_layers(model)
    if not layers:
        raise ConversionError(f"{type(model).__name__} is not converted; call convert_to_favorpp(model) first.")
    for layer in layers:
        require_statistics_are_used(layer.config.kernel, str(layer.config.preconditioning))
    if num_batches is not None:
        require_int("num_batches", num_batches, minimum=1)
    if isinstance(dataloader, Mapping):
        raise InputError("the dataloader must yield batches; a single batch is passed as [batch].")
    with torch.inference_mode(False), evaluating(model):
        observers = [_Observer(layer) for layer in layers]
        with observing(layers, [observer.watch for observer in observers], exact=True):
            used = _run(model, dataloader, num_batches)
        for observer in observers:
            observer.moments.totals = sum_over_processes(observer.moments.totals)
        observers = _reached(model, observers)
        with torch.autocast(layers[0].omega.device.type, enabled=False):
            chosen = _choose(observers, used)
        for observer, (preconditioner, projections) in zip(observers, chosen, strict=True):
            observer.layer.set_preconditioner_(preconditioner)
            if projections is not None:
                observer.layer.set_projections_(*projections)
    for module in model.modules():  # a wrapper has no configuration, and a head shares that of its base model
        options, own = getattr(module, "config", None), converted_layers(module)
        if own and options is not None and getattr(options, "favorpp", None) is not None:
            options.favorpp = own[0].config.to_dict()
    return model


def _reached(model: nn.Module, observers: list[_Observer]) -> list[_Observer]:
    """Leave out the layers of a tower that there were no data for; of any other model all must be reached."""
    reached = [observer for observer in observers if observer.saw_tokens]
    if not reached or not has_towers(model):
        return observers
    if len(reached) < len(observers):
        _log.warning(
            "calibrated %d of %d converted layers; for the others there were no data.", len(reached), len(observers)
        )
    return reached


def _choose(observers: list[_Observer], num_batches: int) -> list[tuple[Preconditioner, tuple[Tensor, Tensor] | None]]:
    """Return what each layer is to take over."""
    for index, observer in enumerate(observers):
        observer.require_usable(index, num_batches)
    _warn_of_few(observers)
    bar = tqdm(observers, "choosing projections", leave=False, disable=_hides_bars())
    chosen = [observer.choose() for observer in bar]
    if not all(observer.saw_far for observer in observers):
        _log.warning(
            "no calibration sequence is longer than exact_window, so the projections stay as they were drawn; "
            "calibrate on inputs as long as those of the task."
        )
    return chosen


def _warn_of_few(observers: list[_Observer]) -> None:
    """Say where there were too few tokens for the statistics that are made of them."""
    tokens = min(int(observer.moments.totals[:, 0].min()) for observer in observers)
    least = TOKENS_PER_DIMENSION * observers[0].layer.omega.shape[-1]
    if tokens < least:
        _log.warning(
            "calibrated on %d tokens only: give at least %d, a few hundred inputs if possible.", tokens, least
        )


class _Observer:
    """Watches one layer during the softmax pass."""

    def __init__(self, layer: FavorppFeatures) -> None:
        self.layer = layer
        num_heads, _, head_dim = layer.omega.shape
        self.moments = RunningMoments(num_heads, head_dim, layer.omega.device)
        self.sampled: list[tuple[Tensor, Tensor, Tensor]] = []
        self.window, self.ends = 0, (0, 0)
        self.called, self.saw_far = False, True
        self.fits = layer.config.candidates_per_feature > 1
        self.tokens_left = SAMPLE_TOKENS // _num_processes()

    def watch(self, call: AttentionCall) -> None:
        """Accumulate moments, and keep some sequences; with relative positions projections are not chosen."""
        query, key, _, key_mask, scaling, relative_positions, _ = call
        self.called = True
        x, y = scaled(query, key, scaling)
        self.moments.update(x, y, key_mask)
        self.fits &= relative_positions is None
        if self.fits and self.tokens_left > 0:
            mask = x.new_ones(x.shape[0], x.shape[2], dtype=torch.bool) if key_mask is None else key_mask
            self._keep(x, y, mask)

    def _keep(self, x: Tensor, y: Tensor, mask: Tensor) -> None:
        """Keep whole sequences, cut at 1024 tokens, their real tokens first, until there are enough."""
        order, self.window, self.ends = self.layer.neighbourhood(x.shape[2], x.device)
        if order is not None:
            x, y, mask = x[:, :, order], y[:, :, order], mask[:, order]
        rows = max(1, int((mask.sum(1).clamp(max=SAMPLE_LENGTH).cumsum(0) <= self.tokens_left).sum()))
        self.sampled.append(real_tokens_first(x[:rows], y[:rows], mask[:rows], SAMPLE_LENGTH))
        self.tokens_left -= int(self.sampled[-1][2].sum())

    @property
    def saw_tokens(self) -> bool:
        """Whether there was a real token, on any process once the totals are summed."""
        return bool((self.moments.totals[:, 0] > 0).all())

    def require_usable(self, index: int, num_batches: int) -> None:
        """Refuse totals of nothing, or of what is not finite."""
        if not torch.isfinite(self.moments.totals).all():
            raise InputError(
                f"calibration data must give finite queries and keys; those of converted layer {index} are not. Look "
                f"for NaN in the inputs, or run the pass in float32 or bfloat16 where float16 overflows."
            )
        if not self.saw_tokens:
            if num_batches and not self.called:
                raise InputError(
                    f"the calibration data never reached converted layer {index}: its part of the model does not run "
                    f"on them, or attn_implementation was set to something else than 'favorpp'."
                )
            raise InputError(
                "the calibration data held no real token: the dataloader is empty, used up (pass a DataLoader rather "
                "than an iterator), or everything is masked."
            )

    @torch.no_grad()
    def choose(self) -> tuple[Preconditioner, tuple[Tensor, Tensor] | None]:
        """Return the preconditioner, float32, and the projections with their log-weights, where they are chosen."""
        config, omega = self.layer.config.calibrated(), self.layer.omega
        change = precondition(self.moments.statistics(), str(config.preconditioning)).to(torch.float32)
        if not self.fits:
            return change, None
        pairs = self._pairs(change)
        far = torch.zeros((), dtype=torch.int64, device=omega.device)
        for pair in pairs:
            far += pair.far.sum()
        self.saw_far = bool(sum_over_processes(far) > 0)
        if not self.saw_far:
            return change, None
        num_heads, num_features, head_dim = omega.shape
        candidates = draw_projections(
            num_heads,
            num_features * config.candidates_per_feature,
            head_dim,
            projection=str(config.projection),
            seed=config.seed,
            layer=self.layer.layer,
            draw_index=int(self.layer.draw_index),
        ).to(omega.device)
        nodes, weights = (t.squeeze(0) for t in quadrature(config.kernel, candidates, change.coefficient))
        nodes, weights = nodes.expand(num_heads, -1, -1), weights.expand(num_heads, -1)
        generator = torch.Generator().manual_seed(config.seed)
        chosen, weights = fit_quadrature(pairs, nodes, weights, num_features, generator, sum_over_processes)
        omega = candidates.gather(1, chosen.unsqueeze(-1).expand(-1, -1, head_dim))
        _, unfitted = quadrature(config.kernel, omega, change.coefficient)
        return change, (omega, weights - unfitted.squeeze(0))

    def _pairs(self, change: Preconditioner) -> list[PairSample]:
        generator = torch.Generator().manual_seed(self.layer.config.seed)
        return [sample_pairs(*sampled, change, self.window, self.ends, generator) for sampled in self.sampled]


def _run(model: nn.Module, dataloader: Iterable[Mapping[str, Any]], num_batches: int | None) -> int:
    """Put the batches through the model, and return how many there were."""
    device = next(model.parameters()).device
    total = len(dataloader) if isinstance(dataloader, Sized) else None
    if num_batches is not None:
        total = num_batches if total is None else min(total, num_batches)
    used = 0
    for batch in tqdm(islice(dataloader, num_batches), "calibrating", total, leave=False, disable=_hides_bars()):
        if not isinstance(batch, Mapping):
            raise InputError(
                f"a calibration batch must be a mapping of tensors, as the model takes it, got {type(batch).__name__}."
            )
        inputs = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in batch.items()}
        tower_for(model, batch)(**inputs)
        used += 1
    return used


def sum_over_processes(total: Tensor) -> Tensor:
    """Sum a tensor over all processes of ``torch.distributed``, in place; one process leaves it as it is.

    Args:
        total: Any shape, the same on all processes.

    Returns:
        ``total``.
    """
    if _num_processes() > 1:
        dist.all_reduce(total)
    return total


def _num_processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _hides_bars() -> bool | None:
    """Return what tqdm takes: bars are for the terminal of the first process."""
    return None if _num_processes() == 1 or dist.get_rank() == 0 else True
