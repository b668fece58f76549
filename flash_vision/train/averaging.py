"""The mean of several checkpoints' weights (arXiv 2203.05482, "model soups"; 1803.05407 averages over one run)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from flash_vision.data.files import written_whole
from flash_vision.train.model_source import read_weights
from flash_vision.train.sidecar import read_sidecar, sidecar_path


@dataclass(kw_only=True)
class AverageConfig:
    """Checkpoints to average, or one to store in another type.

    Args:
        checkpoints: weights files or training checkpoints of one model.
        output: .safetensors file to write; model.json is copied beside it where the first checkpoint has one.
        use_ema: take the averaged weights where a checkpoint holds both kinds.
        dtype: type of the floating-point tensors in the file; that of the first checkpoint by default.
    """

    output: str
    checkpoints: list[str] = field(default_factory=list)
    use_ema: bool = True
    dtype: Literal["float32", "bfloat16", "float16"] | None = None

    def __post_init__(self) -> None:
        if not self.checkpoints or (len(self.checkpoints) == 1 and self.dtype is None):
            raise ValueError(f"checkpoints: give two or more, or one and a dtype, got {len(self.checkpoints)}")
        if not self.output.endswith(".safetensors"):
            raise ValueError(f"output must end in .safetensors, got {self.output!r}")
        if Path(self.output).exists():
            raise ValueError(f"output {self.output}: already there")


def average_weights(
    checkpoints: Sequence[str], *, use_ema: bool = True, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The mean of the checkpoints' tensors, summed in fp64, one checkpoint in memory at a time.

    Args:
        checkpoints: weights files with the same keys, shapes and types.
        use_ema: take the averaged weights where a file holds both kinds.
        dtype: type of the floating-point tensors of the result; those of the first file by default.
    Returns:
        A state dict; integer tensors (counters) are taken from the last checkpoint.
    Raises:
        ValueError: a file that cannot be read, or whose keys, shapes or types differ from the first one's.
    """
    first = read_weights(checkpoints[0], use_ema=use_ema)
    sums = {key: value.double() if value.is_floating_point() else value for key, value in first.items()}
    for path in checkpoints[1:]:
        state = read_weights(path, use_ema=use_ema)
        odd = sorted(first.keys() ^ state.keys())
        if odd:
            where = "only in it" if odd[0] in state else "not in it"
            raise ValueError(f"checkpoint {path}: not like {checkpoints[0]}: {len(odd)} keys differ ({odd[0]} {where})")
        for key, value in state.items():
            like = first[key]
            if value.shape != like.shape or value.dtype != like.dtype:
                raise ValueError(
                    f"checkpoint {path}: {key} is {tuple(value.shape)} {value.dtype}, "
                    f"in {checkpoints[0]} {tuple(like.shape)} {like.dtype}"
                )
            sums[key] = sums[key] + value.double() if value.is_floating_point() else value
    mean = {
        key: (value / len(checkpoints)).to(dtype or first[key].dtype) if first[key].is_floating_point() else value
        for key, value in sums.items()
    }
    bad = [key for key, value in mean.items() if not torch.isfinite(value).all()]
    if bad:
        raise ValueError(f"the mean of {bad[0]} is not finite ({len(bad)} tensors)")
    return mean


def average_checkpoints(config: AverageConfig) -> int:
    """Writes the mean of the checkpoints, and model.json beside it; returns the number of tensors."""
    dtype = getattr(torch, config.dtype) if config.dtype else None
    weights = average_weights(config.checkpoints, use_ema=config.use_ema, dtype=dtype)
    source, target = sidecar_path(config.checkpoints[0]), sidecar_path(config.output)
    if source.is_file() and target.is_file() and read_sidecar(source) != read_sidecar(target):
        raise ValueError(f"output {config.output}: {target} describes another model than {source}")
    Path(config.output).parent.mkdir(parents=True, exist_ok=True)
    with written_whole(config.output) as temporary:
        save_file({key: value.contiguous() for key, value in weights.items()}, temporary)
        temporary.chmod(0o644)  # safetensors makes files that only their owner can read
    if source.is_file() and not target.is_file():
        with written_whole(target) as temporary:
            shutil.copyfile(source, temporary)
    return len(weights)
