"""What ends or disturbs a run: losses that are not finite, images that do not decode, mistakes."""

import json
import signal
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from training import start, train, write_images

from flash_vision.train.reporting import read_metrics


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"))


def test_a_loss_that_stays_non_finite_ends_the_run_with_step_learning_rate_and_files(tmp_path, data):
    run = start(tmp_path / "run", data, opt="sgd", lr=1e30, warmup_epochs=0, max_nonfinite_steps=2, epochs=9)
    assert run.finish() == 3, run.output
    assert run.output.count("update skipped") == 2
    error = run.output.split("error: ")[1]
    assert "step " in error
    assert "learning rate " in error
    assert ".jpg" in error
    events = [r for r in read_metrics(run.folder / "metrics.jsonl") if r.get("event") == "nonfinite"]
    assert [len(event["files"]) for event in events] == [8, 8, 8]
    assert "Traceback" not in run.output


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_images_are_skipped_counted_and_named(tmp_path, workers):
    data = write_images(tmp_path / "images")
    broken = data / "train" / "class1" / "003.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    unreadable = data / "validation" / "class2" / "001.jpg"
    unreadable.write_bytes(b"no image")
    # in evaluation by one image, so that a batch without any is met
    settings = {"max_corrupt_fraction": 0.05, "epochs": 2, "validation_batch_size": 1}
    run = train(tmp_path / "run", data, workers=workers, **settings)
    records = read_metrics(run.folder / "metrics.jsonl")
    named = {r["file"] for r in records if r.get("event") == "corrupt"}
    assert named == {str(broken), str(unreadable)}
    assert records[-2]["corrupt"] == 2
    assert str(broken) in run.output
    # 20 of the 21 validation images are left
    assert round(run.evaluations()[-1]["top1"] * 20 / 100, 9) == round(run.evaluations()[-1]["top1"] * 20 / 100)


def test_the_substitute_of_a_corrupt_image_does_not_depend_on_the_workers(tmp_path):
    data = write_images(tmp_path / "images")
    broken = data / "train" / "class1" / "003.jpg"
    broken.write_bytes(b"")
    settings = {"max_corrupt_fraction": 1.0, "aa": "rand-m5", "reprob": 0.5}
    losses = [train(tmp_path / str(workers), data, workers=workers, **settings).losses() for workers in (0, 1, 3)]
    assert losses[0] == losses[1] == losses[2]


def test_too_many_corrupt_images_end_the_run(tmp_path):
    data = write_images(tmp_path / "images")
    for file in (data / "train" / "class0").iterdir():
        file.write_bytes(b"no image")
    run = start(tmp_path / "run", data, max_corrupt_fraction=0.1)
    assert run.finish() == 3
    assert "more than max_corrupt_fraction 0.1 of the 48 training images" in run.output
    assert "Traceback" not in run.output


def test_the_run_folder_holds_what_a_run_is_made_of(tmp_path, data):
    run = train(tmp_path / "run", data, curves=True, tensorboard=True, keep_every=1, model_ema=True, epochs=2)
    names = {str(file.relative_to(run.folder)) for file in run.folder.rglob("*") if file.is_file()}
    assert names >= {
        "run.json", "config.yaml", "metrics.jsonl", "curves.png", "model.safetensors", "model_best.safetensors",
        "model.json", "checkpoints/last.pt", "checkpoints/previous.pt", "checkpoints/best.pt",
        "checkpoints/epoch_0001.pt", "checkpoints/epoch_0002.pt",
    }  # fmt: skip
    assert not [name for name in names if name.endswith(".tmp")]
    description = json.loads((run.folder / "run.json").read_text())
    assert {"torch", "timm", "flash-vision", "python"} <= description["versions"].keys()
    assert "commit" in description
    record = next(r for r in read_metrics(run.folder / "metrics.jsonl") if r["kind"] == "train")
    assert record.keys() >= {"loss", "lr", "grad_norm", "images_per_s", "peak_memory_mb", "corrupt", "epoch", "step"}
    assert {"top1", "loss", "top1_ema"} <= run.evaluations()[0].keys()
    sidecar = json.loads((run.folder / "model.json").read_text())
    model = timm.create_model(
        sidecar["model"],
        num_classes=sidecar["num_classes"],
        checkpoint_path=run.folder / "model.safetensors",
        **sidecar["model_kwargs"],
    )
    averaged = torch.load(run.folder / "checkpoints" / "last.pt", weights_only=True)["state_dict_ema"]
    assert all(torch.equal(value, averaged[name]) for name, value in model.state_dict().items())


def test_a_finished_run_started_again_does_nothing(tmp_path, data):
    run = train(tmp_path / "run", data)
    before = {name: value.clone() for name, value in load_file(run.folder / "model.safetensors").items()}
    losses = run.losses()
    again = train(tmp_path / "run", data)
    assert again.losses() == losses
    after = load_file(run.folder / "model.safetensors")
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_two_runs_cannot_use_one_folder_at_a_time(tmp_path, data):
    run = start(tmp_path / "run", data, epochs=200)
    while not run.losses():
        assert run.processes[0].is_alive(), run.output
    assert "another process is running in it" in start(tmp_path / "run", data, epochs=200).refusal
    run.signal(signal.SIGTERM)
    assert run.finish() == 75


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"lr": 0.5}, "lr: 0.002 -> 0.5"),
        ({"model": "test_resnet", "model_kwargs": {}}, "model: 'test_vit' -> 'test_resnet'"),
        ({"batch_size": 4}, "images per update"),
    ],
)
def test_a_folder_of_another_run_is_refused_with_the_field(tmp_path_factory, data, settings, line):
    folder = tmp_path_factory.getbasetemp() / "shared-run"
    if not folder.exists():
        train(folder, data)
    before = (folder / "run.json").read_bytes(), (folder / "metrics.jsonl").read_bytes()
    refusal = start(folder, data, **settings).refusal
    assert line in refusal
    assert (folder / "metrics.jsonl").read_bytes() == before[1]


def test_a_folder_with_other_files_is_refused(tmp_path, data):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    assert "holds other files (thesis.tex)" in start(tmp_path / "run", data).refusal
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"data_dir": "/nowhere/at/all"}, "data_dir /nowhere/at/all: no such folder"),
        ({"val_split": "holdout"}, "holds no split 'holdout'"),
        ({"num_classes": 2}, "num_classes must be the 3 classes"),
        ({"model": "flash_gau_nano"}, "unknown model 'flash_gau_nano'"),
        ({"img_size": 15}, "input of (3, 15, 15)"),
        ({"device": "cuda:7"}, "device 'cuda:7' is not available"),
        ({"opt": "adamx"}, "opt adamx"),
        ({"aa": "wild"}, "aa 'wild'"),
        ({"batch_size": 49}, "batch_size must leave an update of at most 48 images"),
        ({"mixup": 0.1, "batch_size": 3}, "batch_size must be even with mixup"),
        ({"model_kwargs": {"depths": 3}}, "unexpected keyword argument 'depths'"),
        ({"pretrained_path": "/nowhere.safetensors"}, "/nowhere.safetensors: no such file"),
        (
            {"kd_model_name": "test_resnet", "kd_model_path": "/no.pth"},
            "kd_model_name: checkpoint /no.pth: no such file",
        ),
        ({"sched": "polynomial"}, 'Parser key "sched"'),
        ({"learning_rate": 3}, "'learning_rate' is not accepted"),
        ({"dataset": "tfds/mnist"}, "dataset must be empty, or begin with"),
        ({"drop_path": 1.5}, "drop_path must be in [0, 1), got 1.5"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(tmp_path, data, settings, line):
    run = start(tmp_path / "run", data, **settings)
    assert line in run.refusal
    assert not run.folder.exists()


def test_an_empty_class_folder_is_refused_before_training(tmp_path):
    data = write_images(tmp_path / "images")
    (data / "train" / "nothing").mkdir()
    assert "nothing: class folder without an image" in start(tmp_path / "run", data).refusal


def test_a_validation_class_that_is_not_trained_is_refused(tmp_path):
    data = write_images(tmp_path / "images")
    (data / "validation" / "class0").rename(data / "validation" / "stranger")
    assert "stranger" in start(tmp_path / "run", data).refusal
