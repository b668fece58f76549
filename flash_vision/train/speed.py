"""How fast training is, and what the loop and the loader cost beside the bare step."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from timm.optim._optim_factory import create_optimizer_v2, optimizer_kwargs
from torch import nn

from flash_vision.train.config import TrainConfig, resolve_lr
from flash_vision.train.data import Batch
from flash_vision.train.loop import Loop
from flash_vision.train.parallel import start_processes, stop_processes
from flash_vision.train.run import build
from flash_vision.train.signals import StopRequest


@dataclass(kw_only=True)
class SpeedConfig:
    """What to measure.

    Args:
        recipe: YAML file with the fields of tools/train.py.
        data_dir: the data, as in tools/train.py.
        model: any timm model; that of the recipe when empty.
        img_size: side of the square input in pixels; that of the recipe when not given.
        batch_size: images per update; those of the recipe when not given.
        workers: processes that decode; those of the recipe when not given.
        updates: updates of each round, timed one by one.
        rounds: rounds of bare steps and of loop updates, alternating; the first pair is not counted.
        threads: torch's threads; its default when not given.
        json: file for the figures; none when empty.
    """

    recipe: str
    data_dir: str
    model: str = ""
    img_size: int | None = None
    batch_size: int | None = None
    workers: int | None = None
    updates: int = 8
    rounds: int = 4
    threads: int | None = None
    json: str = ""

    def __post_init__(self) -> None:
        for name, least in (("updates", 1), ("rounds", 2), ("img_size", 1), ("batch_size", 1), ("threads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


def measure_speed(config: SpeedConfig) -> dict[str, Any]:
    """Images/s of the loader alone, of bare steps on batches at hand, and of the loop with its loader.

    A bare step is forward, the task's loss, backward and optimiser on a copy of the model; the loop adds loading,
    augmentation on the device, clipping, the schedule, the exchange between processes and the reports.

    Returns:
        `loader`, `bare` and `loop` in images/s (medians), `ratio` of loop to bare (median of the rounds' pairs), and
        what was measured.

    Raises:
        ValueError: as tools/train.py.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if not Path(config.recipe).is_file():
        raise ValueError(f"recipe {config.recipe}: no such file")
    fields = {name: getattr(config, name) for name in ("model", "img_size", "batch_size", "workers")}
    recipe = yaml.safe_load(Path(config.recipe).read_text()) | {k: v for k, v in fields.items() if v not in ("", None)}
    if config.batch_size is not None:
        recipe["global_batch_size"] = None
    with tempfile.TemporaryDirectory() as output:
        recipe |= {"data_dir": config.data_dir, "output": output, "experiment": "speed", "tensorboard": False}
        settings = TrainConfig(**recipe)
        try:
            loop = build(settings, start_processes(settings.device), StopRequest())
            loop.reporter.start(step=0, epoch=0)
            figures = _measure(config, settings, loop)
            loop.reporter.close()
            loop.folder.release()
        finally:
            stop_processes()
    figures |= {"model": settings.model, "batch": loop.loader.images_per_update, "threads": torch.get_num_threads()}
    figures |= {"workers": settings.workers, "device": loop.processes.device.type, "torch": torch.__version__}
    if config.json:
        Path(config.json).write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def _measure(config: SpeedConfig, settings: TrainConfig, loop: Loop) -> dict[str, Any]:
    images = loop.loader.images_per_update
    endless = itertools.chain.from_iterable(loop.loader.updates(epoch, 0) for epoch in itertools.count())
    started = time.perf_counter()
    kept = [next(endless) for _ in range(config.updates)]
    first = time.perf_counter()
    for _ in range(config.updates):
        next(endless)
    loader = config.updates * images / (time.perf_counter() - first)
    bare_step = _bare_step(settings, loop)
    bare, looped = [], []
    for _ in range(config.rounds):
        bare.append(_median_seconds(bare_step, kept))
        looped.append(_median_seconds(loop._update, itertools.islice(endless, config.updates)))
    pairs = [b / o for b, o in zip(bare[1:], looped[1:], strict=True)]
    return {
        "loader": round(loader, 1),
        "loader_start_s": round(first - started, 2),
        "bare": round(images / statistics.median(bare[1:]), 2),
        "loop": round(images / statistics.median(looped[1:]), 2),
        "ratio": round(statistics.median(pairs), 3),
        "ratios": [round(p, 3) for p in pairs],
    }


def _bare_step(settings: TrainConfig, loop: Loop) -> Callable[[list[Batch]], None]:
    task = deepcopy(loop.task)
    module = task.get_trainable_module()
    assert isinstance(module, nn.Module)
    arguments = optimizer_kwargs(settings) | {"lr": resolve_lr(settings, loop.loader.images_per_update)}
    optimizer = create_optimizer_v2(module, **arguments)  # pyright: ignore[reportArgumentType]
    task.train()
    loop.task.train()
    prepared: dict[int, list[Batch]] = {}

    def step(batches: list[Batch]) -> None:
        ready = prepared.setdefault(id(batches), [loop.loader.prepare(batch, 0) for batch in batches])
        for batch in ready:
            with loop.autocast():
                loss = task(batch.inputs, batch.targets)["loss"] / len(ready)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _median_seconds(function: Callable[[list[Batch]], Any], updates: Any) -> float:
    """Median seconds from the request of an update to its end: waiting for the loader counts."""
    seconds = []
    before = time.perf_counter()
    for batches in updates:
        function(batches)
        now = time.perf_counter()
        seconds.append(now - before)
        before = now
    return statistics.median(seconds)
