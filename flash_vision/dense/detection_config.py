"""The configuration of a detection run: detector, COCO data, scale jitter; the rest is that of every task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from flash_vision.train.config import TaskConfig
from flash_vision.train.recipe import require

DetectorName = Literal["faster_rcnn", "mask_rcnn", "retinanet", "fcos"]
TWO_STAGE = ("faster_rcnn", "mask_rcnn")


@dataclass(kw_only=True)
class DetectorConfig:
    """The detector around the backbone.

    Args:
        detector: torchvision's faster_rcnn, mask_rcnn, retinanet or fcos.
        min_size: short side that images are resized to, pixels; in training see train_min_sizes.
        max_size: most that the long side may become, pixels.
        neck_channels: channels of the feature pyramid.
        box_head_dim: width of the box head of faster_rcnn and mask_rcnn; 1024 when not given.
        mask_head_dim: channels of the mask head of mask_rcnn; 256 when not given.
        anchor_scale: side of a level's smallest anchor in strides of the level; torchvision's 8 (faster_rcnn,
            mask_rcnn) or 4 (retinanet) when not given, half of it where min_size is below 400.
        detector_kwargs: further arguments of torchvision's class, for example '{"box_detections_per_img": 200}'.
    """

    detector: DetectorName = "mask_rcnn"
    min_size: int = 800
    max_size: int = 1333
    neck_channels: int = 256
    box_head_dim: int | None = None
    mask_head_dim: int | None = None
    anchor_scale: float | None = None
    detector_kwargs: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raises ValueError for values that no detector accepts."""
        for name in ("min_size", "neck_channels"):
            require(name, getattr(self, name) >= 1, "at least 1", getattr(self, name))
        for name, owners in (("box_head_dim", TWO_STAGE), ("mask_head_dim", ("mask_rcnn",))):
            width = getattr(self, name)
            require(name, width is None or width >= 1, "at least 1", width)
            fits = width is None or self.detector in owners
            require(name, fits, f"left out with {self.detector}, which has no such head", width)
        require("max_size", self.max_size >= self.min_size, f"at least min_size ({self.min_size})", self.max_size)
        # 32 groups, and more than one channel in each for the levels that are one cell
        fits = self.detector != "fcos" or (self.neck_channels % 32 == 0 and self.neck_channels >= 64)
        require("neck_channels", fits, "a multiple of 32 from 64 on with fcos", self.neck_channels)
        scale = self.anchor_scale
        require("anchor_scale", scale is None or scale > 0, "above 0", scale)
        require("anchor_scale", scale is None or self.detector != "fcos", "left out with fcos, which has points", scale)


@dataclass(kw_only=True)
class CocoDataConfig:
    """Images with objects, in COCO's format, below data_dir.

    Args:
        train_json: annotations of the training images, below data_dir.
        train_images: folder of the training images, below data_dir.
        val_json: annotations of the images that are evaluated, below data_dir.
        val_images: folder of these images, below data_dir.
        skip_empty: train on images with objects only.
    """

    train_json: str = "annotations/instances_train2017.json"
    train_images: str = "train2017"
    val_json: str = "annotations/instances_val2017.json"
    val_images: str = "val2017"
    skip_empty: bool = False


@dataclass(kw_only=True)
class JitterConfig:
    """Augmentation of images with objects.

    Args:
        train_min_sizes: short sides in training, pixels, one drawn per image; min_size when empty.
        scale_jitter: range of large-scale jitter (arXiv 2012.07177), instead of train_min_sizes: the image is fitted
            into a square of crop_size, scaled by a factor from this range, and cropped or padded to the square.
        crop_size: side of that square, pixels; 1024 when not given.
        hflip: probability of a horizontal flip.
        vflip: probability of a vertical flip.
        photometric: probability of each change of brightness, contrast, saturation, hue and channel order (SSD's,
            arXiv 1512.02325).
    """

    train_min_sizes: list[int] = field(default_factory=list)
    scale_jitter: tuple[float, float] | None = None
    crop_size: int | None = None
    hflip: float = 0.5
    vflip: float = 0.0
    photometric: float = 0.0

    def check(self) -> None:
        """Raises ValueError for probabilities and ranges out of bounds."""
        for name in ("hflip", "vflip", "photometric"):
            require(name, 0 <= getattr(self, name) <= 1, "in [0, 1]", getattr(self, name))
        sizes, jitter = self.train_min_sizes, self.scale_jitter
        require("train_min_sizes", all(size >= 1 for size in sizes), "sides of at least 1", sizes)
        crop_size = self.crop_size
        require("crop_size", crop_size is None or crop_size >= 1, "at least 1", crop_size)
        require("crop_size", crop_size is None or jitter is not None, "left out without scale_jitter", crop_size)
        if jitter is not None:
            require("scale_jitter", 0 < jitter[0] <= jitter[1], "(low, high) with 0 < low <= high", jitter)
            require("train_min_sizes", not sizes, "left out with scale_jitter", sizes)


@dataclass(kw_only=True)
class DetectionConfig(DetectorConfig, CocoDataConfig, JitterConfig, TaskConfig):
    """A whole detection run; see the parts for the other fields.

    Args:
        eval_metric: what "best" means: COCO's average precision of boxes or masks, over IoU 0.50 to 0.95 or at one.
    Raises:
        ValueError: a field out of range, or fields that contradict each other; the message names them.
    """

    eval_metric: Literal["box_map", "box_map50", "box_map75", "mask_map", "mask_map50", "mask_map75"] = "box_map"

    def check(self) -> None:
        """Raises ValueError for parts that do not go together."""
        require("data_dir", self.data_dir != "", "given", self.data_dir)
        masks = self.eval_metric.startswith("mask")
        require("eval_metric", not masks or self.detector == "mask_rcnn", "of boxes without masks", self.eval_metric)
        require("model_dtype", self.model_dtype != "bfloat16", "float32 in detection (see amp)", self.model_dtype)
        require("fsdp", not self.fsdp, "false in detection, where DDP serves", self.fsdp)
