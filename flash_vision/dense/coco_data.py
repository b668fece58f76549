"""Images with objects from a file in COCO's format: what is read, what is refused, and what is left out, counted."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from faster_coco_eval.core import mask as rle
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from flash_vision.data.class_folder import CorruptImageError, decode
from flash_vision.train.samples import Samples

Target = dict[str, Any]
Augment = Callable[[Tensor, Target], tuple[Tensor, Target]]
COUNTED = ("images", "objects", "images without objects", "crowd regions not trained on", "boxes without area left out",
           "boxes cut at the image's border", "objects with an empty mask", "annotations without area")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CocoImage:
    """An image and the objects to train on.

    Args:
        id: its id in the file.
        path: the image file.
        size: (height, width), pixels, as the file says.
        boxes: (N, 4) as x1 y1 x2 y2, pixels, inside the image, of positive area.
        labels: (N,) class indices from 1 on; 0 is the background.
        segmentations: (N) COCO run lengths; None where masks are not read.
    """

    id: int
    path: Path
    size: tuple[int, int]
    boxes: Tensor
    labels: Tensor
    segmentations: tuple[dict[str, Any], ...] | None


@dataclass(frozen=True, kw_only=True)
class CocoSplit:
    """One annotation file, read and checked.

    Args:
        images: in the file's order, with the objects to train on.
        class_names: in order of category id; label i + 1 is class i.
        category_ids: their ids, which may have gaps.
        content: images, categories and all annotations, crowds and boxes without area among them, for evaluation.
        counts: what was found, and what training leaves out or changes.
    """

    images: list[CocoImage]
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]
    content: dict[str, Any]
    counts: dict[str, int]


def read_coco(file: Path, folder: Path, *, masks: bool) -> CocoSplit:
    """Reads and checks an annotation file.

    As COCO's own tools do, crowd regions and boxes without area are not trained on and stay in the ground truth of an
    evaluation. Boxes are cut at the image's border. All of it is counted.

    Args:
        folder: where the images lie.
        masks: whether every object must have a mask.
    Raises:
        ValueError: no such file or folder, not COCO's format, an image that is missing, an id that is unknown or given
            twice, a box or an area that is none, or a mask that is none or of another size than its image; file and id
            are named.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder (of the images of {file})")
    content = _load(file)
    categories = _by_id(file, content["categories"], "category")
    ids = tuple(sorted(categories))
    label_of = {category: label for label, category in enumerate(ids, start=1)}
    entries = _by_id(file, content["images"], "image")
    missing = [entry for entry in entries.values() if not (folder / entry["file_name"]).is_file()]
    if missing:
        raise ValueError(
            f"{file}: image {missing[0]['id']}: {folder / missing[0]['file_name']} is missing "
            f"({len(missing)} of {len(entries)} are)"
        )
    counts: Counter[str] = Counter()
    objects: dict[int, list[tuple[list[float], int, dict[str, Any]]]] = {image: [] for image in entries}
    truth = []
    for annotation in _by_id(file, content["annotations"], "annotation").values():
        where = f"{file}: annotation {annotation['id']}"
        for name, known in (("image_id", entries), ("category_id", categories)):
            value = annotation.get(name)
            if not isinstance(value, int) or value not in known:
                raise ValueError(f"{where}: {name} {value!r} is not in the file")
        entry = entries[annotation["image_id"]]
        height, width = entry["height"], entry["width"]
        box = _box(where, annotation)
        segmentation = _segmentation(where, annotation, height, width) if masks else None
        area = _area(where, annotation)
        counts["annotations without area"] += area is None
        kept = {"image_id": entry["id"], "category_id": annotation["category_id"], "bbox": annotation["bbox"]}
        kept["iscrowd"] = int(bool(annotation.get("iscrowd", 0)))
        kept["area"] = annotation["bbox"][2] * annotation["bbox"][3] if area is None else area
        # numbered anew from 1 on, since in COCO's evaluation the id 0 means no match
        truth.append({**kept, "id": len(truth) + 1} | ({"segmentation": segmentation} if segmentation else {}))
        inside = [max(0.0, box[0]), max(0.0, box[1]), min(float(width), box[2]), min(float(height), box[3])]
        if kept["iscrowd"]:
            counts["crowd regions not trained on"] += 1
        elif inside[2] <= inside[0] or inside[3] <= inside[1]:
            counts["boxes without area left out"] += 1
        else:
            counts["boxes cut at the image's border"] += inside != box
            counts["objects with an empty mask"] += segmentation is not None and not rle.area(segmentation)
            counts["objects"] += 1
            objects[entry["id"]].append((inside, label_of[annotation["category_id"]], segmentation or {}))
    images = [
        CocoImage(
            id=image,
            path=folder / entry["file_name"],
            size=(entry["height"], entry["width"]),
            boxes=torch.tensor([box for box, _, _ in objects[image]], dtype=torch.float32).reshape(-1, 4),
            labels=torch.tensor([label for _, label, _ in objects[image]], dtype=torch.int64),
            segmentations=tuple(segmentation for _, _, segmentation in objects[image]) if masks else None,
        )
        for image, entry in entries.items()
    ]
    counts |= Counter({"images": len(images), "images without objects": sum(not len(i.labels) for i in images)})
    names = tuple(str(categories[category]["name"]) for category in ids)
    content = {name: content[name] for name in ("images", "categories")} | {"annotations": truth}
    # the first three always, the rest where there is something to say
    found = {name: counts[name] for name in COUNTED if counts[name] or name in COUNTED[:3]}
    return CocoSplit(images=images, class_names=names, category_ids=ids, content=content, counts=found)


class CocoSamples(Samples):
    """Images (C, H, W) uint8 and targets: boxes, labels, masks (N, H, W) uint8 where they are read, image_id.

    Args:
        images: see `CocoImage`.
        augment: augmentation; None for the image as it is.
    """

    def __init__(self, images: list[CocoImage], augment: Augment | None, *, seed: int, training: bool) -> None:
        super().__init__(seed=seed, training=training)
        self.images = images
        self.augment = augment

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        """The image's file."""
        return str(self.images[index].path)

    def read(self, index: int) -> tuple[Tensor, Target]:
        """The image and its objects.

        Raises:
            CorruptImageError: it does not decode, or its size is not what the annotations say.
        """
        image = self.images[index]
        pixels = pil_to_tensor(decode(image.path.read_bytes()))
        size = (pixels.shape[1], pixels.shape[2])
        if size != image.size:
            raise CorruptImageError(f"height and width are {size}, in the annotations {image.size}")
        target: Target = {"boxes": image.boxes, "labels": image.labels, "image_id": image.id}
        if self.training and image.segmentations is not None:
            target["masks"] = decode_masks(image.segmentations, size)
        return pixels, target

    def transformed(self, image: Tensor, target: Target) -> tuple[Tensor, Target]:
        """Image and target augmented together."""
        return self.augment(image, target) if self.augment is not None else (image, target)


def decode_masks(segmentations: tuple[dict[str, Any], ...], size: tuple[int, int]) -> Tensor:
    """Run lengths to masks (N, H, W) of 0 and 1, uint8."""
    if not segmentations:
        return torch.zeros(0, *size, dtype=torch.uint8)
    return torch.from_numpy(np.ascontiguousarray(rle.decode(list(segmentations)).transpose(2, 0, 1)))


def _load(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: cannot be read as JSON ({error})") from None
    for name in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(name), list):
            raise ValueError(f"{file}: must hold a list {name!r} as COCO's files do")
    for name in ("images", "categories"):
        if not content[name]:
            raise ValueError(f"{file}: holds no {name}")
    return content


def _by_id(file: Path, entries: list[Any], what: str) -> dict[int, dict[str, Any]]:
    """Entries by their id, in order; each id an integer, given once, with the fields that its kind must have."""
    needed = {"image": ("file_name", "height", "width"), "category": ("name",), "annotation": ("bbox",)}[what]
    found: dict[int, dict[str, Any]] = {}
    for entry in entries:
        key = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(key, int) or isinstance(key, bool):
            raise ValueError(f"{file}: {what} id must be an integer, got {key!r}")
        if key in found:
            raise ValueError(f"{file}: {what} {key}: the id is given twice")
        absent = [name for name in needed if name not in entry]
        if absent:
            raise ValueError(f"{file}: {what} {key}: has no {absent[0]}")
        if what == "image" and not isinstance(entry["file_name"], str):
            raise ValueError(f"{file}: image {key}: file_name must be a string, got {entry['file_name']!r}")
        for name in ("height", "width") if what == "image" else ():
            if not isinstance(entry[name], int) or entry[name] < 1:
                raise ValueError(f"{file}: image {key}: {name} must be at least 1 pixel, got {entry[name]!r}")
        found[key] = entry
    return found


def _box(where: str, annotation: dict[str, Any]) -> list[float]:
    """x y w h to x1 y1 x2 y2."""
    box = annotation["bbox"]
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_finite, box)):
        raise ValueError(f"{where}: bbox must be four finite numbers, got {box!r}")
    x, y, width, height = map(float, box)
    return [x, y, x + width, y + height]


def _area(where: str, annotation: dict[str, Any]) -> float | None:
    area = annotation.get("area")
    if area is not None and not (_is_finite(area) and area >= 0):
        raise ValueError(f"{where}: area must be at least 0, got {area!r}")
    return area


def _segmentation(where: str, annotation: dict[str, Any], height: int, width: int) -> dict[str, Any]:
    """Polygons or run lengths to compressed run lengths of the image's size."""
    given = annotation.get("segmentation")
    if isinstance(given, list):
        if not given or not all(map(_is_polygon, given)):
            shown = str(given)[:60]
            raise ValueError(f"{where}: segmentation must be polygons of three finite points or more, got {shown}")
        return rle.merge(rle.frPyObjects(given, height, width))  # pyright: ignore[reportArgumentType]
    if not isinstance(given, dict) or "size" not in given or "counts" not in given:
        raise ValueError(f"{where}: segmentation must be polygons or run lengths, got {str(given)[:60]}")
    if given["size"] != [height, width]:
        raise ValueError(f"{where}: the mask's size is {given['size']}, the image's {[height, width]}")
    counts = given["counts"]
    if isinstance(counts, list):
        if not all(isinstance(count, int) and count >= 0 for count in counts) or sum(counts) != height * width:
            raise ValueError(f"{where}: run lengths must be at least 0 and add up to {height * width}, got {counts}")
        return rle.frPyObjects(given, height, width)  # pyright: ignore[reportReturnType]
    packed = {"size": [height, width], "counts": str(counts).encode()}
    try:
        rle.decode(packed)  # pyright: ignore[reportArgumentType]
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{where}: run lengths are of no mask of size {[height, width]} ({error})") from None
    return packed


def _is_polygon(points: Any) -> bool:
    return isinstance(points, list) and len(points) >= 6 and len(points) % 2 == 0 and all(map(_is_finite, points))


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
