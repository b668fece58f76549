"""Convolutions in raster order: what a pyramid does before its tokens enter window-major order.

Maps are (B, C, H, W) in channels-last memory, so that (B, H, W, C) is a view of them and no copy lies between a
convolution and the tokens. Stride 2 rounds up: a map of any H x W of at least one pixel has one of ceil(H / 2) x
ceil(W / 2), and no image is ever padded to whole patches.
"""

from typing import Any, Dict

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn


class ConvStem(nn.Module):
    """norm(conv(SiLU(norm(conv(image))))), both convolutions 3x3 with stride 2: the map of stride 4.

    A convolutional stem in place of a patch embedding (2106.14881), with layer norm so that small batches behave as
    large ones.

    Args:
        in_chans: image channels.
        dim: width C; the map between the convolutions has C // 2 channels.

    Cost:
        9 in_chans (C // 2) MACs a position of the first map and 9 (C // 2) C a position of the second.
    """

    def __init__(self, in_chans: int, dim: int, *, device=None, dtype=None) -> None:
        super().__init__()
        dd: Dict[str, Any] = {"device": device, "dtype": dtype}
        self.conv1 = nn.Conv2d(in_chans, dim // 2, 3, stride=2, padding=1, bias=False, **dd)
        self.norm1 = LayerNorm2d(dim // 2, **dd)
        self.conv2 = nn.Conv2d(dim // 2, dim, 3, stride=2, padding=1, bias=False, **dd)
        self.norm2 = LayerNorm2d(dim, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """Image (B, in_chans, height, width) to (B, C, ceil(height / 4), ceil(width / 4)), rounded up twice."""
        x = self.norm1(self.conv1(x.contiguous(memory_format=torch.channels_last)))
        return self.norm2(self.conv2(F.silu(x, inplace=not torch.is_grad_enabled())))


class Downsample(nn.Module):
    """norm(conv(x)) with a 3x3 convolution of stride 2, whose windows overlap (2106.13797, section 3.2).

    Args:
        dim: channels that come.
        out_dim: channels that go.

    Cost:
        9 dim out_dim MACs a position of the smaller map.
    """

    def __init__(self, dim: int, out_dim: int, *, device=None, dtype=None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, out_dim, 3, stride=2, padding=1, bias=False, device=device, dtype=dtype)
        self.norm = LayerNorm2d(out_dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(B, dim, H, W) to (B, out_dim, ceil(H / 2), ceil(W / 2))."""
        return self.norm(self.conv(x))


class ConditionalPosition(nn.Module):
    """x + conv(x) with a depthwise 3x3 convolution: positions that depend on the content (CPE, 2102.10882).

    Zeros around the map tell border from interior, so it also carries absolute position, at any size.

    Args:
        dim: width C.

    Cost:
        9 C MACs a token.
    """

    def __init__(self, dim: int, *, device=None, dtype=None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, device=device, dtype=dtype)
        # says channels-last where a batch of one, whose first stride may be anything, does not: in compiled graphs
        self.conv.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to the same."""
        return x + self.conv(x)
