"""timm models that fail on purpose; importing this module registers them."""

import torch
from timm.models import register_model
from torch import nn


class _Failing(nn.Module):
    """A pooled linear classifier that raises for images wider than `limit` pixels."""

    def __init__(self, limit: int, error: Exception) -> None:
        super().__init__()
        self.limit, self.error = limit, error
        self.head = nn.Linear(3, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] > self.limit:
            raise self.error
        return self.head(x.mean((2, 3)))


@register_model
def fails_out_of_memory_above_32(pretrained: bool = False, **kwargs: object) -> nn.Module:
    return _Failing(32, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"))


@register_model
def fails_allocation_above_32(pretrained: bool = False, **kwargs: object) -> nn.Module:
    return _Failing(32, RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"))


@register_model
def fails_always(pretrained: bool = False, **kwargs: object) -> nn.Module:
    return _Failing(0, RuntimeError("the model is broken\nsecond line"))


@register_model
def works_at_any_size(pretrained: bool = False, **kwargs: object) -> nn.Module:
    return _Failing(10**9, RuntimeError("never"))


class _Drifting(_Failing):
    """Gives twice its value under autocast: what a wrong low-precision kernel would look like."""

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.mean((2, 3))) * (2 if torch.is_autocast_enabled("cpu") else 1)


@register_model
def drifts_in_low_precision(pretrained: bool = False, **kwargs: object) -> nn.Module:
    return _Drifting(10**9, RuntimeError("never"))
