"""torchvision's detectors on any timm backbone, from a description that a file can hold."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection import FCOS, FasterRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.transform import GeneralizedRCNNTransform, resize_boxes
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

from flash_vision.dense.backbone import PyramidBackbone
from flash_vision.dense.detection_config import TWO_STAGE
from flash_vision.dense.features import TimmFeatures, layer_decay_groups

CLASSES: dict[str, Callable[..., nn.Module]] = {
    "faster_rcnn": FasterRCNN, "mask_rcnn": MaskRCNN, "retinanet": RetinaNet, "fcos": FCOS,
}  # fmt: skip
SMALL_IMAGES = 400  # pixels: below this min_size the default anchors are half as large
ROI_SIDE = 7  # cells of a box's pooled features
MASK_LAYERS = 4  # convolutions of the mask head
# arguments of torchvision's classes that fields of the configuration decide, or that are modules
DECIDED = {
    "self", "backbone", "num_classes", "min_size", "max_size", "image_mean", "image_std", "rpn_anchor_generator",
    "anchor_generator", "rpn_head", "head", "box_roi_pool", "box_head", "box_predictor", "mask_roi_pool", "mask_head",
    "mask_predictor", "proposal_matcher", "kwargs",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DetectorSpec:
    """All that builds a detector again, weights apart: the content of model.json.

    Args:
        detector: faster_rcnn, mask_rcnn, retinanet or fcos.
        model: timm model name of the backbone.
        model_kwargs: further arguments of timm.create_model.
        class_names: names of the classes; label i + 1 of the network is class i, label 0 the background.
        category_ids: their ids in the annotations.
        min_size: short side that images are resized to, pixels.
        max_size: most that the long side may become, pixels.
        mean: per channel mean, of images in [0, 1].
        std: per channel standard deviation.
        neck_channels: channels of the feature pyramid.
        box_head_dim: width of the box head.
        mask_head_dim: channels of the mask head.
        anchor_scale: side of a level's smallest anchor, in strides.
        detector_kwargs: further arguments of torchvision's class.
    Raises:
        ValueError: unknown detector, or class names and ids of different number.
    """

    detector: str
    model: str
    model_kwargs: dict[str, Any]
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]
    min_size: int
    max_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    neck_channels: int
    box_head_dim: int
    mask_head_dim: int
    anchor_scale: float | None
    detector_kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        if self.detector not in CLASSES:
            raise ValueError(f"detector must be one of {', '.join(CLASSES)}, got {self.detector!r}")
        for name in ("class_names", "category_ids", "mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.class_names or len(self.class_names) != len(self.category_ids):
            counts = len(self.class_names), len(self.category_ids)
            raise ValueError(f"class_names and category_ids must be one each for a class, got {counts[0]}, {counts[1]}")


class Detector(nn.Module):
    """A torchvision detector, with the layer groups of its backbone for timm's optimisers.

    In training mode images and targets to a dict of losses; in evaluation mode images to a list of dicts of boxes
    (N, 4) as x1 y1 x2 y2 in pixels of the image, labels (N,), scores (N,) and, of mask_rcnn, masks (N, 1, H, W), in
    [0, 1].

    Args:
        network: the detector, whose backbone is a `PyramidBackbone`.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = network

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        return self.network(images, targets)

    @property
    def backbone(self) -> PyramidBackbone:
        """Backbone and pyramid."""
        return self.network.backbone

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """Layers of the backbone from the stem up, then pyramid and heads as the last one (timm's layer decay).

        Args:
            coarse: the backbone's layers are not grouped into stages; must be False.
        """
        if coarse:
            raise ValueError("coarse must be False: a detector's layers are those of its backbone, got True")
        return layer_decay_groups(self.backbone.features, _FEATURES)

    def no_weight_decay(self) -> set[str]:
        """Parameters that the backbone exempts from weight decay."""
        return {_FEATURES + name for name in self.backbone.features.no_weight_decay()}


_FEATURES = "network.backbone.features."


class ResizeAndBatch(GeneralizedRCNNTransform):
    """torchvision's normalisation, resizing and batching, for images of any shape.

    Unlike the original, training images come at their size from the loader, shrinking is antialiased as there, and no
    side of a long, thin image becomes zero.
    """

    def __init__(self, min_size: int, max_size: int, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(min_size, max_size, list(mean), list(std))
        self.short_side = min_size

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor] | None]:
        """The image (C, H, W) fitted to min_size and max_size in evaluation; in training as it is."""
        if self.training:
            return image, target
        height, width = image.shape[-2:]
        size = fitted_size(height, width, self.short_side, self.max_size)
        image = F.interpolate(image[None], size=size, mode="bilinear", antialias=True)[0]
        if target is not None:
            target = {**target, "boxes": resize_boxes(target["boxes"], [height, width], list(size))}
        return image, target


def fitted_size(height: int, width: int, short: float, longest: float) -> tuple[int, int]:
    """Height and width, in pixels, scaled so that the short side is `short` and the long one at most `longest`."""
    scale = min(short / min(height, width), longest / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def build_detector(spec: DetectorSpec, features: TimmFeatures | None = None) -> Detector:
    """The detector that a description asks for, with random weights in all but `features`.

    Args:
        features: the backbone; made from the description when not given.
    Raises:
        ValueError: the backbone cannot be had, or detector_kwargs holds what torchvision's class does not take.
    """
    two_stage = spec.detector in TWO_STAGE
    strides = (4, 8, 16, 32) if two_stage else (8, 16, 32)
    features = features or TimmFeatures(spec.model, strides=strides, model_kwargs=spec.model_kwargs)
    neck = spec.neck_channels
    extra = LastLevelMaxPool() if two_stage else LastLevelP6P7(neck, neck)
    backbone = PyramidBackbone(features, neck, strides=strides, extra=extra)
    kind = CLASSES[spec.detector]
    taken = {name for cls in getattr(kind, "__mro__", ()) for name in inspect.signature(cls.__init__).parameters}
    unknown = sorted(spec.detector_kwargs.keys() - (taken - DECIDED))
    if unknown:
        raise ValueError(f"detector_kwargs: {spec.detector} takes no {unknown[0]!r}, or a field of its own decides it")
    arguments: dict[str, Any] = {"num_classes": len(spec.class_names) + 1, **spec.detector_kwargs}
    if two_stage:
        arguments |= {
            "num_classes": None,
            "box_head": TwoMLPHead(neck * ROI_SIDE**2, spec.box_head_dim),
            "box_predictor": FastRCNNPredictor(spec.box_head_dim, len(spec.class_names) + 1),
        }
        if spec.detector == "mask_rcnn":
            width = spec.mask_head_dim
            arguments["mask_head"] = MaskRCNNHeads(neck, (width,) * MASK_LAYERS, 1)
            arguments["mask_predictor"] = MaskRCNNPredictor(width, width, len(spec.class_names) + 1)
    if spec.detector != "fcos":
        arguments["rpn_anchor_generator" if two_stage else "anchor_generator"] = anchors(spec, two_stage=two_stage)
    network: Any = kind(backbone, **arguments)
    network.transform = ResizeAndBatch(spec.min_size, spec.max_size, spec.mean, spec.std)
    return Detector(network)


def anchors(spec: DetectorSpec, *, two_stage: bool) -> AnchorGenerator:
    """torchvision's anchors, their size in proportion to the stride of their level, at three aspect ratios."""
    default = (8.0 if two_stage else 4.0) * (0.5 if spec.min_size < SMALL_IMAGES else 1.0)
    scale = spec.anchor_scale or default
    strides = (4, 8, 16, 32, 64) if two_stage else (8, 16, 32, 64, 128)
    steps = (1.0,) if two_stage else (1.0, 2 ** (1 / 3), 2 ** (2 / 3))
    sizes: Any = tuple(tuple(int(stride * scale * step) for step in steps) for stride in strides)
    return AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes))
