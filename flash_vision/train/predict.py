"""Classes and confidences for unlabelled images: files, folders, or a list of paths on stdin."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data.loader import create_loader
from timm.models import get_model_traits
from timm.utils.misc import natural_key
from torch.utils.data import Dataset
from tqdm import tqdm

from flash_vision.data.class_folder import CorruptImageError, decode, is_image_name
from flash_vision.train.model_source import LoadedModel, ModelSource, at_size, load_model, preprocessing, resolve_device
from flash_vision.train.validate import AmpDtype, forward


@dataclass(kw_only=True)
class PredictConfig(ModelSource):
    """A model and the images it shall name.

    Args:
        images: image files, folders searched for .jpg, .jpeg and .png files, or - for one path a line on stdin.
        topk: classes listed for each image.
        class_names: file with a class name a line; model.json's or ImageNet's names by default.
        img_size: square input side in pixels; the model's by default.
        crop_pct: share of the resized image that the centre crop keeps; the model's by default.
        batch_size: images a step.
        workers: loader processes; 0 loads in the main process.
        device: torch device; cuda where there is one, else cpu, when empty.
        amp_dtype: autocast to this type; no autocast by default.
        skip_corrupt: list an unreadable image with its error and go on, instead of stopping there.
        json_file: JSON file to write, - for stdout.
        csv_file: CSV file to write, - for stdout.
        picture: PNG file to write, a grid of the images with class and confidence.
        max_pictured: images in the picture, the first ones.
    """

    images: list[str] = field(default_factory=list)
    topk: int = 5
    class_names: str = ""
    img_size: int | None = None
    crop_pct: float | None = None
    batch_size: int = 32
    workers: int = 0
    device: str = ""
    amp_dtype: AmpDtype | None = None
    skip_corrupt: bool = False
    json_file: str = ""
    csv_file: str = ""
    picture: str = ""
    max_pictured: int = 64

    def __post_init__(self) -> None:
        for name, least in (("topk", 1), ("batch_size", 1), ("workers", 0), ("max_pictured", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if self.img_size is not None and self.img_size < 1:
            raise ValueError(f"img_size must be >= 1, got {self.img_size}")
        if self.crop_pct is not None and not 0 < self.crop_pct <= 1:
            raise ValueError(f"crop_pct must be in (0, 1], got {self.crop_pct}")
        for name in ("json_file", "csv_file", "picture"):
            folder = Path(getattr(self, name)).parent
            if not folder.is_dir():
                raise ValueError(f"{name}: there is no folder {folder}")
        if self.picture and not self.picture.endswith(".png"):
            raise ValueError(f"picture must end in .png, got {self.picture!r}")
        if self.json_file == "-" and self.csv_file == "-":
            raise ValueError("json_file, csv_file: only one of them can be - (stdout)")


@dataclass(frozen=True, kw_only=True)
class Guess:
    """One class for one image.

    Args:
        index: class index.
        name: class name.
        confidence: softmax of the logits, fraction in [0, 1].
    """

    index: int
    name: str
    confidence: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the model says of one image; `guesses` best first, empty where `error` says why there is none."""

    file: str
    guesses: tuple[Guess, ...]
    error: str | None = None


class _Files(Dataset[tuple[Any, int]]):
    """Images by path with their index as target; ~index, and a black image, stands for one that does not decode."""

    def __init__(self, files: list[str], *, mode: str) -> None:
        self.files = files
        self.mode = mode
        self.transform: Any = None  # set by timm's create_loader

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        try:
            image = decode_file(self.files[index], mode=self.mode)
        except CorruptImageError:
            return self.transform(Image.new(self.mode, (8, 8))), ~index
        return self.transform(image), index


def decode_file(file: str | Path, *, mode: str = "RGB") -> Image.Image:
    """Decodes an image file in full; CorruptImageError says why it cannot be."""
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise CorruptImageError(f"cannot be read ({error.strerror})") from None
    return decode(content, mode=mode)


def predict(config: PredictConfig) -> list[Prediction]:
    """The `topk` classes of each image, in the order the images were given.

    Raises:
        ValueError: model, class names or image that cannot be read; the message names it.
    """
    files = find_images(config.images)
    device = resolve_device(config.device)
    loaded = load_model(config)
    names = _names(config, loaded)
    model = at_size(loaded, config.img_size).to(device)
    data_config = preprocessing(loaded, model, {"img_size": config.img_size, "crop_pct": config.crop_pct})
    mode = "RGB" if get_model_traits(loaded.model).get("in_chans", 3) == 3 else "L"
    loader = create_loader(
        _Files(files, mode=mode),  # pyright: ignore[reportArgumentType]
        input_size=data_config["input_size"],
        batch_size=config.batch_size,
        interpolation=data_config["interpolation"],
        mean=data_config["mean"],
        std=data_config["std"],
        crop_pct=data_config["crop_pct"],
        crop_mode=data_config["crop_mode"],
        num_workers=config.workers,
        pin_memory=device.type == "cuda",
        persistent_workers=False,
        device=device,
    )
    predictions: list[Prediction] = []
    with torch.inference_mode(), tqdm(total=len(files), unit="image", disable=None, leave=False) as bar:
        for images, indices in loader:
            confidences = forward(model, images, config.amp_dtype).float().softmax(dim=1)
            top = confidences.topk(min(config.topk, confidences.shape[1]), dim=1)
            rows = zip(indices.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
            predictions += [
                _prediction(files, names, index, classes, values, skip_corrupt=config.skip_corrupt)
                for index, classes, values in rows
            ]
            bar.update(len(indices))
    return predictions


def find_images(inputs: list[str]) -> list[str]:
    """The image files that `inputs` stand for: files as they are, folders searched, - replaced by stdin's lines.

    Raises:
        ValueError: a path that is not there, a folder without an image, or nothing at all.
    """
    paths: list[str] = []
    for entry in inputs:
        paths += [line for line in map(str.strip, sys.stdin) if line] if entry == "-" else [entry]
    files: list[str] = []
    for path in paths:
        if Path(path).is_dir():
            found = [str(file) for file in Path(path).rglob("*") if is_image_name(file) and file.is_file()]
            if not found:
                raise ValueError(f"{path}: folder without an image (.jpg, .jpeg or .png)")
            files += sorted(found, key=natural_key)
        elif Path(path).is_file():
            files.append(path)
        else:
            raise ValueError(f"{path}: no such file")
    if not files:
        raise ValueError("images: no path given")
    return files


def as_rows(predictions: list[Prediction], *, topk: int) -> list[dict[str, Any]]:
    """Flat rows for CSV: file, class and confidence of each guess, error; empty fields where there is no guess."""
    rows = []
    for prediction in predictions:
        row: dict[str, Any] = {"file": prediction.file}
        for rank in range(topk):
            guess = prediction.guesses[rank] if rank < len(prediction.guesses) else None
            row[f"class{rank + 1}"] = guess.name if guess else None
            row[f"confidence{rank + 1}"] = guess.confidence if guess else None
        row["error"] = prediction.error
        rows.append(row)
    return rows


def _prediction(
    files: list[str], names: tuple[str, ...], index: int, classes: list[int], values: list[float], *, skip_corrupt: bool
) -> Prediction:
    if index < 0:
        file = files[~index]
        try:
            decode_file(file)
            reason = "cannot be read"
        except CorruptImageError as error:
            reason = str(error)
        if not skip_corrupt:
            raise ValueError(f"{file}: {reason}")
        return Prediction(file=file, guesses=(), error=reason)
    if values[0] != values[0]:  # NaN
        raise ValueError(f"{files[index]}: the model's logits are not finite; try without amp_dtype")
    guesses = tuple(
        Guess(index=number, name=names[number], confidence=value) for number, value in zip(classes, values, strict=True)
    )
    return Prediction(file=files[index], guesses=guesses)


def _names(config: PredictConfig, loaded: LoadedModel) -> tuple[str, ...]:
    if not config.class_names:
        return loaded.class_names or tuple(str(index) for index in range(loaded.num_classes))
    path = Path(config.class_names)
    if not path.is_file():
        raise ValueError(f"class_names {path}: no such file")
    names = tuple(path.read_text(encoding="utf-8").splitlines())
    if len(names) != loaded.num_classes:
        raise ValueError(f"class_names {path}: has {len(names)} lines, the model has {loaded.num_classes} classes")
    return names
