"""fvcore's counters, on the meta device, with handlers for the operators that they do not know.

fvcore counts one multiply-add as one; its normalisation and pooling entries are rough (5 per element of a layer
norm), but timm's tables hold them, so they are kept apart rather than dropped.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flash_vision.profiling.kinds import operator_kind

with warnings.catch_warnings():
    # fvcore scripts a loss function when imported, and torch.jit.script is deprecated
    warnings.simplefilter("ignore")
    from fvcore.nn import ActivationCountAnalysis, FlopCountAnalysis
    from fvcore.nn.jit_handles import einsum_flop_jit, generic_activation_jit, get_shape


@dataclass(frozen=True)
class TraceCount:
    """What fvcore counts for one forward pass: MACs by module and operator, activations, and what it does not know."""

    by_module_and_operator: dict[str, Counter[str]]
    activations: int
    unsupported: Counter[str]

    @property
    def by_operator(self) -> Counter[str]:
        """MACs of the whole model by operator, fvcore's names ("conv" for a convolution)."""
        return self.by_module_and_operator[""]

    @property
    def total(self) -> int:
        """MACs with normalisation and pooling: the figure of timm's tables, fused attention included."""
        return int(sum(self.by_operator.values()))

    @property
    def products(self) -> int:
        """MACs of matrix products and convolutions only."""
        return int(sum(macs for name, macs in self.by_operator.items() if is_product(name)))


def is_product(operator: str) -> bool:
    """Whether a counter's operator is a matrix product or a convolution ("conv" is fvcore's name)."""
    return operator == "conv" or operator_kind(operator) in ("matmul", "convolution")


def trace_count(model: nn.Module, inputs: Tensor) -> TraceCount:
    """Counts one forward pass with fvcore.

    Args:
        model: on the device of `inputs`; the meta device costs neither time nor memory.
        inputs: (B, channels, H, W).

    Raises:
        RuntimeError, NotImplementedError: the model cannot be traced on this device.
    """
    flops = FlopCountAnalysis(model, inputs).set_op_handle(**_FLOP_HANDLERS)
    activations = ActivationCountAnalysis(model, inputs).set_op_handle(**_ACTIVATION_HANDLERS)
    for analysis in (flops, activations):
        analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
    with torch.no_grad(), _meta_convolutions(inputs.is_meta):
        counts = flops.by_module_and_operator()
        return TraceCount(dict(counts), int(activations.total()), Counter(flops.unsupported_ops()))


# handlers: each takes the operator's inputs and outputs as jit values


def _shape(value: Any) -> list[int]:
    shape = get_shape(value)
    if shape is None:
        raise RuntimeError(f"the trace holds no shape for {value.debugName()}")
    return shape


def _matmul(inputs: list[Any], outputs: list[Any]) -> int:
    """Broadcasting and vectors included, which fvcore's own handler miscounts: one dot product per output element."""
    return math.prod(_shape(outputs[0])) * _shape(inputs[0])[-1]


def _added_matmul(inputs: list[Any], outputs: list[Any]) -> int:
    """baddbmm, addmv: input + a b."""
    return math.prod(_shape(outputs[0])) * _shape(inputs[1])[-1]


def _addbmm(inputs: list[Any], outputs: list[Any]) -> int:
    batch, rows, inner = _shape(inputs[1])
    return batch * rows * inner * _shape(inputs[2])[-1]


def _scaled_dot_product_attention(inputs: list[Any], outputs: list[Any]) -> int:
    """Two products: (..., L, S) with (..., M, S), then (..., L, M) with (..., M, E)."""
    *_, length, width = _shape(inputs[0])
    num_keys, value_width = _shape(inputs[1])[-2], _shape(inputs[2])[-1]
    batch = math.prod(_shape(outputs[0])[:-2])
    return batch * length * num_keys * (width + value_width)


def _convolution_by_name(inputs: list[Any], outputs: list[Any]) -> Counter[str]:
    """A convolution with padding "same" or "valid"."""
    batch, _, *sides = _shape(outputs[0])
    return Counter({"conv": batch * math.prod(sides) * math.prod(_shape(inputs[1]))})


def _einsum(inputs: list[Any], outputs: list[Any]) -> int:
    """Two operands: the product of all index sizes. More operands: fvcore's search for the best order."""
    equation = inputs[0].toIValue().replace(" ", "")
    operands = equation.partition("->")[0].split(",")
    shapes = [_shape(value) for value in inputs[1].node().inputs()]
    if len(operands) != 2 or "." in equation:
        return int(einsum_flop_jit(inputs, outputs))  # pyright: ignore[reportArgumentType]
    sizes = {letter: size for word, shape in zip(operands, shapes, strict=True) for letter, size in zip(word, shape)}  # noqa: B905
    return math.prod(sizes.values())


_FLOP_HANDLERS: dict[str, Callable[..., Any]] = {
    "aten::matmul": _matmul,
    "aten::mm": _matmul,
    "aten::bmm": _matmul,
    "aten::mv": _matmul,
    "aten::dot": _matmul,
    "aten::baddbmm": _added_matmul,
    "aten::baddbmm_": _added_matmul,
    "aten::addmv": _added_matmul,
    "aten::addbmm": _addbmm,
    "aten::_convolution_mode": _convolution_by_name,
    "aten::einsum": _einsum,
    "aten::scaled_dot_product_attention": _scaled_dot_product_attention,
}
_ACTIVATION_HANDLERS: dict[str, Callable[..., Any]] = {
    name: generic_activation_jit(name.removeprefix("aten::")) for name in _FLOP_HANDLERS if name != "aten::einsum"
}


# Convolutions on the meta device compute their shapes in Python and reject the tracer's sizes, which are tensors.
# While tracing they are called in the one form that the tracer records, and their shapes are worked out on ints.


_recorded_convolution: Callable[..., Tensor] = torch._convolution  # pyright: ignore[reportPrivateImportUsage]


class _ConvolutionShapes(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._convolution.default:
            return args[0].new_empty(_convolution_shape(*args[:8], groups=args[8]))
        return func(*args, **(kwargs or {}))


def _convolution_shape(
    x: Tensor,
    weight: Tensor,
    _bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    extra: Any,
    *,
    groups: int,
) -> list[int]:
    sides = []
    for i, (side, kernel) in enumerate(zip(x.shape[2:], weight.shape[2:], strict=True)):
        reach = int(dilation[i]) * (int(kernel) - 1)
        if transposed:
            sides.append((int(side) - 1) * int(stride[i]) - 2 * int(padding[i]) + reach + int(extra[i]) + 1)
        else:
            sides.append((int(side) + 2 * int(padding[i]) - reach - 1) // int(stride[i]) + 1)
    channels = int(weight.shape[1]) * int(groups) if transposed else int(weight.shape[0])
    return [int(x.shape[0]), channels, *sides]


def _plain_convolution(dims: int) -> Callable[..., Tensor]:
    def convolution(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        dilation = _per_axis(dilation, dims)
        if padding == "valid":
            padding = 0
        elif padding == "same":
            padding = [int(d) * (int(k) - 1) // 2 for d, k in zip(dilation, weight.shape[2:], strict=True)]
        form = (_per_axis(stride, dims), _per_axis(padding, dims), dilation, False, [0] * dims, groups)
        return _recorded_convolution(input, weight, bias, *form, False, False, False, False)

    return convolution


def _transposed_convolution(dims: int) -> Callable[..., Tensor]:
    def convolution(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Tensor:
        stride, padding, dilation = (_per_axis(value, dims) for value in (stride, padding, dilation))
        form = (stride, padding, dilation, True, _per_axis(output_padding, dims), groups)
        return _recorded_convolution(input, weight, bias, *form, False, False, False, False)

    return convolution


def _per_axis(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else [int(v) for v in value]


def _meta_convolutions(active: bool) -> ExitStack:
    stack = ExitStack()
    if active:
        for dims in (1, 2, 3):
            stack.enter_context(mock.patch.object(F, f"conv{dims}d", _plain_convolution(dims)))
            stack.enter_context(mock.patch.object(F, f"conv_transpose{dims}d", _transposed_convolution(dims)))
        stack.enter_context(_ConvolutionShapes())
    return stack
