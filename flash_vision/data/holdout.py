"""A fixed split of one class folder into training and validation images."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from pathlib import Path

from flash_vision.data.class_folder import check_class_folder, is_image_name


def split_class_folder(source: str | Path, target: str | Path, *, share: float = 0.2) -> Path:
    """Makes target/train/CLASS/... and target/validation/CLASS/... of links to the images of source/CLASS.

    Of each class the images whose names hash lowest are held out, so the split stays the same wherever the folder lies
    and changes little when images are added. An earlier split in `target` is replaced.

    Args:
        source: folder of class/image files.
        target: folder to make.
        share: fraction in (0, 1) of each class's images to hold out, at least one and never all.
    Returns:
        The target.
    Raises:
        ValueError: no images, a class with fewer than two, or a target that is no earlier split.
    """
    source, target = Path(source), Path(target)
    check_class_folder(source)
    marker = target / ".split"
    if target.exists() and not marker.exists():
        raise ValueError(f"{target}: exists and is no split of a class folder; give another one")
    shutil.rmtree(target, ignore_errors=True)
    for folder in sorted(entry for entry in source.iterdir() if entry.is_dir() and not entry.name.startswith(".")):
        images = [file for file in folder.rglob("*") if is_image_name(file)]
        if len(images) < 2:
            raise ValueError(f"{folder}: a class needs at least 2 images, one to train on and one to test, got 1")
        images.sort(key=lambda file: hashlib.sha256(str(file.relative_to(source)).encode()).digest())
        held_out = min(len(images) - 1, math.ceil(share * len(images)))
        for number, file in enumerate(images):
            place = target / ("validation" if number < held_out else "train") / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(file.resolve(), place)
    marker.touch()
    return target
