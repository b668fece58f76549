"""A segmentation run, put together from its configuration."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from flash_vision.dense.features import per_channel
from flash_vision.dense.segmentation import SegmentationLoss, SegmentationNetwork, create_segmenter
from flash_vision.dense.segmentation_config import SegmentationConfig, SegmentationSidecar
from flash_vision.dense.segmentation_data import JointAugment, Pair, PairSamples, check_pairs, find_pairs
from flash_vision.dense.segmentation_task import SegmentationTask
from flash_vision.train.config import resolve_batch_size
from flash_vision.train.data import Batch, EvalLoader, TrainLoader, collate
from flash_vision.train.launch import make_loop, open_folder, run_task
from flash_vision.train.loop import Loop
from flash_vision.train.parallel import Processes
from flash_vision.train.seeding import set_seed
from flash_vision.train.signals import StopRequest


def train_segmentation(config: SegmentationConfig) -> int:
    """Trains as configured, from where the run folder stands; see `run_task`."""
    return run_task(config, build)


def build(config: SegmentationConfig, processes: Processes, stop: StopRequest) -> Loop:
    """Checks everything that can be known beforehand, claims the run folder, and makes the loop.

    Raises:
        ValueError: a mistake in the configuration, the data or the run folder; one line that names it.
    """
    folder = open_folder(config, processes)
    batch_size = resolve_batch_size(config, processes.world_size)
    if config.decoder == "upernet" and batch_size < 2:
        raise ValueError(f"batch_size must be at least 2 with decoder upernet (BatchNorm on 1 x 1), got {batch_size}")
    classes = config.class_set
    pairs = {split: find_pairs(config.data_dir, split) for split in (config.train_split, config.val_split)}
    notes = _check_labels(config, pairs, processes) if config.check_labels else {}

    set_seed("weights", config.seed)
    model = create_model(config)
    mean = per_channel("mean", config.mean, model.features.mean)
    std = per_channel("std", config.std, model.features.std)
    dtype = getattr(torch, config.model_dtype)
    model.to(device=processes.device, dtype=dtype)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    augment = JointAugment(
        short_side=config.short_side,
        scale=config.scale,
        crop_size=config.crop_size,
        hflip=config.hflip,
        photometric=config.photometric,
        fill=tuple(255 * value for value in mean),
    )
    samples = partial(PairSamples, classes=classes, short_side=config.short_side, seed=config.seed)
    prepare = Prepare(mean, std, device=processes.device, dtype=dtype, channels_last=config.channels_last)
    loader = TrainLoader(
        samples(pairs[config.train_split], augment=augment), config, batch_size=batch_size, processes=processes,
        prepare=prepare, collate=partial(collate, inputs=torch.stack, targets=torch.stack),
    )  # fmt: skip
    val_loader = EvalLoader(
        samples(pairs[config.val_split], augment=None), config,
        batch_size=config.validation_batch_size or batch_size, processes=processes, prepare=prepare,
        collate=partial(collate, inputs=list, targets=list),
    )  # fmt: skip
    criterion = SegmentationLoss(smoothing=config.smoothing, dice_weight=config.dice_weight)
    task = SegmentationTask(
        model, criterion, names=classes.names, total=processes.sum, device=processes.device, dtype=dtype
    )
    return make_loop(
        config, task, loader, val_loader, eval_metric=config.eval_metric, curves=("miou", "pixel_accuracy"),
        sidecar=make_sidecar(config, mean, std), folder=folder, processes=processes, stop=stop, notes=notes,
    )  # fmt: skip


def create_model(config: SegmentationConfig) -> SegmentationNetwork:
    """The network, with the backbone's weights where the configuration names some.

    Raises:
        ValueError: see `create_segmenter`; or the activations cannot be recomputed.
    """
    model = create_segmenter(
        config.model,
        config.class_set.num_classes,
        decoder=config.decoder,
        decoder_kwargs=config.decoder_kwargs,
        backbone_kwargs=config.backbone_kwargs,
        pyramid_channels=config.pyramid_channels,
        pretrained=config.pretrained,
        pretrained_path=config.pretrained_path,
        windows=config.windows,
    )
    if config.grad_checkpointing:
        model.set_grad_checkpointing(True)
    return model


class Prepare:
    """Moves a batch to the device and normalises its images there, stacked ones or a list of several sizes."""

    def __init__(
        self,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        *,
        device: torch.device,
        dtype: torch.dtype,
        channels_last: bool = False,
    ) -> None:
        self.device, self.dtype = device, dtype
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.mean, self.std = (
            torch.tensor(value, device=device, dtype=dtype).mul(255).view(-1, 1, 1) for value in (mean, std)
        )

    def __call__(self, batch: Batch, epoch: int) -> Batch:
        if isinstance(batch.inputs, list):
            targets = [labels.to(self.device, non_blocking=True) for labels in batch.targets]
            return batch._replace(inputs=[self.normalised(image) for image in batch.inputs], targets=targets)
        images = self.normalised(batch.inputs).contiguous(memory_format=self.memory_format)
        return batch._replace(inputs=images, targets=batch.targets.to(self.device, non_blocking=True))

    def normalised(self, images: torch.Tensor) -> torch.Tensor:
        """(..., 3, H, W) uint8 to the device, with the mean taken off and divided by the standard deviation."""
        return images.to(self.device, non_blocking=True).to(self.dtype).sub_(self.mean).div_(self.std)


def make_sidecar(config: SegmentationConfig, mean: tuple[float, ...], std: tuple[float, ...]) -> SegmentationSidecar:
    """What model.json says about the weights."""
    return SegmentationSidecar(
        task="segmentation",
        model=config.model,
        model_kwargs=config.backbone_kwargs,
        decoder=config.decoder,
        decoder_kwargs=config.decoder_kwargs,
        pyramid_channels=config.pyramid_channels,
        classes=config.class_set.as_dict(),
        mean=mean,
        std=std,
        short_side=config.short_side,
        window=config.window,
        window_overlap=config.window_overlap,
    )


def _check_labels(
    config: SegmentationConfig, pairs: dict[str, list[Pair]], processes: Processes
) -> dict[str, dict[str, int]]:
    """Checks the label maps of each split, every process a share of them; counts to report.

    Raises:
        ValueError: label maps are wrong; the first is named, and how many there are.
    """
    notes: dict[str, dict[str, int]] = {}
    for split, found in pairs.items():
        share = found[processes.rank :: processes.world_size]
        parts = processes.gather(check_pairs(share, config.class_set, threads=max(1, config.workers)))
        if wrong := [line for part in parts for line in part.wrong]:
            raise ValueError(f"{min(wrong)} ({len(wrong)} of {len(found)} label maps are wrong)")
        notes[f"{split} split"] = {"pairs": len(found)}
        if unreadable := sum(part.unreadable for part in parts):
            notes[f"{split} split"]["pairs with a file that does not decode"] = unreadable
        for name, pixels in zip(config.class_set.names, np.sum([part.pixels for part in parts], axis=0), strict=True):
            if not pixels:
                notes[f"{split} split"][f"pixels of class {name}"] = 0
    return notes
