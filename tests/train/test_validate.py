"""Validation: counts that an independent loop confirms, sweeps, tables, ReaL labels, and refusals in one line."""

import csv
import json
import shutil

import pytest
import timm
import torch
from evaluation_samples import CLASSES, save_model, write_class_folder, write_image
from PIL import Image
from timm.models import save_for_hf
from tool_process import run_tool
from torchvision.transforms import v2 as transforms

from flash_vision.data.shards import ShardConfig, make_shards
from flash_vision.train.model_source import ModelSource, load_model
from flash_vision.train.sidecar import ModelSidecar, sidecar_path, write_sidecar
from flash_vision.train.validate import ValidateConfig, validate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_class_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("weights") / "model.safetensors")


def config(folder, weights, **changes):
    defaults = {"model": "test_vit", "num_classes": 3, "batch_size": 5, "workers": 0, "device": "cpu"}
    return ValidateConfig(**defaults | {"data_dir": str(folder), "checkpoint": str(weights)} | changes)


def plain_loop(folder, model, *, size, crop_pct=0.95):
    """Targets, predictions and loss, one image after the other, with torchvision's transforms."""
    cfg = model.pretrained_cfg
    transform = transforms.Compose(
        [
            transforms.Resize(int(size / crop_pct), interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(size),
            transforms.PILToTensor(),
            transforms.ToDtype(torch.float32, scale=True),
            transforms.Normalize(cfg["mean"], cfg["std"]),
        ]
    )
    rows, loss = [], 0.0
    for target, name in enumerate(sorted(path.name for path in folder.iterdir())):
        for path in sorted((folder / name).iterdir()):
            with Image.open(path) as image, torch.inference_mode():
                logits = model(transform(image.convert("RGB"))[None])[0]
            order = logits.argsort(descending=True).tolist()
            rows.append((target, order[0], target in order[:5]))
            loss -= logits.log_softmax(0)[target].item()
    return rows, loss / len(rows)


def rows_of(evaluation):
    return list(zip(evaluation.targets, evaluation.predicted, evaluation.in_top5, strict=True))


@pytest.mark.parametrize("size", [160, 96])
def test_every_image_is_counted_as_in_an_independent_loop(folder, weights, size):
    model = load_model(ModelSource(model="test_vit", checkpoint=str(weights), num_classes=3)).model
    if size != 160:
        model.set_input_size(img_size=(size, size))
    expected, loss = plain_loop(folder, model, size=size)
    evaluation = validate(config(folder, weights, img_size=size)).evaluations[0]
    assert rows_of(evaluation) == expected
    assert evaluation.loss == pytest.approx(loss, abs=1e-4)
    assert len({predicted for _, predicted, _ in expected}) > 1


def test_the_batch_size_and_the_loader_processes_change_no_count(folder, weights):
    single = validate(config(folder, weights, batch_size=1)).evaluations[0]
    batched = validate(config(folder, weights, batch_size=7, workers=1)).evaluations[0]
    assert rows_of(single) == rows_of(batched)
    assert single.loss == pytest.approx(batched.loss, abs=1e-5)


def test_a_sweep_evaluates_every_size_with_every_crop(folder, tmp_path):
    weights = save_model(tmp_path / "gau.safetensors", "flash_gau_pico")
    settings = {"model": "flash_gau_pico", "img_size": [28, 45], "crop_pct": [0.875, 1.0]}
    report = validate(config(folder, weights, **settings))
    sizes = [(row["img_size"], row["crop_pct"]) for row in (each.summary() for each in report.evaluations)]
    assert sizes == [(28, 0.875), (28, 1.0), (45, 0.875), (45, 1.0)]
    assert all(each.num_images == 12 for each in report.evaluations)
    alone = validate(config(folder, weights, **settings | {"img_size": 45, "crop_pct": 1.0})).evaluations[0]
    assert rows_of(alone) == rows_of(report.evaluations[-1])


@pytest.mark.parametrize("below", ["", "test"])
def test_a_class_may_be_called_train(below, weights, tmp_path):
    """CIFAR-100 has one; a split's folder that holds it is no root of splits."""
    classes = ("blue", "green", "train")
    write_class_folder(tmp_path / "data" / "test", classes=classes)
    report = validate(config(tmp_path / "data" / below, weights, split="test"))
    assert tuple(report.class_names) == classes
    assert report.evaluations[0].num_images == 12


def test_autocast_channels_last_and_compile_run_through_the_same_counts(folder, weights):
    plain = validate(config(folder, weights)).evaluations[0]
    assert rows_of(validate(config(folder, weights, torchcompile="eager", channels_last=True)).evaluations[0]) == (
        rows_of(plain)
    )
    half = validate(config(folder, weights, amp_dtype="bfloat16")).evaluations[0]
    assert half.loss == pytest.approx(plain.loss, rel=0.05)
    assert half.loss != plain.loss


def test_summary_and_class_table_add_up(folder, weights):
    report = validate(config(folder, weights))
    evaluation = report.evaluations[0]
    summary, table = evaluation.summary(), evaluation.per_class(report.class_names)
    assert [row["class"] for row in table] == list(CLASSES)
    assert sum(row["images"] for row in table) == summary["images"] == 12
    assert sum(row["predicted"] for row in table) == 12
    assert sum(row["top1_correct"] for row in table) == summary["top1_correct"]
    assert summary["top1"] == pytest.approx(100 * summary["top1_correct"] / 12)
    assert summary["top5"] == 100  # of three classes


def test_the_tool_writes_json_and_csv_that_agree(folder, weights, tmp_path):
    output = tmp_path / "results"
    arguments = ["--model", "test_vit", "--num_classes", 3, "--checkpoint", weights, "--data_dir", folder]
    arguments += ["--img-size", "[64,96]", "--workers", 0, "--device", "cpu", "--output_dir", output]
    done = run_tool("validate", *arguments)
    assert done.code == 0, done.stderr
    assert done.stdout.count("top-1") == 2
    assert sorted(path.name for path in output.iterdir()) == [
        "per_class.csv",
        "predictions.csv",
        "results.csv",
        "results.json",
    ]
    content = json.loads((output / "results.json").read_text())
    rows = list(csv.DictReader((output / "results.csv").read_text().splitlines()))
    assert [float(row["top1"]) for row in rows] == [row["top1"] for row in content["results"]]
    predictions = list(csv.DictReader((output / "predictions.csv").read_text().splitlines()))
    assert len(predictions) == 24
    assert predictions[0]["file"] == "blue/blue_0.jpg"
    right = sum(row["target"] == row["predicted"] for row in predictions if row["img_size"] == "64")
    assert right == content["results"][0]["top1_correct"]
    assert content["config"]["img_size"] == [64, 96]


def test_shards_give_the_same_counts_as_the_folder(folder, weights, tmp_path):
    make_shards(ShardConfig(data_dir=str(folder), output=str(tmp_path), split="validation", shard_size=5))
    from_folder = validate(config(folder, weights)).evaluations[0]
    report = validate(config(tmp_path, weights, dataset="wds/", workers=1))  # webdataset leaves its files open
    assert sorted(rows_of(report.evaluations[0])) == sorted(rows_of(from_folder))
    assert report.class_names == list(CLASSES)


def test_a_class_map_lets_a_part_of_the_classes_be_evaluated(folder, tmp_path):
    weights = save_model(tmp_path / "model.safetensors", num_classes=5)
    names = tmp_path / "names.txt"
    names.write_text("red\nother\nblue\nanother\ngreen\n")
    report = validate(config(folder, weights, num_classes=5, class_map=str(names)))
    assert sorted(set(report.evaluations[0].targets)) == [0, 2, 4]
    assert report.class_names == ["red", "other", "blue", "another", "green"]


def test_the_sidecar_gives_model_classes_and_preprocessing(folder, tmp_path):
    weights = save_model(tmp_path / "model.safetensors", "test_resnet", num_classes=4)
    names = ("red", "blue", "green", "unseen")
    sizes = {"input_size": (3, 48, 64), "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "crop_pct": 1.0}
    sidecar = ModelSidecar(
        model="test_resnet", num_classes=4, class_names=names, interpolation="bilinear", model_kwargs={}, **sizes
    )
    write_sidecar(sidecar_path(weights), sidecar)
    report = validate(ValidateConfig(checkpoint=str(weights), data_dir=str(folder), workers=0, device="cpu"))
    assert report.model == "test_resnet"
    assert report.evaluations[0].summary()["img_size"] == [48, 64]
    assert report.evaluations[0].crop_pct == 1.0
    assert report.evaluations[0].targets == [1] * 4 + [2] * 4 + [0] * 4


def test_real_labels_accept_any_label_of_an_image_and_leave_out_unlabelled_ones(weights, tmp_path):
    for number in range(1, 7):
        write_image(tmp_path / f"{'ab'[number % 2]}/ILSVRC2012_val_{number:08d}.JPEG", seed=number)
    weights = save_model(tmp_path / "model.safetensors", num_classes=7)
    (tmp_path / "names.txt").write_text("a\nb\nc\nd\ne\nf\ng\n")
    labels = [[0, 1], [2], [], [0, 1, 2, 3, 4, 5, 6], [6], [3, 4]]
    (tmp_path / "real.json").write_text(json.dumps(labels))
    settings = {"class_map": str(tmp_path / "names.txt"), "num_classes": 7, "real_labels": str(tmp_path / "real.json")}
    (tmp_path / "images").mkdir()
    for name in "ab":
        shutil.move(tmp_path / name, tmp_path / "images" / name)
    report = validate(config(tmp_path / "images", weights, **settings))
    evaluation = report.evaluations[0]
    numbers = [int(name[-13:-5]) for name in report.files]
    hits = [guess in labels[number - 1] for number, guess in zip(numbers, evaluation.predicted, strict=True)]
    assert evaluation.summary()["real_top1"] == pytest.approx(100 * sum(hits) / 5)


def test_a_model_saved_for_the_hub_is_read_from_its_folder(folder, weights, tmp_path):
    source = ModelSource(model="test_vit", checkpoint=str(weights), num_classes=3)
    save_for_hf(load_model(source).model, tmp_path / "hub")
    report = validate(config(folder, "", model=f"local-dir:{tmp_path / 'hub'}", num_classes=None))
    assert rows_of(report.evaluations[0]) == rows_of(validate(config(folder, weights)).evaluations[0])


def test_a_training_checkpoint_gives_its_average_unless_told_otherwise(tmp_path):
    plain, average = (timm.create_model("test_vit", num_classes=3).state_dict() for _ in range(2))
    torch.save({"state_dict": plain, "state_dict_ema": average, "epoch": 1}, tmp_path / "last.pth")
    for use_ema, expected in ((True, average), (False, plain)):
        source = ModelSource(model="test_vit", num_classes=3, checkpoint=str(tmp_path / "last.pth"), use_ema=use_ema)
        state = load_model(source).model.state_dict()
        assert all(torch.equal(state[key], expected[key]) for key in expected)


class Payload:
    def __reduce__(self):
        return (print, ("executed",))


def test_a_checkpoint_that_holds_code_is_refused_and_nothing_of_it_runs(folder, tmp_path):
    torch.save({"state_dict": Payload()}, tmp_path / "evil.pth")
    arguments = ["--model", "test_vit", "--checkpoint", tmp_path / "evil.pth", "--data_dir", folder]
    done = run_tool("validate", *arguments)
    assert "evil.pth: cannot be read" in done.refused()
    assert "executed" not in done.stdout


@pytest.fixture(scope="module")
def bad(tmp_path_factory, folder):
    """Inputs a user can get wrong."""
    root = tmp_path_factory.mktemp("bad")
    (root / "empty").mkdir()
    shutil.copytree(folder, root / "hollow")
    (root / "hollow" / "white").mkdir()
    shutil.copytree(folder, root / "corrupt")
    (root / "corrupt" / "green" / "green_1.jpg").write_bytes(b"no image")
    shutil.copytree(folder, root / "truncated")
    cut = root / "truncated" / "red" / "red_2.png"
    cut.write_bytes(cut.read_bytes()[:300])
    shutil.copytree(folder, root / "splits" / "train")
    save_model(root / "other" / "model.safetensors", "test_resnet")
    (root / "garbage.safetensors").write_bytes(b"garbage")
    (root / "garbage.pth").write_bytes(b"garbage")
    (root / "names.txt").write_text("blue\ngreen\nyellow\n")
    (root / "real.json").write_text("[[1], [2]]")
    return root


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--data_dir", "{bad}/missing"], "missing: no such folder"),
        (["--data_dir", "{bad}/empty"], "Found 0 images"),
        (["--data_dir", "{bad}/hollow"], "white: class folder without an image"),
        (["--data_dir", "{bad}/corrupt"], "green_1.jpg: not an image"),
        (["--data_dir", "{bad}/truncated", "--workers", "1"], "red_2.png: corrupt image"),
        (["--data_dir", "{bad}/splits"], "split 'validation'"),
        (["--data_dir", "{bad}/splits", "--split", "train", "--num_classes", "4"], "of another shape"),
        (["--model", "test_vitt"], "unknown model 'test_vitt'"),
        (["--model", "some/where"], "no source prefix"),
        (["--model", "local-dir:{bad}/missing"], "cannot be built"),
        (["--checkpoint", "{bad}/missing.pth"], "missing.pth: no such file"),
        (["--checkpoint", "{bad}/garbage.safetensors"], "garbage.safetensors: cannot be read"),
        (["--checkpoint", "{bad}/garbage.pth"], "garbage.pth: cannot be read"),
        (["--checkpoint", "{bad}/names.txt"], "must end in one of"),
        (["--checkpoint", "{bad}/other/model.safetensors"], "not of model test_vit"),
        (["--model_kwargs", '{"colour": 1}'], "colour"),
        (["--class_map", "{bad}/names.txt"], "'red'"),
        (["--class_map", "{bad}/none.txt"], "none.txt: no such file"),
        (["--real_labels", "{bad}/real.json"], "ILSVRC2012_val"),
        (["--real_labels", "{bad}/names.txt"], "names.txt: cannot be read"),
        (["--device", "cuda:63"], "'cuda:63' is not available"),
        (["--img_size", "0"], "img_size"),
        (["--crop_pct", "1.5"], "crop_pct"),
        (["--batch_size", "none"], "batch_size"),
        (["--interpolation", "cubist"], "interpolation"),
        (["--torchcompile", "warp"], "unknown backend 'warp'"),
        (["--dataset", "wds/", "--data_dir", "{bad}/empty"], "has no _info.json"),
        (["--colour", "red"], "--colour"),
    ],
)
def test_a_mistake_ends_in_one_line_that_names_it(folder, weights, bad, arguments, named):
    defaults = ["--model", "test_vit", "--num_classes", 3, "--checkpoint", weights, "--data_dir", folder]
    defaults += ["--workers", 0, "--device", "cpu", "--batch_size", 4]
    done = run_tool("validate", *defaults, *(text.replace("{bad}", str(bad)) for text in arguments))
    assert named in done.refused()


def test_a_class_count_that_does_not_fit_the_head_is_refused(folder, tmp_path):
    weights = save_model(tmp_path / "model.safetensors", num_classes=4)
    done = run_tool(
        "validate", "--model", "test_vit", "--num_classes", 4, "--checkpoint", weights, "--data_dir", folder
    )
    assert "has 3 classes, model test_vit has 4" in done.refused()


def test_without_weights_or_model_the_line_says_what_to_give(folder):
    assert "give --model" in run_tool("validate", "--data_dir", folder).refused()
    assert "cannot be built" in run_tool("validate", "--model", "flash_gau_tiny", "--data_dir", folder).refused()
