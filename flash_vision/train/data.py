"""Batches for training and evaluation, whatever the task: order, and decoding in worker processes."""

from __future__ import annotations

import atexit
import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from flash_vision.train.parallel import Processes
from flash_vision.train.recipe import LoaderConfig
from flash_vision.train.samples import Problem, Sample, Samples
from flash_vision.train.sampling import EvaluationSampler, UpdateSampler
from flash_vision.train.seeding import derive_seed
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
