"""Units that start as GLUs: with only the bias at offset 0 the local branch is V."""

import pytest
import timm
import torch
from torch import nn

from flash_vision.lab.self_start import SelfStartGAU
from flash_vision.layers import GatedAttentionUnit

SIZES = {"embed_dim": 16, "depth": 2, "qk_dim": 8, "num_classes": 5, "weight_init": "fan_in"}


@pytest.mark.parametrize(
    "options",
    [
        {"self_score": 4.0, "branches": "local"},
        {"self_score": 1.0, "branches": "local", "divisor": "inside"},
        {"self_score": 8.0, "unit": "quadratic", "window_size": 8},
    ],
)
def test_a_unit_without_queries_starts_as_a_glu(options):
    model = timm.create_model("lab_gau_self", **SIZES, **options).eval()
    assert isinstance(model, SelfStartGAU)
    for unit in model.modules():
        if isinstance(unit, GatedAttentionUnit):
            nn.init.zeros_(unit.base.weight)
            table = unit.position_bias.relative_position_bias_table  # the others are N(0, .02)
            table.data[torch.arange(len(table)) != len(table) // 2] = 0.0
    glu = timm.create_model("flash_gau_pico", unit="glu", value_conv=False, **SIZES).eval()
    glu.load_state_dict(model.state_dict(), strict=False)
    image = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model(image), glu(image))
