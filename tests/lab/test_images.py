"""The images of a grid are chosen by their names alone."""

import io
import tarfile

import numpy as np
import pytest
from PIL import Image

from flash_vision.lab import images as lab_images
from flash_vision.lab.images import Images, prepare_images


def names(path):
    with tarfile.open(path) as archive:
        return archive.getnames()


def test_held_out_images_are_the_same_whatever_is_taken_of_the_rest(data_root, tmp_path):
    common = {"train": ["noise/*-train.tar"], "classes": 3, "validation_per_class": 8}
    few = prepare_images(Images(**common, train_per_class=4), data_root, tmp_path)
    all_ = prepare_images(Images(**common), data_root, tmp_path)
    assert set(names(few / "validation.tar")) == set(names(all_ / "validation.tar"))
    assert set(names(few / "train.tar")) < set(names(all_ / "train.tar"))
    assert [len(names(f / "train.tar")) for f in (few, all_)] == [12, 66]
    assert len(names(few / "validation.tar")) == 24
    assert not set(names(all_ / "train.tar")) & set(names(all_ / "validation.tar"))


def test_the_choice_does_not_depend_on_how_the_images_lie_in_files(data_root, tmp_path):
    one = data_root / "noise" / "a-train.tar"
    shuffled = tmp_path / "data" / "noise"
    shuffled.mkdir(parents=True)
    with tarfile.open(one) as source, tarfile.open(shuffled / "z-train.tar", "w") as target:
        for member in reversed(source.getmembers()):
            target.addfile(member, source.extractfile(member))
    images = Images(train=["noise/*-train.tar"], classes=3, validation_per_class=5, train_per_class=3)
    alone = Images(train=["noise/a-train.tar"], classes=3, validation_per_class=5, train_per_class=3)
    folders = prepare_images(alone, data_root, tmp_path), prepare_images(images, tmp_path / "data", tmp_path)
    for split in ("train", "validation"):
        assert len({frozenset(names(folder / f"{split}.tar")) for folder in folders}) == 1


def test_kinds_of_image_that_the_reader_passes_over_become_png_without_loss(data_root, tmp_path):
    images = Images(train=["noise/*-train.tar"], classes=3, test=["noise/c-test.tar"])
    folder = prepare_images(images, data_root, tmp_path)
    assert len(names(folder / "test.tar")) == 45
    assert all(name.endswith(".png") for name in names(folder / "test.tar"))

    def pixels(path, name):
        with tarfile.open(path) as archive:
            return np.asarray(Image.open(io.BytesIO(archive.extractfile(name).read())))

    before = pixels(data_root / "noise" / "c-test.tar", "test/class1/31.webp")
    assert (before == pixels(folder / "test.tar", "class1/31.png")).all()


def test_a_prepared_folder_is_used_again(data_root, tmp_path):
    images = Images(train=["noise/*-train.tar"], classes=3, validation_per_class=8)
    folder = prepare_images(images, data_root, tmp_path)
    before = (folder / "train.tar").stat().st_mtime_ns
    assert prepare_images(images, data_root, tmp_path) == folder
    assert (folder / "train.tar").stat().st_mtime_ns == before
    assert [entry.name for entry in tmp_path.iterdir()] == [folder.name]


def test_two_grids_can_make_the_same_images_at_the_same_time(data_root, tmp_path, monkeypatch):
    images = Images(train=["noise/*-train.tar"], classes=3, validation_per_class=8)
    write = lab_images._write
    folders = []

    def write_while_another_grid_starts_and_ends(*arguments):
        monkeypatch.undo()
        folders.append(prepare_images(images, data_root, tmp_path))
        write(*arguments)

    monkeypatch.setattr(lab_images, "_write", write_while_another_grid_starts_and_ends)
    assert prepare_images(images, data_root, tmp_path) == folders[0]
    assert len(names(folders[0] / "train.tar")) == 66
    assert [entry.name for entry in tmp_path.iterdir()] == [folders[0].name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": ["noise/*.zip"]}, r"no file noise/\*\.zip"),
        ({"classes": 4}, "classes must be the 3 of the training files, got 4"),
        ({"train_per_class": 23}, "class class0 must have at least 31 training images, has 30"),
        ({"train": ["noise/a-train.tar", "noise/a-train.tar"]}, "two images have the same class and name"),
    ],
)
def test_images_that_are_not_there_are_named(data_root, tmp_path, changes, message):
    fields = {"train": ["noise/*-train.tar"], "classes": 3, "validation_per_class": 8, **changes}
    with pytest.raises(ValueError, match=message):
        prepare_images(Images(**fields), data_root, tmp_path)
    assert not list(tmp_path.iterdir())
