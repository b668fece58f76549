"""Any timm backbone as maps at strides 4 to 32, any image size, with its layers for the optimiser."""

import itertools

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.optim import create_optimizer_v2
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

from flash_vision.dense.backbone import PyramidBackbone
from flash_vision.dense.detection_model import DetectorSpec, build_detector
from flash_vision.dense.features import TimmFeatures
from flash_vision.dense.simple_pyramid import SimplePyramid

SMALL_SWIN = {"embed_dim": 32, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)}
SMALL_VIT = {"patch_size": 16, "embed_dim": 32, "depth": 4, "num_heads": 2}


def spec(**fields) -> DetectorSpec:
    chosen = {
        "detector": "faster_rcnn", "model": "test_resnet", "model_kwargs": {}, "class_names": ("a",),
        "category_ids": (1,), "min_size": 64, "max_size": 96, "mean": (0.5,) * 3, "std": (0.5,) * 3,
        "neck_channels": 8, "box_head_dim": 16, "mask_head_dim": 8, "anchor_scale": None, "detector_kwargs": {},
    }  # fmt: skip
    return DetectorSpec(**{**chosen, **fields})


@pytest.mark.parametrize("stride", [2, 4, 8, 16, 32])
def test_the_simple_pyramid_gives_every_stride_from_a_map_of_any(stride):
    pyramid = SimplePyramid(24, stride, 8)
    levels = pyramid(torch.randn(2, 24, 64 // stride, 96 // stride))
    assert [tuple(level.shape) for level in levels] == [(2, 8, 64 // s, 96 // s) for s in (4, 8, 16, 32)]
    torch.stack([level.square().mean() for level in levels]).sum().backward()
    assert all(parameter.grad is not None for parameter in pyramid.parameters())


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("test_resnet", {}), ("swin_tiny_patch4_window7_224", SMALL_SWIN), ("vit_tiny_patch16_224", SMALL_VIT),
        ("flash_gau_pico", {"embed_dim": 32, "depth": 4}), ("flash_pyramid_nano", {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("two_stage", [True, False])
def test_any_backbone_gives_the_levels_of_a_detector(name, kwargs, two_stage):
    strides = (4, 8, 16, 32) if two_stage else (8, 16, 32)
    extra = LastLevelMaxPool() if two_stage else LastLevelP6P7(8, 8)
    features = TimmFeatures(name, strides=strides, model_kwargs=kwargs)
    backbone = PyramidBackbone(features, 8, strides=strides, extra=extra).eval()
    with torch.no_grad():
        levels = backbone(torch.randn(1, 3, 96, 160))
    expected = [(8, 96 // s, 160 // s) for s in strides]
    assert [tuple(level.shape[1:]) for level in levels.values()][: len(strides)] == expected
    assert len(levels) == 5
    named = {name for name, _ in features.named_parameters()}
    assert named == features.layer_ids().keys(), "each parameter of the backbone has its layer"


def test_maps_of_channels_last_backbones_are_the_same_as_timm_gives():
    features = TimmFeatures("swin_tiny_patch4_window7_224", model_kwargs=SMALL_SWIN).eval()
    images = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        for own, timms in zip(features(images), features.body(images), strict=True):
            assert torch.equal(own, timms.permute(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("name", "kwargs", "line"),
    [
        ("hiera_tiny_224", {}, "hiera_tiny_224: takes images of its own size only"),
        ("eva02_tiny_patch14_224", {"depth": 4}, "stride of its maps must be a power of two, got 14"),
        ("no_such_model", {}, "unknown model 'no_such_model'"),
        ("test_resnet", {"depths": 3}, "test_resnet: cannot be built"),
        ("levit_128s", {}, "has no map at stride 4, only at"),
    ],
)
def test_backbones_that_cannot_serve_are_refused(name, kwargs, line):
    with pytest.raises(ValueError, match=line):
        TimmFeatures(name, model_kwargs=kwargs)


def test_layer_decay_reaches_from_the_stem_to_the_heads():
    detector = build_detector(spec(model="flash_gau_pico", model_kwargs={"embed_dim": 32, "depth": 4}))
    optimizer = create_optimizer_v2(detector, opt="adamw", lr=1.0, weight_decay=0.1, layer_decay=0.5)
    names = {id(parameter): name for name, parameter in detector.named_parameters()}
    scale = {names[id(p)]: group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    decay = {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert scale.keys() == set(names.values())
    block = [next(s for name, s in scale.items() if f"blocks.{i}." in name) for i in range(4)]
    assert all(below == above / 2 for below, above in itertools.pairwise(block))
    stem = next(s for name, s in scale.items() if "patch_embed" in name)
    assert stem == block[0] / 2
    assert {s for name, s in scale.items() if ".features." not in name} == {1.0}
    exempt = detector.no_weight_decay()
    assert exempt
    assert {decay[name] for name in exempt} == {0}


def test_weights_of_a_file_reach_the_backbone_and_those_of_another_model_are_refused(tmp_path):
    trained = timm.create_model("test_vit", num_classes=5)
    save_file(trained.state_dict(), tmp_path / "vit.safetensors")
    features = TimmFeatures("test_vit", pretrained_path=str(tmp_path / "vit.safetensors"))
    weights = dict(trained.named_parameters())
    for name, parameter in features.named_parameters():
        assert torch.equal(parameter, weights[name.removeprefix("body.model.")]), name
    with pytest.raises(ValueError, match=r"must hold all (\d+) tensors of the model, \1 are missing"):
        TimmFeatures("test_resnet", pretrained_path=str(tmp_path / "vit.safetensors"))
    with pytest.raises(ValueError, match=r"12 are missing \(first: blocks.6.norm1.weight\)"):
        TimmFeatures("test_vit", pretrained_path=str(tmp_path / "vit.safetensors"), model_kwargs={"depth": 7})


def test_anchors_keep_their_proportion_to_the_stride():
    small, large = (
        build_detector(spec(min_size=size, max_size=2000)).network.rpn.anchor_generator for size in (240, 800)
    )
    assert small.sizes == ((16,), (32,), (64,), (128,), (256,))
    assert large.sizes == ((32,), (64,), (128,), (256,), (512,))
    chosen = build_detector(spec(detector="retinanet", anchor_scale=3.0)).network.anchor_generator
    assert chosen.sizes[0] == (24, 30, 38)


@pytest.mark.parametrize("kwargs", [{"num_classes": 3}, {"score_tresh": 0.1}, {"size_divisible": 64}])
def test_arguments_that_a_detector_does_not_take_are_refused(kwargs):
    with pytest.raises(ValueError, match="detector_kwargs: retinanet takes no"):
        build_detector(spec(detector="retinanet", detector_kwargs=kwargs))
