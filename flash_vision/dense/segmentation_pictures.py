"""Pictures of a segmentation: classes laid over the image, with a legend of their colours, names and shares."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from flash_vision.dense.segmentation_classes import VOID, ClassSet

VOID_COLOUR = (0, 0, 0)
_MAX_NAME = 24  # letters


def class_shares(labels: NDArray[Any], classes: ClassSet) -> dict[str, float]:
    """Share of the pixels, in [0, 1], of each class that occurs, largest first; void pixels are left out."""
    counts = np.bincount(labels[labels != VOID], minlength=classes.num_classes)
    order = np.argsort(-counts, kind="stable")
    return {classes.names[index]: float(counts[index] / counts.sum()) for index in order if counts[index]}


def overlay(
    image: Image.Image, labels: NDArray[Any], classes: ClassSet, *, opacity: float = 0.55, title: str = ""
) -> Image.Image:
    """The image with each pixel tinted in the colour of its class, beside a legend of the classes that occur.

    Args:
        image: RGB picture.
        labels: classes (H, W) of its pixels; VOID pixels are darkened.
        opacity: of the colours, in [0, 1].
        title: line above the legend.
    Returns:
        The tinted picture on the left, the legend on white to its right.
    """
    if image.size != labels.shape[::-1]:
        raise ValueError(f"labels must be of the image's size {image.size}, got {labels.shape[::-1]}")
    colours = np.array([*classes.palette, VOID_COLOUR], dtype=np.float32)  # VOID is -1, the last entry
    tinted = (1 - opacity) * np.asarray(image.convert("RGB"), dtype=np.float32) + opacity * colours[labels]
    picture = Image.fromarray(tinted.round().astype(np.uint8))
    legend = _legend(labels, classes, height=picture.height, title=title)
    canvas = Image.new("RGB", (picture.width + legend.width, max(picture.height, legend.height)), "white")
    canvas.paste(picture, (0, 0))
    canvas.paste(legend, (picture.width, 0))
    return canvas


def side_by_side(pictures: list[Image.Image]) -> Image.Image:
    """Pictures in one row, their upper edges in line."""
    canvas = Image.new("RGB", (sum(p.width for p in pictures), max(p.height for p in pictures)), "white")
    left = 0
    for picture in pictures:
        canvas.paste(picture, (left, 0))
        left += picture.width
    return canvas


def _legend(labels: NDArray[Any], classes: ClassSet, *, height: int, title: str) -> Image.Image:
    """A white strip with a swatch, the name and the share of each class, in as many columns as the height asks for."""
    entries = [(_cut(name), classes.palette[classes.names.index(name)], f"{share:.1%}") for name, share in
               class_shares(labels, classes).items()]  # fmt: skip
    if void := float((labels == VOID).mean()):
        entries.append(("(void)", VOID_COLOUR, f"{void:.1%} of all"))
    text = min(max(height // 26, 11), 28)
    font = ImageFont.load_default(size=text)
    row, gap, top = round(text * 1.5), round(text * 0.6), round(text * 2) if title else round(text * 0.4)
    rows = max(1, min(len(entries), (max(height, 4 * row) - top) // row))
    measure = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    wide = max([measure.textlength(f"{name}  {share}", font=font) for name, _, share in entries], default=0.0)
    column = round(wide) + text + 3 * gap
    columns = max(1, -(-len(entries) // rows))
    width = max(columns * column, round(measure.textlength(title, font=font)) + 2 * gap)
    strip = Image.new("RGB", (width, max(height, top + rows * row)), "white")
    draw = ImageDraw.Draw(strip)
    if title:
        draw.text((gap, round(text * 0.4)), title, fill="black", font=font)
    for index, (name, colour, share) in enumerate(entries):
        x, y = gap + index // rows * column, top + index % rows * row
        draw.rectangle((x, y + text // 6, x + text, y + text // 6 + text), fill=colour, outline="black")
        draw.text((x + text + gap, y), f"{name}  {share}", fill="black", font=font)
    return strip


def _cut(name: str) -> str:
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…"
