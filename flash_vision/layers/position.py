"""Learned positions inside a window."""

from typing import Tuple

import torch
from timm.layers import resize_rel_pos_bias_table
from torch import Tensor, nn


class RelativePositionBias(nn.Module):
    """One learned score offset for each 2-D offset inside a window and each head (Swin, 2103.14030, section 3.2).

    The table belongs to the nominal window; `ops.relative_position_index` maps windows of any other size onto it.

    Args:
        window_size: nominal (rows, columns) in tokens.
        num_heads: heads with a bias of their own.
    """

    def __init__(self, window_size: Tuple[int, int], num_heads: int = 1, *, device=None, dtype=None) -> None:
        super().__init__()
        self.window_size = window_size
        num_offsets = (2 * window_size[0] - 1) * (2 * window_size[1] - 1)
        self.relative_position_bias_table = nn.Parameter(
            torch.empty(num_offsets, num_heads, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Truncated normal of deviation 0.02."""
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def set_window_size(self, window_size: Tuple[int, int]) -> None:
        """Resample the table to another nominal window."""
        if window_size == self.window_size:
            return
        table = self.relative_position_bias_table
        shape = ((2 * window_size[0] - 1) * (2 * window_size[1] - 1), table.shape[1])
        with torch.no_grad():
            resized = resize_rel_pos_bias_table(table, window_size, shape, old_window_size=self.window_size)
        self.relative_position_bias_table = nn.Parameter(resized, requires_grad=table.requires_grad)
        self.window_size = window_size

    def forward(self, relative_index: Tensor) -> Tensor:
        """(P, P) rows of the table to the bias (heads, 1, P, P): the second axis spans the windows."""
        area = relative_index.shape[0]
        bias = self.relative_position_bias_table[relative_index.flatten()]
        return bias.t().reshape(bias.shape[1], 1, area, area)
