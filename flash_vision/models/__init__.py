"""Model families, registered with timm on import."""

from flash_vision.models import flash_gau
from flash_vision.models.isotropic import FlashGAU

__all__ = ["FlashGAU", "flash_gau"]
