"""A classification or distillation run, put together from its configuration."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flash_vision.train.augment import ToDevice, evaluation_transform, training_transform
from flash_vision.train.config import TrainConfig, resolve_batch_size
from flash_vision.train.data import EvalLoader, TrainLoader
from flash_vision.train.launch import make_loop, open_folder, run_task
from flash_vision.train.loop import Loop
from flash_vision.train.parallel import Processes
from flash_vision.train.seeding import set_seed
from flash_vision.train.sidecar import ModelSidecar
from flash_vision.train.signals import StopRequest
from flash_vision.train.sources import OpenedSplit, open_split
from flash_vision.train.tasks import check_input, create_model, create_task, resolve_preprocessing


def train(config: TrainConfig) -> int:
    """Trains as configured, from where the run folder stands; see `run_task`."""
    return run_task(config, build)


def build(config: TrainConfig, processes: Processes, stop: StopRequest) -> Loop:
    """Checks everything that can be known beforehand, claims the run folder, and makes the loop.

    Raises:
        ValueError: a mistake in the configuration, the data or the run folder; one line that names it.
    """
    folder = open_folder(config, processes)
    batch_size = resolve_batch_size(config, processes.world_size)
    train_split = open_split(config, training=True)
    val_split = open_split(config, training=False, class_to_idx=train_split.class_to_idx)
    num_classes = count_classes(config, train_split)

    set_seed("weights", config.seed)
    model, model_kwargs = create_model(config, num_classes)
    data_config = resolve_preprocessing(config, model)
    check_input(model, data_config["input_size"])
    dtype = getattr(torch, config.model_dtype)
    model.to(device=processes.device, dtype=dtype)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if config.mixing and batch_size % 2:
        raise ValueError(f"batch_size must be even with mixup or cutmix, got {batch_size} per process")
    to_device = partial(
        ToDevice,
        data_config,
        device=processes.device,
        dtype=dtype,
        seed=config.seed,
        channels_last=config.channels_last,
    )
    samples = train_split.samples(
        training_transform(config, data_config), config, rank=processes.rank, training=True
    )  # fmt: skip
    loader = TrainLoader(
        samples, config, batch_size=batch_size, processes=processes,
        prepare=to_device(augment=config, num_classes=num_classes),
    )  # fmt: skip
    val_samples = val_split.samples(evaluation_transform(data_config), config, rank=processes.rank, training=False)
    val_loader = EvalLoader(
        val_samples, config, batch_size=config.validation_batch_size or batch_size, processes=processes,
        prepare=to_device(),
    )  # fmt: skip
    return make_loop(
        config, create_task(config, model, processes.device, dtype), loader, val_loader,
        folder=folder, processes=processes, stop=stop, eval_metric=config.eval_metric, curves=("top1", "top5"),
        sidecar=make_sidecar(config, num_classes, train_split, data_config, model_kwargs),
        spare_input=torch.zeros(1, *data_config["input_size"], device=processes.device, dtype=dtype),
    )  # fmt: skip


def count_classes(config: TrainConfig, split: OpenedSplit) -> int:
    """Width of the classifier, from num_classes or the data.

    Raises:
        ValueError: the data do not say and num_classes is not given, or it does not fit the data.
    """
    found = max(split.class_to_idx.values()) + 1 if split.class_to_idx else None
    if config.num_classes is None:
        if found is None:
            raise ValueError(f"num_classes must be given, dataset {config.dataset} does not say it")
        return found
    if found is not None and (found > config.num_classes or (found < config.num_classes and not config.class_map)):
        raise ValueError(f"num_classes must be the {found} classes of the training split, got {config.num_classes}")
    return config.num_classes


def make_sidecar(
    config: TrainConfig, num_classes: int, split: OpenedSplit, data_config: dict[str, Any], model_kwargs: dict[str, Any]
) -> ModelSidecar:
    """What model.json says about the weights; classes without a name are called by their index."""
    names = {index: name for name, index in (split.class_to_idx or {}).items()}
    fields = ("input_size", "mean", "std", "interpolation", "crop_pct")
    return ModelSidecar(
        model=config.model,
        model_kwargs=model_kwargs,
        num_classes=num_classes,
        class_names=tuple(names.get(index, str(index)) for index in range(num_classes)),
        **{name: data_config[name] for name in fields},
    )
