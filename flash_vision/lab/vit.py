"""timm's ViT with what our networks have beside their units, to tell what its blocks lose from what those give."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD
from timm.layers import Attention
from timm.models import build_model_with_cfg, register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from flash_vision.lab.cfgs import lab_cfgs
from flash_vision.lab.position import check_position_after, use_conv_stem
from flash_vision.layers import ConditionalPosition
from flash_vision.layers.checks import check_choice
from flash_vision.models.weights import RESIDUAL_GAIN, init_small_residual

LINEAR_INITS = ("timm", "fan_in")
TIMM_STD = 0.02


class TokenPosition(nn.Module):
    """The conditional position encoding of raster tokens, after a block where one is given.

    Args:
        dim: width C.
        grid_size: (rows, columns).
        block: what comes before.
    """

    def __init__(self, dim: int, grid_size: tuple[int, int], block: nn.Module | None = None) -> None:
        super().__init__()
        self.block = nn.Identity() if block is None else block
        self.position = ConditionalPosition(dim)
        self.grid_size = grid_size

    def forward(self, x: Tensor, **block_args: Any) -> Tensor:
        """(B, N, C) to the same."""
        raster = self.block(x, **block_args).unflatten(1, self.grid_size).permute(0, 3, 1, 2)
        return self.position(raster).permute(0, 2, 3, 1).flatten(1, 2)


class ValueConvAttention(Attention):
    """timm's attention plus a depthwise 3x3 convolution of V, the ViT's counterpart of a gated unit's `value_conv`.

    Locally enhanced positional encoding (CSWin, 2107.00652). Tokens are the raster of a square grid.

    Args:
        dim: width C.
        others: as in timm; no norms, no gate and no dropout, and C channels over all heads.
    """

    def __init__(self, dim: int, **others: Any) -> None:
        super().__init__(dim, **others)
        self.value_conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """(B, N, C) to the same."""
        qkv = self.qkv(x)
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal)
        side = math.isqrt(x.shape[1])
        raster = qkv[..., -self.attn_dim :].unflatten(1, (side, side)).permute(0, 3, 1, 2)
        local = self.value_conv(raster).permute(0, 2, 3, 1).flatten(1, 2)
        return self.proj(attended.transpose(1, 2).flatten(2) + local)


class LabViT(VisionTransformer):
    """timm's VisionTransformer with a choice of initial weights and conditional position encodings (2102.10882).

    Args:
        pos_embed_std: deviation of the position embeddings; timm's is .02, FlashGAU's .5.
        linear_init: "timm" (all weights N(0, .02)), or "fan_in": as FlashGAU's default, variance 1 / fan-in, what ends
            a residual branch (attn.proj, mlp.fc2) at a tenth of that deviation, the head N(0, .02).
        position_after: blocks that a conditional position encoding follows, -1 for the patch embedding; takes a model
            without class token.
        conv_stem: see `lab.position.PositionGAU`.
        value_conv: a depthwise convolution of V in every block; takes a square image and no class token.
        others: as in timm.

    Raises:
        ValueError: a deviation that is not above 0, an unknown init, an index without a block, a class token beside
            position_after or value_conv, a grid that is not square with value_conv, or a convolutional stem for patches
            that are not 4 x 4.
    """

    def __init__(
        self,
        *,
        pos_embed_std: float = TIMM_STD,
        linear_init: str = "timm",
        position_after: Sequence[int] = (),
        conv_stem: bool = False,
        value_conv: bool = False,
        **others: Any,
    ) -> None:
        for name, asked in (("position_after", position_after), ("value_conv", value_conv)):
            if asked and others.get("class_token", True):
                raise ValueError(f"class_token must be False with {name}, got {others.get('class_token', True)}")
        check_position_after(position_after, others.get("depth", 12))
        if pos_embed_std <= 0:
            raise ValueError(f"pos_embed_std must be above 0, got {pos_embed_std}")
        check_choice("linear_init", linear_init, LINEAR_INITS)
        # before the parent's constructor, which calls init_weights
        self.pos_embed_std, self.linear_init = pos_embed_std, linear_init
        if value_conv:
            others["attn_layer"] = ValueConvAttention
        super().__init__(**others)
        rows, columns = self.patch_embed.grid_size
        if value_conv and rows != columns:
            raise ValueError(f"img_size must give a square grid of patches with value_conv, got {rows} x {columns}")
        if conv_stem:
            use_conv_stem(self)
        dim, grid_size = self.embed_dim, self.patch_embed.grid_size
        for index in position_after:
            if index == -1:
                self.norm_pre = TokenPosition(dim, grid_size)
            else:
                self.blocks[index] = TokenPosition(dim, grid_size, self.blocks[index])

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """timm's initial weights, then what was chosen; arguments as there."""
        super().init_weights(mode, needs_reset)
        with torch.no_grad():
            if self.pos_embed is not None:
                self.pos_embed.mul_(self.pos_embed_std / TIMM_STD)
            for name, module in self.named_modules() if self.linear_init == "fan_in" else ():
                if isinstance(module, nn.Linear):
                    init_small_residual(module, name, needs_reset=False)
                    if name.endswith(("attn.proj", "mlp.fc2")):
                        module.weight.mul_(RESIDUAL_GAIN)


default_cfgs = lab_cfgs("lab_vit", fixed_input_size=True, mean=IMAGENET_INCEPTION_MEAN, std=IMAGENET_INCEPTION_STD)


@register_model
def lab_vit(pretrained: bool = False, **kwargs: Any) -> LabViT:
    """timm's ViT of the laboratory's size; timm's arguments as keywords."""
    args: dict[str, Any] = dict(img_size=32, patch_size=4, embed_dim=96, depth=6, num_heads=4, mlp_ratio=4.25)
    args |= dict(class_token=False, global_pool="avg")
    return build_model_with_cfg(LabViT, "lab_vit", pretrained, **{**args, **kwargs})
