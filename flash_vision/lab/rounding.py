"""Low precision where the hardware has none: the results of reduced-precision products, computed in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

EMULATED = {"bfloat16": torch.bfloat16, "float16": torch.float16}

_ATEN = torch.ops.aten
# the leading arguments of each product that are operands, the rest (log-sum-exp, sizes) stays as it is
_OPERANDS: dict[Any, int] = {
    _ATEN.mm: 2,
    _ATEN.addmm: 3,
    _ATEN.bmm: 2,
    _ATEN.baddbmm: 3,
    _ATEN.convolution: 3,
    _ATEN.convolution_backward: 3,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: 3,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: 5,
}


class RoundedProducts(TorchDispatchMode):
    """While active, matrix products and convolutions round operands and results to `dtype`, as under autocast.

    Forward and backward, whatever the model. Sums inside a product are float32, as on tensor cores, and so is
    everything else: weights, norms, activations, the optimiser. That differs from autocast in what is kept in low
    precision between products. float16 keeps its 11 bits and overflows above 65,504, but values below its smallest
    normal number, 6e-5, keep float32's precision, as if a loss scaler always had the best scale.

    Args:
        dtype: a name in EMULATED.
    """

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.dtype = EMULATED[dtype]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = _OPERANDS.get(func._overloadpacket, 0)
        if not operands:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        out = func(*tree_map(self._rounded, args[:operands]), *args[operands:], **kwargs)
        if kwargs.get("out") is not None:  # whoever gave it reads it, not what is returned
            return out.copy_(self._rounded(out))
        if func._overloadpacket is _ATEN._scaled_dot_product_flash_attention_for_cpu:
            return self._rounded(out[0]), *out[1:]
        return tree_map(self._rounded, out)

    def _rounded(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype != torch.float32:
            return x
        y = x.to(self.dtype).float()
        return torch.where(x.abs() < 2.0**-14, x, y) if self.dtype == torch.float16 else y
