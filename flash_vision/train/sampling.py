"""Which image is seen when: an order that is a function of seed, epoch and position, and of nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from flash_vision.train.seeding import derive_seed

# (index in the data set, how manieth repeat within the epoch, epoch): what an image's augmentation is seeded with.
SampleKey = tuple[int, int, int]


class UpdateSampler(Sampler[list[SampleKey]]):
    """The batches of one process, grouped into updates of `images_per_update` images over all processes.

    Position p of epoch e holds image perm_e[p // repeats]. Update k takes the positions [k*G, (k+1)*G) with
    G = images_per_update; process r takes every world_size-th of them. So the images of an update do not depend on how
    many processes and accumulation steps share them, and repeats of one image go to different processes (as in DeiT's
    RASampler, arXiv 2012.12877; unlike it, no rounding of the epoch to multiples of 256).

    Args:
        num_images: images in the data set.
        batch_size: images per process and batch.
        grad_accum_steps: batches per process and update.
        repeats: how often an image recurs; an epoch still has num_images positions.
        drop_last: leave the incomplete last update out; otherwise it is filled up from the epoch's start.
    Raises:
        ValueError: fewer images than one update takes, with drop_last.
    """

    def __init__(
        self,
        num_images: int,
        *,
        seed: int,
        batch_size: int,
        grad_accum_steps: int = 1,
        rank: int = 0,
        world_size: int = 1,
        repeats: int = 1,
        drop_last: bool = True,
    ) -> None:
        self.num_images = num_images
        self.seed = seed
        self.batch_size = batch_size
        self.rank, self.world_size = rank, world_size
        self.repeats = repeats
        self.images_per_update = batch_size * grad_accum_steps * world_size
        self.drop_last = drop_last
        self.epoch = 0
        self.position = 0
        if drop_last and num_images < self.images_per_update:
            raise ValueError(
                f"batch_size must leave an update of at most {num_images} images, the size of the training split "
                f"(or set drop_last to false), got {batch_size} * {grad_accum_steps} accumulation steps * "
                f"{world_size} processes = {self.images_per_update}"
            )

    def start_at(self, epoch: int, position: int) -> None:
        """Sets where the next iteration begins: epoch, and images of it that are already consumed."""
        self.epoch, self.position = epoch, position

    def updates_from(self, position: int) -> int:
        """Updates left in an epoch of which `position` images are consumed."""
        left = max(0, self.num_images - position)
        return left // self.images_per_update if self.drop_last else -(-left // self.images_per_update)

    def order(self, epoch: int) -> Tensor:
        """The permutation of the images in an epoch, int64 of shape (num_images,)."""
        generator = torch.Generator().manual_seed(derive_seed("order", self.seed, epoch))
        return torch.randperm(self.num_images, generator=generator)

    def __len__(self) -> int:
        return self.updates_from(self.position) * self.images_per_update // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        epoch, order = self.epoch, self.order(self.epoch)
        images_per_batch = self.batch_size * self.world_size
        for batch in range(len(self)):
            start = self.position + batch * images_per_batch + self.rank
            positions = [p % self.num_images for p in range(start, start + images_per_batch, self.world_size)]
            yield [(int(order[p // self.repeats]), p % self.repeats, epoch) for p in positions]


class EvaluationSampler(Sampler[list[SampleKey]]):
    """Every world_size-th image of the data set in order: each image in one process, batches and shares uneven."""

    def __init__(self, num_images: int, *, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.indices = range(rank, num_images, world_size)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for start in range(0, len(self.indices), self.batch_size):
            yield [(index, 0, 0) for index in self.indices[start : start + self.batch_size]]
