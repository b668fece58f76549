"""COCO files: what is read, what is refused with file and id, and what is left out with a count."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from detection_samples import annotation, change, write_json, write_set
from faster_coco_eval.core import mask as rle
from PIL import Image

from flash_vision.data.class_folder import CorruptImageError
from flash_vision.dense.coco_data import CocoSamples, CocoSplit, decode_masks, read_coco

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.fixture
def data(tmp_path) -> Path:
    return write_set(tmp_path / "set")


def read(data: Path, *, masks: bool = True) -> CocoSplit:
    return read_coco(data / "train.json", data / "images", masks=masks)


def one_image(root: Path, annotations: list, **fields) -> Path:
    """A set of one image of 20 x 10 pixels."""
    (root / "images").mkdir(parents=True)
    Image.fromarray(np.zeros((10, 20, 3), np.uint8)).save(root / "images" / "7.png")
    entry = {"id": 7, "file_name": "7.png", "width": 20, "height": 10, **fields}
    write_json(root / "train.json", [entry], annotations)
    return root


def test_boxes_labels_and_masks_are_those_of_the_file(data):
    split = read(data)
    content = json.loads((data / "train.json").read_text())
    assert split.class_names == ("square", "bar")
    assert split.category_ids == (3, 90)
    assert split.counts == {"images": 6, "objects": len(content["annotations"]), "images without objects": 0}
    image = split.images[2]
    own = [a for a in content["annotations"] if a["image_id"] == image.id]
    assert image.labels.tolist() == [{3: 1, 90: 2}[a["category_id"]] for a in own]
    for box, mask, a in zip(image.boxes, decode_masks(image.segmentations or (), image.size), own, strict=True):
        x, y, w, h = a["bbox"]
        assert box.tolist() == [x, y, x + w, y + h]
        expected = torch.zeros(image.size, dtype=torch.uint8)
        expected[y : y + h, x : x + w] = 1
        assert torch.equal(mask, expected)


def test_what_training_leaves_out_is_counted_and_stays_in_the_ground_truth(tmp_path):
    crowd = {"size": [10, 20], "counts": [0, 100, 100]}
    data = one_image(
        tmp_path,
        [
            annotation(0, 7, 3, [2, 2, 5, 5]),
            annotation(11, 7, 3, [2, 2, 0, 5]),
            annotation(12, 7, 3, [25, 2, 5, 5]),
            annotation(13, 7, 90, [15, 2, 9, 5]),
            annotation(14, 7, 90, [0, 0, 10, 10], iscrowd=1, segmentation=crowd),
        ],
    )
    change(data / "train.json", lambda content: content["annotations"][0].pop("area"))
    split = read(data)
    assert split.counts == {
        "images": 1, "objects": 2, "images without objects": 0, "crowd regions not trained on": 1,
        "boxes without area left out": 2, "boxes cut at the image's border": 1, "annotations without area": 1,
    }  # fmt: skip
    assert split.images[0].boxes.tolist() == [[2, 2, 7, 7], [15, 2, 20, 7]]
    assert len(split.content["annotations"]) == 5
    assert [a["iscrowd"] for a in split.content["annotations"]] == [0, 0, 0, 0, 1]
    assert [a["id"] for a in split.content["annotations"]] == [1, 2, 3, 4, 5], "0 would mean no match"
    assert split.content["annotations"][0]["area"] == 25


def test_an_object_whose_mask_lies_outside_the_image_is_kept_and_counted(data):
    change(data / "train.json", add(segmentation=[[100, 100, 110, 100, 110, 110]]))
    before = read(data).counts["objects"]
    assert read(data).counts["objects with an empty mask"] == 1
    assert before == sum(len(image.labels) for image in read(data).images)


SMALL_MASK = rle.encode(np.asfortranarray(np.eye(5, dtype=np.uint8)))["counts"].decode()


def add(**fields):
    def changed(content):
        content["annotations"].append(annotation(999, content["images"][0]["id"], 3, [1, 1, 4, 4], **fields))

    return changed


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (lambda c: c.pop("categories"), "must hold a list 'categories'"),
        (lambda c: c["images"].clear(), "holds no images"),
        (lambda c: c["images"].append(dict(c["images"][0])), "image 0: the id is given twice"),
        (lambda c: c["images"][1].pop("height"), "image 1: has no height"),
        (lambda c: c["images"][1].update(width=0), "image 1: width must be at least 1 pixel, got 0"),
        (lambda c: c["images"][1].update(file_name="away.png"), r"image 1: .*away.png is missing \(1 of 6 are\)"),
        (lambda c: c["annotations"][4].update(id=1), "annotation 1: the id is given twice"),
        (lambda c: c["annotations"][4].update(id="5"), "annotation id must be an integer, got '5'"),
        (lambda c: c["categories"][0].pop("name"), "category 3: has no name"),
        (add(category_id=4), "annotation 999: category_id 4 is not in the file"),
        (add(image_id=77), "annotation 999: image_id 77 is not in the file"),
        (add(bbox=[1, 2, 3]), "annotation 999: bbox must be four finite numbers"),
        (add(bbox=[1, 2, 3, float("nan")], area=1), "annotation 999: bbox must be four finite numbers"),
        (add(segmentation=[]), "annotation 999: segmentation must be polygons"),
        (add(segmentation=[[1, 1, 2, 2]]), "annotation 999: segmentation must be polygons of three finite points"),
        (add(segmentation={"size": [48, 64], "counts": "abc"}), r"annotation 999: the mask's size is \[48, 64\]"),
        (add(segmentation={"size": [56, 40], "counts": [5, 5]}), "annotation 999: run lengths must .* add up to 2240"),
        (add(segmentation={"size": [56, 40], "counts": [-10, 2250]}), "annotation 999: run lengths must be at least 0"),
        (
            add(segmentation={"size": [56, 40], "counts": SMALL_MASK}),
            r"999: run lengths are of no mask of size \[56, 40",
        ),
        (add(segmentation={"size": [56, 40], "counts": "hello world"}), "annotation 999: run lengths are of no mask"),
        (add(segmentation={"size": 5, "counts": [5]}), "annotation 999: the mask's size is 5"),
        (
            add(segmentation=[[2, 2, 7, 2, float("nan"), 7]]),
            "annotation 999: segmentation must be polygons of .* finite",
        ),
        (add(segmentation=[["2", 2, 7, 2, 7, 7]]), "annotation 999: segmentation must be polygons of three finite"),
        (add(area=-5), "annotation 999: area must be at least 0, got -5"),
        (add(area="25"), "annotation 999: area must be at least 0, got '25'"),
        (add(image_id=[7]), r"annotation 999: image_id \[7\] is not in the file"),
        (lambda c: c["images"][1].update(file_name=7), "image 1: file_name must be a string, got 7"),
        (add(segmentation="mask.png"), "annotation 999: segmentation must be polygons or run lengths"),
    ],
)
def test_mistakes_are_refused_with_file_and_id(data, changed, line):
    file = change(data / "train.json", changed)
    with pytest.raises(ValueError, match=line) as error:
        read(data)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"images": 3}'])
def test_files_that_are_no_coco_files_are_refused(data, content):
    (data / "train.json").write_text(content)
    with pytest.raises(ValueError, match=r"train.json: (cannot be read as JSON|must hold a list)"):
        read(data)
    with pytest.raises(ValueError, match="no such file"):
        read_coco(data / "none.json", data / "images", masks=False)
    with pytest.raises(ValueError, match="no such folder"):
        read_coco(data / "train.json", data / "none", masks=False)


def test_masks_that_are_not_needed_may_be_missing(data):
    change(data / "train.json", add(segmentation=[]))
    assert read(data, masks=False).images[0].segmentations is None


def test_an_image_of_another_size_than_its_annotations_counts_as_unreadable(tmp_path):
    data = one_image(tmp_path, [annotation(1, 7, 3, [2, 2, 5, 5])], height=20, width=10)
    samples = CocoSamples(read(data).images, None, seed=0, training=False)
    with pytest.raises(CorruptImageError, match=r"height and width are \(10, 20\), in the annotations \(20, 10\)"):
        samples.read(0)
    sample = samples[0, 0, 0]
    assert sample.image is None
    assert sample.problems[0].name.endswith("7.png")


def test_polygons_and_both_kinds_of_run_lengths_are_one_mask(tmp_path):
    from faster_coco_eval.core import mask as rle

    mask = np.zeros((10, 20), np.uint8)
    mask[2:7, 3:9] = 1
    columns = mask.T.ravel()
    changes = np.flatnonzero(np.diff(np.concatenate([[0], columns, [2]])))
    plain = {"size": [10, 20], "counts": np.diff(np.concatenate([[0], changes])).tolist()}
    packed = rle.encode(np.asfortranarray(mask))
    kinds = [[[3, 2, 9, 2, 9, 7, 3, 7]], plain, {**packed, "counts": packed["counts"].decode()}]
    annotations = [annotation(i, 7, 3, [3, 2, 6, 5], segmentation=kind) for i, kind in enumerate(kinds, start=1)]
    image = read(one_image(tmp_path, annotations)).images[0]
    for decoded in decode_masks(image.segmentations or (), image.size):
        assert np.array_equal(decoded.numpy(), mask)


@pytest.mark.parametrize(("name", "objects"), [("bccd", 2804), ("nuclei_dsb2018", 11459)])
def test_real_sets_are_read_whole(name, objects):
    if not (SHARED / name).is_dir():
        pytest.skip(f"{SHARED / name} is not there")
    folder = SHARED / name / ("images" if name == "bccd" else "train/images")
    split = read_coco(SHARED / name / "instances_train.json", folder, masks=name != "bccd")
    assert split.counts["objects"] == objects
