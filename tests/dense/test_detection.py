"""Detectors through the loop: all four, any size, continuation to the bit, and what a run writes."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from detection_samples import FEW, change, config, make_loop, records, run, write_set
from PIL import Image
from tool_process import TOOLS, run_tool

from flash_vision.dense.coco_data import CocoSamples, read_coco
from flash_vision.dense.coco_eval import coco_results
from flash_vision.dense.detection import DetectionTask, collate_lists, create_detector, read_splits, to_device
from flash_vision.dense.detection_augment import DetectionAugment
from flash_vision.dense.detection_config import DetectionConfig
from flash_vision.dense.detection_model import fitted_size
from flash_vision.dense.detection_predict import DetectConfig, detect, draw, load_detector
from flash_vision.dense.draw import draw_detections
from flash_vision.dense.features import TimmFeatures
from flash_vision.train.signals import StopRequest, TrainingError

CPU = torch.device("cpu")
SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
CONFIGS = TOOLS.parent / "configs"
MASKS = {"detector": "mask_rcnn", "detector_kwargs": {**FEW, "box_detections_per_img": 5}}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_set(tmp_path_factory.mktemp("coco") / "set")


def task_of(settings: DetectionConfig) -> DetectionTask:
    train, val = read_splits(settings, masks=settings.detector == "mask_rcnn")
    model, _ = create_detector(settings, train)
    masks = settings.detector == "mask_rcnn"
    return DetectionTask(model, val, masks=masks, device=CPU, dtype=torch.float32)


def image_with(count: int, height: int, width: int) -> tuple[torch.Tensor, dict]:
    """An image of noise with `count` objects of 5 x 5 pixels."""
    corners = torch.rand(count, 2) * torch.tensor([width - 6.0, height - 6.0])
    masks = torch.zeros(count, height, width, dtype=torch.uint8)
    for mask, (x, y) in zip(masks, corners.long(), strict=True):
        mask[y : y + 5, x : x + 5] = 1
    boxes = torch.cat([corners, corners + 5], dim=1)
    target = {"boxes": boxes, "labels": torch.ones(count, dtype=torch.int64), "masks": masks, "image_id": count}
    return torch.rand(3, height, width), target


@pytest.mark.parametrize(
    ("detector", "model"),
    [
        ("faster_rcnn", "flash_pyramid_nano"), ("mask_rcnn", "test_resnet"), ("retinanet", "flash_pyramid_nano"),
        ("retinanet", "flash_gau_pico"), ("fcos", "test_resnet"),
    ],
)  # fmt: skip
def test_every_detector_trains_and_predicts_at_odd_and_mixed_sizes_with_and_without_objects(
    data, tmp_path, detector, model
):
    kwargs = MASKS["detector_kwargs"] if detector == "mask_rcnn" else FEW if detector == "faster_rcnn" else {}
    task = task_of(
        config(data, tmp_path / "run", detector=detector, model=model, detector_kwargs=kwargs, neck_channels=64)
    )
    pairs = [image_with(count, *size) for count, size in ((2, (51, 33)), (0, (40, 97)), (9, (64, 64)))]
    task.train()
    result = task([image for image, _ in pairs], [target for _, target in pairs])
    result["loss"].backward()
    assert torch.isfinite(result["loss"])
    assert float(result["loss"].detach()) == pytest.approx(
        sum(float(part.detach()) for name, part in result.items() if name != "loss"), rel=1e-5
    )
    assert all(parameter.grad is not None for parameter in task.parameters())
    sizes = [(51, 33), (1, 1), (3, 200), (64, 64)]  # among them smaller than any stride
    task.eval()
    with torch.inference_mode():
        outputs = task.trainable_module([torch.rand(3, *size) for size in sizes])
    for output, (height, width) in zip(outputs, sizes, strict=True):
        assert torch.isfinite(output["boxes"]).all()
        assert (output["boxes"] <= torch.tensor([width, height, width, height]) + 1e-3).all()
        if detector == "mask_rcnn":
            assert output["masks"].shape[1:] == (1, height, width)
    # an image without objects alone has a loss too
    task.train()
    assert torch.isfinite(task([pairs[1][0]], [pairs[1][1]])["loss"])


def test_an_image_of_125_instances_is_trained_on_and_as_many_are_found_drawn_and_listed(data, tmp_path):
    folder = SHARED / "pypi_samples"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    labels = np.asarray(Image.open(folder / "stardist_mask2d.png"))
    masks = torch.from_numpy(np.stack([labels == number for number in np.unique(labels)[1:]])).to(torch.uint8)
    assert len(masks) == 125
    rows, columns = masks.any(dim=2), masks.any(dim=1)
    boxes = torch.tensor(
        [
            [c.nonzero()[0], r.nonzero()[0], c.nonzero()[-1] + 1, r.nonzero()[-1] + 1]
            for r, c in zip(rows, columns, strict=True)
        ],
        dtype=torch.float32,
    )
    pixels = torch.from_numpy(np.asarray(Image.open(folder / "stardist_img2d.png").convert("RGB")).copy())
    target = {"boxes": boxes, "labels": torch.ones(125, dtype=torch.int64), "masks": masks, "image_id": 1}
    many = {"rpn_post_nms_top_n_train": 40, "rpn_post_nms_top_n_test": 300, "rpn_nms_thresh": 0.99}
    many |= {"box_detections_per_img": 150, "box_score_thresh": 0.0, "box_nms_thresh": 0.99}
    chosen = {"detector": "mask_rcnn", "detector_kwargs": many, "train_min_sizes": []}
    settings = config(data, tmp_path / "run", **chosen, min_size=256, max_size=256)
    augment = DetectionAugment(settings, fill=(0.0, 0.0, 0.0))
    image, smaller = augment(pixels.permute(2, 0, 1), target)
    assert image.shape == (3, 256, 256)
    assert len(smaller["boxes"]) == len(smaller["masks"]) == 125
    task = task_of(settings).train()
    result = task([image / 255], [smaller])
    result["loss"].backward()
    assert torch.isfinite(result["loss"])
    detector, spec = create_detector(settings, read_splits(settings, masks=True)[0])
    with torch.inference_mode():
        (found,) = detector.eval()([image / 255])
    assert len(found["boxes"]) == 150
    assert len(coco_results(found, 1, spec.category_ids)) == 150
    assert draw(image, found, spec, 0.0).ndim == 3


@pytest.mark.parametrize("settings", [{}, {"scale_jitter": [0.3, 2.0], "crop_size": 64, "train_min_sizes": []}])
def test_boxes_and_masks_go_with_their_image(data, tmp_path, settings):
    chosen = config(data, tmp_path / "run", hflip=0.5, vflip=0.5, **settings)
    split = read_coco(data / "train.json", data / "images", masks=True)
    samples = CocoSamples(split.images, DetectionAugment(chosen, fill=(0.0,) * 3), seed=1, training=True)
    seen = 0
    for index in range(len(samples)):
        for epoch in range(3):
            sample = samples[index, 0, epoch]
            height, width = sample.image.shape[1:]
            assert (height, width) == (64, 64) if settings else min(height, width) in (40, 56)
            for box, mask in zip(sample.target["boxes"], sample.target["masks"], strict=True):
                assert mask.shape == (height, width)
                y, x = mask.nonzero().unbind(1)
                found = torch.stack([x.min(), y.min(), x.max() + 1, y.max() + 1])
                assert (found - box).abs().max() <= 1.5, "the mask fills its box"
                seen += 1
            again = samples[index, 0, epoch]
            assert torch.equal(again.image, sample.image)
            assert torch.equal(again.target["boxes"], sample.target["boxes"])
    assert seen > 20


def test_a_run_counts_logs_evaluates_and_writes_what_a_user_loads(data, tmp_path):
    settings = config(data, tmp_path / "run", **MASKS, model_ema=True, eval_metric="mask_map", curves=True, epochs=1)
    found = run(settings)
    notes = [record for record in found if record["kind"] == "data"]
    assert [note["split"] for note in notes] == ["training images", "validation images"]
    assert [note["images"] for note in notes] == [6, 3]
    train = next(record for record in found if record["kind"] == "train")
    parts = [train[name] for name in train if name.startswith("loss_")]
    assert len(parts) == 5
    assert train["loss"] == pytest.approx(sum(parts), rel=1e-5)
    evaluation = next(record for record in found if record["kind"] == "eval")
    assert {"box_map", "box_map50", "mask_map", "mask_map_ema", "box_map/square"} <= evaluation.keys()
    assert evaluation["best"] == evaluation["mask_map_ema"]
    assert (settings.folder / "curves.png").is_file()
    detector, spec = load_detector(str(settings.folder / "model.safetensors"))
    assert spec.category_ids == (3, 90)
    averaged = torch.load(settings.folder / "checkpoints" / "last.pt", weights_only=True)["state_dict_ema"]
    assert all(torch.equal(value, averaged[name]) for name, value in detector.state_dict().items())


class KilledError(Exception):
    pass


@pytest.mark.parametrize(("detector", "kwargs"), [("faster_rcnn", FEW), ("fcos", {})])
def test_a_killed_and_a_stopped_run_go_on_as_if_nothing_had_been(data, tmp_path, detector, kwargs, monkeypatch):
    chosen = {"detector": detector, "detector_kwargs": kwargs, "neck_channels": 64, "epochs": 3}
    chosen |= {"recovery_interval": 2, "model_ema": True, "clip_grad": 1.0}
    whole = config(data, tmp_path / "whole", **chosen)
    expected = run(whole)
    broken = config(data, tmp_path / "broken", **chosen)
    stop = StopRequest()
    loop = make_loop(broken, stop)
    update = loop._update

    def killed(batches):
        if loop.progress.step == 5:  # between two saves
            raise KilledError
        return update(batches)

    monkeypatch.setattr(loop, "_update", killed)
    with pytest.raises(KilledError):
        loop.run()
    loop.folder.release()
    loop = make_loop(broken, stop)
    assert loop.progress.step == 4
    stop.signal = 15
    assert loop.run() == 75
    loop.folder.release()
    found = run(broken)
    keep = ("train", "eval")
    assert [r for r in found if r["kind"] in keep] == [r for r in expected if r["kind"] in keep]
    one, other = (
        torch.load(settings.folder / "checkpoints" / "last.pt", weights_only=True) for settings in (whole, broken)
    )
    for name in ("state_dict", "state_dict_ema"):
        assert all(torch.equal(value, other[name][key]) for key, value in one[name].items())
    assert records(broken)


def test_half_precision_changes_losses_by_rounding_only(data, tmp_path):
    first = run(config(data, tmp_path / "one", epochs=1))
    half = run(config(data, tmp_path / "half", epochs=1, amp=True))
    losses = [[r["loss"] for r in found if r["kind"] == "train"] for found in (first, half)]
    assert losses[1][0] == pytest.approx(losses[0][0], rel=0.1)
    assert losses[0] != losses[1]


def test_compilation_and_recomputation_change_nothing_that_matters(data, tmp_path):
    # one size, so one graph
    chosen = {"train_min_sizes": [], "scale_jitter": (0.5, 1.5), "crop_size": 64, "epochs": 1, "model_ema": True}
    losses = []
    for number, extra in enumerate(({}, {"torchcompile": "eager"}, {"grad_checkpointing": True})):
        found = run(config(data, tmp_path / str(number), **chosen, **extra))
        losses.append([r["loss"] for r in found if r["kind"] == "train"])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-3)


def test_an_image_that_cannot_be_read_is_replaced_counted_and_left_out(tmp_path):
    data = write_set(tmp_path / "set")
    for name in ("2.png", "7.png"):  # one to train on, one to evaluate
        (data / "images" / name).write_bytes(b"no image")
    found = run(config(data, tmp_path / "run", max_corrupt_fraction=0.5))
    named = {Path(r["file"]).name for r in found if r.get("event") == "corrupt"}
    assert named == {"2.png", "7.png"}
    assert [r["corrupt"] for r in found if r["kind"] == "train"][-1] == 2


def test_a_run_whose_validation_images_with_objects_cannot_be_read_ends_with_the_reason(tmp_path):
    data = write_set(tmp_path / "set")
    change(data / "val.json", lambda c: c.update(annotations=[a for a in c["annotations"] if a["image_id"] == 7]))
    (data / "images" / "7.png").write_bytes(b"no image")
    with pytest.raises(TrainingError, match="eval_metric box_map cannot be computed from the validation split"):
        run(config(data, tmp_path / "run", epochs=1, max_corrupt_fraction=0.5))


def test_images_without_objects_are_trained_on_or_skipped(tmp_path):
    data = write_set(tmp_path / "set")
    change(data / "train.json", lambda c: c.update(annotations=[a for a in c["annotations"] if a["image_id"] > 1]))
    for skip, images in ((False, 6), (True, 4)):
        loop = make_loop(config(data, tmp_path / str(skip), skip_empty=skip))
        loop.folder.release()
        assert loop.loader.num_images == images
        assert loop.notes["training images"]["images without objects"] == 2


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"detector": "retinanet", "eval_metric": "mask_map"}, "eval_metric must be of boxes without masks"),
        ({"detector": "fcos"}, "neck_channels must be a multiple of 32 from 64 on"),
        ({"detector": "fcos", "neck_channels": 64, "anchor_scale": 3.0}, "anchor_scale must be left out with fcos"),
        ({"min_size": 100}, r"max_size must be at least min_size \(100\), got 96"),
        ({"fsdp": True}, "fsdp must be false in detection"),
        ({"detector": "retinanet", "box_head_dim": 64}, "box_head_dim must be left out with retinanet"),
        ({"detector": "faster_rcnn", "mask_head_dim": 64}, "mask_head_dim must be left out with faster_rcnn"),
        ({"crop_size": 64}, "crop_size must be left out without scale_jitter, got 64"),
        ({"model_kwargs": {"in_chans": 1}}, "model_kwargs: in_chans must be 3"),
        ({"model_dtype": "bfloat16"}, "model_dtype must be float32 in detection"),
        ({"scale_jitter": (0.1, 2.0)}, "train_min_sizes must be left out with scale_jitter"),
        ({"data_dir": ""}, "data_dir must be given"),
        ({"hflip": 1.5}, r"hflip must be in \[0, 1\], got 1.5"),
        ({"mean": [0.1, 0.2]}, r"mean must be 1 or 3 numbers, got \[0.1, 0.2\]"),
        ({"val_json": "none.json"}, "none.json: no such file"),
        ({"train_images": "none"}, "none: no such folder"),
        ({"batch_size": 7}, "batch_size must leave an update of at most 6 images"),
        ({"opt": "adamx"}, "opt adamx"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(data, tmp_path, settings, line):
    with pytest.raises(ValueError, match=line):
        make_loop(config(data, tmp_path / "run", **settings))
    assert not (tmp_path / "run").exists()


def test_splits_without_objects_or_with_other_categories_are_refused(tmp_path):
    data = write_set(tmp_path / "set")
    change(data / "val.json", lambda c: c["categories"][0].update(name="circle"))
    with pytest.raises(ValueError, match=r"val.json: its categories must be those of train.json"):
        make_loop(config(data, tmp_path / "run"))
    change(data / "val.json", lambda c: c["annotations"].clear())
    with pytest.raises(ValueError, match=r"val.json: holds no object"):
        make_loop(config(data, tmp_path / "run"))


@pytest.mark.parametrize(
    ("size", "expected"), [((480, 640), (240, 320)), ((640, 480), (320, 240)), ((1, 999), (1, 320))]
)
def test_images_are_fitted_without_losing_a_side(size, expected):
    assert fitted_size(*size, 240, 320) == expected


def test_what_is_found_is_listed_drawn_and_evaluated(data, tmp_path):
    settings = config(data, tmp_path / "run", **MASKS, epochs=1)
    run(settings)
    (tmp_path / "broken.png").write_bytes(b"no image")
    chosen = {"checkpoint": str(settings.folder / "model.safetensors"), "device": "cpu", "score_threshold": 0.0}
    files = [str(tmp_path / "broken.png"), str(data / "images" / "1.png")]
    outputs = {"picture_dir": str(tmp_path / "pictures"), "json_file": str(tmp_path / "found.json")}
    search = detect(DetectConfig(images=files, **chosen, **outputs, skip_corrupt=True))
    found = search.detections
    assert search.figures == {}
    assert found[0].error == "not an image"
    assert found[1].objects
    listed = json.loads((tmp_path / "found.json").read_text())
    assert listed[1]["objects"][0].keys() == {"label", "category_id", "score", "box"}
    with Image.open(tmp_path / "pictures" / "1.png") as picture:
        assert picture.size == (640, 480), "a small image is enlarged until its labels can be read"
    with pytest.raises(ValueError, match=r"broken.png: not an image"):
        detect(DetectConfig(images=files, **chosen))
    outputs = {"coco_file": str(tmp_path / "results.json"), "metrics_file": str(tmp_path / "metrics.json")}
    settings_of_set = {"images": [str(data / "images")], "annotations": str(data / "val.json")}
    search = detect(DetectConfig(**settings_of_set, **chosen, **outputs))
    logged = [record for record in records(settings) if record["kind"] == "eval"][-1]
    assert search.figures == {name: logged[name] for name in search.figures}
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"images": 3, **search.figures}
    assert search.annotated["images"] == 3
    results = json.loads((tmp_path / "results.json").read_text())
    assert {row["image_id"] for row in results} <= {6, 7, 8}
    assert {row["category_id"] for row in results} <= {3, 90}
    assert results[0]["segmentation"]["size"]


def test_an_image_of_another_size_than_its_annotations_is_no_part_of_the_figures(data, tmp_path):
    settings = config(data, tmp_path / "run", epochs=1)
    run(settings)
    with Image.open(data / "images" / "7.png") as image:
        image.resize((128, 96)).save(data / "images" / "7.png")
    chosen = {"checkpoint": str(settings.folder / "model.safetensors"), "device": "cpu"}
    chosen |= {"images": [str(data / "images")], "annotations": str(data / "val.json")}
    with pytest.raises(ValueError, match=r"7.png: height and width are \(96, 128\), in the annotations \(48, 64\)"):
        detect(DetectConfig(**chosen))
    metrics_file = tmp_path / "metrics.json"
    search = detect(DetectConfig(**chosen, skip_corrupt=True, metrics_file=str(metrics_file)))
    assert [found.error is None for found in search.detections] == [True, False, True]
    assert json.loads(metrics_file.read_text())["images"] == 2
    for name in ("6", "7", "8"):
        (data / "images" / f"{name}.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"val.json: none of its 3 images can be read"):
        detect(DetectConfig(**chosen, skip_corrupt=True))


def test_a_caption_that_would_hide_another_one_or_an_object_is_left_out():
    image = torch.zeros(3, 480, 640, dtype=torch.uint8)
    one, twin, above = [50.0, 60, 200, 200], [52.0, 61, 200, 200], [51.0, 50, 57, 58]

    def shows(boxes, captions):
        """Whether each caption changes the picture."""
        boxes, labels = torch.tensor(boxes), [0] * len(boxes)
        whole = draw_detections(image, boxes, labels, captions)
        others = [[*captions[:i], "i", *captions[i + 1 :]] for i in range(len(captions))]
        return [not torch.equal(draw_detections(image, boxes, labels, other), whole) for other in others]

    assert draw_detections(image[:, :1], torch.zeros(0, 4), [], []).shape == (3, 3, 1920)  # 1 x 640 pixels
    assert shows([one], ["cell"]) == [True]
    assert shows([one, twin], ["cell", "cell"]) == [True, False]
    assert shows([one, above], ["cell", "cell"]) == [False, True]


@pytest.mark.parametrize(
    "path",
    sorted(path for name in ("coco", "bccd", "nuclei") for path in (CONFIGS / name).glob("*.yaml")),
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_a_shipped_config_is_valid_and_says_how_it_is_run(path):
    text = path.read_text()
    DetectionConfig(**{"data_dir": "images", **yaml.safe_load(text)})
    header = text.partition("\nmodel:")[0].lower()
    for word in ("python tools/", "hardware", "time", "accuracy"):
        assert word in header or (word == "python tools/" and "torchrun" in header), word


@pytest.mark.parametrize(("length", "milestones"), [("1x", (8, 11)), ("3x", (27, 33))])
def test_the_shipped_schedules_decay_where_their_names_say(tmp_path, length, milestones):
    recipe = yaml.safe_load((CONFIGS / "coco" / f"mask_rcnn_flash_pyramid_tiny_{length}.yaml").read_text())
    names = ("epochs", "lr", "sched", "decay_milestones", "decay_rate", "warmup_epochs")
    settings = config(
        write_set(tmp_path / "set", train=2),
        tmp_path / "run",
        val_interval=99,
        **{name: recipe[name] for name in names},
    )
    rates = [record["lr"] for record in run(settings) if "loss" in record]
    first, second = milestones
    assert len(rates) == recipe["epochs"] == {"1x": 12, "3x": 36}[length]  # one update each
    assert rates[0] < 0.1 * recipe["lr"]  # the warm-up
    factors = [1.0] * (first - 1) + [0.1] * (second - first) + [0.01] * (len(rates) - second)
    assert rates[1:] == pytest.approx([recipe["lr"] * factor for factor in factors])


def test_peers_take_the_place_of_nano_and_two_have_its_size():
    recipe = yaml.safe_load((CONFIGS / "bccd" / "faster_rcnn.yaml").read_text())
    sizes = {}
    for path in [None, *(CONFIGS / "peers").glob("*.yaml")]:
        changes = yaml.safe_load(path.read_text()) if path else {}
        assert changes.keys() <= {"model", "model_kwargs"}
        chosen = DetectionConfig(**{"data_dir": "images", **recipe, **changes})
        features = TimmFeatures(chosen.model, model_kwargs=chosen.model_kwargs)
        assert features.strides == [4, 8, 16, 32]
        sizes[path.stem if path else "nano"] = sum(parameter.numel() for parameter in features.parameters())
    assert sizes.keys() == {"nano", "resnet18", "resnet18_half", "swin_nano"}
    assert sizes["resnet18"] > 3.5 * sizes["nano"]
    assert all(abs(sizes[name] / sizes["nano"] - 1) < 0.05 for name in ("resnet18_half", "swin_nano")), sizes


def test_a_batch_reaches_the_detector_as_it_asks_for_it(data):
    split = read_coco(data / "train.json", data / "images", masks=True)
    samples = CocoSamples(split.images, None, seed=0, training=True)
    batch = to_device(collate_lists([samples[i, 0, 0] for i in range(2)]), 0, device=CPU, dtype=torch.float32)
    assert [tuple(image.shape) for image in batch.inputs] == [(3, 56, 40), (3, 48, 64)]
    assert 0 <= float(batch.inputs[0].min()) < float(batch.inputs[0].max()) <= 1
    assert batch.targets[1]["image_id"] == 1


def test_the_tools_document_every_option_and_refuse_others_in_one_line(data):
    text = " ".join(run_tool("train_detection", "--help").stdout.split())
    for field in dataclasses.fields(DetectionConfig):
        described = text.rpartition(f"--{field.name} ")[2]
        assert described.partition("(type:")[0].count(" ") >= 3, f"{field.name} has no help"
    assert "unrecognized arguments: --anchor_sizes" in run_tool("train_detection", "--anchor_sizes", 32).refused()
    refusal = run_tool("detect", data / "images", "--checkpoint", data / "none.safetensors").refused()
    assert "none.safetensors: no such file" in refusal


def test_a_detector_learns_to_find_what_it_is_shown(tmp_path):
    data = write_set(tmp_path / "set", train=48, validation=16)
    chosen = {"detector_kwargs": {**FEW, "box_batch_size_per_image": 32}, "min_size": 64, "train_min_sizes": []}
    chosen |= {"neck_channels": 64, "box_head_dim": 64, "batch_size": 8, "epochs": 8, "val_interval": 8}
    found = run(config(data, tmp_path / "run", **chosen, lr=2e-3, clip_grad=5.0, photometric=0.0, warmup_epochs=1))
    assert found[-1]["box_map50"] > 0.5
