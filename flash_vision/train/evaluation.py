"""Evaluation over several processes in which every image counts once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from timm.task import TrainingTask
from timm.utils.model import unwrap_model
from torch import Tensor

from flash_vision.train.data import Batch
from flash_vision.train.parallel import Processes
from flash_vision.train.samples import Problem


def evaluate(
    task: TrainingTask,
    batches: Iterable[Batch],
    *,
    processes: Processes,
    stop_requested: Callable[[], bool],
    autocast: Callable[[], AbstractContextManager[Any]],
    ema: bool = False,
    spare_input: Tensor | None = None,
) -> tuple[dict[str, float], list[Problem]] | None:
    """Runs the task's evaluator over the batches of all processes, whose numbers may differ.

    Every process goes on until none has a batch left, so that a stop request anywhere ends all of them together. With a
    sharded model, whose forward pass is a collective, a process without a batch runs `spare_input` instead.

    Args:
        task: its `create_evaluator()` gives an object with update(outputs, targets) and compute(distributed=...).
        batches: this process's batches, on the device.
        stop_requested: asked before every batch.
        ema: evaluate the averaged weights.
        spare_input: one input for the model; given if, and only if, it is sharded over the processes.
    Returns:
        The evaluator's metrics over all processes and the images unreadable here; None after a stop request.
    """
    # the bare model: DDP's forward would exchange buffers, with processes that have run out of batches
    model: Any = task.get_eval_model(ema=ema)
    model = unwrap_model(model) if not hasattr(model, "_orig_mod") else model
    was_training = task.training
    task.eval()
    evaluator: Any = task.create_evaluator()
    problems: list[Problem] = []
    iterator = iter(batches)
    try:
        with torch.inference_mode(spare_input is None), torch.no_grad():
            while True:
                batch = next(iterator, None)
                status = torch.tensor([stop_requested(), batch is not None], dtype=torch.int64, device=processes.device)
                stop, active = processes.sum(status).tolist()
                if stop:
                    return None
                if not active:
                    break
                problems += batch.problems if batch is not None else []
                if batch is None or not len(batch.inputs):
                    if spare_input is not None:
                        with autocast():
                            model(spare_input)
                    continue
                with autocast():
                    output = model(batch.inputs)
                evaluator.update(output, batch.targets)
    finally:
        task.train(was_training)
    metrics = evaluator.compute(distributed=processes.distributed)
    return {name: float(value) for name, value in metrics.items()}, problems
