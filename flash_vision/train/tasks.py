"""Classification and distillation: the model and the timm task that a configuration asks for."""

from __future__ import annotations

from typing import Any

import timm
import torch
from timm.data.config import resolve_data_config
from timm.models import resolve_model_input_args
from timm.task import ClassificationTask, FeatureDistillationTask, LogitDistillationTask, TrainingTask
from torch import nn

from flash_vision.train.config import DistillConfig, TrainConfig
from flash_vision.train.model_source import ModelSource, first_line, load_model, read_weights
from flash_vision.train.recipe import AugmentConfig

# what timm and the models raise for arguments that do not fit
MODEL_ERRORS = (ValueError, TypeError, RuntimeError, AssertionError, OSError, KeyError)


def create_model(config: TrainConfig, num_classes: int) -> tuple[nn.Module, dict[str, Any]]:
    """Builds the network, with weights where the configuration names some.

    Returns:
        The model and the plain keyword arguments, num_classes apart, that build it again with timm.create_model.
    Raises:
        ValueError: unknown model, arguments it does not take, or weights that do not fit it.
    """
    request = {"img_size": config.img_size, "input_size": config.input_size}
    rates = {"drop_rate": config.drop, "drop_path_rate": config.drop_path}
    try:
        arguments = resolve_model_input_args(config.model, request, **config.model_kwargs)
        name, cfg = arguments.pop("model_name"), arguments.pop("pretrained_cfg")
        cfg |= {key: value for key in ("mean", "std") if (value := getattr(config, key)) is not None}
        if config.pretrained_path:
            cfg |= _weights_overlay(config.pretrained_path, cfg, num_classes)
        model = timm.create_model(
            name,
            pretrained=config.pretrained or bool(config.pretrained_path),
            pretrained_cfg=cfg,
            num_classes=num_classes,
            **{key: rate for key, rate in rates.items() if rate is not None},
            **arguments,
        )
    except MODEL_ERRORS as error:
        if "Unknown model" in str(error):
            raise ValueError(f"model: unknown model {config.model!r}") from None
        source = f", weights {config.pretrained_path}" if config.pretrained_path else ""
        raise ValueError(f"model {config.model}{source}: cannot be built ({_short(error)})") from None
    if config.grad_checkpointing:
        try:
            model.set_grad_checkpointing(True)  # pyright: ignore[reportCallIssue]
        except (AttributeError, AssertionError) as error:
            raise ValueError(f"grad_checkpointing: {config.model} has none ({_short(error)})") from None
    return model, arguments


def resolve_preprocessing(config: TrainConfig, model: nn.Module) -> dict[str, Any]:
    """timm's data configuration: input_size, interpolation, mean, std, crop_pct and crop_mode.

    Raises:
        ValueError: mean or std do not have one value per channel.
    """
    fields = ("img_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")
    arguments: dict[str, Any] = {name: getattr(config, name) for name in fields}
    arguments["input_size"] = config.input_size
    arguments["in_chans"] = getattr(model, "in_chans", 3)
    channels = config.input_size[0] if config.input_size else arguments["in_chans"]
    for name in ("mean", "std"):
        values = arguments[name]
        if values is not None and len(values) not in (1, channels):
            raise ValueError(f"{name} must be 1 or {channels} numbers, got {values!r}")
    resolved = resolve_data_config(arguments, model=model)
    resolved["input_size"] = tuple(resolved["input_size"])
    return resolved


def check_input(model: nn.Module, input_size: tuple[int, int, int]) -> None:
    """Runs one image of zeros through the model.

    Args:
        input_size: (channels, height, width).
    Raises:
        ValueError: the model does not take this size.
    """
    was_training = model.training
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, *input_size))
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ValueError(f"input of {input_size} (img_size, input_size): {_short(error)}") from None
    finally:
        model.train(was_training)


def create_task(config: TrainConfig, model: nn.Module, device: torch.device, dtype: torch.dtype) -> TrainingTask:
    """The timm task: classification, or distillation from a teacher.

    Raises:
        ValueError: the teacher cannot be had, or has other classes than the student.
    """
    criterion = criterion_arguments(config)
    if not config.kd_model_name:
        return ClassificationTask(model, criterion_kwargs=criterion, device=device, dtype=dtype, verbose=False)
    teacher = create_teacher(config, model.num_classes).to(device=device, dtype=dtype)  # pyright: ignore
    common: dict[str, Any] = {
        "criterion_kwargs": criterion,
        "distill_loss_weight": config.distill_loss_weight,
        "task_loss_weight": config.task_loss_weight,
        "device": device,
        "dtype": dtype,
        "verbose": False,
    }
    if config.kd_distill_type == "feature":
        return FeatureDistillationTask(model, teacher, **common)
    return LogitDistillationTask(model, teacher, temperature=config.kd_temperature, **common)


def criterion_arguments(config: AugmentConfig) -> dict[str, Any]:
    """Arguments of timm.loss.create_classification_loss; after mixing the smoothing is in the targets already."""
    binary = {"bce_target_thresh": config.bce_target_thresh, "bce_sum": config.bce_sum} if config.bce_loss else {}
    return {
        "loss_type": "bce" if config.bce_loss else "ce",
        "smoothing": config.smoothing,
        "soft_targets": config.mixing,
        **binary,
    }


def create_teacher(config: DistillConfig, num_classes: int) -> nn.Module:
    """The teacher, frozen and in evaluation mode.

    Raises:
        ValueError: unknown model, no weights for it, or (logit distillation) another number of classes.
    """
    kwargs = dict(config.kd_model_kwargs)
    classes = kwargs.pop("num_classes", num_classes if config.kd_model_path else None)
    source = ModelSource(
        model=config.kd_model_name, checkpoint=config.kd_model_path, num_classes=classes, model_kwargs=kwargs
    )
    try:
        loaded = load_model(source)
    except ValueError as error:
        raise ValueError(f"kd_model_name: {error}") from None
    if config.kd_distill_type == "logit" and loaded.num_classes != num_classes:
        raise ValueError(
            f"kd_model_name: {config.kd_model_name} has {loaded.num_classes} classes, the student has {num_classes}"
        )
    return loaded.model.requires_grad_(False)


def _weights_overlay(path: str, cfg: dict[str, Any], num_classes: int) -> dict[str, Any]:
    """pretrained_cfg entries for a local file: its classifier is kept if it has as many classes, else made anew."""
    weights = read_weights(path)
    classifier = cfg.get("classifier") or ""
    head = weights.get(f"{classifier if isinstance(classifier, str) else classifier[0]}.weight")
    fits = head is not None and head.shape[0] == num_classes
    return {"file": path, "num_classes": num_classes if fits else -1}


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or first_line(error)
