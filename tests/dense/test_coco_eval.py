"""COCO's figures: perfect detections give 1, and all others what pycocotools says."""

import contextlib
import copy
import io

import pytest
import torch
from detection_samples import annotation, change, write_set

from flash_vision.dense.coco_data import CocoSplit, decode_masks, read_coco
from flash_vision.dense.coco_eval import CocoEvaluator, coco_results


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> CocoSplit:
    """Objects of two classes, among them one of id 0, a crowd and a box without area."""
    data = write_set(tmp_path_factory.mktemp("coco") / "set", train=12)

    def worse(content):
        content["annotations"][0]["id"] = 0
        crowd = {"size": [48, 64], "counts": [0, 48 * 32, 48 * 32]}
        content["annotations"].append(annotation(900, 1, 3, [0, 0, 32, 48], iscrowd=1, segmentation=crowd))
        content["annotations"].append(annotation(901, 3, 90, [5, 5, 0, 9]))

    return read_coco(change(data / "train.json", worse), data / "images", masks=True)


def truth_as_detections(split: CocoSplit, *, noise: float = 0.0) -> tuple[list, list]:
    """The objects of each image as a detector gives them, moved by up to `noise` pixels, with some false ones."""
    generator = torch.Generator().manual_seed(3)
    outputs, targets = [], []
    for image in split.images:
        boxes = image.boxes + noise * (2 * torch.rand(image.boxes.shape, generator=generator) - 1)
        masks = decode_masks(image.segmentations or (), image.size).float()[:, None]
        labels, scores = image.labels, torch.ones(len(boxes))
        if noise:
            shift = int(noise)
            masks = torch.nn.functional.pad(masks, (shift, 0, shift, 0))[..., : image.size[0], : image.size[1]]
            false = torch.tensor([[1.0, 1, 30, 40], [8.0, 3, 20, 22]])
            boxes, labels = torch.cat([boxes, false]), torch.cat([labels, torch.tensor([1, 2])])
            false_masks = torch.zeros(2, 1, *image.size)
            false_masks[0, :, 1:40, 1:30] = 1
            masks, scores = torch.cat([masks, false_masks]), torch.rand(len(boxes), generator=generator)
        outputs.append({"boxes": boxes, "labels": labels, "scores": scores, "masks": masks})
        targets.append({"image_id": image.id})
    return outputs, targets


def figures(split: CocoSplit, outputs: list, targets: list, *, masks: bool = True) -> dict[str, float]:
    evaluator = CocoEvaluator(split, masks=masks)
    for output, target in zip(outputs, targets, strict=True):
        evaluator.update([output], [target])
    return evaluator.compute()


def test_perfect_detections_give_one(tmp_path):
    data = write_set(tmp_path / "set")
    split = read_coco(data / "train.json", data / "images", masks=True)
    found = figures(split, *truth_as_detections(split))
    assert {name: value for name, value in found.items() if abs(value - 1) > 1e-9} == {}
    assert found.keys() >= {"box_map", "box_map50", "mask_map", "box_map/square", "mask_map/bar"}


def test_no_detections_give_zero_and_no_images_no_figure(split):
    outputs, targets = truth_as_detections(split)
    nothing = [{name: value[:0] for name, value in output.items()} for output in outputs]
    found = figures(split, nothing, targets)
    assert found["box_map"] == found["mask_map"] == found["box_mar100"] == 0


@pytest.mark.parametrize("noise", [1.0, 2.0])
def test_the_figures_are_those_of_pycocotools(split, noise):
    pytest.importorskip("pycocotools", reason="pycocotools is not installed")
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    outputs, targets = truth_as_detections(split, noise=noise)
    found = figures(split, outputs, targets)
    rows = [
        row
        for output, target in zip(outputs, targets, strict=True)
        for row in coco_results(output, target["image_id"], split.category_ids)
    ]
    names = ("map", "map50", "map75", "map_small", "map_medium", "map_large", None, None, "mar100")
    for kind, iou_type, field in (("box", "bbox", "bbox"), ("mask", "segm", "segmentation")):
        with contextlib.redirect_stdout(io.StringIO()):
            truth = COCO()
            truth.dataset = copy.deepcopy(split.content)
            truth.createIndex()
            kept = [{name: row[name] for name in ("image_id", "category_id", "score", field)} for row in rows]
            evaluation = COCOeval(truth, truth.loadRes(copy.deepcopy(kept)), iou_type)
            evaluation.evaluate(), evaluation.accumulate(), evaluation.summarize()
        for name, expected in zip(names, evaluation.stats, strict=False):
            if name and expected >= 0:
                assert found[f"{kind}_{name}"] == pytest.approx(expected, abs=1e-9), (kind, name)
        assert 0 < found[f"{kind}_map"] < 1


def test_a_figure_that_can_be_computed_by_hand(tmp_path):
    # two objects of one class; best first: right, wrong, right. Precision 1 up to recall 1/2, then 2/3 up to recall 1.
    data = write_set(tmp_path / "set", train=2)
    change(data / "train.json", lambda c: c.update(
        annotations=[annotation(1, 0, 3, [2, 2, 10, 10]), annotation(2, 1, 3, [5, 5, 10, 10])]))  # fmt: skip
    split = read_coco(data / "train.json", data / "images", masks=False)
    first = {"boxes": torch.tensor([[2.0, 2, 12, 12], [20, 20, 30, 30]]), "scores": torch.tensor([0.9, 0.8])}
    second = {"boxes": torch.tensor([[5.0, 5, 15, 15]]), "scores": torch.tensor([0.7])}
    outputs = [{**output, "labels": torch.ones(len(output["scores"]), dtype=torch.int64)} for output in (first, second)]
    found = figures(split, outputs, [{"image_id": 0}, {"image_id": 1}], masks=False)
    assert found["box_map50"] == pytest.approx((51 * 1 + 50 * 2 / 3) / 101)
    assert found["box_mar100"] == 1


def test_detections_inside_a_crowd_region_are_neither_right_nor_wrong(split):
    outputs, targets = truth_as_detections(split)
    before = figures(split, outputs, targets)["box_map/square"]
    place = [target["image_id"] for target in targets].index(1)
    inside = {"boxes": torch.tensor([[2.0, 2, 20, 40]]), "labels": torch.tensor([1]), "scores": torch.tensor([1.0])}
    inside["masks"] = torch.zeros(1, 1, 48, 64)
    outputs[place] = {name: torch.cat([inside[name], outputs[place][name]]) for name in inside}
    assert figures(split, outputs, targets)["box_map/square"] == before
    outputs[place]["boxes"][0] += torch.tensor([30, 0, 30, 0])
    assert figures(split, outputs, targets)["box_map/square"] < before


def test_images_that_were_not_seen_do_not_count(split):
    outputs, targets = truth_as_detections(split)
    all_of_them, half = figures(split, outputs, targets), figures(split, outputs[::2], targets[::2])
    assert half["box_mar100"] > 0.9
    assert all_of_them["box_mar100"] > 0.9


def test_results_are_in_cocos_format(split):
    outputs, targets = truth_as_detections(split)
    rows = coco_results(outputs[0], targets[0]["image_id"], split.category_ids)
    assert rows[0]["category_id"] in (3, 90)
    x1, y1, x2, y2 = outputs[0]["boxes"][0].tolist()
    assert rows[0]["bbox"] == [x1, y1, x2 - x1, y2 - y1]
    assert rows[0]["segmentation"]["size"] == list(split.images[0].size)
