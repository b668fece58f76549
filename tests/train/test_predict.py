"""Prediction: files, folders and stdin to JSON, CSV and a picture; corrupt images named; refusals in one line."""

import csv
import json

import pytest
import torch
from evaluation_samples import CLASSES, save_model, write_class_folder, write_image
from PIL import Image
from tool_process import run_tool
from torchvision.transforms import v2 as transforms

from flash_vision.train.model_source import ModelSource, load_model
from flash_vision.train.picture import save_prediction_grid
from flash_vision.train.predict import PredictConfig, as_rows, find_images, predict
from flash_vision.train.sidecar import ModelSidecar, sidecar_path, write_sidecar


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A run folder as training leaves it: weights and model.json."""
    path = save_model(tmp_path_factory.mktemp("run") / "model.safetensors", "flash_gau_pico")
    sidecar = ModelSidecar(
        model="flash_gau_pico",
        num_classes=3,
        class_names=CLASSES,
        input_size=(3, 28, 28),
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        interpolation="bilinear",
        crop_pct=1.0,
    )
    write_sidecar(sidecar_path(path), sidecar)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_class_folder(tmp_path_factory.mktemp("images"), images=3)


def test_confidences_are_those_of_one_image_alone(weights, folder):
    predictions = predict(PredictConfig(checkpoint=str(weights), images=[str(folder)], batch_size=4, device="cpu"))
    model = load_model(ModelSource(checkpoint=str(weights))).model
    transform = transforms.Compose(
        [
            transforms.Resize(28, interpolation=transforms.InterpolationMode.BILINEAR),
            transforms.CenterCrop(28),
            transforms.PILToTensor(),
            transforms.ToDtype(torch.float32, scale=True),
            transforms.Normalize((0.5,) * 3, (0.25,) * 3),
        ]
    )
    assert [prediction.file for prediction in predictions] == sorted(str(path) for path in folder.rglob("*.*"))
    for prediction in predictions:
        with Image.open(prediction.file) as image, torch.inference_mode():
            expected = model(transform(image.convert("RGB"))[None]).softmax(1)[0]
        got = torch.zeros(3)
        for guess in prediction.guesses:
            got[guess.index] = guess.confidence
            assert guess.name == CLASSES[guess.index]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
        confidences = [guess.confidence for guess in prediction.guesses]
        assert confidences == sorted(confidences, reverse=True)


def test_the_tool_classifies_one_file_with_the_model_that_training_left(weights, folder):
    image = folder / "red" / "red_0.jpg"
    done = run_tool("predict", "--model", "flash_gau_pico", "--checkpoint", weights, "--device", "cpu", image)
    assert done.code == 0, done.stderr
    file, name, confidence = done.stdout.strip().split("\t")
    assert file == str(image)
    assert name in CLASSES
    assert 1 / 3 <= float(confidence) <= 1


def test_stdin_gives_json_on_stdout_and_csv_and_picture_in_files(weights, folder, tmp_path):
    files = sorted(map(str, folder.rglob("*.*")))
    outputs = ["--json_file", "-", "--csv_file", tmp_path / "out.csv", "--picture", tmp_path / "out.png"]
    done = run_tool(
        "predict",
        "--checkpoint",
        weights,
        "--device",
        "cpu",
        "--topk",
        2,
        *outputs,
        "-",
        stdin="\n".join(files) + "\n\n",
    )
    assert done.code == 0, done.stderr
    content = json.loads(done.stdout)
    assert [entry["file"] for entry in content] == files
    assert all(len(entry["guesses"]) == 2 and entry["error"] is None for entry in content)
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [row["class1"] for row in rows] == [entry["guesses"][0]["name"] for entry in content]
    assert float(rows[0]["confidence2"]) == content[0]["guesses"][1]["confidence"]
    with Image.open(tmp_path / "out.png") as picture:
        assert picture.format == "PNG"
        assert picture.width > 3 * 100


def test_a_corrupt_image_stops_the_run_or_is_listed_with_its_error(weights, folder, tmp_path):
    good = folder / "red" / "red_0.jpg"
    bad = tmp_path / "bad.png"
    whole = write_image(tmp_path / "whole.png", seed=1).read_bytes()
    bad.write_bytes(whole[: len(whole) // 2])
    arguments = ["--checkpoint", weights, "--device", "cpu", good, bad, "--picture", tmp_path / "out.png"]
    assert f"{bad}: corrupt image" in run_tool("predict", *arguments).refused()
    assert not (tmp_path / "out.png").exists()
    config = PredictConfig(checkpoint=str(weights), images=[str(bad), str(good)], device="cpu", skip_corrupt=True)
    first, second = predict(config)
    assert first.guesses == ()
    assert "corrupt image" in str(first.error)
    assert len(second.guesses) == 3
    assert as_rows([first, second], topk=1)[0] == {
        "file": str(bad),
        "class1": None,
        "confidence1": None,
        "error": first.error,
    }


def test_files_keep_their_order_and_folders_are_searched_in_natural_order(tmp_path):
    for name in ("b/10.jpg", "b/9.jpg", "a/deep/1.png"):
        write_image(tmp_path / name, seed=0)
    (tmp_path / "b" / "notes.txt").write_text("no image")
    single = str(tmp_path / "b" / "10.jpg")
    found = find_images([single, str(tmp_path)])
    assert found == [single, *(str(tmp_path / name) for name in ("a/deep/1.png", "b/9.jpg", "b/10.jpg"))]


def test_a_grey_model_reads_grey_images(tmp_path):
    weights = save_model(tmp_path / "model.safetensors", "test_resnet", in_chans=1)
    source = {"model": "test_resnet", "num_classes": 3, "model_kwargs": {"in_chans": 1}, "checkpoint": str(weights)}
    image = write_image(tmp_path / "image.png", seed=0)
    (prediction,) = predict(PredictConfig(**source, images=[str(image)], device="cpu", img_size=32))
    assert [guess.name for guess in prediction.guesses] != []
    assert sum(guess.confidence for guess in prediction.guesses) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("truths", [None, ["red", "blue", "a very long name of a class, longer than fits"]])
def test_the_picture_shows_images_of_any_size_and_mode(tmp_path, truths):
    images = [Image.new("RGB", (300, 40), "red"), Image.new("L", (8, 8), 128), Image.new("RGB", (20, 900))]
    path = tmp_path / "grid.png"
    save_prediction_grid(path, images, ["red", "$blue^$", "x" * 90], [1.0, 0.5, 1 / 3], truths=truths, title="a title")
    with Image.open(path) as picture:
        assert picture.format == "PNG"
    assert [entry.name for entry in tmp_path.iterdir()] == ["grid.png"]


def test_the_picture_wants_an_image_for_each_prediction(tmp_path):
    with pytest.raises(ValueError, match="got 0 and 0"):
        save_prediction_grid(tmp_path / "grid.png", [], [], [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["{tmp}/missing.jpg"], "missing.jpg: no such file"),
        (["{tmp}/empty"], "empty: folder without an image"),
        (["{tmp}/text.jpg"], "text.jpg: not an image"),
        (["-"], "images: no path given"),
        ([], "images"),
        (["{image}", "--model", "test_vit"], "model.json says 'flash_gau_pico'"),
        (["{image}", "--num_classes", "7"], "num_classes: 7 given"),
        (["{image}", "--checkpoint", "{tmp}/none.safetensors"], "none.safetensors: no such file"),
        (["{image}", "--checkpoint", "{tmp}/bare.safetensors"], "give --model"),
        (["{image}", "--checkpoint", "{tmp}/broken/model.safetensors"], "unknown key"),
        (["{image}", "--class_names", "{tmp}/text.jpg"], "has 1 lines, the model has 3 classes"),
        (["{image}", "--topk", "0"], "topk must be >= 1"),
        (["{image}", "--json_file", "-", "--csv_file", "-"], "only one of them"),
        (["{image}", "--picture", "{tmp}/none/grid.png"], "picture: there is no folder"),
        (["{image}", "--picture", "{tmp}/grid.jpg"], "picture must end in .png"),
        (["{image}", "--device", "warp"], "'warp'"),
    ],
)
def test_a_mistake_ends_in_one_line_that_names_it(weights, folder, tmp_path, arguments, named):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "text.jpg").write_text("text")
    for name in ("bare.safetensors", "broken/model.safetensors"):
        (tmp_path / name).write_bytes(weights.read_bytes())
    (tmp_path / "broken" / "model.json").write_text('{"modell": "flash_gau_pico"}')
    names = {"{tmp}": str(tmp_path), "{image}": str(folder / "red" / "red_0.jpg")}
    filled = []
    for text in arguments:
        for key, value in names.items():
            text = text.replace(key, value)
        filled.append(text)
    done = run_tool("predict", "--checkpoint", weights, "--device", "cpu", *filled)
    assert named in done.refused()
