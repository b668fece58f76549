"""Convolutions outside the gated units, for the question what a convolution is worth, and where.

A unit's `value_conv` convolves E channels in every unit. Here are conditional position encodings, of C channels after a
few units, and a convolutional stem.
"""

from collections.abc import Sequence
from typing import Any

from timm.models import build_model_with_cfg, register_model
from torch import Tensor, nn

from flash_vision.lab.cfgs import lab_cfgs
from flash_vision.layers import ConditionalPosition, ConvStem, GatedBlock
from flash_vision.layers.windows import TokenContext
from flash_vision.models import FlashGAU
from flash_vision.ops.windows import merge_windows, partition_windows


def check_position_after(position_after: Sequence[int], depth: int) -> None:
    """Raises ValueError for an index that is neither -1 nor that of a block, or that is there twice."""
    wrong = [index for index in position_after if index not in range(-1, depth)]
    if wrong:
        raise ValueError(f"position_after must be -1 or indices of the {depth} blocks, got {wrong[0]}")
    if len(set(position_after)) < len(position_after):
        raise ValueError(f"position_after must hold every index once, got {list(position_after)}")


def use_conv_stem(model: Any) -> None:
    """Puts `ConvStem` in the place of the convolution of a model's PatchEmbed.

    Raises:
        ValueError: its patches are not 4 x 4.
    """
    if model.patch_embed.patch_size != (4, 4):
        raise ValueError(f"patch_size must be 4 with conv_stem, got {model.patch_embed.patch_size}")
    model.patch_embed.proj = ConvStem(model.patch_embed.proj.in_channels, model.embed_dim)


class PositionedBlock(nn.Module):
    """A block and the conditional position encoding of what it gives.

    Args:
        block: the block.
        dim: width C.
    """

    def __init__(self, block: GatedBlock, dim: int) -> None:
        super().__init__()
        self.block = block
        self.position = ConditionalPosition(dim)

    @property
    def overwrites(self) -> bool:
        """Whether the block writes its output over its input."""
        return self.block.overwrites

    def forward(self, x: Tensor, context: TokenContext, checkpoint: bool = False) -> Tensor:
        """(B, G, P, C) to the same; arguments as in `GatedBlock`."""
        raster = merge_windows(self.block(x, context, checkpoint), context.layout)
        return partition_windows(self.position(raster.permute(0, 3, 1, 2)).permute(0, 2, 3, 1), context.layout)


class PositionGAU(FlashGAU):
    """FlashGAU with a conditional position encoding after some of its blocks.

    Args:
        position_after: indices of the blocks; -1 for the patch embedding.
        conv_stem: `ConvStem` in place of the patch embedding's one convolution; takes patch_size 4.
        others: as in `FlashGAU`.

    Raises:
        ValueError: an index without a block, or a convolutional stem for other patches.
    """

    def __init__(
        self, *, embed_dim: int, depth: int, position_after: Sequence[int], conv_stem: bool = False, **others: Any
    ) -> None:
        check_position_after(position_after, depth)
        super().__init__(embed_dim=embed_dim, depth=depth, position_conv=-1 in position_after, **others)
        if conv_stem:
            use_conv_stem(self)
        for index in set(position_after) - {-1}:
            self.blocks[index] = PositionedBlock(self.blocks[index], embed_dim)  # pyright: ignore[reportArgumentType]


default_cfgs = lab_cfgs("lab_gau_position")


@register_model
def lab_gau_position(pretrained: bool = False, **kwargs: Any) -> PositionGAU:
    """Mixed chunk with convolutions between units; sizes as keywords."""
    args: dict[str, Any] = dict(img_size=32, patch_size=4, embed_dim=96, depth=12, window_size=4, position_after=(0,))
    return build_model_with_cfg(PositionGAU, "lab_gau_position", pretrained, **{**args, **kwargs})
