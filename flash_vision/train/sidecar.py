"""model.json beside a weights file: what it takes to rebuild the model and its test-time preprocessing.

A safetensors or .pth file holds tensors only. The training tool writes this small JSON file into the same folder, and
the validation and prediction tools read it, so that `--checkpoint runs/x/model.safetensors` is enough to use a model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from flash_vision.data.files import write_text
from flash_vision.train.recipe import require

SIDECAR_NAME = "model.json"
Sidecar = TypeVar("Sidecar")
Interpolation = Literal["bicubic", "bilinear", "nearest", "lanczos", "hamming", "box"]
INTERPOLATIONS: tuple[str, ...] = get_args(Interpolation)


@dataclass(frozen=True, kw_only=True)
class ModelSidecar:
    """The content of model.json.

    Args:
        model: timm model name, for example `flash_gau_pico`.
        model_kwargs: further arguments of `timm.create_model`, plain JSON data (`num_classes` is a field of its own).
        num_classes: width of the classifier, at least 1.
        class_names: one name per class index, in order.
        input_size: (channels, height in pixels, width in pixels).
        mean: per channel mean, of images scaled to [0, 1].
        std: per channel standard deviation, of images scaled to [0, 1]; positive.
        interpolation: resize filter, one of `INTERPOLATIONS`.
        crop_pct: share of the resized image's side that the centre crop keeps, in (0, 1] as a rule.
    Raises:
        ValueError: a field has the wrong type, or the fields contradict each other; the message names the field.
    """

    model: str
    num_classes: int
    class_names: tuple[str, ...]
    input_size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop_pct: float
    model_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require("model", isinstance(self.model, str) and self.model != "", "a model name", self.model)
        require("num_classes", _is_int(self.num_classes) and self.num_classes >= 1, "an int >= 1", self.num_classes)
        for name in ("class_names", "input_size", "mean", "std"):
            value = getattr(self, name)
            require(name, isinstance(value, (list, tuple)), "a list", value)
            object.__setattr__(self, name, tuple(value))
        names, size = self.class_names, self.input_size
        require("class_names", all(isinstance(name, str) for name in names), "a list of strings", names)
        require("class_names", len(names) == self.num_classes, f"as long as num_classes={self.num_classes}", len(names))
        require(
            "input_size",
            len(size) == 3 and all(_is_int(side) and side >= 1 for side in size),
            "three ints >= 1 (channels, height, width)",
            size,
        )
        for name in ("mean", "std"):
            value = getattr(self, name)
            require(
                name, len(value) == size[0] and all(map(_is_number, value)), f"{size[0]} numbers, one a channel", value
            )
        require("std", all(value > 0 for value in self.std), "positive", self.std)
        require("interpolation", self.interpolation in INTERPOLATIONS, f"one of {INTERPOLATIONS}", self.interpolation)
        require("crop_pct", _is_number(self.crop_pct) and self.crop_pct > 0, "a number > 0", self.crop_pct)
        kwargs = self.model_kwargs
        require("model_kwargs", isinstance(kwargs, dict), "an object", kwargs)
        require("model_kwargs", "num_classes" not in kwargs, "without num_classes, a field of its own", kwargs)
        try:
            json.dumps(kwargs)
        except TypeError as error:
            raise ValueError(f"model_kwargs must be plain JSON data: {error}") from None

    @property
    def data_config(self) -> dict[str, Any]:
        """The preprocessing in the words of `timm.data.resolve_data_config`, for its `pretrained_cfg` argument."""
        names = ("input_size", "mean", "std", "interpolation", "crop_pct")
        return {name: getattr(self, name) for name in names}


def sidecar_path(weights: str | Path) -> Path:
    """Where the sidecar of a weights file lies: model.json in the same folder."""
    return Path(weights).parent / SIDECAR_NAME


def write_sidecar(path: str | Path, sidecar: Any) -> None:
    """Writes a sidecar, a dataclass of plain data, to `path`; a reader never sees half of it."""
    write_text(path, json.dumps(dataclasses.asdict(sidecar), indent=2, ensure_ascii=False) + "\n")


def read_sidecar(path: str | Path) -> ModelSidecar:
    """Reads the model.json of a classifier; see `read_sidecar_as`."""
    return read_sidecar_as(ModelSidecar, path)


def read_beside(kind: Callable[..., Sidecar], checkpoint: str | Path) -> Sidecar:
    """`read_sidecar_as` of the model.json beside a weights file.

    Raises:
        ValueError: there is no such weights file or nothing beside it, or see `read_sidecar_as`.
    """
    if not Path(checkpoint).is_file():
        raise ValueError(f"checkpoint {checkpoint}: no such file")
    path = sidecar_path(checkpoint)
    if not path.is_file():
        raise ValueError(f"checkpoint {checkpoint}: there is no {path.name} beside it")
    return read_sidecar_as(kind, path)


def read_sidecar_as(kind: Callable[..., Sidecar], path: str | Path) -> Sidecar:
    """Reads model.json into a task's dataclass, whose constructor checks the values.

    Raises:
        ValueError: not a JSON object, a key missing or unknown, or a value of the wrong type; file and key are named.
        FileNotFoundError: no file at `path`.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must be a JSON object, got {type(content).__name__}")
    expected = [entry.name for entry in dataclasses.fields(kind)]  # pyright: ignore[reportArgumentType]
    unknown = sorted(content.keys() - set(expected))
    missing = [name for name in expected if name not in content]
    if unknown or missing:
        problems = [f"unknown key(s) {', '.join(unknown)}"] * bool(unknown)
        problems += [f"missing key(s) {', '.join(missing)}"] * bool(missing)
        raise ValueError(f"{path}: {'; '.join(problems)}")
    try:
        return kind(**content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
