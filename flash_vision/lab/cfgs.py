"""What timm wants to know of a laboratory model before it is built."""

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import generate_default_cfgs


def lab_cfgs(name: str, **differences: Any) -> dict[str, Any]:
    """timm's `default_cfgs` of a module with one model `name`, for 32 px images in patches and with a linear head."""
    cfg = dict(
        input_size=(3, 32, 32), pool_size=None, crop_pct=1.0, interpolation="bicubic", fixed_input_size=False,
        mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD, first_conv="patch_embed.proj", classifier="head",
    )  # fmt: skip
    return generate_default_cfgs({name: {**cfg, **differences}})
