"""The images of a grid: a fixed choice from tar files, with a part of the training images held out for choosing."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from PIL import Image
from timm.data.readers.img_extensions import is_img_extension

# timm's readers pass these over; they are re-encoded without loss
RE_ENCODED = (".webp", ".bmp")


@dataclass(frozen=True, kw_only=True)
class Images:
    """Which images runs are trained and evaluated on.

    Args:
        train: patterns of tar files of SPLIT/CLASS/IMAGE or CLASS/IMAGE, below the data root.
        classes: number of classes.
        validation_per_class: training images of each class that are held out, those whose names hash lowest; 0 for
            none, then runs are evaluated on `test`.
        train_per_class: of the other images of each class, those that hash lowest; 0 for all.
        test: patterns of the test images' tar files; given exactly where nothing is held out, so that no run that
            something is chosen by ever sees them.
    Raises:
        ValueError: a number out of range, or test images beside held-out ones.
    """

    train: Sequence[str]
    classes: int
    validation_per_class: int = 0
    train_per_class: int = 0
    test: Sequence[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, least in (("classes", 2), ("validation_per_class", 0), ("train_per_class", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"images: {name} must be at least {least}, got {getattr(self, name)}")
        if not self.train:
            raise ValueError("images: train must name a tar file, got none")
        if bool(self.test) == bool(self.validation_per_class):
            raise ValueError(
                "images: test must be given where validation_per_class is 0 and only there, "
                f"got {list(self.test)} and {self.validation_per_class}"
            )

    @property
    def evaluated_on(self) -> str:
        """The split that runs are evaluated on: validation or test."""
        return "validation" if self.validation_per_class else "test"


def prepare_images(images: Images, data_root: str | Path, output: str | Path) -> Path:
    """Makes a folder with train.tar and validation.tar or test.tar below `output`, unless it is there.

    Which images are taken depends on their names alone: neither on the order in the tar files nor on a generator. Files
    are copied as they are, except that those of a kind that timm's readers pass over become PNG.

    Returns:
        The folder, as tools/train.py takes it for --data_dir.
    Raises:
        ValueError: no such files, a class with too few images, or another number of classes.
    """
    sources = _files(images.train, data_root)
    tests = _files(images.test, data_root)
    seen = [(path.name, path.stat().st_size) for path in (*sources, *tests)]
    digest = hashlib.sha256(repr((sorted(asdict(images).items()), seen)).encode()).hexdigest()
    folder = Path(output) / digest[:12]
    if folder.is_dir():
        return folder
    training = _by_class(_members(sources))
    splits = _split(images, training)
    if tests:
        splits["test"] = _members(tests)
        unknown = sorted(_by_class(splits["test"]).keys() ^ training.keys())
        if unknown:
            raise ValueError(f"images: class {unknown[0]} is in one of the training and the test files only")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        written = Path(temporary) / folder.name
        written.mkdir()
        for split, names in splits.items():
            _write(written / f"{split}.tar", tests if split == "test" else sources, set(names))
        try:
            os.replace(written, folder)
        except OSError:
            # Another grid may have made the same images meanwhile: the name is a hash of what they are made of.
            if not folder.is_dir():
                raise
    return folder


def _files(patterns: Sequence[str], data_root: str | Path) -> list[Path]:
    found: list[Path] = []
    for pattern in patterns:
        matches = sorted(Path(data_root).glob(pattern))
        if not matches:
            raise ValueError(f"data_root {data_root}: no file {pattern}")
        found += matches
    return found


def _name(member: tarfile.TarInfo) -> str:
    """CLASS/IMAGE of a member."""
    return "/".join(Path(member.name).parts[-2:])


def _is_image(name: str) -> bool:
    suffix = Path(name).suffix.lower()
    return is_img_extension(suffix) or suffix in RE_ENCODED


def _members(sources: Sequence[Path]) -> list[str]:
    names: list[str] = []
    for path in sources:
        with tarfile.open(path) as archive:
            names += [_name(member) for member in archive if member.isfile() and _is_image(member.name)]
    if len(set(names)) != len(names):
        raise ValueError(f"{sources[0]}: two images have the same class and name")
    return names


def _by_class(names: Sequence[str]) -> dict[str, list[str]]:
    """The images of each class, in the order of the hashes of their names."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        found[name.partition("/")[0]].append(name)
    return {label: sorted(own, key=lambda n: hashlib.sha256(n.encode()).digest()) for label, own in found.items()}


def _split(images: Images, classes: dict[str, list[str]]) -> dict[str, list[str]]:
    if len(classes) != images.classes:
        raise ValueError(f"images: classes must be the {len(classes)} of the training files, got {images.classes}")
    held_out, needed = images.validation_per_class, images.validation_per_class + max(images.train_per_class, 1)
    splits: dict[str, list[str]] = {"train": []} | ({"validation": []} if held_out else {})
    for label, own in sorted(classes.items()):
        if len(own) < needed:
            raise ValueError(f"images: class {label} must have at least {needed} training images, has {len(own)}")
        if held_out:
            splits["validation"] += own[:held_out]
        splits["train"] += own[held_out : needed if images.train_per_class else None]
    return splits


def _write(path: Path, sources: Sequence[Path], names: set[str]) -> None:
    with tarfile.open(path, "w") as target:
        for source in sources:
            with tarfile.open(source) as archive:
                for member in archive:
                    name = _name(member)
                    if not member.isfile() or name not in names:
                        continue
                    file = archive.extractfile(member)
                    assert file is not None
                    content = file.read()
                    if Path(name).suffix.lower() in RE_ENCODED:
                        name, content = str(Path(name).with_suffix(".png")), _as_png(content)
                    entry = tarfile.TarInfo(name)
                    entry.size = len(content)
                    target.addfile(entry, io.BytesIO(content))


def _as_png(content: bytes) -> bytes:
    target = io.BytesIO()
    with Image.open(io.BytesIO(content)) as image:
        image.save(target, "png")
    return target.getvalue()
