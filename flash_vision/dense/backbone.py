"""Any timm backbone in torchvision's detectors: an ordered dict of maps of equal width."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock

from flash_vision.dense.features import TimmFeatures
from flash_vision.dense.simple_pyramid import SimplePyramid


class PyramidBackbone(nn.Module):
    """A timm backbone with a feature pyramid: torchvision's FPN (arXiv 1612.03144), or the simple one on one map.

    Args:
        features: the backbone; its maps are the pyramid's levels, or it has one map.
        out_channels: channels of every level.
        strides: strides of the levels, pixels.
        extra: adds coarser levels.
    Attributes:
        out_channels: what torchvision's detectors read.
    """

    def __init__(
        self, features: TimmFeatures, out_channels: int, *, strides: tuple[int, ...], extra: ExtraFPNBlock
    ) -> None:
        super().__init__()
        self.features = features
        self.out_channels = out_channels
        self.extra = extra
        if len(features.strides) == 1:
            self.neck: nn.Module = SimplePyramid(
                features.channels[0], features.strides[0], out_channels, strides=strides
            )
        else:
            self.neck = FeaturePyramidNetwork(features.channels, out_channels)

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        """Images (B, C, H, W) to levels "0", "1", ..., finest first, then those of `extra`; float32 under autocast."""
        maps = self.features(images)
        names = [str(level) for level in range(len(maps))]
        if isinstance(self.neck, SimplePyramid):
            levels = self.neck(maps[0])
            names = [str(level) for level in range(len(levels))]
        else:
            levels = list(self.neck(OrderedDict(zip(names, maps, strict=True))).values())
        levels, names = self.extra(levels, levels, names)
        # torchvision makes anchors in the maps' type, and half precision would round their corners
        half = (torch.float16, torch.bfloat16)
        return OrderedDict(
            (name, level.float() if level.dtype in half else level) for name, level in zip(names, levels, strict=True)
        )
