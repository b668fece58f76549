"""Entry into window-major order, with everything about the layout that every layer shares."""

from typing import TYPE_CHECKING, Dict, NamedTuple, Optional, Tuple

import torch
from timm.layers import is_exporting
from timm.models import register_notrace_module
from torch import Tensor, nn

from flash_vision.ops.position import relative_position_index, rotary_table
from flash_vision.ops.windows import WindowLayout, key_mask, partition_windows, window_layout


class TokenContext(NamedTuple):
    """What the units need to know of the tokens' layout; made once for each forward pass."""

    layout: WindowLayout
    key_mask: Optional[Tensor]  # (G, P) bool, True for real tokens; None without padding
    relative_index: Tensor  # (P, P) rows of the relative position table
    rotary: Optional[Tuple[Tensor, Tensor]]  # cosine and sine, each (G, P, S / heads / 2)
    buffers: Dict[str, Tensor]  # shared by the units of one forward pass, see `ops.gated.shared_buffer`


class TokenWindows(nn.Module):
    """Raster tokens to window-major tokens, once, and the shared tables of their layout.

    The tables of the nominal grid are buffers; another grid makes its own in each forward pass (P^2 integers).

    Args:
        grid_size: nominal grid (rows, columns) in tokens.
        window_size: nominal window (rows, columns) in tokens; also the reach of the relative position tables.
        one_window: the whole grid is one window, for quadratic attention.
        rotary_dim: channels to rotate of each query and key, 0 for none; a multiple of 4.
        rope_temperature: base of the rotary frequencies.
    """

    def __init__(
        self,
        grid_size: Tuple[int, int],
        window_size: Tuple[int, int],
        *,
        one_window: bool = False,
        rotary_dim: int = 0,
        rope_temperature: float = 100.0,
        device=None,
    ) -> None:
        super().__init__()
        self.grid_size = grid_size
        self.window_size = window_size
        self.one_window = one_window
        self.rotary_dim = rotary_dim
        self.rope_temperature = rope_temperature
        self._register_tables(torch.empty(0, device=device).device)

    def _register_tables(self, device: torch.device) -> None:
        context = self.context(self.grid_size[0], self.grid_size[1], device)
        cosine, sine = context.rotary if context.rotary is not None else (None, None)
        self.register_buffer("key_mask", context.key_mask, persistent=False)
        self.register_buffer("relative_index", context.relative_index, persistent=False)
        self.register_buffer("rotary_cosine", cosine, persistent=False)
        self.register_buffer("rotary_sine", sine, persistent=False)

    if TYPE_CHECKING:  # TorchScript reads class annotations and takes no None for a Tensor
        key_mask: Optional[Tensor]
        relative_index: Tensor
        rotary_cosine: Optional[Tensor]
        rotary_sine: Optional[Tensor]

    def init_non_persistent_buffers(self) -> None:
        """Recompute the tables where the module is now, as after construction on the meta device."""
        self._register_tables(self.relative_index.device)

    def reset_parameters(self) -> None:
        """No parameters; the tables are recomputed."""
        self.init_non_persistent_buffers()

    def set_sizes(self, grid_size: Tuple[int, int], window_size: Tuple[int, int]) -> None:
        """Another nominal grid and window."""
        self.grid_size, self.window_size = grid_size, window_size
        self.init_non_persistent_buffers()

    def layout(self, height: int, width: int) -> WindowLayout:
        """The window layout of a height x width grid."""
        if self.one_window:
            return WindowLayout(height, width, height, width)
        return window_layout(height, width, self.window_size)

    def context(self, height: int, width: int, device: torch.device) -> TokenContext:
        """The shared tables of a height x width grid, computed."""
        layout = self.layout(height, width)
        rotary: Optional[Tuple[Tensor, Tensor]] = None
        if self.rotary_dim > 0:
            rotary = rotary_table(layout, self.rotary_dim, self.rope_temperature, device)
        index = relative_position_index(layout, self.window_size, device)
        return TokenContext(layout, key_mask(layout, device), index, rotary, {})

    def forward(self, x: Tensor) -> Tuple[Tensor, TokenContext]:
        """(B, H, W, C) to (B, G, P, C) and the context of that layout."""
        height, width = x.shape[1], x.shape[2]
        # in an export with free sizes this comparison would pin the graph to the nominal grid
        if not is_exporting() and height == self.grid_size[0] and width == self.grid_size[1]:
            rotary: Optional[Tuple[Tensor, Tensor]] = None
            if self.rotary_cosine is not None and self.rotary_sine is not None:
                rotary = (self.rotary_cosine, self.rotary_sine)
            context = TokenContext(self.layout(height, width), self.key_mask, self.relative_index, rotary, {})
        else:
            context = self.context(height, width, x.device)
        return partition_windows(x, context.layout), context


# decorating would turn the class into a plain nn.Module for a type checker
register_notrace_module(TokenWindows)
