"""Label files, pairing, the check before training, augmentation of image and label map together."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from segmentation_samples import CLASSES, COLOURS, write_pairs

from flash_vision.data.class_folder import CorruptImageError
from flash_vision.dense.segmentation_classes import ClassSet, label_image, read_classes, read_label_map
from flash_vision.dense.segmentation_data import (
    JointAugment,
    PairSamples,
    check_pairs,
    find_pairs,
    read_pair,
    resize_short_side,
)
from flash_vision.dense.segmentation_pictures import class_shares, overlay

VOID = -1
CAMVID = Path(__file__).parents[2].parent / "shared" / "data" / "camvid"
CAMVID_CLASSES = Path(__file__).parents[2] / "configs" / "camvid" / "classes.yaml"


@pytest.fixture
def data(tmp_path) -> Path:
    return write_pairs(tmp_path / "data")


def save_labels(path, numbers, dtype=np.uint8):
    Image.fromarray(np.array(numbers, dtype=dtype)).save(path)
    return path


def test_numbers_become_classes_and_back(tmp_path):
    file = save_labels(tmp_path / "a.png", [[0, 1, 2], [255, 2, 0]])
    labels = read_label_map(file, CLASSES)
    assert labels.dtype == np.int16
    assert labels.tolist() == [[0, 1, 2], [VOID, 2, 0]]
    label_image(labels[:1], CLASSES).save(tmp_path / "b.png")
    assert read_label_map(tmp_path / "b.png", CLASSES).tolist() == [[0, 1, 2]]


def test_a_palette_png_is_read_by_index_and_written_with_the_colours(tmp_path):
    image = label_image(np.array([[2, 1, 0]]), CLASSES)
    image.save(tmp_path / "a.png")
    again = Image.open(tmp_path / "a.png")
    assert again.mode == "P"
    assert [again.convert("RGB").getpixel((x, 0)) for x in range(3)] == [COLOURS[2], COLOURS[1], COLOURS[0]]
    assert read_label_map(tmp_path / "a.png", CLASSES).tolist() == [[2, 1, 0]]


def test_reduce_zero_label_makes_zero_void_and_shifts_the_rest(tmp_path):
    classes = ClassSet(names=("wall", "sky"), reduce_zero_label=True)
    file = save_labels(tmp_path / "a.png", [[0, 1, 2, 255]])
    assert read_label_map(file, classes).tolist() == [[VOID, 0, 1, VOID]]
    label_image(np.array([[0, 1]]), classes).save(tmp_path / "b.png")
    assert np.array(Image.open(tmp_path / "b.png")).tolist() == [[1, 2]]
    assert Image.open(tmp_path / "b.png").convert("RGB").getpixel((0, 0)) == classes.palette[0]


def test_more_than_256_classes_are_kept_in_16_bits(tmp_path):
    classes = ClassSet(names=tuple(f"class {index}" for index in range(847)), ignore_index=65535)
    file = save_labels(tmp_path / "a.png", [[0, 300, 846, 65535]], np.uint16)
    assert read_label_map(file, classes).tolist() == [[0, 300, 846, VOID]]
    label_image(np.array([[300]]), classes).save(tmp_path / "b.png")
    assert read_label_map(tmp_path / "b.png", classes).tolist() == [[300]]


def test_an_unknown_label_is_named_with_file_and_count(tmp_path):
    file = save_labels(tmp_path / "a.png", [[0, 7, 7, 255]])
    with pytest.raises(ValueError, match=r"a\.png: unknown label 7 on 2 pixels \(classes are 0 to 2, void is 255\)"):
        read_label_map(file, CLASSES)
    with pytest.raises(ValueError, match=r"unknown label 255 on 1 pixels \(classes are 0 to 2, void is none\)"):
        read_label_map(save_labels(file, [[255]]), ClassSet(names=("a", "b", "c"), ignore_index=None))
    with pytest.raises(ValueError, match="unknown label 70000 on 1 pixels"):
        CLASSES.decode(np.array([[0, 70000]], dtype=np.int32))


def test_a_picture_in_colours_is_refused_as_a_label_map(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    with pytest.raises(
        ValueError, match=r"a\.png: is a picture of mode RGB; a label map holds one class number a pixel"
    ):
        read_label_map(tmp_path / "a.png", CLASSES)


def test_a_label_file_that_does_not_decode_is_corrupt(tmp_path):
    (tmp_path / "a.png").write_bytes(b"no image")
    with pytest.raises(CorruptImageError, match=r"a\.png: cannot be read"):
        read_label_map(tmp_path / "a.png", CLASSES)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_classes_come_from_yaml_json_or_a_mapping(tmp_path, suffix):
    file = tmp_path / f"classes.{suffix}"
    content = CLASSES.as_dict()
    file.write_text(json.dumps(content) if suffix == "json" else yaml.safe_dump(content))
    assert read_classes(str(file)) == read_classes(content) == CLASSES
    assert len({*ClassSet(names=tuple(map(str, range(150)))).palette}) == 150


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "the key names is missing"),
        ({"names": []}, "names must be 1 to 32000 class names"),
        ({"names": ["a", "a"]}, "names must be different from each other, got \\['a'\\]"),
        ({"names": ["a"], "colours": []}, "unknown key 'colours'"),
        ({"names": ["a", "b"], "palette": [[0, 0, 0]]}, "palette must be a colour for each of the 2 names, got 1"),
        ({"names": ["a"], "palette": [[0, 0, 256]]}, "palette must be triples of integers from 0 to 255"),
        (
            {"names": ["a", "b"], "ignore_index": 1},
            "ignore_index must be null or a number from 0 to 65535 that is no class",
        ),
        ({"names": ["a"], "reduce_zero_label": "yes"}, "reduce_zero_label must be true or false"),
        (["a"], "must be a mapping with names, got list"),
    ],
)
def test_classes_that_do_not_fit_are_refused_with_the_key(tmp_path, content, message):
    file = tmp_path / "classes.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=message) as refusal:
        read_classes(str(file))
    assert str(file) in str(refusal.value)
    with pytest.raises(ValueError, match="no such file"):
        read_classes("none.yaml")


@pytest.mark.parametrize("layout", ["camvid", "ade20k"])
def test_pairs_are_found_in_both_layouts_and_under_synonyms(tmp_path, layout):
    root = write_pairs(tmp_path / layout, layout=layout)
    pairs = find_pairs(root, "training" if layout == "camvid" else "train")
    assert [pair.image.name for pair in pairs] == [f"{number:02d}.jpg" for number in range(12)]
    assert all(pair.image.stem == pair.labels.stem and pair.labels.suffix == ".png" for pair in pairs)
    assert len(find_pairs(root, "validation")) == 5


def test_folders_and_files_without_a_counterpart_are_named_and_counted(data):
    with pytest.raises(ValueError, match="holds no split 'test'"):
        find_pairs(data, "test")
    with pytest.raises(ValueError, match="data_dir /nowhere: no such folder"):
        find_pairs("/nowhere", "train")
    labels = data / "train" / "labels"
    (labels / "03.png").rename(labels / "99.png")
    with pytest.raises(ValueError, match=r"03\.jpg: image without a label map in .*labels \(1 of 12 have none\)"):
        find_pairs(data, "train")
    (data / "train" / "images" / "03.jpg").unlink()
    with pytest.raises(ValueError, match=r"99\.png: label map without an image in .*images \(1 of 12 have none\)"):
        find_pairs(data, "train")
    (labels / "99.png").unlink()
    (data / "train" / "images" / "02.jpeg").touch()
    with pytest.raises(ValueError, match=r"02\.jpg: has the name of 02\.jpeg|02\.jpeg: has the name of 02\.jpg"):
        find_pairs(data, "train")
    for file in (data / "val" / "images").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match="val/images: folder without an image"):
        find_pairs(data, "val")
    labels.rename(labels.with_name("masks"))
    with pytest.raises(ValueError, match="there is no folder of label maps beside it"):
        find_pairs(data, "train")


def test_the_check_counts_pixels_and_tells_wrong_label_maps_from_files_that_do_not_decode(data):
    pairs = find_pairs(data, "train")
    census = check_pairs(pairs, CLASSES)
    assert census.unreadable == 0
    assert census.pixels.sum() == sum((np.array(Image.open(pair.labels)) != 255).sum() for pair in pairs)
    pairs[4].image.write_bytes(b"no image")
    assert check_pairs(pairs, CLASSES).unreadable == 1
    Image.new("L", (9, 8)).save(pairs[7].labels)
    save_labels(pairs[9].labels, np.full((57, 61), 3))
    census = check_pairs(pairs, CLASSES)
    assert census.unreadable == 1
    assert ["07.png: label map of 9 x 8 pixels for an image of 61 x 57 (07.jpg)" in census.wrong[0],
            "09.png: unknown label 3 on 3477 pixels" in census.wrong[1]] == [True, True]  # fmt: skip


def augment(**changes):
    settings = {"short_side": None, "scale": (0.5, 2.0), "crop_size": (48, 64), "hflip": 0.5, "photometric": 0.0}
    return JointAugment(**{**settings, "fill": (120.0, 110.0, 100.0), **changes})


def nearest_colour(image):
    distance = (image[None].float() - torch.tensor(COLOURS).view(3, 3, 1, 1)).square().sum(1)
    return distance.argmin(0)


def test_image_and_label_map_are_scaled_cropped_and_flipped_together(data):
    sizes = set()
    for number, pair in enumerate(find_pairs(data, "train")):
        torch.manual_seed(number)
        image, labels = augment()(*read_pair(pair, CLASSES))
        assert image.shape == (3, 48, 64)
        assert image.dtype == torch.uint8
        assert labels.shape == (48, 64)
        known = labels != VOID
        agree = nearest_colour(image)[known] == labels[known]
        assert agree.float().mean() > 0.95
        outside = (image == torch.tensor([120, 110, 100], dtype=torch.uint8).view(3, 1, 1)).all(0)
        assert (labels[outside] == VOID).all()
        sizes.add(int(outside.sum()))
    assert len(sizes) > 1


def test_colours_change_without_touching_the_labels(data):
    pair = read_pair(find_pairs(data, "train")[0], CLASSES)
    settings = {"scale": (1.0, 1.0), "crop_size": (50, 70), "hflip": 0.0}
    torch.manual_seed(3)
    plain, labels = augment(**settings)(*pair)
    assert torch.equal(plain, pair[0])
    changed, same = augment(**settings, photometric=1.0)(*pair)
    assert torch.equal(labels, same)
    assert not torch.equal(changed, plain)


def test_the_short_side_counts_before_the_scale(data):
    pair = read_pair(find_pairs(data, "train")[0], CLASSES)  # 50 x 70
    image, labels = augment(short_side=100, scale=(0.5, 0.5), crop_size=(50, 70), hflip=0.0)(*pair)
    assert (labels[:, 5:] != VOID).all()
    torch.testing.assert_close(image.float(), pair[0].as_subclass(torch.Tensor).float(), atol=2, rtol=0)
    assert resize_short_side(torch.zeros(3, 50, 70, dtype=torch.uint8), 25).shape == (3, 25, 35)


def test_samples_depend_on_their_key_only(data):
    samples = PairSamples(find_pairs(data, "train"), CLASSES, augment=augment(photometric=0.5), short_side=None, seed=4)
    first = samples[(3, 0, 1)]
    torch.rand(5)
    assert all(torch.equal(a, b) for a, b in zip(first[:2], samples[(3, 0, 1)][:2], strict=True))
    assert not torch.equal(first.image, samples[(3, 0, 2)].image)


def test_a_wrong_label_map_that_was_not_checked_is_replaced_and_named(data):
    pairs = find_pairs(data, "train")
    save_labels(pairs[3].labels, [[3]])
    samples = PairSamples(pairs, CLASSES, augment=augment(), short_side=None, seed=4)
    sample = samples[(3, 0, 0)]
    assert sample.image is not None
    assert [problem.name for problem in sample.problems] == [str(pairs[3].image)]
    assert "unknown label 3" in sample.problems[0].reason


def test_the_overlay_shows_the_colours_and_lists_the_classes(data):
    image = Image.new("RGB", (60, 40), (10, 20, 30))
    labels = np.zeros((40, 60), dtype=np.int16)
    labels[:, 30:] = 2
    labels[:10] = VOID
    picture = overlay(image, labels, CLASSES, opacity=0.5, title="a title")
    assert picture.width > 60
    assert picture.height >= 40
    assert picture.getpixel((5, 30)) == (105, 40, 35)
    assert picture.getpixel((50, 30)) == (30, 45, 120)
    assert picture.getpixel((5, 5)) == (5, 10, 15)
    legend = set(map(tuple, np.array(picture)[:, 60:].reshape(-1, 3).tolist()))
    assert {COLOURS[0], COLOURS[2]} <= legend
    assert COLOURS[1] not in legend
    assert class_shares(labels, CLASSES) == {"red": 0.5, "blue": 0.5}
    with pytest.raises(ValueError, match="labels must be of the image's size"):
        overlay(image, labels[1:], CLASSES)


@pytest.mark.skipif(not CAMVID.exists(), reason="the CamVid images are not beside the repository")
def test_camvid_is_read_checked_and_augmented():
    classes = read_classes(str(CAMVID_CLASSES))
    sizes = {split: len(find_pairs(CAMVID, split)) for split in ("train", "val", "test")}
    assert sizes == {"train": 367, "val": 101, "test": 233}
    names = (CAMVID / "classes.txt").read_text().split()
    assert (*classes.names, "void") == tuple(names)
    pairs = find_pairs(CAMVID, "val")[:10]
    census = check_pairs(pairs, classes)
    assert census.unreadable == 0
    assert census.pixels[classes.names.index("road")] > census.pixels[classes.names.index("pole")] > 0
    with Image.open(pairs[0].labels) as file:
        palette = np.array(file.getpalette()[:33]).reshape(-1, 3)
    assert palette.tolist() == [list(colour) for colour in classes.palette]
    image, labels = augment(short_side=240, crop_size=(240, 320))(*read_pair(pairs[0], classes))
    assert image.shape == (3, 240, 320)
    assert set(labels.unique().tolist()) <= set(range(VOID, 11))
