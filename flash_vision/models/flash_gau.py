"""The registered isotropic variants: flash_gau_* (2-D mixed chunk) and flash_quad_* (quadratic).

Depth is twice that of the ViT of the same width. qk_dim is chosen so that the MACs at 224 pixels stay within 12% of
that ViT's; ARCHITECTURE.md has the counts.
"""

from typing import Any, Dict

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from flash_vision.models.isotropic import FlashGAU
from flash_vision.models.shipped import shipped_cfg
from flash_vision.models.weights import checkpoint_filter_fn


def _cfg(url: str = "", **kwargs) -> Dict[str, Any]:
    return {
        "url": url,
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": False,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
        **kwargs,
    }


default_cfgs = generate_default_cfgs(
    {
        # the first is what the name without a tag stands for; the data they come from have no licence
        "flash_gau_pico.cifar100": _cfg(**shipped_cfg("flash_gau_pico.cifar100"), license="other"),
        "flash_gau_pico.eurosat": _cfg(**shipped_cfg("flash_gau_pico.eurosat"), license="other"),
        "flash_gau_tiny": _cfg(),
        "flash_gau_small": _cfg(),
        "flash_gau_base": _cfg(),
        "flash_gau_large": _cfg(),
        "flash_gau_small_patch8_224": _cfg(),
        "flash_gau_small_paper": _cfg(),
        "flash_quad_tiny": _cfg(),
        "flash_quad_small": _cfg(),
        "flash_quad_base": _cfg(),
    }
)


def _create(variant: str, pretrained: bool, model_args: Dict[str, Any], kwargs: Dict[str, Any]) -> FlashGAU:
    out_indices = kwargs.pop("out_indices", 3)
    return build_model_with_cfg(
        FlashGAU,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=out_indices, feature_cls="getter"),
        **{**model_args, **kwargs},
    )


@register_model
def flash_gau_pico(pretrained: bool = False, **kwargs) -> FlashGAU:
    """Mixed chunk for images of 28 to 64 pixels: patch 4, windows of 4 x 4 tokens, convolution on V."""
    args = dict(img_size=32, patch_size=4, embed_dim=128, depth=12, qk_dim=16, window_size=4, value_conv=True)
    return _create("flash_gau_pico", pretrained, args, kwargs)


@register_model
def flash_gau_tiny(pretrained: bool = False, **kwargs) -> FlashGAU:
    """Mixed chunk at the width of vit_tiny_patch16_224 and twice its depth."""
    return _create("flash_gau_tiny", pretrained, dict(embed_dim=192, qk_dim=16), kwargs)


@register_model
def flash_gau_small(pretrained: bool = False, **kwargs) -> FlashGAU:
    """Mixed chunk at the width of vit_small_patch16_224 and twice its depth."""
    return _create("flash_gau_small", pretrained, dict(embed_dim=384, qk_dim=32), kwargs)


@register_model
def flash_gau_base(pretrained: bool = False, **kwargs) -> FlashGAU:
    """Mixed chunk at the width of vit_base_patch16_224 and twice its depth."""
    return _create("flash_gau_base", pretrained, dict(embed_dim=768, qk_dim=64), kwargs)


@register_model
def flash_gau_large(pretrained: bool = False, **kwargs) -> FlashGAU:
    """Mixed chunk at the width of vit_large_patch16_224 and twice its depth."""
    return _create("flash_gau_large", pretrained, dict(embed_dim=1024, depth=48, qk_dim=96), kwargs)


@register_model
def flash_gau_small_patch8_224(pretrained: bool = False, **kwargs) -> FlashGAU:
    """flash_gau_small on 784 tokens."""
    return _create("flash_gau_small_patch8_224", pretrained, dict(patch_size=8, embed_dim=384, qk_dim=32), kwargs)


@register_model
def flash_gau_small_paper(pretrained: bool = False, **kwargs) -> FlashGAU:
    """The recipe of 2202.10447: 1/n inside the square, plain global branch, published init, rotary on all roles."""
    args = dict(
        embed_dim=384,
        qk_dim=128,
        divisor="inside",
        global_fn="plain",
        rope_temperature=10000.0,
        pos_embed="sincos",
        position_conv=False,
        weight_init="paper",
    )
    return _create("flash_gau_small_paper", pretrained, args, kwargs)


@register_model
def flash_quad_tiny(pretrained: bool = False, **kwargs) -> FlashGAU:
    """Quadratic gated attention units (FLASH-Quad) at the width of vit_tiny_patch16_224 and twice its depth."""
    return _create(
        "flash_quad_tiny",
        pretrained,
        dict(unit="quadratic", score_fn="laplace", embed_dim=192, qk_dim=32, window_size=14),
        kwargs,
    )


@register_model
def flash_quad_small(pretrained: bool = False, **kwargs) -> FlashGAU:
    """Quadratic gated attention units (FLASH-Quad) at the width of vit_small_patch16_224 and twice its depth."""
    return _create(
        "flash_quad_small",
        pretrained,
        dict(unit="quadratic", score_fn="laplace", embed_dim=384, qk_dim=64, window_size=14),
        kwargs,
    )


@register_model
def flash_quad_base(pretrained: bool = False, **kwargs) -> FlashGAU:
    """Quadratic gated attention units (FLASH-Quad) at the width of vit_base_patch16_224 and twice its depth."""
    return _create(
        "flash_quad_base",
        pretrained,
        dict(unit="quadratic", score_fn="laplace", embed_dim=768, qk_dim=96, window_size=14),
        kwargs,
    )
