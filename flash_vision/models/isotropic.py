"""The isotropic backbone of gated attention units; `flash_gau.py` registers its variants.

A ViT whose attention + MLP blocks are replaced by twice as many gated units (FLASH, arXiv 2202.10447). No class
token; tokens are in window-major order from the stem to the output.
"""

import inspect
from functools import partial
from typing import Any, Callable, Dict, Final, List, Optional, Set, Tuple, Union

import torch
from timm.layers import (
    LayerNorm,
    PatchEmbed,
    get_device_dtype,
    resample_abs_pos_embed,
)
from timm.models import (
    named_apply,
)
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from timm.models.vision_transformer import global_pool_nlc
from torch import Tensor, nn

from flash_vision.layers import (
    ConditionalPosition,
    GatedAttentionUnit,
    GatedBlock,
    GatedLinearUnit,
    MixedChunkUnit,
    RelativePositionBias,
    TokenWindows,
)
from flash_vision.layers.checks import check_choice, check_positive, positive_pair
from flash_vision.models.patches import add_position, add_sincos, check_image, image_and_patch
from flash_vision.models.weights import INIT_SCHEMES
from flash_vision.ops.windows import WindowLayout, merge_windows

GLOBAL_POOLS = ("", "avg", "avgmax", "max")
POS_EMBEDS = ("learn", "sincos", "none")
UNITS = ("mixed", "quadratic", "glu")


def _unit_factory(
    unit: str, common: Dict[str, Any], attention: Dict[str, Any], branches: Dict[str, Any]
) -> Callable[[int], nn.Module]:
    """The constructor of one unit; options that this unit does not have must be at the model's defaults.

    Only qk_dim, a size that every variant sets, may stand beside unit="glu".
    """
    if unit == "mixed":
        return partial(MixedChunkUnit, **common, **attention, **branches)
    defaults = {name: p.default for name, p in inspect.signature(FlashGAU).parameters.items()}
    for name, value in {**branches, **(attention if unit == "glu" else {})}.items():
        if name in defaults and name != "qk_dim" and value != defaults[name]:
            raise ValueError(f"{name} is no option of unit={unit!r}, got {name}={value!r}")
    if unit == "quadratic":
        return partial(GatedAttentionUnit, **common, **attention)
    return partial(GatedLinearUnit, **common)


class FlashGAU(nn.Module):
    """Patch embedding, `depth` gated units of one width, mean pooling.

    Args:
        img_size: nominal image side or (height, width) in pixels; other sizes are taken as they come, see below.
        patch_size: pixels a token spans.
        in_chans: image channels.
        num_classes: classes of the head, 0 for none.
        global_pool: "avg", "max", "avgmax", or "" for unpooled tokens.
        embed_dim: width C.
        depth: gated units; a ViT of L blocks is matched by 2 L.
        unit: "mixed" (local + global), "quadratic" (one window over the whole grid) or "glu" (no token mixing).
        expansion: E / C.
        qk_dim: S.
        num_heads: heads that S and E are split between.
        window_size: nominal window side or (rows, columns) in tokens, and the reach of the relative position bias;
            the sides used are those near it that leave the least padding.
        score_fn, divisor, gate, value_conv: see `layers.GatedAttentionUnit`.
        global_fn, branches: see `layers.MixedChunkUnit`.
        rel_pos_bias: learned score offsets inside the window.
        rope_temperature: base of 2-D rotary frequencies on all queries and keys; None for no rotary embedding.
        pos_embed: "learn", "sincos" (fixed, with a learned scale) or "none".
        position_conv: a depthwise 3x3 convolution after the patch embedding, see `layers.ConditionalPosition`.
        init_values: start of LayerScale, None for none.
        dynamic_img_size: take any image of at least one patch (default), else only img_size.
        dynamic_img_pad: pad images to whole patches (default), else refuse others.
        strict_img_size: refuse images that are not img_size; by default the opposite of dynamic_img_size.
        drop_rate: dropout before the head.
        pos_drop_rate: dropout after the position embedding.
        drop_path_rate: stochastic depth of the last unit, rising linearly from 0 with depth.
        weight_init: "" (fan-in scaled, the units' output at a tenth), "paper" (all weights and gamma N(0, .02)),
            "reset" (torch's own) or "skip".

    Raises:
        ValueError: for a name or number out of range, and for options that the chosen unit does not have.
    """

    dynamic_img_size: Final[bool]

    def __init__(
        self,
        img_size: Union[int, Tuple[int, int]] = 224,
        patch_size: Union[int, Tuple[int, int]] = 16,
        *,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 384,
        depth: int = 24,
        unit: str = "mixed",
        expansion: float = 2.0,
        qk_dim: int = 64,
        num_heads: int = 1,
        window_size: Union[int, Tuple[int, int]] = 7,
        score_fn: str = "relu2",
        divisor: str = "outside",
        global_fn: str = "inline",
        branches: str = "both",
        gate: bool = True,
        value_conv: bool = False,
        rel_pos_bias: bool = True,
        rope_temperature: Optional[float] = None,
        pos_embed: str = "learn",
        position_conv: bool = True,
        init_values: Optional[float] = None,
        dynamic_img_size: bool = True,
        dynamic_img_pad: bool = True,
        strict_img_size: Optional[bool] = None,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        weight_init: str = "",
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        dd: Dict[str, Any] = {"device": device, "dtype": dtype}
        check_choice("global_pool", global_pool, GLOBAL_POOLS)
        check_choice("unit", unit, UNITS)
        check_choice("pos_embed", pos_embed, POS_EMBEDS)
        check_choice("weight_init", weight_init, (*INIT_SCHEMES, "skip"))
        img_size, patch_size = image_and_patch(img_size, patch_size)
        window_size = positive_pair("window_size", window_size)
        check_positive("embed_dim", embed_dim)
        check_positive("depth", depth)
        if pos_embed == "sincos" and embed_dim % 4:
            raise ValueError(f"embed_dim must be a multiple of 4 with pos_embed='sincos', got {embed_dim}")
        if rope_temperature is not None and (qk_dim % num_heads or qk_dim // num_heads % 4):
            raise ValueError(
                f"qk_dim / num_heads must be a multiple of 4 with rope_temperature, got {qk_dim} / {num_heads}"
            )
        if drop_path_rate < 0 or drop_path_rate >= 1:
            raise ValueError(f"drop_path_rate must be at least 0 and below 1, got {drop_path_rate}")

        self.num_classes = num_classes
        self.in_chans = in_chans
        self.global_pool = global_pool
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.num_prefix_tokens = 0
        self.dynamic_img_size = dynamic_img_size
        self.grad_checkpointing = False
        self.weight_init = "reset" if weight_init == "skip" else weight_init

        self.patch_embed = PatchEmbed(
            img_size=img_size,
            patch_size=patch_size,  # pyright: ignore[reportArgumentType] (timm means a side or a pair)
            in_chans=in_chans,
            embed_dim=embed_dim,
            output_fmt="NHWC",
            strict_img_size=not dynamic_img_size if strict_img_size is None else strict_img_size,
            dynamic_img_pad=dynamic_img_pad,
            **dd,
        )
        num_patches = self.patch_embed.num_patches
        self.pos_embed = nn.Parameter(torch.empty(1, num_patches, embed_dim, **dd)) if pos_embed == "learn" else None
        self.pos_scale = nn.Parameter(torch.empty(1, **dd)) if pos_embed == "sincos" else None
        self.position = ConditionalPosition(embed_dim, **dd) if position_conv else nn.Identity()
        self.pos_drop = nn.Dropout(pos_drop_rate)
        self.windows = TokenWindows(
            self.patch_embed.grid_size,
            window_size,
            one_window=unit == "quadratic",
            rotary_dim=0 if rope_temperature is None else qk_dim // num_heads,
            rope_temperature=0.0 if rope_temperature is None else rope_temperature,
            device=device,
        )
        make_unit = _unit_factory(
            unit,
            dict(expansion=expansion, **dd),
            dict(
                qk_dim=qk_dim,
                num_heads=num_heads,
                score_fn=score_fn,
                divisor=divisor,
                gate=gate,
                value_conv=value_conv,
                bias_window=window_size if rel_pos_bias else None,
            ),
            dict(global_fn=global_fn, branches=branches),
        )
        self.blocks = nn.ModuleList(
            [
                GatedBlock(embed_dim, make_unit(embed_dim), init_values=init_values, drop_path=rate, **dd)
                for rate in torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()
            ]
        )
        reduction = self.patch_embed.feat_ratio()
        self.feature_info = [dict(module=f"blocks.{i}", num_chs=embed_dim, reduction=reduction) for i in range(depth)]
        self.norm = LayerNorm(embed_dim, **dd)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes, **dd) if num_classes > 0 else nn.Identity()
        if weight_init != "skip":
            self.init_weights(needs_reset=False)

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initialise all weights; also after `to_empty()`.

        Args:
            mode: one of the constructor's weight_init values; "" repeats the constructor's choice.
            needs_reset: also reset the modules that initialised themselves when they were built.
        """
        mode = mode or self.weight_init
        check_choice("mode", mode, tuple(INIT_SCHEMES))
        if self.pos_embed is not None:
            # as strong as the patches' content: at .02 small models take long to see where a patch lies
            nn.init.normal_(self.pos_embed, std=0.02 if mode == "paper" else 0.5)
        if self.pos_scale is not None:
            nn.init.constant_(self.pos_scale, self.embed_dim**-0.5)
        named_apply(partial(INIT_SCHEMES[mode], needs_reset=needs_reset), self)

    def no_weight_decay(self) -> Set[str]:
        """Positions and the affine roles."""
        kinds = ("pos_embed", "pos_scale", "scale_offset.gamma", "scale_offset.beta", "relative_position_bias_table")
        return {name for name, _ in self.named_parameters() if name.endswith(kinds)}

    def group_matcher(self, coarse: bool = False) -> Dict[str, Any]:
        """Regular expressions that sort the parameters into a stem and one group for each unit.

        As in timm's ViTs `coarse` makes no difference: there is no grouping between unit and network.
        """
        block = r"^blocks\.(\d+)"
        return dict(stem=r"^(?:pos_embed|pos_scale|patch_embed|position)", blocks=[(block, None), (r"^norm", (99999,))])

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each unit in the backward pass instead of keeping its activations."""
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        """A new head for `num_classes`, 0 for none; pooling as before unless given."""
        if global_pool is not None:
            check_choice("global_pool", global_pool, GLOBAL_POOLS)
            self.global_pool = global_pool
        self.num_classes = num_classes
        dd: Dict[str, Any] = get_device_dtype(self)
        self.head = nn.Linear(self.embed_dim, num_classes, **dd) if num_classes > 0 else nn.Identity()
        self.head.train(self.training)

    def set_input_size(
        self,
        img_size: Optional[Union[int, Tuple[int, int]]] = None,
        patch_size: Optional[Union[int, Tuple[int, int]]] = None,
        window_size: Optional[Union[int, Tuple[int, int]]] = None,
    ) -> None:
        """Another nominal image, patch or window size.

        Positions and the patch kernel are resampled; bias tables are cut or padded, every offset keeping its value.

        Args:
            img_size: pixels, as in the constructor; None keeps it.
            patch_size: pixels; None keeps it.
            window_size: tokens; None keeps it.

        Raises:
            ValueError: as the constructor.
        """
        new_img_size, new_patch_size = image_and_patch(
            self.patch_embed.img_size if img_size is None else img_size,
            self.patch_embed.feat_ratio(as_scalar=False) if patch_size is None else patch_size,
        )
        new_window_size = positive_pair("window_size", self.windows.window_size if window_size is None else window_size)
        old_grid = self.patch_embed.grid_size
        self.patch_embed.set_input_size(img_size=new_img_size, patch_size=new_patch_size)
        grid = self.patch_embed.grid_size
        if self.pos_embed is not None and grid != old_grid:
            resampled = resample_abs_pos_embed(
                self.pos_embed, new_size=list(grid), old_size=list(old_grid), num_prefix_tokens=0
            )
            self.pos_embed = nn.Parameter(resampled.detach().clone(), requires_grad=self.pos_embed.requires_grad)
        for module in self.modules():
            if isinstance(module, RelativePositionBias):
                module.set_window_size(new_window_size)
        self.windows.set_sizes(grid, new_window_size)
        for info in self.feature_info:
            info["reduction"] = self.patch_embed.feat_ratio()
        update_model_input_size(self, new_img_size, patch_size=patch_size, window_size=window_size)

    def _embed(self, x: Tensor) -> Tensor:
        """Image (B, 3, height, width) to tokens (B, H, W, C) with positions."""
        check_image(x, self.patch_embed.patch_size)  # pyright: ignore[reportArgumentType] (a pair, untyped in timm)
        x = self.patch_embed(x)
        if self.pos_embed is not None:
            x = add_position(x, self.pos_embed, self.patch_embed.grid_size[0], self.patch_embed.grid_size[1])
        if self.pos_scale is not None:
            x = add_sincos(x, self.pos_scale)
        x = self.position(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.pos_drop(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: Optional[Union[int, List[int]]] = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> Union[List[Tensor], Tuple[Tensor, List[Tensor]], Dict[str, Any]]:
        """Outputs of chosen units.

        Args:
            x: (B, in_chans, height, width).
            indices: the last n units if a number, all if None, else these.
            return_prefix_tokens: as in timm's ViTs; these models have no prefix tokens, so outputs stay unpaired.
            norm: apply the final norm to each.
            stop_early: run no unit past the last one asked for.
            output_fmt: "NCHW" or "NLC".
            intermediates_only: leave out the final features.
            output_dict: a dict with `image_intermediates`, and `image_features` unless left out.

        Returns:
            (features (B, N, C), list of outputs), the list alone, or the dict.
        """
        assert output_fmt in ("NCHW", "NLC"), "Output format must be one of NCHW or NLC."
        take_indices, max_index = feature_take_indices(len(self.blocks), indices)
        intermediates: List[Tensor] = []
        x, context = self.windows(self._embed(x))
        if torch.jit.is_scripting() or not stop_early:  # TorchScript cannot slice modules
            blocks = self.blocks
        else:
            blocks = self.blocks[: max_index + 1]
        for i, block in enumerate(blocks):
            x = block(x, context, self.grad_checkpointing)
            if i in take_indices:
                y = merge_windows(self.norm(x) if norm else x.clone() if block.overwrites else x, context.layout)
                intermediates.append(y.permute(0, 3, 1, 2).contiguous() if output_fmt == "NCHW" else y.flatten(1, 2))
        features = x if intermediates_only else self._tokens(x, context.layout)
        if output_dict:
            result: Dict[str, Any] = {"image_intermediates": intermediates}
            if not intermediates_only:
                result["image_features"] = features
            return result
        if intermediates_only:
            return intermediates
        return features, intermediates

    def prune_intermediate_layers(
        self, indices: Union[int, List[int]] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> List[int]:
        """Cut off what the chosen outputs do not need; returns their indices."""
        take_indices, max_index = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: max_index + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take_indices

    def _tokens(self, x: Tensor, layout: WindowLayout) -> Tensor:
        """Window-major (B, G, P, C) to normed raster tokens (B, N, C)."""
        return self.norm(merge_windows(x, layout).flatten(1, 2))

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, in_chans, height, width) to normed tokens (B, N, C) in raster order."""
        x, context = self.windows(self._embed(x))
        for block in self.blocks:
            x = block(x, context, self.grad_checkpointing)
        return self._tokens(x, context.layout)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, N, C) to logits (B, num_classes), or to what enters the head."""
        x = self.head_drop(global_pool_nlc(x, pool_type=self.global_pool, num_prefix_tokens=0))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_chans, height, width) to logits (B, num_classes)."""
        return self.forward_head(self.forward_features(x))
