"""The residual block around a gated unit."""

from typing import Any, Dict, Optional

import torch
from timm.layers import DropPath, LayerNorm, LayerScale
from timm.models import checkpoint as timm_checkpoint
from torch import Tensor, nn

from flash_vision.layers.gau import GatedAttentionUnit
from flash_vision.layers.windows import TokenContext


class GatedBlock(nn.Module):
    """X + DropPath(LayerScale(unit(norm(X)))), pre-norm; two of these stand where a ViT has one block.

    Args:
        dim: width C.
        unit: GatedAttentionUnit, MixedChunkUnit or GatedLinearUnit.
        init_values: start of LayerScale (2103.17239); None for no LayerScale.
        drop_path: fraction of samples that skip the unit in training.
    """

    def __init__(
        self,
        dim: int,
        unit: nn.Module,
        *,
        init_values: Optional[float] = None,
        drop_path: float = 0.0,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        dd: Dict[str, Any] = {"device": device, "dtype": dtype}
        self.norm = LayerNorm(dim, **dd)
        self.unit = unit
        self.ls = LayerScale(dim, init_values=init_values, **dd) if init_values is not None else nn.Identity()
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.overwrites = False

    def reparameterize(self) -> None:
        """For inference: LayerScale becomes part of the unit's output projection, stochastic depth goes.

        From then on a forward pass without gradients may write its output over its input.
        """
        if isinstance(self.ls, LayerScale):
            with torch.no_grad():
                self.unit.get_submodule("proj").get_parameter("weight").mul_(self.ls.gamma[:, None])
            self.ls = nn.Identity()
        self.drop_path = nn.Identity()
        self.overwrites = isinstance(self.unit, GatedAttentionUnit)

    @torch.jit.unused
    def _checkpointed(self, x: Tensor, context: TokenContext) -> Tensor:
        """forward that keeps x, or x and norm(x), for the backward pass.

        A unit that recomputes itself needs norm(x), and leaves out its last product, a quarter of the work.
        """
        if isinstance(self.unit, GatedAttentionUnit) and self.unit.recomputes_itself():
            return x + self.drop_path(self.ls(self.unit(self.norm(x), context, checkpoint=True)))
        return timm_checkpoint(self, x, context)

    def forward(self, x: Tensor, context: TokenContext, checkpoint: bool = False) -> Tensor:
        """(B, G, P, C) to the same; `checkpoint`: compute most of it again in the backward pass, to save memory."""
        if not torch.jit.is_scripting():
            if checkpoint and torch.is_grad_enabled():
                return self._checkpointed(x, context)
            if self.overwrites:
                return self.unit.add_onto(x, self.norm(x), context)
        return x + self.drop_path(self.ls(self.unit(self.norm(x), context)))
