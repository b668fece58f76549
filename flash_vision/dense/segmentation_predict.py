"""Label maps and pictures for images, and scores where the truth is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from flash_vision.data.class_folder import CorruptImageError
from flash_vision.dense.segmentation import SegmentationNetwork, create_segmenter
from flash_vision.dense.segmentation_classes import ClassSet, read_label_map
from flash_vision.dense.segmentation_config import SegmentationSidecar
from flash_vision.dense.segmentation_data import Pair, as_image, check_size, resize_short_side
from flash_vision.dense.segmentation_metrics import ConfusionMatrix
from flash_vision.dense.segmentation_pictures import class_shares
from flash_vision.dense.segmentation_task import resize_logits
from flash_vision.train.model_source import load_strictly, resolve_device
from flash_vision.train.predict import decode_file
from flash_vision.train.sidecar import read_beside
from flash_vision.train.validate import AmpDtype


@dataclass(kw_only=True)
class SegmentConfig:
    """A trained network and the images it shall segment.

    Args:
        images: image files, folders searched for .jpg, .jpeg and .png files, or - for one path a line on stdin.
        checkpoint: weights file (.safetensors, .pth) with the model.json of a segmentation run beside it.
        use_ema: take the averaged weights where the checkpoint holds both kinds.
        output_dir: folder to write label maps, pictures and results.json to; it is made if need be.
        labels: folder of label maps of the same names, to compare with; scores and a table per class are then printed.
        overlays: write the pictures.
        short_side: pixels of an image's shorter side; the run's when not given.
        window: (height, width) of the windows that an image is cut into; the run's when not given.
        whole_image: take images in one pass although the run had windows.
        window_overlap: least share of a window that its neighbour covers too; the run's when not given.
        device: torch device; cuda where there is one, else cpu, when empty.
        amp_dtype: autocast to this type; no autocast by default.
        skip_corrupt: list an unreadable file with its error and go on, instead of stopping there.
    """

    images: list[str] = field(default_factory=list)
    checkpoint: str = ""
    use_ema: bool = True
    output_dir: str = ""
    labels: str = ""
    overlays: bool = True
    short_side: int | None = None
    window: tuple[int, int] | None = None
    whole_image: bool = False
    window_overlap: float | None = None
    device: str = ""
    amp_dtype: AmpDtype | None = None
    skip_corrupt: bool = False

    def __post_init__(self) -> None:
        if not self.checkpoint:
            raise ValueError("checkpoint must be given")
        if not self.output_dir and not self.labels:
            raise ValueError("output_dir must be given without labels, else there is nothing to do")
        if self.labels and not Path(self.labels).is_dir():
            raise ValueError(f"labels {self.labels}: no such folder")
        if self.short_side is not None and self.short_side < 1:
            raise ValueError(f"short_side must be at least 1, got {self.short_side}")
        if self.whole_image and self.window:
            raise ValueError(f"whole_image must be false with window, got {self.window}")


@dataclass(frozen=True, kw_only=True)
class LoadedSegmenter:
    """A network with its weights, in evaluation mode, and what its model.json says."""

    model: SegmentationNetwork
    sidecar: SegmentationSidecar


@dataclass(frozen=True, kw_only=True)
class Segmented:
    """One image and its classes (H, W), at the image's own size; both None where `error` says why."""

    file: str
    image: Image.Image | None = None
    labels: NDArray[Any] | None = None
    error: str | None = None


def load_segmenter(checkpoint: str, *, use_ema: bool = True, windows: dict[str, Any] | None = None) -> LoadedSegmenter:
    """Builds the network that model.json beside the weights describes and loads them; nothing in a file is executed.

    Args:
        windows: fields of `SegmentationSidecar` about windows and short_side to replace.
    Raises:
        ValueError: no such file, a model.json of something else, or weights of another network.
    """
    sidecar = dataclasses.replace(read_beside(SegmentationSidecar, checkpoint), **(windows or {}))
    model = create_segmenter(
        sidecar.model,
        sidecar.class_set.num_classes,
        decoder=sidecar.decoder,
        decoder_kwargs=sidecar.decoder_kwargs,
        backbone_kwargs=sidecar.model_kwargs,
        pyramid_channels=sidecar.pyramid_channels,
        windows=sidecar.windows,
    )
    load_strictly(model, checkpoint, use_ema=use_ema, what="the network in its model.json")
    return LoadedSegmenter(model=model.eval(), sidecar=sidecar)


def load_configured(config: SegmentConfig) -> LoadedSegmenter:
    """The network of the configuration, with its windows and short side where they are given.

    Raises:
        ValueError: see `load_segmenter`; or an overlap of windows where there are none.
    """
    given = {"short_side": config.short_side, "window": config.window, "window_overlap": config.window_overlap}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if config.whole_image:
        changes["window"] = None
    loaded = load_segmenter(config.checkpoint, use_ema=config.use_ema, windows=changes)
    if config.window_overlap is not None and loaded.sidecar.window is None:
        raise ValueError(f"window_overlap must be left out without windows, got {config.window_overlap}")
    return loaded


def segment(config: SegmentConfig, loaded: LoadedSegmenter, files: Sequence[str]) -> Iterator[Segmented]:
    """The classes of each image, in the order of the files.

    Raises:
        ValueError: an image that cannot be read (unless skip_corrupt); the message names it.
    """
    device = resolve_device(config.device)
    model = loaded.model.to(device)
    for file in tqdm(files, unit="image", disable=None, leave=False):
        try:
            image = decode_file(file)
        except CorruptImageError as error:
            if not config.skip_corrupt:
                raise ValueError(f"{file}: {error}") from None
            yield Segmented(file=file, error=str(error))
            continue
        with torch.autocast(
            device.type, getattr(torch, config.amp_dtype or "bfloat16"), enabled=bool(config.amp_dtype)
        ):
            labels = segment_image(model, image, loaded.sidecar, device=device)
        yield Segmented(file=file, image=image, labels=labels)


@torch.inference_mode()
def segment_image(
    model: SegmentationNetwork, image: Image.Image, sidecar: SegmentationSidecar, *, device: torch.device
) -> NDArray[Any]:
    """Classes (H, W) of an RGB picture, at its own size.

    Raises:
        ValueError: the logits are not finite.
    """
    pixels = resize_short_side(as_image(image).as_subclass(torch.Tensor), sidecar.short_side).to(device).float()
    mean, std = (torch.tensor(value, device=device).mul(255).view(-1, 1, 1) for value in (sidecar.mean, sidecar.std))
    (logits,) = model([(pixels - mean) / std])
    resized = resize_logits(logits[None].float(), image.size[::-1])[0]
    if not resized.isfinite().all():
        raise ValueError("the model's logits are not finite; try without amp_dtype")
    return resized.argmax(0).to(torch.int16).cpu().numpy()


class Comparison:
    """Predictions beside the label maps of a folder.

    Args:
        folder: of PNG files with the names of the images.
        files: the images that will be compared.
    Raises:
        ValueError: an image without a label map.
    """

    def __init__(self, folder: str, classes: ClassSet, files: Sequence[str]) -> None:
        self.folder, self.classes = Path(folder), classes
        missing = [file for file in files if not self.path(file).is_file()]
        if missing:
            raise ValueError(
                f"{missing[0]}: image without a label map {self.path(missing[0])} ({len(missing)} of {len(files)})"
            )
        self.confusion = ConfusionMatrix(classes.num_classes)
        self.images = 0

    def path(self, file: str) -> Path:
        """The label map of an image."""
        return self.folder / f"{Path(file).stem}.png"

    def add(self, result: Segmented) -> None:
        """Counts one image.

        Raises:
            CorruptImageError: its label map does not decode.
            ValueError: its label map holds what is no class, or is of another size.
        """
        assert result.image is not None
        path = self.path(result.file)
        truth = read_label_map(path, self.classes)
        check_size(result.image, truth, Pair(Path(result.file), path))
        self.confusion.update(torch.from_numpy(result.labels), torch.from_numpy(truth))
        self.images += 1


def as_record(result: Segmented, classes: ClassSet) -> dict[str, Any]:
    """What results.json says of an image: file and share of each class in [0, 1], or the error."""
    if result.labels is None:
        return {"file": result.file, "error": result.error}
    return {"file": result.file, "shares": class_shares(np.asarray(result.labels), classes)}
