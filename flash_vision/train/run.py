"""A classification or distillation run, put together from its configuration."""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any

import torch
import yaml
from timm.optim._optim_factory import create_optimizer_v2, optimizer_kwargs
from timm.scheduler.scheduler_factory import create_scheduler_v2, scheduler_kwargs
from timm.task import TrainingTask
from torch import nn

from flash_vision.train.checkpoint import FORMAT, Progress, RunFolder, read_checkpoint, restore
from flash_vision.train.config import TrainConfig, resolve_batch_size, resolve_lr
from flash_vision.train.data import EvalLoader, ToDevice, TrainLoader
from flash_vision.train.evaluation import evaluate
from flash_vision.train.loop import Loop
from flash_vision.train.model_source import first_line
from flash_vision.train.parallel import Processes, shard, start_processes, stop_processes
from flash_vision.train.reporting import Reporter, describe_run
from flash_vision.train.seeding import set_seed
from flash_vision.train.sidecar import SIDECAR_NAME, ModelSidecar, write_sidecar
from flash_vision.train.signals import EXIT_FAILED, EXIT_USAGE, StopRequest, TrainingError
from flash_vision.train.sources import OpenedSplit, open_split
from flash_vision.train.tasks import check_input, create_model, create_task, resolve_preprocessing


def train(config: TrainConfig) -> int:
    """Trains as configured, from where the run folder stands.

    A mistake of the user, or a failure of the run, is one line on stderr.

    Returns:
        An exit code of `flash_vision.train.signals`.
    """
    stop = StopRequest()
    stop.install()
    who = ""
    try:
        try:
            processes = start_processes(config.device)
            who = f" [process {processes.rank}]" if processes.distributed else ""
            loop = build(config, processes, stop)
        except ValueError as error:
            print(f"error{who}: {error}", file=sys.stderr)
            return EXIT_USAGE
        try:
            return loop.run()
        except TrainingError as failure:
            loop.reporter.say(f"error: {failure}")
            return EXIT_FAILED
    finally:
        stop_processes()


def build(config: TrainConfig, processes: Processes, stop: StopRequest) -> Loop:
    """Checks everything that can be known beforehand, claims the run folder, and makes the loop.

    Raises:
        ValueError: a mistake in the configuration, the data or the run folder; one line that names it.
    """
    folder = RunFolder(config.folder)
    folder.check(config.as_dict())
    if config.fsdp and not processes.distributed:
        raise ValueError("fsdp must be false with one process; start several with torchrun")
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
    to_device = partial(
        ToDevice,
        data_config,
        device=processes.device,
        dtype=dtype,
        seed=config.seed,
        channels_last=config.channels_last,
    )
    loader = TrainLoader(
        train_split, config, config, data_config, batch_size=batch_size, num_classes=num_classes, processes=processes,
        to_device=to_device(augment=config, num_classes=num_classes),
    )  # fmt: skip
    val_loader = EvalLoader(
        val_split, config, data_config, batch_size=config.validation_batch_size or batch_size, processes=processes,
        to_device=to_device(),
    )  # fmt: skip
    task = create_task(config, model, processes.device, dtype)
    optimizer = prepare_task(task, config, processes, lr=resolve_lr(config, loader.images_per_update))
    return make_loop(
        config, task, optimizer, loader, val_loader, folder=folder, processes=processes, stop=stop,
        sidecar=make_sidecar(config, num_classes, train_split, data_config, model_kwargs),
    )  # fmt: skip


def prepare_task(task: TrainingTask, config: TrainConfig, processes: Processes, *, lr: float) -> torch.optim.Optimizer:
    """Gives the task its average, sharding, compilation and DDP, and makes the optimiser, in the order they need.

    Raises:
        ValueError: unknown optimiser, or arguments it does not take.
    """
    if config.model_ema:
        task.setup_ema(decay=config.model_ema_decay, use_warmup=config.model_ema_warmup)
    if config.fsdp:
        shard(_module(task.get_trainable_module()))
        if config.model_ema:
            shard(_module(task.get_trainable_module(ema=True)).module)  # pyright: ignore[reportArgumentType]
    arguments: dict[str, Any] = optimizer_kwargs(config) | {"lr": lr} | config.opt_kwargs
    try:
        optimizer = create_optimizer_v2(_module(task.get_trainable_module()), **arguments)
    except (AssertionError, TypeError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"opt {config.opt}: cannot be built ({first_line(error)})") from None
    if config.torchcompile:
        task.compile(backend=config.torchcompile)
        task.compile_ema(backend=config.torchcompile)
    if processes.distributed and not config.fsdp:
        task.prepare_distributed(device_ids=[processes.device] if processes.device.type == "cuda" else None)
    return optimizer


def make_loop(
    config: TrainConfig,
    task: TrainingTask,
    optimizer: torch.optim.Optimizer,
    loader: TrainLoader,
    val_loader: EvalLoader,
    *,
    folder: RunFolder,
    processes: Processes,
    stop: StopRequest,
    sidecar: ModelSidecar,
) -> Loop:
    """Claims the folder, restores what it holds, and hands everything to the loop.

    Raises:
        ValueError: the folder is in use, or its checkpoint does not fit.
    """
    device, amp_dtype = processes.device, getattr(torch, config.amp_dtype)
    schedule: dict[str, Any] = scheduler_kwargs(config)
    scheduler, epochs = create_scheduler_v2(optimizer, **schedule, updates_per_epoch=loader.updates_per_epoch)
    scaler = torch.amp.GradScaler(device.type, enabled=config.amp and config.amp_dtype == "float16")
    resolved = config.as_dict()
    description = describe_run(resolved, world_size=processes.world_size, device=device)
    if processes.is_main:
        folder.claim(description, yaml.safe_dump(resolved, sort_keys=False))
    processes.barrier()
    progress = resume(folder, task, optimizer, scaler, loader, processes)
    autocast = partial(torch.autocast, device.type, amp_dtype, enabled=config.amp)
    spare = torch.zeros(1, *val_loader.input_shape, device=device, dtype=task.dtype) if config.fsdp else None
    return Loop(
        config, task, loader, optimizer=optimizer, scheduler=scheduler, scaler=scaler, autocast=autocast,
        num_epochs=math.ceil(epochs), progress=progress, processes=processes, folder=folder, stop=stop,
        evaluate=partial(
            evaluate, task, val_loader, processes=processes, stop_requested=lambda: bool(stop.signal),
            autocast=autocast, spare_input=spare,
        ),
        export=partial(export_weights, folder, sidecar),
        reporter=Reporter(
            folder.path if processes.is_main else None, config, resolved=description,
            total_steps=math.ceil(epochs) * loader.updates_per_epoch,
        ),
        extra_state={
            "format": FORMAT, "config": resolved, "versions": description["versions"], "layout": loader.layout,
            "images_per_update": loader.images_per_update,
            "rng": {"seed": config.seed, "derived_from": ["seed", "step", "rank"]},
        },
    )  # fmt: skip


def resume(
    folder: RunFolder,
    task: TrainingTask,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    loader: TrainLoader,
    processes: Processes,
) -> Progress:
    """Restores the newest readable checkpoint of the folder, the same one in every process; a new Progress without one.

    Raises:
        ValueError: no checkpoint can be read, or it does not fit the model, the data or the processes.
    """
    newest, said = (None, []) if not processes.is_main else folder.newest() or (None, [])
    newest = processes.gather(newest)[0]
    for line in said:
        print(f"warning: {line}; going back to {newest}", file=sys.stderr)
    if newest is None:
        return Progress()
    state = read_checkpoint(newest)
    progress = Progress(**state["progress"])
    before, now = state["images_per_update"], loader.images_per_update
    if before != now and state["layout"][0] == processes.world_size:
        raise ValueError(f"images per update (batch_size * grad_accum_steps * processes) was {before}, is {now}")
    loader.check_resume(progress.consumed, state["layout"])
    restore(state, task, optimizer, scaler)
    if processes.is_main:
        changed = f"; images per update: {before} -> {now}, the run goes on with fewer or more updates an epoch"
        print(f"continuing {folder.path} at step {progress.step}{changed if before != now else ''}", file=sys.stderr)
    return progress


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


def export_weights(folder: RunFolder, sidecar: ModelSidecar, name: str, state: dict[str, Any]) -> None:
    """Writes NAME.safetensors, averaged weights where there are some, and model.json."""
    write_sidecar(folder.path / SIDECAR_NAME, sidecar)
    folder.write_weights(name, state.get("state_dict_ema") or state["state_dict"])


def _module(module: nn.Module | None) -> nn.Module:
    assert module is not None
    return module
