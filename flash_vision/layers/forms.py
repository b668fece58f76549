"""The forms of a gated unit that take its weights and do not call its modules, for speed and a small memory.

Each equals the unit's own forward, which runs where none fits: several heads, replaced or watched projections, tracing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_vision.layers.projections import is_plain, is_plain_convolution, is_plain_norm, is_watched
from flash_vision.layers.windows import TokenContext
from flash_vision.ops.arithmetic import is_autocast, is_transformed
from flash_vision.ops.convolution import add_convolution_
from flash_vision.ops.gated import Factors, apply_factors, gated_unit, shared_buffer

if TYPE_CHECKING:
    from flash_vision.layers.gau import GatedAttentionUnit


def eager_form(unit: GatedAttentionUnit) -> str:
    """Which fits: "train", "infer", or "" where modules, compilers or transforms must see the products."""
    if is_transformed():
        return ""
    if not is_plain(unit.gate, unit.value, unit.base, unit.proj) or not is_plain_convolution(unit.value_conv):
        return ""
    if torch.is_grad_enabled():
        return "train" if unit.recomputes else ""
    return "infer" if unit.shares_buffers else ""


def train(
    unit: GatedAttentionUnit,
    x: Tensor,
    context: TokenContext,
    *,
    norm: nn.LayerNorm | None = None,
    checkpoint: bool = False,
) -> Tensor:
    """With gradients and a small memory: `ops.gated` recomputes in the backward pass what is cheap to recompute.

    Args:
        x: (B, G, P, C); the same comes back.
        norm: of x, where that is not normed.
        checkpoint: keep x alone.
    """
    assert unit.gate is not None

    def factors(base: Tensor, *parameters: Tensor) -> Factors:
        return unit.factors(base, list(parameters), context)

    weights = unit.gate.weight, unit.value.weight, unit.base.weight, unit.proj.weight
    convolution = None
    if unit.value_conv is not None:
        assert unit.value_conv.bias is not None
        convolution = unit.value_conv.weight, unit.value_conv.bias, context.layout
    return gated_unit(x, *weights, norm, factors, context.buffers, checkpoint, convolution, *unit.factor_parameters())


def train_after(
    unit: GatedAttentionUnit, norm: nn.LayerNorm, x: Tensor, context: TokenContext, *, checkpoint: bool
) -> Tensor | None:
    """unit(norm(x)) as `train` that keeps x instead of norm(x), or None where that takes calling the modules."""
    if eager_form(unit) != "train" or not is_plain_norm(norm) or is_watched(unit):
        return None
    return train(unit, x, context, norm=norm, checkpoint=checkpoint)


def infer(unit: GatedAttentionUnit, x: Tensor, context: TokenContext, *, onto: Tensor | None = None) -> Tensor:
    """Without gradients, with two buffers of size E that all units of the forward pass share.

    Args:
        x: (B, G, P, C), normed; the same comes back.
        onto: (B, G, P, C) that the output is added to in place.
    """
    batch, windows, tokens, dim = x.shape
    dtype, device = x.dtype, x.device.type
    if is_autocast(x):
        dtype = torch.get_autocast_dtype(device)
    flat = x.to(dtype).flatten(0, 2)
    inner, mixed = (shared_buffer(context.buffers, name, flat, unit.value.out_features) for name in ("inner", "mixed"))
    torch.mm(flat, unit.value.weight.to(dtype).t(), out=inner)
    value = F.silu(inner, inplace=True).view(batch, windows, tokens, -1)
    base = torch.mm(flat, unit.base.weight.to(dtype).t()).view(batch, windows, tokens, -1)
    weights, queries, keys = unit.factors(base, unit.factor_parameters(), context)
    out = apply_factors(weights, queries, keys, value.unsqueeze(1), mixed).view_as(inner)
    if unit.value_conv is not None:
        assert unit.value_conv.bias is not None
        add_convolution_(out.view_as(value), value, context.layout, unit.value_conv.weight, unit.value_conv.bias)
    if unit.gate is not None:
        torch.mm(flat, unit.gate.weight.to(dtype).t(), out=inner)  # the value is not needed any more
        out = F.silu(inner, inplace=True).mul_(out)
    if onto is not None:
        tokens_onto = onto.view(-1, dim)
        torch.addmm(tokens_onto, out, unit.proj.weight.t(), out=tokens_onto)
        return onto
    return torch.mm(out, unit.proj.weight.to(dtype).t()).view(batch, windows, tokens, dim)


def add_onto(unit: GatedAttentionUnit, x: Tensor, normed: Tensor, context: TokenContext) -> Tensor:
    """x + unit(normed), written over x where gradients, dtypes, compilers and hooks allow it."""
    dtypes = {x.dtype, normed.dtype, unit.proj.weight.dtype}
    in_place = eager_form(unit) == "infer" and not is_watched(unit) and len(dtypes) == 1 and x.is_contiguous()
    if in_place and not is_autocast(x):
        return infer(unit, normed, context, onto=x)
    return x + unit(normed, context)


def has_compiled_form(unit: GatedAttentionUnit) -> bool:
    """Whether a compiler asks for `compiled` and the unit has it."""
    return torch.compiler.is_compiling() and unit.recomputes and not is_watched(unit)


def compiled(unit: GatedAttentionUnit, x: Tensor, context: TokenContext) -> Tensor:
    """For torch.compile: the axis of the one head is there from the start.

    The layout optimisation of the compiler takes a tensor of four axes near convolutions for an image and lays it out
    channels-last, with the windows as channels. Five axes it leaves alone.

    Args:
        x: (B, 1, G, P, C), normed; the same comes back.
    """
    assert unit.gate is not None
    weights, queries, keys = unit.factors(unit.base(x), unit.factor_parameters(), context)
    value = F.silu(unit.value(x))
    mixed = apply_factors(weights, queries, keys, value)
    if unit.value_conv is not None:
        mixed = mixed + unit.convolve(value.squeeze(1), context).unsqueeze(1)
    return unit.proj(F.silu(unit.gate(x)) * mixed)
