"""The simple feature pyramid of ViTDet (Li, Mao, Girshick, He: arXiv 2203.16527, section 3): four maps from one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from timm.layers import LayerNorm2d
from torch import Tensor, nn


class SimplePyramid(nn.Module):
    """Maps at several strides from the one map of an isotropic backbone, without top-down connections.

    A finer map comes from deconvolutions of kernel and stride 2 that halve the channels each (LayerNorm and GELU
    between two), a coarser one from max pooling; each then passes a 1x1 and a 3x3 convolution with LayerNorm. From
    stride 16 these are the paper's factors 4, 2, 1 and 1/2; another stride takes as many steps as it needs.

    Args:
        in_channels: channels of the backbone's map.
        in_stride: its stride, a power of two, pixels.
        out_channels: channels of every map of the pyramid.
        strides: strides of the pyramid, powers of two, pixels.
    """

    def __init__(
        self, in_channels: int, in_stride: int, out_channels: int, *, strides: Sequence[int] = (4, 8, 16, 32)
    ) -> None:
        super().__init__()
        self.levels = nn.ModuleList(_level(in_channels, in_stride, out_channels, stride) for stride in strides)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Map (B, in_channels, H, W) to maps (B, out_channels, H * in_stride / stride, W * in_stride / stride)."""
        return [level(x) for level in self.levels]


def _level(channels: int, in_stride: int, out_channels: int, stride: int) -> nn.Sequential:
    steps = round(math.log2(in_stride / stride))
    layers: list[nn.Module] = []
    for step in range(max(0, steps)):
        if step:
            layers += [LayerNorm2d(channels), nn.GELU()]
        narrower = max(1, channels // 2)
        layers.append(nn.ConvTranspose2d(channels, narrower, kernel_size=2, stride=2))
        channels = narrower
    if steps < 0:
        layers.append(nn.MaxPool2d(2**-steps))
    layers += [
        nn.Conv2d(channels, out_channels, kernel_size=1, bias=False),
        LayerNorm2d(out_channels),
        nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
        LayerNorm2d(out_channels),
    ]
    return nn.Sequential(*layers)
