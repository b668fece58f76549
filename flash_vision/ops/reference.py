"""The obvious O(N^2) definitions of every attention in `attention.py`: the specification and the test oracle.

Nothing here is meant to be fast. Each function writes out the full matrix of attention weights.
"""

import math
from typing import Optional

import torch
from torch import Tensor


def score(similarity: Tensor, score_fn: str) -> Tensor:
    """The score functions of design and literature, element by element (softmax: over the last axis).

    relu2: relu(s)^2 (FLASH, 2202.10447). laplace: (1 + erf((s - mu) / (sigma sqrt 2))) / 2 with mu = sqrt(1/2) and
    sigma = sqrt(1 / (4 pi)) (Mega, 2209.10655, equation 17).
    """
    if score_fn == "relu2":
        return similarity.clamp(min=0) ** 2
    if score_fn == "laplace":
        mu, sigma = math.sqrt(0.5), math.sqrt(1 / (4 * math.pi))
        return 0.5 * (1 + torch.erf((similarity - mu) / (sigma * math.sqrt(2))))
    if score_fn == "softmax":
        return torch.softmax(similarity, dim=-1)
    raise ValueError(f"score_fn must be relu2, laplace or softmax, got {score_fn!r}")


def quadratic_weights(
    q: Tensor, k: Tensor, attn_bias: Optional[Tensor], key_mask: Optional[Tensor], score_fn: str, divisor: str
) -> Tensor:
    """Attention weights A (..., M, M) of real keys; zero for padded keys.

    inside: score(q k / n + b). outside: score(q k / sqrt(S) + b) / n, or for softmax, which divides by its own sum,
    softmax(q k / sqrt(S) + b). n counts the real keys.
    """
    mask = torch.ones(k.shape[:-1], dtype=torch.bool, device=k.device) if key_mask is None else key_mask
    num_keys = mask.sum(-1)[..., None, None].to(q.dtype)
    similarity = q @ k.mT
    similarity = similarity / num_keys if divisor == "inside" else similarity / math.sqrt(q.shape[-1])
    if attn_bias is not None:
        similarity = similarity + attn_bias
    real = mask[..., None, :]
    if score_fn == "softmax":
        return score(similarity.masked_fill(~real, -math.inf), score_fn)
    weights = score(similarity, score_fn) * real
    return weights if divisor == "inside" else weights / num_keys


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
    """A V: (..., M, E), with A from `quadratic_weights`."""
    return quadratic_weights(q, k, attn_bias, key_mask, score_fn, divisor) @ v


def linear_weights(q: Tensor, k: Tensor, key_mask: Optional[Tensor], global_fn: str) -> Tensor:
    """The N x N weights that linear attention never forms: (..., N, N), zero for padded keys.

    plain: q_i k_j / n. inline: (q_i k_j - mean_j(q_i k_j) + 1) / n, whose rows sum to one (InLine, 2412.06590).
    """
    mask = torch.ones(k.shape[:-1], dtype=torch.bool, device=k.device) if key_mask is None else key_mask
    real = mask[..., None, :].to(q.dtype)
    num_keys = real.sum(-1, keepdim=True)
    products = (q @ k.mT) * real
    if global_fn == "inline":
        products = (products - products.sum(-1, keepdim=True) / num_keys + 1) * real
    elif global_fn != "plain":
        raise ValueError(f"global_fn must be plain or inline, got {global_fn!r}")
    return products / num_keys


def linear_attention(q: Tensor, k: Tensor, v: Tensor, key_mask: Optional[Tensor] = None, *, global_fn: str) -> Tensor:
    """W V: (..., N, E), with W from `linear_weights`."""
    return linear_weights(q, k, key_mask, global_fn) @ v


def mixed_chunk_attention(
    q_local: Tensor,
    k_local: Tensor,
    q_global: Tensor,
    k_global: Tensor,
    v: Tensor,
    attn_bias: Optional[Tensor] = None,
    key_mask: Optional[Tensor] = None,
    *,
    score_fn: str,
    divisor: str,
    global_fn: str,
) -> Tensor:
    """(block-diagonal local weights + global weights) V over the N = G * P tokens of all windows.

    Args:
        q_local, k_local, q_global, k_global: (B, G, P, S).
        v: (B, G, P, E).
        attn_bias: (P, P) or None.
        key_mask: (G, P) bool, True for real tokens, or None.

    Returns:
        (B, G, P, E).
    """
    batch, groups, area, _ = q_local.shape
    num_tokens = groups * area
    weights = q_local.new_zeros(batch, num_tokens, num_tokens)
    for g in range(groups):
        span = slice(g * area, (g + 1) * area)
        mask = None if key_mask is None else key_mask[g]
        local = quadratic_weights(q_local[:, g], k_local[:, g], attn_bias, mask, score_fn, divisor)
        weights[:, span, span] = local
    flat_mask = None if key_mask is None else key_mask.flatten()
    weights = weights + linear_weights(q_global.flatten(1, 2), k_global.flatten(1, 2), flat_mask, global_fn)
    return (weights @ v.flatten(1, 2)).unflatten(1, (groups, area))
