"""In which arithmetic a matrix product runs, and what may be watching it."""

from typing import Optional

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

# CPUs without instructions for them: torch's products then take several times as long as in float32
_HAS_MKLDNN = torch.backends.mkldnn.is_available()
_SLOW_BFLOAT16 = _HAS_MKLDNN and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
_SLOW_FLOAT16 = _HAS_MKLDNN and not torch.ops.mkldnn._is_mkldnn_fp16_supported()


def is_low(dtype: torch.dtype) -> bool:
    """float16 or bfloat16."""
    return dtype == torch.float16 or dtype == torch.bfloat16


def is_slow(x: Tensor) -> bool:
    """Whether a product of x, under autocast if that is on, is faster in float32: its sums are float32 in any case."""
    if torch.jit.is_scripting() or not x.is_cpu:
        return False
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    return (_SLOW_BFLOAT16 and dtype == torch.bfloat16) or (_SLOW_FLOAT16 and dtype == torch.float16)


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on where x is."""
    if torch.jit.is_scripting() or x.is_meta:  # autocast does not know the meta device
        return False
    return torch.is_autocast_enabled(x.device.type)


def is_transformed() -> bool:
    """Whether a compiler, a tracer or a transform of torch.func runs the code, which must see plain operations."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_fx_symbolic_tracing():
        return True
    return maybe_current_level() is not None


def is_compiling() -> bool:
    """`torch.compiler.is_compiling`, also in TorchScript."""
    return False if torch.jit.is_scripting() else torch.compiler.is_compiling()


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a b in at least float32, whatever autocast says."""
    wide = torch.promote_types(b.dtype, torch.float32)
    if torch.jit.is_scripting() or b.is_meta:
        return torch.matmul(a.to(wide), b.to(wide))
    with torch.autocast(b.device.type, enabled=False):
        return torch.matmul(a.to(wide), b.to(wide))


def product(a: Tensor, b: Tensor, out: Optional[Tensor] = None) -> Tensor:
    """a b for equally many leading axes, in the arithmetic that is fastest for their dtype.

    `out` is memory for the result, contiguous, of its size and dtype, that a product without gradients may use.
    """
    if is_slow(a):
        wide = wide_product(a, b)
        return wide.to(a.dtype) if out is None else out.view_as(wide).copy_(wide)
    if out is None:
        return torch.matmul(a, b)
    result = out.view(a.shape[:-1] + b.shape[-1:])
    torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out=result.flatten(0, -3))
    return result
