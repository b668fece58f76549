"""The window layout of an H x W token grid: which window a token lies in, and which tokens are padding.

Tokens enter window-major order (B, G, P, C) once after the stem and leave it once at the outputs, so that a window
is a view everywhere in between. Windows stay a dimension of their own: merged into the batch they would bake
divisibility guards into dynamic exports.
"""

from typing import NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from timm.models import register_notrace_function
from torch import Tensor


class WindowLayout(NamedTuple):
    """Sides, in tokens, of a token grid and of the windows that tile it; the last window of an axis may be padded."""

    height: int
    width: int
    window_height: int
    window_width: int


def window_side(length: int, nominal: int) -> int:
    """The side of the windows along an axis of `length` tokens that leaves the least padding.

    Candidates are the sides from two thirds of `nominal` to one and a half times it; of those with the least padding
    the nearest to `nominal` wins, the larger one in a tie. An axis no longer than `nominal` is one window.

    Args:
        length: tokens along the axis, at least 1.
        nominal: the side asked for, in tokens, at least 1.

    Returns:
        The side in tokens.

    Raises:
        ValueError: if an argument is below 1.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1 token, got {length}")
    if nominal < 1:
        raise ValueError(f"window_size must be at least 1 token, got {nominal}")
    if length <= nominal:
        return length
    best = nominal
    least = -length % nominal
    for distance in range(1, nominal // 2 + 1):
        for side in (nominal + distance, nominal - distance):
            padding = -length % side
            if padding < least and 3 * side >= 2 * nominal:
                best = side
                least = padding
    return best


def window_layout(height: int, width: int, window_size: Tuple[int, int]) -> WindowLayout:
    """The layout of a height x width grid under the nominal `window_size` (rows, columns), all in tokens.

    Raises:
        ValueError: if a side of the grid or of the window is below 1.
    """
    return WindowLayout(height, width, window_side(height, window_size[0]), window_side(width, window_size[1]))


def windows_per_axis(layout: WindowLayout) -> Tuple[int, int]:
    """Windows along the height and along the width; their product is G."""
    rows = (layout.height + layout.window_height - 1) // layout.window_height
    columns = (layout.width + layout.window_width - 1) // layout.window_width
    return rows, columns


@torch.fx.wrap
@register_notrace_function
def partition_windows(x: Tensor, layout: WindowLayout) -> Tensor:
    """Raster order to window-major order; tokens added as padding are zero.

    Args:
        x: (B, H, W, C).
        layout: of the same H and W.

    Returns:
        (B, G, P, C), contiguous.
    """
    if layout.window_height == layout.height and layout.window_width == layout.width:
        # what a convolution left channels-first would stay so through every residual sum
        return x.reshape(x.shape[0], 1, layout.height * layout.width, x.shape[3]).contiguous()
    rows, columns = windows_per_axis(layout)
    side_h, side_w = layout.window_height, layout.window_width
    pad_h, pad_w = rows * side_h - layout.height, columns * side_w - layout.width
    if pad_h > 0 or pad_w > 0:
        x = F.pad(x, (0, 0, 0, pad_w, 0, pad_h))
    batch, channels = x.shape[0], x.shape[3]
    x = x.reshape(batch, rows, side_h, columns, side_w, channels).transpose(2, 3)
    return x.reshape(batch, rows * columns, side_h * side_w, channels)


@torch.fx.wrap
@register_notrace_function
def merge_windows(x: Tensor, layout: WindowLayout) -> Tensor:
    """Window-major order back to raster order, padding cut off: the inverse of `partition_windows`.

    Args:
        x: (B, G, P, C).
        layout: the layout that `x` was partitioned with.

    Returns:
        (B, H, W, C).
    """
    if layout.window_height == layout.height and layout.window_width == layout.width:
        return x.reshape(x.shape[0], layout.height, layout.width, x.shape[3])
    rows, columns = windows_per_axis(layout)
    side_h, side_w = layout.window_height, layout.window_width
    batch, channels = x.shape[0], x.shape[3]
    x = x.reshape(batch, rows, columns, side_h, side_w, channels).transpose(2, 3)
    x = x.reshape(batch, rows * side_h, columns * side_w, channels)
    return x[:, : layout.height, : layout.width]


def key_mask(layout: WindowLayout, device: Optional[torch.device] = None) -> Optional[Tensor]:
    """Which tokens are real: (G, P) bool, or None where the windows tile the grid without padding.

    Every window holds at least one real token, since padding never fills a whole row or column of windows.
    """
    if layout.window_height == layout.height and layout.window_width == layout.width:
        return None
    rows, columns = windows_per_axis(layout)
    if rows * layout.window_height == layout.height and columns * layout.window_width == layout.width:
        return None
    real = torch.ones(1, layout.height, layout.width, 1, device=device)
    return partition_windows(real, layout)[0, :, :, 0] > 0
