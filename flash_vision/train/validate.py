"""Accuracy of one model on one labelled data set, over input sizes and crops; agrees with timm's validate.py.

The preprocessing, the loader and the test sizes are timm's. What differs: nothing is rounded or averaged over batches
(whole images are counted), a corrupt image is an error where timm silently counts its neighbour twice, and logits that
are not finite are an error.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from timm.data.loader import create_loader
from timm.data.real_labels import RealLabelsImagenet
from timm.models import get_model_traits
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from flash_vision.train.labelled import ImageSource, WholeImages, open_images, real_labels_for
from flash_vision.train.model_source import (
    ModelSource,
    at_size,
    first_line,
    load_model,
    preprocessing,
    resolve_device,
)
from flash_vision.train.sidecar import Interpolation

AmpDtype = Literal["bfloat16", "float16"]


@dataclass(kw_only=True)
class ValidateConfig(ImageSource, ModelSource):
    """One validation: a model, a labelled data set, and the sizes and crops to try.

    Args:
        img_size: square input side in pixels, or a list of them for a sweep, for example '[160,224,320,512]'; the
            model's test size by default.
        crop_pct: share of the resized image that the centre crop keeps, or a list of them; the model's by default.
        crop_mode: how an image becomes square; the model's by default.
        interpolation: resize filter; the model's by default.
        mean: per channel mean of images in [0, 1]; the model's by default.
        std: per channel standard deviation of images in [0, 1]; the model's by default.
        use_train_size: take the training size and crop where the model has others for testing.
        batch_size: images a step.
        workers: loader processes; 0 loads in the main process.
        device: torch device; cuda where there is one, else cpu, when empty.
        amp_dtype: autocast to this type; no autocast by default.
        channels_last: channels_last memory format.
        torchcompile: torch.compile backend, for example inductor; not compiled by default.
        real_labels: ReaL labels (arXiv 2006.07159), the file real.json; for the ImageNet validation set.
        output_dir: folder for results.json, results.csv, per_class.csv and predictions.csv; none written by default.
    """

    img_size: int | list[int] | None = None
    crop_pct: float | list[float] | None = None
    crop_mode: Literal["center", "squash", "border"] | None = None
    interpolation: Interpolation | None = None
    mean: list[float] | None = None
    std: list[float] | None = None
    use_train_size: bool = False
    batch_size: int = 256
    workers: int = 4
    device: str = ""
    amp_dtype: AmpDtype | None = None
    channels_last: bool = False
    torchcompile: str | None = None
    real_labels: str = ""
    output_dir: str = ""

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("workers", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if any(size < 1 for size in _as_list(self.img_size) if size is not None):
            raise ValueError(f"img_size must be >= 1, got {self.img_size}")
        if any(not 0 < crop <= 1 for crop in _as_list(self.crop_pct) if crop is not None):
            raise ValueError(f"crop_pct must be in (0, 1], got {self.crop_pct}")


@dataclass(kw_only=True)
class Evaluation:
    """The outcome for one input size and crop. Per-image lists are in the order of the data set.

    Args:
        img_size: (height, width) in pixels.
        crop_pct: share of the resized image that the crop kept.
        interpolation: resize filter.
        targets: true class of each image.
        predicted: class with the largest logit of each image.
        in_top5: whether the true class is among the five largest logits (fewer where there are fewer classes).
        loss: mean cross-entropy over the images, in nats.
        real: fraction in [0, 1] of images whose first, and one of whose five first, classes is a ReaL label.
    """

    img_size: tuple[int, int]
    crop_pct: float
    interpolation: str
    targets: list[int] = field(default_factory=list)
    predicted: list[int] = field(default_factory=list)
    in_top5: list[bool] = field(default_factory=list)
    loss: float = 0.0
    real: tuple[float, float] | None = None

    @property
    def num_images(self) -> int:
        return len(self.targets)

    @property
    def num_correct(self) -> tuple[int, int]:
        """Images right at the first and within the first five guesses."""
        first = sum(target == guess for target, guess in zip(self.targets, self.predicted, strict=True))
        return first, sum(self.in_top5)

    def summary(self) -> dict[str, Any]:
        """One row of results: percentages as timm prints them, and the counts they come from."""
        top1, top5 = self.num_correct
        row = {
            "img_size": self.img_size[-1] if self.img_size[0] == self.img_size[1] else list(self.img_size),
            "crop_pct": self.crop_pct,
            "interpolation": self.interpolation,
            "images": self.num_images,
            "top1": 100 * top1 / self.num_images,
            "top5": 100 * top5 / self.num_images,
            "top1_correct": top1,
            "top5_correct": top5,
            "loss": self.loss,
        }
        if self.real is not None:
            row |= {"real_top1": 100 * self.real[0], "real_top5": 100 * self.real[1]}
        return row

    def per_class(self, names: list[str]) -> list[dict[str, Any]]:
        """A row for each class: images, right ones, recall and precision in percent (None where undefined)."""
        rows = [
            {"class": name, "index": i, "images": 0, "top1_correct": 0, "top5_correct": 0, "predicted": 0}
            for i, name in enumerate(names)
        ]
        for target, guess, in_top5 in zip(self.targets, self.predicted, self.in_top5, strict=True):
            rows[target]["images"] += 1
            rows[target]["top1_correct"] += target == guess
            rows[target]["top5_correct"] += in_top5
            rows[guess]["predicted"] += 1
        for row in rows:
            row["top1"] = 100 * row["top1_correct"] / row["images"] if row["images"] else None
            row["top5"] = 100 * row["top5_correct"] / row["images"] if row["images"] else None
            row["precision"] = 100 * row["top1_correct"] / row["predicted"] if row["predicted"] else None
        return rows


@dataclass(kw_only=True)
class Report:
    """All evaluations of one run, with the names that the tables need; `files` is None for a stream."""

    model: str
    num_parameters: int
    class_names: list[str]
    files: list[str] | None
    evaluations: list[Evaluation]


def validate(config: ValidateConfig) -> Report:
    """Evaluates the model at every size and crop asked for, with a progress bar on stderr where that is a terminal.

    Raises:
        ValueError: a model, data set, class count, size or image that does not fit; the message names it.
    """
    device = resolve_device(config.device)
    loaded = load_model(config)
    in_chans = get_model_traits(loaded.model).get("in_chans", 3)
    dataset, class_names = open_images(config, loaded, in_chans=in_chans, batch_size=config.batch_size)
    if config.real_labels:
        real_labels_for(dataset, config.real_labels, num_classes=loaded.num_classes)  # fails before any work is done
    evaluations = []
    for img_size in _as_list(config.img_size):
        model = at_size(loaded, img_size).to(device)
        model = model.to(memory_format=torch.channels_last) if config.channels_last else model
        for crop_pct in _as_list(config.crop_pct):
            names = ("crop_mode", "interpolation", "mean", "std")
            given = {name: getattr(config, name) for name in names} | {"img_size": img_size, "crop_pct": crop_pct}
            data_config = preprocessing(loaded, model, given, use_test_size=not config.use_train_size)
            real = real_labels_for(dataset, config.real_labels, num_classes=loaded.num_classes)
            evaluations.append(
                _evaluate(_compiled(model, config.torchcompile), dataset, data_config, config, device, real)
            )
    return Report(
        model=loaded.name,
        num_parameters=sum(parameter.numel() for parameter in loaded.model.parameters()),
        class_names=class_names,
        files=dataset.filenames() if isinstance(dataset, WholeImages) else None,
        evaluations=evaluations,
    )


def _compiled(model: nn.Module, backend: str | None) -> nn.Module:
    if backend is None:
        return model
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise ValueError(f"torchcompile: unknown backend {backend!r}, not one of {known}")
    compiled = torch.compile(model, backend=backend)
    assert isinstance(compiled, nn.Module)
    return compiled


def _evaluate(
    model: nn.Module,
    dataset: Any,
    data_config: dict[str, Any],
    config: ValidateConfig,
    device: torch.device,
    real: RealLabelsImagenet | None,
) -> Evaluation:
    loader = create_loader(
        dataset,
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
    result = Evaluation(
        img_size=tuple(data_config["input_size"][1:]),
        crop_pct=data_config["crop_pct"],
        interpolation=data_config["interpolation"],
    )
    total_loss = 0.0
    model.eval()
    with torch.inference_mode(), tqdm(total=len(dataset), unit="image", disable=None, leave=False) as bar:
        bar.set_description(f"{result.img_size[0]} px")
        for images, targets in _named_errors(loader):
            if config.channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            logits = forward(model, images, config.amp_dtype)
            total_loss += _count(result, logits, targets)
            if real is not None:
                real.add_result(logits)
            bar.update(len(targets))
    _check_count(result.num_images, dataset)
    result.loss = total_loss / result.num_images
    if real is not None:
        first, within5 = (real.get_accuracy(k) for k in (min(real.topk), max(real.topk)))
        result.real = first / 100, within5 / 100  # pyright: ignore[reportOperatorIssue]
    return result


def forward(model: nn.Module, images: Tensor, amp_dtype: AmpDtype | None) -> Tensor:
    """Logits (B, num_classes) of images (B, channels, height, width), under autocast to `amp_dtype` where given.

    Raises:
        ValueError: the model cannot take that size, or the device has too little memory for the batch.
    """
    context = (
        torch.autocast(images.device.type, dtype=getattr(torch, amp_dtype)) if amp_dtype else contextlib.nullcontext()
    )
    try:
        with context:
            return model(images)
    except (AssertionError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise ValueError(f"batch_size {len(images)}: out of device memory") from None
        size = "x".join(map(str, images.shape[1:]))
        raise ValueError(f"the model cannot take a {size} image ({first_line(error)})") from error


def _count(result: Evaluation, logits: Tensor, targets: Tensor) -> float:
    """Adds one batch to `result` and returns its summed cross-entropy."""
    if not torch.isfinite(logits).all():
        bad = int((~torch.isfinite(logits).all(dim=1)).nonzero()[0])
        raise ValueError(f"logits of image {result.num_images + bad} are not finite; try without amp_dtype")
    if not 0 <= int(targets.min()) <= int(targets.max()) < logits.shape[1]:
        raise ValueError(f"the data has labels up to {int(targets.max())}, the model has {logits.shape[1]} classes")
    guesses = logits.topk(min(5, logits.shape[1]), dim=1).indices
    result.targets += targets.tolist()
    result.predicted += guesses[:, 0].tolist()
    result.in_top5 += (guesses == targets[:, None]).any(dim=1).tolist()
    return float(F.cross_entropy(logits.float(), targets, reduction="sum"))


def _named_errors(loader: Any):
    """The loader's batches; a corrupt image in a worker process is one line again, without the worker's traceback."""
    try:
        yield from loader
    except ValueError as error:
        raise ValueError(str(error).strip().splitlines()[-1].removeprefix("ValueError: ")) from None


def _check_count(num_images: int, dataset: Any) -> None:
    """A stream that skips what it cannot read must not pass for a whole data set."""
    if not num_images:
        raise ValueError("the data set gave no image")
    expected = getattr(getattr(dataset, "reader", None), "num_samples", None) or num_images
    if num_images != expected:
        raise ValueError(f"{num_images} of {expected} images were read; the others are named in the warnings above")


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
