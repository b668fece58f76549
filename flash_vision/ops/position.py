"""Position tables: relative index, 2-D rotary angles, 2-D sinusoids. All in units of tokens."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from flash_vision.ops.windows import WindowLayout, partition_windows


def relative_position_index(
    layout: WindowLayout, table_window: Tuple[int, int], device: Optional[torch.device] = None
) -> Tensor:
    """For each (query, key) of a window the row of a relative position table that holds their offset.

    The table has one row for each offset within a `table_window` (rows, columns): (2h - 1) * (2w - 1) rows, by
    vertical and then horizontal offset, as Swin orders it (2103.14030, section 3.2). A window larger than the table's
    takes the table's outermost row for offsets beyond it, so one table serves every window and image size.

    Returns:
        (P, P) int64.
    """
    rows = torch.arange(layout.window_height, device=device)
    columns = torch.arange(layout.window_width, device=device)
    reach_h, reach_w = table_window[0] - 1, table_window[1] - 1
    offset_h = (rows[:, None] - rows[None, :]).clamp(-reach_h, reach_h) + reach_h
    offset_w = (columns[:, None] - columns[None, :]).clamp(-reach_w, reach_w) + reach_w
    index = offset_h[:, None, :, None] * (2 * reach_w + 1) + offset_w[None, :, None, :]
    area = layout.window_height * layout.window_width
    return index.reshape(area, area)


def rotary_table(
    layout: WindowLayout, dim: int, temperature: float, device: Optional[torch.device] = None
) -> Tuple[Tensor, Tensor]:
    """Cosine and sine of the 2-D rotary angles of every token, in window-major order.

    Frequencies are temperature^(-i / (dim / 4)); the first half of the angles turns with the row, the second with
    the column (RoFormer, 2104.09864, equation 15, one axis each for height and width).

    Args:
        layout: G windows of P tokens.
        dim: channels to rotate, a multiple of 4.
        temperature: base of the frequencies.

    Returns:
        Two tensors (G, P, dim / 2), float32.
    """
    quarter = dim // 4
    exponent = torch.arange(quarter, device=device, dtype=torch.float32) / quarter
    frequency = torch.pow(torch.tensor(temperature, device=device, dtype=torch.float32), -exponent)
    rows = torch.arange(layout.height, device=device, dtype=torch.float32)
    columns = torch.arange(layout.width, device=device, dtype=torch.float32)
    angle_h = (rows[:, None] * frequency)[:, None, :].expand(layout.height, layout.width, quarter)
    angle_w = (columns[:, None] * frequency)[None, :, :].expand(layout.height, layout.width, quarter)
    angle = partition_windows(torch.cat([angle_h, angle_w], dim=-1)[None], layout)[0]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the channel pairs (i, i + S/2) of x by the angles of `rotary_table`.

    Args:
        x: (..., G, P, S).
        cosine, sine: (G, P, S / 2).

    Returns:
        Shape and dtype of x.
    """
    first, second = x.chunk(2, dim=-1)
    cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def sincos_position_embedding(
    height: int, width: int, dim: int, device: Optional[torch.device] = None, dtype: Optional[torch.dtype] = None
) -> Tensor:
    """Fixed 2-D sinusoids: a quarter of the channels each for sin and cos of the row and of the column.

    Frequencies are 10000^(-i / (dim / 4)), as in Attention Is All You Need (1706.03762, section 3.5), per axis.

    Args:
        height, width: the grid in tokens.
        dim: channels, a multiple of 4.

    Returns:
        (1, H, W, dim).
    """
    quarter = dim // 4
    frequency = 10000.0 ** (-torch.arange(quarter, device=device, dtype=torch.float32) / quarter)
    rows = torch.arange(height, device=device, dtype=torch.float32)[:, None] * frequency
    columns = torch.arange(width, device=device, dtype=torch.float32)[:, None] * frequency
    by_row = torch.cat([rows.sin(), rows.cos()], dim=-1)[:, None, :].expand(height, width, 2 * quarter)
    by_column = torch.cat([columns.sin(), columns.cos()], dim=-1)[None, :, :].expand(height, width, 2 * quarter)
    return torch.cat([by_row, by_column], dim=-1)[None].to(dtype)
