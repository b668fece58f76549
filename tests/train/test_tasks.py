"""Distillation, fine-tuning and averaging: what the configuration says reaches timm's pieces."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.task import ClassificationTask, FeatureDistillationTask, LogitDistillationTask
from training import TINY, start, train, write_images

import flash_vision  # noqa: F401
from flash_vision.train.config import TrainConfig
from flash_vision.train.tasks import create_model, create_task, criterion_arguments

CPU = torch.device("cpu")
TEACHER: dict[str, Any] = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 16}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("teacher") / "teacher.safetensors"
    model = timm.create_model("test_vit", num_classes=3, **TEACHER)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path)
    return path


def config(**settings) -> TrainConfig:
    return TrainConfig(data_dir="images", **{**TINY, **settings})


@pytest.mark.parametrize("kind", ["logit", "feature"])
@pytest.mark.parametrize("processes", [1, 2])
def test_distillation_trains_and_is_continued(tmp_path, data, teacher, kind, processes):
    settings = {
        "kd_model_name": "test_vit", "kd_model_path": str(teacher), "kd_model_kwargs": TEACHER, "model_ema": True,
        "kd_distill_type": kind, "kd_temperature": 2.0, "distill_loss_weight": 0.5, "global_batch_size": 8,
    }  # fmt: skip
    whole = train(tmp_path / "whole", data, epochs=3, **settings)
    run = start(tmp_path / "run", data, processes=processes, epochs=3, recovery_interval=1, **settings)
    while not any(step >= 2 for step in run.losses()):
        assert run.processes[0].is_alive(), run.output
    run.signal(15)
    assert run.finish() == 75, run.output
    again = start(tmp_path / "run", data, processes=processes, epochs=3, **settings).finish_well()
    assert again.losses() == pytest.approx(whole.losses(), abs=1e-5)
    timm.create_model(
        "test_vit",
        num_classes=3,
        img_size=16,
        checkpoint_path=again.folder / "model.safetensors",
        **TINY["model_kwargs"],
    )


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, ClassificationTask),
        ({"kd_model_name": "test_vit"}, LogitDistillationTask),
        ({"kd_model_name": "test_vit", "kd_distill_type": "feature"}, FeatureDistillationTask),
    ],
)
def test_the_configuration_chooses_the_task(teacher, settings, kind):
    if settings:
        settings = {**settings, "kd_model_path": str(teacher), "kd_model_kwargs": TEACHER}
    chosen = config(**settings)
    model, _ = create_model(chosen, 3)
    task = create_task(chosen, model, CPU, torch.float32)
    assert type(task) is kind
    if settings:
        assert not any(parameter.requires_grad for parameter in task.teacher.parameters())  # pyright: ignore


def test_losses_are_those_of_timm():
    assert criterion_arguments(config(smoothing=0.2)) == {"loss_type": "ce", "smoothing": 0.2, "soft_targets": False}
    assert criterion_arguments(config(mixup=0.8))["soft_targets"]
    binary = criterion_arguments(config(bce_loss=True, bce_target_thresh=0.2))
    assert binary["loss_type"] == "bce"
    assert binary["bce_target_thresh"] == 0.2


def test_fine_tuning_keeps_a_classifier_that_fits_and_makes_another_anew(teacher):
    kwargs = {key: value for key, value in TEACHER.items() if key != "img_size"}
    weights = load_file(teacher)
    same, _ = create_model(config(pretrained_path=str(teacher), model_kwargs=kwargs), 3)
    assert torch.equal(same.state_dict()["head.weight"], weights["head.weight"])
    larger, _ = create_model(config(pretrained_path=str(teacher), model_kwargs=kwargs, img_size=32), 7)
    state = larger.state_dict()
    assert state["head.weight"].shape == (7, 32)
    assert state["pos_embed"].shape != weights["pos_embed"].shape
    assert torch.equal(state["blocks.0.attn.qkv.weight"], weights["blocks.0.attn.qkv.weight"])
    with pytest.raises(ValueError, match="cannot be built"):
        create_model(config(pretrained_path=str(teacher)), 3)


def test_a_compiled_run_has_the_losses_and_the_weight_names_of_an_eager_one(tmp_path, data):
    eager = train(tmp_path / "eager", data, epochs=1, model_ema=True)
    compiled = train(tmp_path / "compiled", data, epochs=1, model_ema=True, torchcompile="aot_eager")
    assert compiled.losses() == pytest.approx(eager.losses(), abs=1e-5)
    assert (
        load_file(compiled.folder / "model.safetensors").keys() == load_file(eager.folder / "model.safetensors").keys()
    )


@pytest.mark.parametrize(
    "settings", [{"amp": True}, {"amp": True, "amp_dtype": "float16"}, {"grad_checkpointing": True}]
)
def test_precision_and_checkpointing_train(tmp_path, data, settings):
    plain = train(tmp_path / "plain", data, epochs=1)
    run = train(tmp_path / "run", data, epochs=1, **settings)
    assert run.losses() == pytest.approx(plain.losses(), abs=0.05)


def test_flash_gau_pico_trains_through_the_tool(tmp_path, data):
    settings = {"model": "flash_gau_pico", "model_kwargs": {"depth": 2, "embed_dim": 32}, "img_size": 16}
    losses = train(tmp_path / "run", data, epochs=4, lr=5e-3, **settings).losses()
    assert losses[max(losses)] < losses[1]
