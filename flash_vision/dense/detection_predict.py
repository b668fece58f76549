"""Detections for image files and folders, or for the images of a COCO file, whose figures are then computed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor
from tqdm import tqdm

from flash_vision.data.class_folder import CorruptImageError
from flash_vision.data.files import write_text
from flash_vision.dense.coco_data import CocoSamples, CocoSplit, read_coco
from flash_vision.dense.coco_eval import MASK_THRESHOLD, CocoEvaluator, coco_results
from flash_vision.dense.detection_model import Detector, DetectorSpec, build_detector
from flash_vision.dense.draw import draw_detections, save_picture
from flash_vision.train.model_source import load_strictly, resolve_device
from flash_vision.train.predict import decode_file, find_images
from flash_vision.train.sidecar import read_beside


@dataclass(kw_only=True)
class DetectConfig:
    """A trained detector and the images it shall search.

    Args:
        checkpoint: weights file of tools/train_detection.py, with its model.json beside it.
        images: image files, folders searched for .jpg, .jpeg and .png files, or - for one path a line on stdin; with
            annotations, the one folder of their images.
        annotations: COCO file of the images to search; COCO's figures are computed too.
        score_threshold: least score of an object that is listed and drawn, in [0, 1]; COCO's results hold all.
        batch_size: images a step.
        device: torch device; cuda where there is one, else cpu, when empty.
        use_ema: take the averaged weights where the checkpoint holds both kinds.
        skip_corrupt: list an unreadable image, or one of another size than annotations say, with its error and go on,
            instead of stopping there; figures are then of the other images.
        picture_dir: folder for a PNG of each image with what was found.
        json_file: JSON file of the objects of each image.
        coco_file: JSON file of COCO's result format; image_id is that of annotations, or the place in the list.
        metrics_file: JSON file of COCO's figures and of the number of images that they are of (with annotations).
    Raises:
        ValueError: a field out of range, or fields that contradict each other; the message names them.
    """

    checkpoint: str
    images: list[str] = field(default_factory=list)
    annotations: str = ""
    score_threshold: float = 0.5
    batch_size: int = 4
    device: str = ""
    use_ema: bool = True
    skip_corrupt: bool = False
    picture_dir: str = ""
    json_file: str = ""
    coco_file: str = ""
    metrics_file: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.score_threshold <= 1:
            raise ValueError(f"score_threshold must be in [0, 1], got {self.score_threshold}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.annotations and (len(self.images) != 1 or not Path(self.images[0]).is_dir()):
            raise ValueError(f"images must be the one folder of annotations' images, got {self.images}")
        if self.metrics_file and not self.annotations:
            raise ValueError(f"metrics_file must be left out without annotations, got {self.metrics_file!r}")
        for name in ("json_file", "coco_file", "metrics_file"):
            if not Path(getattr(self, name)).parent.is_dir():
                raise ValueError(f"{name}: there is no folder {Path(getattr(self, name)).parent}")


@dataclass(frozen=True, kw_only=True)
class Found:
    """One object: class, score in [0, 1], and box as x1 y1 x2 y2 in pixels of the image."""

    label: str
    category_id: int
    score: float
    box: tuple[float, float, float, float]


@dataclass(frozen=True, kw_only=True)
class Detections:
    """What was found in one image, best first; `error` says why there is nothing."""

    file: str
    objects: tuple[Found, ...]
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Search:
    """What `detect` gives.

    Args:
        detections: of each image.
        figures: COCO's, where there are annotations, else none.
        annotated: what the annotation file holds, see `coco_data.CocoSplit`.
    """

    detections: list[Detections]
    figures: dict[str, float]
    annotated: dict[str, int]


def load_detector(checkpoint: str, *, use_ema: bool = True) -> tuple[Detector, DetectorSpec]:
    """Builds the detector that model.json beside a weights file describes, with these weights; in evaluation mode.

    Raises:
        ValueError: no such file, no description beside it, or weights of another detector.
    """
    spec = read_beside(DetectorSpec, checkpoint)
    detector = build_detector(spec)
    load_strictly(detector, checkpoint, use_ema=use_ema, what="the detector in its model.json")
    return detector.eval(), spec


def detect(config: DetectConfig) -> Search:
    """Searches the images and writes what the configuration names.

    Raises:
        ValueError: weights, annotations or image that cannot be read, with the name; or figures asked for of images
            none of which can be.
    """
    device = resolve_device(config.device)
    detector, spec = load_detector(config.checkpoint, use_ema=config.use_ema)
    detector.to(device)
    masks = spec.detector == "mask_rcnn"
    split = read_annotations(config, spec, masks=masks) if config.annotations else None
    files = [str(image.path) for image in split.images] if split else find_images(config.images)
    read = CocoSamples(split.images, None, seed=0, training=False).read if split else None
    ids = [image.id for image in split.images] if split else list(range(len(files)))
    evaluator = CocoEvaluator(split, masks=masks) if split else None
    names = picture_names(files)
    detections: dict[int, Detections] = {}
    results: list[dict[str, Any]] = []
    for numbers, images, problems in tqdm(
        _batches(files, config, read),
        total=-(-len(files) // config.batch_size),
        unit="batch",
        disable=None,
        leave=False,
    ):
        with torch.inference_mode():
            outputs = detector([image.to(device).float().div(255) for image in images]) if images else []
        if evaluator is not None:
            evaluator.update(outputs, [{"image_id": ids[number]} for number in numbers])
        for number, image, output in zip(numbers, images, outputs, strict=True):
            results += coco_results(output, ids[number], spec.category_ids) if config.coco_file else []
            detections[number] = _listed(files[number], output, spec, config.score_threshold)
            if config.picture_dir:
                picture = draw(image, output, spec, config.score_threshold)
                save_picture(Path(config.picture_dir) / names[number], picture)
        detections |= problems
    listed = [detections[number] for number in range(len(files))]
    _write(config, listed, results)
    if evaluator is None:
        return Search(detections=listed, figures={}, annotated={})
    if not evaluator.seen:
        raise ValueError(f"{config.annotations}: none of its {len(files)} images can be read, so there are no figures")
    figures = evaluator.compute()
    if config.metrics_file:
        write_text(config.metrics_file, json.dumps({"images": len(evaluator.seen), **figures}, indent=2) + "\n")
    return Search(detections=listed, figures=figures, annotated=split.counts if split else {})


def read_annotations(config: DetectConfig, spec: DetectorSpec, *, masks: bool) -> CocoSplit:
    """The images of `config.annotations`, whose categories must be the detector's.

    Raises:
        ValueError: see `read_coco`; or other categories.
    """
    split = read_coco(Path(config.annotations), Path(config.images[0]), masks=masks)
    one, other = (tuple(zip(s.category_ids, s.class_names, strict=True)) for s in (spec, split))
    if one != other:
        raise ValueError(f"{config.annotations}: its categories are not the detector's: {other}, {one}")
    return split


def draw(image: Tensor, output: dict[str, Tensor], spec: DetectorSpec, score_threshold: float) -> Tensor:
    """The image (3, H, W), uint8, with the objects of at least the score drawn; see `draw_detections`."""
    kept = (output["scores"] >= score_threshold).cpu()
    labels = (output["labels"].cpu()[kept] - 1).tolist()
    scores = output["scores"].cpu()[kept].tolist()
    captions = [f"{spec.class_names[label]} {score:.2f}" for label, score in zip(labels, scores, strict=True)]
    masks = output["masks"].cpu()[kept][:, 0] > MASK_THRESHOLD if "masks" in output else None
    return draw_detections(image, output["boxes"].cpu()[kept], labels, captions, masks)


def picture_names(files: list[str]) -> list[str]:
    """The name of each image's picture: the image's, with its place in the list where two images have one name."""
    stems = [Path(file).stem for file in files]
    shared = {stem for stem, count in Counter(stems).items() if count > 1}
    return [f"{stem}.{number}.png" if stem in shared else f"{stem}.png" for number, stem in enumerate(stems)]


def _batches(
    files: list[str], config: DetectConfig, read: Callable[[int], tuple[Tensor, Any]] | None
) -> Iterator[tuple[list[int], list[Tensor], dict[int, Detections]]]:
    """Places in the list and images (3, H, W), uint8, of what can be read, and entries for what cannot.

    Args:
        read: gives the image of a place, and something more; the files are decoded without it.
    """
    if config.picture_dir:
        Path(config.picture_dir).mkdir(parents=True, exist_ok=True)
    for start in range(0, len(files), config.batch_size):
        numbers, images, problems = [], [], {}
        for number in range(start, min(start + config.batch_size, len(files))):
            try:
                images.append(read(number)[0] if read else pil_to_tensor(decode_file(files[number])))
                numbers.append(number)
            except (CorruptImageError, OSError) as error:
                if not config.skip_corrupt:
                    raise ValueError(f"{files[number]}: {error}") from None
                problems[number] = Detections(file=files[number], objects=(), error=str(error))
        yield numbers, images, problems


def _listed(file: str, output: dict[str, Tensor], spec: DetectorSpec, score_threshold: float) -> Detections:
    rows = zip(output["labels"].tolist(), output["scores"].tolist(), output["boxes"].tolist(), strict=True)
    found = [
        Found(label=spec.class_names[label - 1], category_id=spec.category_ids[label - 1], score=score, box=tuple(box))
        for label, score, box in rows
        if score >= score_threshold
    ]
    return Detections(file=file, objects=tuple(sorted(found, key=lambda object: -object.score)))


def _write(config: DetectConfig, detections: list[Detections], results: list[dict[str, Any]]) -> None:
    if config.json_file:
        rows = [{"file": d.file, "objects": [vars(found) for found in d.objects], "error": d.error} for d in detections]
        write_text(config.json_file, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    if config.coco_file:
        for row in results:
            if "segmentation" in row:
                row["segmentation"] = {**row["segmentation"], "counts": row["segmentation"]["counts"].decode()}
        write_text(config.coco_file, json.dumps(results) + "\n")
