"""Detections drawn into their image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from flash_vision.data.files import written_whole

# told apart by people with a colour vision deficiency too (Okabe and Ito)
COLOURS = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167))
SHORT_SIDE = 480  # pixels: smaller images are enlarged until their labels can be read
MASK_OPACITY = 0.5
FONT = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
FONT_SIZE = 13


def draw_detections(
    image: Tensor, boxes: Tensor, labels: Sequence[int], captions: Sequence[str], masks: Tensor | None = None
) -> Tensor:
    """A copy of the image with boxes and captions in the colour of their class, and masks in one colour each.

    Args:
        image: (3, H, W), uint8.
        boxes: (N, 4) as x1 y1 x2 y2, pixels.
        labels: class of each box.
        captions: text at each box.
        masks: (N, H, W), bool.
    Returns:
        (3, f H, f W), uint8; small images are enlarged by a whole factor f.
    """
    factor = max(1, SHORT_SIDE // min(image.shape[1:]))
    drawn = image.repeat_interleave(factor, dim=1).repeat_interleave(factor, dim=2)
    if not len(boxes):
        return drawn
    if masks is not None:
        large = masks.repeat_interleave(factor, dim=1).repeat_interleave(factor, dim=2)
        for number, mask in enumerate(large):  # one by one, since torchvision blackens where masks overlap
            drawn = draw_segmentation_masks(drawn, mask, alpha=MASK_OPACITY, colors=COLOURS[number % len(COLOURS)])
    colours: list[str | tuple[int, int, int]] = [COLOURS[label % len(COLOURS)] for label in labels]
    return draw_bounding_boxes(
        drawn, boxes.float() * factor, list(captions), colors=colours, width=2, font=str(FONT), font_size=FONT_SIZE,
        label_colors="black", label_background_colors=colours, fill_labels=True,
    )  # fmt: skip


def save_picture(path: Path, picture: Tensor) -> None:
    """Writes a picture (3, H, W), uint8, as PNG, whole or not at all."""
    with written_whole(path) as temporary:
        to_pil_image(picture.to(torch.uint8)).save(temporary, format="png")
