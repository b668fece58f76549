"""relu2 scores of one head with gradients by hand, for training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd.function import once_differentiable
from torch.fx._symbolic_trace import is_fx_symbolic_tracing


def is_transformed() -> bool:
    """Whether a compiler, a tracer or a transform of torch.func runs the code, which must see plain operations."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_fx_symbolic_tracing():
        return True
    return maybe_current_level() is not None


def takes_relu2_scores(q: Tensor, k: Tensor, attn_bias: Tensor | None) -> bool:
    """Whether `relu2_scores` fits: gradients, five axes with one head, float32 or float64, one bias for all windows."""
    if not torch.is_grad_enabled() or is_transformed() or q.dim() != 5 or q.shape[1] != 1:
        return False
    if q.dtype not in (torch.float32, torch.float64) or k.dtype != q.dtype:
        return False
    if not q.is_meta and torch.is_autocast_enabled(q.device.type):
        return False
    return attn_bias is None or (attn_bias.dtype == q.dtype and attn_bias.numel() == q.shape[3] * k.shape[3])


def relu2_scores(q: Tensor, k: Tensor, attn_bias: Tensor | None, factor: float) -> Tensor:
    """relu(factor * q k^T + bias)^2 in two passes over the scores forward and one backward; autograd's takes four.

    Args:
        q, k: (B, 1, G, M, S).
        attn_bias: M * M values, or None.
        factor: of the products.

    Returns:
        (B, 1, G, M, M). Its gradients have none of their own.

    Cost:
        M S MACs a token.
    """
    bias = None if attn_bias is None else attn_bias.reshape(q.shape[3], k.shape[3])
    scores = _Relu2Scores.apply(q.flatten(0, 2), k.flatten(0, 2), bias, factor)
    assert isinstance(scores, Tensor)
    return scores.view(q.shape[0], 1, q.shape[2], q.shape[3], k.shape[3])


def _scaled_product(a: Tensor, b: Tensor, factor: float) -> Tensor:
    """factor * a b, without a pass for the factor."""
    return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=factor)


class _Relu2Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, bias: Tensor | None, factor: float) -> Tensor:
        keys = k.transpose(1, 2)
        similarity = _scaled_product(q, keys, factor) if bias is None else torch.baddbmm(bias, q, keys, alpha=factor)
        root = similarity.relu_()
        ctx.save_for_backward(q, k, root)
        ctx.factor = factor
        return root * root

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, root = ctx.saved_tensors
        needs_q, needs_k, needs_bias, _ = ctx.needs_input_grad
        half = grad_outputs[0] * root  # of the gradient of the similarity, zero where that is negative
        factor = 2 * ctx.factor
        grad_q = _scaled_product(half, k, factor) if needs_q else None
        grad_k = _scaled_product(half.transpose(1, 2), q, factor) if needs_k else None
        return grad_q, grad_k, half.sum(0).mul_(2) if needs_bias else None, None
