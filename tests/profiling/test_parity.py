"""Whole models in low precision against float32."""

import pytest
from failing_models import drifts_in_low_precision

import flash_vision  # noqa: F401  registers the models
from flash_vision.profiling.parity import parity_rows
from flash_vision.profiling.steps import Case


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_our_model_in_bf16_stays_within_its_limit(mode):
    (row,) = parity_rows(["flash_gau_pico"], [Case(mode=mode, precision="bf16", img_size=32)])
    assert row["status"] == "ok"
    assert 0 < row["error"] <= row["limit"] < 0.2


def test_float32_equals_itself():
    (row,) = parity_rows(["test_vit"], [Case(img_size=32)])
    assert (row["status"], row["error"]) == ("ok", 0)


def test_a_wrong_low_precision_path_is_caught():
    (row,) = parity_rows([drifts_in_low_precision.__name__], [Case(precision="bf16", img_size=32)])
    assert row["status"] == "too large"
    assert row["error"] == pytest.approx(1, rel=0.05)


def test_a_model_that_fails_is_a_row():
    (row,) = parity_rows(["test_vit"], [Case(img_size=10)])
    assert row["status"].startswith("failed: ")
    assert row["error"] is None
