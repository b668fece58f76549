"""Model families, registered with timm on import."""

from flash_vision.models.flash_gau import FlashGAU

__all__ = ["FlashGAU"]
