"""A model for evaluation, from any of timm's sources or from one of our run folders."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset
from timm.data.model_config import resolve_input_data_config
from timm.models import get_model_traits, load_state_dict
from torch import Tensor, nn

import flash_vision  # noqa: F401  registers the models with timm
from flash_vision.train.sidecar import ModelSidecar, read_sidecar, sidecar_path

WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".tar", ".bin")


@dataclass(kw_only=True)
class ModelSource:
    """Which model, with which weights.

    Args:
        model: timm model name, local-dir:FOLDER or hf-hub:ORG/NAME; may be left out where model.json lies beside the
            checkpoint. Without a checkpoint its published weights are used.
        checkpoint: weights file (.safetensors, or .pth read with weights_only=True).
        use_ema: take the averaged weights where the checkpoint holds both kinds.
        num_classes: width of the classifier; the model's own by default.
        model_kwargs: further arguments of timm.create_model, for example '{"img_size": 64}'.
    """

    model: str = ""
    checkpoint: str = ""
    use_ema: bool = True
    num_classes: int | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with its weights, in evaluation mode, and what was found beside them.

    Args:
        name: the timm name or source it was built from.
        model: the network; images (B, channels, height, width) to logits (B, num_classes).
        num_classes: width of the classifier.
        class_names: a name per class index, or None where nothing says them.
        preprocessing: overrides for `timm.data.resolve_input_data_config`, empty where the model's own cfg counts.
    """

    name: str
    model: nn.Module
    num_classes: int
    class_names: tuple[str, ...] | None
    preprocessing: dict[str, Any]


def load_model(source: ModelSource) -> LoadedModel:
    """Builds the model and loads its weights; nothing in a file is executed.

    Raises:
        ValueError: no such model or file, contradiction with model.json, or weights of another model.
    """
    if not source.model and not source.checkpoint:
        raise ValueError("model: give --model, or --checkpoint with a model.json beside it")
    sidecar = _find_sidecar(source)
    name = source.model or (sidecar.model if sidecar else "")
    kwargs = {**(sidecar.model_kwargs if sidecar else {}), **source.model_kwargs}
    num_classes = source.num_classes or (sidecar.num_classes if sidecar else None)
    model = _create(name, pretrained=not source.checkpoint, num_classes=num_classes, **kwargs)
    if source.checkpoint:
        load_strictly(model, source.checkpoint, use_ema=source.use_ema, what=f"model {name}")
    width = getattr(model, "num_classes", 0)
    if not width:
        raise ValueError(f"model {name}: has no classifier (num_classes={width})")
    return LoadedModel(
        name=name,
        model=model.eval(),
        num_classes=width,
        class_names=sidecar.class_names if sidecar else None if source.checkpoint else _published_names(model),
        preprocessing=sidecar.data_config if sidecar else {},
    )


def at_size(loaded: LoadedModel, img_size: int | None) -> nn.Module:
    """The model itself where any input size will do, else a copy of it set to `img_size` pixels square.

    Raises:
        ValueError: the model cannot take that size.
    """
    traits = get_model_traits(loaded.model)
    if img_size is None or not traits.get("fixed_input_size") or traits.get("img_size") == (img_size, img_size):
        return loaded.model
    if not hasattr(loaded.model, "set_input_size"):
        raise ValueError(f"img_size {img_size}: {loaded.name} takes {traits.get('img_size')} only")
    model = copy.deepcopy(loaded.model)
    try:
        model.set_input_size(img_size=(img_size, img_size))  # pyright: ignore[reportCallIssue]
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ValueError(f"img_size {img_size}: {loaded.name} cannot be set to it ({first_line(error)})") from None
    return model


def preprocessing(
    loaded: LoadedModel, model: nn.Module, given: dict[str, Any], *, use_test_size: bool = True
) -> dict[str, Any]:
    """timm's data config for this model: what is given first, then model.json, then the model's own cfg.

    Args:
        loaded: what was found beside the weights.
        model: the network at its input size, see `at_size`.
        given: `img_size`, `crop_pct`, `crop_mode`, `interpolation`, `mean`, `std`; None where not given.
        use_test_size: the cfg's test size and crop, where it has others for testing.
    Returns:
        `input_size` (channels, height, width) in pixels, `interpolation`, `mean`, `std`, `crop_pct`, `crop_mode`.
    """
    args = dict(loaded.preprocessing)
    if given.get("img_size") is not None:
        args.pop("input_size", None)
    args |= {name: value for name, value in given.items() if value is not None}
    return resolve_input_data_config(model, args, use_test_size=use_test_size)


def resolve_device(name: str) -> torch.device:
    """The device called `name`; cuda where there is one, else cpu, for the empty name.

    Raises:
        ValueError: unknown device, or one that is not there.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} is not available ({first_line(error)})") from None
    return device


def read_weights(path: str | Path, *, use_ema: bool = True) -> dict[str, Tensor]:
    """The state dict in a weights or training checkpoint file, on the CPU.

    Args:
        path: .safetensors, or a file of torch.save, loaded with weights_only=True.
        use_ema: take the averaged weights where the file holds both kinds.
    Raises:
        ValueError: no such file, not a weights file, truncated, or holding something other than tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"checkpoint {path}: no such file")
    if path.suffix not in WEIGHT_SUFFIXES:
        raise ValueError(f"checkpoint {path}: must end in one of {', '.join(WEIGHT_SUFFIXES)}")
    try:
        state = load_state_dict(str(path), use_ema=use_ema, weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # unpickling what is no pickle raises almost anything
        raise ValueError(f"checkpoint {path}: cannot be read ({first_line(error)})") from None
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"checkpoint {path}: holds no state dict of tensors")
    return state


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type where there is none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _find_sidecar(source: ModelSource) -> ModelSidecar | None:
    if not source.checkpoint:
        return None
    path = sidecar_path(source.checkpoint)
    if not Path(source.checkpoint).is_file():
        raise ValueError(f"checkpoint {source.checkpoint}: no such file")
    if not path.is_file():
        if not source.model:
            raise ValueError(f"model: give --model, there is no {path}")
        return None
    sidecar = read_sidecar(path)
    if source.model and source.model != sidecar.model:
        raise ValueError(f"model: {source.model!r} given, but {path} says {sidecar.model!r}")
    if source.num_classes and source.num_classes != sidecar.num_classes:
        raise ValueError(f"num_classes: {source.num_classes} given, but {path} says {sidecar.num_classes}")
    return sidecar


def _create(name: str, *, pretrained: bool, **kwargs: Any) -> nn.Module:
    """timm.create_model, with its many kinds of error as ValueError; `None` arguments are dropped by timm."""
    try:
        return timm.create_model(name, pretrained=pretrained, **kwargs)
    except (ValueError, TypeError, RuntimeError, AssertionError, OSError) as error:
        if "Unknown model" in str(error):
            raise ValueError(f"model: unknown model {name!r}") from None
        raise ValueError(f"model {name}: cannot be built ({first_line(error)})") from None


def load_strictly(model: nn.Module, checkpoint: str, *, use_ema: bool, what: str) -> None:
    """Loads a state dict whose keys and shapes must equal the model's.

    Args:
        what: the model, for messages.
    Raises:
        ValueError: see `read_weights`; or weights of something else.
    """
    state = read_weights(checkpoint, use_ema=use_ema)
    expected = model.state_dict()
    missing = sorted(expected.keys() - state.keys())
    unexpected = sorted(state.keys() - expected.keys())
    reshaped = sorted(key for key in expected.keys() & state.keys() if expected[key].shape != state[key].shape)
    problems = [
        f"{len(keys)} {what} (first: {keys[0]})"
        for what, keys in (("missing", missing), ("unexpected", unexpected))
        if keys
    ]
    if reshaped:
        key = reshaped[0]
        shapes = f"{key} is {tuple(state[key].shape)}, the model has {tuple(expected[key].shape)}"
        problems.append(f"{len(reshaped)} of another shape (first: {shapes})")
    if problems:
        raise ValueError(f"checkpoint {checkpoint}: not of {what}: tensors {'; '.join(problems)}")
    model.load_state_dict(state, strict=True)


def _published_names(model: nn.Module) -> tuple[str, ...] | None:
    """The class names in the pretrained cfg, or ImageNet's, told by the head's width as timm does; else None."""
    names = getattr(model, "pretrained_cfg", {}).get("label_names")
    if names and len(names) == model.num_classes:
        return tuple(names)
    subset = infer_imagenet_subset(model)
    return tuple(ImageNetInfo(subset).label_descriptions()) if subset else None
