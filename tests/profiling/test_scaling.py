"""MACs over image sizes and the sizes at which two models cross."""

import pytest
from failing_models import fails_allocation_above_32

from flash_vision.profiling.scaling import crossovers, plot_scaling, scaling_rows, scaling_table

PNG = b"\x89PNG"


def _rows(**curves):
    return [
        {"model": m, "img_size": s, "macs": c, "status": "ok"} for m, curve in curves.items() for s, c in curve.items()
    ]


def test_a_crossover_is_interpolated_on_log_axes():
    # s^2 against 100 s: equal at 100 px
    rows = _rows(quadratic={s: s**2 for s in (40, 80, 160)}, linear={s: 100 * s for s in (40, 80, 160)})
    (crossing,) = crossovers(rows, "linear")
    assert (crossing.peer, crossing.below) == ("quadratic", False)
    assert crossing.img_size == pytest.approx(100)
    assert crossing.macs == pytest.approx(10_000)
    assert crossovers(rows, "quadratic")[0].below


def test_models_that_never_cross_have_no_crossover():
    assert crossovers(_rows(a={1: 1, 2: 2}, b={1: 3, 2: 4}), "a") == []


def test_the_table_has_a_blank_where_a_model_does_not_take_a_size():
    rows = scaling_rows(["test_vit", fails_allocation_above_32.__name__], [32, 64])
    assert [row["status"] for row in rows[:3]] == ["ok"] * 3
    assert "can't allocate memory" in rows[3]["status"]
    table = scaling_table(rows)
    assert table[0][fails_allocation_above_32.__name__] == pytest.approx(30e-9)
    assert table[1][fails_allocation_above_32.__name__] is None


def test_linear_attention_costs_less_than_vit_at_high_resolution(tmp_path):
    sizes = [224, 1024]
    rows = scaling_rows(["flash_gau_small", "vit_small_patch16_224"], sizes)
    ours, vit = ([r["macs"] for r in rows if r["model"] == m] for m in ("flash_gau_small", "vit_small_patch16_224"))
    assert vit[-1] > 2 * ours[-1]
    assert ours[-1] / ours[0] == pytest.approx((1024 / 224) ** 2, rel=0.1)
    crossings = plot_scaling(rows, "flash_gau_small", tmp_path / "new" / "scaling.png")
    assert [c.below for c in crossings] == [False]
    assert 224 < crossings[0].img_size < 512
    assert (tmp_path / "new" / "scaling.png").read_bytes().startswith(PNG)


def test_an_unknown_model_or_no_size_is_a_value_error():
    with pytest.raises(ValueError, match="timm model name"):
        scaling_rows(["no_such_model"], [64])
    with pytest.raises(ValueError, match="img_sizes"):
        scaling_rows(["test_vit"], [])
