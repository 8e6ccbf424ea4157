"""The four panels of performer_figure2.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from performer_report import COLOURS, GREY
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES = {"trigonometric": "--", "positive": "-", "hyperbolic": "-."}
MARKERS = {"trigonometric": "D", "positive": "o", "hyperbolic": "s"}
MAP_ENDS = 4.0
"""Decades at which the colours of the map end, on both sides: the ratio has no bounds."""


def draw(
    length: float,
    num_features: int,
    angle: Tensor,
    lengths: Tensor,
    ratio: Tensor,
    slices: Mapping[str, Tensor],
    drawn: Mapping[str, Any],
) -> Figure:
    """Draw the ratio of errors over angle and length, its slice at one length, the errors, and the estimates there.

    Args:
        length: l of the slice.
        num_features: M.
        angle: (A,), radians.
        lengths: (A,).
        ratio: log10 of MSE(trigonometric) / MSE(positive), (lengths, angles).
        slices: Logarithms of the errors at the one length, (A,), by kind of features.
        drawn: Angles, the kernel, and mean, deviation and MSE of the estimates.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.6), layout="constrained")
    axes = figure.subplots(2, 2)
    _draw_map(figure, axes[0, 0], angle, lengths, ratio)
    _draw_slice(axes[0, 1], angle, slices, length)
    _draw_errors(axes[1, 0], angle, slices, drawn)
    _draw_estimates(axes[1, 1], drawn)
    axes[1, 0].set_title(f"(c) errors at l = {length:g}, M = {num_features}: Lemma 2 and draws", fontsize=10)
    axes[1, 1].set_title(f"(d) estimates at l = {length:g}, M = {num_features}: mean ± deviation", fontsize=10)
    for axis in axes.flat:
        axis.set_xticks([0, math.pi / 4, math.pi / 2, 3 * math.pi / 4, math.pi], ["0", "π/4", "π/2", "3π/4", "π"])
        axis.set_xlim(0, math.pi)
        axis.set_xlabel("angle φ between x and y, radians")
    for axis in axes.flat[1:]:
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=9)
    return figure


def _draw_map(figure: Figure, axis: Axes, angle: Tensor, lengths: Tensor, ratio: Tensor) -> None:
    image = axis.pcolormesh(
        angle.numpy(),
        lengths.numpy(),
        ratio.numpy(),
        cmap="PuOr_r",
        vmin=-MAP_ENDS,
        vmax=MAP_ENDS,
        shading="nearest",
        rasterized=True,
    )
    axis.contour(
        angle.numpy(), lengths.numpy(), ratio.numpy(), [-4, -2, 0, 2, 4], colors="black", linewidths=[0.6, 0.6, 1.6]
    )
    bar = figure.colorbar(image, ax=axis, extend="both", ticks=[-4, -2, 0, 2, 4])
    bar.ax.set_yticklabels([f"$10^{{{tick}}}$" for tick in (-4, -2, 0, 2, 4)])
    bar.set_label("r, above 1 positive features are better")
    axis.set_ylabel("length l of x and y")
    axis.set_title("(a) r = MSE(trigonometric) / MSE(positive), thick line: r = 1", fontsize=10)


def _draw_slice(axis: Axes, angle: Tensor, slices: Mapping[str, Tensor], length: float) -> None:
    for kind in ("positive", "hyperbolic"):
        ratio = (slices["trigonometric"] - slices[kind]).exp()
        axis.plot(angle, ratio, LINES[kind], color=COLOURS[kind], label=f"against {kind}", linewidth=1.8)
    axis.axhline(1, color=GREY, linewidth=1)
    axis.set_yscale("log")
    axis.set_ylim(1e-4, 1e6)
    axis.set_ylabel("r, MSE(trigonometric) / MSE of the other")
    axis.set_title(f"(b) slice of r at l = {length:g}", fontsize=10)


def _draw_errors(axis: Axes, angle: Tensor, slices: Mapping[str, Tensor], drawn: Mapping[str, Any]) -> None:
    for kind, values in slices.items():
        axis.plot(angle, values.exp(), LINES[kind], color=COLOURS[kind], label=kind, linewidth=1.8)
        # where there is no error, rounding alone is left
        points = [(phi, mse) for phi, mse in zip(drawn["angle"], drawn[kind]["mse"], strict=True) if mse > 1e-12]
        axis.plot(*zip(*points, strict=True), MARKERS[kind], color=COLOURS[kind], markersize=4)
    axis.set_yscale("log")
    top = max(values.exp().max().item() for values in slices.values())
    axis.set_ylim(1e-8 * top, 3 * top)
    axis.set_ylabel("mean squared error of the estimate")


def _draw_estimates(axis: Axes, drawn: Mapping[str, Any]) -> None:
    kernel = drawn["kernel"]
    axis.axhline(1, color="black", linestyle=":", linewidth=1.8, label="exact")
    shift = 0.02  # radians, so that bars do not hide each other
    for place, (kind, marker) in enumerate(MARKERS.items()):
        axis.errorbar(
            [phi + (place - 1) * shift for phi in drawn["angle"]],
            [mean / exact for mean, exact in zip(drawn[kind]["mean"], kernel, strict=True)],
            [deviation / exact for deviation, exact in zip(drawn[kind]["std"], kernel, strict=True)],
            fmt=marker,
            color=COLOURS[kind],
            label=kind,
            capsize=2,
            markersize=3.5,
            elinewidth=1.2,
        )
    axis.axhline(0, color=GREY, linewidth=1)
    axis.set_ylabel("estimate / exp(x·y)")
