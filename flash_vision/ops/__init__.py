"""Pure functions on tensors: attention, window layouts, positions. `reference` holds the obvious definitions."""

from flash_vision.ops.attention import linear_attention, quadratic_attention
from flash_vision.ops.position import relative_position_index, rotary_table, rotate, sincos_position_embedding
from flash_vision.ops.windows import WindowLayout, key_mask, merge_windows, partition_windows, window_layout

__all__ = [
    "WindowLayout",
    "key_mask",
    "linear_attention",
    "merge_windows",
    "partition_windows",
    "quadratic_attention",
    "relative_position_index",
    "rotary_table",
    "rotate",
    "sincos_position_embedding",
    "window_layout",
]
