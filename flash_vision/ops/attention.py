"""What runs: quadratic attention inside windows and linear attention between them.

Letters as in ARCHITECTURE.md: M keys, N tokens, S query/key channels, E value channels. n is always the number of
real keys. Each function equals its namesake in `reference.py`.
"""

import math
from typing import Optional

import torch
import torch.nn.functional as F
from timm.models import register_notrace_function
from torch import Tensor

SCORE_FNS = ("relu2", "laplace", "softmax")
DIVISORS = ("inside", "outside")
GLOBAL_FNS = ("plain", "inline", "elu1")


def attention_weights(
    q: Tensor,
    k: Tensor,
    attn_bias: Optional[Tensor] = None,
    key_mask: Optional[Tensor] = None,
    *,
    score_fn: str,
    divisor: str,
) -> Tensor:
    """A = score(q k / n + b) with divisor "inside", score(q k / sqrt(S) + b) / n with "outside".

    "inside" is FLASH's (2202.10447, appendix), "outside" that of later vision work (2309.08586). softmax takes only
    "outside": its own sum stands in for n. The scores are squared and normalised in float32 under float16 and
    bfloat16: relu2 overflows float16 above 255.9.

    Args:
        q, k: (..., M, S).
        attn_bias: broadcasts to (..., M, M), or None.
        key_mask: (..., M) bool, True for real keys, leading axes broadcast; None if all are real.
        score_fn: "relu2", "laplace" or "softmax".
        divisor: "inside" or "outside".

    Returns:
        (..., M, M), float32 where q is float16 or bfloat16, else the dtype of q.

    Cost:
        M^2 S MACs.
    """
    inside = divisor == "inside"
    num_keys = k.shape[-2]
    # scaled before the product, so that float16 does not overflow; n^-1 this early would vanish there
    similarity = torch.matmul(q if inside else q * q.shape[-1] ** -0.5, k.transpose(-2, -1))
    if similarity.dtype == torch.float16 or similarity.dtype == torch.bfloat16:
        similarity = similarity.float()
    inverse: Optional[Tensor] = None
    if key_mask is not None:
        inverse = key_mask.sum(-1).to(similarity.dtype).reciprocal()[..., None, None]
    if inside:
        similarity = similarity / num_keys if inverse is None else similarity * inverse
    if attn_bias is not None:
        similarity = similarity + attn_bias
    if key_mask is not None:
        # every score function is exactly zero at -inf, laplace(0) is not
        similarity = similarity.masked_fill(~key_mask[..., None, :], -math.inf)
    if score_fn == "softmax":
        return similarity.softmax(dim=-1)
    if score_fn == "relu2":
        weights = F.relu(similarity).square()
    else:
        # mu = sqrt(1/2), and 1 / (sigma sqrt 2) = sqrt(2 pi) with sigma = sqrt(1 / (4 pi)) (2209.10655)
        weights = 0.5 + 0.5 * torch.erf((similarity - math.sqrt(0.5)) * math.sqrt(2 * math.pi))
    if inside:
        return weights
    return weights / num_keys if inverse is None else weights * inverse


def _scaled(x: Tensor, scale: Optional[Tensor]) -> Tensor:
    return x if scale is None else x * scale


def _quadratic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Optional[Tensor],
    key_mask: Optional[Tensor],
    scale: Optional[Tensor],
    score_fn: str,
    divisor: str,
) -> Tensor:
    weights = attention_weights(q, k, attn_bias, key_mask, score_fn=score_fn, divisor=divisor)
    return torch.matmul(_scaled(weights, scale).to(v.dtype), v)


@torch.fx.wrap
@register_notrace_function
def quadratic_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Optional[Tensor] = None,
    key_mask: Optional[Tensor] = None,
    scale: Optional[Tensor] = None,
    *,
    score_fn: str,
    divisor: str,
) -> Tensor:
    """scale * A V with A from `attention_weights`: the local branch, or the whole of a quadratic GAU.

    Weights of divisor "inside" may lie below the smallest float16 (the published init gives 1e-11 without a bias),
    so there both products run in float32.

    Args:
        q, k: (..., M, S).
        v: (..., M, E).
        attn_bias, key_mask, score_fn, divisor: as in `attention_weights`.
        scale: factor on the result, broadcasts to (..., M, M): it is applied to A, the smaller matrix.

    Returns:
        (..., M, E), dtype of v.

    Cost:
        M^2 (S + E) MACs.
    """
    if v.dtype == torch.float16 and divisor == "inside":
        q, k = q.float(), k.float()
        if torch.jit.is_scripting() or v.is_meta:
            return _quadratic(q, k, v.float(), attn_bias, key_mask, scale, score_fn, divisor).to(v.dtype)
        with torch.autocast(v.device.type, enabled=False):
            return _quadratic(q, k, v.float(), attn_bias, key_mask, scale, score_fn, divisor).to(v.dtype)
    return _quadratic(q, k, v, attn_bias, key_mask, scale, score_fn, divisor)


def _linear(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Optional[Tensor], scale: Optional[Tensor], global_fn: str
) -> Tensor:
    dtype = v.dtype
    if dtype == torch.float16 or dtype == torch.bfloat16:
        k = k.float()
        wide_v = v.float()
    else:
        wide_v = v
    if global_fn == "elu1":
        q, k = F.elu(q) + 1, F.elu(k) + 1
    # 1/n goes to the keys, so that no sum over tokens grows with their number
    share: Optional[Tensor] = None
    if key_mask is None:
        k = k / k.shape[-2]
    else:
        share = (key_mask / key_mask.sum(-1, keepdim=True)).to(k.dtype)
        k = k * share[..., None]
    summary = torch.matmul(k.transpose(-2, -1), wide_v)
    if global_fn == "plain":
        return torch.matmul(q.to(dtype), _scaled(summary, scale).to(dtype))
    mean_k = k.sum(-2, keepdim=True)
    if global_fn == "elu1":
        # the query is divided, not the result: S channels are fewer than E, and the numerator could overflow float16
        q = q / torch.matmul(q.to(mean_k.dtype), mean_k.transpose(-2, -1)).clamp(min=1e-5)
        return torch.matmul(q.to(dtype), _scaled(summary, scale).to(dtype))
    mean_v = wide_v.mean(-2, keepdim=True) if share is None else torch.matmul(share[..., None, :], wide_v)
    covariance = _scaled(summary - mean_k.transpose(-2, -1) * mean_v, scale)
    return torch.matmul(q.to(dtype), covariance.to(dtype)) + _scaled(mean_v, scale).to(dtype)


@torch.fx.wrap
@register_notrace_function
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Optional[Tensor] = None,
    scale: Optional[Tensor] = None,
    *,
    global_fn: str,
) -> Tensor:
    """Attention by way of sum_j k_j^T v_j, linear in N: the global branch, non-causal.

    plain: q (K^T V) / n, signed, no feature map, no denominator (FLASH, 2202.10447, section 3.2).
    inline: q Cov(k, v) + mean(v): weights sum to one by subtraction (InLine, 2412.06590; there without 1/n on q k).
    elu1: phi(q) K^T V / phi(q) sum K with phi = elu + 1 (2006.16236, equation 7).
    The sum over tokens runs in float32 under float16 and bfloat16, with 1/n inside.

    Args:
        q, k: (..., N, S).
        v: (..., N, E).
        key_mask: (..., N) bool, True for real tokens, leading axes broadcast; None if all are real.
        scale: factor on the result, broadcasts to (..., S, E): it is applied to K^T V, not to the tokens.
        global_fn: "plain", "inline" or "elu1".

    Returns:
        (..., N, E), dtype of v.

    Cost:
        2 N S E MACs.
    """
    if torch.jit.is_scripting() or v.is_meta:
        return _linear(q, k, v, key_mask, scale, global_fn)
    with torch.autocast(v.device.type, enabled=False):
        return _linear(q, k, v, key_mask, scale, global_fn)
