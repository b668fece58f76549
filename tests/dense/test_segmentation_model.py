"""The network: decoders, odd sizes, weights, parameter groups, windows, loss."""

from itertools import pairwise

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.optim import create_optimizer_v2

from flash_vision.dense.segmentation import DECODERS, SegmentationLoss, create_segmenter
from flash_vision.dense.segmentation_inference import Windows, predict_logits, window_starts

VOID = -1
SMALL = {
    "upernet": {"decoder_channels": 32},
    "fpn": {"decoder_pyramid_channels": 32, "decoder_segmentation_channels": 64},
    "unet": {"decoder_channels": [32, 16, 16, 8, 8]},
    "unetplusplus": {"decoder_channels": [32, 16, 16, 8, 8]},
    "manet": {"decoder_channels": [32, 16, 16, 8, 8], "decoder_pab_channels": 16},
    "segformer": {"decoder_segmentation_channels": 32},
}


def network(backbone="test_convnext", decoder="fpn", **kwargs):
    return create_segmenter(backbone, 5, decoder=decoder, decoder_kwargs=SMALL[decoder], **kwargs)


@pytest.mark.parametrize("backbone", ["flash_pyramid_nano", "flash_gau_pico", "test_resnet", "test_vit"])
@pytest.mark.parametrize("decoder", DECODERS)
def test_every_decoder_trains_a_step_and_predicts_at_odd_sizes(backbone, decoder):
    model = network(backbone, decoder)
    targets = torch.randint(VOID, 5, (2, 45, 61))
    loss = SegmentationLoss(dice_weight=0.5)(model(torch.randn(2, 3, 45, 61)), targets)
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        for height, width in ((1, 1), (33, 20), (64, 32)):
            logits = model.eval()(torch.randn(1, 3, height, width))
            assert logits.shape == (1, 5, height, width)
            assert logits.isfinite().all()


@torch.no_grad()
def test_sides_are_padded_with_the_mean_colour_and_cut_back():
    model = network().eval()
    image = torch.randn(1, 3, 45, 61)
    padded = torch.zeros(1, 3, 64, 64)
    padded[..., :45, :61] = image
    torch.testing.assert_close(model(image), model(padded)[..., :45, :61])


@torch.no_grad()
def test_a_list_of_images_of_several_sizes_gives_what_each_gives_alone():
    model = network().eval()
    images = [torch.randn(3, 45, 61), torch.randn(3, 32, 64), torch.randn(3, 20, 20)]
    for image, logits in zip(images, model(images), strict=True):
        torch.testing.assert_close(logits, model(image[None])[0])


@pytest.mark.parametrize("backbone", ["flash_pyramid_nano", "flash_gau_pico"])
def test_what_the_backbone_does_not_decay_is_not_decayed_in_the_network(backbone):
    model = network(backbone)
    prefix = "network.encoder.features.body.model."
    plain = timm.create_model(backbone, num_classes=0)
    assert {name.removeprefix(prefix) for name in model.no_weight_decay()} == plain.no_weight_decay()
    assert model.no_weight_decay() <= {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("backbone", ["flash_pyramid_nano", "test_resnet"])
def test_layer_decay_follows_the_backbones_layers_and_gives_the_decoder_the_full_rate(backbone):
    model = network(backbone)
    groups = create_optimizer_v2(model, "adamw", lr=1.0, layer_decay=0.5).param_groups
    scale = {id(parameter): group["lr_scale"] for group in groups for parameter in group["params"]}
    scales = {name: scale[id(parameter)] for name, parameter in model.named_parameters()}
    assert {value for name, value in scales.items() if "features" not in name} == {1.0}
    encoder = [value for name, value in scales.items() if "features" in name]
    assert encoder[0] == min(scales.values()) < 0.1
    assert max(encoder) == 0.5


def test_a_backbone_starts_from_a_classifiers_file(tmp_path):
    classifier = timm.create_model("flash_pyramid_nano", num_classes=7)
    torch.nn.init.normal_(classifier.stages[0].blocks[0].norm.weight)
    file = tmp_path / "model.safetensors"
    save_file({name: value.contiguous() for name, value in classifier.state_dict().items()}, file)
    model = network("flash_pyramid_nano", pretrained_path=str(file))
    for name, value in model.features.body.model.state_dict().items():
        torch.testing.assert_close(value, classifier.state_dict()[name], rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"must hold all \d+ tensors of the model, \d+ are missing"):
        network("test_convnext", pretrained_path=str(file))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backbone": "flash_pyramid_pico"}, "unknown model 'flash_pyramid_pico'"),
        (
            {"decoder": "deeplab"},
            "decoder must be one of upernet, fpn, unet, unetplusplus, manet, segformer, got 'deeplab'",
        ),
        (
            {"decoder_kwargs": {"encoder_depth": 3}},
            "decoder_kwargs of fpn are decoder_pyramid_channels, .*, got 'encoder_depth'",
        ),
        ({"decoder_kwargs": {"decoder_width": 3}}, "got 'decoder_width'"),
        ({"backbone_kwargs": {"wide": True}}, "unexpected keyword argument 'wide'"),
        ({"pyramid_channels": 0}, "pyramid_channels must be at least 1"),
        ({"num_classes": 0}, "num_classes must be at least 1"),
        ({"pretrained_path": "/none.pth"}, "/none.pth: no such file"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_reason(arguments, message):
    chosen = {"backbone": "test_convnext", "num_classes": 5, "decoder": "fpn", **arguments}
    with pytest.raises(ValueError, match=message):
        create_segmenter(chosen.pop("backbone"), chosen.pop("num_classes"), **chosen)


@torch.no_grad()
@pytest.mark.parametrize("size", [(45, 61), (64, 64), (500, 500)])
def test_windows_that_cover_the_image_give_what_one_pass_gives(size):
    model = network().eval()
    image = torch.randn(2, 3, 45, 61)
    torch.testing.assert_close(predict_logits(model, image, Windows(size=size)), model(image))


@torch.no_grad()
def test_overlapping_windows_are_averaged_pixel_by_pixel():
    def corner(crops):
        """The value of a crop's first pixel, everywhere in it."""
        return crops[:, :1, :1, :1].expand(-1, 1, *crops.shape[2:])

    image = torch.arange(10.0).view(1, 1, 1, 10).expand(1, 3, 4, 10)
    got = predict_logits(corner, image, Windows(size=(4, 6), overlap=0.3, per_pass=1))
    expected = torch.tensor([0, 0, 0, 0, 2, 2, 4, 4, 4, 4.0])  # windows start at 0 and 4
    torch.testing.assert_close(got, expected.expand(1, 1, 4, 10))
    torch.testing.assert_close(predict_logits(corner, image, Windows(size=(4, 6), overlap=0.3)), got)


@pytest.mark.parametrize(("length", "window", "overlap"), [(10, 6, 0.3), (100, 33, 0), (101, 32, 0.9), (7, 7, 0.5)])
def test_windows_cover_everything_with_the_overlap_asked_for(length, window, overlap):
    starts = window_starts(length, window, overlap)
    assert starts[0] == 0
    assert starts[-1] == max(0, length - window)
    assert all(0 < after - before <= max(1, window * (1 - overlap)) for before, after in pairwise(starts))


def test_void_pixels_do_not_count_in_the_loss():
    loss = SegmentationLoss(smoothing=0.1, dice_weight=0.5)
    logits, targets = torch.randn(2, 5, 4, 6), torch.randint(0, 5, (2, 4, 6))
    targets[:, :2] = VOID
    changed = logits.clone()
    changed[:, :, :2] = 100 * torch.randn(2, 5, 2, 6)
    torch.testing.assert_close(loss(logits, targets), loss(changed, targets))


def test_a_batch_of_nothing_but_void_gives_no_loss_and_no_gradient():
    logits = torch.randn(2, 5, 4, 6, requires_grad=True)
    loss = SegmentationLoss(dice_weight=0.5)(logits, torch.full((2, 4, 6), VOID))
    loss.backward()
    assert loss == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_a_pixel_weighs_the_same_however_a_batch_is_split():
    loss = SegmentationLoss()
    logits, targets = torch.randn(4, 5, 6, 6), torch.randint(0, 5, (4, 6, 6))
    targets[:2, 1:] = VOID
    parts = [loss(logits[part], targets[part]) for part in (slice(0, 2), slice(2, 4))]
    torch.testing.assert_close(sum(parts) / 2, loss(logits, targets))
