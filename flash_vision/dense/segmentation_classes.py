"""The classes of a segmentation data set and its label maps: one class index a pixel, stored as PNG."""

from __future__ import annotations

import colorsys
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from PIL import Image

from flash_vision.data.class_folder import CorruptImageError
from flash_vision.train.recipe import require

VOID = -1  # what a pixel without a class is in memory, whatever number it has in the files
MAX_CLASSES = 32_000  # classes are int16 in memory
_UNKNOWN = -2
_INDEX_MODES = ("L", "P", "1", "I;16", "I")


class LabelError(CorruptImageError):
    """A label map that does not fit the classes or its image; the file is named."""


@dataclass(frozen=True)
class ClassSet:
    """Names and colours of the classes, and what the numbers in the label files mean.

    Args:
        names: a name per class, in order of the class index.
        palette: (red, green, blue) of each class, 0 to 255; distinct hues when empty.
        ignore_index: number of the pixels without a class; None if every pixel has one.
        reduce_zero_label: number 0 means no class and number k is class k - 1, as in ADE20K.
    Raises:
        ValueError: no names, a name twice, or a palette or ignore_index that does not fit them.
    """

    names: tuple[str, ...]
    palette: tuple[tuple[int, int, int], ...] = ()
    ignore_index: int | None = 255
    reduce_zero_label: bool = False

    def __post_init__(self) -> None:
        names = _sequence("names", self.names)
        require("names", 1 <= len(names) <= MAX_CLASSES, f"1 to {MAX_CLASSES} class names", len(names))
        require("names", all(isinstance(name, str) and name for name in names), "strings", names)
        twice = sorted({name for name in names if names.count(name) > 1})
        require("names", not twice, "different from each other", twice)
        palette = tuple(_sequence("palette", colour) for colour in _sequence("palette", self.palette))
        require(
            "palette", len(palette) in (0, len(names)), f"a colour for each of the {len(names)} names", len(palette)
        )
        for colour in palette:
            valid = len(colour) == 3 and all(isinstance(value, int) and 0 <= value <= 255 for value in colour)
            require("palette", valid, "triples of integers from 0 to 255", list(colour))
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "palette", palette or distinct_colours(len(names)))
        require("reduce_zero_label", isinstance(self.reduce_zero_label, bool), "true or false", self.reduce_zero_label)
        index = self.ignore_index
        taken = index is not None and index - self.reduce_zero_label in range(len(names))
        free = index is None or (isinstance(index, int) and 0 <= index < 2**16 and not taken)
        require("ignore_index", free, "null or a number from 0 to 65535 that is no class", index)

    @property
    def num_classes(self) -> int:
        """Number of classes; void is none of them."""
        return len(self.names)

    @cached_property
    def _table(self) -> NDArray[np.int16]:
        """Class of each number that a label file may hold."""
        table = np.full(2**16, _UNKNOWN, dtype=np.int16)
        start = int(self.reduce_zero_label)
        table[:start] = VOID
        table[start : start + self.num_classes] = np.arange(self.num_classes)
        if self.ignore_index is not None:
            table[self.ignore_index] = VOID
        return table

    def decode(self, numbers: NDArray[Any]) -> NDArray[np.int16]:
        """Numbers of a label file to class indices, VOID for pixels without a class; the shape stays.

        Raises:
            LabelError: a number that is neither a class nor void; the first one, and how many pixels have it.
        """
        in_range = (numbers >= 0) & (numbers < 2**16) if numbers.dtype.itemsize > 2 else None
        if in_range is not None and not in_range.all():
            raise self._unknown(numbers, int(numbers[~in_range].flat[0]))
        labels = self._table[numbers.astype(np.uint16, copy=False)]
        unknown = labels == _UNKNOWN
        if unknown.any():
            raise self._unknown(numbers, int(numbers[unknown].flat[0]))
        return labels

    def encode(self, labels: NDArray[Any]) -> NDArray[Any]:
        """Class indices without VOID to the numbers that a label file of this data set holds (uint8 or uint16)."""
        numbers = labels + int(self.reduce_zero_label)
        return numbers.astype(np.uint8 if self.num_classes + self.reduce_zero_label <= 256 else np.uint16)

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain data, as a classes file holds them."""
        return {
            "names": list(self.names),
            "palette": [list(colour) for colour in self.palette],
            "ignore_index": self.ignore_index,
            "reduce_zero_label": self.reduce_zero_label,
        }

    def _unknown(self, numbers: NDArray[Any], value: int) -> LabelError:
        first = int(self.reduce_zero_label)
        void = sorted({0} if first else set()) + ([] if self.ignore_index is None else [self.ignore_index])
        return LabelError(
            f"unknown label {value} on {int((numbers == value).sum())} pixels "
            f"(classes are {first} to {first + self.num_classes - 1}, void is {' or '.join(map(str, void)) or 'none'})"
        )


def read_classes(source: str | Mapping[str, Any]) -> ClassSet:
    """Classes from a YAML or JSON file with the fields of `ClassSet`, or from the same as a mapping.

    Raises:
        ValueError: no such file, unknown or missing keys, or fields that do not fit; the file and key are named.
    """
    where, content = "classes", source
    if isinstance(source, str):
        where = f"classes {source}"
        if not Path(source).is_file():
            raise ValueError(f"{where}: no such file")
        text = Path(source).read_text(encoding="utf-8")
        try:
            content = json.loads(text) if source.endswith(".json") else yaml.safe_load(text)
        except (yaml.YAMLError, ValueError) as error:
            raise ValueError(f"{where}: cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"{where}: must be a mapping with names, got {type(content).__name__}")
    known = {field.name for field in fields(ClassSet)}
    if unknown := sorted(map(str, content.keys() - known)):
        raise ValueError(f"{where}: unknown key {unknown[0]!r} (known: {', '.join(sorted(known))})")
    if "names" not in content:
        raise ValueError(f"{where}: the key names is missing")
    try:
        return ClassSet(**content)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def read_numbers(path: str | Path) -> NDArray[Any]:
    """The numbers in a label file, (H, W).

    Raises:
        CorruptImageError: the file does not decode.
        LabelError: it holds colours, not numbers.
    """
    try:
        with Image.open(path) as image:
            if image.mode not in _INDEX_MODES:
                raise LabelError(
                    f"{path}: is a picture of mode {image.mode}; a label map holds one class number a pixel (a PNG of "
                    "mode L, P or I;16). Turn colours into numbers first"
                )
            numbers = np.array(image)
    except (LabelError, MemoryError):
        raise
    except Exception as error:  # PIL's decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise CorruptImageError(f"{path}: cannot be read ({type(error).__name__}: {error})") from None
    return numbers.astype(np.uint8) if numbers.dtype == bool else numbers


def read_label_map(path: str | Path, classes: ClassSet) -> NDArray[np.int16]:
    """A label file as class indices (H, W), VOID for pixels without a class.

    Raises:
        CorruptImageError: the file does not decode.
        LabelError: it holds colours, or a number that is neither a class nor void.
    """
    numbers = read_numbers(path)
    try:
        return classes.decode(numbers)
    except LabelError as error:
        raise LabelError(f"{path}: {error}") from None


def label_image(labels: NDArray[Any], classes: ClassSet) -> Image.Image:
    """Class indices (H, W) as a label file of the data set: a palette PNG where 256 numbers are enough, else 16 bit."""
    numbers = classes.encode(labels)
    image = Image.fromarray(numbers)
    if numbers.dtype == np.uint8:
        start = [0, 0, 0] * classes.reduce_zero_label
        image.putpalette(start + [value for colour in classes.palette for value in colour])
    return image


def distinct_colours(number: int) -> tuple[tuple[int, int, int], ...]:
    """Colours that differ from their neighbours: hues a golden section apart, in three strengths."""
    colours = []
    for index in range(number):
        hue = index * 0.618034 % 1.0
        red, green, blue = colorsys.hsv_to_rgb(hue, (0.85, 0.55, 0.7)[index % 3], (0.95, 0.8, 0.6)[index // 3 % 3])
        colours.append((round(255 * red), round(255 * green), round(255 * blue)))
    return tuple(colours)


def _sequence(name: str, value: Any) -> tuple[Any, ...]:
    require(name, isinstance(value, (list, tuple)), "a list", value)
    return tuple(value)
