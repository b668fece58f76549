"""Emulated low precision: what is rounded, and what is not."""

import pytest
import timm
import torch
import torch.nn.functional as F

from flash_vision.lab.rounding import RoundedProducts
from flash_vision.layers import GatedBlock, MixedChunkUnit, TokenWindows
from flash_vision.layers.forms import train


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_a_product_is_rounded_as_the_low_precision_product_is(name, dtype):
    a, b, bias = torch.randn(5, 64), torch.randn(7, 64), torch.randn(7)
    with RoundedProducts(name):
        found = F.linear(a, b, bias)
    # to within the one bit by which the order of a float32 sum can move the rounded result
    expected = (a.to(dtype).double() @ b.to(dtype).double().t() + bias.to(dtype).double()).float()
    torch.testing.assert_close(found, expected.to(dtype).float(), rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(found, found.to(dtype).float())


def test_gradients_are_rounded_too():
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2)
    with RoundedProducts("bfloat16"):
        (a @ b).sum().backward()
    expected = torch.ones(3, 2) @ b.bfloat16().float().t()
    assert torch.equal(a.grad, expected.bfloat16().float())


def test_float16_overflows_above_its_largest_number_and_keeps_the_smallest():
    with RoundedProducts("float16"):
        assert torch.tensor([[300.0]]) @ torch.tensor([[300.0]]) == torch.inf
        tiny = torch.tensor([[1e-9]]) @ torch.tensor([[1.0]])
    torch.testing.assert_close(tiny, torch.tensor([[1e-9]]))


def test_what_is_no_product_stays_in_float32():
    x = torch.randn(8, 16)
    with RoundedProducts("bfloat16"):
        assert torch.equal(F.layer_norm(x, [16]), F.layer_norm(x, [16]))
        found = torch.relu(x) + x.square()
    assert torch.equal(found, torch.relu(x) + x.square())


@pytest.mark.parametrize("model", ["vit_tiny_patch16_224", "flash_gau_pico", "flash_quad_tiny"])
def test_a_whole_network_errs_about_as_much_as_under_autocast(model):
    arguments = {"img_size": 16, "patch_size": 4, "embed_dim": 48, "depth": 4, "num_classes": 10}
    net = timm.create_model(model, **arguments, **({"num_heads": 3} if model.startswith("vit") else {}))
    torch.nn.init.normal_(net.get_classifier().weight)
    images = torch.randn(16, 3, 16, 16)

    def gradient():
        net.zero_grad()
        out = net(images)
        out.float().square().mean().backward()
        return out.detach().float(), net.patch_embed.proj.weight.grad.clone()

    exact = gradient()
    with RoundedProducts("bfloat16"):
        rounded = gradient()
    with torch.autocast("cpu", torch.bfloat16):
        low = gradient()
    for emulated, real, truth in zip(rounded, low, exact, strict=True):
        ratio = (emulated - truth).norm() / (real - truth).norm()
        assert 0.25 < ratio < 2, ratio


@pytest.mark.parametrize("checkpoint", [False, True])
def test_products_into_a_given_buffer_are_rounded_there(checkpoint):
    """The training forms of a gated unit write most of their products into buffers."""
    block = GatedBlock(24, MixedChunkUnit(24, qk_dim=8, global_fn="inline"))
    block.unit.value.weight.data.normal_()
    context = TokenWindows((8, 8), (4, 4))(torch.randn(2, 8, 8, 24))[1]
    x = torch.randn(2, 4, 16, 24)
    with RoundedProducts("bfloat16"):
        out = train(block.unit, x, context, checkpoint=checkpoint)
        out.square().mean().backward()
    for found in (out.detach(), *(m.weight.grad for m in (block.unit.gate, block.unit.value, block.unit.proj))):
        assert found.abs().sum() > 0
        assert torch.equal(found, found.bfloat16().float())


def test_a_given_buffer_overflows_as_float16_does():
    buffer, big = torch.zeros(1, 1), torch.tensor([[300.0]])
    with RoundedProducts("float16"):
        assert torch.mm(big, big, out=buffer) is buffer
    assert buffer == torch.inf
