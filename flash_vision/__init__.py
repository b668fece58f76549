"""Vision backbones of gated attention units with 2-D mixed-chunk attention (FLASH, arXiv 2202.10447).

FLASH is Fast Linear Attention with a Single Head, not FlashAttention. Importing this package registers its models
with timm: `timm.create_model("flash_gau_small")`.
"""

from timm import create_model

from flash_vision.models import FlashGAU, FlashPyramid
from flash_vision.models.deploy import optimize_for_inference

__version__ = "0.1.0"
__all__ = ["FlashGAU", "FlashPyramid", "create_model", "optimize_for_inference"]
