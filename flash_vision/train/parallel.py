"""Several processes: starting them, agreeing on numbers, and sharding a model over them (FSDP2)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from timm.task import TrainingTask
from timm.utils.distributed import init_distributed_device_so, is_distributed_env
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from flash_vision.train.model_source import resolve_device


@dataclass(frozen=True, kw_only=True)
class Processes:
    """This process among those that train together."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device

    @property
    def distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.world_size > 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and reports."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The element-wise sum over all processes, in place."""
        if self.distributed:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """The value of each process, in order of rank."""
        if not self.distributed:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Waits for all processes."""
        if self.distributed:
            dist.barrier()


def start_processes(device: str) -> Processes:
    """Joins the processes that torchrun started, or stands alone.

    Args:
        device: auto, cpu, cuda or cuda:1; with several processes each takes the device of its local rank.
    Raises:
        ValueError: the device is not there.
    """
    name = "" if device == "auto" else device
    resolved = resolve_device(name)
    found: dict[str, Any] = init_distributed_device_so(resolved.type if is_distributed_env() else str(resolved))
    return Processes(
        rank=found["global_rank"],
        local_rank=found["local_rank"],
        world_size=found["world_size"],
        device=torch.device(found["device"]),
    )


def stop_processes() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def shard(module: nn.Module) -> None:
    """Shards a model's parameters over all processes: each block of a list named blocks on its own, then the rest."""
    for name, child in module.named_modules():
        if name.split(".")[-1] == "blocks" and isinstance(child, (nn.Sequential, nn.ModuleList)):
            for block in child:
                fully_shard(block)
    fully_shard(module)


def without_sync(task: TrainingTask, *, last: bool) -> AbstractContextManager[Any]:
    """Context of one accumulated forward and backward pass: gradients are exchanged on the last one only."""
    module = task.get_trainable_module()
    for part in module.modules() if module is not None else ():
        if isinstance(part, FSDPModule):
            part.set_requires_gradient_sync(last, recurse=False)
    return nullcontext() if last else task.no_sync()


def whole(value: Any) -> Any:
    """State with every tensor whole and on the CPU; with sharded tensors all processes must call it together."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().cpu()
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, (list, tuple)) else value


def sharded_like(value: Tensor, reference: Tensor) -> Tensor:
    """A whole tensor, sharded as `reference` is where they have one shape; unchanged otherwise."""
    if not isinstance(reference, DTensor) or not isinstance(value, Tensor) or value.shape != reference.shape:
        return value
    return distribute_tensor(value.to(reference.device), reference.device_mesh, reference.placements)
