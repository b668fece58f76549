"""The models as backbones of Hugging Face detectors and segmenters, through TimmBackboneConfig; nothing is loaded."""

import pytest
import torch
from timm.models._features import FeatureGetterNet

transformers = pytest.importorskip("transformers", reason="needs pip install transformers")

WIDTHS = [64, 128, 256]  # of flash_pyramid_nano at strides 8, 16 and 32


@pytest.fixture(autouse=True)
def _quiet():
    """Mask2Former says of every backbone but its own Swin that it may not be compatible."""
    transformers.utils.logging.set_verbosity_error()


def backbone_config(name, out_indices):
    return transformers.TimmBackboneConfig(backbone=name, out_indices=out_indices)


def rt_detr():
    config = transformers.RTDetrConfig(
        backbone_config=backbone_config("flash_pyramid_nano", [1, 2, 3]), encoder_in_channels=WIDTHS, d_model=32,
        encoder_hidden_dim=32, encoder_ffn_dim=64, encoder_attention_heads=2, decoder_in_channels=[32, 32, 32],
        decoder_ffn_dim=64, decoder_layers=1, decoder_attention_heads=2, num_queries=10, num_denoising=4, num_labels=3,
    )  # fmt: skip
    return transformers.RTDetrForObjectDetection(config)


def mask2former():
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone_config("flash_pyramid_nano", [0, 1, 2, 3]), feature_size=32, mask_feature_size=32,
        hidden_dim=32, encoder_feedforward_dim=64, encoder_layers=1, decoder_layers=2, num_attention_heads=2,
        dim_feedforward=64, num_queries=8, num_labels=3, train_num_points=64,
    )  # fmt: skip
    return transformers.Mask2FormerForUniversalSegmentation(config)


def detr(name):
    config = transformers.DetrConfig(
        backbone_config=backbone_config(name, [-1]), d_model=32, encoder_layers=1, encoder_ffn_dim=64,
        encoder_attention_heads=2, decoder_layers=1, decoder_ffn_dim=64, decoder_attention_heads=2, num_queries=10,
        num_labels=3,
    )  # fmt: skip
    return transformers.DetrForObjectDetection(config)


def boxes(*labels):
    return {"class_labels": torch.tensor(labels), "boxes": torch.rand(len(labels), 4) / 4 + 0.25}


def without_gradient(model):
    """Names of the backbone's parameters that a backward pass did not reach."""
    (backbone,) = (module for module in model.modules() if isinstance(module, FeatureGetterNet))
    return {name for name, parameter in backbone.named_parameters() if parameter.grad is None}


@pytest.mark.parametrize(("height", "width"), [(96, 128), (160, 64)])
def test_rt_detr_trains_a_step_on_a_pyramid_at_sizes_that_its_encoder_can_halve(height, width):
    model = rt_detr()
    out = model(pixel_values=torch.randn(2, 3, height, width), labels=[boxes(1), boxes(0, 2)])
    out.loss.backward()
    assert out.loss.isfinite()
    assert not without_gradient(model)


@pytest.mark.parametrize(("height", "width"), [(96, 128), (70, 100)])
def test_mask2former_trains_a_step_on_a_pyramid_at_any_size(height, width):
    model = mask2former()
    masks = [(torch.rand(2, height, width) > 0.5).float() for _ in range(2)]
    out = model(
        pixel_values=torch.randn(2, 3, height, width), mask_labels=masks, class_labels=[torch.tensor([0, 1])] * 2
    )
    out.loss.backward()
    assert out.loss.isfinite()
    assert not without_gradient(model)


@pytest.mark.parametrize("name", ["flash_gau_tiny", "flash_quad_tiny"])
def test_detr_trains_a_step_on_the_one_map_of_an_isotropic_model(name):
    model = detr(name)
    out = model(pixel_values=torch.randn(2, 3, 75, 101), labels=[boxes(1), boxes(0, 2)])
    out.loss.backward()
    assert out.loss.isfinite()
    assert not without_gradient(model)


@pytest.mark.parametrize("build", [rt_detr, mask2former, lambda: detr("flash_gau_tiny")])
def test_a_saved_detector_comes_back_the_same_although_it_is_built_without_memory_first(tmp_path, build):
    model = build().eval()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        for name, expected in model(pixel_values=image).items():
            if torch.is_tensor(expected):
                torch.testing.assert_close(again(pixel_values=image)[name], expected, msg=name)


@pytest.mark.parametrize(
    ("name", "out_indices", "strides"), [("flash_pyramid_nano", [0, 3], [4, 32]), ("flash_gau_tiny", [5, 11], [16, 16])]
)
def test_feature_maps_come_as_nchw_and_in_the_order_asked_for(name, out_indices, strides):
    backbone = transformers.TimmBackbone(backbone_config(name, out_indices))
    with torch.no_grad():
        maps = backbone(torch.randn(1, 3, 64, 96)).feature_maps
    assert [tuple(m.shape[2:]) for m in maps] == [(64 // stride, 96 // stride) for stride in strides]
    assert [m.shape[1] for m in maps] == backbone.channels
