"""COCO's average precision of boxes and masks, by faster-coco-eval: pycocotools' figures in a tenth of the time."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch.distributed as dist
from faster_coco_eval import COCO, COCOeval_faster
from faster_coco_eval.core import mask as rle
from torch import Tensor

from flash_vision.dense.coco_data import CocoSplit

MASK_THRESHOLD = 0.5  # a pixel belongs to an object from this probability on
KINDS = {"box": "bbox", "mask": "segm"}
SUMMARY = {"AP_all": "map", "AP_50": "map50", "AP_75": "map75", "AP_small": "map_small", "AP_medium": "map_medium",
           "AP_large": "map_large", "AR_third": "mar100"}  # fmt: skip


class CocoEvaluator:
    """Collects detections and computes COCO's figures over the images that were seen.

    Args:
        split: ground truth.
        masks: whether masks are evaluated too.
    """

    def __init__(self, split: CocoSplit, *, masks: bool) -> None:
        self.split = split
        self.kinds = ("box", "mask") if masks else ("box",)
        self.results: list[dict[str, Any]] = []
        self.seen: list[int] = []

    def update(self, outputs: list[dict[str, Tensor]], targets: list[dict[str, Any]]) -> None:
        """Takes the detections of images, as `Detector` gives them, and the targets with their image_id."""
        for output, target in zip(outputs, targets, strict=True):
            self.seen.append(target["image_id"])
            self.results += coco_results(output, target["image_id"], self.split.category_ids)

    def compute(self, distributed: bool = False) -> dict[str, float]:
        """COCO's figures over the images of all processes, fractions in [0, 1].

        Returns:
            box_map (IoU 0.50 to 0.95), box_map50, box_map75, box_map_small, box_map_medium, box_map_large, box_mar100,
            box_map/CLASS, and the same of masks; left out where there is no object to find.
        """
        results, seen = self.results, self.seen
        if distributed:
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, (results, seen))
            results, seen = [r for part, _ in gathered for r in part], [i for _, part in gathered for i in part]
        metrics: dict[str, float] = {}
        for kind in self.kinds:
            metrics |= {f"{kind}_{name}": value for name, value in self._evaluate(kind, results, seen).items()}
        return metrics

    def _evaluate(self, kind: str, results: list[dict[str, Any]], seen: list[int]) -> dict[str, float]:
        truth = COCO(copy.deepcopy(self.split.content))  # it writes into what it is given
        # COCO takes the area of a detection from its box where there is one, which for masks must be that of the mask
        drop = "segmentation" if kind == "box" else "bbox"
        found = truth.loadRes([{name: r[name] for name in r if name != drop} for r in results])
        evaluation = COCOeval_faster(truth, found, KINDS[kind], print_function=_silent)  # pyright: ignore
        evaluation.params.imgIds = sorted(seen)
        evaluation.run()
        named = evaluation.stats_as_dict
        metrics = {name: float(named[key]) for key, name in SUMMARY.items() if named[key] >= 0}
        # IoU thresholds, recalls, classes, areas (the first: all), detections per image (the last: 100)
        precision = evaluation.eval["precision"][:, :, :, 0, -1]
        for index, name in enumerate(self.split.class_names):
            of_class = precision[:, :, index]
            if (of_class > -1).any():
                metrics[f"map/{name}"] = float(np.mean(of_class[of_class > -1]))
        return metrics


def coco_results(output: dict[str, Tensor], image_id: int, category_ids: tuple[int, ...]) -> list[dict[str, Any]]:
    """One image's detections in COCO's result format: x y w h boxes and, where there are masks, run lengths."""
    boxes = output["boxes"].float().cpu()
    corners, sizes = boxes[:, :2], boxes[:, 2:] - boxes[:, :2]
    rows = [
        {"image_id": image_id, "category_id": category_ids[label - 1], "bbox": [*corner, *size], "score": score}
        for corner, size, label, score in zip(
            corners.tolist(), sizes.tolist(), output["labels"].tolist(), output["scores"].float().tolist(), strict=True
        )
    ]
    if "masks" in output and rows:
        binary = (output["masks"][:, 0] > MASK_THRESHOLD).cpu().numpy().astype(np.uint8)
        lengths: Any = rle.encode(np.asfortranarray(binary.transpose(1, 2, 0)))
        for row, length in zip(rows, lengths, strict=True):
            row["segmentation"] = length
    return rows


def _silent(*_: Any) -> None:
    return None
