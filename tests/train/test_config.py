"""The configuration: names, help, YAML, checks."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tool_process import TOOLS

from flash_vision.train.config import TrainConfig, differing_fields, option_names, resolve_batch_size, resolve_lr
from flash_vision.train.sampling import UpdateSampler

CONFIGS = TOOLS.parent / "configs"
# of the other tasks' configurations, their tests tell
CLASSIFICATION = [CONFIGS / name for name in ("cifar100", "eurosat", "imagenet", "quickstart")]
SHIPPED = sorted(path for folder in CLASSIFICATION for path in folder.glob("*.yaml"))


def config(**settings) -> TrainConfig:
    return TrainConfig(data_dir="images", **settings)


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "train.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_help_documents_every_field():
    text = " ".join(tool("--help").stdout.split())
    for field in dataclasses.fields(TrainConfig):
        option = f"--{field.name} "
        assert option in text, field.name
        described = text.rpartition(option)[2]
        assert described.partition("(type:")[0].count(" ") >= 3, f"{field.name} has no help"


def test_print_config_shows_the_resolved_run(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: vit_tiny_patch16_224\nlr: 1e-3\nmodel_kwargs: {init_values: 1e-4}\n")
    done = tool("--config", str(file), "--lr", "2e-3", "--model_kwargs.img_size", "64", "--print_config")
    resolved = yaml.safe_load(done.stdout)
    assert resolved["lr"] == 2e-3
    assert resolved["model_kwargs"] == {"init_values": 1e-4, "img_size": 64}
    assert resolved["epochs"] == 300
    assert set(resolved) == {field.name for field in dataclasses.fields(TrainConfig)}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_a_shipped_config_is_valid_and_says_how_it_is_run(path: Path):
    text = path.read_text()
    TrainConfig(**{"data_dir": "images", **yaml.safe_load(text)})
    header = text.partition("\nmodel:")[0].lower()
    for word in ("python tools/", "hardware", "hours" if "imagenet" in path.parts else "time", "accuracy"):
        assert word in header or (word == "python tools/" and "torchrun" in header), word


def test_every_registered_model_has_an_imagenet_config():
    import timm

    models = {yaml.safe_load(path.read_text())["model"] for path in (CONFIGS / "imagenet").glob("*.yaml")}
    registered = set(timm.list_models("flash_*")) - {"flash_gau_pico"}
    assert registered <= models


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": ""}, "model must be a timm model name, got ''"),
        ({"lr": -1.0}, "lr must be above 0, got -1.0"),
        ({"smoothing": 1.0}, r"smoothing must be in \[0, 1\), got 1.0"),
        ({"warmup_epochs": 7, "epochs": 5}, r"warmup_epochs must be at most epochs \(5\), got 7"),
        ({"scale": (1.0, 0.5)}, "scale must be"),
        ({"task_loss_weight": 0.5}, "task_loss_weight must be left out without kd_model_name"),
        ({"bce_target_thresh": 0.2}, "bce_target_thresh must be left out without bce_loss"),
        ({"fsdp": True, "amp": True, "amp_dtype": "float16"}, "amp_dtype must be bfloat16 with fsdp"),
        ({"fsdp": True, "kd_model_name": "x", "kd_distill_type": "feature"}, "kd_distill_type must be logit"),
        ({"img_size": 32, "input_size": (3, 32, 32)}, "input_size must be left out with img_size"),
        ({"max_corrupt_fraction": 2.0}, "max_corrupt_fraction must be"),
    ],
)
def test_a_value_out_of_range_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


def test_timms_dashes_are_taken():
    assert option_names(["--batch-size", "8", "--drop-path=0.1", "a-b.yaml"]) == [
        "--batch_size", "8", "--drop_path=0.1", "a-b.yaml",
    ]  # fmt: skip


def test_the_learning_rate_grows_with_the_batch_as_in_timm():
    assert resolve_lr(config(lr=0.3), 4096) == 0.3
    assert resolve_lr(config(lr_base=0.1, lr_base_size=256, opt="sgd"), 512) == pytest.approx(0.2)
    assert resolve_lr(config(lr_base=0.1, lr_base_size=256, opt="adamw"), 1024) == pytest.approx(0.2)
    assert resolve_lr(config(lr_base=0.1, lr_base_size=256, lr_base_scale="linear"), 1024) == pytest.approx(0.4)


def test_the_global_batch_is_shared_out():
    assert resolve_batch_size(config(global_batch_size=96, grad_accum_steps=3), 4) == 8
    assert resolve_batch_size(config(batch_size=7), 4) == 7
    with pytest.raises(ValueError, match="multiple of 5 processes"):
        resolve_batch_size(config(global_batch_size=96), 5)


def test_only_fields_that_change_the_result_keep_a_run_from_continuing():
    old = config().as_dict()
    assert not differing_fields(old, config(workers=0, log_interval=1).as_dict())
    assert differing_fields(old, config(weight_decay=0.1).as_dict()) == ["weight_decay: 0.05 -> 0.1"]


@pytest.mark.parametrize("repeats", [1, 3])
def test_an_update_holds_the_same_images_however_many_processes_share_it(repeats):
    def updates(world_size: int, accumulation: int, start: int = 0) -> list[list[tuple[int, int, int]]]:
        shares = []
        for rank in range(world_size):
            sampler = UpdateSampler(
                101, seed=3, batch_size=24 // world_size // accumulation, grad_accum_steps=accumulation, rank=rank,
                world_size=world_size, repeats=repeats,
            )  # fmt: skip
            sampler.start_at(2, start)
            shares.append(list(sampler))
        return [
            sorted(key for share in shares for part in share[first : first + accumulation] for key in part)
            for first in range(0, len(shares[0]), accumulation)
        ]

    one = updates(1, 1)
    assert len(one) == 4
    assert updates(2, 1) == updates(4, 3) == updates(3, 4) == one
    assert updates(2, 2, start=48) == one[2:]
    seen = [key for update in one for key in update]
    assert len(set(seen)) == len(seen)
    assert max(sum(index == other for other, *_ in seen) for index, *_ in seen) == repeats


def test_the_last_update_is_filled_up_from_the_start_without_drop_last():
    sampler = UpdateSampler(10, seed=0, batch_size=4, drop_last=False)
    batches = list(sampler)
    assert [len(batch) for batch in batches] == [4, 4, 4]
    assert batches[2][2:] == batches[0][:2]
