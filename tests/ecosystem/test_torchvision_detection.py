"""The models as backbones of torchvision's detectors, through the adapter that docs/other_tools.md shows."""

from collections import OrderedDict

import pytest
import timm
import torch
from torch import nn
from torchvision.models.detection import FCOS, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool


class TimmFPN(nn.Module):
    """Any timm model with several strides and a feature pyramid network, as torchvision's detectors ask for it."""

    def __init__(self, name, out_indices, out_channels=64):
        super().__init__()
        self.body = timm.create_model(name, features_only=True, out_indices=out_indices)
        self.fpn = FeaturePyramidNetwork(self.body.feature_info.channels(), out_channels, LastLevelMaxPool())
        self.out_channels = out_channels

    def forward(self, x):
        return self.fpn(OrderedDict((str(i), features) for i, features in enumerate(self.body(x))))


def detector(kind, backbone, levels):
    sizes = {"min_size": 96, "max_size": 160, "num_classes": 4}
    if kind is FCOS:
        anchors = AnchorGenerator(tuple((8 * 2**i,) for i in range(levels)), ((1.0,),) * levels)
        return FCOS(backbone, anchor_generator=anchors, **sizes)
    anchors = AnchorGenerator(tuple((16 * 2**i,) for i in range(levels)), ((0.5, 1.0, 2.0),) * levels)
    if kind is RetinaNet:
        return RetinaNet(backbone, anchor_generator=anchors, **sizes)
    return kind(backbone, rpn_anchor_generator=anchors, box_detections_per_img=5, **sizes)


def target(height, width, boxes):
    masks = torch.zeros(len(boxes), height, width, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes, strict=True):
        mask[top:bottom, left:right] = 1
    labels = torch.arange(len(boxes)) % 3 + 1
    return {"boxes": torch.tensor(boxes, dtype=torch.float32).view(-1, 4), "labels": labels, "masks": masks}


@pytest.mark.parametrize("kind", [MaskRCNN, RetinaNet, FCOS])
def test_a_pyramid_trains_a_step_and_detects_at_mixed_odd_sizes(kind):
    model = detector(kind, TimmFPN("flash_pyramid_nano", (0, 1, 2, 3)), levels=5)
    images = [torch.rand(3, 75, 101), torch.rand(3, 90, 61)]
    targets = [target(75, 101, [(5, 5, 40, 30), (30, 20, 90, 70)]), target(90, 61, [])]
    losses = model(images, targets)
    sum(losses.values()).backward()
    assert all(loss.isfinite() for loss in losses.values())
    assert all(parameter.grad is not None for parameter in model.backbone.parameters())
    with torch.no_grad():
        found = model.eval()(images)
    assert [set(result) >= {"boxes", "labels", "scores"} for result in found] == [True, True]


def test_an_isotropic_model_serves_with_its_one_map():
    backbone = TimmFPN("flash_gau_tiny", (11,))
    model = detector(RetinaNet, backbone, levels=2)
    losses = model([torch.rand(3, 75, 101)], [target(75, 101, [(5, 5, 40, 30)])])
    sum(losses.values()).backward()
    assert all(parameter.grad is not None for parameter in backbone.parameters())
