"""A laboratory small enough for tests: three classes of noise in tar files, a network of two tiny blocks."""

import io
import tarfile

import numpy as np
import pytest
import yaml
from PIL import Image

VIT = {
    "model": "test_vit",
    "model_kwargs": {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2},
}
GRID = {
    "about": "A grid for tests.",
    "images": {"train": ["noise/*-train.tar"], "classes": 3, "validation_per_class": 8, "train_per_class": 16},
    "recipe": {
        "img_size": 16, "batch_size": 8, "workers": 0, "epochs": 2, "warmup_epochs": 1, "lr": 2e-3, "log_interval": 1,
        "recovery_interval": 1, "curves": False, "tensorboard": False,
    },
    "seeds": [0],
    "variants": {"vit": VIT, "vit-one-head": {"extends": "vit", "model_kwargs": {"num_heads": 1}}},
    "groups": {"heads": {"question": "How many heads?", "variants": ["vit", "vit-one-head"]}},
}  # fmt: skip


@pytest.fixture
def write_grid(tmp_path):
    """Writes GRID with other values for some of its keys; returns the file."""

    def write(name="tiny", **changes):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**GRID, **changes}, sort_keys=False))
        return path

    return write


@pytest.fixture(scope="session")
def data_root(tmp_path_factory):
    """noise/{a-train,b-train,c-test}.tar of SPLIT/CLASS/IMAGE, each with 15 images of each of three classes."""
    root = tmp_path_factory.mktemp("data")
    (root / "noise").mkdir()
    generator = np.random.default_rng(5)
    for name, first, suffix in (("a-train", 0, "jpg"), ("b-train", 15, "png"), ("c-test", 30, "webp")):
        with tarfile.open(root / "noise" / f"{name}.tar", "w") as archive:
            for number in range(first, first + 15):
                for label in range(3):
                    pixels = generator.integers(0, 120, (20, 20, 3)) + 65 * label
                    content = io.BytesIO()
                    options = {"lossless": True} if suffix == "webp" else {}
                    Image.fromarray(pixels.astype(np.uint8)).save(
                        content, {"jpg": "jpeg"}.get(suffix, suffix), **options
                    )
                    entry = tarfile.TarInfo(f"{name[2:]}/class{label}/{number:02d}.{suffix}")
                    entry.size = content.tell()
                    content.seek(0)
                    archive.addfile(entry, content)
    return root
