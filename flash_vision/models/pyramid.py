"""The four-stage backbone of gated attention units; `flash_pyramid.py` registers its variants.

Maps of strides 4, 8, 16 and 32. Tokens are in raster order only between the stages, where convolutions need it;
inside a stage they are in window-major order.
"""

from functools import partial
from typing import Any, Dict, Final, List, Optional, Sequence, Set, Tuple, Union

import torch
from timm.layers import ClassifierHead, LayerNorm2d, get_device_dtype
from timm.models import named_apply, register_notrace_function
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from torch import Tensor, nn

from flash_vision.layers import (
    ConvStem,
    MixedChunkUnit,
    RelativePositionBias,
)
from flash_vision.layers.checks import check_choice, check_positive, positive_pair
from flash_vision.models.isotropic import GLOBAL_POOLS
from flash_vision.models.stage import PyramidStage
from flash_vision.models.weights import INIT_SCHEMES


@torch.fx.wrap
@register_notrace_function
def _check_image(x: Tensor, img_size: Tuple[int, int]) -> None:
    height, width = x.shape[2], x.shape[3]
    if height != img_size[0] or width != img_size[1]:
        raise ValueError(f"images must be img_size {img_size} with strict_img_size, got {height} x {width}")


def _grid_sizes(img_size: Tuple[int, int]) -> List[Tuple[int, int]]:
    """Grids (rows, columns) of the four stages for images of `img_size` pixels: halved rounding up, each time."""
    return [(-(-img_size[0] // stride), -(-img_size[1] // stride)) for stride in (4, 8, 16, 32)]


def _per_stage(name: str, values: Sequence[int]) -> Tuple[int, ...]:
    if isinstance(values, int) or len(values) != 4:
        raise ValueError(f"{name} must be four numbers, one for each stage, got {values}")
    for value in values:
        check_positive(name, value)
    return tuple(values)


def _check_head(num_classes: int, global_pool: str) -> None:
    check_choice("global_pool", global_pool, GLOBAL_POOLS)
    if num_classes > 0 and not global_pool:
        raise ValueError(f"num_classes must be 0 with global_pool='', got {num_classes}")


class FlashPyramid(nn.Module):
    """Convolutional stem, four stages of mixed-chunk units at strides 4, 8, 16 and 32, final norm, mean pooling.

    Args:
        img_size: nominal image side or (height, width) in pixels; any other size is taken as it comes.
        in_chans: image channels.
        num_classes: classes of the head, 0 for none.
        global_pool: "avg", "max", "avgmax", or "" for the unpooled map, which needs num_classes 0.
        embed_dims: width C of each stage.
        depths: gated units of each stage.
        qk_dims: S of each stage.
        expansion: E / C.
        window_size: nominal window side or (rows, columns) in tokens, and the reach of the relative position bias;
            the sides used are those near it that leave the least padding.
        score_fn, divisor, gate, value_conv: see `layers.GatedAttentionUnit`.
        global_fn, branches: see `layers.MixedChunkUnit`.
        rel_pos_bias: learned score offsets inside the window.
        position_conv: a depthwise 3x3 convolution at the start of each stage, see `layers.ConditionalPosition`.
        init_values: start of LayerScale, None for none.
        dynamic_img_size: take any image (default), else only img_size.
        strict_img_size: refuse images that are not img_size; by default the opposite of dynamic_img_size.
        drop_rate: dropout before the head.
        drop_path_rate: stochastic depth of the last unit, rising linearly from 0 with depth.
        weight_init: "" (fan-in scaled, the units' output at a tenth), "paper" (all weights and gamma N(0, .02)),
            "reset" (torch's own) or "skip".

    Raises:
        ValueError: for a name or number out of range.
    """

    strict_img_size: Final[bool]

    def __init__(
        self,
        img_size: Union[int, Tuple[int, int]] = 224,
        *,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dims: Sequence[int] = (64, 128, 384, 704),
        depths: Sequence[int] = (2, 4, 14, 4),
        qk_dims: Sequence[int] = (16, 16, 32, 64),
        expansion: float = 2.0,
        window_size: Union[int, Tuple[int, int]] = 7,
        score_fn: str = "relu2",
        divisor: str = "outside",
        global_fn: str = "inline",
        branches: str = "both",
        gate: bool = True,
        value_conv: bool = False,
        rel_pos_bias: bool = True,
        position_conv: bool = True,
        init_values: Optional[float] = None,
        dynamic_img_size: bool = True,
        strict_img_size: Optional[bool] = None,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        weight_init: str = "",
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        dd: Dict[str, Any] = {"device": device, "dtype": dtype}
        check_choice("weight_init", weight_init, (*INIT_SCHEMES, "skip"))
        embed_dims, depths = _per_stage("embed_dims", embed_dims), _per_stage("depths", depths)
        qk_dims = _per_stage("qk_dims", qk_dims)
        self.window_size = positive_pair("window_size", window_size)
        if drop_path_rate < 0 or drop_path_rate >= 1:
            raise ValueError(f"drop_path_rate must be at least 0 and below 1, got {drop_path_rate}")

        self.img_size = positive_pair("img_size", img_size)
        self.embed_dims = embed_dims
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.global_pool = global_pool
        _check_head(num_classes, global_pool)
        self.strict_img_size = not dynamic_img_size if strict_img_size is None else strict_img_size
        self.grad_checkpointing = False
        self.weight_init = "reset" if weight_init == "skip" else weight_init

        self.stem = ConvStem(in_chans, embed_dims[0], **dd)
        rates = torch.linspace(0, drop_path_rate, sum(depths), device="cpu").tolist()
        grids = _grid_sizes(self.img_size)
        stages = []
        for i, dim in enumerate(embed_dims):
            make_unit = partial(
                MixedChunkUnit,
                expansion=expansion,
                qk_dim=qk_dims[i],
                score_fn=score_fn,
                divisor=divisor,
                global_fn=global_fn,
                branches=branches,
                gate=gate,
                bias_window=self.window_size if rel_pos_bias else None,
                value_conv=value_conv,
                **dd,
            )
            stage = PyramidStage(
                embed_dims[i - 1] if i > 0 else None,
                dim,
                grids[i],
                self.window_size,
                make_unit,
                rates[sum(depths[:i]) : sum(depths[: i + 1])],
                position_conv=position_conv,
                init_values=init_values,
                **dd,
            )
            stages.append(stage)
        self.stages = nn.Sequential(*stages)
        self.feature_info = [
            dict(module=f"stages.{i}", num_chs=dim, reduction=4 * 2**i) for i, dim in enumerate(embed_dims)
        ]
        self.num_features = self.head_hidden_size = embed_dims[-1]
        self.norm = LayerNorm2d(self.num_features, **dd)
        self.head = ClassifierHead(self.num_features, num_classes, pool_type=global_pool, drop_rate=drop_rate, **dd)
        if weight_init != "skip":
            self.init_weights(needs_reset=False)

    def _stages(self) -> List[PyramidStage]:
        return [stage for stage in self.stages if isinstance(stage, PyramidStage)]

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initialise all weights; also after `to_empty()`.

        Args:
            mode: one of the constructor's weight_init values; "" repeats the constructor's choice.
            needs_reset: also reset the modules that initialised themselves when they were built.
        """
        mode = mode or self.weight_init
        check_choice("mode", mode, tuple(INIT_SCHEMES))
        named_apply(partial(INIT_SCHEMES[mode], needs_reset=needs_reset), self)

    def no_weight_decay(self) -> Set[str]:
        """The affine roles and the bias tables."""
        kinds = ("scale_offset.gamma", "scale_offset.beta", "relative_position_bias_table")
        return {name for name, _ in self.named_parameters() if name.endswith(kinds)}

    def group_matcher(self, coarse: bool = False) -> Dict[str, Any]:
        """Regular expressions that sort the parameters into a stem and one group for each stage or, fine, each unit.

        What comes before a stage's first unit goes with it.
        """
        if coarse:
            blocks: Any = r"^stages\.(\d+)"
        else:
            blocks = [
                (r"^stages\.(\d+)\.(?:downsample|position)", (0,)),
                (r"^stages\.(\d+)\.blocks\.(\d+)", None),
                (r"^norm", (99999,)),
            ]
        return dict(stem=r"^stem", blocks=blocks)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each unit in the backward pass instead of keeping its activations."""
        self.grad_checkpointing = enable
        for stage in self._stages():
            stage.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        """The head's linear layer."""
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        """A new head for `num_classes`, 0 for none; pooling as before unless given."""
        if global_pool is not None:  # timm's suite asks for a head on an unpooled map and calls it no more
            _check_head(num_classes, global_pool)
            self.global_pool = global_pool
        self.num_classes = num_classes
        dd: Dict[str, Any] = get_device_dtype(self)  # a head without classes has no parameters to tell
        self.head.reset(num_classes, global_pool, **dd)

    def set_input_size(
        self,
        img_size: Optional[Union[int, Tuple[int, int]]] = None,
        window_size: Optional[Union[int, Tuple[int, int]]] = None,
    ) -> None:
        """Another nominal image or window size; bias tables are cut or padded, every offset keeping its value.

        Args:
            img_size: pixels, as in the constructor; None keeps it.
            window_size: tokens; None keeps it.

        Raises:
            ValueError: as the constructor.
        """
        new_img_size = positive_pair("img_size", self.img_size if img_size is None else img_size)
        new_window_size = positive_pair("window_size", self.window_size if window_size is None else window_size)
        self.img_size, self.window_size = new_img_size, new_window_size
        for module in self.modules():
            if isinstance(module, RelativePositionBias):
                module.set_window_size(new_window_size)
        for stage, grid in zip(self._stages(), _grid_sizes(new_img_size), strict=False):  # pruning leaves fewer stages
            stage.windows.set_sizes(grid, new_window_size)
        update_model_input_size(self, new_img_size, window_size=window_size)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: Optional[Union[int, List[int]]] = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Union[List[Tensor], Tuple[Tensor, List[Tensor]]]:
        """Outputs of chosen stages.

        Args:
            x: (B, in_chans, height, width).
            indices: the last n stages if a number, all if None, else these.
            norm: apply the final norm to the last stage's; it fits no other.
            stop_early: run no stage past the last one asked for.
            output_fmt: "NCHW".
            intermediates_only: leave out the final features.

        Returns:
            (features (B, C, H, W), list of maps) or the list alone.
        """
        assert output_fmt == "NCHW", "Output format must be NCHW."
        take_indices, max_index = feature_take_indices(len(self.stages), indices)
        last = len(self.stages) - 1
        if torch.jit.is_scripting() or not stop_early:  # TorchScript cannot slice modules
            stages = self.stages
        else:
            stages = self.stages[: max_index + 1]
        if self.strict_img_size:
            _check_image(x, self.img_size)
        x = self.stem(x)
        intermediates: List[Tensor] = []
        for i, stage in enumerate(stages):
            x = stage(x)
            if i in take_indices:
                tap = self.norm(x) if norm and i == last else x
                intermediates.append(tap.contiguous())
        if intermediates_only:
            return intermediates
        if len(stages) == last + 1:
            x = self.norm(x)
        return x, intermediates

    def prune_intermediate_layers(
        self, indices: Union[int, List[int]] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> List[int]:
        """Cut off what the chosen outputs do not need; returns their indices.

        The final norm and the head fit only the last stage: they go with it.
        """
        take_indices, max_index = feature_take_indices(len(self.stages), indices)
        shortened = max_index < len(self.stages) - 1
        self.stages = self.stages[: max_index + 1]
        if prune_norm or shortened:
            self.norm = nn.Identity()
        if shortened:
            self.num_features = self.head_hidden_size = self.head.in_features = self.embed_dims[max_index]
        if prune_head or shortened:
            self.reset_classifier(0, "")
        return take_indices

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, in_chans, height, width) to the normed map (B, C, height / 32, width / 32), rounded up."""
        if self.strict_img_size:
            _check_image(x, self.img_size)
        return self.norm(self.stages(self.stem(x)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map (B, C, H, W) to logits (B, num_classes), or to what enters the head."""
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_chans, height, width) to logits (B, num_classes)."""
        return self.forward_head(self.forward_features(x))
