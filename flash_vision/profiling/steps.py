"""One inference or training step of a model, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from flash_vision.profiling.build import build_model, check_device, example_input, parse_description, square

MODES = ("infer", "train")
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one step does.

    Args:
        mode: "infer", a forward pass without gradients; "train", forward, loss, backward and an AdamW step.
        precision: "fp32", or "bf16" and "fp16" by autocast; training in fp16 scales its loss.
        compiled: whether the model runs under `torch.compile`.
        img_size: side in pixels, or (height, width).
        batch_size: images per step.
        device: torch device name.
        channels_last: memory format of input and convolution weights.

    Raises:
        ValueError: a value outside the above.
    """

    mode: str = "infer"
    precision: str = "fp32"
    compiled: bool = False
    img_size: int | tuple[int, int] = 224
    batch_size: int = 1
    device: str = "cpu"
    channels_last: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        square(self.img_size)
        check_device(self.device)


def autocast(case: Case) -> AbstractContextManager[object]:
    """The autocast context of a case; none in fp32."""
    dtype = PRECISIONS[case.precision]
    return nullcontext() if dtype is None else torch.autocast(torch.device(case.device).type, dtype)


def build_step(name: str, case: Case) -> Callable[[], None]:
    """A function that runs one step of a timm model, as `build_model` takes it, with random weights and a random batch.

    The model stays on the device as long as the function lives.

    Raises:
        ValueError: unknown model, one that cannot be built for the size, or a frozen one that is to be trained.
    """
    if case.mode == "train" and "reparam" in parse_description(name)[2]:
        raise ValueError(f"{name}: reparam is for inference")
    model = build_model(name, img_size=case.img_size, device=case.device)
    images = example_input(model, case.img_size, batch_size=case.batch_size, device=case.device)
    if case.channels_last:
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return step_of(model, images, case)


def step_of(model: nn.Module, images: torch.Tensor, case: Case) -> Callable[[], None]:
    """A function that runs one step of `model` on `images` (B, channels, H, W), as `case` says."""
    run = torch.compile(model) if case.compiled else model
    if case.mode == "infer":
        return _inference(model.eval(), run, images, case)
    return _training(model.train(), run, images, case)


def _inference(model: nn.Module, run: Callable, images: torch.Tensor, case: Case) -> Callable[[], None]:
    def step() -> None:
        with torch.inference_mode(), autocast(case):
            run(images)

    return step


def _loss(output: torch.Tensor | list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of logits; of a backbone's maps the mean square, which sends gradients into every one."""
    if isinstance(output, torch.Tensor):
        return F.cross_entropy(output, labels)
    return torch.stack([features.float().square().mean() for features in output]).sum()


def _training(model: nn.Module, run: Callable, images: torch.Tensor, case: Case) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    # a small scale: a step that overflows is skipped, and its time would not be that of a step
    scaler = torch.amp.GradScaler(images.device.type, init_scale=256.0, enabled=case.precision == "fp16")
    labels = torch.zeros(images.shape[0], dtype=torch.long, device=images.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(case):
            loss = _loss(run(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step
