"""From a task, its loaders and its configuration to a run: what is the same for every task.

A task's module reads its data, builds its model, and calls `make_loop`; `run_task` starts it and turns mistakes and
failures into a line and an exit code.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import yaml
from timm.optim._optim_factory import create_optimizer_v2, optimizer_kwargs
from timm.scheduler.scheduler_factory import create_scheduler_v2, scheduler_kwargs
from timm.task import TrainingTask
from torch import Tensor, nn

from flash_vision.train.checkpoint import FORMAT, Progress, RunFolder, read_checkpoint, restore
from flash_vision.train.config import TaskConfig, resolve_lr
from flash_vision.train.data import EvalLoader, TrainLoader
from flash_vision.train.evaluation import evaluate
from flash_vision.train.loop import Loop
from flash_vision.train.model_source import first_line
from flash_vision.train.muon import set_muon_precision
from flash_vision.train.parallel import Processes, shard, start_processes, stop_processes
from flash_vision.train.reporting import Reporter, describe_run
from flash_vision.train.sidecar import SIDECAR_NAME, write_sidecar
from flash_vision.train.signals import EXIT_FAILED, EXIT_USAGE, StopRequest, TrainingError

Config = TypeVar("Config", bound=TaskConfig)


def run_task(config: Config, build: Callable[[Config, Processes, StopRequest], Loop]) -> int:
    """Trains as configured, from where the run folder stands.

    A mistake of the user, or a failure of the run, is one line on stderr.

    Args:
        build: makes the loop; its ValueErrors are mistakes of the user.
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


def open_folder(config: TaskConfig, processes: Processes) -> RunFolder:
    """The run's folder, not yet claimed.

    Raises:
        ValueError: it belongs to something else, or the processes are too few for what is configured.
    """
    folder = RunFolder(config.folder)
    folder.check(config.as_dict())
    if config.fsdp and not processes.distributed:
        raise ValueError("fsdp must be false with one process; start several with torchrun")
    return folder


def make_loop(
    config: TaskConfig,
    task: TrainingTask,
    loader: TrainLoader,
    val_loader: EvalLoader,
    *,
    eval_metric: str,
    curves: Sequence[str],
    sidecar: Any,
    folder: RunFolder,
    processes: Processes,
    stop: StopRequest,
    spare_input: Tensor | None = None,
    notes: Mapping[str, Mapping[str, int]] | None = None,
) -> Loop:
    """Prepares the task, claims the folder, restores what it holds, and hands everything to the loop.

    Args:
        task: on its device; `create_evaluator` gives what evaluates it.
        eval_metric: the evaluator's metric that "best" goes by.
        curves: the evaluator's metrics that curves.png shows.
        sidecar: dataclass of plain data, written as model.json beside the weights.
        spare_input: one input of the model, for evaluation with FSDP.
        notes: counts by split of what reading the data left out or changed; see `Loop`.
    Raises:
        ValueError: the optimiser cannot be built, or the folder is in use or its checkpoint does not fit.
    """
    optimizer = prepare_task(task, config, processes, lr=resolve_lr(config, loader.images_per_update))
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
    return Loop(
        config, task, loader, optimizer=optimizer, scheduler=scheduler, scaler=scaler, autocast=autocast,
        num_epochs=math.ceil(epochs), progress=progress, processes=processes, folder=folder, stop=stop,
        evaluate=partial(
            evaluate, task, val_loader, processes=processes, stop_requested=lambda: bool(stop.signal),
            autocast=autocast, spare_input=spare_input if config.fsdp else None,
        ),
        eval_metric=eval_metric, notes=notes or {},
        export=partial(export_weights, folder, sidecar),
        reporter=Reporter(
            folder.path if processes.is_main else None, config, resolved=description,
            total_steps=math.ceil(epochs) * loader.updates_per_epoch, curves=curves,
        ),
        extra_state={
            "format": FORMAT, "config": resolved, "versions": description["versions"], "layout": loader.layout,
            "images_per_update": loader.images_per_update,
            "rng": {"seed": config.seed, "derived_from": ["seed", "step", "rank"]},
        },
    )  # fmt: skip


def prepare_task(task: TrainingTask, config: TaskConfig, processes: Processes, *, lr: float) -> torch.optim.Optimizer:
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
    set_muon_precision(processes.device)
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


def export_weights(folder: RunFolder, sidecar: Any, name: str, state: dict[str, Any]) -> None:
    """Writes NAME.safetensors, averaged weights where there are some, and model.json."""
    write_sidecar(folder.path / SIDECAR_NAME, sidecar)
    folder.write_weights(name, state.get("state_dict_ema") or state["state_dict"])


def _module(module: nn.Module | None) -> nn.Module:
    assert module is not None
    return module
