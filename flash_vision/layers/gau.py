"""Gated attention units: quadratic, and mixed chunk over 2-D windows.

Letters: B batch, G windows, P tokens in a window, C width, E = expansion * C, S query/key channels.
Tokens come and go in window-major order (B, G, P, C). With several heads S and E are split between them, which costs
two layout changes that a single head does not have.
"""

from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn

from flash_vision.layers.checks import check_choice, check_positive
from flash_vision.layers.forms import eager_form, infer, train
from flash_vision.layers.position import RelativePositionBias, position_bias
from flash_vision.layers.scale_offset import ScaleOffset, scale_offset
from flash_vision.layers.windows import TokenContext
from flash_vision.ops.attention import (
    DIVISORS,
    GLOBAL_FNS,
    SCORE_FNS,
    attention_weights,
    joint_weights,
    linear_factors,
)
from flash_vision.ops.gated import Factors, apply_factors
from flash_vision.ops.position import rotate
from flash_vision.ops.windows import merge_windows, partition_windows

BRANCHES = ("both", "local", "global")


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, G, P, D) to (B, heads, G, P, D / heads); a view."""
    if num_heads == 1:
        return x.unsqueeze(1)
    return x.unflatten(-1, (num_heads, x.shape[-1] // num_heads)).permute(0, 3, 1, 2, 4)


def _merge_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, heads, G, P, D) to (B, G, P, heads * D); a view for one head."""
    if num_heads == 1:
        return x.squeeze(1)
    return x.permute(0, 2, 3, 1, 4).flatten(3)


class GatedAttentionUnit(nn.Module):
    """O = (U * (A V)) Wo with U = SiLU(X Wu), V = SiLU(X Wv), A = score(Q K^T + b) inside each window.

    Q and K are two affine roles of one base Z = SiLU(X Wz) (FLASH, 2202.10447, section 3.1). With one window over the
    whole grid this is FLASH-Quad, with smaller ones window attention. Differs from the paper in the choice of
    score and divisor, which `ops.attention.attention_weights` defines, and in the optional convolution.

    Args:
        dim: width C.
        num_roles: affine roles made of the base; a subclass that mixes in more ways takes more.
        expansion: E / C.
        qk_dim: S, over all heads.
        num_heads: heads that S and E are split between; the paper's claim is that a gate makes one enough.
        score_fn: "relu2", "laplace" or "softmax".
        divisor: "inside" (the paper's score(q k / n)) or "outside" (score(q k / sqrt(S)) / n).
        gate: False drops U, for ablation.
        bias_window: nominal (rows, columns) of the relative position bias in tokens; None for no bias.
        value_conv: add a depthwise 3x3 convolution of V, a local position term. It needs raster order: one copy
            of V in every layer.

    Raises:
        ValueError: for a name or number out of range.

    Cost:
        3 C E + C S + P (S + E) MACs a token.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_roles: int = 2,
        expansion: float = 2.0,
        qk_dim: int = 128,
        num_heads: int = 1,
        score_fn: str = "relu2",
        divisor: str = "outside",
        gate: bool = True,
        bias_window: Optional[Tuple[int, int]] = None,
        value_conv: bool = False,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        dd: Dict[str, Any] = {"device": device, "dtype": dtype}
        hidden_dim = int(dim * expansion)
        check_choice("score_fn", score_fn, SCORE_FNS)
        check_choice("divisor", divisor, DIVISORS)
        if score_fn == "softmax" and divisor == "inside":
            raise ValueError("divisor must be 'outside' with score_fn='softmax', whose sum stands in for n")
        check_positive("qk_dim", qk_dim)
        check_positive("dim * expansion", hidden_dim)
        if num_heads < 1 or qk_dim % num_heads or hidden_dim % num_heads:
            raise ValueError(
                f"num_heads must divide qk_dim and dim * expansion, got {num_heads} for {qk_dim} and {hidden_dim}"
            )
        self.num_heads = num_heads
        self.score_fn = score_fn
        self.divisor = divisor
        self.gate = nn.Linear(dim, hidden_dim, bias=False, **dd) if gate else None
        self.value = nn.Linear(dim, hidden_dim, bias=False, **dd)
        self.base = nn.Linear(dim, qk_dim, bias=False, **dd)
        self.scale_offset = ScaleOffset(qk_dim, num_roles, **dd)
        self.position_bias = RelativePositionBias(bias_window, num_heads, **dd) if bias_window is not None else None
        self.value_conv = (
            nn.Conv2d(hidden_dim, hidden_dim, 3, padding=1, groups=hidden_dim, **dd) if value_conv else None
        )
        self.proj = nn.Linear(hidden_dim, dim, bias=False, **dd)
        # which of the forms of `layers.forms` it has
        self.recomputes = gate and num_heads == 1
        self.shares_buffers = num_heads == 1

    def factor_parameters(self) -> List[Tensor]:
        """What `factors` depends on: gamma, beta and, with a position bias, its table."""
        parameters: List[Tensor] = [self.scale_offset.gamma, self.scale_offset.beta]
        if self.position_bias is not None:
            parameters.append(self.position_bias.relative_position_bias_table)
        return parameters

    def _roles(self, base: Tensor, parameters: List[Tensor], context: TokenContext) -> List[Tensor]:
        """Pre-activation (B, G, P, S), or (B, 1, G, P, S), to one (B, heads, G, P, S / heads) for each role."""
        roles: List[Tensor] = []
        for role in scale_offset(F.silu(base), parameters[0], parameters[1]):
            if base.dim() == 4:
                role = _split_heads(role, self.num_heads)
            rotary = context.rotary
            if rotary is not None:
                role = rotate(role, rotary[0], rotary[1])
            roles.append(role)
        return roles

    def _local_weights(self, q: Tensor, k: Tensor, parameters: List[Tensor], context: TokenContext) -> Tensor:
        """A of each window, (B, heads, G, P, P)."""
        bias: Optional[Tensor] = None
        if self.position_bias is not None:
            bias = position_bias(parameters[2], context.relative_index)
        return attention_weights(q, k, bias, context.key_mask, score_fn=self.score_fn, divisor=self.divisor)

    def factors(self, base: Tensor, parameters: List[Tensor], context: TokenContext) -> Factors:
        """The weights that the values are mixed with; see `ops.gated.apply_factors`.

        Args:
            base: pre-activation X Wz, (B, G, P, S).
            parameters: of `factor_parameters`, or tensors in their place.
            context: the layout.
        """
        roles = self._roles(base, parameters, context)
        return self._local_weights(roles[0], roles[1], parameters, context), None, None

    def mix(self, base: Tensor, value: Tensor, context: TokenContext) -> Tensor:
        """Mix the tokens: base, pre-activation, (B, G, P, S) and value (B, G, P, E) to (B, G, P, E)."""
        weights, queries, keys = self.factors(base, self.factor_parameters(), context)
        v = _split_heads(value, self.num_heads)
        return _merge_heads(apply_factors(weights, queries, keys, v), self.num_heads)

    def convolve(self, value: Tensor, context: TokenContext) -> Tensor:
        """The depthwise convolution of V, (B, G, P, E) to the same."""
        assert self.value_conv is not None
        raster = merge_windows(value, context.layout).permute(0, 3, 1, 2)
        return partition_windows(self.value_conv(raster).permute(0, 2, 3, 1), context.layout)

    def forward(self, x: Tensor, context: TokenContext) -> Tensor:
        """(B, G, P, C), normed, to the unit's output (B, G, P, C)."""
        if not torch.jit.is_scripting():
            form = eager_form(self)
            if form:
                return infer(self, x, context) if form == "infer" else train(self, x, context)
        grad = torch.is_grad_enabled()
        value = F.silu(self.value(x), inplace=not grad)
        mixed = self.mix(self.base(x), value, context)
        if self.value_conv is not None:
            mixed = mixed + self.convolve(value, context)
        if self.gate is not None:
            gate = F.silu(self.gate(x), inplace=not grad)
            mixed = mixed * gate if grad else mixed.mul_(gate)
        return self.proj(mixed)


class MixedChunkUnit(GatedAttentionUnit):
    """O = (U * (local + global)) Wo: quadratic attention inside windows, linear attention between all of them.

    Two affine roles of one base for each branch; one V and one gate for both (FLASH, 2202.10447, section 3.2,
    non-causal). The paper's chunks are 1-D; here they are 2-D windows.

    Args:
        global_fn: "plain" (the paper's) or "inline", see `ops.attention.linear_attention`.
        branches: "both", or "local" or "global" alone, for ablation.
        others: as in `GatedAttentionUnit`.

    Raises:
        ValueError: for a name or number out of range.

    Cost:
        3 C E + C S + P (S + E) + 2 S E MACs a token; where one window holds all, P S in place of 2 S E.
    """

    def __init__(
        self,
        dim: int,
        *,
        expansion: float = 2.0,
        qk_dim: int = 128,
        num_heads: int = 1,
        score_fn: str = "relu2",
        divisor: str = "outside",
        global_fn: str = "plain",
        branches: str = "both",
        gate: bool = True,
        bias_window: Optional[Tuple[int, int]] = None,
        value_conv: bool = False,
        device=None,
        dtype=None,
    ) -> None:
        dd: Dict[str, Any] = {"device": device, "dtype": dtype}
        check_choice("global_fn", global_fn, GLOBAL_FNS)
        check_choice("branches", branches, BRANCHES)
        super().__init__(
            dim,
            num_roles=4 if branches == "both" else 2,
            expansion=expansion,
            qk_dim=qk_dim,
            num_heads=num_heads,
            score_fn=score_fn,
            divisor=divisor,
            gate=gate,
            bias_window=bias_window if branches != "global" else None,
            value_conv=value_conv,
            **dd,
        )
        self.global_fn = global_fn
        self.has_local = branches != "global"
        self.has_global = branches != "local"

    def factors(self, base: Tensor, parameters: List[Tensor], context: TokenContext) -> Factors:
        """The weights that the values are mixed with, as in `GatedAttentionUnit.factors`, of each branch present.

        One window that holds all tokens has the sum of both branches as the weights of the first.
        """
        roles = self._roles(base, parameters, context)
        weights: Optional[Tensor] = None
        queries: Optional[Tensor] = None
        keys: Optional[Tensor] = None
        if self.has_local:
            weights = self._local_weights(roles[0], roles[1], parameters, context)
        if self.has_global:
            if weights is not None and weights.shape[2] == 1:
                return joint_weights(weights, roles[2], roles[3], global_fn=self.global_fn), None, None
            mask = context.key_mask
            queries, keys = linear_factors(
                roles[-2].flatten(2, 3),
                roles[-1].flatten(2, 3),
                mask.flatten() if mask is not None else None,
                global_fn=self.global_fn,
            )
        return weights, queries, keys


# decorating would turn the classes into plain nn.Module for a type checker
register_notrace_module(GatedAttentionUnit)
register_notrace_module(MixedChunkUnit)
