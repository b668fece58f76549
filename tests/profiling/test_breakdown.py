"""Time by kind, and the floor set by the dense products."""

import pytest
import torch
from torch import nn

import flash_vision  # noqa: F401  registers the models
from flash_vision.ops import attention
from flash_vision.profiling.breakdown import break_down, dense_floor
from flash_vision.profiling.build import build_model, example_input
from flash_vision.profiling.steps import Case


def _model(name, size):
    model = build_model(name, img_size=size)
    return model, example_input(model, size, batch_size=1, device="cpu")


def test_the_time_of_our_model_falls_into_known_kinds():
    model, images = _model("flash_gau_pico", 32)
    breakdown = break_down(model, images, Case(img_size=32), steps=1)
    assert breakdown.unknown == ()
    assert {"matmul", "elementwise", "normalisation", "layout"} <= set(breakdown.by_kind)
    assert sum(row["share"] for row in breakdown.rows()) == pytest.approx(1)
    assert set(breakdown.attention) == {"quadratic", "linear"}
    assert 0 < breakdown.attention["linear"] < breakdown.total_ms


def test_a_training_step_tells_the_optimiser_from_the_model():
    model, images = _model("test_vit", 160)
    breakdown = break_down(model, images, Case(mode="train", img_size=160), steps=1)
    assert breakdown.by_kind["optimizer"] > 0
    assert breakdown.attention == {}
    assert breakdown.unknown == ()


def test_casts_of_autocast_are_told_from_layout_copies():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    breakdown = break_down(model, torch.randn(2, 3, 2, 2), Case(precision="bf16", img_size=2, batch_size=2), steps=1)
    assert breakdown.by_kind["cast"] > 0
    assert ("aten::copy_", "cast") in [(operator, kind) for operator, kind, _, _ in breakdown.by_operator]


def test_the_profiler_leaves_the_attention_functions_as_they_were():
    before = dict(vars(attention))
    model, images = _model("flash_gau_pico", 32)
    break_down(model, images, Case(img_size=32), steps=1)
    assert dict(vars(attention)) == before


def test_the_floor_replays_every_product_with_weights():
    model, images = _model("test_vit", 160)
    floor = dense_floor(model, images, Case(img_size=160), rounds=25)
    linears = sum(isinstance(m, (nn.Linear, nn.Conv2d)) for m in model.modules())
    assert floor.products == linears
    assert floor.ratio > 1
    assert floor.ratio_q25 <= floor.ratio <= floor.ratio_q75


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dense_floor(nn.ReLU(), torch.ones(1, 3, 2, 2), Case(img_size=2)), "must contain matrix products"),
        (
            lambda: dense_floor(nn.ReLU(), torch.ones(1, 3, 2, 2), Case(img_size=2, mode="train")),
            "mode must be 'infer'",
        ),
        (lambda: dense_floor(nn.ReLU(), torch.ones(1, 3, 2, 2), Case(img_size=2), rounds=0), "rounds"),
        (lambda: break_down(nn.ReLU(), torch.ones(1, 3, 2, 2), Case(img_size=2), steps=0), "steps"),
    ],
)
def test_what_has_no_breakdown_is_a_value_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()
