"""The registered four-stage variants: flash_pyramid_*.

Sized so that tiny, small and base have the parameters and the MACs at 224 pixels of Swin-T, Swin-S and Swin-B within
5%; ARCHITECTURE.md has the counts.
"""

from typing import Any, Dict

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from flash_vision.models.pyramid import FlashPyramid
from flash_vision.models.weights import checkpoint_filter_fn


def _cfg(url: str = "", **kwargs) -> Dict[str, Any]:
    return {
        "url": url,
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": False,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "stem.conv1",
        "classifier": "head.fc",
        "license": "apache-2.0",
        **kwargs,
    }


default_cfgs = generate_default_cfgs(
    {
        "flash_pyramid_nano": _cfg(),
        "flash_pyramid_tiny": _cfg(),
        "flash_pyramid_small": _cfg(),
        "flash_pyramid_base": _cfg(),
    }
)


def _create(variant: str, pretrained: bool, model_args: Dict[str, Any], kwargs: Dict[str, Any]) -> FlashPyramid:
    out_indices = kwargs.pop("out_indices", (0, 1, 2, 3))
    if "output_stride" in kwargs:
        raise ValueError(f"output_stride must be left out, strides are 4, 8, 16, 32; got {kwargs['output_stride']}")
    return build_model_with_cfg(
        FlashPyramid,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=out_indices, feature_cls="getter", flatten_sequential=True),
        **{**model_args, **kwargs},
    )


@register_model
def flash_pyramid_nano(pretrained: bool = False, **kwargs) -> FlashPyramid:
    """Small, for tests and small data."""
    args = dict(embed_dims=(32, 64, 128, 256), depths=(2, 4, 8, 4), qk_dims=(16, 16, 32, 32))
    return _create("flash_pyramid_nano", pretrained, args, kwargs)


@register_model
def flash_pyramid_tiny(pretrained: bool = False, **kwargs) -> FlashPyramid:
    """The size and cost of swin_tiny_patch4_window7_224."""
    args = dict(embed_dims=(64, 128, 384, 704), depths=(2, 4, 14, 4), qk_dims=(16, 16, 32, 64))
    return _create("flash_pyramid_tiny", pretrained, args, kwargs)


@register_model
def flash_pyramid_small(pretrained: bool = False, **kwargs) -> FlashPyramid:
    """The size and cost of swin_small_patch4_window7_224."""
    args = dict(embed_dims=(64, 128, 384, 704), depths=(2, 4, 36, 4), qk_dims=(16, 16, 32, 64))
    return _create("flash_pyramid_small", pretrained, args, kwargs)


@register_model
def flash_pyramid_base(pretrained: bool = False, **kwargs) -> FlashPyramid:
    """The size and cost of swin_base_patch4_window7_224."""
    args = dict(embed_dims=(96, 192, 512, 960), depths=(2, 4, 36, 4), qk_dims=(16, 32, 32, 64))
    return _create("flash_pyramid_base", pretrained, args, kwargs)
