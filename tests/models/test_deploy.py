"""optimize_for_inference: the same outputs, without what only training needs."""

import pytest
import timm
import torch
from timm.layers import DropPath, LayerScale
from torch import nn

import flash_vision

SMALL = dict(img_size=64, embed_dim=64, depth=4, qk_dim=16, num_classes=7)


def perturbed(model):
    """Every parameter moved away from the identity it starts at."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


VARIANTS = {
    "mixed": ("flash_gau_small", {}),
    "plain global branch": ("flash_gau_small", {"global_fn": "plain"}),
    "plain, two heads": ("flash_gau_small", {"global_fn": "plain", "num_heads": 2}),
    "convolution": ("flash_gau_small", {"value_conv": True}),
    "rotary": ("flash_gau_small_paper", {}),
    "quadratic": ("flash_quad_small", {}),
}


@pytest.mark.parametrize("init_values", [None, 0.3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_deploy_form_gives_the_same_logits_at_any_size(variant, init_values):
    name, how = VARIANTS[variant]
    kwargs = dict(init_values=init_values, drop_path_rate=0.2, drop_rate=0.1, pos_drop_rate=0.1)
    model = perturbed(timm.create_model(name, **SMALL, **kwargs, **how)).eval().double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    deployed = flash_vision.optimize_for_inference(model)
    for size in (64, 72):
        x = torch.randn(2, 3, size, 64, dtype=torch.float64)
        with torch.no_grad():
            expected = model(x)
            torch.testing.assert_close(deployed(x), expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(deployed(x), expected, rtol=1e-9, atol=1e-9)  # with autograd on
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])  # the original is untouched


@pytest.mark.parametrize("name", ["flash_gau_small", "flash_quad_small"])
@pytest.mark.parametrize("output_fmt", ["NCHW", "NLC"])
def test_deploy_form_gives_the_same_intermediates(name, output_fmt):
    model = perturbed(timm.create_model(name, **SMALL)).eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        how = dict(output_fmt=output_fmt, intermediates_only=True)
        expected = model.forward_intermediates(x, **how)
        found = flash_vision.optimize_for_inference(model).forward_intermediates(x, **how)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_deployed_blocks_write_over_their_input_only_without_gradients():
    model = perturbed(timm.create_model("flash_gau_small", **SMALL))
    block = flash_vision.optimize_for_inference(model).blocks[0]
    x, context = model.windows(torch.randn(1, 4, 4, 64))
    kept = x.clone()
    out = block(x, context)
    assert torch.equal(x, kept)
    with torch.no_grad():
        assert block(x, context) is x
        torch.testing.assert_close(x, out)
        assert model.blocks[0].eval()(out, context) is not out


def test_deploy_form_has_nothing_left_of_training():
    model = timm.create_model("flash_gau_small", **SMALL, init_values=0.3, drop_path_rate=0.2, pos_drop_rate=0.1)
    deployed = flash_vision.optimize_for_inference(model)
    kinds = (DropPath, LayerScale, nn.Dropout)
    assert any(isinstance(m, kinds) for m in model.modules())
    assert not any(isinstance(m, kinds) for m in deployed.modules())
    assert not deployed.training
    assert not any(p.requires_grad for p in deployed.parameters())
    assert flash_vision.optimize_for_inference(model, inplace=True) is model


def test_deploy_form_takes_other_timm_models():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, drop_path_rate=0.1).eval()
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(flash_vision.optimize_for_inference(model)(x), model(x))


def test_deploy_form_can_be_compiled_scripted_and_exported():
    model = flash_vision.optimize_for_inference(perturbed(timm.create_model("flash_gau_small", **SMALL)))
    x = torch.randn(2, 3, 64, 64)
    expected = model(x)
    for form in (
        torch.compile(model, backend="eager", fullgraph=True),
        torch.jit.script(model),
        torch.export.export(model, (x,)).module(),
    ):
        torch.testing.assert_close(form(x), expected, rtol=1e-4, atol=1e-5)
