"""A PNG grid of images with what a model says of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from flash_vision.data.files import written_whole

THUMBNAIL = 224  # pixels


def save_prediction_grid(
    path: str | Path,
    images: Sequence[Image.Image],
    predicted: Sequence[str],
    confidences: Sequence[float],
    *,
    truths: Sequence[str] | None = None,
    title: str = "",
) -> None:
    """Writes a grid of the images, each under its predicted class and confidence.

    Args:
        path: PNG file to write, whole or not at all.
        images: RGB or grey images, at least one, of any size; shown at most 224 pixels wide.
        predicted: class name for each image; long ones are cut.
        confidences: fraction in [0, 1] for each image.
        truths: true class name for each image; a mistake then stands in red with the truth beside it.
        title: line above the grid.
    """
    if not len(images) == len(predicted) == len(confidences) or not images:
        raise ValueError(f"images must be one for each prediction, got {len(images)} and {len(predicted)}")
    columns = min(len(images), max(1, math.ceil(math.sqrt(len(images) * 1.4))))
    rows = math.ceil(len(images) / columns)
    figure = Figure(figsize=(max(1.7 * columns, 3.4), 2.0 * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes:
        axis.set_axis_off()
    for i, (axis, image) in enumerate(zip(axes, images, strict=False)):
        thumbnail = image.copy()
        thumbnail.thumbnail((THUMBNAIL, THUMBNAIL))
        axis.imshow(
            thumbnail, cmap="gray" if thumbnail.mode == "L" else None, vmin=0, vmax=255, interpolation="nearest"
        )
        caption, colour = f"{_cut(predicted[i])}\n{confidences[i]:.1%}", "black"
        if truths is not None and truths[i] != predicted[i]:
            caption, colour = f"{_cut(predicted[i])} (is {_cut(truths[i])})\n{confidences[i]:.1%}", "crimson"
        axis.set_title(caption, fontsize=8, color=colour, parse_math=False)
    if title:
        figure.suptitle(title, fontsize=9, parse_math=False)
    with written_whole(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def _cut(name: str, length: int = 22) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"
