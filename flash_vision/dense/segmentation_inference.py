"""Class logits of whole images, in one pass or from overlapping windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Windows:
    """How an image is cut for a model.

    Args:
        size: (height, width) of a window in pixels; None for the whole image in one pass.
        overlap: least share of a window, in [0, 1), that its neighbour covers too.
        per_pass: windows that the model is given at once.
    Raises:
        ValueError: a number out of range.
    """

    size: tuple[int, int] | None = None
    overlap: float = 1 / 3
    per_pass: int = 4

    def __post_init__(self) -> None:
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise ValueError(f"window must be (height, width) of at least 1 pixel, got {self.size}")
        if not 0 <= self.overlap < 1:
            raise ValueError(f"window_overlap must be in [0, 1), got {self.overlap}")
        if self.per_pass < 1:
            raise ValueError(f"windows per pass must be at least 1, got {self.per_pass}")


WHOLE_IMAGE = Windows()


def predict_logits(model: Model, images: Tensor, windows: Windows = WHOLE_IMAGE) -> Tensor:
    """Logits of images of one size; where several windows cover a pixel, the mean of their logits.

    A window that covers the whole image gives what one pass gives.

    Args:
        model: (B, 3, h, w) to logits (B, K, h, w).
        images: (B, 3, H, W), normalised.
        windows: how the images are cut.
    Returns:
        (B, K, H, W).
    """
    if windows.size is None:
        return model(images)
    batch, _, height, width = images.shape
    tall, wide = min(windows.size[0], height), min(windows.size[1], width)
    rows, columns = (window_starts(*sides, windows.overlap) for sides in ((height, tall), (width, wide)))
    corners = [(y, x) for y in rows for x in columns]
    total, times = None, images.new_zeros(height, width)
    for start in range(0, len(corners), windows.per_pass):
        group = corners[start : start + windows.per_pass]
        crops = torch.cat([images[..., y : y + tall, x : x + wide] for y, x in group])
        for (y, x), logits in zip(group, model(crops).split(batch), strict=True):
            if total is None:
                total = logits.new_zeros(batch, logits.shape[1], height, width)
            total[..., y : y + tall, x : x + wide] += logits
            times[y : y + tall, x : x + wide] += 1
    assert total is not None
    return total / times


def window_starts(length: int, window: int, overlap: float) -> list[int]:
    """First pixels of the fewest windows that cover `length` pixels, evenly spread, with at least this overlap."""
    if window >= length:
        return [0]
    steps = -(-(length - window) // max(1, int(window * (1 - overlap))))
    return [step * (length - window) // steps for step in range(steps + 1)]
