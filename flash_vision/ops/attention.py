"""What runs: the factors of each branch's attention weights, and the products of weights and values.

Every branch is (weights) V, with weights that do not depend on V: a matrix A inside each window, and two thin factors
q~ and k~ between all tokens. The whole is A V + q~ (k~^T V). Score functions, divisors, masks and normalisations live
in the factors, which are small; the products with V, which are large, are the same for all of them.

Letters: M keys of a window, N tokens, S query/key channels, R = S or S + 1, E value channels. n is always the number
of real keys. Everything equals its namesake in `reference.py`.
"""

import math
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from timm.models import register_notrace_function
from torch import Tensor

from flash_vision.ops.arithmetic import is_autocast, is_compiling, is_low, is_slow, product, wide_product
from flash_vision.ops.scores import scores_by_hand, takes_scores_by_hand

SCORE_FNS = ("relu2", "laplace", "softmax")
DIVISORS = ("inside", "outside")
GLOBAL_FNS = ("plain", "inline")


def _similarity(q: Tensor, k: Tensor, attn_bias: Optional[Tensor], factor: float) -> Tensor:
    """factor * (q k^T) + bias: (..., M, M), float32 where q is float16 or bfloat16."""
    if attn_bias is not None and q.dim() == 5 and q.shape[1] == 1 and q.dtype == attn_bias.dtype and not is_slow(q):
        # one head: all windows are one batch, the bias is broadcast over it, and no pass over the scores is needed
        bias = attn_bias.expand(q.shape[0], 1, q.shape[2], q.shape[3], q.shape[3]).flatten(0, 2)
        similarity = torch.baddbmm(bias, q.flatten(0, 2), k.flatten(0, 2).transpose(1, 2), alpha=factor)
        similarity = similarity.unflatten(0, (q.shape[0], 1, q.shape[2]))
        return similarity.float() if is_low(similarity.dtype) else similarity
    similarity = product(q if factor == 1.0 else q * factor, k.transpose(-2, -1))
    if is_low(similarity.dtype):
        similarity = similarity.float()
    return similarity if attn_bias is None else similarity + attn_bias


def _scores(similarity: Tensor, score_fn: str) -> Tensor:
    if score_fn == "softmax":
        return similarity.softmax(dim=-1)
    if score_fn == "relu2":
        if torch.is_grad_enabled():
            return F.relu(similarity).square()
        kept = similarity.relu_()
        return kept.mul_(kept)
    # mu = sqrt(1/2), and 1 / (sigma sqrt 2) = sqrt(2 pi) with sigma = sqrt(1 / (4 pi)) (2209.10655)
    similarity = (similarity - math.sqrt(0.5)) * math.sqrt(2 * math.pi)
    return 0.5 + 0.5 * torch.erf(similarity)


def _masked_weights(
    q: Tensor, k: Tensor, attn_bias: Optional[Tensor], key_mask: Tensor, score_fn: str, inside: bool
) -> Tensor:
    num_keys = key_mask.sum(-1)[..., None, None]
    if inside:
        similarity = _similarity(q, k, None, 1.0)
        similarity = similarity / num_keys
        if attn_bias is not None:
            similarity = similarity + attn_bias
    else:
        similarity = _similarity(q, k, attn_bias, q.shape[-1] ** -0.5)
    # every score function is exactly zero at -inf; laplace(0) is not
    weights = _scores(similarity.masked_fill(~key_mask[..., None, :], -math.inf), score_fn)
    return weights if inside or score_fn == "softmax" else weights / num_keys


def _laplace_weights(q: Tensor, k: Tensor, attn_bias: Optional[Tensor]) -> Tensor:
    """laplace with the divisor outside."""
    factor, share = q.shape[-1] ** -0.5, 1 / k.shape[-2]
    slope = math.sqrt(2 * math.pi)
    shift = -math.sqrt(0.5) * slope
    if is_low(q.dtype):
        similarity = _similarity(q, k, attn_bias, factor) * slope + shift
    else:
        # mean and slope of `_scores` go into the product; low precision would round the mean beside small scores
        bias = q.new_full((1, 1), shift) if attn_bias is None else attn_bias * slope + shift
        if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript)
            if takes_scores_by_hand(q, k, bias):
                return scores_by_hand(q, k, bias, factor * slope, score_fn="laplace", share=share)
        similarity = _similarity(q, k, bias, factor * slope)
    if torch.is_grad_enabled():
        return (1 + torch.erf(similarity)) * (0.5 * share)
    return similarity.erf_().add_(1).mul_(0.5 * share)


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
    bfloat16 (relu2 overflows float16 above 255.9), and rounded to them only with "outside".

    Args:
        q, k: (..., M, S).
        attn_bias: broadcasts to (..., M, M), or None.
        key_mask: (..., M) bool, True for real keys, leading axes broadcast; None if all are real.
        score_fn: "relu2", "laplace" or "softmax".
        divisor: "inside" or "outside".

    Returns:
        (..., M, M), dtype of q; float32 with "inside" where q is float16 or bfloat16.

    Cost:
        M^2 S MACs.
    """
    inside = divisor == "inside"
    num_keys = k.shape[-2]
    if key_mask is not None:
        weights = _masked_weights(q, k, attn_bias, key_mask, score_fn, inside)
    elif inside:
        similarity = _similarity(q, k, None, 1.0) / num_keys
        weights = _scores(similarity if attn_bias is None else similarity + attn_bias, score_fn)
    elif score_fn == "relu2":
        # relu(c s)^2 = c^2 relu(s)^2: the divisor goes into the product and needs no pass of its own
        root = num_keys**-0.5
        bias = None if attn_bias is None else attn_bias * root
        factor = q.shape[-1] ** -0.5 * root
        if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript)
            if takes_scores_by_hand(q, k, bias):
                return scores_by_hand(q, k, bias, factor, score_fn="relu2")
        weights = _scores(_similarity(q, k, bias, factor), score_fn)
    elif score_fn == "laplace":
        weights = _laplace_weights(q, k, attn_bias)
    else:
        weights = _scores(_similarity(q, k, attn_bias, q.shape[-1] ** -0.5), score_fn)
    # the weights of divisor "inside" may lie near 1e-11, which float16 does not hold
    return weights if inside and weights.dtype == torch.float32 else weights.to(q.dtype)


def linear_factors(q: Tensor, k: Tensor, key_mask: Optional[Tensor] = None, *, global_fn: str) -> Tuple[Tensor, Tensor]:
    """q~ and k~ with q~ k~^T = the N x N weights of linear attention, which are never formed.

    plain: q k^T / n, signed, no feature map, no denominator (FLASH, 2202.10447, section 3.2).
    inline: [q, 1] [(k - mean k) / n, 1/n]^T: rows sum to one by subtraction (InLine, 2412.06590, where q k is not
    divided by n).
    1/n goes to the keys, so that no sum over tokens grows with their number.

    Args:
        q, k: (..., N, S).
        key_mask: (..., N) bool, True for real tokens, leading axes broadcast; None if all are real.
        global_fn: "plain" or "inline".

    Returns:
        Two tensors (..., N, R), R = S + 1 for "inline", else S; k~ is float32 where k is float16.
    """
    if k.dtype == torch.float16:
        k = k.float()  # 1/n alone is below the smallest normal float16 from 16,384 tokens on
    if key_mask is None:
        keys = k / k.shape[-2]
        share = torch.ones(1, dtype=k.dtype, device=k.device).expand(k.shape[-2]) / k.shape[-2]
    else:
        share = key_mask.to(k.dtype) / key_mask.sum(-1, keepdim=True)
        keys = k * share[..., None]
    if global_fn == "inline":
        ones = torch.ones(1, dtype=q.dtype, device=q.device).expand(q.shape[:-1])[..., None]
        q = torch.cat([q, ones], dim=-1)
        column = share.expand(k.shape[:-1])[..., None]
        keys = torch.cat([keys - keys.sum(-2, keepdim=True) * column, column], dim=-1)
    return q, keys


def local_product(weights: Tensor, v: Tensor, out: Optional[Tensor] = None) -> Tensor:
    """A V in each window: (..., M, M) and (..., M, E) to (..., M, E), dtype of v. Cost: M^2 E MACs.

    Weights that stayed float32 beside a float16 v hold numbers that float16 cannot; there the product is float32.
    `out` as in `product`.
    """
    if v.dtype == torch.float16 and weights.dtype == torch.float32:
        return wide_product(weights, v).to(v.dtype)
    return product(weights.to(v.dtype), v, out)


def key_value_summary(keys: Tensor, v: Tensor) -> Tensor:
    """k~^T V: (..., N, R) and (..., N, E) to (..., R, E), dtype of v, summed in float32. Cost: N R E MACs."""
    if v.dtype == torch.bfloat16 and not v.is_cuda:
        # the CPU's bfloat16 product sums in float32 and rounds once
        return product(keys.to(v.dtype).transpose(-2, -1), v)
    return wide_product(keys.transpose(-2, -1), v).to(v.dtype)


def global_product(queries: Tensor, keys: Tensor, v: Tensor, out: Optional[Tensor] = None) -> Tensor:
    """q~ (k~^T V): (..., N, R) twice and (..., N, E) to (..., N, E), dtype of v; out as in `product`.

    Cost:
        2 N R E MACs.
    """
    return product(queries.to(v.dtype), key_value_summary(keys, v), out)


def joint_weights(weights: Tensor, q: Tensor, k: Tensor, *, global_fn: str) -> Tensor:
    """A + q~ k~^T where one window holds all tokens: weights of both branches for one product with V.

    Args:
        weights: (B, heads, 1, P, P).
        q, k: (B, heads, 1, P, S), of the global branch.
        global_fn: as in `linear_factors`.

    Returns:
        (B, heads, 1, P, P), dtype of weights; summed in at least float32.

    Cost:
        P S MACs a token, in place of the 2 R E of `global_product`.
    """
    share = 1 / k.shape[-2]
    inline = global_fn == "inline"
    if inline:
        k = k - k.mean(-2, keepdim=True)
    keys = k.transpose(-2, -1)
    if k.shape[1] == 1 and k.dtype == weights.dtype and not is_low(k.dtype) and not is_autocast(k):
        joint = torch.baddbmm(weights.flatten(0, 2), q.flatten(0, 2), keys.flatten(0, 2), alpha=share)
        joint = joint.add_(share) if inline else joint
        return joint.view(weights.shape)
    joint = weights + wide_product(q, keys) * share
    return (joint + share if inline else joint).to(weights.dtype)


def mixed_product(weights: Tensor, queries: Tensor, keys: Tensor, v: Tensor, out: Optional[Tensor] = None) -> Tensor:
    """A V + q~ (k~^T V): both branches, the local one added onto the global one inside its product.

    Args:
        weights: (B, heads, G, P, P).
        queries, keys: (B, heads, G * P, R).
        v: (B, heads, G, P, E).
        out: as in `product`.

    Returns:
        (B, heads, G, P, E), dtype of v.

    Cost:
        P E + 2 R E MACs a token.
    """
    mixed = global_product(queries, keys, v.flatten(2, 3), out)
    # a compiler puts the sum into the product with the gate, where baddbmm would copy what it adds onto
    alone = v.shape[1] == 1 and weights.dtype == v.dtype and mixed.dtype == v.dtype
    if not alone or is_slow(v) or is_compiling():
        return mixed.unflatten(2, (v.shape[2], v.shape[3])) + local_product(weights, v)
    mixed = mixed.reshape(v.shape[0] * v.shape[2], v.shape[3], v.shape[4])
    weights, values = weights.flatten(0, 2), v.flatten(0, 2)
    if out is None:
        mixed = torch.baddbmm(mixed, weights, values)
    else:
        torch.baddbmm(mixed, weights, values, out=mixed)  # not baddbmm_, which torch's FlopCounterMode does not count
    return mixed.unflatten(0, (v.shape[0], 1, v.shape[2]))


@torch.fx.wrap
@register_notrace_function
def quadratic_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Optional[Tensor] = None,
    key_mask: Optional[Tensor] = None,
    *,
    score_fn: str,
    divisor: str,
) -> Tensor:
    """A V with A from `attention_weights`: the local branch, or the whole of a quadratic GAU.

    Args:
        q, k: (..., M, S).
        v: (..., M, E).
        attn_bias, key_mask, score_fn, divisor: as in `attention_weights`.

    Returns:
        (..., M, E), dtype of v.

    Cost:
        M^2 (S + E) MACs.
    """
    return local_product(attention_weights(q, k, attn_bias, key_mask, score_fn=score_fn, divisor=divisor), v)


@torch.fx.wrap
@register_notrace_function
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Optional[Tensor] = None,
    *,
    global_fn: str,
) -> Tensor:
    """W V with the weights W of `linear_factors`, linear in N: the global branch, non-causal.

    Args:
        q, k: (..., N, S).
        v: (..., N, E).
        key_mask, global_fn: as in `linear_factors`.

    Returns:
        (..., N, E), dtype of v.

    Cost:
        2 N R E MACs.
    """
    queries, keys = linear_factors(q, k, key_mask, global_fn=global_fn)
    return global_product(queries, keys, v)
