"""Images: the same pixels however they are loaded, and any source timm reads."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from training import start, train, write_images

from flash_vision.data.holdout import split_class_folder
from flash_vision.data.shards import ShardConfig, make_shards
from flash_vision.train.augment import ToDevice, training_transform
from flash_vision.train.config import TrainConfig
from flash_vision.train.data import Batch, TrainLoader
from flash_vision.train.parallel import Processes
from flash_vision.train.sources import ImageSamples, find_split, open_split

CPU = torch.device("cpu")
PREPROCESSING = {
    "input_size": (3, 16, 16), "mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bilinear", "crop_pct": 1.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"))


def make_loader(data: Path, **settings) -> TrainLoader:
    config = TrainConfig(**{
        "data_dir": str(data), "batch_size": 8, "workers": 0, "aa": "rand-m9-mstd0.5", "reprob": 0.5, "mixup": 0.8,
        "cutmix": 1.0, "mixup_mode": "elem", **settings,
    })  # fmt: skip
    to_device = ToDevice(
        PREPROCESSING, device=CPU, dtype=torch.float32, seed=config.seed, augment=config, num_classes=3
    )
    transform = training_transform(config, PREPROCESSING)
    samples = open_split(config, training=True).samples(transform, config, rank=0, training=True)
    processes = Processes(device=CPU)
    return TrainLoader(samples, config, batch_size=config.batch_size, processes=processes, prepare=to_device)


def batches(loader: TrainLoader, epoch: int = 1, consumed: int = 0) -> list[Batch]:
    return [loader.prepare(batch, epoch) for update in loader.updates(epoch, consumed) for batch in update]


def assert_equal(found: list[Batch], expected: list[Batch]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)


def test_pixels_do_not_depend_on_the_workers(data):
    expected = batches(make_loader(data))
    for workers in (1, 2):
        assert_equal(batches(make_loader(data, workers=workers)), expected)


def test_pixels_do_not_depend_on_what_else_draws_random_numbers(data):
    loader = make_loader(data)
    first = batches(loader)
    torch.manual_seed(99)
    torch.rand(7)
    assert_equal(batches(loader), first)


def test_an_epoch_is_taken_up_in_its_middle_without_decoding_what_was_consumed(data, monkeypatch):
    loader = make_loader(data)
    expected = batches(loader)
    reads: list[int] = []
    read = ImageSamples.read
    monkeypatch.setattr(ImageSamples, "read", lambda self, index: reads.append(index) or read(self, index))
    assert_equal(batches(loader, consumed=32), expected[4:])
    assert len(reads) == 16


def test_epochs_and_seeds_differ(data):
    first = batches(make_loader(data))[0].inputs
    assert not torch.equal(first, batches(make_loader(data), epoch=2)[0].inputs)
    assert not torch.equal(first, batches(make_loader(data, seed=2))[0].inputs)


def test_loading_leaves_the_random_state_alone(data):
    state = torch.get_rng_state()
    batches(make_loader(data))
    assert torch.equal(torch.get_rng_state(), state)


def test_mixing_ends_at_its_epoch(data):
    loader = make_loader(data, mixup_off_epoch=2)
    for epoch, pure in ((1, False), (2, True)):
        targets = torch.cat([batch.targets for batch in batches(loader, epoch)])
        assert bool((targets.max(dim=1).values > 0.9).all()) is pure


def test_a_split_is_never_the_whole_folder(data):
    assert find_split(str(data), "train").name == "train"
    assert find_split(str(data), "val").name == "validation"
    with pytest.raises(ValueError, match="holds no split 'validation'"):
        find_split(str(data / "train"), "validation")


def test_folder_and_tar_hold_the_same_images(data, tmp_path):
    for split in ("train", "validation"):
        with tarfile.open(tmp_path / f"{split}.tar", "w") as archive:
            archive.add(data / split, arcname=".")
    assert_equal(batches(make_loader(tmp_path, workers=1)), batches(make_loader(data)))


def test_a_missing_class_in_validation_does_not_shift_the_others(tmp_path):
    data = write_images(tmp_path / "images")
    for file in (data / "validation" / "class0").iterdir():
        file.unlink()
    (data / "validation" / "class0").rmdir()
    config = TrainConfig(data_dir=str(data))
    trained = open_split(config, training=True)
    opened = open_split(config, training=False, class_to_idx=trained.class_to_idx)
    assert {target for _, target in opened.dataset.reader.samples} == {1, 2}


def test_a_class_folder_is_split_the_same_way_each_time(data, tmp_path):
    for name in ("one", "other"):
        split_class_folder(data / "train", tmp_path / name)
    one, other = (
        sorted(str(file.relative_to(tmp_path / name)) for file in (tmp_path / name).rglob("*.jpg"))
        for name in ("one", "other")
    )
    assert one == other
    assert len(one) == 48
    assert sum(name.startswith("validation") for name in one) == 12
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="is no split of a class folder"):
        split_class_folder(data / "train", tmp_path / "mine")


@pytest.fixture(scope="module")
def shards(tmp_path_factory, data) -> Path:
    pytest.importorskip("webdataset", reason="webdataset is not installed")
    root = tmp_path_factory.mktemp("shards")
    for split in ("train", "validation"):
        make_shards(ShardConfig(data_dir=str(data / split), output=str(root), split=split, shard_size=8))
    return root


def wds_settings(**settings):
    return {"dataset": "wds/", "workers": 1, "num_classes": 3, "epochs": 4, "recovery_interval": 1, **settings}


def test_shards_are_continued_in_mid_epoch_to_the_bit(shards, tmp_path):
    whole = train(tmp_path / "whole", shards, **wds_settings())
    run = start(tmp_path / "run", shards, **wds_settings())
    while len(run.losses()) < 9:
        assert run.processes[0].is_alive(), run.output
    run.signal(15)
    assert run.finish() == 75, run.output
    assert start(tmp_path / "run", shards, **wds_settings()).finish_well().losses() == whole.losses()
    assert whole.evaluations()[-1] == start(tmp_path / "run", shards, **wds_settings()).finish_well().evaluations()[-1]


def test_each_image_of_a_validation_shard_counts_once_over_processes(shards, tmp_path):
    still = {"epochs": 1, "lr": 1e-12, "min_lr": 0.0, "warmup_epochs": 0}
    one = train(tmp_path / "one", shards, **wds_settings(**still))
    two = start(tmp_path / "two", shards, processes=2, **wds_settings(**still, batch_size=4)).finish_well()
    assert two.evaluations()[0]["loss"] == pytest.approx(one.evaluations()[0]["loss"], abs=1e-5)
    assert two.evaluations()[0]["top1"] == pytest.approx(one.evaluations()[0]["top1"])


@pytest.mark.parametrize(
    ("settings", "line"),
    [({"workers": 0}, "workers must be at least 1"), ({"drop_last": False}, "drop_last must be true")],
)
def test_what_a_stream_cannot_keep_is_refused(shards, tmp_path, settings, line):
    assert line in start(tmp_path / "run", shards, **wds_settings(**settings)).refusal


AN_ERROR_NOBODY_CATCHES = """
import sys
from types import SimpleNamespace
import torch
from flash_vision.train.data import _loader

settings, processes = SimpleNamespace(workers=1), SimpleNamespace(device=torch.device("cpu"))
for batch in _loader(torch.zeros(64, 1), settings, processes, torch.stack, persistent=sys.argv[1] == "True"):
    raise RuntimeError("a bug")
"""


@pytest.mark.parametrize("persistent", [True, False])
def test_an_error_nobody_catches_ends_the_process_and_its_workers(persistent):
    command = [sys.executable, "-c", AN_ERROR_NOBODY_CATCHES, str(persistent)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 1
    assert run.stderr.strip().endswith("RuntimeError: a bug")
