"""Every registered model: its parameters and MACs, exact, and beside the ViT or Swin that it stands for."""

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

import flash_vision

# parameters, MACs at the model's own input size (matrix products and convolutions, attention included)
GOLDEN = {
    "flash_gau_pico": (1269040, 89346560),  # 100 classes, the others 1,000
    "flash_gau_tiny": (5779072, 1237946112),
    "flash_gau_small": (22317376, 4701298176),
    "flash_gau_base": (87686848, 18304220160),
    "flash_gau_large": (308877208, 64998111232),
    "flash_gau_small_patch8_224": (22321984, 18630632448),
    "flash_gau_small_paper": (23141441, 5582564352),
    "flash_quad_tiny": (5866240, 1482328320),
    "flash_quad_small": (22625728, 5103358464),
    "flash_quad_base": (88287040, 18616415232),
    "flash_pyramid_nano": (3207578, 554600448),
    "flash_pyramid_tiny": (28804320, 4267191232),
    "flash_pyramid_small": (48565094, 8522755776),
    "flash_pyramid_base": (87168054, 15161735616),
}
PEERS = {"tiny": "vit_tiny_patch16_224", "small": "vit_small_patch16_224", "base": "vit_base_patch16_224"}
PEERS["large"] = "vit_large_patch16_224"
SWINS = {size: f"swin_{size}_patch4_window7_224" for size in ("tiny", "small", "base")}


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def macs(model):
    """On the meta device torch's counter sees fused attention too."""
    height, width = model.pretrained_cfg["input_size"][1:]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, 3, height, width, device="meta"))
    return counter.get_total_flops() // 2


def test_importing_the_package_registers_exactly_these_models():
    assert set(timm.list_models("flash_*")) == set(GOLDEN)
    assert flash_vision.create_model is timm.create_model


@pytest.mark.parametrize("name", GOLDEN)
def test_parameters_and_macs_are_the_recorded_ones(name):
    model = timm.create_model(name, device="meta").eval()
    assert (parameters(model), macs(model)) == GOLDEN[name]


@pytest.mark.parametrize("size", PEERS)
def test_size_and_cost_match_the_vit_of_the_same_name(size):
    model = timm.create_model(f"flash_gau_{size}", device="meta").eval()
    vit = timm.create_model(PEERS[size], device="meta").eval()
    assert abs(parameters(model) / parameters(vit) - 1) < 0.05
    assert abs(macs(model) / macs(vit) - 1) < 0.12
    assert len(model.blocks) == 2 * len(vit.blocks)


@pytest.mark.parametrize("size", SWINS)
def test_size_and_cost_of_a_pyramid_match_the_swin_of_the_same_name(size):
    swin = timm.create_model(SWINS[size], device="meta").eval()
    recorded_parameters, recorded_macs = GOLDEN[f"flash_pyramid_{size}"]
    assert abs(recorded_parameters / parameters(swin) - 1) < 0.05
    assert abs(recorded_macs / macs(swin) - 1) < 0.05


def test_paper_recipe_is_the_published_one():
    model = timm.create_model("flash_gau_small_paper", depth=2)
    unit = model.blocks[0].unit
    assert (unit.score_fn, unit.divisor, unit.global_fn, unit.num_heads) == ("relu2", "inside", "plain", 1)
    assert unit.value_conv is None
    assert model.pos_embed is None
    assert model.pos_scale.item() == pytest.approx(384**-0.5)
    assert model.windows.rope_temperature == 10000
    for weight in (unit.gate.weight, unit.proj.weight, unit.scale_offset.gamma, model.patch_embed.proj.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.15)
    assert unit.scale_offset.beta.abs().max() == 0
