"""The pyramid: any size, padding that changes nothing, few layout changes, and a hierarchical backbone's contract."""

import pytest
import timm
import torch
import torch.nn.functional as F
from test_graphs import graphs_of
from timm.models._manipulate import group_parameters

from flash_vision import optimize_for_inference
from flash_vision.layers import GatedBlock, TokenWindows
from flash_vision.ops.windows import window_layout

SMALL = {"embed_dims": (16, 24, 32, 48), "depths": (2, 2, 3, 2), "qk_dims": (8, 8, 8, 8), "img_size": 64}
CHANNELS = list(SMALL["embed_dims"])


def small(**kwargs):
    return timm.create_model("flash_pyramid_nano", **{**SMALL, "num_classes": 5, **kwargs}).eval()


def grids(height, width):
    return [(-(-height // stride), -(-width // stride)) for stride in (4, 8, 16, 32)]


def tables(model):
    return [p for n, p in model.named_parameters() if n.endswith("relative_position_bias_table")]


@pytest.mark.parametrize("size", [(1, 1), (5, 3), (31, 200), (33, 47), (65, 97), (224, 192)])
@torch.no_grad()
def test_takes_any_image_and_every_stage_halves_rounding_up(size):
    model = small()
    x = torch.randn(2, 3, *size)
    taps = model.forward_intermediates(x, intermediates_only=True)
    assert [tuple(tap.shape) for tap in taps] == [(2, c, *g) for c, g in zip(CHANNELS, grids(*size), strict=True)]
    assert torch.isfinite(model(x)).all()


@pytest.mark.parametrize("size", [(33, 47), (65, 97), (224, 192)])
@torch.no_grad()
def test_another_size_gives_what_a_model_resized_to_it_gives(size):
    model, resized = small(), small()
    resized.load_state_dict(model.state_dict())
    resized.set_input_size(size)
    assert [stage.windows.grid_size for stage in resized.stages] == grids(*size)
    x = torch.randn(2, 3, *size)
    torch.testing.assert_close(model(x), resized(x), rtol=0, atol=0)


@pytest.mark.parametrize("overrides", [{}, {"value_conv": True}, {"score_fn": "laplace", "global_fn": "plain"}])
@torch.no_grad()
def test_what_lies_in_the_padding_changes_no_output(overrides):
    """13 x 11 tokens in stage one and 7 x 6 in stage two: padding, filled with other numbers before every unit."""
    model = small(window_size=4, **overrides).double()
    x = torch.randn(2, 3, 52, 44, dtype=torch.float64)
    assert window_layout(13, 11, (4, 4)) == (13, 11, 5, 4)
    expected = model.forward_intermediates(x)
    padded_grids = set()

    def spoil(module, arguments):
        tokens, context, *rest = arguments
        if context.key_mask is None:
            return arguments
        padded_grids.add((context.layout.height, context.layout.width))
        spoilt = tokens.clone()
        spoilt[:, ~context.key_mask] = 50 * torch.randn_like(spoilt[:, ~context.key_mask])
        return spoilt, context, *rest

    for module in model.modules():
        if isinstance(module, GatedBlock):
            module.register_forward_pre_hook(spoil)
    torch.testing.assert_close(model.forward_intermediates(x), expected)
    assert padded_grids == {(13, 11), (7, 6)}


@torch.no_grad()
def test_maps_between_the_stages_are_views_of_raster_tokens():
    """No copy lies between convolution and windows: what enters a TokenWindows is (B, H, W, C) in memory already."""
    model, seen = small(), []

    def look(module, arguments):
        seen.append(arguments[0].is_contiguous())

    for module in model.modules():
        if isinstance(module, TokenWindows):
            module.register_forward_pre_hook(look)
    model(torch.randn(2, 3, 64, 80))
    assert seen == [True] * 4


def test_gradients_reach_every_parameter():
    model = small().train()
    model(torch.randn(3, 3, 52, 44)).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name


@torch.no_grad()
def test_images_of_a_batch_do_not_see_each_other_at_an_odd_size():
    model = small().double()
    x = torch.randn(3, 3, 65, 97, dtype=torch.float64)
    torch.testing.assert_close(model(x), torch.cat([model(x[i : i + 1]) for i in range(3)]))


@torch.no_grad()
def test_every_image_region_reaches_every_output_through_the_global_branch():
    """One pixel of 160 x 160 changes stage one's far corner: local windows alone would need more stages."""
    x = torch.randn(1, 3, 160, 160)
    other = x.clone()
    other[..., 0, 0] += 5
    for branches, changes in (("both", True), ("local", False)):
        model = small(branches=branches)
        far = [model.forward_intermediates(i, indices=[0], intermediates_only=True)[0][..., -1, -1] for i in (x, other)]
        assert ((far[0] - far[1]).abs().max() > 0) == changes


@pytest.mark.parametrize(
    "overrides",
    [
        {"gate": False},
        {"branches": "local"},
        {"score_fn": "softmax"},
        {"global_fn": "plain"},
        {"value_conv": True},
        {"position_conv": False},
        {"rel_pos_bias": False},
        {"init_values": 1e-3},
        {"divisor": "inside"},
        {"weight_init": "paper"},
        {"expansion": 1.5},
    ],
)
def test_every_option_changes_the_output_and_trains_in_low_precision(overrides):
    outputs = []
    x = torch.randn(2, 3, 52, 44)
    for how in ({}, overrides):
        torch.manual_seed(1)
        outputs.append(small(**how)(x))
    assert (outputs[0] - outputs[1]).abs().max() > 1e-6
    model = small(**overrides).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@torch.no_grad()
def test_every_unit_starts_small_beside_its_tokens_where_full_scale_would_rival_them():
    """On smooth images, as photographs are; noise averages out in the windows and excites no unit."""
    largest = {}
    for gain in (1, 10):
        torch.manual_seed(0)
        x = F.interpolate(torch.randn(2, 3, 7, 7), (224, 224), mode="bicubic")
        model, ratios = timm.create_model("flash_pyramid_nano").eval(), []
        for module in model.modules():
            if isinstance(module, GatedBlock):
                module.unit.proj.weight.mul_(gain)
                module.register_forward_hook(
                    lambda block, arguments, out, to=ratios: to.append(
                        float((out - arguments[0]).std() / arguments[0].std())
                    )
                )
        model(x)
        assert len(ratios) == 18
        largest[gain] = max(ratios)
    assert largest[1] < 0.3 < 0.6 < largest[10], largest


# ---- the contract of a hierarchical backbone


def test_attributes_that_timm_reads():
    model = small()
    assert model.num_features == model.head_hidden_size == 48
    assert model.feature_info == [
        {"module": f"stages.{i}", "num_chs": CHANNELS[i], "reduction": 4 * 2**i} for i in range(4)
    ]
    assert model.get_classifier() is model.head.fc
    assert model.head.fc.out_features == model.num_classes == 5


def test_parameters_are_grouped_by_unit_or_coarsely_by_stage():
    model = small()
    for coarse, num_groups in ((False, 1 + 9 + 1), (True, 1 + 4 + 1)):  # stem, units or stages, head
        groups = group_parameters(model, model.group_matcher(coarse), reverse=True)
        assert sorted(set(groups.values())) == list(range(num_groups))
        assert groups["stem.conv1.weight"] == 0
        assert groups["stages.2.downsample.conv.weight"] == groups["stages.2.blocks.0.norm.weight"]
        assert groups["head.fc.weight"] == num_groups - 1
        assert (groups["stages.2.blocks.0.norm.weight"] == groups["stages.2.blocks.2.norm.weight"]) == coarse


@torch.no_grad()
def test_features_head_and_pooling():
    model = small()
    x = torch.randn(2, 3, 64, 96)
    features = model.forward_features(x)
    assert features.shape == (2, 48, 2, 3)
    torch.testing.assert_close(model.forward_head(features), model(x))
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), features.mean((2, 3)))
    model.reset_classifier(0)
    torch.testing.assert_close(model(x), features.mean((2, 3)))
    model.reset_classifier(0, "max")
    torch.testing.assert_close(model(x), features.amax((2, 3)))
    model.reset_classifier(0, "")
    torch.testing.assert_close(model(x), features)
    model.reset_classifier(3, "avg")
    assert model(x).shape == (2, 3)
    with pytest.raises(ValueError, match="global_pool"):
        model.reset_classifier(3, "token")
    with pytest.raises(ValueError, match="num_classes must be 0 with global_pool='', got 3"):
        model.reset_classifier(3, "")


@torch.no_grad()
def test_intermediates_are_contiguous_nchw_maps():
    model = small()
    x = torch.randn(2, 3, 65, 97)
    final, taps = model.forward_intermediates(x)
    torch.testing.assert_close(final, model.forward_features(x), rtol=0, atol=0)
    assert all(tap.is_contiguous() for tap in taps)
    picked = model.forward_intermediates(x, indices=[0, 2], stop_early=True, intermediates_only=True)
    torch.testing.assert_close(picked, [taps[0], taps[2]], rtol=0, atol=0)
    early, _ = model.forward_intermediates(x, indices=[1], stop_early=True, norm=True)
    torch.testing.assert_close(early, taps[1], rtol=0, atol=0)  # the final norm fits only the last stage
    normed = model.forward_intermediates(x, indices=2, norm=True, intermediates_only=True)
    torch.testing.assert_close(normed, [taps[2], final], rtol=0, atol=0)
    with pytest.raises(AssertionError, match="NCHW"):
        model.forward_intermediates(x, output_fmt="NLC")


@pytest.mark.parametrize("feature_cls", ["getter", "list", "dict", "hook"])
@pytest.mark.parametrize("out_indices", [(0, 1, 2, 3), (3,), (-3, -1)])
@torch.no_grad()
def test_features_only_takes_any_indices_and_every_wrapper_agrees(feature_cls, out_indices):
    indices = [i % 4 for i in out_indices]
    if feature_cls != "getter":
        out_indices = tuple(indices)
    x = torch.randn(1, 3, 65, 97)
    torch.manual_seed(1)
    expected = small().forward_intermediates(x, indices=indices, intermediates_only=True)
    torch.manual_seed(1)
    net = small(features_only=True, feature_cls=feature_cls, out_indices=out_indices)
    taps = net(x)
    torch.testing.assert_close(list(taps.values()) if isinstance(taps, dict) else list(taps), expected, rtol=0, atol=0)
    assert net.feature_info.channels() == [CHANNELS[i] for i in indices]
    assert net.feature_info.reduction() == [4 * 2**i for i in indices]


@pytest.mark.parametrize("name", ["flash_pyramid_nano", "flash_pyramid_tiny"])
@torch.no_grad()
def test_detection_sized_features_on_meta(name):
    net = timm.create_model(name, features_only=True, device="meta").eval()
    taps = net(torch.empty(2, 3, 800, 1344, device="meta"))
    channels = net.feature_info.channels()
    assert [tuple(tap.shape) for tap in taps] == [(2, c, *g) for c, g in zip(channels, grids(800, 1344), strict=True)]


@torch.no_grad()
def test_pruning_keeps_the_taps_and_drops_the_rest():
    model, pruned = small(), small()
    pruned.load_state_dict(model.state_dict())
    assert pruned.prune_intermediate_layers([1]) == [1]
    assert len(pruned.stages) == 2
    assert pruned.num_features == pruned.head_hidden_size == 24
    x = torch.randn(2, 3, 65, 97)
    tap = model.forward_intermediates(x, indices=[1], intermediates_only=True)[0]
    torch.testing.assert_close(pruned.forward_features(x), tap)
    pruned.set_input_size(96)
    pruned.reset_classifier(3, "avg")
    assert pruned(x).shape == (2, 3)


@torch.no_grad()
def test_set_input_size_follows_dtype_keeps_frozen_and_changes_nothing_at_the_same_size():
    model = small().to(torch.bfloat16)
    before = dict(model.named_parameters())
    model.set_input_size(64)
    assert all(p is before[n] for n, p in model.named_parameters())
    for p in model.parameters():
        p.requires_grad_(False)
    model.set_input_size((96, 160), window_size=(3, 5))
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in model.parameters())
    assert {tuple(table.shape) for table in tables(model)} == {(5 * 9, 1)}
    assert model(torch.randn(1, 3, 96, 160).bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="img_size"):
        model.set_input_size(0)


@torch.no_grad()
def test_checkpoint_of_another_image_and_window_is_fitted(tmp_path):
    source = small(window_size=3)
    torch.save({"state_dict": source.state_dict()}, tmp_path / "source.pth")
    overlay = {"file": str(tmp_path / "source.pth"), "num_classes": 5}
    model = small(img_size=(96, 160), window_size=5, pretrained=True, pretrained_cfg_overlay=overlay)
    for old, new in zip(tables(source), tables(model), strict=True):
        assert new.shape == (81, 1)
        torch.testing.assert_close(
            new.view(9, 9)[2:-2, 2:-2], old.view(5, 5), rtol=0, atol=0
        )  # an offset keeps its value
        assert new.view(9, 9)[0, 0] == old.view(5, 5)[0, 0]
    torch.testing.assert_close(
        model.stages[2].blocks[1].unit.value.weight, source.stages[2].blocks[1].unit.value.weight
    )
    assert torch.isfinite(model(torch.randn(1, 3, 96, 160))).all()


@pytest.mark.parametrize("channels", [1, 4])
@torch.no_grad()
def test_checkpoint_is_adapted_to_other_channels_and_classes(channels, tmp_path):
    torch.save(small(num_classes=1000).state_dict(), tmp_path / "source.pth")
    overlay = {"file": str(tmp_path / "source.pth")}
    model = small(in_chans=channels, num_classes=4, pretrained=True, pretrained_cfg_overlay=overlay)
    assert model(torch.randn(2, channels, 64, 64)).shape == (2, 4)


@torch.no_grad()
def test_deployed_pyramid_gives_the_same_taps():
    model = small(init_values=0.5, drop_path_rate=0.1)
    deployed = optimize_for_inference(model)
    x = torch.randn(2, 3, 52, 44)
    torch.testing.assert_close(deployed.forward_intermediates(x), model.forward_intermediates(x))


@torch.no_grad()
def test_batches_of_any_size_share_one_graph_after_the_first():
    assert graphs_of(small(depths=(1, 1, 1, 1)), [torch.randn(b, 3, 64, 64) for b in (2, 3, 5, 8)]) == 2


@pytest.mark.parametrize("how", [{"dynamic_img_size": False}, {"strict_img_size": True}])
@torch.no_grad()
def test_fixed_size_is_enforced_when_asked_for(how):
    model = small(**how)
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)
    for run in (model, model.forward_intermediates):
        with pytest.raises(ValueError, match=r"img_size \(64, 64\) with strict_img_size, got 64 x 66"):
            run(torch.randn(1, 3, 64, 66))
    scripted = torch.jit.script(model)
    assert scripted(torch.randn(1, 3, 64, 64)).shape == (1, 5)
    with pytest.raises(torch.jit.Error, match="strict_img_size"):
        scripted(torch.randn(1, 3, 64, 66))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"embed_dims": (16, 32, 48)}, ["embed_dims", "four", "(16, 32, 48)"]),
        ({"depths": 3}, ["depths", "four", "3"]),
        ({"depths": (2, 0, 2, 2)}, ["depths", "at least 1", "0"]),
        ({"qk_dims": (8, 8, 8, 0)}, ["qk_dims", "at least 1", "0"]),
        ({"img_size": 0}, ["img_size", "at least 1", "0"]),
        ({"window_size": (7, 7, 7)}, ["window_size", "pair", "(7, 7, 7)"]),
        ({"global_pool": "token"}, ["global_pool", "'token'"]),
        ({"global_pool": ""}, ["num_classes", "global_pool", "5"]),
        ({"score_fn": "relu"}, ["score_fn", "'relu'"]),
        ({"drop_path_rate": 1.0}, ["drop_path_rate", "below 1", "1.0"]),
        ({"weight_init": "jax"}, ["weight_init", "'jax'"]),
        ({"output_stride": 16}, ["output_stride", "4, 8, 16, 32", "16"]),
    ],
)
def test_bad_arguments_are_named_with_constraint_and_value(arguments, words):
    with pytest.raises(ValueError) as error:
        small(**arguments)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("argument", ["patch_size", "num_heads", "dynamic_img_pad"])
def test_unknown_keywords_raise(argument):
    with pytest.raises(TypeError, match=argument):
        small(**{argument: 1})
