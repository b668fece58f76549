"""Pure functions on tensors: attention, window layouts, positions. `reference` holds the obvious definitions."""

from flash_vision.ops.attention import (
    attention_weights,
    linear_attention,
    linear_factors,
    mixed_product,
    quadratic_attention,
)
from flash_vision.ops.position import relative_position_index, rotary_table, rotate, sincos_position_embedding
from flash_vision.ops.windows import WindowLayout, key_mask, merge_windows, partition_windows, window_layout

__all__ = [
    "WindowLayout",
    "attention_weights",
    "key_mask",
    "linear_attention",
    "linear_factors",
    "merge_windows",
    "mixed_product",
    "partition_windows",
    "quadratic_attention",
    "relative_position_index",
    "rotary_table",
    "rotate",
    "sincos_position_embedding",
    "window_layout",
]
