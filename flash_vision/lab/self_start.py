"""Units that start as gated linear units, each token attending to itself, for the question whether that helps.

At the start relu(q k)^2 / n gives a token about a tenth of its own value or less, and the gate has nearly nothing to
multiply. With a bias at offset 0 whose square, over n, is 1 the unit is a GLU beside what attention adds.
"""

from typing import Any

import torch
from timm.models import build_model_with_cfg, register_model
from torch import nn

from flash_vision.lab.cfgs import lab_cfgs
from flash_vision.layers import RelativePositionBias
from flash_vision.models import FlashGAU


class SelfStartGAU(FlashGAU):
    """FlashGAU whose relative position biases start at `self_score` for a token and itself.

    Args:
        self_score: the bias at offset 0 at the start.
        others: as in `FlashGAU`.
    """

    def __init__(self, *, self_score: float, **others: Any) -> None:
        self.self_score = self_score
        super().__init__(**others)

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """As `FlashGAU`, and then the biases at offset 0."""
        super().init_weights(mode, needs_reset)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, RelativePositionBias):
                    table = module.relative_position_bias_table
                    table[table.shape[0] // 2] = self.self_score


default_cfgs = lab_cfgs("lab_gau_self")


@register_model
def lab_gau_self(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Gated units that start as GLUs; sizes as keywords."""
    args: dict[str, Any] = dict(img_size=32, patch_size=4, embed_dim=96, depth=12, window_size=4, self_score=1.0)
    return build_model_with_cfg(SelfStartGAU, "lab_gau_self", pretrained, **{**args, **kwargs})
