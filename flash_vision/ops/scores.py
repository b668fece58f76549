"""relu2 and laplace scores of one head with gradients by hand, for training."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_vision.ops.arithmetic import is_autocast, is_transformed


def takes_scores_by_hand(q: Tensor, k: Tensor, attn_bias: Tensor | None) -> bool:
    """Whether `scores_by_hand` fits: gradients, five axes with one head, float32 or float64, one bias for all."""
    if not torch.is_grad_enabled() or is_transformed() or q.dim() != 5 or q.shape[1] != 1:
        return False
    if q.dtype not in (torch.float32, torch.float64) or k.dtype != q.dtype or is_autocast(q):
        return False
    return attn_bias is None or (attn_bias.dtype == q.dtype and attn_bias.numel() == math.prod(attn_bias.shape[-2:]))


def scores_by_hand(
    q: Tensor, k: Tensor, attn_bias: Tensor | None, factor: float, *, score_fn: str, share: float = 1.0
) -> Tensor:
    """share * f(factor * q k^T + bias), f(x) = relu(x)^2 for "relu2", (1 + erf x) / 2 for "laplace".

    The backward pass has one pass over the scores for relu2, where autograd takes four, and four for laplace.

    Args:
        q, k: (B, 1, G, M, S).
        attn_bias: (..., M, M) or (1, 1), one for all windows, or None.
        factor: of the products.
        share: of the scores.

    Returns:
        (B, 1, G, M, M). Its gradients have none of their own.

    Cost:
        M S MACs a token.
    """
    bias = None if attn_bias is None else attn_bias.reshape(attn_bias.shape[-2:])
    scores = _Scores.apply(q.flatten(0, 2), k.flatten(0, 2), bias, factor, score_fn == "relu2", share)
    assert isinstance(scores, Tensor)
    return scores.view(q.shape[0], 1, q.shape[2], q.shape[3], k.shape[3])


def _scaled_product(a: Tensor, b: Tensor, factor: float) -> Tensor:
    """factor * a b, without a pass for the factor."""
    return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=factor)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, bias: Tensor | None, factor: float, relu2: bool, share: float
    ) -> Tensor:
        keys = k.transpose(1, 2)
        similarity = _scaled_product(q, keys, factor) if bias is None else torch.baddbmm(bias, q, keys, alpha=factor)
        scores = similarity.relu_().square() if relu2 else similarity.erf().add_(1).mul_(0.5)
        if share != 1.0:
            scores.mul_(share)
        ctx.save_for_backward(q, k, similarity)
        ctx.factor, ctx.relu2, ctx.share = factor, relu2, share
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, similarity = ctx.saved_tensors
        needs_q, needs_k, needs_bias = ctx.needs_input_grad[:3]
        # the gradient of the similarity but for a factor, which the products take
        if ctx.relu2:
            slope, rest = grad_outputs[0] * similarity, 2 * ctx.share
        else:
            slope, rest = similarity.square().neg_().exp_().mul_(grad_outputs[0]), ctx.share / math.sqrt(math.pi)
        grad_q = _scaled_product(slope, k, rest * ctx.factor) if needs_q else None
        grad_k = _scaled_product(slope.transpose(1, 2), q, rest * ctx.factor) if needs_k else None
        return grad_q, grad_k, slope.sum(0).mul_(rest) if needs_bias else None, None, None, None
