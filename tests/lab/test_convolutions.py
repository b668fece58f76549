"""Convolutions between gated units: mixed chunk where they are zero, and a view into the next window elsewhere."""

import pytest
import timm
import torch

from flash_vision.lab.position import PositionGAU

SIZES = {"embed_dim": 16, "depth": 3, "qk_dim": 8, "window_size": 4, "num_classes": 5}


def test_with_kernels_of_zero_the_model_is_mixed_chunk():
    model = timm.create_model("lab_gau_position", position_after=(-1, 0, 2), **SIZES).eval()
    mixed = timm.create_model("flash_gau_pico", value_conv=False, position_conv=False, **SIZES).eval()
    mixed.load_state_dict(
        {key.replace(".block.", "."): w for key, w in model.state_dict().items() if "position.conv." not in key}
    )
    for part in (model, model.blocks[0], model.blocks[2]):
        torch.nn.init.zeros_(part.position.conv.weight)
        torch.nn.init.zeros_(part.position.conv.bias)
    for image in (torch.randn(2, 3, 32, 32), torch.randn(1, 3, 44, 60)):
        torch.testing.assert_close(model(image), mixed(image))


def test_a_token_sees_its_neighbours_in_the_next_window():
    model = timm.create_model("lab_gau_position", branches="local", **{**SIZES, "depth": 1}).eval()
    torch.nn.init.constant_(model.blocks[0].block.unit.position_bias.relative_position_bias_table, 5.0)
    image = torch.randn(1, 3, 32, 32, requires_grad=True)
    model.forward_features(image).unflatten(1, (8, 8))[0, 0, 0, 0].backward()
    reached = image.grad.unflatten(-1, (8, 4)).unflatten(-3, (8, 4)).abs().sum((0, 1, 3, 5)) > 0
    assert reached[:4, :4].all()
    assert not reached[:, 4:].any()
    image.grad = None
    model.forward_features(image).unflatten(1, (8, 8))[0, 3, 3, 0].backward()  # the corner of the first window
    reached = image.grad.unflatten(-1, (8, 4)).unflatten(-3, (8, 4)).abs().sum((0, 1, 3, 5)) > 0
    assert reached.all()


def test_it_is_the_same_network_without_gradients_and_in_the_deploy_form():
    model = timm.create_model("lab_gau_position", position_after=(-1, 0, 1), **SIZES).eval()
    assert isinstance(model, PositionGAU)
    image = torch.randn(2, 3, 32, 44)
    expected, features = model.forward_intermediates(image)
    for block in (module for module in model.modules() if hasattr(module, "reparameterize")):
        block.reparameterize()
    with torch.inference_mode():
        got, deployed = model.forward_intermediates(image)
    torch.testing.assert_close(got, expected.detach())
    for a, b in zip(deployed, features, strict=True):
        torch.testing.assert_close(a, b.detach())


def test_every_parameter_gets_a_gradient():
    model = timm.create_model("lab_gau_position", position_after=(-1, 0, 2), **SIZES)
    model(torch.randn(2, 3, 44, 36)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


def test_an_index_without_a_block_is_refused():
    with pytest.raises(ValueError, match=r"position_after must be -1 or indices of the 3 blocks, got 3"):
        timm.create_model("lab_gau_position", position_after=(0, 3), **SIZES)
    with pytest.raises(ValueError, match=r"position_after must hold every index once, got \[1, 1\]"):
        timm.create_model("lab_gau_position", position_after=(1, 1), **SIZES)


@pytest.mark.parametrize("name", ["lab_gau_position", "lab_vit"])
def test_a_convolutional_stem_takes_the_place_of_the_patch_embedding(name):
    sizes = SIZES if name == "lab_gau_position" else {"embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
    model = timm.create_model(name, position_after=(), conv_stem=True, **sizes)
    image = torch.randn(2, 3, 32, 32)
    assert model.patch_embed.proj(image).shape == (2, 16, 8, 8)
    model(image).square().sum().backward()
    assert model.patch_embed.proj.conv1.weight.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="patch_size must be 4 with conv_stem"):
        timm.create_model(name, position_after=(), conv_stem=True, patch_size=8, **sizes)
