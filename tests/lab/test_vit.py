"""The laboratory's ViT is timm's, but for its initial weights where asked."""

import math

import pytest
import timm
import torch

import flash_vision.lab  # noqa: F401 (registers the models)

SIZES = {
    "img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 2, "num_heads": 4, "mlp_ratio": 4.25, "num_classes": 10,
    "class_token": False, "global_pool": "avg",
}  # fmt: skip


def test_by_default_it_is_timms_to_the_bit():
    torch.manual_seed(3)
    ours = timm.create_model("lab_vit", **SIZES).state_dict()
    torch.manual_seed(3)
    timms = timm.create_model("vit_tiny_patch16_224", **SIZES).state_dict()
    assert ours.keys() == timms.keys()
    assert all(torch.equal(ours[name], timms[name]) for name in ours)


def test_position_embeddings_have_the_deviation_asked_for_and_nothing_else_changes():
    torch.manual_seed(3)
    plain = timm.create_model("lab_vit", **SIZES).state_dict()
    torch.manual_seed(3)
    wide = timm.create_model("lab_vit", pos_embed_std=0.5, **SIZES).state_dict()
    assert wide["pos_embed"].std().item() == pytest.approx(0.5, rel=0.05)
    assert [name for name in plain if not torch.equal(plain[name], wide[name])] == ["pos_embed"]


def test_fan_in_scales_as_the_default_init_of_our_networks_does():
    model = timm.create_model("lab_vit", linear_init="fan_in", **SIZES)
    ours = timm.create_model("flash_gau_pico", embed_dim=64, depth=2, num_classes=10)
    inner, proj = ours.blocks[0].unit.value.weight, ours.blocks[0].unit.proj.weight
    block = model.blocks[0]
    # deviation times the square root of the fan-in: 1 but for what a normal cut at 3 deviations loses
    for weight, like in (
        (block.attn.qkv.weight, inner), (block.mlp.fc1.weight, inner),
        (block.attn.proj.weight, proj), (block.mlp.fc2.weight, proj),
    ):  # fmt: skip
        found, expected = (w.std().item() * math.sqrt(w.shape[1]) for w in (weight, like))
        assert found == pytest.approx(expected, rel=0.05)
    assert proj.std() < 0.2 * inner.std()
    assert model.head.weight.std().item() == pytest.approx(ours.head.weight.std().item(), rel=0.15)
    assert not block.mlp.fc1.bias.any()


def test_position_encodings_convolve_the_raster_of_tokens_where_asked():
    model = timm.create_model("lab_vit", position_after=(-1, 1), **SIZES).eval()
    plain = timm.create_model("lab_vit", **SIZES).eval()
    plain.load_state_dict({k.replace(".block.", "."): w for k, w in model.state_dict().items() if "position" not in k})
    image = torch.randn(2, 3, 32, 32)
    assert (model(image) - plain(image)).abs().max() > 1e-3
    seen = []
    model.norm_pre.register_forward_hook(lambda module, args, out: seen.extend([*args, out]))
    model(image)
    before, after = (x.unflatten(1, (8, 8)).permute(0, 3, 1, 2) for x in seen)
    torch.testing.assert_close(after, before + model.norm_pre.position.conv(before))
    for part in (model.norm_pre, model.blocks[1]):
        torch.nn.init.zeros_(part.position.conv.weight)
        torch.nn.init.zeros_(part.position.conv.bias)
    torch.testing.assert_close(model(image), plain(image))


def test_the_convolution_of_v_is_added_to_what_attention_gives():
    model = timm.create_model("lab_vit", value_conv=True, **SIZES).eval()
    plain = timm.create_model("lab_vit", **SIZES).eval()
    plain.load_state_dict({k: w for k, w in model.state_dict().items() if "value_conv" not in k})
    tokens, attn, bare = torch.randn(2, 64, 64), model.blocks[0].attn, plain.blocks[0].attn
    seen = []
    attn.proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    bare.proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    attn(tokens)
    bare(tokens)
    v = attn.qkv(tokens)[..., 128:].transpose(1, 2).unflatten(2, (8, 8))
    torch.testing.assert_close(seen[0] - seen[1], attn.value_conv(v).flatten(2).transpose(1, 2), rtol=1e-4, atol=1e-5)
    image = torch.randn(2, 3, 32, 32)
    assert (model(image) - plain(image)).abs().max() > 1e-3
    model.train()(image).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


@pytest.mark.parametrize("option", [{"pos_embed_std": 0.0}, {"linear_init": "jax"}, {"position_after": (2,)}])
def test_what_is_no_init_is_refused(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        timm.create_model("lab_vit", **SIZES, **option)


def test_the_convolution_of_v_takes_a_square_grid():
    with pytest.raises(ValueError, match="img_size must give a square grid of patches with value_conv, got 8 x 16"):
        timm.create_model("lab_vit", value_conv=True, **{**SIZES, "img_size": (32, 64)})


@pytest.mark.parametrize("option", [{"position_after": (0,)}, {"value_conv": True}])
def test_a_class_token_has_no_place_in_the_raster(option):
    with pytest.raises(ValueError, match=f"class_token must be False with {next(iter(option))}, got True"):
        timm.create_model("lab_vit", **option, **{**SIZES, "class_token": True, "global_pool": "token"})
