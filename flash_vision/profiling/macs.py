"""MACs, parameters and activations of a forward pass, by two counters that must agree.

fvcore traces the model, torch's FlopCounterMode watches it run; both on the meta device, so any image size is cheap.
One multiply-add is one MAC; torch counts two FLOPs for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from flash_vision.profiling.build import build_model, default_size, example_input, first_line, square
from flash_vision.profiling.kinds import operator_kind
from flash_vision.profiling.scopes import ModulePath, attention_part, attention_scopes
from flash_vision.profiling.trace import TraceCount, trace_count

PARTS = ("projections", "local", "global", "convolution", "head")
AGREEMENT = 1e-3

_ATEN = torch.ops.aten


@dataclass
class OperatorCost:
    """Calls, elements written and MACs of one operator in one part of the model."""

    calls: int = 0
    elements: int = 0
    macs: int = 0


@dataclass(frozen=True, kw_only=True)
class MacReport:
    """The counts of one model at one input.

    Args:
        model: name.
        input_shape: (B, channels, H, W).
        macs: multiply-adds in matrix products and convolutions, by torch's counter.
        trace: fvcore's counts, or None if it cannot trace the model; `trace_error` says why.
        params: number of parameters.
        by_part: MACs of projections, local and global attention, convolution, head.
        by_module: MACs by dotted module path, each with its descendants.
        costs: calls, elements and MACs by operator, as dispatched.
        unknown: operators that neither counter has a formula for and that are no element-wise, normalising, reducing
            or moving ones: their work is missing from the totals.
    """

    model: str
    input_shape: tuple[int, ...]
    macs: int
    trace: TraceCount | None
    trace_error: str | None
    params: int
    by_part: dict[str, int]
    by_module: dict[str, int]
    costs: dict[str, OperatorCost]
    unknown: tuple[str, ...]

    @property
    def counters_agree(self) -> bool | None:
        """Whether fvcore's products equal torch's within 0.1%; None if fvcore could not trace the model."""
        if self.trace is None:
            return None
        return abs(self.trace.products - self.macs) <= AGREEMENT * max(self.macs, 1)

    @property
    def opaque_to_fvcore(self) -> tuple[str, ...]:
        """Autograd functions and scripted calls, which fvcore cannot look into and torch's counter can."""
        return () if self.trace is None else tuple(sorted(n for n in self.trace.unsupported if n.startswith("prim::")))

    def of_kind(self, *kinds: str) -> dict[str, OperatorCost]:
        """The operators of the given kinds of `operator_kind`, most elements first."""
        chosen = {name: cost for name, cost in self.costs.items() if operator_kind(name) in kinds}
        return dict(sorted(chosen.items(), key=lambda item: -item[1].elements))

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: all the above, fvcore's totals beside torch's."""
        trace = self.trace
        return {
            "model": self.model,
            "input_shape": list(self.input_shape),
            "params": self.params,
            "macs": self.macs,
            "macs_fvcore": None if trace is None else trace.products,
            "macs_fvcore_with_normalisation": None if trace is None else trace.total,
            "activations": None if trace is None else trace.activations,
            "counters_agree": self.counters_agree,
            "fvcore_error": self.trace_error,
            "opaque_to_fvcore": list(self.opaque_to_fvcore),
            "by_part": self.by_part,
            "by_module": self.by_module,
            "by_operator": {name: vars(cost) for name, cost in self.costs.items()},
            "by_operator_fvcore": {} if trace is None else {k: int(v) for k, v in trace.by_operator.items()},
            "unknown_operators": list(self.unknown),
        }


def count_macs(name: str, img_size: int | Sequence[int] | None = None, *, batch_size: int = 1) -> MacReport:
    """Counts a timm model's forward pass for an image size, on the meta device.

    Args:
        name: timm model name.
        img_size: height and width in pixels, or one side; None for the model's own.
        batch_size: images.

    Raises:
        ValueError: unknown model, a size that it cannot take, or a batch below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    model = build_model(name, img_size=img_size, device="meta")
    size = default_size(model) if img_size is None else square(img_size)
    inputs = example_input(model, size, batch_size=batch_size, device="meta")
    try:
        return count_module(model, inputs, name=name)
    except (RuntimeError, AssertionError, ValueError, IndexError) as error:
        raise ValueError(f"{name} cannot take {size[0]}x{size[1]} px: {first_line(error)}") from error


def count_module(model: nn.Module, inputs: Tensor, *, name: str = "", trace: bool = True) -> MacReport:
    """Counts one forward pass of any module.

    Args:
        model: on the device of `inputs`; on the CPU the pass really runs.
        inputs: its only argument.
        name: for the report.
        trace: whether fvcore counts too; torch's counter alone takes half the time.

    Raises:
        RuntimeError, AssertionError, ValueError: what the model's forward pass raises.
    """
    recorder = _Recorder(model)
    with torch.no_grad(), recorder.active(), FlopCounterMode(display=False, custom_mapping=_MISSING) as counter:
        model(inputs)
    traced, trace_error = None, "not asked for"
    if trace:
        traced, trace_error = _traced(model, inputs)
    total = int(counter.get_total_flops()) // 2
    assert total == sum(recorder.by_part.values()), "the split must add up to the total"
    return MacReport(
        model=name or type(model).__name__,
        input_shape=tuple(inputs.shape),
        macs=total,
        trace=traced,
        trace_error=trace_error,
        params=sum(p.numel() for p in model.parameters()),
        by_part={part: recorder.by_part[part] for part in PARTS},
        by_module=dict(recorder.by_module),
        costs=recorder.costs,
        unknown=_unknown_operators(recorder.costs, traced),
    )


def _traced(model: nn.Module, inputs: Tensor) -> tuple[TraceCount | None, str | None]:
    try:
        return trace_count(model, inputs), None
    except (RuntimeError, NotImplementedError, AssertionError, TypeError) as error:
        return None, f"{type(error).__name__}: {first_line(error)}"


def _unknown_operators(costs: dict[str, OperatorCost], trace: TraceCount | None) -> tuple[str, ...]:
    """Dispatched operators without a formula; fvcore's, where torch's counter did not see through to known ones."""
    formulas = {f"{packet}".replace(".", "::", 1) for packet in (*flop_registry, *_MISSING)}
    unknown = [n for n in costs if n not in formulas and operator_kind(n) in (None, "matmul", "convolution")]
    if trace is not None:
        seen_by_torch = {op.rpartition("::")[2].strip("_") for op in costs}
        for operator in trace.unsupported:
            opaque = operator_kind(operator) in (None, "matmul", "convolution")
            if (
                opaque
                and not operator.startswith("prim::")
                and operator.rpartition("::")[2].strip("_") not in seen_by_torch
            ):
                unknown.append(operator)
    return tuple(sorted(set(unknown)))


class _Recorder(TorchDispatchMode):
    """Attributes every dispatched operator to a module path and a part."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.costs: dict[str, OperatorCost] = {}
        self.by_part: Counter[str] = Counter()
        self.by_module: Counter[str] = Counter({path: 0 for path, _ in model.named_modules()})
        self._modules = ModulePath(model)
        self._form: str | None = None
        self._head = _head_paths(model)

    @contextmanager
    def active(self) -> Iterator[None]:
        with self._modules, attention_scopes(self._attention), self:
            yield

    @contextmanager
    def _attention(self, form: str) -> Iterator[None]:
        previous, self._form = self._form, form
        try:
            yield
        finally:
            self._form = previous

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        cost = self.costs.setdefault(f"{packet}".replace(".", "::", 1), OperatorCost())
        cost.calls += 1
        cost.elements += sum(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))
        formula = _MISSING.get(packet)
        if formula is not None:
            flops = formula(*_shapes(args))
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
        else:
            return out
        macs = int(flops) // 2
        cost.macs += macs
        self.by_part[self._part(cost, operator_kind(f"{packet}".replace(".", "::", 1)), func)] += macs
        path = self._modules.path
        while path:
            self.by_module[path] += macs
            path = path.rpartition(".")[0]
        self.by_module[""] += macs
        return out

    def _part(self, cost: OperatorCost, kind: str | None, func: Any) -> str:
        path = self._modules.path
        if any(path == head or path.startswith(f"{head}.") for head in self._head):
            return "head"
        if kind == "convolution":
            return "convolution"
        if self._form is None and func._overloadpacket in (_ATEN.mm, _ATEN.addmm):
            return "projections"
        return attention_part(self._modules, self._form)


def _shapes(args: Sequence[Any]) -> list[Any]:
    return [a.shape if isinstance(a, Tensor) else a for a in args]


def _head_paths(model: nn.Module) -> tuple[str, ...]:
    classifier = getattr(model, "pretrained_cfg", {}).get("classifier") or "head"
    return (classifier,) if isinstance(classifier, str) else tuple(classifier)


# formulas that torch's registry lacks, in FLOPs: on a CPU the fused attention is one of them


def _cpu_attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (width + value[-1])


def _vector_flops(a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * a.numel()


def _addmv_flops(_added: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * a.numel()


def _addbmm_flops(_added: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * a.numel() * b[-1]


_MISSING: dict[Any, Any] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _cpu_attention_flops,
    _ATEN.mv: _vector_flops,
    _ATEN.dot: _vector_flops,
    _ATEN.addmv: _addmv_flops,
    _ATEN.addbmm: _addbmm_flops,
    _ATEN.baddbmm_: _addbmm_flops,
}
