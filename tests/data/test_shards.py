"""Shards: every byte of every image, in an order the seed decides, resumed after a kill, and read by timm."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.dataset_factory import create_dataset
from timm.data.loader import create_loader
from tool_process import TOOLS, run_tool

from flash_vision.data.shards import ShardConfig, _sole_writer, make_shards


def write_image(path, number):
    """8 x 6 pixels of `number` in a PNG or JPEG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((6, 8, 3), number, dtype=np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path):
    for index, name in enumerate(("ant", "bee", "cat")):
        for number in range(7):
            write_image(tmp_path / "images" / name / f"{number}.{'png' if number % 2 else 'jpg'}", 80 * index + number)
    return tmp_path / "images"


def config(folder, output, **changes):
    return ShardConfig(**{"data_dir": str(folder), "output": str(output), "shard_size": 4} | changes)


def members(output, entry):
    """(image bytes, class index, meta) of every sample, in order."""
    samples = []
    for name in entry["filenames"]:
        with tarfile.open(output / name) as tar:
            content = [tar.extractfile(member).read() for member in tar]
        samples += [(content[i], int(content[i + 1]), json.loads(content[i + 2])) for i in range(0, len(content), 3)]
    return samples


def contents(output):
    return {path.name: path.read_bytes() for path in sorted(output.iterdir())}


def test_every_image_is_there_once_byte_for_byte_with_its_class(folder, tmp_path):
    entry = make_shards(config(folder, tmp_path / "out"))
    assert entry["num_samples"] == sum(entry["shard_lengths"]) == 21
    assert entry["shard_lengths"] == [4, 4, 4, 4, 4, 1]
    samples = members(tmp_path / "out", entry)
    assert len({meta["filename"] for _, _, meta in samples}) == 21
    for content, target, meta in samples:
        assert content == (folder / meta["filename"]).read_bytes()
        assert meta["class"] == ("ant", "bee", "cat")[target] == meta["filename"].split("/")[0]
    info = json.loads((tmp_path / "out" / "_info.json").read_text())
    assert info["class_names"] == ["ant", "bee", "cat"]
    assert info["splits"]["train"] == entry
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def test_the_seed_decides_the_order(folder, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_shards(config(folder, tmp_path / name, seed=seed))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    names = [
        [meta["filename"] for _, _, meta in members(tmp_path / name, json.loads(text)["splits"]["train"])]
        for name, text in ((name, (tmp_path / name / "_info.json").read_text()) for name in "ac")
    ]
    assert names[0] != names[1]
    assert sorted(names[0]) == sorted(names[1]) != names[0]


def test_timm_reads_every_sample_of_each_split(folder, tmp_path):
    make_shards(config(folder, tmp_path / "out"))
    make_shards(config(folder, tmp_path / "out", split="validation", shard_size=21))
    for split in ("train", "validation"):
        dataset = create_dataset("wds/", root=str(tmp_path / "out"), split=split)
        assert len(dataset) == 21
        loader = create_loader(
            dataset, (3, 6, 8), 5, num_workers=1, device=torch.device("cpu"), persistent_workers=False
        )
        targets = torch.cat([targets for _, targets in loader])
        assert torch.bincount(targets).tolist() == [7, 7, 7]
    training = create_dataset("wds/", root=str(tmp_path / "out"), split="train", is_training=True, batch_size=7)
    assert len(training) == 21


def test_names_that_webdataset_would_cut_or_merge_stay_apart(tmp_path):
    names = ("a/x.1.jpg", "a/x.2.jpg", "a/x_1.jpg", "a/y.jpg", "a/y.png", "b.c/y.jpg")
    for number, name in enumerate(names):
        write_image(tmp_path / "images" / name, number)
    make_shards(config(tmp_path / "images", tmp_path / "out", shard_size=100))
    dataset = create_dataset("wds/", root=str(tmp_path / "out"), split="train")
    loader = create_loader(dataset, (3, 6, 8), 9, num_workers=1, device=torch.device("cpu"), persistent_workers=False)
    assert sum(len(targets) for _, targets in loader) == len(names)


def test_corrupt_images_are_all_named_and_refused_and_the_rest_is_not_made_again(folder, tmp_path):
    for name in ("ant/1.png", "cat/4.jpg"):
        (folder / name).write_bytes(b"broken")
    with pytest.raises(ValueError, match="2 corrupt images") as error:
        make_shards(config(folder, tmp_path / "out"))
    assert "ant/1.png: not an image" in str(error.value)
    assert "cat/4.jpg: not an image" in str(error.value)
    assert not (tmp_path / "out" / "_info.json").exists()
    made = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tar")}
    assert 4 <= len(made) < 6
    entry = make_shards(config(folder, tmp_path / "out", corrupt="skip"))
    assert entry["num_samples"] == 19
    assert set(entry["corrupt"]) == {"ant/1.png", "cat/4.jpg"}
    assert all((tmp_path / "out" / name).stat().st_mtime_ns == when for name, when in made.items())
    assert make_shards(config(folder, tmp_path / "other", corrupt="keep"))["num_samples"] == 21


def test_a_finished_split_is_left_alone_and_another_one_is_refused(folder, tmp_path):
    entry = make_shards(config(folder, tmp_path / "out"))
    before = contents(tmp_path / "out")
    assert make_shards(config(folder, tmp_path / "out")) == entry
    with pytest.raises(ValueError, match="finished split 'train' of other images, seed or shard_size"):
        make_shards(config(folder, tmp_path / "out", seed=1))
    write_image(tmp_path / "two" / "ant" / "1.png", 1)
    write_image(tmp_path / "two" / "dog" / "1.png", 2)
    with pytest.raises(ValueError, match="other classes"):
        make_shards(config(tmp_path / "two", tmp_path / "out", split="validation"))
    assert contents(tmp_path / "out") == before


def test_a_half_written_progress_line_costs_one_shard(folder, tmp_path):
    make_shards(config(folder, tmp_path / "whole"))
    (folder / "bee" / "3.png").rename(tmp_path / "kept.png")
    (folder / "bee" / "3.png").write_bytes(b"x" * (tmp_path / "kept.png").stat().st_size)
    with pytest.raises(ValueError, match="corrupt"):
        make_shards(config(folder, tmp_path / "out"))
    (tmp_path / "kept.png").replace(folder / "bee" / "3.png")
    progress = tmp_path / "out" / ".train.progress.jsonl"
    progress.write_text(progress.read_text()[:-9])
    make_shards(config(folder, tmp_path / "out"))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_killed_run_goes_on_and_ends_as_an_undisturbed_one(folder, tmp_path):
    for number in range(600):
        name = folder / "bee" / f"more_{number}.png"
        name.write_bytes((folder / "bee" / "1.png").read_bytes())
    make_shards(config(folder, tmp_path / "whole"))
    command = [sys.executable, TOOLS / "make_shards.py", "--data_dir", folder, "--output", tmp_path / "out"]
    process = subprocess.Popen([*map(str, command), "--shard_size", "4"])
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out").glob("*.tar")) and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    made = len(list((tmp_path / "out").glob("*.tar")))
    assert 0 < made < 156
    assert not (tmp_path / "out" / "_info.json").exists()
    for path in (tmp_path / "out").glob("*.tar"):
        assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()
    (tmp_path / "out" / ".train-000150.tar.12345.tmp").write_text("what a kill leaves behind")
    make_shards(config(folder, tmp_path / "out"))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_second_run_into_the_same_folder_is_refused_while_the_first_one_writes(folder, tmp_path):
    with _sole_writer(tmp_path), pytest.raises(ValueError, match="another run is writing there"):
        make_shards(config(folder, tmp_path))
    assert make_shards(config(folder, tmp_path))["num_samples"] == 21


def test_several_processes_make_the_same_shards(folder, tmp_path):
    make_shards(config(folder, tmp_path / "one"))
    make_shards(config(folder, tmp_path / "two", workers=1))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--data_dir", "{tmp}/missing"], "missing: no such folder"),
        (["--data_dir", "{tmp}/empty"], "empty: holds no class folder"),
        (["--data_dir", "{tmp}/hollow"], "a: class folder without an image"),
        (["--data_dir", "{tmp}/corrupt"], "1 corrupt images"),
        (["--data_dir", "{tmp}/corrupt", "--corrupt", "skip"], "none of its 1 images can be read"),
        (["--output", "{tmp}/foreign"], "not written by this tool"),
        (["--output", "{tmp}/strange"], "train-000000.tar: already there"),
        (["--output", "{tmp}/file"], "file"),
        (["--shard_size", "0"], "shard_size must be >= 1"),
        (["--split", "a-b"], "split must be"),
        (["--corrupt", "ignore"], "corrupt"),
        (["--output"], "output"),
    ],
)
def test_a_mistake_ends_in_one_line_and_nothing_is_overwritten(folder, tmp_path, arguments, named):
    for name in ("empty", "hollow/a", "corrupt/a", "foreign", "strange"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("corrupt/a/1.jpg", "foreign/_info.json", "strange/train-000000.tar", "file"):
        (tmp_path / name).write_bytes(io.BytesIO(b"[1]").read())
    filled = [text.replace("{tmp}", str(tmp_path)) for text in arguments]
    done = run_tool("make_shards", "--data_dir", folder, "--output", tmp_path / "out", *filled)
    assert named in done.refused()
    assert (tmp_path / "strange" / "train-000000.tar").read_bytes() == b"[1]"
    assert not (tmp_path / "out" / "_info.json").exists()


def test_the_tool_says_what_it_made_and_what_it_left_out(folder, tmp_path):
    (folder / "ant" / "0.jpg").write_bytes(b"")
    done = run_tool("make_shards", "--data_dir", folder, "--output", tmp_path / "out", "--corrupt", "skip")
    assert done.code == 0
    assert "20 images in 1 shards, 1 corrupt left out" in done.stdout
    assert "left out ant/0.jpg: not an image" in done.stderr
