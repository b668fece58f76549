"""The models as encoders of segmentation-models-pytorch, by their timm names."""

import pytest
import torch

smp = pytest.importorskip("segmentation_models_pytorch", reason="needs pip install segmentation-models-pytorch")

PYRAMID_DECODERS = ("Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "UPerNet", "Segformer")


def check(model, unused=()):
    logits = model(torch.randn(2, 3, 64, 96))
    assert logits.shape == (2, 5, 64, 96)
    logits.square().mean().backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == set(unused)
    with torch.no_grad():
        assert model.eval()(torch.randn(1, 3, 160, 32)).shape == (1, 5, 160, 32)


@pytest.mark.parametrize("decoder", PYRAMID_DECODERS)
def test_a_pyramid_serves_every_decoder_that_needs_no_dilation(decoder):
    check(getattr(smp, decoder)(encoder_name="tu-flash_pyramid_nano", encoder_weights=None, classes=5))


def test_the_pyramid_of_the_size_of_swin_tiny_is_a_drop_in():
    arguments = {"encoder_weights": None, "classes": 5, "decoder_channels": 64}
    ours = smp.UPerNet(encoder_name="tu-flash_pyramid_tiny", **arguments)
    swin = smp.UPerNet(encoder_name="tu-swin_tiny_patch4_window7_224", **arguments)
    assert ours.encoder.model.feature_info.reduction() == swin.encoder.model.feature_info.reduction()
    with torch.no_grad():
        assert ours.eval()(torch.randn(1, 3, 64, 96)).shape == (1, 5, 64, 96)


@pytest.mark.parametrize("decoder", ["PAN", "DeepLabV3", "DeepLabV3Plus"])
def test_decoders_that_dilate_the_last_stages_are_refused_with_the_reason(decoder):
    with pytest.raises(ValueError, match="output_stride must be left out"):
        getattr(smp, decoder)(encoder_name="tu-flash_pyramid_nano", encoder_weights=None, classes=5)


@pytest.mark.parametrize("name", ["flash_gau_tiny", "flash_quad_tiny"])
def test_an_isotropic_model_serves_dpt(name):
    model = smp.DPT(encoder_name=f"tu-{name}", encoder_weights=None, classes=5, decoder_readout="ignore", num_classes=0)
    check(model, unused=("encoder.model.norm.weight", "encoder.model.norm.bias"))
