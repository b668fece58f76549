"""tools/train_detection.py as real processes: killed and started again, and two that train together."""

import signal
import time

import pytest
import torch
from detection_samples import TINY, write_set
from training import Run, start

TOOL = {"tool": "train_detection", "base": TINY}


def evaluations_and_weights(run: Run):
    weights = torch.load(run.folder / "checkpoints" / "last.pt", weights_only=True)["state_dict"]
    return run.losses(), run.evaluations(), weights


def test_a_kill_between_two_saves_changes_nothing(tmp_path):
    data = write_set(tmp_path / "set", train=12)
    settings = {**TOOL, "epochs": 4, "recovery_interval": 2, "clip_grad": 1.0, "model_ema": True}
    whole = start(tmp_path / "whole", data, **settings).finish_well()
    run = start(tmp_path / "run", data, **settings)
    deadline = time.monotonic() + 100
    while not (run.folder / "metrics.jsonl").exists() or len(run.losses()) < 9:  # 24 updates in all
        assert time.monotonic() < deadline, run.output
        time.sleep(0.002)
    run.signal(signal.SIGKILL)
    assert run.finish() == -signal.SIGKILL, run.output
    killed_at = len(run.losses())
    assert killed_at < 24
    again = start(tmp_path / "run", data, **settings).finish_well()
    expected, found = evaluations_and_weights(whole), evaluations_and_weights(again)
    assert found[:2] == expected[:2]
    assert all(torch.equal(value, found[2][name]) for name, value in expected[2].items())


def test_two_processes_give_the_losses_of_one(tmp_path):
    data = write_set(tmp_path / "set", train=8)
    # RetinaNet draws no proposals, jittered images have one size, and a ViT has no statistics of a batch
    settings = {**TOOL, "detector": "retinanet", "detector_kwargs": {}, "model": "test_vit", "epochs": 2}
    settings |= {"train_min_sizes": [], "scale_jitter": [0.8, 1.2], "crop_size": 64, "global_batch_size": 4}
    one, two = (start(tmp_path / f"of{n}", data, processes=n, **settings).finish_well() for n in (1, 2))
    assert [*one.losses()] == [1, 2, 3, 4]
    assert two.losses() == pytest.approx(one.losses(), rel=1e-4)
    found, expected = two.evaluations(), one.evaluations()
    assert len(found) == len(expected) == 2
    assert all(a["box_map"] == pytest.approx(b["box_map"], abs=1e-3) for a, b in zip(found, expected, strict=True))
