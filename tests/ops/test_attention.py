"""Every fast op against its reference twin: values and all gradients in float64, then low precision."""

import itertools

import pytest
import torch

from flash_vision.ops import reference
from flash_vision.ops.attention import attention_weights, joint_weights, linear_attention, quadratic_attention
from flash_vision.ops.scores import takes_scores_by_hand

SCORES = [("relu2", "inside"), ("relu2", "outside"), ("laplace", "inside"), ("laplace", "outside")]
SCORES += [("softmax", "outside")]
LENGTHS = [1, 7, 49, 63, 196]


def tensors(*shapes, dtype=torch.float64):
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def mask_of(kind, length):
    if kind == "all real":
        return None
    mask = torch.ones(length, dtype=torch.bool)
    mask[(length + 1) // 2 :] = False
    return mask


def assert_same_values_and_gradients(fast, slow, leaves):
    torch.testing.assert_close(fast, slow)
    weight = torch.randn_like(slow)
    for a, b in zip(torch.autograd.grad(fast, leaves, weight), torch.autograd.grad(slow, leaves, weight), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("padding", ["all real", "half padded"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("score_fn", "divisor"), SCORES)
def test_quadratic_attention_equals_reference(score_fn, divisor, length, padding):
    leaves = tensors((2, length, 8), (2, length, 8), (2, length, 12), (length, length))
    how = {"score_fn": score_fn, "divisor": divisor}
    mask = mask_of(padding, length)
    fast = quadratic_attention(*leaves, mask, **how)
    assert_same_values_and_gradients(fast, reference.quadratic_attention(*leaves, mask, **how), leaves)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("length", [1, 7, 49])
@pytest.mark.parametrize("score_fn", ["relu2", "laplace"])
def test_scores_with_gradients_by_hand_equal_reference(score_fn, length, biased):
    leaves = tensors((2, 1, 3, length, 8), (2, 1, 3, length, 8), (1, 1, length, length))[: 2 + biased]
    bias = leaves[2] if biased else None
    assert takes_scores_by_hand(leaves[0], leaves[1], bias)
    assert not takes_scores_by_hand(leaves[0].half(), leaves[1].half(), bias)
    fast = attention_weights(*leaves, score_fn=score_fn, divisor="outside")
    slow = reference.quadratic_weights(leaves[0], leaves[1], bias, None, score_fn, "outside")
    assert_same_values_and_gradients(fast, slow, leaves)
    with torch.no_grad():  # the other path
        torch.testing.assert_close(attention_weights(*leaves, score_fn=score_fn, divisor="outside"), fast.detach())


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("global_fn", ["plain", "inline"])
def test_joint_weights_of_one_window_equal_reference(global_fn, heads):
    leaves = tensors((2, heads, 1, 9, 9), (2, heads, 1, 9, 4), (2, heads, 1, 9, 4))
    fast = joint_weights(*leaves, global_fn=global_fn)
    slow = leaves[0] + reference.linear_weights(leaves[1], leaves[2], None, global_fn)
    assert_same_values_and_gradients(fast, slow, leaves)
    low = joint_weights(*(t.detach().bfloat16() for t in leaves), global_fn=global_fn)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), slow.detach(), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("padding", ["all real", "half padded"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("global_fn", ["plain", "inline"])
def test_linear_attention_equals_the_explicit_n_by_n_form(global_fn, length, padding):
    leaves = tensors((2, length, 8), (2, length, 8), (2, length, 12))
    mask = mask_of(padding, length)
    fast = linear_attention(*leaves, mask, global_fn=global_fn)
    slow = reference.linear_attention(*leaves, mask, global_fn=global_fn)
    assert_same_values_and_gradients(fast, slow, leaves)


def test_laplace_meets_relu2_in_value_and_slope_at_its_mean():
    point = torch.tensor([0.5**0.5], dtype=torch.float64, requires_grad=True)
    for score_fn in ("relu2", "laplace"):
        value = reference.score(point, score_fn)
        slope = torch.autograd.grad(value, point)[0]
        torch.testing.assert_close(value.detach(), torch.tensor([0.5], dtype=torch.float64))
        torch.testing.assert_close(slope, torch.tensor([2**0.5], dtype=torch.float64))


def test_normalised_global_weights_sum_to_one_over_real_tokens():
    q, k = (t.detach() for t in tensors((3, 9, 4), (3, 9, 4)))
    mask = mask_of("half padded", 9)
    ones = torch.ones(3, 9, 2, dtype=torch.float64)
    torch.testing.assert_close(linear_attention(q, k, ones, mask, global_fn="inline"), ones)


@pytest.mark.parametrize(("score_fn", "divisor"), SCORES)
def test_values_of_padded_keys_never_reach_a_real_query(score_fn, divisor):
    q, k, v = (t.detach() for t in tensors((2, 9, 4), (2, 9, 4), (2, 9, 6)))
    mask = mask_of("half padded", 9)
    how = {"score_fn": score_fn, "divisor": divisor}
    before = quadratic_attention(q, k, v, None, mask, **how)[:, mask]
    before_global = linear_attention(q, k, v, mask, global_fn="inline")[:, mask]
    k[:, ~mask] = 1e3
    v[:, ~mask] = -1e3
    q[:, ~mask] = 77.0
    torch.testing.assert_close(quadratic_attention(q, k, v, None, mask, **how)[:, mask], before, rtol=0, atol=0)
    torch.testing.assert_close(linear_attention(q, k, v, mask, global_fn="inline")[:, mask], before_global)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("score_fn", "divisor"), SCORES)
def test_quadratic_attention_loses_no_more_in_low_precision_than_its_reference(score_fn, divisor, dtype):
    q, k, v, bias = (t.detach() for t in tensors((4, 49, 32), (4, 49, 32), (4, 49, 24), (49, 49)))
    how = {"score_fn": score_fn, "divisor": divisor}
    truth = reference.quadratic_attention(q, k, v, bias, **how)
    low = [t.to(dtype) for t in (q, k, v, bias)]
    fast = (quadratic_attention(*low, **how).double() - truth).abs().mean()
    slow = (reference.quadratic_attention(*low, **how).double() - truth).abs().mean()
    assert fast <= 2 * slow


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("global_fn", ["plain", "inline"])
def test_linear_attention_loses_no_more_in_low_precision_than_its_reference(global_fn, dtype):
    q, k, v = (t.detach() for t in tensors((4, 196, 32), (4, 196, 32), (4, 196, 24)))
    truth = reference.linear_attention(q, k, v, global_fn=global_fn)
    low = [t.to(dtype) for t in (q, k, v)]
    fast = (linear_attention(*low, global_fn=global_fn).double() - truth).abs().mean()
    slow = (reference.linear_attention(*low, global_fn=global_fn).double() - truth).abs().mean()
    assert fast <= 2 * slow


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_scores_and_long_sums_stay_finite_in_low_precision(dtype):
    """relu2 of the raw product would be 1.7e7, the sum of K^T V 2.6e5: both beyond float16."""
    q = torch.full((1, 4096, 64), 8.0, dtype=dtype)
    v = torch.full((1, 4096, 8), 8.0, dtype=dtype)
    for global_fn in ("plain", "inline"):
        assert torch.isfinite(linear_attention(q, q, v, global_fn=global_fn)).all()
    for score_fn, divisor in SCORES:
        weights = attention_weights(q[:, :49], q[:, :49], score_fn=score_fn, divisor=divisor)
        assert torch.isfinite(weights).all(), (score_fn, divisor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_scores_of_the_published_init_neither_overflow_nor_vanish(dtype, with_bias):
    base = torch.nn.functional.silu(0.02 * 384**0.5 * torch.randn(2, 49, 128))
    q, k = (base * (0.02 * torch.randn(128)) for _ in range(2))
    bias = 0.02 * torch.randn(49, 49) if with_bias else None
    v = torch.randn(2, 49, 8)
    with torch.autocast("cpu", dtype=dtype):
        weights = attention_weights(q, k, bias, score_fn="relu2", divisor="inside")
        out = quadratic_attention(q, k, v.to(dtype), bias, score_fn="relu2", divisor="inside")
    assert torch.isfinite(weights).all()
    assert (weights > 0).float().mean() > 0.3
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(("rows", "columns"), list(itertools.product([1, 3], [2, 5])))
def test_masked_count_is_taken_per_window(rows, columns):
    """A window with fewer real keys divides by that smaller number."""
    length = rows * columns
    q, k, v = (t.detach() for t in tensors((1, 2, length, 4), (1, 2, length, 4), (1, 2, length, 3)))
    mask = torch.stack([torch.ones(length, dtype=torch.bool), torch.arange(length) < max(1, length // 2)])
    out = quadratic_attention(q, k, v, None, mask, score_fn="relu2", divisor="outside")
    real = mask[1]
    alone = quadratic_attention(q[:, 1, real], k[:, 1, real], v[:, 1, real], score_fn="relu2", divisor="outside")
    torch.testing.assert_close(out[:, 1, real], alone)
