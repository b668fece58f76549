"""Where the time of a step goes, by kind of operator, and how far the step is from its own dense products.

Times are self times of operators in torch.profiler: on a CPU the operator's own, on a GPU those of the kernels that it
launches. The profiler adds to small operators, so shares are indicative and `dense_floor` is timed without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from flash_vision.profiling.kinds import operator_kind
from flash_vision.profiling.scopes import attention_scopes
from flash_vision.profiling.steps import Case, autocast, step_of
from flash_vision.profiling.throughput import quartiles

_REGION = "attention region: "
_COMPILED = ("triton_", "cpp_fused", "Torch-Compiled Region", "CompiledFxGraph", "## Call CompiledFxGraph", "graph_")
_ATEN = torch.ops.aten


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds of one step.

    Args:
        by_kind: ms by kind of `operator_kind`, plus "optimizer", "compiled" (generated code, whose inner kinds cannot
            be told), "overhead" (autograd engine, Python) and "unknown"; largest first.
        by_operator: (operator, kind, ms, calls), largest first.
        attention: ms in the forward pass inside quadratic and linear attention, of this package's models.
        unknown: operators that are in no table.
    """

    by_kind: dict[str, float]
    by_operator: list[tuple[str, str, float, float]]
    attention: dict[str, float]
    unknown: tuple[str, ...]

    @property
    def total_ms(self) -> float:
        """Sum of all kinds."""
        return sum(self.by_kind.values())

    def rows(self) -> list[dict[str, Any]]:
        """One row per kind: `kind`, `ms`, `share` in [0, 1]."""
        total = self.total_ms or 1.0
        return [{"kind": kind, "ms": ms, "share": ms / total} for kind, ms in self.by_kind.items()]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        keys = ("operator", "kind", "ms", "calls")
        operators = [dict(zip(keys, entry, strict=True)) for entry in self.by_operator]
        return {
            "total_ms": self.total_ms,
            "by_kind": self.rows(),
            "by_operator": operators,
            "attention_ms": self.attention,
            "unknown_operators": list(self.unknown),
        }


def break_down(model: nn.Module, images: Tensor, case: Case, *, steps: int = 5) -> Breakdown:
    """Profiles `steps` steps after two to warm up.

    Args:
        model: on the device of `case`.
        images: (B, channels, H, W).
        case: mode, precision and whether to compile.
        steps: at least 1.

    Raises:
        ValueError: `steps` below 1.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    on_gpu = torch.device(case.device).type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    with attention_scopes(_annotated), _inductor_names():
        step = step_of(model, images, case)
        step()
        step()
        with profile(activities=activities) as profiler:
            for _ in range(steps):
                step()
            if on_gpu:
                torch.cuda.synchronize()
    return _summarise(list(profiler.events() or []), steps, on_gpu)


def _annotated(form: str) -> Any:
    return record_function(f"{_REGION}{form}")


@contextmanager
def _inductor_names() -> Iterator[None]:
    """Makes compiled CPU code show up in the profile under the names of its kernels."""
    from torch._inductor import config

    with config.patch({"cpp.enable_kernel_profile": True}):
        yield


def _summarise(events: list[Any], steps: int, on_gpu: bool) -> Breakdown:
    kinds: dict[str, float] = {}
    operators: dict[tuple[str, str], list[float]] = {}
    attention: dict[str, float] = {}
    unknown: set[str] = set()
    kernel_ms = 0.0
    for event in events:
        if event.device_type != DeviceType.CPU:
            kernel_ms += 0.0 if event.is_user_annotation else event.self_device_time_total / 1e3
            continue
        own = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3 / steps
        if event.name.startswith(_REGION):
            whole = (event.device_time_total if on_gpu else event.cpu_time_total) / 1e3 / steps
            inside, *outside = [name.removeprefix(_REGION) for name in _ancestors(event) if name.startswith(_REGION)]
            attention[inside] = attention.get(inside, 0.0) + whole
            if outside:
                attention[outside[0]] = attention.get(outside[0], 0.0) - whole
        kind = _kind(event)
        if kind == "unknown":
            unknown.add(event.name)
        kinds[kind] = kinds.get(kind, 0.0) + own
        entry = operators.setdefault((event.name, kind), [0.0, 0.0])
        entry[0] += own
        entry[1] += 1 / steps
    unattributed = kernel_ms / steps - sum(kinds.values())
    if on_gpu and unattributed > 0:
        kinds["compiled"] = kinds.get("compiled", 0.0) + unattributed
    ranked = sorted(((n, k, ms, calls) for (n, k), (ms, calls) in operators.items() if ms > 0), key=lambda e: -e[2])
    by_kind = dict(sorted(kinds.items(), key=lambda item: -item[1]))
    return Breakdown(by_kind, ranked, attention, tuple(sorted(unknown)))


def _kind(event: Any) -> str:
    ancestors = _ancestors(event)
    if any(name.startswith("Optimizer.") for name in ancestors):
        return "optimizer"
    name = event.name
    if any(mark in name for mark in _COMPILED):
        return "compiled"
    if "::" not in name or name.startswith(("autograd::", "profiler::", "torch::autograd")):
        return "overhead"
    if name == "aten::copy_" and any(a in ("aten::_to_copy", "aten::to") for a in ancestors):
        return "cast"
    return operator_kind(name) or "unknown"


def _ancestors(event: Any) -> list[str]:
    names = [event.name]
    while event.cpu_parent is not None:
        event = event.cpu_parent
        names.append(event.name)
    return names


@dataclass(frozen=True)
class DenseFloor:
    """A forward pass beside its own dense products.

    Args:
        forward_ms, dense_ms: medians over rounds.
        ratio, ratio_q25, ratio_q75: forward time over dense time in the same round; 1 is the limit of this design.
        products: how many products were replayed.
    """

    forward_ms: float
    dense_ms: float
    ratio: float
    ratio_q25: float
    ratio_q75: float
    products: int


def dense_floor(model: nn.Module, images: Tensor, case: Case, *, rounds: int = 10) -> DenseFloor:
    """Times a forward pass against the matrix products with weights and dense convolutions that it contains, alone.

    The products are recorded as dispatched (shapes, strides, types) and replayed on random activations with the
    model's own weights. Products between activations (attention), depthwise convolutions, and all else are left out.

    Args:
        model: on the device of `case`.
        images: (B, channels, H, W).
        case: of mode "infer"; `compiled` applies to the forward pass only.
        rounds: alternating timings.

    Raises:
        ValueError: another mode, fewer than one round, or a model without dense products.
    """
    if case.mode != "infer":
        raise ValueError(f"mode must be 'infer' for the floor of a forward pass, got {case.mode!r}")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    forward = step_of(model, images, case)
    recorder = _DenseRecorder()
    with torch.no_grad(), autocast(case), recorder:
        model(images)
    if not recorder.calls:
        raise ValueError("model must contain matrix products with weights or dense convolutions, got none")
    times: list[tuple[float, float]] = []
    for done in range(rounds + 2):
        pair = (_timed(forward, case), _timed(recorder.replay, case))
        if done >= 2:
            times.append(pair)
    low, middle, high = quartiles([whole / dense for whole, dense in times])
    whole_ms, dense_ms = (quartiles([pair[i] * 1e3 for pair in times])[1] for i in range(2))
    return DenseFloor(whole_ms, dense_ms, middle, low, high, len(recorder.calls))


def _timed(step: Callable[[], None], case: Case) -> float:
    on_gpu = torch.device(case.device).type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


class _DenseRecorder(TorchDispatchMode):
    """Records products with weights; activations are replaced by one random buffer per shape."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self._buffers: dict[Any, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        position = {_ATEN.mm: 0, _ATEN.addmm: 1, _ATEN.convolution: 0}.get(packet)
        if position is not None and not (packet is _ATEN.convolution and args[8] != 1):
            swapped = [self._buffer(a) if i == position else a for i, a in enumerate(args)]
            self.calls.append((func, tuple(swapped), kwargs))
        return func(*args, **kwargs)

    def _buffer(self, like: Tensor) -> Tensor:
        key = (tuple(like.shape), like.stride(), like.dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.randn_like(like)
        return self._buffers[key]

    def replay(self) -> None:
        """Runs the recorded products once."""
        with torch.inference_mode():
            for func, args, kwargs in self.calls:
                func(*args, **kwargs)
