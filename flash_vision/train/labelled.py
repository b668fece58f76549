"""Labelled images for evaluation, from any source timm reads, checked against the model's classes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timm.data.dataset import ImageDataset
from timm.data.dataset_factory import create_dataset
from timm.data.readers.class_map import load_class_map
from timm.data.readers.reader_image_folder import ReaderImageFolder
from timm.data.real_labels import RealLabelsImagenet
from torch.utils.data import Dataset

from flash_vision.data.class_folder import CorruptImageError, check_class_folder, decode
from flash_vision.train.model_source import LoadedModel, first_line


@dataclass(kw_only=True)
class ImageSource:
    """Which labelled images.

    Args:
        data_dir: folder of class/image files or of split/class/image files, a .tar of them, or the root of `dataset`.
        dataset: timm data set type and name, for example wds/ or hfds/NAME; class folder or tar when empty.
        split: split to evaluate.
        num_samples: images in the split, for a stream that does not say.
        class_map: file with a class name a line, in the order of the model's classes.
    """

    data_dir: str = ""
    dataset: str = ""
    split: str = "validation"
    num_samples: int | None = None
    class_map: str = ""


class WholeImages(Dataset[tuple[Any, int]]):
    """The samples of a timm ImageDataset, with an error where timm puts the next image in place of a corrupt one."""

    def __init__(self, dataset: ImageDataset) -> None:
        self.reader: Any = dataset.reader
        self.mode: str = dataset.input_img_mode
        self.transform: Any = None  # set by timm's create_loader

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        file, target, *_ = self.reader[index]
        with file:
            try:
                image = decode(file, mode=self.mode)
            except CorruptImageError as error:
                raise ValueError(f"{self.reader.filename(index, absolute=True)}: {error}") from None
        return self.transform(image) if self.transform else image, -1 if target is None else target

    def filenames(self, basename: bool = False, absolute: bool = False) -> list[str]:
        """File names in the order of the samples, relative to the root unless asked otherwise."""
        return self.reader.filenames(basename=basename, absolute=absolute)


def open_images(source: ImageSource, loaded: LoadedModel, *, in_chans: int, batch_size: int) -> tuple[Any, list[str]]:
    """Opens the data set and says the name of each class of the model.

    Args:
        source: where the images are.
        loaded: the model they are for.
        in_chans: its input channels; 3 reads images as RGB, 1 as grey.
        batch_size: images a step.
    Returns:
        A map-style or iterable data set of (image, class index), and one name per class of the model.
    Raises:
        ValueError: missing or empty folder, empty class folder, or classes that do not fit the model.
    """
    if not source.data_dir:
        raise ValueError("data_dir: give the folder of the images")
    if not Path(source.data_dir).exists():
        raise ValueError(f"data_dir {source.data_dir}: no such folder or file")
    given = _read_class_map(source.class_map) if source.class_map else None
    dataset = _create(source, None, in_chans=in_chans, batch_size=batch_size)
    reader = getattr(dataset, "reader", None)
    found = getattr(reader, "class_to_idx", None) or getattr(dataset, "class_to_idx", None) or {}
    found = found or {name: index for index, name in enumerate(getattr(reader, "info", {}).get("class_names", ()))}
    if isinstance(reader, ReaderImageFolder):
        root = str(reader.root)
        _check_split(root, source.split)
        check_class_folder(root)
    mapping = _mapping(found, given, loaded, source)
    if mapping != found:
        dataset = _create(source, mapping, in_chans=in_chans, batch_size=batch_size)
    names = [str(index) for index in range(loaded.num_classes)]
    for index, name in enumerate(loaded.class_names or ()):
        names[index] = name
    for name, index in mapping.items():
        names[index] = name
    return (WholeImages(dataset) if isinstance(dataset, ImageDataset) else dataset), names


def real_labels_for(dataset: Any, path: str, *, num_classes: int) -> RealLabelsImagenet | None:
    """The ReaL labels of the ImageNet validation images in `dataset`; None for an empty path.

    Raises:
        ValueError: not the file, not as many images as it labels, or other file names than ImageNet's.
    """
    if not path:
        return None
    try:
        labels = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"real_labels {path}: cannot be read ({first_line(error)})") from None
    if not isinstance(labels, list) or not all(isinstance(entry, list) for entry in labels):
        raise ValueError(f"real_labels {path}: must be a list with a list of class indices for each image")
    if not isinstance(dataset, WholeImages):
        raise ValueError("real_labels: needs a folder or tar with ImageNet's file names")
    names = dataset.filenames(basename=True)
    expected = {f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, len(labels) + 1)}
    if set(names) != expected or len(names) != len(labels):
        raise ValueError(
            f"real_labels {path}: labels the {len(labels)} images ILSVRC2012_val_*.JPEG; "
            f"the data set has {len(names)} images, the first is {names[0]}"
        )
    return RealLabelsImagenet(names, real_json=path, topk=(1, min(5, num_classes)))


def _create(source: ImageSource, class_map: dict[str, int] | None, *, in_chans: int, batch_size: int) -> Any:
    """timm's create_dataset, with its many kinds of error as ValueError."""
    names_shards = ".tar" in source.split
    if source.dataset.startswith("wds/") and not names_shards and not list(Path(source.data_dir).glob("*info.json")):
        raise ValueError(
            f"data_dir {source.data_dir}: has no _info.json to say which shards split {source.split!r} has"
        )
    try:
        return create_dataset(
            source.dataset,
            root=source.data_dir,
            split=source.split,
            class_map=class_map,  # pyright: ignore[reportArgumentType]
            num_samples=source.num_samples,
            batch_size=batch_size,
            input_img_mode="RGB" if in_chans == 3 else "L",
        )
    except (RuntimeError, AssertionError, KeyError, OSError, ImportError, TypeError, ValueError) as error:
        kind = f"as {source.dataset} " if source.dataset else ""
        raise ValueError(f"data_dir {source.data_dir}: cannot be opened {kind}({first_line(error)})") from None


def _read_class_map(path: str) -> dict[str, int]:
    if not Path(path).is_file():
        raise ValueError(f"class_map {path}: no such file")
    if not path.endswith(".txt"):
        raise ValueError(f"class_map {path}: must be a .txt file with a class name a line")
    return load_class_map(path)


def _check_split(root: str, split: str) -> None:
    """A root that holds splits, none of them the one asked for, would be read as one data set with both."""
    # a class may be called train: CIFAR-100 has one
    splits = sorted(
        name
        for name in ("train", "val", "validation", "test")
        if (Path(root) / name).is_dir() and any(entry.is_dir() for entry in (Path(root) / name).iterdir())
    )
    if splits:
        raise ValueError(f"split {split!r}: {root} has no such folder, only {', '.join(splits)}")


def _mapping(
    found: dict[str, int], given: dict[str, int] | None, loaded: LoadedModel, source: ImageSource
) -> dict[str, int]:
    """Class name to the model's class index, for the classes of the data set.

    The class map given counts first, then the model's own class names where they cover the data set's, then the
    order of the names, for a data set with exactly as many classes as the model.
    """
    names = list(loaded.class_names or ())
    own = {name: index for index, name in enumerate(names)} if len(set(names)) == len(names) else {}
    mapping = given if given is not None else own if found and found.keys() <= own.keys() else None
    if mapping is None:
        if found and len(found) != loaded.num_classes:
            raise ValueError(
                f"data_dir {source.data_dir}: has {len(found)} classes, model {loaded.name} has {loaded.num_classes}; "
                "give the model's class names with --class_map if the data set is a part of them"
            )
        if found and own and loaded.preprocessing:
            stranger = sorted(found.keys() - own.keys())[0]
            raise ValueError(f"data_dir {source.data_dir}: class {stranger!r} is not one of the model's class names")
        return found
    unknown = sorted(found.keys() - mapping.keys())
    if unknown:
        raise ValueError(f"class_map: {len(unknown)} classes of the data set are not in it (first: {unknown[0]!r})")
    if mapping and max(mapping.values()) >= loaded.num_classes:
        raise ValueError(f"class_map: has {max(mapping.values()) + 1} classes, the model has {loaded.num_classes}")
    return mapping
