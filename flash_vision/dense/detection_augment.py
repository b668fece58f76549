"""Augmentation of an image with its boxes and masks, by torchvision's transforms v2."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from flash_vision.dense.detection_config import DetectionConfig
from flash_vision.dense.detection_model import fitted_size

SMALLEST_SIDE = 1.0  # pixels; an object that cropping and scaling leave smaller is not trained on


class DetectionAugment:
    """Photometric distortion, flips, then scale: one of several short sides, or large-scale jitter.

    Args:
        config: probabilities and sizes.
        fill: value of padded pixels per channel, in [0, 255].
    """

    def __init__(self, config: DetectionConfig, *, fill: tuple[float, ...]) -> None:
        self.config = config
        self.short_sides = config.train_min_sizes or [config.min_size]
        steps: list[Any] = []
        if config.photometric:
            steps.append(v2.RandomPhotometricDistort(p=config.photometric))
        steps += [v2.RandomHorizontalFlip(config.hflip), v2.RandomVerticalFlip(config.vflip)]
        self.before_scaling = v2.Compose(steps)
        self.crop_size = config.crop_size or 1024
        side = (self.crop_size, self.crop_size)
        # masks and boxes take no fill
        self.crop = v2.RandomCrop(side, pad_if_needed=True, fill={tv_tensors.Image: list(fill), "others": 0})

    def __call__(self, image: Tensor, target: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Image (C, H, W) uint8 and its target at a new scale; objects that are cropped away are left out."""
        size = (image.shape[1], image.shape[2])
        typed: dict[str, Any] = {"boxes": tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=size)}  # pyright: ignore
        if "masks" in target:
            typed["masks"] = tv_tensors.Mask(target["masks"])
        pixels, typed = self.before_scaling(tv_tensors.Image(image), typed)
        new_size = list(self._new_size(*size))
        pixels = F.resize(pixels, new_size, antialias=True)
        typed = {name: F.resize(value, new_size) for name, value in typed.items()}
        if self.config.scale_jitter is not None:
            pixels, typed = self.crop(pixels, typed)
        boxes = F.clamp_bounding_boxes(typed["boxes"])
        kept = ((boxes[:, 2:] - boxes[:, :2]) >= SMALLEST_SIDE).all(dim=1)
        plain = {name: torch.as_tensor(value.as_subclass(Tensor))[kept] for name, value in typed.items()}
        plain["boxes"] = boxes.as_subclass(Tensor)[kept]
        return pixels.as_subclass(Tensor), {**target, **plain, "labels": target["labels"][kept]}

    def _new_size(self, height: int, width: int) -> tuple[int, int]:
        if self.config.scale_jitter is None:
            return fitted_size(height, width, random.choice(self.short_sides), self.config.max_size)
        scale = self.crop_size * random.uniform(*self.config.scale_jitter)
        return fitted_size(height, width, scale, scale)
