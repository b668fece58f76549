"""The depthwise convolution of window-major tokens over the raster grid, and its gradients by hand.

Both add onto what is there, so that the move back into window-major order and the sum are one pass over the tokens.
"""

from typing import Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_vision.ops.windows import WindowLayout, merge_windows, partition_windows, windows_per_axis


def add_convolution_(onto: Tensor, x: Tensor, layout: WindowLayout, weight: Tensor, bias: Tensor) -> None:
    """Adds the depthwise 3x3 convolution of x, across the borders of windows and with zeros around the grid.

    Args:
        onto: (B, G, P, E), contiguous; padding tokens stay what they are.
        x: (B, G, P, E); its padding tokens are not seen.
        layout: of both.
        weight, bias: (E, 1, 3, 3) and (E,).

    Cost:
        9 E MACs a token, and one copy of all tokens.
    """
    out = F.conv2d(_map(x, layout), weight.to(x.dtype), bias.to(x.dtype), padding=1, groups=x.shape[3])
    _add_map(onto, out, layout)


def add_convolution_gradient_(
    onto: Tensor, grad: Tensor, x: Tensor, layout: WindowLayout, weight: Tensor, needs: Sequence[bool]
) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """Adds the gradient of `add_convolution_` for x, and gives those for weight and bias.

    Args:
        onto: (B, G, P, E), contiguous.
        grad: (B, G, P, E), of the result.
        x, layout, weight: as there.
        needs: whether weight and bias need theirs.

    Returns:
        (E, 1, 3, 3) and (E,) where needed.
    """
    dim, ones, mask = x.shape[3], [1, 1], [True, *needs]
    where = [dim], ones, ones, ones, False, [0, 0], dim, mask
    maps = _map(grad, layout), _map(x, layout)
    grad_map, *grads = torch.ops.aten.convolution_backward(*maps, weight.to(x.dtype), *where)
    _add_map(onto, grad_map, layout)
    grad_weight, grad_bias = (g.to(weight.dtype) if needed else None for g, needed in zip(grads, needs, strict=True))
    return grad_weight, grad_bias


def _map(x: Tensor, layout: WindowLayout) -> Tensor:
    """(B, G, P, E) to (B, E, H, W) in channels-last memory."""
    return merge_windows(x, layout).permute(0, 3, 1, 2)


def _add_map(onto: Tensor, x: Tensor, layout: WindowLayout) -> None:
    """Adds (B, E, H, W) to (B, G, P, E)."""
    raster = x.permute(0, 2, 3, 1)
    rows, columns = windows_per_axis(layout)
    side_h, side_w = layout.window_height, layout.window_width
    if rows * side_h == layout.height and columns * side_w == layout.width:
        windows = onto.view(-1, rows, columns, side_h, side_w, onto.shape[3]).transpose(2, 3)
        windows += raster.unflatten(2, (columns, side_w)).unflatten(1, (rows, side_h))
    else:
        onto += partition_windows(raster, layout)
