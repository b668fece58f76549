"""Batches for training and evaluation: order, decoding in worker processes, and what happens on the device."""

from __future__ import annotations

import atexit
import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torch.utils.data import DataLoader

from flash_vision.train.parallel import Processes
from flash_vision.train.recipe import AugmentConfig, LoaderConfig
from flash_vision.train.samples import Problem, Sample, Samples
from flash_vision.train.sampling import EvaluationSampler, UpdateSampler
from flash_vision.train.seeding import derive_seed, seeded
from flash_vision.train.sources import StreamSamples


class Batch(NamedTuple):
    """What a task and an evaluator are given; an unreadable image is not among the inputs (evaluation only).

    inputs, targets: in the task's form. A classifier's: (B, channels, H, W), uint8 from the loader, normalised on the
    device; (B,) class indices, or (B, classes) after mixing. keys: (B, 3), see `SampleKey`.
    """

    inputs: Any
    targets: Any
    keys: Tensor
    problems: list[Problem]


def collate(
    samples: list[Sample],
    *,
    inputs: Callable[[list[Any]], Any] = torch.stack,
    targets: Callable[[list[Any]], Any] = torch.tensor,
) -> Batch:
    """Samples to a batch, images as the data set gives them.

    Args:
        inputs: puts the images together.
        targets: puts the targets together.
    """
    readable = [sample for sample in samples if sample.image is not None]
    return Batch(
        inputs([sample.image for sample in readable]) if readable else [],
        targets([sample.target for sample in readable]) if readable else [],
        torch.tensor([sample.key for sample in readable]),
        [problem for sample in samples for problem in sample.problems],
    )


Collate = Callable[[list[Sample]], Batch]
# Puts a batch on the device for an epoch, counted from 0: what `TrainLoader.prepare` and `EvalLoader` do to each.
Prepare = Callable[[Batch, int], Batch]


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


class TrainLoader:
    """The training split as updates: lists of `grad_accum_steps` batches per process.

    Args:
        samples: the data set; of a stream, the order is its own.
        batch_size: images per process and batch.
        prepare: puts a batch on the device.
        collate: makes a batch of samples.
    Raises:
        ValueError: an option that this source cannot keep.
    """

    def __init__(
        self,
        samples: Samples | StreamSamples,
        config: LoaderConfig,
        *,
        batch_size: int,
        processes: Processes,
        prepare: Prepare,
        collate: Collate = collate,
    ) -> None:
        self.samples, self.config, self.processes = samples, config, processes
        self.batch_size = batch_size
        self.images_per_update = batch_size * config.grad_accum_steps * processes.world_size
        self.prepare = prepare
        if isinstance(samples, StreamSamples):
            self._open_stream(samples, collate)
            return
        self.sampler = UpdateSampler(
            len(samples),
            seed=config.seed,
            batch_size=batch_size,
            grad_accum_steps=config.grad_accum_steps,
            rank=processes.rank,
            world_size=processes.world_size,
            repeats=max(1, config.aug_repeats),
            drop_last=config.drop_last,
        )
        self.updates_per_epoch = self.sampler.updates_from(0)
        self.loader = _loader(samples, config, processes, collate, batch_sampler=self.sampler, persistent=True)

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

    def names(self, batch: Batch) -> list[str]:
        """File names of a batch's images; of a stream, their place in it."""
        if isinstance(self.samples, Samples):
            return [self.samples.name(int(index)) for index in batch.keys[:, 0]]
        return [f"sample {number} of worker {worker}" for number, worker, _ in batch.keys.tolist()]

    def check_resume(self, consumed: int, layout: list[int]) -> None:
        """Checks that an epoch of which `consumed` images were taken under `layout` can be taken up here.

        Raises:
            ValueError: a stream in mid-epoch whose processes, workers or batch size are others now.
        """
        if isinstance(self.samples, StreamSamples) and consumed and layout != self.layout:
            raise ValueError(
                "a wds/ run can be continued in mid-epoch only with the same [processes, workers, batch_size, "
                f"grad_accum_steps], got {layout} in the checkpoint and {self.layout} now"
            )

    @property
    def layout(self) -> list[int]:
        """[processes, workers, batch_size, grad_accum_steps]: what the order of a stream depends on."""
        return [self.processes.world_size, self.config.workers, self.batch_size, self.config.grad_accum_steps]

    def _open_stream(self, samples: StreamSamples, collate: Collate) -> None:
        config = self.config
        for name, wrong in (("workers", config.workers < 1), ("aug_repeats", config.aug_repeats > 1)):
            if wrong:
                raise ValueError(f"{name} must be {'at least 1' if name == 'workers' else '0'} with a wds/ data set")
        if not config.drop_last:
            raise ValueError("drop_last must be true with a wds/ data set, got False")
        samples.dataset.set_loader_cfg(num_workers=config.workers)
        self.updates_per_epoch = len(samples) // self.images_per_update
        if not self.updates_per_epoch:
            raise ValueError(f"batch_size must leave an update of at most {len(samples)} images")
        self.loader = _loader(samples, config, self.processes, collate, batch_size=self.batch_size)


class EvalLoader:
    """The validation split, prepared; each image in exactly one process; batches and shares may be uneven.

    Args:
        samples: the data set.
        batch_size: images per process and batch.
        prepare: puts a batch on the device.
        collate: makes a batch of samples.
    """

    def __init__(
        self,
        samples: Samples | StreamSamples,
        config: LoaderConfig,
        *,
        batch_size: int,
        processes: Processes,
        prepare: Prepare,
        collate: Collate = collate,
    ) -> None:
        self.prepare = prepare
        if isinstance(samples, StreamSamples):
            samples.dataset.set_loader_cfg(num_workers=config.workers)
            self.loader = _loader(samples, config, processes, collate, batch_size=batch_size)
            return
        rank, world_size = processes.rank, processes.world_size
        sampler = EvaluationSampler(len(samples), batch_size=batch_size, rank=rank, world_size=world_size)
        self.loader = _loader(samples, config, processes, collate, batch_sampler=sampler, persistent=True)

    def __iter__(self) -> Iterator[Batch]:
        return (self.prepare(batch, 0) for batch in self.loader)


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


class _Loader(DataLoader[Batch]):
    """A DataLoader whose workers, which ignore SIGTERM, end with the process even if an error nobody caught ends it.

    The exit of multiprocessing sends them that signal and then waits for them for ever.
    """

    _iterators: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def __iter__(self) -> Any:
        iterator = super().__iter__()
        self._iterators.add(iterator)
        return iterator

    @classmethod
    def end_workers(cls) -> None:
        """Ends those of all loaders, as dropping their iterators would."""
        for iterator in list(cls._iterators):
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()


atexit.register(_Loader.end_workers)  # runs before the hook that torch's import of multiprocessing registered


def _loader(
    samples: Any,
    config: LoaderConfig,
    processes: Processes,
    collate: Collate,
    *,
    persistent: bool = False,
    **kwargs: Any,
) -> DataLoader[Batch]:
    return _Loader(
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
