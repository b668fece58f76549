"""A timm model for one image size, and clear errors where there is none.

Wherever a tool takes a model's name it takes a description: the name, then "+form" or "+argument=value" as often as
needed. "flash_gau_small+qk_dim=32+reparam" is that variant of the constructor, folded for inference;
"flash_pyramid_tiny+features_only=true" the backbone alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import timm
import torch
import yaml
from timm.models import reparameterize_model
from torch import nn

Size = tuple[int, int]
# what may follow a name: folded and frozen for inference; gradient checkpointing in training
FORMS = ("reparam", "grad_checkpointing")


def square(size: int | Sequence[int]) -> Size:
    """(height, width) in pixels of a side length or a pair.

    Raises:
        ValueError: a side is below 1.
    """
    height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    if height < 1 or width < 1:
        raise ValueError(f"img_size must be at least 1 pixel a side, got {height}x{width}")
    return height, width


def parse_description(description: str) -> tuple[str, dict[str, Any], list[str]]:
    """A model's name, constructor arguments and forms, from "NAME+argument=value+form"; values are YAML.

    Raises:
        ValueError: a name that timm does not know, with the nearest ones, or a form that is none.
    """
    name, *parts = description.split("+")
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ValueError(f"model must be a timm model name, got {name!r}{hint}")
    forms = [part for part in parts if "=" not in part]
    for form in forms:
        if form not in FORMS:
            raise ValueError(
                f"{description}: what follows + must be argument=value, {' or '.join(FORMS)}, got {form!r}"
            )
    arguments = dict(part.split("=", 1) for part in parts if "=" in part)
    return name, {key: yaml.safe_load(value) for key, value in arguments.items()}, forms


def check_model_name(description: str) -> None:
    """Raises ValueError as `parse_description`."""
    parse_description(description)


def check_device(device: str) -> torch.device:
    """The torch device of a name.

    Raises:
        ValueError: no such device name, or the device is not there.
    """
    try:
        checked = torch.device(device)
        torch.empty(1, device=checked)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device must be one that this machine has, got {device!r} ({first_line(error)})") from error
    return checked


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class name if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def build_model(name: str, *, img_size: int | Sequence[int] | None = None, device: str = "cpu") -> nn.Module:
    """Builds a timm model with random weights for an image size, in evaluation mode.

    Models whose constructor takes `img_size` (ViT, Swin, this package's) get it; a convolutional network is
    built as it is. On the meta device nothing is allocated or initialised.

    Args:
        name: timm model name, or a description as `parse_description` reads it.
        img_size: height and width in pixels, or one side; None for the model's own.
        device: torch device name, "meta" included.

    Returns:
        The model, with 1000 classes or as many as its configuration names.

    Raises:
        ValueError: unknown model, or one that cannot be built for the size or with the arguments.
    """
    variant, arguments, forms = parse_description(name)
    size = None if img_size is None else square(img_size)
    try:
        model = _create(variant, size, device, arguments).eval()
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except (ValueError, AssertionError, RuntimeError, ZeroDivisionError, IndexError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        at = "" if size is None else f" for {size[0]}x{size[1]} px"
        raise ValueError(f"{name} cannot be built{at}: {first_line(error)}") from error
    if "grad_checkpointing" in forms:
        model.set_grad_checkpointing(True)  # pyright: ignore[reportCallIssue]
    return reparameterize_model(model, inplace=True).requires_grad_(False) if "reparam" in forms else model


def _create(name: str, size: Size | None, device: str, arguments: dict[str, Any]) -> nn.Module:
    with torch.device(device):
        if size is None:
            return timm.create_model(name, **arguments)
        try:
            return timm.create_model(name, img_size=size, **arguments)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            return timm.create_model(name, **arguments)


def example_input(model: nn.Module, img_size: int | Sequence[int], *, batch_size: int = 1, device: str) -> torch.Tensor:
    """A random batch (B, channels, H, W) for a timm model, with as many channels as the model takes."""
    channels = getattr(model, "pretrained_cfg", {}).get("input_size", (3, 0, 0))[0]
    return torch.randn(batch_size, channels, *square(img_size), device=device)


def default_size(model: nn.Module) -> Size:
    """(height, width) in pixels of a timm model's configuration, 224 x 224 if it names none."""
    return square(getattr(model, "pretrained_cfg", {}).get("input_size", (3, 224, 224))[1:])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    message = str(error).lower()
    words = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")
    return isinstance(error, RuntimeError) and any(word in message for word in words)
