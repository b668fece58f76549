"""The benchmark's rows: ratios, failures that stay rows, memory, settings."""

import csv
import dataclasses
import json
import math
import subprocess
import time

import failing_models
import pytest
import torch
from torch import nn

from flash_vision.profiling.build import build_model, check_device, is_out_of_memory
from flash_vision.profiling.environment import environment
from flash_vision.profiling.memory import child_peak, resident_peak
from flash_vision.profiling.plots import plot_throughput
from flash_vision.profiling.steps import Case, step_of
from flash_vision.profiling.tables import markdown_table, write_csv, write_json
from flash_vision.profiling.throughput import MIN_ROUNDS, BenchmarkSettings, quartiles, run_benchmark

OOM, ALLOCATION = (
    m.__name__ for m in (failing_models.fails_out_of_memory_above_32, failing_models.fails_allocation_above_32)
)
BROKEN, WORKS = failing_models.fails_always.__name__, failing_models.works_at_any_size.__name__


def _settings(models, **changes):
    quick = {"rounds": 3, "min_ms": 0.1, "warmup": 1, "memory": False, "img_sizes": (32,), "batch_sizes": (2,)}
    return BenchmarkSettings(models=models, **{**quick, **changes})


def test_every_case_and_model_is_a_row_with_a_ratio_to_the_baseline():
    settings = _settings((WORKS, "test_vit"), modes=("infer", "train"), batch_sizes=(1, 2))
    rows = run_benchmark(settings)
    assert [(r["model"], r["mode"], r["batch_size"]) for r in rows] == [
        (m, mode, b) for mode in ("infer", "train") for b in (1, 2) for m in (WORKS, "test_vit")
    ]
    for row in rows:
        assert row["status"] == "ok"
        assert row["images_per_s"] == pytest.approx(row["batch_size"] / row["latency_ms"] * 1e3)
        assert row["latency_ms_q25"] <= row["latency_ms"] <= row["latency_ms_q75"]
        assert row["rounds"] == 3
    assert all(r["ratio"] == 1 for r in rows if r["model"] == WORKS)
    assert all(r["ratio"] < 1 for r in rows if r["model"] == "test_vit"), (
        "a transformer is slower than one linear layer"
    )


@pytest.mark.parametrize("name", [OOM, ALLOCATION])
def test_out_of_memory_at_one_size_is_a_row_and_the_run_goes_on(name):
    rows = run_benchmark(_settings((WORKS, name), img_sizes=(32, 64)))
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "out of memory"]
    assert rows[3]["images_per_s"] is None
    assert rows[3]["rounds"] == 0


def test_a_failing_baseline_does_not_take_the_others_along():
    broken, works = run_benchmark(_settings((BROKEN, WORKS)))
    assert broken["status"] == "failed: the model is broken"
    assert works["status"] == "ok"
    assert works["images_per_s"] > 0
    assert works["ratio"] is None


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_step_runs_in_every_precision(mode, precision):
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    before = model[1].weight.detach().clone()
    step_of(model, torch.randn(2, 3, 2, 2), Case(mode=mode, precision=precision, img_size=2, batch_size=2))()
    assert torch.equal(before, model[1].weight) == (mode == "infer")


def test_a_compiled_model_is_measured():
    (row,) = run_benchmark(_settings((WORKS,), compiled=(True,)))
    assert row["status"] == "ok"
    assert row["compiled"] is True
    assert row["first_step_s"] > row["latency_ms"] / 1e3


def test_rounds_end_when_the_time_is_up_but_not_before_the_least():
    (row,) = run_benchmark(_settings((WORKS,), rounds=1000, max_seconds=0.0))
    assert row["rounds"] == MIN_ROUNDS


def test_a_case_beyond_the_deadline_is_skipped_and_says_so():
    rows = run_benchmark(_settings((WORKS,), img_sizes=(32, 64)), deadline=time.monotonic() - 1)
    assert [row["status"] for row in rows] == ["skipped: time budget"] * 2


def test_peak_memory_of_a_child_process_grows_with_the_activations():
    small, large = (child_peak("test_vit", Case(img_size=160, batch_size=b), threads=1) for b in (1, 24))
    assert small.status == large.status == "ok"
    assert small.idle_mib < small.peak_mib < large.peak_mib


@pytest.mark.parametrize(("name", "status"), [(BROKEN, "failed: the model is broken"), (OOM, "out of memory")])
def test_a_child_process_reports_why_it_failed(name, status):
    case = dataclasses.asdict(Case(img_size=64))
    assert resident_peak({"model": name, "threads": 1, "case": case}).status == status


def test_out_of_memory_is_told_from_other_errors():
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 3 bytes"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baseline": "test_convnext"}, "baseline must be one of the models"),
        ({"batch_sizes": (0,)}, "batch_size must be at least 1, got 0"),
        ({"img_sizes": (-1,)}, "img_size must be at least 1"),
        ({"img_sizes": ()}, "must each name at least one"),
        ({"precisions": ("int8",)}, "precision must be one of fp32, bf16, fp16, got 'int8'"),
        ({"modes": ("test",)}, "mode must be one of infer, train, got 'test'"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"device": "abacus"}, "device must be one that this machine has, got 'abacus'"),
        ({"models": ()}, "at least one model"),
    ],
)
def test_settings_that_cannot_be_measured_are_a_value_error(changes, message):
    with pytest.raises(ValueError, match=message):
        _settings(**{"models": (WORKS,), **changes})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_is_a_value_error():
    with pytest.raises(ValueError, match="device must be one that this machine has, got 'cuda'"):
        check_device("cuda")


def test_quartiles_of_one_value_are_that_value():
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)


def test_rows_survive_json_csv_and_the_plot(tmp_path):
    rows = run_benchmark(_settings((WORKS, OOM), img_sizes=(32, 64), modes=("infer", "train")))
    write_json(tmp_path / "a" / "rows.json", {"rows": rows})
    assert json.loads((tmp_path / "a" / "rows.json").read_text())["rows"] == json.loads(json.dumps(rows))
    write_csv(tmp_path / "rows.csv", rows)
    with (tmp_path / "rows.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [row["status"] for row in read] == [row["status"] for row in rows]
    assert read[3]["images_per_s"] == ""
    plot_throughput(rows, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="at least one measured"):
        plot_throughput([row for row in rows if row["status"] != "ok"], tmp_path / "none.png")


def test_a_table_has_blank_cells_for_what_was_not_measured():
    lines = markdown_table([{"a": 1.23456, "b": None}, {"a": 12345.6, "c": "x"}]).splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == ["a", "b", "c"]
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == ["1.235", "", ""]
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == ["12346", "", "x"]


def test_the_environment_names_commit_versions_and_threads():
    env = environment("cpu")
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode == 0:
        assert len(env["commit"]) == 40
    assert env["torch"] == torch.__version__
    assert env["threads"] == torch.get_num_threads()
    assert "/" not in env["command"].split()[0]
    assert not any(isinstance(v, float) and math.isnan(v) for v in env.values())


def test_a_description_adds_constructor_arguments_and_forms_to_a_name():
    rows = run_benchmark(_settings(("test_vit", "test_vit+depth=1+reparam", "flash_gau_pico+depth=2+qk_dim=8")))
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert len(build_model("test_vit+depth=1+reparam").blocks) == 1
    model = build_model("flash_gau_pico+depth=2+qk_dim=8+grad_checkpointing")
    assert len(model.blocks) == 2
    assert model.blocks[0].unit.base.out_features == 8
    assert model.grad_checkpointing
    assert not any(p.requires_grad for p in build_model("test_vit+reparam").parameters())


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("test_vitt", "must be a timm model name, got 'test_vitt'; did you mean"),
        ("test_vit+reparametrized", "argument=value, reparam or grad_checkpointing, got 'reparametrized'"),
    ],
)
def test_a_bad_description_is_refused_before_anything_runs(description, message):
    with pytest.raises(ValueError, match=message):
        _settings((description,))


def test_an_argument_that_a_model_does_not_take_and_a_frozen_model_in_training_are_rows():
    names = ("test_vit", "test_vit+no_such=1", "test_vit+reparam")
    rows = run_benchmark(_settings(names, modes=("train",)))
    assert rows[0]["status"] == "ok"
    assert "no_such" in rows[1]["status"]
    assert rows[2]["status"] == "failed: test_vit+reparam: reparam is for inference"


def test_a_backbone_is_measured_on_images_that_are_not_square(tmp_path):
    names = ("test_resnet+features_only=true", "flash_gau_pico+depth=2+features_only=true+out_indices=[0,1]")
    rows = run_benchmark(_settings(names, modes=("infer", "train"), img_sizes=(32, (32, 64))))
    assert [row["status"] for row in rows] == ["ok"] * 8
    assert [row["img_size"] for row in rows[:4]] == [32, 32, (32, 64), (32, 64)]
    plot_throughput(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
