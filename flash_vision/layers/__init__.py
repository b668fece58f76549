"""Modules that own parameters: the gated units, their positions, the windows and the raster maps they run on."""

from flash_vision.layers.block import GatedBlock
from flash_vision.layers.gau import GatedAttentionUnit, MixedChunkUnit
from flash_vision.layers.glu import GatedLinearUnit
from flash_vision.layers.position import RelativePositionBias
from flash_vision.layers.raster import ConditionalPosition, ConvStem, Downsample
from flash_vision.layers.scale_offset import ScaleOffset
from flash_vision.layers.windows import TokenContext, TokenWindows

__all__ = [
    "ConditionalPosition",
    "ConvStem",
    "Downsample",
    "GatedAttentionUnit",
    "GatedBlock",
    "GatedLinearUnit",
    "MixedChunkUnit",
    "RelativePositionBias",
    "ScaleOffset",
    "TokenContext",
    "TokenWindows",
]
