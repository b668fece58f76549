"""Counts against figures worked out by hand and published ones, the two counters against each other."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flash_vision  # noqa: F401  registers the models
from flash_vision.profiling.kinds import operator_kind
from flash_vision.profiling.macs import count_macs, count_module

counted = functools.lru_cache(count_macs)


@pytest.mark.parametrize(
    ("name", "img_size", "products", "with_norms"),
    [
        ("vit_base_patch16_224", 224, 17.5638, 17.5827),
        ("vit_small_patch16_224", 224, 4.5992, 4.6087),
        ("vit_small_patch16_224", 512, 31.7518, None),
        ("swin_tiny_patch4_window7_224", 224, 4.4906, 4.5092),
        ("convnext_tiny", 224, 4.4555, 4.4704),
    ],
)
def test_peers_read_their_known_gmacs_and_both_counters_agree(name, img_size, products, with_norms):
    report = counted(name, img_size)
    assert report.macs / 1e9 == pytest.approx(products, abs=5e-3)
    assert report.counters_agree is True
    assert report.trace.products == report.macs
    if with_norms is not None:
        assert report.trace.total / 1e9 == pytest.approx(with_norms, abs=5e-3)
    assert report.unknown == ()
    assert sum(report.by_part.values()) == report.macs == report.by_module[""]


@pytest.mark.parametrize("name", ["flash_gau_small", "flash_quad_small", "flash_gau_small_paper"])
def test_both_counters_agree_on_our_models(name):
    report = counted(name)
    assert report.trace is not None, report.trace_error
    assert report.trace.products == report.macs
    assert report.unknown == ()
    assert sum(report.by_part.values()) == report.macs


def test_the_split_of_a_quadratic_gau_equals_its_formula():
    # depth 24, N = 196, C = 384, E = 768, S = 64: projections 3CE + CS, attention N (S + E) per token
    report = counted("flash_quad_small")
    assert report.by_part["projections"] == 24 * 196 * (3 * 384 * 768 + 384 * 64)
    assert report.by_part["global"] == 24 * 196 * 196 * (64 + 768)
    assert report.by_part["local"] == 0


def test_the_split_of_mixed_chunk_attention_equals_its_formula():
    # windows of 49 tokens: local P (S + E), global 2 S E per token, and one more channel than S for means
    report = counted("flash_gau_small")
    assert report.by_part["local"] == 24 * 196 * 49 * (32 + 768)
    assert report.by_part["global"] == pytest.approx(24 * 196 * 2 * 32 * 768, rel=1 / 31)


def test_swins_attention_is_local_and_vits_is_global():
    swin, vit = counted("swin_tiny_patch4_window7_224", 224), counted("vit_small_patch16_224", 224)
    assert swin.by_part["local"] > 0 == swin.by_part["global"]
    assert vit.by_part["global"] == 12 * 197 * 197 * 2 * 384
    assert vit.by_part["local"] == 0


def test_fused_attention_that_really_runs_on_the_cpu_counts_too():
    class Attention(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    report = count_module(Attention(), torch.randn(2, 3, 10, 8))
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in report.costs
    assert report.macs == report.trace.products == 2 * 3 * 10 * 10 * (8 + 8)


@pytest.mark.parametrize(
    ("operator", "macs"),
    [
        (lambda x: torch.baddbmm(torch.zeros_like(x), x, x), 4 * 5 * 5 * 5),
        (lambda x: torch.zeros_like(x).baddbmm_(x, x), 4 * 5 * 5 * 5),
        (lambda x: torch.addbmm(x[0], x, x), 4 * 5 * 5 * 5),
        (lambda x: torch.addmv(x[0, 0], x[0], x[0, 0]), 25),
        (lambda x: torch.mv(x[0], x[0, 0]), 25),
        (lambda x: torch.dot(x[0, 0], x[0, 1]), 5),
        (lambda x: x @ x[0, 0], 4 * 5 * 5),
        (lambda x: x[:1] @ x, 4 * 5 * 5 * 5),
        (lambda x: torch.einsum("bij,bkj->bik", x, x), 4 * 5 * 5 * 5),
        (lambda x: F.conv2d(x[None], torch.ones(6, 4, 3, 3, device=x.device), padding="same"), 6 * 4 * 9 * 25),
        (lambda x: F.conv_transpose2d(x[None], torch.ones(4, 6, 2, 2, device=x.device), stride=2), 6 * 4 * 4 * 25),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_single_products_count_alike_in_both_counters(operator, macs, device):
    class Single(nn.Module):
        def forward(self, x):
            return operator(x)

    report = count_module(Single(), torch.ones(4, 5, 5, device=device))
    assert report.trace is not None, report.trace_error
    assert (report.macs, report.trace.products) == (macs, macs)
    assert report.unknown == ()


def test_an_operator_that_neither_counter_knows_is_named():
    class Spectrum(nn.Module):
        def forward(self, x):
            return torch.fft.fft(x).real

    report = count_module(Spectrum(), torch.ones(2, 8))
    assert any("fft" in name for name in report.unknown)
    assert report.as_dict()["unknown_operators"] == list(report.unknown)


def test_elementwise_operators_are_listed_with_their_elements():
    report = count_module(nn.Sequential(nn.Linear(8, 4), nn.SiLU()), torch.ones(3, 8))
    silu = report.of_kind("elementwise")["aten::silu"]
    assert (silu.calls, silu.elements, silu.macs) == (1, 12, 0)


def test_an_autograd_function_is_named_where_fvcore_cannot_look_into_it():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x @ x

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Model(nn.Module):
        def forward(self, x):
            return Double.apply(x) + 1

    report = count_module(Model(), torch.ones(4, 4))
    assert report.macs == 64
    assert report.opaque_to_fvcore or report.counters_agree


def test_activations_are_the_outputs_of_products():
    report = count_module(
        nn.Sequential(nn.Conv2d(3, 5, 2, stride=2), nn.Flatten(), nn.Linear(20, 7)), torch.ones(2, 3, 4, 4)
    )
    assert report.trace.activations == 2 * (5 * 4 + 7)
    assert report.params == 5 * 3 * 4 + 5 + 20 * 7 + 7


def test_macs_are_proportional_to_the_batch():
    one, three = count_macs("test_vit", batch_size=1), count_macs("test_vit", batch_size=3)
    assert three.macs == 3 * one.macs


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("vit_smal", {}, "model must be a timm model name, got 'vit_smal'"),
        ("vit_tiny_patch16_224", {"img_size": 10}, "vit_tiny_patch16_224 cannot"),
        ("vit_tiny_patch16_224", {"img_size": 0}, "img_size must be at least 1"),
        ("vit_tiny_patch16_224", {"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ],
)
def test_a_request_that_cannot_be_counted_is_a_value_error(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        count_macs(name, **kwargs)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::silu_", "elementwise"),
        ("aten::native_layer_norm_backward", "normalisation"),
        ("aten::_softmax_backward_data", "reduction"),
        ("aten::convolution_backward", "convolution"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "matmul"),
        ("aten::_foreach_add_", "elementwise"),
        ("aten::clone", "layout"),
        ("aten::_to_copy", "cast"),
        ("aten::no_such_operator", None),
        ("mylib::silu", None),
    ],
)
def test_spellings_of_an_operator_have_one_kind(name, kind):
    assert operator_kind(name) == kind


def test_no_figure_is_nan_in_the_plain_data():
    data = count_macs("test_convnext", 64).as_dict()
    assert all(not (isinstance(v, float) and math.isnan(v)) for v in data.values())
