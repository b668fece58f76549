"""The residual block around a gated unit."""

from typing import Any, Dict, Optional

import torch
from timm.layers import DropPath, LayerNorm, LayerScale
from timm.models import checkpoint as timm_checkpoint
from torch import Tensor, nn

from flash_vision.layers.forms import add_onto, compiled, has_compiled_form, train_after
from flash_vision.layers.gau import GatedAttentionUnit
from flash_vision.layers.projections import is_watched
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
    def _unit_after_norm(self, x: Tensor, context: TokenContext, checkpoint: bool) -> Optional[Tensor]:
        """unit(norm(x)) for training with a small memory; None where the modules must be called."""
        if not torch.is_grad_enabled() or not isinstance(self.unit, GatedAttentionUnit):
            return None
        return train_after(self.unit, self.norm, x, context, checkpoint=checkpoint)

    def forward(self, x: Tensor, context: TokenContext, checkpoint: bool = False) -> Tensor:
        """(B, G, P, C) to the same.

        Args:
            checkpoint: keep x alone for the backward pass and compute the rest again there. A unit that can recompute
                itself leaves out its last product, a quarter of the work; for others it is `torch.utils.checkpoint`.
        """
        if not torch.jit.is_scripting():
            out = self._unit_after_norm(x, context, checkpoint)
            if out is not None:
                out = self.drop_path(self.ls(out))
                # a hook may keep what it has seen
                kept = is_watched(self.ls) or is_watched(self.drop_path)
                return x + out if kept or out.dtype != x.dtype else out.add_(x)
            if checkpoint and torch.is_grad_enabled():
                return timm_checkpoint(self, x, context)
            if isinstance(self.unit, GatedAttentionUnit) and has_compiled_form(self.unit):
                x = x.unsqueeze(1)
                return (x + self.drop_path(self.ls(compiled(self.unit, self.norm(x), context)))).squeeze(1)
            if self.overwrites and isinstance(self.unit, GatedAttentionUnit):
                return add_onto(self.unit, x, self.norm(x), context)
        return x + self.drop_path(self.ls(self.unit(self.norm(x), context)))
