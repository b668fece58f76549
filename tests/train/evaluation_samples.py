"""A small class folder of real JPEG and PNG files, and a small model with saved weights, for the evaluation tests."""

from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import flash_vision  # noqa: F401  registers flash_gau_pico

CLASSES = ("blue", "green", "red")


def write_image(path: Path, *, seed: int, size: tuple[int, int] = (40, 30), channel: int = 0) -> Path:
    """Noise with one channel brighter; `size` is (width, height)."""
    pixels = np.random.default_rng(seed).integers(0, 160, (size[1], size[0], 3), dtype=np.uint8)
    pixels[..., channel] += 80
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def write_class_folder(root: Path, *, images: int = 4, classes: tuple[str, ...] = CLASSES) -> Path:
    """root/CLASS/N.jpg or .png, `images` of each class, of several sizes."""
    for index, name in enumerate(classes):
        for number in range(images):
            suffix = "png" if number % 3 == 2 else "jpg"
            path = root / name / f"{name}_{number}.{suffix}"
            write_image(path, seed=100 * index + number, size=(40 + 8 * number, 56 - 4 * number), channel=2 - index % 3)
    return root


def save_model(path: Path, name: str = "test_vit", *, num_classes: int = 3, seed: int = 0, **kwargs: object) -> Path:
    """Saves a randomly initialised model whose logits spread enough to tell images apart."""
    torch.manual_seed(seed)
    model = timm.create_model(name, num_classes=num_classes, **kwargs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), path)
    return path
