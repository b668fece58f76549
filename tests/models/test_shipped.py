"""The weights in the package: complete, small, found by timm without a network, as accurate as their cards say."""

import json
import math
import re
import socket
import tarfile
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.data import create_transform, resolve_data_config

from flash_vision.models.shipped import WEIGHTS, shipped_cfg
from flash_vision.train.model_source import ModelSource, load_model

NAMES = ("flash_gau_pico.cifar100", "flash_gau_pico.eurosat")
README = Path(__file__).resolve().parents[2] / "README.md"
SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
# tar of the test images, how many of each class are taken here
TEST_IMAGES = {
    "flash_gau_pico.cifar100": ("cifar100/cifar100-test-0.tar", 10),
    "flash_gau_pico.eurosat": ("eurosat5k/eurosat5k-val.tar", 50),
}
ALL = pytest.mark.parametrize("name", NAMES)


def test_the_folders_are_what_timm_lists():
    assert sorted(folder.name for folder in WEIGHTS.iterdir()) == sorted(NAMES)
    assert sorted(timm.list_pretrained("flash_*")) == sorted(NAMES)


@ALL
def test_size_precision_and_card(name):
    folder = WEIGHTS / name
    weights = folder / "model.safetensors"
    assert weights.stat().st_size <= 3_000_000
    assert all(value.dtype == torch.float16 and value.isfinite().all() for value in load_file(weights).values())
    card = (folder / "README.md").read_text()
    assert [line for line in card.splitlines() if line.startswith("## ")] == [
        "## Use", "## Data", "## Licence", "## Recipe", "## Accuracy", "## Limits"
    ]  # fmt: skip
    assert 0 < card_accuracy(name) < 100


def card_accuracy(name):
    """Top-1 in percent on the test images, by the table of the model card."""
    (figure,) = re.findall(r"^\| top-1 \| ([\d.]+)% \|", (WEIGHTS / name / "README.md").read_text(), re.MULTILINE)
    return float(figure)


@ALL
def test_the_readme_has_the_figure_of_the_card(name):
    (row,) = [line for line in README.read_text().splitlines() if line.startswith(f"| [`{name}`](")]
    (figure,) = re.findall(r"\| ([\d.]+)% \|", row)
    assert float(figure) == card_accuracy(name)
    (link,) = re.findall(r"\]\((.*?)\)", row)
    assert README.parent / link == WEIGHTS / name / "README.md"


@ALL
def test_timm_loads_them_without_a_network(name, monkeypatch):
    def refuse(*_):
        raise AssertionError("a network was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    model = timm.create_model(name, pretrained=True)
    stored = load_file(WEIGHTS / name / "model.safetensors")
    state = model.state_dict()
    assert state.keys() == stored.keys()
    for key, value in state.items():
        torch.testing.assert_close(value, stored[key].float(), rtol=0, atol=0)
    assert model.num_classes == len(model.pretrained_cfg["label_names"]) == shipped_cfg(name)["num_classes"]
    # as any pretrained model of timm: a new head, other channels, another size
    other = timm.create_model(name, pretrained=True, num_classes=3, in_chans=1, img_size=48).eval()
    assert other(torch.zeros(1, 1, 48, 48)).shape == (1, 3)
    torch.testing.assert_close(other.blocks[5].unit.proj.weight, model.blocks[5].unit.proj.weight)


@ALL
def test_the_tools_know_their_classes(name):
    loaded = load_model(ModelSource(model=name))
    described = json.loads((WEIGHTS / name / "model.json").read_text())
    assert loaded.class_names == tuple(described["class_names"])
    by_file = load_model(ModelSource(checkpoint=str(WEIGHTS / name / "model.safetensors")))
    assert by_file.class_names == loaded.class_names
    # a head of another width has none of these classes
    assert load_model(ModelSource(model=name, num_classes=3)).class_names is None


@ALL
@torch.inference_mode()
def test_accuracy_of_the_card_on_real_test_images(name):
    path, per_class = TEST_IMAGES[name]
    if not (SHARED / path).is_file():
        pytest.skip(f"{SHARED / path} is not there")
    model = timm.create_model(name, pretrained=True).eval()
    transform = create_transform(**resolve_data_config({}, model=model))
    class_names = model.pretrained_cfg["label_names"]
    taken: dict[str, list[torch.Tensor]] = {label: [] for label in class_names}
    with tarfile.open(SHARED / path) as archive:
        for member in archive:
            label = Path(member.name).parent.name
            if member.isfile() and len(taken.get(label, [0] * per_class)) < per_class:
                taken[label].append(transform(Image.open(archive.extractfile(member)).convert("RGB")))
    count = sum(map(len, taken.values()))
    assert count == per_class * len(class_names)
    right = sum((model(torch.stack(images)).argmax(1) == i).sum().item() for i, images in enumerate(taken.values()))
    expected = card_accuracy(name) / 100
    # three standard errors of a sample of that size
    assert abs(right / count - expected) < 3 * math.sqrt(expected * (1 - expected) / count)
