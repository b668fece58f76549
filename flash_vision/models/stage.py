"""One stage of `pyramid.py`: maps outside, tokens in window-major order inside."""

from typing import Any, Callable, Dict, Optional, Sequence, Tuple

from torch import Tensor, nn

from flash_vision.layers import ConditionalPosition, Downsample, GatedBlock, TokenWindows
from flash_vision.ops.windows import merge_windows


class PyramidStage(nn.Module):
    """Downsampling, conditional position encoding, then gated units on windows.

    Args:
        in_dim: channels that come; None for the first stage, which downsamples nothing.
        dim: width C.
        grid_size: nominal grid (rows, columns) in tokens.
        window_size: nominal window (rows, columns) in tokens.
        make_unit: the constructor of one unit, from its width.
        drop_paths: stochastic depth of each unit; their number is the depth.
        position_conv: with the conditional position encoding.
        init_values: start of LayerScale, None for none.
    """

    def __init__(
        self,
        in_dim: Optional[int],
        dim: int,
        grid_size: Tuple[int, int],
        window_size: Tuple[int, int],
        make_unit: Callable[[int], nn.Module],
        drop_paths: Sequence[float],
        *,
        position_conv: bool = True,
        init_values: Optional[float] = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        dd: Dict[str, Any] = {"device": device, "dtype": dtype}
        self.grad_checkpointing = False
        self.downsample = nn.Identity() if in_dim is None else Downsample(in_dim, dim, **dd)
        self.position = ConditionalPosition(dim, **dd) if position_conv else nn.Identity()
        self.windows = TokenWindows(grid_size, window_size, device=device)
        self.blocks = nn.ModuleList(
            [GatedBlock(dim, make_unit(dim), init_values=init_values, drop_path=rate, **dd) for rate in drop_paths]
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_dim, H, W) to (B, C, H / 2, W / 2), rounded up; without `in_dim` (B, C, H, W) to the same."""
        x = self.position(self.downsample(x))
        tokens, context = self.windows(x.permute(0, 2, 3, 1))
        for block in self.blocks:
            tokens = block(tokens, context, self.grad_checkpointing)
        return merge_windows(tokens, context.layout).permute(0, 3, 1, 2)
