"""The laboratory: grids of named variants run through the one training loop, and what came of them.

Importing it registers its models, lab_*, with timm; they are for experiments and no part of the library's interface.
"""

from flash_vision.lab import overlap, position, vit

__all__ = ["overlap", "position", "vit"]
