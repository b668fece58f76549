"""Overlapping windows against the windows without overlap, and against masked attention over the whole grid."""

import pytest
import timm
import torch

from flash_vision.lab.overlap import margin_index, with_margin
from flash_vision.ops.windows import WindowLayout, partition_windows

SIZES = {"embed_dim": 16, "depth": 2, "qk_dim": 8, "window_size": 4, "num_classes": 5, "position_conv": False}


def test_without_a_margin_the_model_is_mixed_chunk():
    overlap = timm.create_model("lab_gau_overlap", margin=0, **SIZES).eval()
    mixed = timm.create_model("flash_gau_pico", value_conv=False, global_fn="inline", **SIZES).eval()
    mixed.load_state_dict(overlap.state_dict())
    for image in (torch.randn(2, 3, 32, 32), torch.randn(1, 3, 44, 60)):
        torch.testing.assert_close(overlap(image), mixed(image))


@pytest.mark.parametrize("branches", ["both", "local"])
def test_a_token_sees_as_far_as_the_margin_and_no_further(branches):
    model = timm.create_model("lab_gau_overlap", margin=1, branches=branches, **{**SIZES, "depth": 1}).eval()
    torch.nn.init.constant_(model.blocks[0].unit.position_bias.relative_position_bias_table, 5.0)  # no key's score is 0
    image = torch.randn(1, 3, 32, 32, requires_grad=True)
    token = model.forward_features(image).unflatten(1, (8, 8))[0, 3, 3]  # corner of the first window
    token[0].backward()
    reached = (image.grad.unflatten(-1, (8, 4)).unflatten(-3, (8, 4)).abs().sum((0, 1, 3, 5)) > 0).float()
    inside = torch.zeros(8, 8)
    inside[:5, :5] = 1  # the window's four rows and columns, and one beyond
    assert torch.equal(reached, torch.ones(8, 8) if branches == "both" else inside)


@pytest.mark.parametrize("branches", ["both", "local"])
def test_it_is_the_same_network_without_gradients_in_the_deploy_form_and_compiled(branches):
    model = timm.create_model("lab_gau_overlap", margin=1, branches=branches, **SIZES).eval()
    for block in model.blocks:
        block.unit.proj.weight.data.mul_(10)
        torch.nn.init.normal_(block.unit.position_bias.relative_position_bias_table)
    image = torch.randn(2, 3, 32, 44)
    expected = model(image).detach()
    with torch.inference_mode():
        torch.testing.assert_close(model(image), expected)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="eager")(image), expected)
    for block in model.blocks:
        block.reparameterize()
    with torch.inference_mode():
        torch.testing.assert_close(model(image), expected)


@pytest.mark.parametrize("layout", [WindowLayout(8, 8, 4, 4), WindowLayout(5, 7, 3, 4)])
@pytest.mark.parametrize("margin", [0, 1, 2])
def test_a_grown_window_holds_the_tokens_around_it_and_zeros_outside_the_grid(layout, margin):
    raster = torch.arange(1.0, layout.height * layout.width + 1).view(1, layout.height, layout.width, 1)
    grown = with_margin(partition_windows(raster, layout), layout, margin)
    side_h, side_w = layout.window_height + 2 * margin, layout.window_width + 2 * margin
    for number, window in enumerate(grown[0, :, :, 0].unflatten(1, (side_h, side_w))):
        row, column = divmod(number, -(-layout.width // layout.window_width))
        for i in range(side_h):
            for j in range(side_w):
                y, x = row * layout.window_height + i - margin, column * layout.window_width + j - margin
                real = 0 <= y < layout.height and 0 <= x < layout.width
                assert window[i, j] == (raster[0, y, x, 0] if real else 0)


def test_the_bias_belongs_to_the_offset_between_query_and_key():
    index = margin_index(WindowLayout(4, 4, 2, 2), margin=1, reach=2).view(2, 2, 4, 4)
    # query (1, 0) and key (0, 3) of the grown window, which is token (-1, 2): offset (2, -2)
    assert index[1, 0, 0, 3] == (2 + 2) * 5 + (-2 + 2)
    assert index[0, 0, 1, 1] == 2 * 5 + 2


def test_it_trains_with_masks_and_every_parameter_gets_a_gradient():
    model = timm.create_model("lab_gau_overlap", margin=1, **SIZES)
    model(torch.randn(2, 3, 44, 36)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


@pytest.mark.parametrize("option", [{"score_fn": "softmax"}, {"gate": False}])
def test_options_that_it_does_not_have_are_refused(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        timm.create_model("lab_gau_overlap", **SIZES, **option)
