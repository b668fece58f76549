"""Vision backbones of gated attention units with 2-D mixed-chunk attention (FLASH, arXiv 2202.10447)."""

__version__ = "0.1.0"
