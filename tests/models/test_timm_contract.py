"""timm's interface, on one model of each kind, as timm and the libraries around it use it."""

import copy
import io

import pytest
import timm
import torch
from timm.models import get_model_traits, save_for_hf
from timm.models._manipulate import reinit_non_persistent_buffers
from timm.optim import create_optimizer_v2

from flash_vision.layers import GatedBlock

ISOTROPIC_MODELS = {
    "flash_gau_pico": {},
    "flash_gau_small_paper": {"depth": 4, "img_size": 64, "window_size": 2, "embed_dim": 64, "qk_dim": 16},
    "flash_quad_tiny": {"depth": 4, "img_size": 64},
}
MODELS = {**ISOTROPIC_MODELS, "flash_pyramid_nano": {"img_size": 64, "window_size": 4, "depths": (2, 2, 3, 2)}}
ISOTROPIC = pytest.mark.parametrize("name", ISOTROPIC_MODELS)  # test_pyramid.py has the pyramids' own forms
ALL = pytest.mark.parametrize("name", MODELS)


def make(name, **kwargs):
    return timm.create_model(name, **{**MODELS[name], **kwargs}).eval()


def image_size(model):
    return model.patch_embed.img_size if hasattr(model, "patch_embed") else model.img_size


def image(model, batch=2, channels=3):
    return torch.randn(batch, channels, *image_size(model))


def pixels(model):
    """Pixels that a token spans; in a pyramid a step that leaves padding in some stage."""
    return model.patch_embed.patch_size[0] if hasattr(model, "patch_embed") else 12


def gated_blocks(model):
    return [module for module in model.modules() if isinstance(module, GatedBlock)]


@ISOTROPIC
def test_attributes_that_timm_reads(name):
    model = make(name, num_classes=7)
    assert model.num_classes == 7
    assert model.num_features == model.head_hidden_size == model.embed_dim
    assert model.num_prefix_tokens == 0
    assert model.global_pool == "avg"
    assert [info["module"] for info in model.feature_info] == [f"blocks.{i}" for i in range(len(model.blocks))]
    assert {info["reduction"] for info in model.feature_info} == {model.patch_embed.feat_ratio()}
    assert model.get_classifier() is model.head


@ISOTROPIC
@torch.no_grad()
def test_features_head_and_pooling(name):
    model = make(name, num_classes=7)
    x = image(model)
    features = model.forward_features(x)
    assert features.shape == (2, model.patch_embed.num_patches, model.embed_dim)
    torch.testing.assert_close(model.forward_head(features), model(x))
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), features.mean(1))
    for pool, expected in (("max", features.amax(1)), ("avgmax", 0.5 * (features.amax(1) + features.mean(1)))):
        model.reset_classifier(0, pool)
        torch.testing.assert_close(model(x), expected)
    model.reset_classifier(0, "")
    torch.testing.assert_close(model(x), features)
    model.reset_classifier(3, "avg")
    assert model(x).shape == (2, 3)
    with pytest.raises(ValueError, match="global_pool"):
        model.reset_classifier(3, "token")


@ALL
@torch.no_grad()
def test_num_classes_zero_gives_pooled_features_and_in_chans_are_free(name):
    model = make(name, num_classes=0, in_chans=5)
    assert model(image(model, channels=5)).shape == (2, model.num_features)


@ISOTROPIC
@torch.no_grad()
def test_intermediates_are_nchw_taps_of_raster_order(name):
    model = make(name)
    x = image(model)
    final, taps = model.forward_intermediates(x)
    torch.testing.assert_close(final, model.forward_features(x))
    height, width = model.patch_embed.grid_size
    assert all(tap.shape == (2, model.embed_dim, height, width) and tap.is_contiguous() for tap in taps)
    normed = model.forward_intermediates(x, indices=1, norm=True, output_fmt="NLC", intermediates_only=True)
    torch.testing.assert_close(normed[0], final)
    early = model.forward_intermediates(x, indices=[0, 2], stop_early=True, intermediates_only=True)
    torch.testing.assert_close(early, [taps[0], taps[2]], rtol=0, atol=0)
    as_dict = model.forward_intermediates(x, indices=[0, 2], output_dict=True)
    torch.testing.assert_close(as_dict["image_intermediates"], [taps[0], taps[2]], rtol=0, atol=0)
    torch.testing.assert_close(as_dict["image_features"], final)


@ISOTROPIC
@torch.no_grad()
def test_features_only_takes_any_size_and_any_indices(name):
    net = make(name, features_only=True, out_indices=(0, -1))
    patch = net.feature_info.reduction()[0]
    taps = net(torch.randn(1, 3, 5 * patch + 1, 7 * patch))
    assert [tuple(tap.shape[-2:]) for tap in taps] == [(6, 7), (6, 7)]
    assert [tap.shape[1] for tap in taps] == net.feature_info.channels()


@ISOTROPIC
@torch.no_grad()
def test_pruning_keeps_the_taps_and_drops_the_rest(name):
    model, pruned = make(name), make(name)
    pruned.load_state_dict(model.state_dict())
    indices = pruned.prune_intermediate_layers([1], prune_norm=True)
    assert indices == [1]
    assert len(pruned.blocks) == 2
    x = image(model)
    tap = model.forward_intermediates(x, indices=[1], intermediates_only=True)
    torch.testing.assert_close(pruned.forward_intermediates(x, indices=[1], intermediates_only=True), tap)


@ALL
def test_gradient_checkpointing_gives_the_same_gradients(name):
    model = make(name, num_classes=5).train()
    x = image(model)
    gradients = []
    for enable in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(enable)
        model(x).square().mean().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert all(g is not None for g in gradients[0].values())
    torch.testing.assert_close(gradients[0], gradients[1])


@ALL
def test_only_matrices_and_kernels_decay_and_layers_decay_by_depth(name):
    model = make(name, num_classes=5)
    no_decay = model.no_weight_decay()
    assert no_decay <= {n for n, _ in model.named_parameters()}
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
    names = {id(p): n for n, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            decays = names[id(p)].endswith("weight") and p.ndim > 1
            assert (group["weight_decay"] > 0) == decays, names[id(p)]
    scales = sorted({group["lr_scale"] for group in optimizer.param_groups})
    assert len(scales) == len(gated_blocks(model)) + 2
    assert scales[-1] == 1


@ALL
@torch.no_grad()
def test_built_on_meta_then_emptied_and_initialised(name):
    model = make(name, device="meta")
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    model = model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
    reference = make(name)
    for either in (model, reference):
        torch.manual_seed(5)
        either.init_weights()
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=0, atol=0)
    x = image(model)
    torch.testing.assert_close(model(x), reference(x), rtol=0, atol=0)


@ALL
def test_runs_forward_and_backward_on_meta(name):
    model = make(name, device="meta", num_classes=5).train()
    model(torch.empty(2, 3, *image_size(model), device="meta")).sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


@ALL
@torch.no_grad()
def test_built_in_a_meta_context_then_loaded(name):
    reference = make(name)
    with torch.device("meta"):
        model = make(name)
    model = model.to_empty(device="cpu")
    model.load_state_dict(reference.state_dict())
    reinit_non_persistent_buffers(model)
    x = image(reference)
    torch.testing.assert_close(model(x), reference(x), rtol=0, atol=0)


@ALL
@torch.no_grad()
def test_resized_and_reset_model_returns_bit_exact_from_a_local_dir(name, tmp_path):
    model = make(name, num_classes=7)
    model.set_input_size((6 * pixels(model), 9 * pixels(model)))
    model.reset_classifier(3)
    save_for_hf(model, tmp_path, safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = image(model)
    torch.testing.assert_close(loaded(x), model(x), rtol=0, atol=0)
    assert get_model_traits(loaded)["num_classes"] == 3


@ISOTROPIC
@torch.no_grad()
def test_set_input_size_follows_dtype_keeps_frozen_and_changes_nothing_at_the_same_size(name):
    model = make(name).to(torch.bfloat16)
    before = dict(model.named_parameters())
    model.set_input_size(model.patch_embed.img_size)
    assert all(p is before[n] for n, p in model.named_parameters())
    for p in model.parameters():
        p.requires_grad_(False)
    patch = model.patch_embed.patch_size[0]
    model.set_input_size((4 * patch, 6 * patch), patch_size=2 * patch, window_size=3)
    assert model.patch_embed.grid_size == (2, 3)
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in model.parameters())
    assert model(image(model).bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="img_size"):
        model.set_input_size(1)


@torch.no_grad()
def test_checkpoint_is_resampled_to_other_patch_image_and_window(tmp_path):
    source = timm.create_model("flash_gau_pico", num_classes=6)
    torch.save({"state_dict": source.state_dict()}, tmp_path / "source.pth")
    overlay = {"file": str(tmp_path / "source.pth"), "num_classes": 6}
    how = {"img_size": (40, 48), "patch_size": 8, "window_size": 5, "num_classes": 6}
    model = timm.create_model("flash_gau_pico", pretrained=True, pretrained_cfg_overlay=overlay, **how).eval()
    assert model.patch_embed.proj.weight.shape[-1] == 8
    assert model.pos_embed.shape[1] == 30
    table = model.blocks[0].unit.position_bias.relative_position_bias_table
    assert table.shape == (81, 1)
    old = source.blocks[0].unit.position_bias.relative_position_bias_table.view(7, 7)
    torch.testing.assert_close(table.view(9, 9)[1:-1, 1:-1], old, rtol=0, atol=0)  # an offset keeps its value
    assert table.view(9, 9)[0, 0] == old[0, 0]
    torch.testing.assert_close(model.blocks[3].unit.value.weight, source.blocks[3].unit.value.weight)
    assert torch.isfinite(model(image(model))).all()


@pytest.mark.parametrize("channels", [1, 4])
@torch.no_grad()
def test_checkpoint_is_adapted_to_other_channels_and_classes(channels, tmp_path):
    torch.save(timm.create_model("flash_gau_pico").state_dict(), tmp_path / "source.pth")
    overlay = {"file": str(tmp_path / "source.pth")}
    how = {"in_chans": channels, "num_classes": 4, "pretrained_cfg_overlay": overlay}
    model = timm.create_model("flash_gau_pico", pretrained=True, **how).eval()
    assert model(image(model, channels=channels)).shape == (2, 4)


@torch.no_grad()
def test_fixed_size_is_enforced_when_asked_for():
    x = torch.randn(1, 3, 32, 34)
    assert make("flash_gau_pico")(x).shape == (1, 100)
    for how in ({"dynamic_img_size": False}, {"strict_img_size": True}):
        with pytest.raises(AssertionError, match="34"):
            make("flash_gau_pico", **how)(x)
    with pytest.raises(AssertionError, match="divisible"):
        make("flash_gau_pico", dynamic_img_pad=False)(x)
    assert make("flash_gau_pico", dynamic_img_pad=False)(x[..., :28]).shape == (1, 100)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@ALL
@torch.no_grad()
def test_torchscript_agrees_at_two_sizes(name):
    model = make(name, scriptable=True)
    scripted = torch.jit.script(model)
    for x in (image(model), torch.randn(1, 3, 5 * pixels(model) + 1, 7 * pixels(model))):
        torch.testing.assert_close(scripted(x), model(x))


@ALL
def test_compiles_to_one_graph(name):
    model = make(name)
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x = image(model)
    torch.testing.assert_close(compiled(x), model(x))
    compiled(x + 1)
    assert len(graphs) == 1


@ALL
@torch.no_grad()
def test_exports_with_a_free_batch_size(name):
    model = make(name)
    batch = torch.export.Dim("batch", min=1)
    exported = torch.export.export(model, (image(model),), dynamic_shapes=({0: batch},))
    x = image(model, batch=5)
    torch.testing.assert_close(exported.module()(x), model(x), rtol=1e-4, atol=1e-5)


@ALL
@torch.no_grad()
def test_images_of_a_batch_do_not_see_each_other(name):
    model = make(name).double()
    x = image(model, batch=3).double()
    torch.testing.assert_close(model(x), torch.cat([model(x[i : i + 1]) for i in range(3)]))


@ALL
@torch.no_grad()
def test_autocast_and_half_weights(name):
    model = make(name)
    x = image(model)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert torch.isfinite(model(x)).all()
    assert model.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


@ALL
def test_copies_and_pickles_with_stochastic_depth(name):
    rates_of_isotropic_models = {"pos_drop_rate": 0.1} if name in ISOTROPIC_MODELS else {}
    model = make(name, drop_path_rate=0.2, drop_rate=0.1, num_classes=5, **rates_of_isotropic_models).train()
    copy.deepcopy(model)
    torch.save(model, io.BytesIO())
    x = image(model)
    assert (model(x) - model(x)).abs().max() > 0
    model.eval()
    torch.testing.assert_close(model(x), model(x), rtol=0, atol=0)
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for block in gated_blocks(model)]
    assert rates == pytest.approx(torch.linspace(0, 0.2, len(rates)).tolist())
