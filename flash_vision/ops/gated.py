"""A whole gated unit with its layer norm in one step, for training.

It keeps its input, the three pre-activations and the mixed values and recomputes the norm, the activations, the gated
product and all of the factors: 7 C + S numbers a token (E = 2 C) where autograd would keep about 19 C. As a checkpoint
it keeps the input alone and recomputes all but the last product. What it needs for a moment lies in buffers that all
units of a forward pass share: fresh memory costs a CPU page faults and cold caches.
"""

from contextlib import nullcontext
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flash_vision.ops.arithmetic import is_autocast, product
from flash_vision.ops.attention import global_product, key_value_summary, local_product, mixed_product
from flash_vision.ops.convolution import add_convolution_, add_convolution_gradient_
from flash_vision.ops.windows import WindowLayout

Factors = Tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]
Convolution = Tuple[Tensor, Tensor, WindowLayout]
_silu_out = torch.ops.aten.silu.out
_silu_backward_out = torch.ops.aten.silu_backward.grad_input


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


def shared_buffer(buffers: Dict[str, Tensor], name: str, like: Tensor, num_channels: Optional[int] = None) -> Tensor:
    """Memory for (tokens, num_channels) with undefined contents: the same for all units of one forward pass.

    Args:
        buffers: of that forward pass; filled here.
        name: which buffer.
        like: (tokens, channels), gives tokens, dtype and device, and the channels too if num_channels is None.
    """
    buffer = buffers.get(name)
    shape = (like.shape[0], like.shape[1] if num_channels is None else num_channels)
    if buffer is None or buffer.shape != shape or buffer.dtype != like.dtype or buffer.device != like.device:
        buffer = buffers[name] = torch.empty(shape, dtype=like.dtype, device=like.device)
    return buffer


def gated_unit(
    x: Tensor,
    gate: Tensor,
    value: Tensor,
    base: Tensor,
    proj: Tensor,
    norm: Optional[nn.LayerNorm],
    factors: Callable[..., Factors],
    buffers: Dict[str, Tensor],
    checkpoint: bool,
    convolution: Optional[Convolution],
    *parameters: Tensor,
) -> Tensor:
    """(SiLU(X Wu) * (A V + q~ (k~^T V))) Wo with V = SiLU(X Wv) for one head, with a small memory in training.

    Args:
        x: (B, G, P, C); X is norm(x).
        gate, value, base, proj: Wu, Wv (E, C), Wz (S, C) and Wo (C, E), as `nn.Linear` keeps them.
        norm: None where x is normed already.
        factors: maps (X Wz as (B, G, P, S), *parameters) to weights, queries and keys, as `apply_factors` takes them.
        buffers: see `shared_buffer`.
        checkpoint: keep x alone for the backward pass.
        convolution: weight, bias and layout of a convolution of V that joins the branches, see
            `ops.convolution.add_convolution_`; None for none.
        parameters: what `factors` depends on and gradients flow to.

    Returns:
        (B, G, P, C), in the dtype of autocast where that is on.

    Cost:
        3 C E + C S MACs a token, the products of `apply_factors` and the convolution; as a checkpoint all but C E of it
        once more.
    """
    scale, shift, eps = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
    kernel, offset, layout = (None, None, None) if convolution is None else convolution
    how = _How(factors, buffers, checkpoint, eps, layout)
    out = _GatedUnit.apply(x, scale, shift, gate, value, base, proj, kernel, offset, how, *parameters)
    assert isinstance(out, Tensor)
    return out


class _How(NamedTuple):
    """What `gated_unit` is given beside tensors."""

    factors: Callable[..., Factors]
    buffers: Dict[str, Tensor]
    checkpoint: bool
    eps: float
    layout: Optional[WindowLayout]


class _Kept(NamedTuple):
    """What the backward pass needs of the forward pass beside x and the weights: (tokens, E) and base (B, G, P, S)."""

    gate: Tensor
    value: Tensor
    base: Tensor
    mixed: Tensor


def _mix(
    how: _How,
    shape: torch.Size,
    flat: Tensor,
    weights: Sequence[Tensor],
    convolution: Tuple[Optional[Tensor], Optional[Tensor]],
    parameters: Sequence[Tensor],
) -> _Kept:
    """From X (tokens, C) to the mixed values; what is not kept for longer lies in shared buffers."""

    def project(name: str, weight: Tensor) -> Tensor:
        weight = weight.to(flat.dtype).t()
        out = shared_buffer(how.buffers, name, flat, weight.shape[1]) if how.checkpoint else None
        return torch.mm(flat, weight, out=out)  # pyright: ignore[reportArgumentType] (None is what it means)

    gate, value, base = (project(n, w) for n, w in zip(("gate", "value", "base"), weights, strict=True))
    batch, windows, tokens = shape[:3]
    base = base.view(batch, windows, tokens, -1)
    v = _silu_out(value, out=shared_buffer(how.buffers, "first", value))
    out = shared_buffer(how.buffers, "second", value) if how.checkpoint else None
    with torch.no_grad():  # the factors are recomputed under autograd in the backward pass
        mixed = apply_factors(*how.factors(base, *parameters), v.view(batch, 1, windows, tokens, -1), out)
        kernel, offset = convolution
        if kernel is not None and offset is not None and how.layout is not None:
            values = v.view(batch, windows, tokens, -1)
            add_convolution_(mixed.view_as(values), values, how.layout, kernel, offset)
    return _Kept(gate, value, base, mixed.view_as(gate))


class _GatedUnit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Optional[Tensor],
        shift: Optional[Tensor],
        wu: Tensor,
        wv: Tensor,
        wz: Tensor,
        wo: Tensor,
        kernel: Optional[Tensor],
        offset: Optional[Tensor],
        how: _How,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.dtype, ctx.autocast = x.dtype, nullcontext()
        if is_autocast(x):
            ctx.dtype = torch.get_autocast_dtype(x.device.type)
            ctx.autocast = torch.autocast(x.device.type, ctx.dtype)
        ctx.how = how
        normed, mean, deviation = x, None, None
        if scale is not None:
            normed, mean, deviation = torch.native_layer_norm(x, x.shape[-1:], scale, shift, how.eps)
        flat = normed.to(ctx.dtype).flatten(0, 2)
        kept = _mix(how, x.shape, flat, (wu, wv, wz), (kernel, offset), parameters)
        tensors = (x, mean, deviation, scale, shift, wu, wv, wz, wo, kernel, offset, *parameters)
        ctx.save_for_backward(*tensors, *(() if how.checkpoint else kept))
        inner = shared_buffer(how.buffers, "first", kept.gate)
        gated = _silu_out(kept.gate, out=inner).mul_(kept.mixed)
        out = torch.empty(x.shape, dtype=ctx.dtype, device=x.device)  # not a view: whoever asked may add onto it
        torch.mm(gated, wo.to(ctx.dtype).t(), out=out.view(-1, x.shape[-1]))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, mean, deviation, scale, shift, wu, wv, wz, wo, kernel, offset, *rest = ctx.saved_tensors
        how, dtype, shape = ctx.how, ctx.dtype, x.shape
        normed = x if scale is None else F.layer_norm(x, shape[-1:], scale, shift, how.eps)
        flat = normed.to(dtype).flatten(0, 2)
        if how.checkpoint:
            parameters = rest
            with ctx.autocast:
                kept = _mix(how, shape, flat, (wu, wv, wz), (kernel, offset), parameters)
        else:
            parameters, kept = rest[:-4], _Kept(*rest[-4:])
        gate, value, base, mixed = kept
        needs_x, needs_scale, needs_shift, needs_u, needs_v, needs_z, needs_o, *needs_convolution = (
            ctx.needs_input_grad[:9]
        )
        # "second" may hold the mixed values
        first, second, third = (shared_buffer(how.buffers, n, gate) for n in ("first", "third", "fourth"))
        grad_out = grad_outputs[0].to(dtype).flatten(0, 2)

        def of_weight(needed: bool, grad: Tensor, inputs: Tensor, weight: Tensor) -> Optional[Tensor]:
            return torch.mm(grad.t(), inputs).to(weight.dtype) if needed else None

        grad_gated = torch.mm(grad_out, wo.to(dtype), out=first)
        activated = _silu_out(gate, out=second)
        grad_o = of_weight(needs_o, grad_out, torch.mul(activated, mixed, out=third), wo) if needs_o else None
        grad_mixed = activated.mul_(grad_gated).view(shape[0], 1, *shape[1:3], -1)
        grad_gate = _silu_backward_out(grad_gated.mul_(mixed), gate, grad_input=first)
        grad_u = of_weight(needs_u, grad_gate, flat, wu)
        needs_normed = needs_x or needs_scale or needs_shift
        grad_x = torch.mm(grad_gate, wu.to(dtype)) if needs_normed else None

        # the factors, small, once more and under autograd; everything of size E by hand
        with torch.enable_grad(), ctx.autocast:
            leaves = [t.detach().requires_grad_() for t in (base, *parameters)]
            made = [t for t in how.factors(*leaves) if t is not None]
        v = _silu_out(value, out=third).view_as(grad_mixed)
        grad_v, grad_made = _product_gradients(*_unpack(made), v, grad_mixed, out=first)
        grad_kernel, grad_offset = None, None
        if kernel is not None and how.layout is not None:
            onto, values = grad_v.view(shape[0], *shape[1:3], -1), v.squeeze(1)
            grad_kernel, grad_offset = add_convolution_gradient_(
                onto, grad_mixed.squeeze(1), values, how.layout, kernel, needs_convolution
            )
        grad_value = _silu_backward_out(grad_v.view_as(value), value, grad_input=first)
        grad_made = [g.to(t.dtype) for g, t in zip(grad_made, made, strict=True)]
        grad_base, *grad_parameters = torch.autograd.grad(made, leaves, grad_made, allow_unused=True)
        grad_base = grad_base.to(dtype).flatten(0, 2)
        grad_v, grad_z = of_weight(needs_v, grad_value, flat, wv), of_weight(needs_z, grad_base, flat, wz)
        grad_scale, grad_shift = None, None
        if grad_x is not None:
            torch.addmm(grad_x, grad_value, wv.to(dtype), out=grad_x)
            torch.addmm(grad_x, grad_base, wz.to(dtype), out=grad_x)
            grad_x = grad_x.view(shape)
            if scale is not None:
                needed = [needs_x, needs_scale, needs_shift]
                grad_x, grad_scale, grad_shift = torch.ops.aten.native_layer_norm_backward(
                    grad_x.to(x.dtype), x, shape[-1:], mean, deviation, scale, shift, needed
                )
        grads = (grad_x, grad_scale, grad_shift, grad_u, grad_v, grad_z, grad_o, grad_kernel, grad_offset)
        return (*grads, None, *grad_parameters)


def _unpack(made: List[Tensor]) -> Factors:
    detached = [t.detach() for t in made]
    if len(detached) == 1:
        return detached[0], None, None
    if len(detached) == 2:
        return None, detached[0], detached[1]
    return detached[0], detached[1], detached[2]


def _product_gradients(
    weights: Optional[Tensor],
    queries: Optional[Tensor],
    keys: Optional[Tensor],
    v: Tensor,
    grad: Tensor,
    *,
    out: Tensor,
) -> Tuple[Tensor, List[Tensor]]:
    """Gradients of `apply_factors` for v, in the memory of out, and for the factors given, by hand; shapes as there."""
    grad_v: Optional[Tensor] = None
    grad_factors = []
    if weights is not None:
        grad_factors.append(product(grad, v.transpose(-2, -1)))
        grad_v = local_product(weights.transpose(-2, -1), grad, out)
    if queries is not None and keys is not None:
        flat_v, flat_grad = v.flatten(2, 3), grad.flatten(2, 3)
        summary, grad_summary = key_value_summary(keys, flat_v), key_value_summary(queries, flat_grad)
        grad_factors.append(product(flat_grad, summary.transpose(-2, -1)))
        grad_factors.append(product(flat_v, grad_summary.transpose(-2, -1)))
        if grad_v is None:
            return product(keys.to(v.dtype), grad_summary, out), grad_factors
        grad_v = grad_v.flatten(0, 1).flatten(1, 2)
        if v.dtype == torch.float32:
            torch.baddbmm(grad_v, keys.squeeze(1), grad_summary.squeeze(1), out=grad_v)
        else:
            grad_v += product(keys.to(v.dtype), grad_summary).view_as(grad_v)
    assert grad_v is not None
    return grad_v, grad_factors
