"""Feature maps of any timm backbone: NCHW, any image size, with the backbone's own layer grouping."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import timm
import torch
from timm.models import get_model_traits, group_parameters
from timm.models._features import FeatureGetterNet
from torch import Tensor, nn

import flash_vision  # noqa: F401  registers the models with timm
from flash_vision.train.model_source import first_line, read_weights

BUILD_ERRORS = (ValueError, TypeError, RuntimeError, AssertionError, OSError, KeyError, AttributeError)
# How timm's families are told to take images of other sizes than their own, tried in this order.
ANY_SIZE: tuple[dict[str, bool], ...] = (
    {},
    {"dynamic_img_size": True, "dynamic_img_pad": True},
    {"dynamic_img_size": True},
    {"strict_img_size": False},
)
PROBE = (64, 96)  # image size, pixels, that a backbone must take: not square, no multiple of the usual windows


class TimmFeatures(nn.Module):
    """The feature maps of a timm model, made with features_only=True.

    Args:
        name: timm model name.
        strides: wanted strides; the maps at these are taken, one each. Where the model has one stride only
            (isotropic), its last map is.
        pretrained: with the model's published weights.
        pretrained_path: with the weights in this file, whose names must be the model's.
        model_kwargs: further arguments of timm.create_model.
    Attributes:
        strides: stride of each map, pixels.
        channels: channels of each map.
        model_kwargs: what builds the same model again.
    Raises:
        ValueError: unknown model, arguments it does not take, no maps at the wanted strides, or one image size only.
    """

    def __init__(
        self,
        name: str,
        *,
        strides: Sequence[int] = (4, 8, 16, 32),
        pretrained: bool = False,
        pretrained_path: str = "",
        model_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        given = dict(model_kwargs or {})
        if given.get("in_chans", 3) != 3:
            raise ValueError(f"model_kwargs: in_chans must be 3, images are RGB; got {given['in_chans']}")
        self.model_kwargs = given | any_size_arguments(name, given)
        out_indices = choose_maps(name, self.model_kwargs, strides)
        arguments: dict[str, Any] = {**self.model_kwargs, "features_only": True, "out_indices": out_indices}
        if pretrained_path:
            arguments["pretrained_cfg_overlay"] = {"file": pretrained_path}
        with torch.device("meta"):
            whole = _create(name, self.model_kwargs)
        if pretrained_path:
            check_weights(pretrained_path, whole)
        self.body = _create(name, arguments, pretrained=pretrained or bool(pretrained_path))
        check_any_size(name, self.body)
        info = self.body.feature_info
        self.strides: list[int] = info.reduction()
        self.channels: list[int] = info.channels()
        self.channels_last = str(getattr(self.body, "output_fmt", "NCHW")).endswith("NHWC")
        self.mean, self.std = (tuple(whole.pretrained_cfg[key]) for key in ("mean", "std"))
        self._names = self._names_in(whole)
        self._layers: Any = group_parameters(whole, whole.group_matcher(coarse=False), reverse=True)
        patterns = whole.no_weight_decay() if hasattr(whole, "no_weight_decay") else ()
        self._no_decay = {
            own for own, original in self._names.items() if any(fnmatch.fnmatch(original, p) for p in patterns)
        }

    def forward(self, images: Tensor) -> list[Tensor]:
        """Images (B, C, H, W) to maps (B, channels[i], H / strides[i], W / strides[i])."""
        maps = self.body(images)
        return [x.permute(0, 3, 1, 2).contiguous() for x in maps] if self.channels_last else list(maps)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recomputes activations in the backward pass.

        Raises:
            ValueError: the model cannot.
        """
        owner = self.body.model if isinstance(self.body, FeatureGetterNet) else self.body
        try:
            owner.set_grad_checkpointing(enable)  # pyright: ignore[reportCallIssue]
        except (AttributeError, AssertionError) as error:
            raise ValueError(f"grad_checkpointing: {self.name} has none ({first_line(error)})") from None

    def layer_ids(self) -> dict[str, int]:
        """Parameter name to layer, counted from 0 at the stem, as the model's own group_matcher numbers them."""
        return {own: self._layers[original] for own, original in self._names.items()}

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that the model exempts from weight decay."""
        return set(self._no_decay)

    def _names_in(self, whole: nn.Module) -> dict[str, str]:
        """Own parameter name to its name in the whole model, which features_only renames in timm's two ways."""
        renamed = {name: name for name, _ in whole.named_children()}
        for name, child in whole.named_children():
            if isinstance(child, nn.Sequential):
                renamed |= {f"{name}_{inner}": f"{name}.{inner}" for inner, _ in child.named_children()}
        known = {name for name, _ in whole.named_parameters()}
        names: dict[str, str] = {}
        for own, _ in self.named_parameters():
            inner = own.removeprefix("body.")
            first, _, rest = inner.partition(".")
            candidates = (inner, inner.removeprefix("model."), f"{renamed.get(first, first)}.{rest}")
            original = next((candidate for candidate in candidates if candidate in known), None)
            if original is not None:
                names[own] = original
        return names


def per_channel(name: str, given: list[float] | None, default: tuple[float, ...]) -> tuple[float, ...]:
    """A number for each of three channels: what is given, one for all of them or one each, or the backbone's own.

    Raises:
        ValueError: another number of values.
    """
    values = tuple(given or default)
    if len(values) not in (1, 3):
        raise ValueError(f"{name} must be 1 or 3 numbers, got {given!r}")
    return values * 3 if len(values) == 1 else values


def layer_decay_groups(features: TimmFeatures, prefix: str) -> Callable[[str], int]:
    """A group_matcher for a model that holds `features` under `prefix`: the backbone's layers, then all the rest.

    Args:
        prefix: name of the features in the model, with a dot at the end.
    """
    layers = {prefix + name: layer for name, layer in features.layer_ids().items()}
    last = max(layers.values()) + 1
    return lambda name: layers.get(name, last)


def any_size_arguments(name: str, given: dict[str, Any]) -> dict[str, bool]:
    """The arguments with which a timm model takes images of any size; none where it does so by itself, or never.

    Raises:
        ValueError: the model cannot be built.
    """
    for extra in ANY_SIZE:
        try:
            with torch.device("meta"):
                body = _create(name, {**extra, **given, "features_only": True})
        except ValueError:
            if not extra:
                raise
            continue
        if not get_model_traits(body).get("fixed_input_size"):
            return {key: value for key, value in extra.items() if key not in given}
    return {}


def check_any_size(name: str, body: nn.Module) -> None:
    """Runs a small image of zeros through the backbone.

    Raises:
        ValueError: it takes images of its own size only.
    """
    was_training = body.training
    try:
        with torch.no_grad():
            body.eval()(torch.zeros(1, get_model_traits(body).get("in_chans", 3), *PROBE))
    except BUILD_ERRORS as error:
        raise ValueError(f"model {name}: takes images of its own size only ({first_line(error)})") from None
    finally:
        body.train(was_training)


def choose_maps(name: str, model_kwargs: dict[str, Any], strides: Sequence[int]) -> tuple[int, ...]:
    """The out_indices of the maps at the wanted strides, or of the last map of an isotropic model.

    Raises:
        ValueError: the model has neither.
    """
    with torch.device("meta"):
        info = _create(name, {**model_kwargs, "features_only": True}).feature_info
    found: list[int] = info.reduction()
    indices: Sequence[int] = info.out_indices
    if len(set(found)) == 1:
        if found[0] & (found[0] - 1):
            raise ValueError(f"model {name}: the stride of its maps must be a power of two, got {found[0]}")
        return (indices[-1],)
    missing = sorted(set(strides) - set(found))
    if missing:
        raise ValueError(f"model {name}: has no map at stride {missing[0]}, only at {found}")
    # of several maps at one stride the last has seen most layers
    return tuple(max(i for i, stride in zip(indices, found, strict=True) if stride == wanted) for wanted in strides)


def check_weights(path: str, whole: nn.Module) -> None:
    """Checks that a weights file has every tensor of the model; timm would leave silently at random what is missing.

    Raises:
        ValueError: not a weights file, or one of another model.
    """
    state, expected = read_weights(path), whole.state_dict()
    missing = [name for name in expected if name not in state]
    if missing:
        raise ValueError(
            f"pretrained_path {path}: must hold all {len(expected)} tensors of the model, {len(missing)} are missing "
            f"(first: {missing[0]})"
        )


def _create(name: str, arguments: dict[str, Any], *, pretrained: bool = False) -> Any:
    """timm.create_model without classifier; its many kinds of error as ValueError."""
    if not arguments.get("features_only"):
        arguments = {**arguments, "num_classes": 0}
    try:
        return timm.create_model(name, pretrained=pretrained, **arguments)
    except BUILD_ERRORS as error:
        if "Unknown model" in str(error):
            raise ValueError(f"model: unknown model {name!r}") from None
        raise ValueError(f"model {name}: cannot be built ({first_line(error)})") from None
