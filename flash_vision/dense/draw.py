"""Detections drawn into their image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch
from PIL import ImageDraw, ImageFont
from torch import Tensor
from torchvision.ops import box_area
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from flash_vision.data.files import written_whole

# told apart by people with a colour vision deficiency too (Okabe and Ito)
COLOURS = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167))
SHORT_SIDE = 480  # pixels: smaller images are enlarged until their labels can be read
LONG_SIDE = 2000  # pixels that enlarging does not pass
MASK_OPACITY = 0.5
FONT = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
FONT_SIZE = 13
MOST_HIDDEN = 0.2  # share of another object that a caption may cover


def draw_detections(
    image: Tensor, boxes: Tensor, labels: Sequence[int], captions: Sequence[str], masks: Tensor | None = None
) -> Tensor:
    """A copy of the image with boxes and captions in the colour of their class, and masks in one colour each.

    A caption that would hide another one, or much of another object, is left out: in a crowd one wants to see the
    objects.

    Args:
        image: (3, H, W), uint8.
        boxes: (N, 4) as x1 y1 x2 y2, pixels, in the order in which they may have a caption.
        labels: class of each box.
        captions: text above each box.
        masks: (N, H, W), bool.
    Returns:
        (3, f H, f W), uint8; small images are enlarged by a whole factor f.
    """
    short, long = sorted(image.shape[1:])
    factor = max(1, min(math.ceil(SHORT_SIDE / short), LONG_SIDE // long))
    drawn = image.repeat_interleave(factor, dim=1).repeat_interleave(factor, dim=2)
    if not len(boxes):
        return drawn
    if masks is not None:
        large = masks.repeat_interleave(factor, dim=1).repeat_interleave(factor, dim=2)
        for number, mask in enumerate(large):  # one by one, since torchvision blackens where masks overlap
            drawn = draw_segmentation_masks(drawn, mask, alpha=MASK_OPACITY, colors=COLOURS[number % len(COLOURS)])
    colours: list[str | tuple[int, int, int]] = [COLOURS[label % len(COLOURS)] for label in labels]
    boxes = boxes.float() * factor
    return _write_captions(draw_bounding_boxes(drawn, boxes, colors=colours, width=2), boxes, captions, colours)


def _write_captions(
    drawn: Tensor, boxes: Tensor, captions: Sequence[str], colours: Sequence[str | tuple[int, int, int]]
) -> Tensor:
    """The captions on the top edges of their boxes, as far as there is room; see `draw_detections`."""
    picture = to_pil_image(drawn)
    canvas, font = ImageDraw.Draw(picture), ImageFont.truetype(str(FONT), FONT_SIZE)
    written = boxes.new_zeros(0, 4)
    for number, (caption, colour) in enumerate(zip(captions, colours, strict=True)):
        _, _, width, height = font.getbbox(caption)
        left = min(max(0.0, float(boxes[number, 0])), max(0.0, picture.width - width))
        top = max(0.0, float(boxes[number, 1]) - height)
        place = boxes.new_tensor([[left, top, left + width, top + height]])
        others = torch.cat([boxes[:number], boxes[number + 1 :]])
        if bool((_shared_area(place, written) > 0).any()):
            continue
        if bool((_shared_area(place, others) > MOST_HIDDEN * box_area(others)).any()):
            continue
        canvas.rectangle([*place[0].tolist()], fill=colour)
        canvas.text((left, top), caption, fill="black", font=font)
        written = torch.cat([written, place])
    return pil_to_tensor(picture)


def _shared_area(place: Tensor, boxes: Tensor) -> Tensor:
    """Area that one box (1, 4) has in common with each of (N, 4): (N,)."""
    sides = torch.minimum(place[:, 2:], boxes[:, 2:]) - torch.maximum(place[:, :2], boxes[:, :2])
    return sides.clamp(min=0).prod(dim=1)


def save_picture(path: Path, picture: Tensor) -> None:
    """Writes a picture (3, H, W), uint8, as PNG, whole or not at all."""
    with written_whole(path) as temporary:
        to_pil_image(picture.to(torch.uint8)).save(temporary, format="png")
