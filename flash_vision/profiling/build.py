"""A timm model for one image size, and clear errors where there is none."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import timm
import torch
from torch import nn

Size = tuple[int, int]


def square(size: int | Sequence[int]) -> Size:
    """(height, width) in pixels of a side length or a pair.

    Raises:
        ValueError: a side is below 1.
    """
    height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    if height < 1 or width < 1:
        raise ValueError(f"img_size must be at least 1 pixel a side, got {height}x{width}")
    return height, width


def check_model_name(name: str) -> None:
    """Raises ValueError, with the nearest names, for a name that timm does not know."""
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ValueError(f"model must be a timm model name, got {name!r}{hint}")


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
        name: timm model name.
        img_size: height and width in pixels, or one side; None for the model's own.
        device: torch device name, "meta" included.

    Returns:
        The model, with 1000 classes or as many as its configuration names.

    Raises:
        ValueError: unknown model, or one that cannot be built for the size.
    """
    check_model_name(name)
    size = None if img_size is None else square(img_size)
    try:
        return _create(name, size, device).eval()
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except (ValueError, AssertionError, RuntimeError, ZeroDivisionError, IndexError) as error:
        if is_out_of_memory(error):
            raise
        at = "" if size is None else f" for {size[0]}x{size[1]} px"
        raise ValueError(f"{name} cannot be built{at}: {first_line(error)}") from error


def _create(name: str, size: Size | None, device: str) -> nn.Module:
    with torch.device(device):
        if size is None:
            return timm.create_model(name)
        try:
            return timm.create_model(name, img_size=size)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            return timm.create_model(name)


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
