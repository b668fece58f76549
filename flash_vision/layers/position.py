"""Learned positions inside a window."""

from typing import Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def resize_bias_table(table: Tensor, old_window: Tuple[int, int], new_window: Tuple[int, int]) -> Tensor:
    """A relative position table of one nominal window made to fit another: every offset keeps its value.

    Offsets that the old window did not have take the nearest one's value, as `ops.relative_position_index` does at
    run time. Swin's interpolation would instead give each offset the value of a smaller or larger one.

    Args:
        table: ((2h - 1) * (2w - 1), heads) of `old_window` (h, w).
        old_window, new_window: (rows, columns) in tokens.

    Returns:
        The table of `new_window`.
    """
    by_offset = table.t().reshape(1, table.shape[1], 2 * old_window[0] - 1, 2 * old_window[1] - 1)
    rows, columns = new_window[0] - old_window[0], new_window[1] - old_window[1]
    by_offset = F.pad(by_offset, (min(columns, 0),) * 2 + (min(rows, 0),) * 2)  # a smaller window: cut
    by_offset = F.pad(by_offset, (max(columns, 0),) * 2 + (max(rows, 0),) * 2, mode="replicate")
    return by_offset.flatten(2)[0].t().contiguous()


def position_bias(table: Tensor, relative_index: Tensor) -> Tensor:
    """Rows (P, P) of a table (offsets, heads) to the bias (heads, 1, P, P): the second axis spans the windows."""
    area = relative_index.shape[0]
    bias = table[relative_index.flatten()]
    return bias.t().reshape(bias.shape[1], 1, area, area)


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
        """Fit the table to another nominal window."""
        if window_size == self.window_size:
            return
        table = self.relative_position_bias_table
        resized = resize_bias_table(table.detach(), self.window_size, window_size)
        self.relative_position_bias_table = nn.Parameter(resized, requires_grad=table.requires_grad)
        self.window_size = window_size

    def forward(self, relative_index: Tensor) -> Tensor:
        """(P, P) rows of the table to the bias (heads, 1, P, P): the second axis spans the windows."""
        return position_bias(self.relative_position_bias_table, relative_index)
