"""Overlapping windows, for the question whether their cost is better spent on more layers.

The keys and values of a window come from the window and a margin around it (HaloNet, 2103.12731, section 3.1); queries
stay inside. A laboratory variant: one head, and two gathers in every layer.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.models import build_model_with_cfg, register_model
from torch import Tensor

from flash_vision.lab.cfgs import lab_cfgs
from flash_vision.layers import MixedChunkUnit
from flash_vision.layers.windows import TokenContext
from flash_vision.models import FlashGAU
from flash_vision.ops.attention import attention_weights, global_product, linear_factors, local_product
from flash_vision.ops.windows import WindowLayout, merge_windows, windows_per_axis


def with_margin(x: Tensor, layout: WindowLayout, margin: int) -> Tensor:
    """Windows (B, G, P, D) grown by `margin` tokens on each side, zeros outside the grid: (B, G, P', D)."""
    rows, columns = windows_per_axis(layout)
    height, width = layout.window_height + 2 * margin, layout.window_width + 2 * margin
    right = columns * layout.window_width - layout.width + margin
    below = rows * layout.window_height - layout.height + margin
    raster = F.pad(merge_windows(x, layout), (0, 0, margin, right, margin, below))
    grown = raster.unfold(1, height, layout.window_height).unfold(2, width, layout.window_width)
    return grown.permute(0, 1, 2, 4, 5, 3).reshape(x.shape[0], rows * columns, height * width, x.shape[3])


def margin_index(layout: WindowLayout, margin: int, reach: int) -> Tensor:
    """Row of a (2 reach + 1)^2 table for each query of a window and key of the grown window: (P, P') int64."""

    def offsets(side: int) -> Tensor:
        queries, keys = torch.arange(side), torch.arange(side + 2 * margin) - margin
        return (queries[:, None] - keys[None, :]).clamp(-reach, reach) + reach

    down, across = offsets(layout.window_height), offsets(layout.window_width)
    index = down[:, None, :, None] * (2 * reach + 1) + across[None, :, None, :]
    return index.reshape(down.shape[0] * across.shape[0], down.shape[1] * across.shape[1])


class OverlapUnit(MixedChunkUnit):
    """O = (U * (local + global)) Wo, the local branch over keys and values of the window and a margin around it.

    Args:
        dim: width C.
        window_size: nominal window side in tokens.
        margin: tokens that keys and values reach beyond the window on each side.
        others: as in `MixedChunkUnit`.

    Cost:
        3 C E + C S + P' (S + E) + 2 S E MACs a token, P' = (side + 2 margin)^2.
    """

    def __init__(
        self,
        dim: int,
        *,
        window_size: int,
        margin: int,
        expansion: float,
        qk_dim: int,
        branches: str,
        global_fn: str,
    ) -> None:
        bias_window = (window_size + margin, window_size + margin)
        super().__init__(
            dim,
            expansion=expansion,
            qk_dim=qk_dim,
            branches=branches,
            global_fn=global_fn,
            bias_window=bias_window,
        )
        self.margin = margin
        self.reach = window_size + margin - 1
        self.recomputes = self.shares_buffers = False  # those forms compute the windows without a margin

    def mix(self, base: Tensor, value: Tensor, context: TokenContext) -> Tensor:
        """Mix the tokens: base, pre-activation, (B, G, P, S) and value (B, G, P, E) to (B, G, P, E)."""
        parameters = self.factor_parameters()
        roles = self._roles(base, parameters, context)
        layout = context.layout
        keys, values = (with_margin(x, layout, self.margin) for x in (roles[1].squeeze(1), value))
        real = torch.ones(1, *value.shape[1:3], 1, device=value.device)
        mask = with_margin(real, layout, self.margin)[0, :, :, 0] > 0
        index = margin_index(layout, self.margin, self.reach).to(value.device)
        bias = parameters[2][:, 0][index]
        weights = attention_weights(roles[0].squeeze(1), keys, bias, mask, score_fn=self.score_fn, divisor=self.divisor)
        mixed = local_product(weights, values)
        if not self.has_global:
            return mixed
        real_tokens = context.key_mask.flatten() if context.key_mask is not None else None
        factors = linear_factors(roles[2].flatten(2, 3), roles[3].flatten(2, 3), real_tokens, global_fn=self.global_fn)
        return mixed + global_product(*factors, value.flatten(1, 2)[:, None])[:, 0].view_as(value)


class OverlapGAU(FlashGAU):
    """FlashGAU with `OverlapUnit` in every block.

    Args:
        expansion, margin: see `OverlapUnit`.
        others: as in `FlashGAU`.

    Raises:
        ValueError: a negative margin, or an option of a unit that `OverlapUnit` does not have.
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        depth: int,
        qk_dim: int,
        window_size: int,
        margin: int,
        expansion: float,
        branches: str,
        global_fn: str,
        **others: Any,
    ) -> None:
        if margin < 0:
            raise ValueError(f"margin must be at least 0, got {margin}")
        for name in ("unit", "score_fn", "divisor", "gate", "num_heads", "value_conv", "rel_pos_bias"):
            if name in others:
                raise ValueError(
                    f"{name} must be left out, overlapping windows have one form of it, got {others[name]}"
                )
        units: dict[str, Any] = dict(expansion=expansion, qk_dim=qk_dim)
        units |= dict(branches=branches, global_fn=global_fn)
        super().__init__(embed_dim=embed_dim, depth=depth, window_size=window_size, **units, **others)
        for block in self.blocks:
            block.unit = OverlapUnit(embed_dim, window_size=window_size, margin=margin, **units)
        self.init_weights(needs_reset=False)


default_cfgs = lab_cfgs("lab_gau_overlap")


@register_model
def lab_gau_overlap(pretrained: bool = False, **kwargs: Any) -> OverlapGAU:
    """Mixed chunk with overlapping windows; sizes as keywords."""
    args: dict[str, Any] = dict(img_size=32, patch_size=4, embed_dim=96, depth=12, window_size=4, margin=1)
    args |= dict(expansion=2.0, qk_dim=16, branches="both", global_fn="inline")
    return build_model_with_cfg(OverlapGAU, "lab_gau_overlap", pretrained, **{**args, **kwargs})
