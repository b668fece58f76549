"""Batches for training and evaluation: order, decoding in worker processes, and what happens on the device."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torch.utils.data import DataLoader

from flash_vision.train.parallel import Processes
from flash_vision.train.recipe import AugmentConfig, DataConfig
from flash_vision.train.sampling import EvaluationSampler, UpdateSampler
from flash_vision.train.seeding import derive_seed, seeded
from flash_vision.train.sources import ImageSamples, OpenedSplit, Problem, Sample, StreamSamples


class Batch(NamedTuple):
    """What a task and an evaluator are given.

    inputs: (B, channels, H, W), uint8 from the loader, normalised on the device. targets: (B,) class indices, -1 for an
    image that could not be read (evaluation only), or (B, classes) after mixing. keys: (B, 3), see `SampleKey`.
    """

    inputs: Tensor
    targets: Tensor
    keys: Tensor
    problems: list[Problem]


def collate(samples: list[Sample]) -> Batch:
    """Samples to a batch, images still uint8."""
    return Batch(
        torch.stack([sample.image for sample in samples]),
        torch.tensor([sample.target for sample in samples]),
        torch.tensor([sample.key for sample in samples]),
        [problem for sample in samples for problem in sample.problems],
    )


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

    def __call__(self, batch: Batch) -> Batch:
        images = batch.inputs.to(self.device, non_blocking=True).to(self.dtype, memory_format=self.memory_format)
        images = images.sub_(self.mean).div_(self.std)
        targets = batch.targets.to(self.device, non_blocking=True)
        if self.erasing is not None:
            for image, key in zip(images, batch.keys.tolist(), strict=True):
                with seeded("erase", self.seed, *key):
                    self.erasing(image)
        if self.mixup is not None:
            with seeded("mix", self.seed, *batch.keys[0].tolist()):
                images, targets = self.mixup(images, targets)
        return batch._replace(inputs=images, targets=targets.to(self.dtype) if targets.is_floating_point() else targets)


class TrainLoader:
    """The training split as updates: lists of `grad_accum_steps` batches per process.

    Args:
        opened: the data set.
        data_config: timm's resolved input_size, mean, std, interpolation, crop_pct.
        batch_size: images per process and batch.
        num_classes: classes of the model.
    Raises:
        ValueError: an option that this source cannot keep.
    """

    def __init__(
        self,
        opened: OpenedSplit,
        config: DataConfig,
        augment: AugmentConfig,
        data_config: dict[str, Any],
        *,
        batch_size: int,
        num_classes: int,
        processes: Processes,
        to_device: ToDevice,
    ) -> None:
        if to_device.mixup is not None and batch_size % 2:
            raise ValueError(f"batch_size must be even with mixup or cutmix, got {batch_size} per process")
        self.config, self.augment, self.processes = config, augment, processes
        self.batch_size = batch_size
        self.images_per_update = batch_size * config.grad_accum_steps * processes.world_size
        self.to_device = to_device
        self.is_stream = opened.stream
        transform = training_transform(augment, data_config)
        if opened.stream:
            self._open_stream(opened, transform)
            return
        sampler = UpdateSampler(
            len(opened.dataset),
            seed=config.seed,
            batch_size=batch_size,
            grad_accum_steps=config.grad_accum_steps,
            rank=processes.rank,
            world_size=processes.world_size,
            repeats=max(1, config.aug_repeats),
            drop_last=config.drop_last,
        )
        self.samples: ImageSamples | StreamSamples = ImageSamples(
            opened.dataset,
            transform,
            image_shape=data_config["input_size"],
            seed=config.seed,
            training=True,
            mode=config.input_img_mode,
        )
        self.sampler = sampler
        self.updates_per_epoch = sampler.updates_from(0)
        self.loader = _loader(self.samples, config, processes, batch_sampler=sampler, persistent=True)

    @property
    def num_images(self) -> int:
        """Images in the training split."""
        return len(self.samples)

    def updates(self, epoch: int, consumed: int) -> Iterator[list[Batch]]:
        """The rest of an epoch, update by update, still on the CPU; see `prepare`.

        Args:
            epoch: counted from 0.
            consumed: images of the epoch, over all processes, that earlier updates took. A random-access source goes
                straight there; a stream is read again from the epoch's start.
        """
        left, skip = self.updates_left(consumed), 0
        if not left:
            return
        if isinstance(self.samples, StreamSamples):
            self.samples.epoch = epoch
            self.samples.dataset.set_epoch(epoch)
            seed = derive_seed("workers", self.config.seed, epoch, self.processes.rank)
            self.loader.generator = torch.Generator().manual_seed(seed)
            skip = consumed // self.images_per_update
        else:
            self.sampler.start_at(epoch, consumed)
        batches = iter(self.loader)
        for _ in range(skip * self.config.grad_accum_steps):
            next(batches)
        for _ in range(left):
            yield [next(batches) for _ in range(self.config.grad_accum_steps)]

    def updates_left(self, consumed: int) -> int:
        """Updates left in an epoch of which `consumed` images are trained on."""
        if isinstance(self.samples, StreamSamples):
            return self.updates_per_epoch - consumed // self.images_per_update
        return self.sampler.updates_from(consumed)

    def prepare(self, batch: Batch, epoch: int) -> Batch:
        """The batch on the device: normalised, erased and mixed."""
        if self.to_device.mixup is not None:
            off = self.augment.mixup_off_epoch
            self.to_device.mixup.mixup_enabled = not off or epoch < off
        return self.to_device(batch)

    def names(self, batch: Batch) -> list[str]:
        """File names of a batch's images; of a stream, their place in it."""
        if isinstance(self.samples, ImageSamples):
            return [self.samples.name(int(index)) for index in batch.keys[:, 0]]
        return [f"sample {number} of worker {worker}" for number, worker, _ in batch.keys.tolist()]

    def check_resume(self, consumed: int, layout: list[int]) -> None:
        """Checks that an epoch of which `consumed` images were taken under `layout` can be taken up here.

        Raises:
            ValueError: a stream in mid-epoch whose processes, workers or batch size are others now.
        """
        if self.is_stream and consumed and layout != self.layout:
            raise ValueError(
                "a wds/ run can be continued in mid-epoch only with the same [processes, workers, batch_size, "
                f"grad_accum_steps], got {layout} in the checkpoint and {self.layout} now"
            )

    @property
    def layout(self) -> list[int]:
        """[processes, workers, batch_size, grad_accum_steps]: what the order of a stream depends on."""
        return [self.processes.world_size, self.config.workers, self.batch_size, self.config.grad_accum_steps]

    def _open_stream(self, opened: OpenedSplit, transform: Any) -> None:
        config = self.config
        for name, wrong in (("workers", config.workers < 1), ("aug_repeats", config.aug_repeats > 1)):
            if wrong:
                raise ValueError(f"{name} must be {'at least 1' if name == 'workers' else '0'} with a wds/ data set")
        if not config.drop_last:
            raise ValueError("drop_last must be true with a wds/ data set, got False")
        opened.dataset.set_loader_cfg(num_workers=config.workers)
        self.samples = StreamSamples(
            opened.dataset, transform, seed=config.seed, rank=self.processes.rank, training=True
        )
        self.updates_per_epoch = len(self.samples) // self.images_per_update
        if not self.updates_per_epoch:
            raise ValueError(f"batch_size must leave an update of at most {len(self.samples)} images")
        self.loader = _loader(self.samples, config, self.processes, batch_size=self.batch_size)


class EvalLoader:
    """The validation split, each image in exactly one process; batches and shares may be uneven."""

    def __init__(
        self,
        opened: OpenedSplit,
        config: DataConfig,
        data_config: dict[str, Any],
        *,
        batch_size: int,
        processes: Processes,
        to_device: ToDevice,
    ) -> None:
        transform: Any = create_transform(
            data_config["input_size"],
            is_training=False,
            use_prefetcher=True,
            interpolation=data_config["interpolation"],
            mean=data_config["mean"],
            std=data_config["std"],
            crop_pct=data_config["crop_pct"],
            crop_mode=data_config["crop_mode"],
        )
        self.to_device = to_device
        self.input_shape: tuple[int, int, int] = data_config["input_size"]
        if opened.stream:
            opened.dataset.set_loader_cfg(num_workers=config.workers)
            stream = StreamSamples(opened.dataset, transform, seed=config.seed, rank=processes.rank, training=False)
            self.num_images = len(stream)
            self.loader = _loader(stream, config, processes, batch_size=batch_size)
            return
        self.num_images = len(opened.dataset)
        samples = ImageSamples(
            opened.dataset,
            transform,
            image_shape=data_config["input_size"],
            seed=config.seed,
            training=False,
            mode=config.input_img_mode,
        )
        sampler = EvaluationSampler(
            len(samples), batch_size=batch_size, rank=processes.rank, world_size=processes.world_size
        )
        self.loader = _loader(samples, config, processes, batch_sampler=sampler, persistent=True)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.to_device, self.loader)


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


def _loader(
    samples: Any, config: DataConfig, processes: Processes, *, persistent: bool = False, **kwargs: Any
) -> DataLoader[Batch]:
    return DataLoader(
        samples,
        num_workers=config.workers,
        collate_fn=collate,
        pin_memory=processes.device.type == "cuda",
        persistent_workers=persistent and config.workers > 0,
        worker_init_fn=_leave_signals_to_parent,
        generator=torch.Generator(),  # its own, so that making an iterator draws no number from the global one
        **kwargs,
    )


def _leave_signals_to_parent(worker: int) -> None:
    """A signal for the whole process group must not take the workers away before the training process has finished."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
