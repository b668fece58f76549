"""Training of detectors: what the loop of `flash_vision.train` is given."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.task import TrainingTask
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flash_vision.dense.coco_data import CocoSamples, CocoSplit, read_coco
from flash_vision.dense.coco_eval import CocoEvaluator
from flash_vision.dense.detection_augment import DetectionAugment
from flash_vision.dense.detection_config import TWO_STAGE, DetectionConfig
from flash_vision.dense.detection_model import Detector, DetectorSpec, build_detector
from flash_vision.dense.features import TimmFeatures, per_channel
from flash_vision.train.config import resolve_batch_size
from flash_vision.train.data import Batch, EvalLoader, TrainLoader, collate
from flash_vision.train.launch import make_loop, open_folder, run_task
from flash_vision.train.loop import Loop
from flash_vision.train.parallel import Processes
from flash_vision.train.seeding import set_seed
from flash_vision.train.signals import StopRequest

collate_lists = partial(collate, inputs=list, targets=list)


class DetectionTask(TrainingTask):
    """Sums a detector's losses, which are logged one by one, and evaluates it by COCO's average precision.

    Args:
        model: the detector, on its device.
        val_split: ground truth of the images that are evaluated.
    """

    def __init__(self, model: Detector, val_split: CocoSplit, *, masks: bool, device: torch.device, dtype: torch.dtype):
        super().__init__(device=device, dtype=dtype, verbose=False)
        self.trainable_module: nn.Module = model
        self.val_split, self.masks = val_split, masks

    def forward(self, input: Any, target: Any) -> dict[str, Tensor]:
        """Images and targets of a batch to the loss and its parts."""
        parts: dict[str, Tensor] = self.trainable_module(input, target)
        return {"loss": torch.stack(list(parts.values())).sum(), **parts}

    def create_evaluator(self, **kwargs: Any) -> Any:
        """A `CocoEvaluator` that has seen nothing yet."""
        return CocoEvaluator(self.val_split, masks=self.masks, **kwargs)

    def prepare_distributed(self, device_ids: list[int] | None = None, **ddp_kwargs: Any) -> DetectionTask:
        """Wraps the detector in DDP."""
        self.trainable_module = DistributedDataParallel(self.trainable_module, device_ids=device_ids, **ddp_kwargs)
        return self

    def compile(self, backend: str = "inductor", mode: str | None = None, **compile_kwargs: Any) -> None:
        """Compiles backbone and pyramid in place, with a graph for each size; shapes in the heads depend on data."""
        _compile(self.trainable_module, backend)

    def compile_ema(self, backend: str = "inductor", mode: str | None = None, **compile_kwargs: Any) -> None:
        """The same of the averaged weights, where there are some."""
        average: Any = self.get_trainable_module(ema=True)
        if average is not None:
            _compile(average.module, backend)


def _compile(detector: Any, backend: str) -> None:
    detector.backbone.compile(backend=backend, dynamic=False)


def train_detection(config: DetectionConfig) -> int:
    """Trains as configured, from where the run folder stands; see `run_task`."""
    return run_task(config, build)


def build(config: DetectionConfig, processes: Processes, stop: StopRequest) -> Loop:
    """Checks everything that can be known beforehand, claims the run folder, and makes the loop.

    Raises:
        ValueError: a mistake in the configuration, the data or the run folder; one line that names it.
    """
    folder = open_folder(config, processes)
    batch_size = resolve_batch_size(config, processes.world_size)
    masks = config.detector == "mask_rcnn"
    train_split, val_split = read_splits(config, masks=masks)

    set_seed("weights", config.seed)
    model, spec = create_detector(config, train_split)
    dtype = getattr(torch, config.model_dtype)
    model.to(device=processes.device, dtype=dtype)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    images = [image for image in train_split.images if len(image.labels) or not config.skip_empty]
    fill = tuple(255 * mean for mean in spec.mean)
    samples = CocoSamples(images, DetectionAugment(config, fill=fill), seed=config.seed, training=True)
    prepare = partial(to_device, device=processes.device, dtype=dtype)
    loader = TrainLoader(
        samples, config, batch_size=batch_size, processes=processes, prepare=prepare, collate=collate_lists
    )
    val_loader = EvalLoader(
        CocoSamples(val_split.images, None, seed=config.seed, training=False), config,
        batch_size=config.validation_batch_size or batch_size, processes=processes, prepare=prepare,
        collate=collate_lists,
    )  # fmt: skip
    kinds = ("box_map", "box_map50", *(("mask_map", "mask_map50") if masks else ()))
    return make_loop(
        config, DetectionTask(model, val_split, masks=masks, device=processes.device, dtype=dtype), loader, val_loader,
        folder=folder, processes=processes, stop=stop, eval_metric=config.eval_metric, curves=kinds, sidecar=spec,
        notes={"training images": train_split.counts, "validation images": val_split.counts},
    )  # fmt: skip


def read_splits(config: DetectionConfig, *, masks: bool) -> tuple[CocoSplit, CocoSplit]:
    """The training and the validation split.

    Raises:
        ValueError: see `read_coco`; or no object to learn from or to find, or other categories in the two.
    """
    root = Path(config.data_dir)
    train = read_coco(root / config.train_json, root / config.train_images, masks=masks)
    val = read_coco(root / config.val_json, root / config.val_images, masks=masks)
    for name, split in ((config.train_json, train), (config.val_json, val)):
        if not split.counts["objects"]:
            raise ValueError(f"{root / name}: holds no object")
    one, other = (dict(zip(s.category_ids, s.class_names, strict=True)) for s in (train, val))
    if one != other:
        raise ValueError(f"{root / config.val_json}: its categories must be those of {config.train_json}: {one}")
    return train, val


def create_detector(config: DetectionConfig, split: CocoSplit) -> tuple[Detector, DetectorSpec]:
    """The detector, its backbone with weights where the configuration names some, and its description.

    Raises:
        ValueError: see `TimmFeatures` and `build_detector`.
    """
    rate = {} if config.drop_path is None else {"drop_path_rate": config.drop_path}
    features = TimmFeatures(
        config.model,
        strides=(4, 8, 16, 32) if config.detector in TWO_STAGE else (8, 16, 32),
        pretrained=config.pretrained,
        pretrained_path=config.pretrained_path,
        model_kwargs=config.model_kwargs | rate,
    )
    if config.grad_checkpointing:
        features.set_grad_checkpointing()
    spec = DetectorSpec(
        detector=config.detector,
        model=config.model,
        model_kwargs=features.model_kwargs,
        class_names=split.class_names,
        category_ids=split.category_ids,
        min_size=config.min_size,
        max_size=config.max_size,
        mean=per_channel("mean", config.mean, features.mean),
        std=per_channel("std", config.std, features.std),
        neck_channels=config.neck_channels,
        box_head_dim=config.box_head_dim or 1024,
        mask_head_dim=config.mask_head_dim or 256,
        anchor_scale=config.anchor_scale,
        detector_kwargs=config.detector_kwargs,
    )
    return build_detector(spec, features), spec


def to_device(batch: Batch, epoch: int, *, device: torch.device, dtype: torch.dtype) -> Batch:
    """A batch on the device, pixels in [0, 1]; the detector normalises them."""
    images = [image.to(device, non_blocking=True).to(dtype).div_(255) for image in batch.inputs]
    targets = [
        {name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value for name, value in t.items()}
        for t in batch.targets
    ]
    for target in targets:
        target["boxes"] = target["boxes"].to(dtype)
    return batch._replace(inputs=images, targets=targets)
