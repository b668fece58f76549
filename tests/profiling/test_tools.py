"""The tools: output files, and one line on stderr with exit code 2 for a user's mistake."""

import json

import pytest
import torch
from failing_models import fails_always, works_at_any_size
from tool_modules import run

WORKS = works_at_any_size.__name__
QUICK = ("--rounds", "3", "--min_ms", "0.1", "--warmup", "1", "--memory", "false")


def test_flops_prints_the_split_and_writes_json_and_csv(tmp_path, capsys):
    assert run("flops", "flash_gau_pico", "--json", str(tmp_path / "f.json"), "--csv", str(tmp_path / "f.csv")) == 0
    out = capsys.readouterr().out
    for word in ("projections", "local", "global", "convolution", "head", "aten::silu", "agree"):
        assert word in out
    data = json.loads((tmp_path / "f.json").read_text())
    assert data["models"][0]["counters_agree"] is True
    assert data["environment"]["torch"] == torch.__version__
    assert (tmp_path / "f.csv").read_text().startswith("model,px,params M,GMACs")


def test_flops_scaling_writes_the_plot_and_names_the_crossover(tmp_path, capsys):
    arguments = ("flash_gau_pico", "test_vit", "--scaling", "true", "--img_sizes", "[32,64]")
    assert run("flops", *arguments, "--plot", str(tmp_path / "s.png"), "--json", str(tmp_path / "s.json")) == 0
    assert "GMACs per image" in capsys.readouterr().out
    assert (tmp_path / "s.png").stat().st_size > 10_000
    assert {"rows", "crossovers", "environment"} <= set(json.loads((tmp_path / "s.json").read_text()))


def test_benchmark_writes_rows_settings_and_environment(tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("b.json", "b.csv", "b.png")]
    outputs = ("--json", files[0], "--csv", files[1], "--plot", files[2])
    assert run("benchmark", WORKS, fails_always.__name__, "--img_sizes", "[32,64]", *QUICK, *outputs) == 0
    assert "failed: the model is broken" in capsys.readouterr().out
    data = json.loads((tmp_path / "b.json").read_text())
    assert data["settings"]["baseline"] == WORKS
    assert {"commit", "torch", "device_name", "threads", "command"} <= set(data["environment"])
    assert {"model", "img_size", "ratio", "peak_memory_mib", "status", "compiled"} <= set(data["rows"][0])
    assert "commit" in (tmp_path / "b.csv").read_text().splitlines()[0]
    assert (tmp_path / "b.png").stat().st_size > 10_000


def test_breakdown_prints_the_share_of_layout(tmp_path, capsys):
    arguments = ("flash_gau_pico", "--img_size", "32", "--steps", "1", "--rounds", "2")
    assert run("breakdown", *arguments, "--json", str(tmp_path / "p.json")) == 0
    out = capsys.readouterr().out
    assert "layout" in out
    assert "times its dense products" in out
    model = json.loads((tmp_path / "p.json").read_text())["models"][0]
    assert model["dense_floor"]["ratio"] > 1


def test_the_gpu_report_runs_on_a_cpu_at_small_size(tmp_path, capsys):
    arguments = (
        "--device",
        "cpu",
        "--quick",
        "true",
        "--compiled",
        "false",
        "--models",
        f"[{fails_always.__name__},flash_gau_pico]",
    )
    assert run("gpu_report", *arguments, "--output_dir", str(tmp_path)) == 2
    captured = capsys.readouterr()
    assert "parity failed" in captured.err
    report = json.loads((tmp_path / "report.json").read_text())
    own = [r for r in report["parity"] + report["speed"] + report["breakdown"] if r["model"] != fails_always.__name__]
    assert {"flash_gau_pico", "flash_gau_pico+reparam", "flash_gau_pico+grad_checkpointing"} == {
        r["model"] for r in own
    }
    assert {row["status"] for row in own} == {"ok"}
    assert (tmp_path / "report.md").read_text().startswith("# ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("flops", "vit_smal"), "got 'vit_smal'"),
        (("flops", "test_vit", "--img_size", "10"), "test_vit cannot"),
        (("flops", "test_vit", "--batch_size", "0"), "batch_size must be at least 1, got 0"),
        (("flops", "test_vit", "--plot", "x.png"), "plot needs --scaling"),
        (("flops", "test_vit", "--scaling", "true", "--batch_size", "2"), "scaling counts one image"),
        (("flops", "test_vit", "--colour", "red"), "colour"),
        (("benchmark", "vit_smal"), "got 'vit_smal'"),
        (("benchmark", WORKS, "--batch_sizes", "[0]"), "batch_size must be at least 1, got 0"),
        (("benchmark", WORKS, "--device", "abacus"), "device must be one that this machine has, got 'abacus'"),
        (("benchmark", "test_vit", "--img_sizes", "[10]", *QUICK), "no model could be measured: test_vit: failed"),
        (("breakdown", "test_vit", "--img_size", "10"), "test_vit cannot"),
        (("breakdown", "vit_smal"), "got 'vit_smal'"),
        (("gpu_report", "--device", "abacus"), "device must be one that this machine has, got 'abacus'"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert run(*arguments) == 2
    err = capsys.readouterr().err.strip()
    assert message in err
    assert len(err.splitlines()) == 1
