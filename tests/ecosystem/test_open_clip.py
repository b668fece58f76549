"""The models as image towers of CLIP in open_clip, by configuration."""

import json
import warnings

import pytest
import timm
import torch

open_clip = pytest.importorskip("open_clip", reason="needs pip install open_clip_torch")

TEXT = {"context_length": 16, "vocab_size": 100, "width": 32, "heads": 2, "layers": 1}


@pytest.fixture
def configured(tmp_path):
    """Registers a model configuration, as a user with a JSON file does, and takes it back."""

    def add(name, **vision):
        folder = tmp_path / "configs"
        folder.mkdir()
        content = {
            "embed_dim": 32,
            "vision_cfg": {"timm_model_name": name, "image_size": 64, **vision},
            "text_cfg": TEXT,
        }
        (folder / f"clip-{name}.json").write_text(json.dumps(content))
        open_clip.add_model_config(folder)
        return open_clip.create_model(f"clip-{name}")

    yield add
    open_clip.factory._MODEL_CONFIG_PATHS[:] = [
        path for path in open_clip.factory._MODEL_CONFIG_PATHS if tmp_path not in path.parents
    ]
    open_clip.factory._rescan_model_configs()


@pytest.mark.parametrize("name", ["flash_pyramid_nano", "flash_gau_pico"])
@pytest.mark.parametrize(
    "vision", [{}, {"timm_pool": "avg", "timm_proj": "mlp"}, {"timm_pool": "avg", "timm_proj": ""}]
)
def test_clip_trains_a_step(configured, name, vision):
    model = configured(name, **vision)
    images, texts, scale = model(torch.randn(2, 3, 64, 64), torch.randint(1, 100, (2, 16)))
    assert images.shape == texts.shape == (2, 32)
    torch.nn.functional.cross_entropy(scale * images @ texts.T, torch.arange(2)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["flash_pyramid_nano", "flash_gau_pico"])
def test_a_tower_can_be_frozen_up_to_its_last_groups_and_checkpointed(configured, name):
    model = configured(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # open_clip imports timm.models.helpers, an old name
        model.lock_image_tower(unlocked_groups=1)
    trunk = model.visual.trunk
    free = {name for name, parameter in trunk.named_parameters() if parameter.requires_grad}
    assert free
    assert free < {name for name, _ in trunk.named_parameters()}
    assert not any(parameter.startswith(("patch_embed", "pos_embed", "stem", "blocks.0.")) for parameter in free)
    model.set_grad_checkpointing(True)
    images = model.encode_image(torch.randn(2, 3, 64, 64))
    images.sum().backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in trunk.parameters())


def test_the_projection_fits_the_features_of_every_size():
    for name in ("flash_pyramid_nano", "flash_gau_pico"):
        trunk = timm.create_model(name, num_classes=0)
        assert trunk(torch.randn(1, 3, 64, 64)).shape == (1, trunk.num_features)
