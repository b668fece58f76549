"""Folders of class/image files: what must hold before one is used, and the check of a single image."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError
from timm.data.readers.img_extensions import is_img_extension


class CorruptImageError(ValueError):
    """An image file that does not decode; the message is the reason, the file is named by whoever knows it."""


def check_class_folder(root: str | Path) -> None:
    """Checks that `root` holds one folder or more, each with an image somewhere below it.

    Raises:
        ValueError: no such folder, no class folder in it, or a class folder without an image; the folder is named.
    """
    root = Path(root)
    if not root.is_dir():
        raise ValueError(f"{root}: no such folder")
    classes = sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise ValueError(f"{root}: holds no class folder (expected {root.name}/CLASS/IMAGE.jpg)")
    empty = [folder for folder in classes if not has_image(folder)]
    if empty:
        raise ValueError(f"{empty[0]}: class folder without an image ({len(empty)} of {len(classes)} are empty)")


def has_image(folder: str | Path) -> bool:
    """Whether an image file lies in `folder` or below it; stops at the first."""
    return any(is_image_name(name) for _, _, names in os.walk(folder, followlinks=True) for name in names)


def is_image_name(name: str | Path) -> bool:
    """Whether the name ends as one of timm's image extensions, in any case."""
    return is_img_extension(Path(name).suffix.lower())


def decode(file: BinaryIO | bytes, *, mode: str = "RGB") -> Image.Image:
    """Decodes one image in full.

    Args:
        file: an open file or its bytes.
        mode: PIL mode of the result.
    Raises:
        CorruptImageError: the bytes are no image, or not a whole one.
    """
    try:
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
            return image.convert(mode)
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise CorruptImageError("not an image") from None
    except Exception as error:  # PIL's decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise CorruptImageError(f"corrupt image ({type(error).__name__}: {error})") from None
