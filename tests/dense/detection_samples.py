"""Small sets in COCO's format and a detector that trains on them in seconds, in this process."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from flash_vision.dense.detection import build
from flash_vision.dense.detection_config import TWO_STAGE, DetectionConfig
from flash_vision.train.loop import Loop
from flash_vision.train.parallel import Processes
from flash_vision.train.reporting import read_metrics
from flash_vision.train.signals import StopRequest

CATEGORIES = [{"id": 3, "name": "square"}, {"id": 90, "name": "bar"}]  # ids with a gap
FEW = {"rpn_post_nms_top_n_train": 40, "rpn_post_nms_top_n_test": 20, "box_batch_size_per_image": 16}
TINY: dict[str, Any] = {
    "model": "test_resnet", "detector": "faster_rcnn", "detector_kwargs": FEW, "min_size": 48, "max_size": 96,
    "neck_channels": 16, "train_json": "train.json", "train_images": "images",
    "val_json": "val.json", "val_images": "images", "train_min_sizes": [40, 56], "photometric": 0.5, "batch_size": 2,
    "workers": 0, "epochs": 2, "warmup_epochs": 0, "lr": 1e-3, "log_interval": 1, "recovery_interval": 0,
    "device": "cpu", "curves": False, "tensorboard": False, "seed": 1,
}  # fmt: skip


def polygon(x: float, y: float, w: float, h: float) -> list[list[float]]:
    return [[x, y, x + w, y, x + w, y + h, x, y + h]]


def annotation(number: int, image: int, category: int, box: list[float], **fields: Any) -> dict[str, Any]:
    entry = {"id": number, "image_id": image, "category_id": category, "bbox": box, "iscrowd": 0}
    return {**entry, "area": box[2] * box[3], "segmentation": polygon(*box), **fields}  # pyright: ignore


def write_set(root: Path, *, train: int = 6, validation: int = 3) -> Path:
    """root/images/N.png of 64 x 48 or 40 x 56 pixels with up to three objects, and train.json and val.json."""
    generator = np.random.default_rng(4)
    (root / "images").mkdir(parents=True)
    start = 0
    for split, count in (("train", train), ("val", validation)):
        images, annotations = [], []
        for image in range(start, start + count):
            width, height = (64, 48) if image % 2 else (40, 56)
            pixels = generator.integers(0, 60, (height, width, 3))
            for category in [3, 90, 3][: image % 3 + 1]:
                w, h = (14, 14) if category == 3 else (26, 8)
                x, y = (int(generator.integers(0, side - size)) for side, size in ((width, w), (height, h)))
                pixels[y : y + h, x : x + w] = [200, 60, 60] if category == 3 else [60, 60, 220]
                annotations.append(annotation(len(annotations) + 1, image, category, [x, y, w, h]))
            Image.fromarray(pixels.astype(np.uint8)).save(root / "images" / f"{image}.png")
            images.append({"id": image, "file_name": f"{image}.png", "width": width, "height": height})
        start += count
        write_json(root / f"{split}.json", images, annotations)
    return root


def write_json(file: Path, images: list[Any], annotations: list[Any], categories: list[Any] = CATEGORIES) -> Path:
    content = {"images": images, "annotations": annotations, "categories": categories}
    file.write_text(json.dumps(content))
    return file


def change(file: Path, change: Any) -> Path:
    """Applies a function to the content of a JSON file."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return file


def config(data: Path, folder: Path, **settings: Any) -> DetectionConfig:
    chosen = copy.deepcopy(TINY) | {"data_dir": str(data), "output": str(folder.parent), "experiment": folder.name}
    chosen |= settings
    if chosen["detector"] in TWO_STAGE:
        chosen.setdefault("box_head_dim", 32)
    if chosen["detector"] == "mask_rcnn":
        chosen.setdefault("mask_head_dim", 32)
    return DetectionConfig(**chosen)


def make_loop(settings: DetectionConfig, stop: StopRequest | None = None) -> Loop:
    return build(settings, Processes(device=torch.device("cpu")), stop or StopRequest())


def run(settings: DetectionConfig) -> list[dict[str, Any]]:
    """Trains to the end; the records of metrics.jsonl without their times."""
    loop = make_loop(settings)
    try:
        assert loop.run() == 0
    finally:
        loop.folder.release()
    return records(settings)


def records(settings: DetectionConfig) -> list[dict[str, Any]]:
    unlike = ("time", "images_per_s", "peak_memory_mb")
    found = read_metrics(settings.folder / "metrics.jsonl")
    return [{name: value for name, value in record.items() if name not in unlike} for record in found]
