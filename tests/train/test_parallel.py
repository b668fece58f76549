"""Several processes give what one gives."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.data import create_transform, resolve_data_config
from tool_process import TOOLS
from torch.nn.functional import cross_entropy
from training import Run, start, train, write_images

from flash_vision.train.checkpoint import read_checkpoint

# 48 training images: 4 updates of 12; 21 validation images: uneven shares for 2 and 4 processes
SETTINGS: dict[str, Any] = {"global_batch_size": 12, "model_dtype": "float64", "validation_batch_size": 3, "epochs": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory, data) -> Run:
    return train(tmp_path_factory.mktemp("alone") / "run", data, **SETTINGS)


def assert_close(run: Run, other: Run, tolerance: float = 1e-5) -> None:
    """Losses, metrics and final weights within `tolerance`."""
    losses, expected = run.losses(), other.losses()
    assert losses.keys() == expected.keys()
    assert max(abs(losses[step] - expected[step]) for step in expected) < tolerance
    for found, wanted in zip(run.evaluations(), other.evaluations(), strict=True):
        assert found == pytest.approx(wanted, abs=tolerance)
    weights, wanted = (load_file(r.folder / "model.safetensors") for r in (run, other))
    assert max(float((weights[name] - wanted[name]).abs().max()) for name in wanted) < tolerance


@pytest.mark.parametrize(
    ("processes", "settings"),
    [
        (2, {}),
        (4, {}),
        (2, {"grad_accum_steps": 3}),
        (1, {"grad_accum_steps": 4}),
        (2, {"model_dtype": "float32"}),
        (2, {"fsdp": True, "grad_accum_steps": 2}),
    ],
)
def test_processes_and_accumulation_give_what_one_process_gives(tmp_path, data, alone, processes, settings):
    run = start(tmp_path / "run", data, processes=processes, **{**SETTINGS, **settings}).finish_well()
    assert_close(run, alone)


def test_each_validation_image_counts_once_whatever_the_shares(tmp_path, data, alone):
    folder, shares = alone.folder, start(tmp_path / "run", data, processes=4, **SETTINGS).finish_well()
    sidecar = json.loads((folder / "model.json").read_text())
    model = timm.create_model(sidecar["model"], num_classes=3, **sidecar["model_kwargs"]).eval().double()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    transform = create_transform(**resolve_data_config({}, pretrained_cfg=sidecar))
    images = sorted((data / "validation").rglob("*.jpg"))
    truths = torch.tensor([int(file.parent.name.removeprefix("class")) for file in images])
    inputs = torch.stack([transform(Image.open(file).convert("RGB")) for file in images]).double()
    with torch.no_grad():
        logits = model(inputs)
    for run in (alone, shares):
        found = run.evaluations()[-1]
        assert found["top1"] == pytest.approx(100 * (logits.argmax(1) == truths).double().mean().item(), abs=1e-9)
        assert found["loss"] == pytest.approx(cross_entropy(logits, truths).item(), abs=1e-6)


@pytest.mark.parametrize("settings", [{}, {"fsdp": True}])
def test_a_run_continues_on_another_number_of_processes(tmp_path, data, settings):
    averaged = {**SETTINGS, "model_ema": True, "model_ema_decay": 0.9, "epochs": 6}
    whole = train(tmp_path / "whole", data, **averaged)
    run = start(tmp_path / "run", data, processes=2, recovery_interval=1, **averaged, **settings)
    while not any(step >= 5 for step in run.losses()):
        assert run.processes[0].is_alive(), run.output
    run.signal(signal.SIGTERM)
    assert run.finish() == 75, run.output
    step = read_checkpoint(run.folder / "checkpoints" / "last.pt")["progress"]["step"]
    assert 5 <= step < 24
    assert_close(start(tmp_path / "run", data, **averaged).finish_well(), whole)


def test_one_process_told_to_stop_ends_all_of_them(tmp_path, data):
    run = start(tmp_path / "run", data, processes=2, **{**SETTINGS, "epochs": 100})
    while not run.losses():
        assert run.processes[0].is_alive(), run.output
    os.kill(run.processes[1].pid, signal.SIGTERM)
    assert run.finish() == 75, run.output
    assert run.processes[1].exitcode == 75


def test_torchrun_starts_two_processes_that_give_the_losses_of_one(tmp_path, data, alone):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    config = next(alone.folder.parent.glob("run.0.yaml"))
    command += [str(TOOLS / "train.py"), "--config", str(config), "--output", str(tmp_path), "--experiment", "run"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert_close(Run(tmp_path / "run", tmp_path / "log", []), alone)


@pytest.mark.parametrize(
    ("processes", "settings", "line"),
    [
        (2, {"global_batch_size": 13}, "global_batch_size must be a multiple of 2 processes"),
        (1, {"fsdp": True}, "fsdp must be false with one process"),
    ],
)
def test_what_the_number_of_processes_does_not_allow_is_refused(tmp_path, data, processes, settings, line):
    run = start(tmp_path / "run", data, processes=processes, **{**SETTINGS, **settings})
    assert run.finish() == 2
    assert line in run.output
    assert "Traceback" not in run.output
    assert not run.folder.exists()


def test_float64_weights_are_written_as_they_are(alone):
    assert all(value.dtype == torch.float64 for value in load_file(alone.folder / "model.safetensors").values())
