"""From the image to patches with positions: what `isotropic.py` checks and adds around timm's PatchEmbed."""

from typing import Sequence, Tuple, Union

import torch
from timm.layers import resample_abs_pos_embed
from timm.models import register_notrace_function
from torch import Tensor

from flash_vision.layers.checks import positive_pair
from flash_vision.ops.position import sincos_position_embedding


@torch.fx.wrap
@register_notrace_function
def check_image(x: Tensor, patch_size: Tuple[int, int]) -> None:
    """Raises ValueError where the image (B, channels, height, width) is smaller than one patch."""
    height, width = x.shape[2], x.shape[3]
    if height < patch_size[0] or width < patch_size[1]:
        raise ValueError(f"images must be at least one patch of {patch_size} pixels, got {height} x {width}")


@torch.fx.wrap
@register_notrace_function
def add_position(x: Tensor, pos_embed: Tensor, grid_height: int, grid_width: int) -> Tensor:
    """x (B, H, W, C) + the learned (1, N, C) of the nominal grid, resampled where the grid is another."""
    height, width = x.shape[1], x.shape[2]
    resampled = resample_abs_pos_embed(
        pos_embed, new_size=[height, width], old_size=[grid_height, grid_width], num_prefix_tokens=0
    )
    return x + resampled.view(1, height, width, x.shape[3])


@torch.fx.wrap
@register_notrace_function
def add_sincos(x: Tensor, scale: Tensor) -> Tensor:
    """x (B, H, W, C) + scale * sinusoids (the scaled sinusoidal input embedding of 2202.10447, in 2-D)."""
    return x + scale * sincos_position_embedding(x.shape[1], x.shape[2], x.shape[3], x.device, x.dtype)


def image_and_patch(
    img_size: Union[int, Sequence[int]], patch_size: Union[int, Sequence[int]]
) -> Tuple[Tuple[int, int], Tuple[int, int]]:
    """Both as (height, width) in pixels.

    Raises:
        ValueError: a side below 1, or an image smaller than one patch.
    """
    image, patch = positive_pair("img_size", img_size), positive_pair("patch_size", patch_size)
    if image[0] < patch[0] or image[1] < patch[1]:
        raise ValueError(f"img_size must be at least one patch of {patch} pixels, got {image}")
    return image, patch
