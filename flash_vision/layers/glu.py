"""The gated linear unit: GAU's predecessor, and the control without token mixing."""

from typing import Any, Dict

import torch.nn.functional as F
from torch import Tensor, nn

from flash_vision.layers.checks import check_positive
from flash_vision.layers.windows import TokenContext


class GatedLinearUnit(nn.Module):
    """O = (SiLU(X Wu) * SiLU(X Wv)) Wo (2002.05202; FLASH, 2202.10447, equation 2).

    Tokens do not see each other: the floor that any token mixing must beat.

    Args:
        dim: width C.
        expansion: E / C.

    Cost:
        3 C E MACs a token.
    """

    def __init__(self, dim: int, *, expansion: float = 2.0, device=None, dtype=None) -> None:
        super().__init__()
        dd: Dict[str, Any] = {"device": device, "dtype": dtype}
        hidden_dim = int(dim * expansion)
        check_positive("dim * expansion", hidden_dim)
        self.gate = nn.Linear(dim, hidden_dim, bias=False, **dd)
        self.value = nn.Linear(dim, hidden_dim, bias=False, **dd)
        self.proj = nn.Linear(hidden_dim, dim, bias=False, **dd)

    def forward(self, x: Tensor, context: TokenContext) -> Tensor:
        """(B, G, P, C) to the same. The context is part of every unit's signature; this one mixes no tokens."""
        return self.proj(F.silu(self.gate(x)) * F.silu(self.value(x)))
