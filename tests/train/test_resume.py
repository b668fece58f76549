"""A run that is ended at any moment and started again gives what it would have given."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training import Run, start, train, write_images

from flash_vision.train.checkpoint import RunFolder, read_checkpoint

EXIT_INTERRUPTED = 75


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"))


def assert_same(run: Run, other: Run) -> None:
    """Losses, metrics and final weights to the bit."""
    assert run.losses() == other.losses()
    assert run.evaluations() == other.evaluations()
    weights, expected = (load_file(r.folder / "model.safetensors") for r in (run, other))
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


EVERYTHING = {
    "model_ema": True,
    "mixup": 0.2,
    "cutmix": 1.0,
    "reprob": 0.3,
    "aa": "rand-m5-mstd0.5",
    "drop_path": 0.1,
    "aug_repeats": 2,
    "grad_accum_steps": 2,
    "batch_size": 4,
    "clip_grad": 1.0,
    "layer_decay": 0.9,
}


def wait_for_step(run: Run, step: int, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not any(number >= step for number in run.losses()):
        assert time.monotonic() < deadline, run.output
        assert run.processes[0].is_alive(), run.output
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGTERM, 0), (signal.SIGINT, 2)])
def test_a_signal_saves_in_mid_epoch_and_the_continued_run_equals_the_uninterrupted_one(
    tmp_path, data, number, workers
):
    settings = {**EVERYTHING, "epochs": 8, "workers": workers}
    whole = train(tmp_path / "whole", data, **{**settings, "workers": 0})
    run = start(tmp_path / "run", data, **settings)
    wait_for_step(run, 15)
    run.signal(number)
    assert run.finish() == EXIT_INTERRUPTED, run.output
    assert "state saved; the same command continues" in run.output
    progress = read_checkpoint(run.folder / "checkpoints" / "last.pt")["progress"]
    assert 15 <= progress["step"] < 48
    assert_same(start(tmp_path / "run", data, **settings).finish_well(), whole)


def test_a_signal_during_evaluation_ends_it_and_the_continued_run_evaluates_again(tmp_path):
    data = write_images(tmp_path / "images", validation=300)
    settings = {"epochs": 2, "validation_batch_size": 1}
    whole = train(tmp_path / "whole", data, **settings)
    run = start(tmp_path / "run", data, **settings)
    wait_for_step(run, 6)
    time.sleep(0.1)
    assert not run.evaluations()
    run.signal(signal.SIGTERM)
    assert run.finish() == EXIT_INTERRUPTED, run.output
    assert not run.evaluations()
    assert_same(start(tmp_path / "run", data, **settings).finish_well(), whole)


def test_twenty_kills_at_random_moments_change_nothing(tmp_path, data):
    settings = {**EVERYTHING, "epochs": 40, "recovery_interval": 2, "keep_every": 5}
    whole = train(tmp_path / "whole", data, **settings)
    moments = random.Random(3)
    run = start(tmp_path / "run", data, **settings)
    for kill in range(20):
        # sooner where updates are fast, so that none of the 20 comes after the 240 updates, however fast
        moment = time.monotonic() + moments.uniform(0.0, 1.1)
        while time.monotonic() < moment and max(run.losses(), default=0) < 10 * (kill + 1):
            time.sleep(0.005)
        run.signal(signal.SIGKILL)
        assert run.finish() == -signal.SIGKILL, run.output
        run = start(tmp_path / "run", data, **settings)
    assert_same(run.finish_well(), whole)


def test_a_truncated_last_checkpoint_loses_the_updates_since_the_one_before(tmp_path, data):
    settings = {"epochs": 3}
    whole = train(tmp_path / "whole", data, **settings)
    train(tmp_path / "run", data, **settings)
    last = tmp_path / "run" / "checkpoints" / "last.pt"
    shutil.copy(last, last.with_name("copy.pt"))
    last.unlink()
    last.with_name("copy.pt").rename(last)
    os.truncate(last, last.stat().st_size - 1000)
    run = start(tmp_path / "run", data, **settings).finish_well()
    assert "last.pt: cannot be read" in run.output
    assert "going back to" in run.output
    assert_same(run, whole)


@pytest.mark.parametrize("where", [0.2, 0.5, 0.8])
def test_a_damaged_checkpoint_is_not_taken_for_a_good_one(tmp_path, data, where):
    run = train(tmp_path / "run", data, epochs=1)
    last = run.folder / "checkpoints" / "last.pt"
    content = bytearray(last.read_bytes())
    for offset in range(64):
        content[int(len(content) * where) + offset] ^= 0xFF
    last.write_bytes(content)
    with pytest.raises(ValueError, match=r"last\.pt"):
        RunFolder(run.folder).newest()


def test_a_full_disk_while_saving_keeps_the_run_and_the_previous_checkpoint(tmp_path, data):
    disk = tmp_path / "run"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        settings = {"epochs": 12, "recovery_interval": 1}
        run = start(disk, data, **settings)
        wait_for_step(run, 3)
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        while "nothing saved" not in run.output:
            assert run.processes[0].is_alive(), run.output
            time.sleep(0.02)
        run.signal(signal.SIGTERM)
        assert run.finish() == 74, run.output
        saved = RunFolder(run.folder).newest()
        assert saved is not None
        assert read_checkpoint(saved[0])["progress"]["step"] > 0
        filler.unlink()
        again = start(disk, data, **settings).finish_well()
        assert_same(again, train(tmp_path / "whole", data, **settings))
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
