"""A tiny segmentation set, and runs on it."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flash_vision.dense.segmentation_classes import ClassSet
from flash_vision.dense.segmentation_config import SegmentationConfig
from flash_vision.dense.segmentation_run import build
from flash_vision.train.parallel import start_processes
from flash_vision.train.signals import StopRequest

COLOURS = ((200, 60, 40), (40, 180, 70), (50, 70, 210))
CLASSES = ClassSet(names=("red", "green", "blue"), palette=COLOURS)

SETTINGS: dict[str, Any] = {
    "model": "test_convnext",
    "decoder": "fpn",
    "decoder_kwargs": {"decoder_pyramid_channels": 32, "decoder_segmentation_channels": 64, "decoder_dropout": 0.0},
    "classes": {"names": ["red", "green", "blue"], "palette": [list(colour) for colour in COLOURS]},
    "val_split": "val",
    "scale": (0.8, 1.25),
    "crop_size": (48, 64),
    "photometric": 0.0,
    "batch_size": 4,
    "epochs": 2,
    "warmup_epochs": 0,
    "lr": 3e-3,
    "workers": 0,
    "log_interval": 1,
    "device": "cpu",
    "curves": False,
    "tensorboard": False,
    "seed": 1,
}


def write_pairs(root: Path, *, train: int = 12, val: int = 5, layout: str = "camvid") -> Path:
    """Coloured rectangles on a coloured ground, with noise; labels are their colours, a strip on the left is void.

    Args:
        layout: camvid for root/SPLIT/images and root/SPLIT/labels, ade20k for root/images/SPLIT and
            root/annotations/SPLIT.
    """
    generator = np.random.default_rng(5)
    for split, count in (("train", train), ("val", val)):
        folders = ("images", "labels") if layout == "camvid" else ("images", "annotations")
        images, labels = (root / split / kind if layout == "camvid" else root / kind / split for kind in folders)
        images.mkdir(parents=True)
        labels.mkdir(parents=True)
        for number in range(count):
            height, width = 50 + number % 3 * 7, 70 - number % 2 * 9
            numbers = np.full((height, width), generator.integers(3), dtype=np.uint8)
            top, left = generator.integers(0, 25, 2)
            numbers[top : top + 25, left : left + 35] = generator.integers(3)
            pixels = np.array(COLOURS)[numbers] + generator.integers(-25, 25, (height, width, 3))
            numbers[:, :5] = 255
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(images / f"{number:02d}.jpg", quality=95)
            Image.fromarray(numbers).save(labels / f"{number:02d}.png")
    return root


def config(folder: Path, data: Path, **settings: Any) -> SegmentationConfig:
    """The configuration of a run in `folder`."""
    place = {"data_dir": str(data), "output": str(folder.parent), "experiment": folder.name}
    return SegmentationConfig(**{**SETTINGS, **place, **settings})


def run(chosen: SegmentationConfig, *, stop_after: int | None = None) -> int:
    """Trains in this process; its exit code.

    Args:
        stop_after: number of the update that a stop is requested during.
    """
    stop = StopRequest()
    loop = build(chosen, start_processes("cpu"), stop)
    schedule = loop._schedule

    def watched() -> None:
        schedule()
        if loop.progress.step + 1 == stop_after:
            stop.signal = 15

    loop._schedule = watched
    try:
        return loop.run()
    finally:
        loop.folder.release()
