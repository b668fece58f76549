"""The configuration of a segmentation run, and what its model.json says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from flash_vision.dense.segmentation import Decoder
from flash_vision.dense.segmentation_classes import ClassSet, read_classes
from flash_vision.dense.segmentation_inference import Windows
from flash_vision.train.config import TaskConfig
from flash_vision.train.recipe import require


@dataclass(kw_only=True)
class SegmentationConfig(TaskConfig):
    """Semantic segmentation; see the parts for the other fields.

    Args:
        decoder: of segmentation-models-pytorch.
        decoder_kwargs: its further arguments, for example '{"decoder_channels": 128}'.
        pyramid_channels: width of the simple feature pyramid that models of one stride get (ViT, flash_gau), 256 when
            not given; to be left out with other models.
        classes: YAML or JSON file with names, palette, ignore_index (255 when left out) and reduce_zero_label, or these
            themselves as a mapping.
        train_split: split that is trained on: data_dir/SPLIT/images with SPLIT/labels, or images/SPLIT with
            annotations/SPLIT.
        val_split: split that is evaluated.
        check_labels: decode every label map before the run starts; otherwise a wrong one is skipped and counted when
            the run comes to it.
        short_side: pixels of an image's shorter side, in evaluation and before scale in training; its own when not
            given.
        scale: range of the random factor on an image's size.
        crop_size: (height, width) of the random crop, pixels.
        hflip: probability of a horizontal flip.
        photometric: probability of each change of contrast, brightness, saturation, hue and channel order.
        smoothing: label smoothing, in [0, 1).
        dice_weight: weight of the Dice loss beside the cross entropy.
        window: (height, width) of the windows that evaluation cuts an image into; whole images when not given.
        window_overlap: least share of a window that its neighbour covers too, in [0, 1); a third when not given.
        eval_metric: what "best" means: miou, mean_accuracy, pixel_accuracy or loss.
    """

    decoder: Decoder = "upernet"
    decoder_kwargs: dict[str, Any] = field(default_factory=dict)
    pyramid_channels: int | None = None
    classes: str | dict[str, Any] = ""
    train_split: str = "train"
    val_split: str = "validation"
    check_labels: bool = True
    short_side: int | None = None
    scale: tuple[float, float] = (0.5, 2.0)
    crop_size: tuple[int, int] = (512, 512)
    hflip: float = 0.5
    photometric: float = 0.5
    smoothing: float = 0.0
    dice_weight: float = 0.0
    window: tuple[int, int] | None = None
    window_overlap: float | None = None
    eval_metric: Literal["miou", "mean_accuracy", "pixel_accuracy", "loss"] = "miou"

    def check(self) -> None:
        """Reads the classes; raises ValueError for values that no run accepts."""
        require("classes", self.classes not in ("", {}), "a file or a mapping", self.classes)
        self.classes = read_classes(self.classes).as_dict()  # a run belongs to the classes, not to a file's name
        require("data_dir", self.data_dir != "", "given", self.data_dir)
        require("short_side", self.short_side is None or self.short_side >= 1, "at least 1", self.short_side)
        low, high = self.scale
        require("scale", 0 < low <= high, "(low, high) with 0 < low <= high", self.scale)
        require("crop_size", min(self.crop_size) >= 1, "(height, width) of at least 1", self.crop_size)
        for name in ("hflip", "photometric"):
            require(name, 0 <= getattr(self, name) <= 1, "in [0, 1]", getattr(self, name))
        require("smoothing", 0 <= self.smoothing < 1, "in [0, 1)", self.smoothing)
        require("dice_weight", self.dice_weight >= 0, "at least 0", self.dice_weight)
        require("fsdp", not self.fsdp, "false for segmentation", self.fsdp)
        assert self.windows  # checks itself
        used = self.window_overlap is None or self.window is not None
        require("window_overlap", used, "left out without window", self.window_overlap)

    @property
    def class_set(self) -> ClassSet:
        """The classes."""
        return read_classes(self.classes)

    @property
    def windows(self) -> Windows:
        """How evaluation cuts images."""
        return windows_of(self.window, self.window_overlap)

    @property
    def backbone_kwargs(self) -> dict[str, Any]:
        """Arguments of timm.create_model."""
        return {**self.model_kwargs, **({} if self.drop_path is None else {"drop_path_rate": self.drop_path})}


@dataclass(frozen=True, kw_only=True)
class SegmentationSidecar:
    """The content of a segmentation network's model.json: what it takes to build it again and to give it images.

    Args:
        task: segmentation.
        model: timm name of the backbone.
        model_kwargs: its further arguments, plain JSON data.
        decoder: name of the decoder.
        decoder_kwargs: its further arguments, plain JSON data.
        pyramid_channels: width of the simple feature pyramid of a backbone of one stride; None for 256 or no such.
        classes: names, palette, ignore_index and reduce_zero_label.
        mean: per channel mean, of images scaled to [0, 1].
        std: per channel standard deviation, of images scaled to [0, 1].
        short_side: pixels of an image's shorter side; None for its own.
        window: (height, width) of the windows; None for whole images.
        window_overlap: least share of a window that its neighbour covers too; None for a third.
    Raises:
        ValueError: another task, or a field that does not fit.
    """

    task: str
    model: str
    model_kwargs: dict[str, Any]
    decoder: str
    decoder_kwargs: dict[str, Any]
    pyramid_channels: int | None
    classes: dict[str, Any]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    short_side: int | None
    window: tuple[int, int] | None
    window_overlap: float | None

    def __post_init__(self) -> None:
        require("task", self.task == "segmentation", "segmentation", self.task)
        for name in ("mean", "std"):
            value = getattr(self, name)
            valid = isinstance(value, (list, tuple)) and len(value) == 3
            require(name, valid and all(isinstance(entry, (int, float)) for entry in value), "three numbers", value)
            object.__setattr__(self, name, tuple(value))
        require("std", min(self.std) > 0, "above 0", self.std)
        if self.window is not None:
            object.__setattr__(self, "window", tuple(self.window))
        assert self.class_set
        assert self.windows

    @property
    def class_set(self) -> ClassSet:
        """The classes."""
        return read_classes(self.classes)

    @property
    def windows(self) -> Windows:
        """How an image is cut."""
        return windows_of(self.window, self.window_overlap)


def windows_of(size: tuple[int, int] | None, overlap: float | None) -> Windows:
    """The windows with the overlap where it is given."""
    return Windows(size=size) if overlap is None else Windows(size=size, overlap=overlap)
