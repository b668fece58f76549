"""What decides a run's result: model, data, augmentation and optimiser, in the words of timm's train.py flags.

The parts of `flash_vision.train.config.TrainConfig` and of the configurations of other tasks, one class each, so that a
function can ask for no more than it reads. A field's text in the Args section is its help on the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(kw_only=True)
class BackboneConfig:
    """The network, as far as every task has one.

    Args:
        model: timm model name; the flash_* models are registered.
        model_kwargs: further arguments of timm.create_model, for example '{"init_values": 1e-4}'.
        pretrained: start from the model's published weights.
        pretrained_path: start from this weights file (.safetensors, .pth); position tables are adapted where sizes
            differ, and so is the classifier, if the task has one.
        drop_path: stochastic depth rate of the last block, in [0, 1); the model's own when not given.
        grad_checkpointing: recompute activations in the backward pass, for less memory.
        channels_last: memory format of a convolutional model.
        model_dtype: type of weights and inputs; float64 is for tests. For mixed precision see amp.
        torchcompile: backend of torch.compile, for example inductor; empty for none.
    """

    model: str = "flash_gau_small"
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    pretrained: bool = False
    pretrained_path: str = ""
    drop_path: float | None = None
    grad_checkpointing: bool = False
    channels_last: bool = False
    model_dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    torchcompile: str = ""

    def check(self) -> None:
        """Raises ValueError for values that no model accepts."""
        require("model", self.model != "", "a timm model name", self.model)
        require_rate("drop_path", self.drop_path)
        require("pretrained", not (self.pretrained and self.pretrained_path), "false with pretrained_path", True)


@dataclass(kw_only=True)
class ModelConfig(BackboneConfig):
    """The network, as a classifier.

    Args:
        num_classes: width of the classifier; the number of class folders when not given.
        img_size: side of the square input in pixels; the model's own when not given.
        input_size: (channels, height, width) of the input, instead of img_size.
        drop: dropout rate, in [0, 1); the model's own when not given.
    """

    num_classes: int | None = None
    img_size: int | None = None
    input_size: tuple[int, int, int] | None = None
    drop: float | None = None

    def check(self) -> None:
        """Raises ValueError for values that no classifier accepts."""
        require("num_classes", self.num_classes is None or self.num_classes >= 1, "at least 1", self.num_classes)
        require("img_size", self.img_size is None or self.img_size >= 1, "at least 1", self.img_size)
        require("input_size", not (self.input_size and self.img_size), "left out with img_size", self.input_size)
        require_rate("drop", self.drop)


@dataclass(kw_only=True)
class LoaderConfig:
    """The images and their order, whatever is learnt from them.

    Args:
        data_dir: root of the data set, laid out as the task's documentation says.
        batch_size: images per process and forward pass.
        global_batch_size: images per update over all processes; sets batch_size, so that the run does not change
            with the number of processes.
        validation_batch_size: images per process in evaluation; batch_size when not given.
        grad_accum_steps: forward passes per update.
        aug_repeats: how often an image recurs within one update's neighbourhood (repeated augmentation); an epoch
            keeps its length. 0 or 1 for never.
        drop_last: leave the incomplete last update of an epoch out; otherwise it is filled up from the epoch's start.
        workers: loader processes per process; 0 loads in the training process.
        mean: per channel mean for normalisation; the model's own when not given.
        std: per channel standard deviation; the model's own when not given.
        max_corrupt_fraction: unreadable images, of both splits, that are borne before the run stops, as a share of the
            training images, in [0, 1].
        seed: of weights, order and augmentation.
    """

    data_dir: str = ""
    batch_size: int = 128
    global_batch_size: int | None = None
    validation_batch_size: int | None = None
    grad_accum_steps: int = 1
    aug_repeats: int = 0
    drop_last: bool = True
    workers: int = 4
    mean: list[float] | None = None
    std: list[float] | None = None
    max_corrupt_fraction: float = 0.01
    seed: int = 42

    def check(self) -> None:
        """Raises ValueError for values that no loader accepts."""
        for name in ("batch_size", "grad_accum_steps"):
            require(name, getattr(self, name) >= 1, "at least 1", getattr(self, name))
        for name in ("global_batch_size", "validation_batch_size"):
            value = getattr(self, name)
            require(name, value is None or value >= 1, "at least 1", value)
        for name in ("aug_repeats", "workers", "seed"):
            require(name, getattr(self, name) >= 0, "at least 0", getattr(self, name))
        in_range = 0 <= self.max_corrupt_fraction <= 1
        require("max_corrupt_fraction", in_range, "in [0, 1]", self.max_corrupt_fraction)
        require("std", not self.std or min(self.std) > 0, "above 0", self.std)


@dataclass(kw_only=True)
class DataConfig(LoaderConfig):
    """A classification data set and its preprocessing; data_dir holds train/CLASS/IMAGE, tar files or shards.

    Args:
        dataset: timm's data set name: empty for a folder or tar, or wds/, hfds/NAME, torch/NAME.
        train_split: split (folder name, or shard pattern with |COUNT) that is trained on.
        val_split: split that is evaluated.
        class_map: file that maps class names to indices, as timm reads it.
        train_num_samples: images in the training split, where the source cannot tell (wds/).
        val_num_samples: images in the validation split, where the source cannot tell (wds/).
        input_img_mode: PIL mode that images are converted to.
        interpolation: resize filter in evaluation; the model's own when empty.
        crop_pct: share of the resized side that the centre crop keeps in evaluation; the model's own when not given.
        crop_mode: centre, squash or border crop in evaluation; the model's own when empty.
    """

    dataset: str = ""
    train_split: str = "train"
    val_split: str = "validation"
    class_map: str = ""
    train_num_samples: int | None = None
    val_num_samples: int | None = None
    input_img_mode: str = "RGB"
    interpolation: str = ""
    crop_pct: float | None = None
    crop_mode: Literal["", "center", "squash", "border"] = ""

    def check(self) -> None:
        """Raises ValueError for values that no data set accepts."""
        require("data_dir", self.data_dir != "" or self.dataset.startswith("hfds/"), "given", self.data_dir)
        for name in ("train_num_samples", "val_num_samples"):
            value = getattr(self, name)
            require(name, value is None or value >= 1, "at least 1", value)
        require("crop_pct", self.crop_pct is None or self.crop_pct > 0, "above 0", self.crop_pct)


@dataclass(kw_only=True)
class AugmentConfig:
    """Augmentation and the loss that goes with it.

    Args:
        no_aug: resize and centre crop only, no augmentation.
        train_crop_mode: rrc (random resized crop), rkrc or rkrr (keep the aspect ratio nearly).
        scale: range of the crop's area, as a share of the image.
        ratio: range of the crop's aspect ratio.
        hflip: probability of a horizontal flip.
        vflip: probability of a vertical flip.
        color_jitter: strength of colour jitter; off while aa is set, as in timm.
        color_jitter_prob: probability of colour jitter; always when not given.
        grayscale_prob: probability of greyscale.
        gaussian_blur_prob: probability of blur.
        aa: AutoAugment or RandAugment policy, for example rand-m9-mstd0.5-inc1; empty for none.
        train_interpolation: resize filter in training: random, bilinear, bicubic; the model's own when empty.
        reprob: probability of random erasing.
        remode: what the erased rectangle holds.
        recount: most rectangles per image.
        mixup: alpha of Mixup; 0 for none.
        cutmix: alpha of CutMix; 0 for none.
        cutmix_minmax: range of CutMix's box side, instead of cutmix.
        mixup_prob: probability of Mixup or CutMix per batch, pair or element.
        mixup_switch_prob: probability of CutMix where both are on.
        mixup_mode: draw the mixing once per batch, pair or element.
        mixup_off_epoch: epoch from which nothing is mixed; 0 for never.
        smoothing: label smoothing, in [0, 1).
        bce_loss: binary instead of softmax cross entropy.
        bce_target_thresh: binarise soft targets above this value (bce_loss only).
        bce_sum: sum over classes instead of mean (bce_loss only).
    """

    no_aug: bool = False
    train_crop_mode: Literal["rrc", "rkrc", "rkrr"] = "rrc"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    hflip: float = 0.5
    vflip: float = 0.0
    color_jitter: float = 0.4
    color_jitter_prob: float | None = None
    grayscale_prob: float = 0.0
    gaussian_blur_prob: float = 0.0
    aa: str = ""
    train_interpolation: str = "random"
    reprob: float = 0.0
    remode: Literal["const", "rand", "pixel"] = "pixel"
    recount: int = 1
    mixup: float = 0.0
    cutmix: float = 0.0
    cutmix_minmax: tuple[float, float] | None = None
    mixup_prob: float = 1.0
    mixup_switch_prob: float = 0.5
    mixup_mode: Literal["batch", "pair", "elem"] = "batch"
    mixup_off_epoch: int = 0
    smoothing: float = 0.1
    bce_loss: bool = False
    bce_target_thresh: float | None = None
    bce_sum: bool = False

    @property
    def mixing(self) -> bool:
        """Whether Mixup or CutMix is on, so that targets are distributions over classes."""
        return self.mixup > 0 or self.cutmix > 0 or self.cutmix_minmax is not None

    def check(self) -> None:
        """Raises ValueError for probabilities and ranges out of bounds."""
        for name in ("hflip", "vflip", "grayscale_prob", "gaussian_blur_prob", "reprob", "mixup_prob"):
            require(name, 0 <= getattr(self, name) <= 1, "in [0, 1]", getattr(self, name))
        require("mixup_switch_prob", 0 <= self.mixup_switch_prob <= 1, "in [0, 1]", self.mixup_switch_prob)
        require("smoothing", 0 <= self.smoothing < 1, "in [0, 1)", self.smoothing)
        for name in ("mixup", "cutmix", "mixup_off_epoch", "color_jitter"):
            require(name, getattr(self, name) >= 0, "at least 0", getattr(self, name))
        for name in ("scale", "ratio"):
            low, high = getattr(self, name)
            require(name, 0 < low <= high, "(low, high) with 0 < low <= high", (low, high))
        require("scale", self.scale[1] <= 1, "a share of at most 1", self.scale)
        require("recount", self.recount >= 1, "at least 1", self.recount)
        for name in ("bce_target_thresh", "bce_sum"):
            require(name, self.bce_loss or not getattr(self, name), "left out without bce_loss", getattr(self, name))


@dataclass(kw_only=True)
class OptimConfig:
    """Optimiser, precision, averaging and sharding.

    Args:
        opt: optimiser, any of timm.optim.list_optimizers(); Muon orthogonalises in float32 on a CPU.
        opt_eps: its epsilon; its own default when not given.
        opt_betas: its betas; its own default when not given.
        opt_kwargs: its further arguments.
        momentum: of the optimisers that have one.
        weight_decay: on weights; biases, norms and the model's no_weight_decay() are left out.
        layer_decay: factor of the learning rate per layer below the last; none when not given.
        layer_decay_min_scale: least factor that layer_decay gives.
        lr: learning rate; lr_base scaled by the batch size when not given.
        lr_base: learning rate at lr_base_size images per update.
        lr_base_size: images per update that lr_base is meant for.
        lr_base_scale: how lr_base grows with the batch; sqrt for adaptive optimisers, else linear, when empty.
        clip_grad: threshold of gradient clipping; none when not given.
        clip_mode: what clip_grad bounds: norm, value, or agc (adaptive).
        amp: autocast to amp_dtype; float16 scales the loss.
        amp_dtype: bfloat16 or float16.
        model_ema: keep an exponential moving average of the weights; it is evaluated too and its metrics count.
        model_ema_decay: of that average, in (0, 1).
        model_ema_warmup: let the decay grow from 0.
        fsdp: shard weights, gradients and optimiser state over the processes (FSDP2) instead of DDP.
        max_nonfinite_steps: updates in a row that are skipped for a non-finite loss or gradient before the run stops.
    """

    opt: str = "adamw"
    opt_eps: float | None = None
    opt_betas: list[float] | None = None
    opt_kwargs: dict[str, Any] = field(default_factory=dict)
    momentum: float = 0.9
    weight_decay: float = 0.05
    layer_decay: float | None = None
    layer_decay_min_scale: float = 0.0
    lr: float | None = None
    lr_base: float = 0.001
    lr_base_size: int = 1024
    lr_base_scale: Literal["", "linear", "sqrt"] = ""
    clip_grad: float | None = None
    clip_mode: Literal["norm", "value", "agc"] = "norm"
    amp: bool = False
    amp_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    model_ema: bool = False
    model_ema_decay: float = 0.9998
    model_ema_warmup: bool = False
    fsdp: bool = False
    max_nonfinite_steps: int = 3

    def check(self) -> None:
        """Raises ValueError for values that no optimiser accepts."""
        require("lr", self.lr is None or self.lr > 0, "above 0", self.lr)
        for name in ("lr_base", "lr_base_size"):
            require(name, getattr(self, name) > 0, "above 0", getattr(self, name))
        require("clip_grad", self.clip_grad is None or self.clip_grad > 0, "above 0", self.clip_grad)
        decay = self.layer_decay
        require("layer_decay", decay is None or 0 < decay <= 1, "in (0, 1]", decay)
        require("model_ema_decay", 0 < self.model_ema_decay < 1, "in (0, 1)", self.model_ema_decay)
        require("max_nonfinite_steps", self.max_nonfinite_steps >= 0, "at least 0", self.max_nonfinite_steps)
        half = self.amp and self.amp_dtype == "float16"
        require("amp_dtype", not (self.fsdp and half), "bfloat16 with fsdp", self.amp_dtype)
        require("clip_mode", not (self.fsdp and self.clip_grad and self.clip_mode == "agc"), "norm with fsdp", "agc")


def require_rate(name: str, rate: float | None) -> None:
    """Raises ValueError unless `rate` is a probability below 1, or not given."""
    require(name, rate is None or 0 <= rate < 1, "in [0, 1)", rate)


def require(name: str, holds: bool, constraint: str, got: object) -> None:
    """Raises ValueError with argument, constraint and value unless `holds`."""
    if not holds:
        raise ValueError(f"{name} must be {constraint}, got {got!r}")
