"""The middle of a gated unit in one step: from the projections' outputs to the unit's output.

In training this keeps the three pre-activations and the mixed values, and recomputes the activations, the gated
product and everything about the factors: 6 C + S numbers a token (E = 2 C) where autograd would keep about 17 C.
"""

from contextlib import nullcontext
from typing import Any, Callable, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_vision.ops.attention import global_product, key_value_summary, local_product, mixed_product

Factors = Tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]


def apply_factors(
    weights: Optional[Tensor],
    queries: Optional[Tensor],
    keys: Optional[Tensor],
    v: Tensor,
    out: Optional[Tensor] = None,
) -> Tensor:
    """A V + q~ (k~^T V), or the one branch whose factors are given.

    Args:
        weights: (B, heads, G, P, P) or None.
        queries, keys: (B, heads, G * P, R) or None.
        v: (B, heads, G, P, E).
        out: memory for the result, as `ops.attention.local_product` takes it.

    Returns:
        (B, heads, G, P, E).
    """
    if queries is None or keys is None:
        assert weights is not None
        return local_product(weights, v, out)
    if weights is None:
        return global_product(queries, keys, v.flatten(2, 3), out).unflatten(2, (v.shape[2], v.shape[3]))
    return mixed_product(weights, queries, keys, v, out)


def gated_output(
    gate: Tensor, value: Tensor, base: Tensor, proj: Tensor, factors: Callable[..., Factors], *parameters: Tensor
) -> Tensor:
    """(SiLU(gate) * (A SiLU(value) + q~ (k~^T SiLU(value)))) Wo for one head, with a small memory in training.

    Args:
        gate, value: pre-activations X Wu and X Wv, (B, G, P, E).
        base: pre-activation X Wz, (B, G, P, S).
        proj: Wo as `nn.Linear` keeps it, (C, E).
        factors: maps (base, *parameters) to weights, queries and keys, as `apply_factors` takes them.
        parameters: what `factors` depends on and gradients flow to.

    Returns:
        (B, G, P, C).

    Cost:
        the products of `apply_factors` and E C MACs a token.
    """
    return _GatedOutput.apply(gate, value, base, proj, factors, *parameters)  # pyright: ignore[reportReturnType]


class _GatedOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        value: Tensor,
        base: Tensor,
        proj: Tensor,
        factors: Callable[..., Factors],
        *parameters: Tensor,
    ) -> Tensor:
        mixed = apply_factors(*factors(base, *parameters), F.silu(value).unsqueeze(1)).squeeze(1)
        ctx.factors = factors
        ctx.autocast = nullcontext()
        if not gate.is_meta:  # which autocast does not know
            device = gate.device.type
            enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
            ctx.autocast = torch.autocast(device, dtype, enabled=enabled)
        ctx.save_for_backward(gate, value, base, proj, mixed, *parameters)
        return F.linear(F.silu(gate).mul_(mixed), proj)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with ctx.autocast:
            return _backward(ctx, grad_outputs[0])


def _backward(ctx: Any, grad_out: Tensor) -> Tuple[Optional[Tensor], ...]:
    gate, value, base, proj, mixed, *parameters = ctx.saved_tensors
    dtype = gate.dtype
    # the factors, small, once more and under autograd; everything of size E by hand
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (base, *parameters)]
        made = [t for t in ctx.factors(*leaves) if t is not None]
    weights, queries, keys = _unpack(made)

    grad_gated = torch.matmul(grad_out.to(dtype), proj.to(dtype))
    activated = F.silu(gate)
    grad_proj = None
    if ctx.needs_input_grad[3]:
        gated = (activated * mixed).flatten(0, 2)
        grad_proj = torch.matmul(grad_out.to(dtype).flatten(0, 2).t(), gated).to(proj.dtype)
    grad_gate = torch.ops.aten.silu_backward(grad_gated * mixed, gate)
    grad_mixed = grad_gated.mul_(activated).unsqueeze(1)

    v = F.silu(value).unsqueeze(1)
    grad_v, grad_made = _product_gradients(weights, queries, keys, v, grad_mixed)
    grad_value = torch.ops.aten.silu_backward(grad_v.squeeze(1), value)
    grad_made = [g.to(t.dtype) for g, t in zip(grad_made, made, strict=True)]
    grad_leaves = torch.autograd.grad(made, leaves, grad_made, allow_unused=True)
    return (grad_gate, grad_value, grad_leaves[0], grad_proj, None, *grad_leaves[1:])


def _unpack(made: list[Tensor]) -> Factors:
    detached = [t.detach() for t in made]
    if len(detached) == 1:
        return detached[0], None, None
    if len(detached) == 2:
        return None, detached[0], detached[1]
    return detached[0], detached[1], detached[2]


def _product_gradients(
    weights: Optional[Tensor], queries: Optional[Tensor], keys: Optional[Tensor], v: Tensor, grad: Tensor
) -> Tuple[Tensor, list[Tensor]]:
    """Gradients of `apply_factors` for v and for the factors given, by hand; shapes as there."""
    grad_v: Optional[Tensor] = None
    grad_factors = []
    if weights is not None:
        grad_factors.append(torch.matmul(grad, v.transpose(-2, -1)))
        grad_v = local_product(weights.transpose(-2, -1), grad)
    if queries is not None and keys is not None:
        flat_v, flat_grad = v.flatten(2, 3), grad.flatten(2, 3)
        summary, grad_summary = key_value_summary(keys, flat_v), key_value_summary(queries, flat_grad)
        grad_factors.append(torch.matmul(flat_grad, summary.transpose(-2, -1)))
        grad_factors.append(torch.matmul(flat_v, grad_summary.transpose(-2, -1)))
        keys = keys.to(v.dtype)
        if grad_v is None:
            return torch.matmul(keys, grad_summary).unflatten(2, (v.shape[2], v.shape[3])), grad_factors
        grad_v = grad_v.flatten(0, 1).flatten(1, 2)
        torch.baddbmm(grad_v, keys.squeeze(1), grad_summary.squeeze(1), out=grad_v)
        grad_v = grad_v.unflatten(1, (v.shape[2], v.shape[3])).unsqueeze(1)
    assert grad_v is not None
    return grad_v, grad_factors
