"""Initial weights and checkpoints, for every model family here."""

import math
from typing import Any, Dict, Tuple

from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models._input import get_pretrained_grid_size
from torch import Tensor, nn

from flash_vision.layers import RelativePositionBias, ScaleOffset
from flash_vision.layers.checks import positive_pair
from flash_vision.layers.position import resize_bias_table

RESIDUAL_GAIN = 0.1  # of what ends a residual branch, over fan-in scaling, at the start


def init_small_residual(module: nn.Module, name: str, needs_reset: bool) -> None:
    """Linear weights with variance 1 / fan-in, those of the units' outputs at a tenth; biases 0; the head N(0, .02).

    A gated unit's output goes with the seventh power of its weights' scale, so the published .02 means something
    else at every width; fan-in scaling does not. The tenth lets every block start near the identity: what LayerScale
    (2103.17239) does at the start, without its pass over the tokens.
    """
    if isinstance(module, nn.Linear):
        std = 0.02 if name in ("head", "head.fc") else module.in_features**-0.5
        if name.endswith("unit.proj"):
            std *= RESIDUAL_GAIN
        nn.init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif needs_reset:
        init_reset(module, name, needs_reset)


def init_paper(module: nn.Module, name: str, needs_reset: bool) -> None:
    """The published init: weights, gamma and position biases N(0, .02), offsets 0 (2202.10447, appendix)."""
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, ScaleOffset):
        nn.init.normal_(module.gamma, std=0.02)
        nn.init.zeros_(module.beta)
    elif isinstance(module, RelativePositionBias):
        nn.init.normal_(module.relative_position_bias_table, std=0.02)
    elif needs_reset:
        init_reset(module, name, needs_reset)


def init_reset(module: nn.Module, name: str, needs_reset: bool) -> None:
    """Every module's own reset_parameters."""
    if needs_reset and hasattr(module, "reset_parameters"):
        module.reset_parameters()  # pyright: ignore[reportCallIssue]


INIT_SCHEMES = {"": init_small_residual, "paper": init_paper, "reset": init_reset}


def checkpoint_filter_fn(state_dict: Dict[str, Any], model: Any) -> Dict[str, Tensor]:
    """Fit a checkpoint to `model`: unwrap it and resample patch kernel, positions and bias tables."""
    for key in ("model", "state_dict"):
        state_dict = state_dict.get(key, state_dict)
    out: Dict[str, Tensor] = {}
    tables = {
        f"{name}.relative_position_bias_table": module
        for name, module in model.named_modules()
        if isinstance(module, RelativePositionBias)
    }
    for key, value in state_dict.items():
        if key == "patch_embed.proj.weight":
            value = resample_patch_embed(value, list(model.patch_embed.proj.weight.shape[-2:]))
        elif key == "pos_embed" and model.pos_embed is not None:
            old_size = get_pretrained_grid_size(model, state_dict.get("patch_embed.proj.weight"), value.shape[1])
            grid_size = model.patch_embed.grid_size
            if value.shape[1] != model.pos_embed.shape[1] or (old_size is not None and old_size != grid_size):
                value = resample_abs_pos_embed(
                    value, new_size=list(grid_size), old_size=old_size and list(old_size), num_prefix_tokens=0
                )
        elif key in tables:
            value = resize_bias_table(value, _source_window(model, value.shape[0]), tables[key].window_size)
        out[key] = value
    return out


def _source_window(model: Any, num_offsets: int) -> Tuple[int, int]:
    """The window of a checkpoint's bias table: from its metadata, or square."""
    window_size = getattr(model, "pretrained_model_args", {}).get("window_size")
    if window_size is not None:
        return positive_pair("window_size", window_size)
    side = math.isqrt(num_offsets)
    if side * side != num_offsets:
        raise ValueError(f"window_size of a bias table of {num_offsets} offsets must be in the checkpoint's metadata")
    return (side + 1) // 2, (side + 1) // 2
