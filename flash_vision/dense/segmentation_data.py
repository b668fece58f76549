"""Images with label maps from folders: pairing, the check before training, augmentation of both together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from timm.utils.misc import natural_key
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from flash_vision.data.class_folder import CorruptImageError, decode, is_image_name
from flash_vision.dense.segmentation_classes import VOID, ClassSet, LabelError, read_label_map
from flash_vision.train.samples import Samples

IMAGE_FOLDERS = ("images",)
LABEL_FOLDERS = ("labels", "annotations")
SPLIT_NAMES = (("train", "training"), ("validation", "val"), ("test", "testing"))


class Pair(NamedTuple):
    """Files of one image and its label map."""

    image: Path
    labels: Path


def find_pairs(data_dir: str | Path, split: str) -> list[Pair]:
    """The pairs of a split, in natural order of their names.

    Read are DIR/SPLIT/images with DIR/SPLIT/labels (CamVid) and DIR/images/SPLIT with DIR/annotations/SPLIT (ADE20K);
    labels and annotations stand for each other, and so do train and training, val and validation, test and testing.
    An image and its label map have the same name up to the suffix; label maps are PNG files.

    Raises:
        ValueError: a folder that is missing or empty, or an image without a label map or the other way round; named
            and counted.
    """
    root = Path(data_dir)
    if not root.is_dir():
        raise ValueError(f"data_dir {root}: no such folder")
    synonyms = next((names for names in SPLIT_NAMES if split in names), ())
    for name in dict.fromkeys((split, *synonyms)):
        for below in (lambda kind, name=name: root / name / kind, lambda kind, name=name: root / kind / name):
            images = next((below(kind) for kind in IMAGE_FOLDERS if below(kind).is_dir()), None)
            if images is None:
                continue
            labels = next((below(kind) for kind in LABEL_FOLDERS if below(kind).is_dir()), None)
            if labels is None:
                raise ValueError(f"{images}: there is no folder of label maps beside it ({below(LABEL_FOLDERS[0])})")
            return pair_files(images, labels)
    raise ValueError(f"data_dir {root}: holds no split {split!r} (neither {split}/images nor images/{split})")


def pair_files(images: Path, labels: Path) -> list[Pair]:
    """Pairs of the image files in one folder and the PNG files in another.

    Raises:
        ValueError: an empty folder, two images of one name, or a file without its counterpart; named and counted.
    """
    found: dict[str, dict[str, Path]] = {"image": {}, "label map": {}}
    for kind, folder in (("image", images), ("label map", labels)):
        suits: Callable[[Path], bool] = is_image_name if kind == "image" else lambda file: file.suffix.lower() == ".png"
        for file in sorted(folder.iterdir(), key=lambda file: natural_key(file.name)):
            if file.is_file() and suits(file) and not file.name.startswith("."):
                if file.stem in found[kind]:
                    raise ValueError(f"{file}: has the name of {found[kind][file.stem].name} up to the suffix")
                found[kind][file.stem] = file
        if not found[kind]:
            raise ValueError(
                f"{folder}: folder without an image" if kind == "image" else f"{folder}: holds no PNG file"
            )
    for kind, other, missing in (("image", "label map", f"a label map in {labels}"),
                                 ("label map", "image", f"an image in {images}")):  # fmt: skip
        alone = [file for stem, file in found[kind].items() if stem not in found[other]]
        if alone:
            raise ValueError(f"{alone[0]}: {kind} without {missing} ({len(alone)} of {len(found[kind])} have none)")
    return [Pair(file, found["label map"][stem]) for stem, file in found["image"].items()]


class Census(NamedTuple):
    """What a check of label maps found: pixels of each class, pairs that do not decode, and what is wrong with others.

    Files that do not decode are only counted; the run leaves them out and names them when it comes to them.
    """

    pixels: NDArray[np.int64]
    unreadable: int
    wrong: list[str]


def check_pairs(pairs: Sequence[Pair], classes: ClassSet, *, threads: int = 4) -> Census:
    """Decodes every label map and opens every image, before anything is trained.

    Wrong are label maps of colours, with an unknown label, or of another size than their image.
    """
    with ThreadPoolExecutor(max(1, threads)) as pool:
        results = list(pool.map(lambda pair: _check_pair(pair, classes), pairs))
    counts = [result for result in results if not isinstance(result, CorruptImageError)]
    wrong = [str(result) for result in results if isinstance(result, LabelError)]
    pixels = sum(counts, start=np.zeros(classes.num_classes, dtype=np.int64))
    return Census(pixels, len(results) - len(counts) - len(wrong), wrong)


def _check_pair(pair: Pair, classes: ClassSet) -> NDArray[np.int64] | CorruptImageError:
    try:
        labels = read_label_map(pair.labels, classes)
        with Image.open(pair.image) as image:
            check_size(image, labels, pair)
    except CorruptImageError as error:
        return error
    except (OSError, SyntaxError) as error:
        return CorruptImageError(str(error))
    return np.bincount(labels[labels != VOID], minlength=classes.num_classes)


def read_pair(pair: Pair, classes: ClassSet) -> tuple[tv_tensors.Image, tv_tensors.Mask]:
    """Image (3, H, W) uint8 and its classes (H, W) int16.

    Raises:
        CorruptImageError: a file does not decode.
        LabelError: the label map holds colours or unknown labels, or is of another size than the image.
    """
    image = decode(pair.image.read_bytes())
    labels = read_label_map(pair.labels, classes)
    check_size(image, labels, pair)
    return as_image(image), tv_tensors.Mask(torch.from_numpy(labels))


def as_image(image: Image.Image) -> tv_tensors.Image:
    """An RGB picture as (3, H, W) uint8."""
    return tv_tensors.Image(torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous())


def check_size(image: Image.Image, labels: NDArray[Any], pair: Pair) -> None:
    if image.size != labels.shape[::-1]:
        width, height = image.size
        raise LabelError(
            f"{pair.labels}: label map of {labels.shape[1]} x {labels.shape[0]} pixels for an image of "
            f"{width} x {height} ({pair.image.name})"
        )


@dataclass(frozen=True, kw_only=True)
class JointAugment:
    """Random size, crop, flip and colours for an image together with its label map.

    Args:
        short_side: nominal length of the shorter side, pixels; the image's own when None.
        scale: range of the factor on it.
        crop_size: (height, width) of the result; what lies outside the image is void and of the mean colour.
        hflip: probability of a horizontal flip.
        photometric: probability of each of contrast, brightness, saturation, hue and channel order being changed.
        fill: colour outside the image, 0 to 255 a channel.
    """

    short_side: int | None
    scale: tuple[float, float]
    crop_size: tuple[int, int]
    hflip: float
    photometric: float
    fill: tuple[float, ...]

    def __call__(self, image: tv_tensors.Image, labels: tv_tensors.Mask) -> tuple[Tensor, Tensor]:
        """Image (3, H, W) uint8 and classes (H, W) to both at crop_size; random numbers are torch's."""
        factor = torch.empty(()).uniform_(*self.scale).item()
        size = scaled_size(image.shape[-2:], self.short_side, factor)
        fill = {tv_tensors.Image: list(self.fill), tv_tensors.Mask: VOID}
        steps: list[Any] = [
            v2.Resize(size, antialias=True),
            v2.RandomCrop(self.crop_size, pad_if_needed=True, fill=fill),  # pyright: ignore[reportArgumentType]
            v2.RandomHorizontalFlip(self.hflip),
        ]
        if self.photometric > 0:
            steps.append(v2.RandomPhotometricDistort(p=self.photometric))
        image, labels = v2.Compose(steps)(image, labels)
        return image.as_subclass(Tensor), labels.as_subclass(Tensor)


def scaled_size(size: Sequence[int], short_side: int | None, factor: float = 1.0) -> list[int]:
    """(height, width) with the shorter side at short_side * factor, or both times factor without short_side; at least
    one pixel each."""
    ratio = factor * (1.0 if short_side is None else short_side / min(size))
    return [max(1, round(side * ratio)) for side in size]


def resize_short_side(image: Tensor, short_side: int | None) -> Tensor:
    """A picture (3, H, W) uint8 with its shorter side at short_side pixels; unchanged for None."""
    size = scaled_size(image.shape[-2:], short_side)
    return image if list(image.shape[-2:]) == size else v2.functional.resize(image, size, antialias=True)


class PairSamples(Samples):
    """Images with their label maps: augmented in training, at one short side in evaluation.

    Args:
        pairs: the files.
        augment: of both together; None in evaluation, where the label map keeps its size.
        short_side: pixels that the shorter side of an image is resized to in evaluation; None for its own.
        seed: of augmentation and substitutes.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        classes: ClassSet,
        *,
        augment: JointAugment | None,
        short_side: int | None,
        seed: int,
    ) -> None:
        super().__init__(seed=seed, training=augment is not None)
        self.pairs, self.classes = list(pairs), classes
        self.augment, self.short_side = augment, short_side

    def __len__(self) -> int:
        return len(self.pairs)

    def name(self, index: int) -> str:
        """The file of an image."""
        return str(self.pairs[index].image)

    def read(self, index: int) -> tuple[tv_tensors.Image, tv_tensors.Mask]:
        """Image (3, H, W) uint8 and classes (H, W) int16; see `read_pair`."""
        return read_pair(self.pairs[index], self.classes)

    def transformed(self, image: tv_tensors.Image, target: tv_tensors.Mask) -> tuple[Tensor, Tensor]:
        """Image and classes at the crop's size, or the image at the short side with the classes as they are."""
        if self.augment is not None:
            return self.augment(image, target)
        return resize_short_side(image.as_subclass(Tensor), self.short_side), target.as_subclass(Tensor)
