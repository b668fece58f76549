"""Model families, registered with timm on import."""

from flash_vision.models import flash_gau, flash_pyramid
from flash_vision.models.isotropic import FlashGAU
from flash_vision.models.pyramid import FlashPyramid

__all__ = ["FlashGAU", "FlashPyramid", "flash_gau", "flash_pyramid"]
