"""Augmentation of images to be classified: in the loader's processes, and on the device."""

from __future__ import annotations

from typing import Any

import torch
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import create_transform

from flash_vision.train.data import Batch
from flash_vision.train.recipe import AugmentConfig
from flash_vision.train.seeding import seeded


class ToDevice:
    """Moves a batch to the device, normalises it there, and in training erases and mixes.

    Erasing is seeded per image and mixing per batch. On CUDA the noise that fills erased rectangles comes from the
    device's generator, which the loop seeds per update.

    Args:
        data_config: timm's resolved input_size, mean, std, interpolation, crop_pct.
        augment: None in evaluation.
        num_classes: for the soft targets of Mixup and CutMix.
    """

    def __init__(
        self,
        data_config: dict[str, Any],
        *,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        channels_last: bool = False,
        augment: AugmentConfig | None = None,
        num_classes: int = 0,
    ) -> None:
        self.device, self.dtype, self.seed = device, dtype, seed
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.mean, self.std = (
            torch.tensor(data_config[name], device=device, dtype=dtype).mul(255).view(1, -1, 1, 1)
            for name in ("mean", "std")
        )
        self.erasing: RandomErasing | None = None
        self.mixup: Mixup | None = None
        self.mixup_off_epoch = augment.mixup_off_epoch if augment is not None else 0
        if augment is not None and augment.reprob > 0 and not augment.no_aug:
            self.erasing = RandomErasing(
                augment.reprob, mode=augment.remode, max_count=augment.recount, device=str(device)
            )
        if augment is not None and augment.mixing:
            self.mixup = Mixup(
                mixup_alpha=augment.mixup,
                cutmix_alpha=augment.cutmix,
                cutmix_minmax=augment.cutmix_minmax,
                prob=augment.mixup_prob,
                switch_prob=augment.mixup_switch_prob,
                mode=augment.mixup_mode,
                label_smoothing=augment.smoothing,
                num_classes=num_classes,
            )

    def __call__(self, batch: Batch, epoch: int) -> Batch:
        if not len(batch.inputs):
            return batch
        images = batch.inputs.to(self.device, non_blocking=True).to(self.dtype, memory_format=self.memory_format)
        images = images.sub_(self.mean).div_(self.std)
        targets = batch.targets.to(self.device, non_blocking=True)
        if self.erasing is not None:
            for image, key in zip(images, batch.keys.tolist(), strict=True):
                with seeded("erase", self.seed, *key):
                    self.erasing(image)
        if self.mixup is not None:
            self.mixup.mixup_enabled = not self.mixup_off_epoch or epoch < self.mixup_off_epoch
            with seeded("mix", self.seed, *batch.keys[0].tolist()):
                images, targets = self.mixup(images, targets)
        return batch._replace(inputs=images, targets=targets.to(self.dtype) if targets.is_floating_point() else targets)


def training_transform(augment: AugmentConfig, data_config: dict[str, Any]) -> Any:
    """timm's training transform: PIL image to uint8 (channels, height, width).

    Raises:
        ValueError: timm does not know a policy or filter, or does not take its arguments.
    """
    fields = (
        "no_aug", "train_crop_mode", "scale", "ratio", "hflip", "vflip", "color_jitter", "color_jitter_prob",
        "grayscale_prob", "gaussian_blur_prob",
    )  # fmt: skip
    try:
        return create_transform(
            data_config["input_size"],
            is_training=True,
            use_prefetcher=True,  # uint8 out; normalising and erasing is ToDevice's
            interpolation=(augment.train_interpolation if not augment.no_aug else "") or data_config["interpolation"],
            mean=data_config["mean"],
            std=data_config["std"],
            auto_augment=augment.aa or None,
            **{name: getattr(augment, name) for name in fields},
        )
    except (AssertionError, KeyError, ValueError) as error:
        reason = f" ({error})" if str(error) else ""
        raise ValueError(
            f"aa {augment.aa!r}, train_interpolation {augment.train_interpolation!r}: not known{reason}"
        ) from None


def evaluation_transform(data_config: dict[str, Any]) -> Any:
    """timm's evaluation transform: PIL image to uint8 (channels, height, width)."""
    fields = ("interpolation", "mean", "std", "crop_pct", "crop_mode")
    chosen = {name: data_config[name] for name in fields}
    return create_transform(data_config["input_size"], is_training=False, use_prefetcher=True, **chosen)
