"""Whole runs: tools/train_segmentation.py and tools/segment.py on a tiny set, continuation, mistakes, configs."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from segmentation_samples import CLASSES, SETTINGS, config, run, write_pairs
from tool_process import TOOLS, run_tool
from training import start

from flash_vision.dense.segmentation_classes import read_label_map
from flash_vision.dense.segmentation_config import SegmentationConfig
from flash_vision.dense.segmentation_predict import SegmentConfig, load_configured, load_segmenter, segment
from flash_vision.dense.segmentation_run import create_model
from flash_vision.train.predict import find_images
from flash_vision.train.reporting import read_metrics

CONFIGS = TOOLS.parent / "configs"
SHIPPED = sorted([*CONFIGS.glob("camvid/*.yaml"), *CONFIGS.glob("ade20k/*.yaml")])
PLAIN_SETTINGS = {name: list(value) if isinstance(value, tuple) else value for name, value in SETTINGS.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs"))


def write_config(folder: Path, data: Path, **settings) -> Path:
    file = folder.with_suffix(".yaml")
    place = {"data_dir": str(data), "output": str(folder.parent), "experiment": folder.name}
    file.write_text(yaml.safe_dump({**PLAIN_SETTINGS, **place, **settings}))
    return file


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data) -> Path:
    """The folder of a run of the tool that has learnt the three colours."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    settings = {"epochs": 8, "curves": True, "model_ema": True, "model_ema_decay": 0.8, "val_interval": 4}
    done = run_tool("train_segmentation", "--config", write_config(folder, data, **settings))
    assert done.code == 0, done.stderr
    assert "train split: 12 pairs" in done.stderr
    return folder


def test_a_run_learns_and_leaves_what_it_takes_to_use_the_network(trained):
    evaluations = [record for record in read_metrics(trained / "metrics.jsonl") if record["kind"] == "eval"]
    assert len(evaluations) == 2
    last = evaluations[-1]
    assert last["miou_ema"] > 75
    assert last["best"] == max(record["miou_ema"] for record in evaluations)
    names = {"miou", "mean_accuracy", "pixel_accuracy", "loss", "iou/red", "iou/green", "iou/blue"}
    assert names <= set(last)
    assert last["miou"] == pytest.approx(np.mean([last[f"iou/{name}"] for name in CLASSES.names]))
    files = {file.name for file in trained.iterdir()}
    assert {"model.safetensors", "model_best.safetensors", "model.json", "curves.png", "run.json"} <= files
    sidecar = json.loads((trained / "model.json").read_text())
    assert sidecar["task"] == "segmentation"
    assert sidecar["classes"]["names"] == ["red", "green", "blue"]


def test_segment_gives_label_maps_pictures_shares_and_the_scores_of_the_run(trained, data, tmp_path):
    output = tmp_path / "out"
    images, labels = data / "val" / "images", data / "val" / "labels"
    done = run_tool(
        "segment", "--checkpoint", trained / "model.safetensors", "--output_dir", output, "--labels", labels, images
    )
    assert done.code == 0, done.stderr
    content = json.loads((output / "results.json").read_text())
    last = read_metrics(trained / "metrics.jsonl")[-1]
    for name in ("miou", "pixel_accuracy", "mean_accuracy"):
        assert content["scores"][name] == pytest.approx(last[f"{name}_ema"])
    assert [row["class"] for row in content["per_class"]] == list(CLASSES.names)
    assert f"5 images: miou {content['scores']['miou']:.2f}" in done.stdout
    for record in content["images"]:
        file = Path(record["file"])
        predicted = read_label_map(output / f"{file.stem}.png", CLASSES)
        with Image.open(file) as image:
            assert predicted.shape == image.size[::-1]
        assert sum(record["shares"].values()) == pytest.approx(1)
        for name, share in record["shares"].items():
            assert share == pytest.approx((predicted == CLASSES.names.index(name)).mean())
        with Image.open(output / f"{file.stem}_overlay.png") as picture:
            assert picture.width > image.size[0]


def segmented(trained, images, **settings):
    chosen = SegmentConfig(
        checkpoint=str(trained / "model.safetensors"), output_dir="unused", images=[str(images)], **settings
    )
    return [result.labels for result in segment(chosen, load_configured(chosen), find_images(chosen.images))]


def test_segment_in_windows_that_cover_everything_equals_whole_images(trained, data):
    images = data / "val" / "images"
    whole = segmented(trained, images)
    for settings in ({"window": (200, 200)}, {"whole_image": True}):
        assert all(np.array_equal(a, b) for a, b in zip(whole, segmented(trained, images, **settings), strict=True))
    for settings in ({"window": (32, 48)}, {"short_side": 40}):
        other = segmented(trained, images, **settings)
        assert all(a.shape == b.shape for a, b in zip(whole, other, strict=True))
        assert any(not np.array_equal(a, b) for a, b in zip(whole, other, strict=True))


def test_segment_takes_the_smallest_images(trained, tmp_path):
    Image.new("RGB", (3, 1)).save(tmp_path / "tiny.png")
    (labels,) = segmented(trained, tmp_path)
    assert labels.shape == (1, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"output_dir": ""}, "output_dir must be given without labels"),
        ({"checkpoint": ""}, "checkpoint must be given"),
        ({"checkpoint": "/no.pth"}, "checkpoint /no.pth: no such file"),
        ({"labels": "/nowhere"}, "labels /nowhere: no such folder"),
        ({"short_side": 0}, "short_side must be at least 1"),
        ({"window": (4, 4), "whole_image": True}, "whole_image must be false with window"),
        ({"window": (0, 4)}, "window must be (height, width)"),
    ],
)
def test_segment_refuses_mistakes_by_name(trained, settings, message):
    given = {"checkpoint": str(trained / "model.safetensors"), "output_dir": "unused", **settings}
    with pytest.raises(ValueError, match=re.escape(message)):
        load_configured(SegmentConfig(**given))


def test_weights_of_another_network_or_task_are_refused(trained, tmp_path):
    weights = load_file(trained / "model.safetensors")
    removed = next(iter(weights))
    save_file({name: value for name, value in weights.items() if name != removed}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"there is no model\.json beside it"):
        load_segmenter(str(tmp_path / "model.safetensors"))
    content = json.loads((trained / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"not of the network in its model.json: .*1 missing .*{re.escape(removed)}"):
        load_segmenter(str(tmp_path / "model.safetensors"))
    (tmp_path / "model.json").write_text(json.dumps({**content, "task": "detection"}))
    with pytest.raises(ValueError, match="task must be segmentation, got 'detection'"):
        load_segmenter(str(tmp_path / "model.safetensors"))


def test_segment_names_and_counts_what_it_cannot_read(trained, data, tmp_path):
    weights, image = trained / "model.safetensors", data / "val" / "images" / "00.jpg"
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"no image")
    to_folder = ("--checkpoint", weights, "--output_dir", tmp_path / "out")
    assert "broken.jpg: not an image" in run_tool("segment", *to_folder, broken).refused()
    done = run_tool("segment", *to_folder, "--skip_corrupt", "true", broken, image)
    assert done.code == 0, done.stderr
    assert "1 of 2 files could not be read" in done.stderr
    records = json.loads((tmp_path / "out" / "results.json").read_text())["images"]
    assert [set(record) for record in records] == [{"file", "error"}, {"file", "shares"}]
    assert (
        "output_dir must be another folder"
        in run_tool("segment", "--checkpoint", weights, "--output_dir", image.parent, image).refused()
    )
    same_name = data / "train" / "images" / "00.jpg"
    refused = run_tool("segment", *to_folder, image, same_name).refused()
    assert f"{same_name} and {image} would both be written to 00.png" in refused
    twin = tmp_path / "00_overlay.jpg"
    twin.write_bytes(image.read_bytes())
    assert "would both be written to 00_overlay.png" in run_tool("segment", *to_folder, twin, image).refused()
    overlap = run_tool("segment", *to_folder, "--window_overlap", 0.5, image).refused()
    assert "window_overlap must be left out without windows, got 0.5" in overlap
    (tmp_path / "empty").mkdir()
    compare = ("--checkpoint", weights, "--labels", tmp_path / "empty")
    assert "image without a label map" in run_tool("segment", *compare, image).refused()
    for name in ("00", "01"):
        (tmp_path / "empty" / f"{name}.png").write_bytes((data / "val" / "labels" / f"{name}.png").read_bytes())
    (tmp_path / "empty" / "01.png").write_bytes(b"no image")
    two = (image.parent / "00.jpg", image.parent / "01.jpg")
    assert "01.png: cannot be read" in run_tool("segment", *compare, *two).refused()
    rest = run_tool("segment", *compare, "--skip_corrupt", "true", *two)
    assert "1 images: miou" in rest.stdout
    assert "1 of 2 files could not be read, the first: " in rest.stderr


def test_a_run_that_is_stopped_in_mid_epoch_and_continued_gives_what_it_would_have_given(tmp_path, data):
    settings = {"drop_path": 0.1, "photometric": 0.5, "clip_grad": 1.0, "layer_decay": 0.9, "dice_weight": 0.5}
    whole, parts = (config(tmp_path / name, data, **settings) for name in ("whole", "parts"))
    assert run(whole) == 0
    assert run(parts, stop_after=2) == 75
    assert run(parts) == 0
    weights = [load_file(chosen.folder / "model.safetensors") for chosen in (whole, parts)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())
    losses = [
        {r["step"]: r["loss"] for r in read_metrics(chosen.folder / "metrics.jsonl") if r["kind"] == "train"}
        for chosen in (whole, parts)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


def test_accumulation_steps_change_neither_the_images_of_an_update_nor_its_loss(tmp_path, data):
    chosen = [
        config(tmp_path / "a", data, epochs=1, model_dtype="float64"),
        config(tmp_path / "b", data, epochs=1, model_dtype="float64", batch_size=2, grad_accum_steps=2),
    ]
    losses = []
    for each in chosen:
        assert run(each) == 0
        losses.append([r["loss"] for r in read_metrics(each.folder / "metrics.jsonl") if r["kind"] == "train"])
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-9)


def test_two_processes_give_the_losses_and_scores_of_one(tmp_path, data):
    settings = {"epochs": 1, "model_dtype": "float64", "global_batch_size": 4}
    alone = config(tmp_path / "one", data, **settings)
    assert run(alone) == 0
    tool = {"tool": "train_segmentation", "base": PLAIN_SETTINGS}
    two = start(tmp_path / "two", data, processes=2, **tool, **settings).finish_well()
    records = [
        [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] in ("train", "eval")]
        for folder in (alone.folder, two.folder)
    ]
    for name in ("loss", "miou", "pixel_accuracy", "iou/red"):
        values = [[record[name] for record in of_run if name in record] for of_run in records]
        assert values[1]
        assert values[0] == pytest.approx(values[1], rel=1e-9)


def test_a_file_that_does_not_decode_is_replaced_counted_and_named(tmp_path):
    data = write_pairs(tmp_path / "pairs")
    for file in ("train/images/03.jpg", "val/labels/02.png"):
        (data / file).write_bytes(b"no image")
    chosen = config(tmp_path / "run", data, max_corrupt_fraction=0.5)
    assert run(chosen) == 0
    records = read_metrics(chosen.folder / "metrics.jsonl")
    named = {record["file"] for record in records if record.get("event") == "corrupt"}
    assert named == {str(data / "train/images/03.jpg"), str(data / "val/images/02.jpg")}
    counts = {r["split"]: r["pairs with a file that does not decode"] for r in records if r["kind"] == "data"}
    assert counts == {"train split": 1, "val split": 1}


def test_a_class_without_a_pixel_is_said(tmp_path, data):
    names = {"names": ["red", "green", "blue", "black"]}
    done = run_tool(
        "train_segmentation", "--config", write_config(tmp_path / "run", data, classes=names, epochs=1)
    )  # fmt: skip
    assert done.code == 0, done.stderr
    assert "train split: 12 pairs, 0 pixels of class black" in done.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"classes": "/none.yaml"}, "classes /none.yaml: no such file"),
        ({"classes": ""}, "classes must be a file or a mapping"),
        ({"classes": {"names": ["red", "green"]}}, " of 12 label maps are wrong)"),
        ({"data_dir": "/nowhere"}, "data_dir /nowhere: no such folder"),
        ({"val_split": "test"}, "holds no split 'test'"),
        (
            {"decoder": "upernet", "decoder_kwargs": {}, "batch_size": 1},
            "batch_size must be at least 2 with decoder up",
        ),
        ({"model": "flash_pyramid_pico"}, "unknown model 'flash_pyramid_pico'"),
        ({"crop_size": (0, 3)}, "crop_size must be (height, width) of at least 1"),
        ({"window": (0, 3)}, "window must be (height, width) of at least 1 pixel"),
        ({"window": (32, 32), "window_overlap": 1.0}, "window_overlap must be in [0, 1)"),
        ({"window_overlap": 0.5}, "window_overlap must be left out without window, got 0.5"),
        ({"model": "flash_pyramid_nano", "pyramid_channels": 64}, "pyramid_channels must be left out with flash_py"),
        ({"scale": (2.0, 0.5)}, "scale must be (low, high)"),
        ({"hflip": 1.5}, "hflip must be in [0, 1]"),
        ({"short_side": 0}, "short_side must be at least 1"),
        ({"fsdp": True}, "fsdp must be false for segmentation"),
        ({"batch_size": 99}, "batch_size must leave an update of at most 12 images"),
        ({"mean": [0.5, 0.5]}, "mean must be 1 or 3 numbers"),
    ],
)
def test_a_mistake_is_refused_by_name_and_leaves_nothing_behind(tmp_path, data, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        run(config(tmp_path / "run", data, **settings))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"img_size": 64}, "'img_size' is not accepted"),
        ({"decoder": "pspnet"}, 'Parser key "decoder"'),
        ({"val_split": "test"}, "error: data_dir"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_of_the_tool(tmp_path, data, settings, message):
    file = write_config(tmp_path / "run", data, **settings)
    assert message in run_tool("train_segmentation", "--config", file).refused()
    assert not (tmp_path / "run").exists()


def test_a_folder_belongs_to_its_classes(tmp_path, data):
    chosen = config(tmp_path / "run", data, epochs=1)
    assert run(chosen) == 0
    renamed = {**SETTINGS["classes"], "names": ["rot", "gruen", "blau"]}
    with pytest.raises(ValueError, match=r"another configuration .*classes: "):
        run(config(tmp_path / "run", data, epochs=1, classes=renamed))


def test_help_documents_every_option():
    text = " ".join(run_tool("train_segmentation", "--help").stdout.split())
    for option in ("decoder", "classes", "short_side", "crop_size", "photometric", "dice_weight", "window"):
        described = text.rpartition(f"--{option} ")[2]
        assert described.partition("(type:")[0].count(" ") >= 3, option


@pytest.mark.parametrize(
    "path", [p for p in SHIPPED if p.name != "classes.yaml"], ids=lambda p: f"{p.parent.name}/{p.name}"
)
def test_a_shipped_config_is_valid_and_says_how_it_is_run(path, monkeypatch):
    monkeypatch.chdir(TOOLS.parent)
    text = path.read_text()
    chosen = SegmentationConfig(**{"data_dir": "pairs", **yaml.safe_load(text)})
    header = text.partition("\nmodel:")[0].lower()
    assert all(word in header for word in ("train_segmentation.py", "hardware", "time", "miou"))
    if path.parent.name == "camvid":
        logits = create_model(chosen).eval()([torch.randn(3, 45, 61)])
        assert logits[0].shape == (11, 45, 61)
