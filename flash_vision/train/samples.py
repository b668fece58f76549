"""Samples of a random-access data set, whatever the task: each a function of seed, epoch and index only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from flash_vision.data.class_folder import CorruptImageError
from flash_vision.train.model_source import first_line
from flash_vision.train.sampling import SampleKey
from flash_vision.train.seeding import derive_seed, seeded

MAX_SUBSTITUTES = 100


class Problem(NamedTuple):
    """An image that was left out: its name and why."""

    name: str
    reason: str


class Sample(NamedTuple):
    """One image and its target in the task's form, its key, and the images left out on the way to it.

    The image is None where nothing could be read (evaluation only).
    """

    image: Any
    target: Any
    key: SampleKey
    problems: list[Problem]


class Samples(Dataset[Sample], ABC):
    """Samples of a random-access data set, augmented with random numbers of (seed, epoch, index, repeat).

    In training a corrupt image is replaced by another one, drawn from its key; in evaluation the sample comes without
    an image. Both report it in the sample's problems. A task's data set derives from this class and gives
    `__len__`, `name`, `read` and `transformed`.

    Args:
        seed: of augmentation and substitutes.
        training: whether corrupt images are replaced.
    """

    def __init__(self, *, seed: int, training: bool) -> None:
        self.seed = seed
        self.training = training

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """What the image is called in messages: its file where it has one."""

    @abstractmethod
    def read(self, index: int) -> tuple[Any, Any]:
        """The image and the target, decoded and not yet augmented.

        Raises:
            CorruptImageError, OSError: the image cannot be read; another one takes its place.
        """

    @abstractmethod
    def transformed(self, image: Any, target: Any) -> tuple[Any, Any]:
        """Image and target as a batch takes them; every random number comes from the global generators."""

    def __getitem__(self, key: SampleKey) -> Sample:
        index, repeat, epoch = key
        problems: list[Problem] = []
        for attempt in range(MAX_SUBSTITUTES):
            try:
                image, target = self.read(index)
                break
            except (CorruptImageError, OSError) as error:
                problems.append(Problem(self.name(index), first_line(error)))
            if not self.training:
                return Sample(None, None, key, problems)
            index = derive_seed("substitute", self.seed, *key, attempt) % len(self)
        else:
            raise RuntimeError(f"{MAX_SUBSTITUTES} images in a row cannot be read, the last: {problems[-1]}")
        with seeded("augment", self.seed, epoch, index, repeat):
            return Sample(*self.transformed(image, target), key, problems)
