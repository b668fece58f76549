"""The configuration of a training run: one flat dataclass per task, with the names of timm's train.py flags.

Every field is an option of the task's tool (tools/train.py for classification) and a key of the YAML files in configs/.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flash_vision.train.recipe import (
    AugmentConfig,
    BackboneConfig,
    DataConfig,
    LoaderConfig,
    ModelConfig,
    OptimConfig,
    require,
)

# Fields that may differ when a run folder is continued: they change where and how fast, not what is computed.
FREE_FIELDS = frozenset(
    {
        "data_dir", "device", "workers", "validation_batch_size", "batch_size", "grad_accum_steps", "global_batch_size",
        "output", "experiment", "log_interval", "recovery_interval", "keep_every", "tensorboard", "log_wandb",
        "wandb_project", "curves", "max_corrupt_fraction", "max_nonfinite_steps", "fsdp", "grad_checkpointing",
        "torchcompile", "check_labels",
    }
)  # fmt: skip


@dataclass(kw_only=True)
class ScheduleConfig:
    """The learning rate over time.

    Args:
        epochs: passes over the training split; cooldown_epochs come on top.
        sched: shape of the schedule.
        sched_on_updates: move the learning rate at every update instead of every epoch.
        warmup_epochs: epochs of linear warm-up.
        warmup_lr: learning rate that the warm-up starts from.
        warmup_prefix: count the warm-up on top of epochs.
        min_lr: learning rate that the schedule ends at.
        decay_epochs: epochs between decays (step), or length of the decay, below 1 a share (wsd, rsqrt).
        decay_milestones: epochs from which on the learning rate is smaller, counted from 1 (multistep).
        decay_rate: factor of a decay (step, multistep), or the power (poly).
        cooldown_epochs: epochs at min_lr after the schedule.
        lr_cycle_mul: growth of a cycle's length (cosine, tanh, poly).
        lr_cycle_decay: factor of the learning rate per cycle.
        lr_cycle_limit: number of cycles.
        lr_k_decay: exponent on time (cosine, poly).
    """

    epochs: int = 300
    sched: Literal["cosine", "wsd", "rsqrt", "poly", "tanh", "step", "multistep", "constant", "none"] = "cosine"
    sched_on_updates: bool = True
    warmup_epochs: int = 5
    warmup_lr: float = 1e-6
    warmup_prefix: bool = False
    min_lr: float = 1e-6
    decay_epochs: float | None = None
    decay_milestones: list[int] = field(default_factory=lambda: [90, 180, 270])
    decay_rate: float = 0.1
    cooldown_epochs: int = 0
    lr_cycle_mul: float = 1.0
    lr_cycle_decay: float = 0.5
    lr_cycle_limit: int = 1
    lr_k_decay: float = 1.0

    def check(self) -> None:
        """Raises ValueError for a schedule that cannot be run."""
        require("epochs", self.epochs >= 1, "at least 1", self.epochs)
        for name in ("warmup_epochs", "cooldown_epochs", "min_lr", "warmup_lr"):
            require(name, getattr(self, name) >= 0, "at least 0", getattr(self, name))
        fits = self.warmup_prefix or self.warmup_epochs <= self.epochs
        require("warmup_epochs", fits, f"at most epochs ({self.epochs})", self.warmup_epochs)


@dataclass(kw_only=True)
class DistillConfig:
    """A teacher, for distillation.

    Args:
        kd_model_name: teacher, any timm model; empty for none.
        kd_model_path: its weights file; its published weights when empty.
        kd_model_kwargs: further arguments of timm.create_model for the teacher, among them num_classes where a file
            has other classes than the student (feature only).
        kd_distill_type: logit (KL divergence of the outputs) or feature (squared error of the pooled features).
        kd_temperature: of the softmax (logit only).
        task_loss_weight: weight of the loss on the labels; 1 when not given.
        distill_loss_weight: weight of the teacher's loss; 1 - task_loss_weight when not given, 1 without either.
    """

    kd_model_name: str = ""
    kd_model_path: str = ""
    kd_model_kwargs: dict[str, Any] = field(default_factory=dict)
    kd_distill_type: Literal["logit", "feature"] = "logit"
    kd_temperature: float = 1.0
    task_loss_weight: float | None = None
    distill_loss_weight: float | None = None

    def check(self) -> None:
        """Raises ValueError for weights without a teacher or out of range."""
        for name in ("kd_model_path", "kd_model_kwargs", "task_loss_weight", "distill_loss_weight"):
            alone = getattr(self, name) and not self.kd_model_name
            require(name, not alone, "left out without kd_model_name", getattr(self, name))
        require("kd_temperature", self.kd_temperature > 0, "above 0", self.kd_temperature)


@dataclass(kw_only=True)
class RunConfig:
    """Where the run lives and what it reports.

    Args:
        output: folder of run folders.
        experiment: name of this run's folder; the model's name when empty.
        device: auto (cuda where there is one), cpu, cuda or cuda:1.
        log_interval: updates between two lines of metrics.jsonl.
        recovery_interval: updates between two saves within an epoch; 0 to save at the end of an epoch only.
        keep_every: epochs between checkpoints that are kept for good; 0 for none.
        val_interval: epochs between two evaluations; the last epoch is always evaluated.
        curves: draw curves.png at every evaluation.
        tensorboard: write TensorBoard events where it is installed.
        log_wandb: report to Weights & Biases (pip install wandb).
        wandb_project: its project; flash_vision when empty.
    """

    output: str = "runs"
    experiment: str = ""
    device: str = "auto"
    log_interval: int = 50
    recovery_interval: int = 1000
    keep_every: int = 0
    val_interval: int = 1
    curves: bool = True
    tensorboard: bool = True
    log_wandb: bool = False
    wandb_project: str = ""

    def check(self) -> None:
        """Raises ValueError for intervals that are no intervals and names that are no folder."""
        for name in ("log_interval", "val_interval"):
            require(name, getattr(self, name) >= 1, "at least 1", getattr(self, name))
        for name in ("recovery_interval", "keep_every"):
            require(name, getattr(self, name) >= 0, "at least 0", getattr(self, name))
        require("output", self.output != "", "a folder", self.output)


@dataclass(kw_only=True)
class TaskConfig(BackboneConfig, LoaderConfig, OptimConfig, ScheduleConfig, RunConfig):
    """What a run has whatever its task: what the loop, its loaders, the optimiser and the reports read.

    The configuration of a task is this and its own fields. Each part checks itself; all of them are checked here.

    Raises:
        ValueError: a field out of range, or fields that contradict each other; the message names them.
    """

    def __post_init__(self) -> None:
        for part in reversed(type(self).__mro__):
            if "check" in vars(part):
                part.check(self)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def folder(self) -> Path:
        """The run's folder, the same each time the same command is run."""
        return Path(self.output) / (self.experiment or re.sub(r"[^\w.+-]", "_", self.model))

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain data."""
        return plain(dataclasses.asdict(self))


@dataclass(kw_only=True)
class TrainConfig(ModelConfig, DataConfig, AugmentConfig, DistillConfig, TaskConfig):
    """A whole classification run; see the parts for the other fields.

    Args:
        eval_metric: what "best" means: top1, top5 or loss.
    Raises:
        ValueError: a field out of range, or fields that contradict each other; the message names them.
    """

    eval_metric: Literal["top1", "top5", "loss"] = "top1"

    def check(self) -> None:
        """Raises ValueError for parts that do not go together."""
        feature = bool(self.kd_model_name) and self.kd_distill_type == "feature"
        require("kd_distill_type", not (self.fsdp and feature), "logit with fsdp", "feature")
        even = self.mixup_mode == "batch" or self.batch_size % 2 == 0 or self.global_batch_size is not None
        require("batch_size", not self.mixing or even, f"even with mixup_mode {self.mixup_mode}", self.batch_size)


def resolve_batch_size(config: LoaderConfig, world_size: int) -> int:
    """Images per process and forward pass, from global_batch_size where it is given.

    Raises:
        ValueError: global_batch_size is no multiple of processes * grad_accum_steps.
    """
    if config.global_batch_size is None:
        return config.batch_size
    parts = world_size * config.grad_accum_steps
    if config.global_batch_size % parts:
        raise ValueError(
            f"global_batch_size must be a multiple of {world_size} processes * grad_accum_steps "
            f"{config.grad_accum_steps} = {parts}, got {config.global_batch_size}"
        )
    return config.global_batch_size // parts


def resolve_lr(config: OptimConfig, images_per_update: int) -> float:
    """The learning rate at the end of the warm-up: lr, or lr_base scaled by the batch as timm's train.py does."""
    if config.lr is not None:
        return config.lr
    ratio = images_per_update / config.lr_base_size
    adaptive = any(word in config.opt.lower() for word in ("ada", "lamb"))
    scale = config.lr_base_scale or ("sqrt" if adaptive else "linear")
    return config.lr_base * (ratio**0.5 if scale == "sqrt" else ratio)


def differing_fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What keeps a run from being continued: "name: old -> new" for each field that may not differ and does."""
    names = sorted((old.keys() | new.keys()) - FREE_FIELDS)
    return [f"{name}: {old.get(name)!r} -> {new.get(name)!r}" for name in names if old.get(name) != new.get(name)]


def option_names(argv: Iterable[str]) -> list[str]:
    """The command line with timm's --batch-size written as --batch_size."""
    return [re.sub(r"^--[^=]+", lambda match: "--" + match[0][2:].replace("-", "_"), word) for word in argv]


def plain(value: Any) -> Any:
    """`value` with tuples as lists, as it comes back from YAML or JSON."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
