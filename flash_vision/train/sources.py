"""Training images from whatever timm reads, with an augmentation that depends on the image and the epoch only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from timm.data.dataset import ImageDataset, IterableImageDataset
from timm.data.dataset_factory import create_dataset
from timm.data.readers.reader_image_in_tar import ReaderImageInTar
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from flash_vision.data.class_folder import check_class_folder, decode
from flash_vision.train.model_source import first_line
from flash_vision.train.recipe import DataConfig
from flash_vision.train.samples import Problem, Sample, Samples
from flash_vision.train.seeding import seeded

Transform = Callable[[Any], Tensor]
SPLIT_NAMES = (("train", "training"), ("validation", "val", "valid", "eval", "evaluation", "test"))


class ImageSamples(Samples):
    """Images and class indices of a random-access data set.

    Args:
        dataset: timm ImageDataset, or a torchvision data set of (PIL image, class index).
        transform: PIL image to uint8 (channels, height, width).
    """

    def __init__(self, dataset: Any, transform: Transform, *, seed: int, training: bool, mode: str = "RGB") -> None:
        super().__init__(seed=seed, training=training)
        self.dataset = dataset
        self.transform = transform
        self.mode = mode

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, index: int) -> str:
        """The image's file where it has one."""
        if isinstance(self.dataset, ImageDataset):
            return str(self.dataset.filename(index, absolute=True) or f"image {index}")
        return f"image {index}"

    def read(self, index: int) -> tuple[Any, int]:
        """The PIL image and its class index, -1 where the data set does not say it."""
        if isinstance(self.dataset, ImageDataset):
            reader: Any = self.dataset.reader
            file, target, *_ = reader[index]
            with file:
                return decode(file, mode=self.mode), -1 if target is None else int(target)
        image, target = self.dataset[index]
        return image.convert(self.mode), int(target)

    def transformed(self, image: Any, target: int) -> tuple[Tensor, int]:
        """The image augmented, or resized and cropped."""
        return self.transform(image), target


class StreamSamples(IterableDataset[Sample]):
    """Samples of WebDataset shards in the reader's order, which is a function of seed, epoch, process and worker.

    Args:
        dataset: timm IterableImageDataset over wds/.
        transform: PIL image to uint8 (channels, height, width).
    """

    def __init__(self, dataset: IterableImageDataset, transform: Transform, *, seed: int, rank: int, training: bool):
        self.dataset = dataset
        self.transform = transform
        self.seed, self.rank = seed, rank
        self.training = training
        self.epoch = 0

    def __len__(self) -> int:
        reader: Any = self.dataset.reader
        return reader.num_samples

    def __iter__(self) -> Iterator[Sample]:
        reader: Any = self.dataset.reader
        worker = getattr(get_worker_info(), "id", 0)
        lost = _LostSamples()
        reader_log = logging.getLogger("timm.data.readers.reader_wds")
        reader_log.addFilter(lost)
        try:
            for number, (image, target) in enumerate(self._items(reader)):
                lost.number = number
                with seeded("augment", self.seed, self.epoch, self.rank, worker, number):
                    yield Sample(self.transform(image), int(target), (number, worker, self.epoch), lost.take())
        finally:
            reader_log.removeFilter(lost)

    def _items(self, reader: Any) -> Iterator[tuple[Any, int]]:
        if self.training:
            return iter(reader)
        # iter(reader) evens the processes out by leaving images out and repeating others; each once is what counts
        reader._lazy_init()
        return ((sample["image"], sample["target"]) for sample in reader.ds)


class _LostSamples(logging.Filter):
    """Takes timm's warnings about samples that it leaves out off the log and keeps them for the run's own account."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[Problem] = []
        self.number = 0

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if not message.startswith("Handling webdataset error"):
            return True
        reason = message.removeprefix("Handling webdataset error (").removesuffix("). Ignoring.")
        self.problems.append(Problem(f"a sample near number {self.number}", reason))
        return False

    def take(self) -> list[Problem]:
        problems, self.problems = self.problems, []
        return problems


class OpenedSplit(NamedTuple):
    """A timm data set of one split, its class names, None where the source does not say, and whether it is a stream."""

    dataset: Any
    class_to_idx: dict[str, int] | None
    stream: bool

    def samples(
        self, transform: Transform, config: DataConfig, *, rank: int, training: bool
    ) -> ImageSamples | StreamSamples:
        """Its images through a transform, PIL image to uint8 (channels, height, width)."""
        if self.stream:
            return StreamSamples(self.dataset, transform, seed=config.seed, rank=rank, training=training)
        mode = config.input_img_mode
        return ImageSamples(self.dataset, transform, seed=config.seed, training=training, mode=mode)


def open_split(config: DataConfig, *, training: bool, class_to_idx: dict[str, int] | None = None) -> OpenedSplit:
    """Opens the training or the validation split.

    Args:
        class_to_idx: the classes of the training split, for the validation split: its folders are mapped by name.
    Raises:
        ValueError: missing or empty root or split, an empty class folder, an unknown or unreadable source, or classes
            in the validation split that the training split does not have.
    """
    split = config.train_split if training else config.val_split
    kind = config.dataset.partition("/")[0].lower() if config.dataset else ""
    if kind not in ("", "wds", "hfds", "torch"):
        raise ValueError(f"dataset must be empty, or begin with wds/, hfds/ or torch/, got {config.dataset!r}")
    if config.data_dir and not Path(config.data_dir).exists():
        raise ValueError(f"data_dir {config.data_dir}: no such folder or file")
    try:
        if not kind:
            return _open_folder(config, split, class_to_idx)
        dataset: Any = create_dataset(
            config.dataset,
            root=config.data_dir or None,
            split=split,
            is_training=training,
            class_map=config.class_map or None,  # pyright: ignore[reportArgumentType]  a file name is taken too
            batch_size=config.batch_size,
            num_samples=(config.train_num_samples if training else config.val_num_samples) if kind == "wds" else None,
            seed=config.seed,
            input_img_mode=config.input_img_mode,
            download=False,
        )
    except (RuntimeError, AssertionError, OSError, ImportError, KeyError, TypeError) as error:
        raise ValueError(f"dataset {config.dataset or config.data_dir}, split {split}: {first_line(error)}") from None
    if kind == "wds":
        names = getattr(dataset.reader, "info", {}).get("class_names")
        return OpenedSplit(dataset, {name: i for i, name in enumerate(names)} if names else None, True)
    found = getattr(dataset.reader if isinstance(dataset, ImageDataset) else dataset, "class_to_idx", None)
    return OpenedSplit(dataset, dict(found) if found else None, False)


def _open_folder(config: DataConfig, split: str, class_to_idx: dict[str, int] | None) -> OpenedSplit:
    root = find_split(config.data_dir, split)
    tars = root.is_dir() and any(root.glob("*.tar"))
    if root.is_dir() and not tars and not config.class_map:
        check_class_folder(root)

    def read(class_map: Any) -> Any:
        reader = ReaderImageInTar(str(root), class_map=class_map) if tars else None
        return ImageDataset(str(root), reader=reader, class_map=class_map, input_img_mode=config.input_img_mode)

    def classes(dataset: Any) -> dict[str, int]:
        reader: Any = dataset.reader
        return dict(reader.class_name_to_idx if tars or root.is_file() else reader.class_to_idx)

    dataset = read(config.class_map or "")
    if class_to_idx is not None and not config.class_map:
        unknown = sorted(classes(dataset).keys() - class_to_idx.keys())
        if unknown:
            raise ValueError(f"{root}: {len(unknown)} classes are not in the training split, the first: {unknown[0]}")
        if classes(dataset) != class_to_idx:
            dataset = read(class_to_idx)
    return OpenedSplit(dataset, classes(dataset), False)


def find_split(data_dir: str, split: str) -> Path:
    """The folder, NAME.tar or SET-NAME.tar of a split below `data_dir`, under its name or one of timm's synonyms.

    Raises:
        ValueError: none is there; where timm would take the whole of data_dir, this does not.
    """
    root = Path(data_dir)
    synonyms = next((names for names in SPLIT_NAMES if split in names), ())
    for name in dict.fromkeys((split, *synonyms)):
        for candidate in (root / name, root / f"{name}.tar", *sorted(root.glob(f"*-{name}.tar"))):
            if candidate.exists():
                return candidate
    tried = ", ".join(dict.fromkeys((split, *synonyms)))
    raise ValueError(f"data_dir {data_dir}: holds no split {split!r} (looked for {tried}, as a folder or a .tar)")
