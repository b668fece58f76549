"""Segmentation networks: a decoder of segmentation-models-pytorch on any timm backbone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, get_args

import segmentation_models_pytorch as smp
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_vision.dense.features import BUILD_ERRORS, TimmFeatures, layer_decay_groups
from flash_vision.dense.segmentation_classes import VOID
from flash_vision.dense.segmentation_inference import WHOLE_IMAGE, Windows, predict_logits
from flash_vision.dense.simple_pyramid import SimplePyramid
from flash_vision.train.model_source import first_line

Decoder = Literal["upernet", "fpn", "unet", "unetplusplus", "manet", "segformer"]
DECODERS: tuple[str, ...] = get_args(Decoder)
ARCHITECTURES: dict[str, Any] = {
    "upernet": smp.UPerNet,
    "fpn": smp.FPN,
    "unet": smp.Unet,
    "unetplusplus": smp.UnetPlusPlus,
    "manet": smp.MAnet,
    "segformer": smp.Segformer,
}
STRIDES = (4, 8, 16, 32)
_PREFIX = "network.encoder.features."
_ENTRY = "flash_vision"  # name of the encoder in the register of segmentation-models-pytorch, while one is built


class TimmEncoder(nn.Module):
    """A timm backbone with the encoder interface of segmentation-models-pytorch.

    The maps at strides 4, 8, 16 and 32 are the backbone's own, or those of a simple feature pyramid on the one map of
    an isotropic backbone. At stride 2 there is nothing.

    Args:
        features: the backbone.
        pyramid_channels: width of the simple feature pyramid.
    Attributes:
        out_channels: channels at strides 1, 2, 4, 8, 16 and 32.
        output_stride: 32.
    """

    def __init__(self, features: TimmFeatures, *, pyramid_channels: int) -> None:
        super().__init__()
        self.features = features
        self.pyramid: SimplePyramid | None = None
        channels = features.channels
        if len(features.strides) == 1:
            self.pyramid = SimplePyramid(channels[0], features.strides[0], pyramid_channels, strides=STRIDES)
            channels = [pyramid_channels] * len(STRIDES)
        self.out_channels = [3, 0, *channels]
        self.output_stride = STRIDES[-1]

    def set_in_channels(self, in_channels: int, pretrained: bool) -> None:
        """Nothing to change: images have three channels."""
        assert in_channels == 3

    def forward(self, x: Tensor) -> list[Tensor]:
        """(B, 3, H, W) to maps at strides 1, 2 (of no channels), 4, 8, 16 and 32."""
        maps = self.features(x)
        if self.pyramid is not None:
            maps = self.pyramid(maps[0])
        return [x, x.new_empty(x.shape[0], 0, x.shape[2] // 2, x.shape[3] // 2), *maps]


class SegmentationNetwork(nn.Module):
    """Images of any size to class logits of the same size.

    A batch is padded on the right and below to multiples of 32 with zeros, the mean colour of a normalised image, and
    the logits are cut back. A list of images, which may differ in size, is what evaluation gives it; there each image
    goes through in windows, if there are some.

    Args:
        network: model of segmentation-models-pytorch around `encoder`.
        encoder: the backbone.
        windows: how lists of images are cut.
    """

    def __init__(self, network: nn.Module, encoder: TimmEncoder, *, windows: Windows = WHOLE_IMAGE) -> None:
        super().__init__()
        self.network = network
        self.windows = windows

    def forward(self, x: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
        """(B, 3, H, W) to logits (B, K, H, W); or images (3, h, w) each to its (K, h, w)."""
        if isinstance(x, list):
            return [predict_logits(self.logits, image[None], self.windows)[0] for image in x]
        return self.logits(x)

    def logits(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) to logits (B, K, H, W)."""
        height, width = x.shape[-2:]
        padded = F.pad(x, (0, -width % STRIDES[-1], 0, -height % STRIDES[-1]))
        return self.network(padded)[..., :height, :width]

    @property
    def features(self) -> TimmFeatures:
        """The backbone."""
        return self.network.encoder.features  # pyright: ignore[reportAttributeAccessIssue, reportReturnType]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the backbone's activations in the backward pass; ValueError where it cannot."""
        self.features.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """The backbone's parameters that timm does not decay, by their names here."""
        return {_PREFIX + name for name in self.features.no_weight_decay()}

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """Layers for layer-wise rates: those of the backbone, then all the rest; coarse makes no difference."""
        return layer_decay_groups(self.features, _PREFIX)


def create_segmenter(
    backbone: str,
    num_classes: int,
    *,
    decoder: str = "upernet",
    decoder_kwargs: dict[str, Any] | None = None,
    backbone_kwargs: dict[str, Any] | None = None,
    pyramid_channels: int | None = None,
    pretrained: bool = False,
    pretrained_path: str = "",
    windows: Windows = WHOLE_IMAGE,
) -> SegmentationNetwork:
    """Builds a segmentation network with a fresh decoder.

    Args:
        backbone: timm name of a model with maps at strides 4, 8, 16 and 32, or at one stride that is a power of two.
        num_classes: K.
        decoder: one of `DECODERS`.
        decoder_kwargs: further arguments of the decoder's class in segmentation-models-pytorch.
        backbone_kwargs: further arguments of timm.create_model.
        pyramid_channels: width of the simple feature pyramid that backbones of one stride get, 256 when not given.
        pretrained: start the backbone from its published weights.
        pretrained_path: start the backbone from this file of a classifier's weights (.safetensors, .pth).
        windows: how evaluation cuts images.
    Raises:
        ValueError: unknown backbone or decoder, arguments that they do not take, maps at other strides, weights that
            are not the backbone's, or pyramid_channels for a backbone that has the four strides.
    """
    if decoder not in DECODERS:
        raise ValueError(f"decoder must be one of {', '.join(DECODERS)}, got {decoder!r}")
    for name, value in (("num_classes", num_classes), ("pyramid_channels", pyramid_channels)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    features = TimmFeatures(
        backbone,
        strides=STRIDES,
        pretrained=pretrained,
        pretrained_path=pretrained_path,
        model_kwargs=backbone_kwargs,
    )
    if pyramid_channels is not None and len(features.strides) > 1:
        raise ValueError(f"pyramid_channels must be left out with {backbone}, which has maps at {features.strides}")
    encoder = TimmEncoder(features, pyramid_channels=pyramid_channels or 256)
    # the library takes any argument and ignores those that it does not know
    options = [name for name in inspect.signature(ARCHITECTURES[decoder]).parameters if name.startswith("decoder_")]
    for name in decoder_kwargs or {}:
        if name not in options:
            raise ValueError(f"decoder_kwargs of {decoder} are {', '.join(options)}, got {name!r}")
    # the library's own way to a new encoder is its register, which makes one by name
    smp.encoders.encoders[_ENTRY] = {"encoder": lambda depth, output_stride: encoder, "params": {}}
    try:
        network = ARCHITECTURES[decoder](_ENTRY, encoder_weights=None, classes=num_classes, **decoder_kwargs or {})
    except BUILD_ERRORS as error:
        raise ValueError(f"decoder {decoder}: cannot be built ({first_line(error)})") from None
    finally:
        del smp.encoders.encoders[_ENTRY]
    return SegmentationNetwork(network, encoder, windows=windows)


class SegmentationLoss(nn.Module):
    """Cross entropy, and if wanted Dice, over the pixels that have a class.

    The cross entropy of a batch is the sum over its labelled pixels by the number of all its pixels, so that a pixel
    weighs the same however a batch is split over processes and accumulation steps.

    Args:
        smoothing: label smoothing, in [0, 1).
        dice_weight: factor of the Dice loss of segmentation-models-pytorch (1606.04797), 0 for none: the mean over the
            classes of one minus the Dice coefficient in the batch, 0 for a class that does not occur.
    """

    def __init__(self, *, smoothing: float = 0.0, dice_weight: float = 0.0) -> None:
        super().__init__()
        self.smoothing, self.dice_weight = smoothing, dice_weight
        self.dice = smp.losses.DiceLoss("multiclass", ignore_index=VOID) if dice_weight else None

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Logits (B, K, H, W) and classes (B, H, W), VOID where there is none, to a number."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        target = target.long()
        total = F.cross_entropy(logits, target, ignore_index=VOID, reduction="sum", label_smoothing=self.smoothing)
        loss = total / target.numel()
        return loss if self.dice is None else loss + self.dice_weight * self.dice(logits, target)
