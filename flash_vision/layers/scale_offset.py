"""Affine roles of one shared base."""

from typing import Any, Dict, List

import torch
from torch import Tensor, nn


def scale_offset(base: Tensor, gamma: Tensor, beta: Tensor) -> List[Tensor]:
    """gamma_i * Z + beta_i for each row i: base (..., S), gamma and beta (roles, S), to a list of (..., S)."""
    shape = [gamma.shape[0]] + [1] * (base.dim() - 1) + [gamma.shape[1]]
    roles = torch.addcmul(beta.to(base.dtype).view(shape), base.unsqueeze(0), gamma.to(base.dtype).view(shape))
    return list(roles.unbind(0))


class ScaleOffset(nn.Module):
    """Role i of a base Z is gamma_i * Z + beta_i (FLASH, 2202.10447, section 3.1).

    Starts as the identity (gamma 1, beta 0); the published init is gamma ~ N(0, .02), see `init_weights` of the
    models. Under it a relu2 branch starts near 1e-11, which float16 does not hold.

    Args:
        dim: channels S of the base.
        num_roles: queries and keys to make of it.
    """

    def __init__(self, dim: int, num_roles: int, *, device=None, dtype=None) -> None:
        super().__init__()
        dd: Dict[str, Any] = {"device": device, "dtype": dtype}
        self.gamma = nn.Parameter(torch.empty(num_roles, dim, **dd))
        self.beta = nn.Parameter(torch.empty(num_roles, dim, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """gamma 1, beta 0."""
        nn.init.ones_(self.gamma)
        nn.init.zeros_(self.beta)

    def forward(self, base: Tensor) -> List[Tensor]:
        """(..., S) to `num_roles` tensors (..., S)."""
        return scale_offset(base, self.gamma, self.beta)

    def extra_repr(self) -> str:
        return f"num_roles={self.gamma.shape[0]}, dim={self.gamma.shape[1]}"
