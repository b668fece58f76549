"""Grids run by real processes: killed, stopped, finished, failed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tool_process import TOOLS, run_tool

from flash_vision.lab import resolution
from flash_vision.lab.grid import load_grid
from flash_vision.lab.plan import EMULATED_SPEED, SPEEDS, PlanOptions, model_key, plan_grid
from flash_vision.lab.resolution import SIZES_FILE
from flash_vision.lab.results import FILE, add_result, code_tree, read_results
from flash_vision.lab.runner import GridRunner, RunOptions, run_grid
from flash_vision.train.reporting import read_metrics
from flash_vision.train.signals import StopRequest


@pytest.fixture
def grid(write_grid):
    long = {"epochs": 40, "val_interval": 40}
    groups = {
        "long": {"question": "?", "variants": ["vit"], "overrides": long},
        "again": {"question": "?", "variants": ["vit"], "sweep": {"epochs": [40], "val_interval": [40]}},
    }
    return write_grid(groups=groups)


@pytest.fixture
def options(grid, data_root):
    return RunOptions(grid=str(grid), data_root=str(data_root), output=str(grid.parent / "out"), jobs=1)


def wait_for_update(folder: Path, number: int) -> Path:
    """The folder of the first run that has got so far."""
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        for metrics in folder.glob("*/metrics.jsonl"):
            if any(record["step"] >= number for record in read_metrics(metrics)):
                return metrics.parent
        time.sleep(0.05)
    raise AssertionError(f"no run in {folder} has got to update {number}")


def test_a_killed_and_a_stopped_grid_go_on_where_they_stood_and_run_nothing_twice(grid, options):
    folder = Path(options.output) / "tiny"
    words = ["--grid", options.grid, "--data_root", options.data_root, "--output", options.output, "--jobs", "1"]
    lab = subprocess.Popen([sys.executable, str(TOOLS / "lab.py"), "run", *words], stderr=subprocess.DEVNULL)
    run = wait_for_update(folder, 12)
    lab.kill()
    lab.wait()
    assert not read_results(folder / FILE)

    def interrupt():
        wait_for_update(folder, 90)
        os.kill(os.getpid(), signal.SIGINT)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        run_grid(options)  # the killed one's child saves, ends, and frees the lock
    finally:
        thread.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert (run / "checkpoints" / "last.pt").exists()
    assert not read_results(folder / FILE)

    runner = GridRunner(options, StopRequest())
    runner.run_all()
    runner.close()
    log = (folder / "logs" / f"{run.name}.log").read_text()
    assert log.count("continuing") == 2, log
    assert log.count("stopped by a signal") == 2, log
    ((key, result),) = read_results(folder / FILE).items()
    assert (result["variant"], result["seed"], result["updates"], result["images"]) == ("vit", 0, 240, 240 * 8)
    steps = [record["step"] for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"]
    assert steps == list(range(1, 241)), "an update is missing or was done twice"
    assert key in run.name
    assert result["train_seconds"] == pytest.approx(result["images"] / result["images_per_s"], abs=0.06)
    assert 0 <= result["top1"] <= result["best_top1"] <= 100
    assert (result["threads"], result["evaluated_on"]) == (1, "validation")
    assert result["macs"] > result["parameters"] > 1000
    assert result["commit"]
    assert result["tree"] == code_tree()
    assert (run / "model.safetensors").exists()
    assert not (run / "checkpoints").exists()

    runner = GridRunner(options, StopRequest())
    runner.close()
    assert not runner.todo

    about = json.loads((run / "model.json").read_text())
    del about["model_kwargs"]["embed_dim"]  # as if it had been a default then, and another one now
    (run / "model.json").write_text(json.dumps(about))
    sizes = run_tool("lab", "resolution", *words[:-2], "--groups", "[again]", "--img_sizes", "[16,24]")
    assert "| n | 16 px | 24 px |" in sizes.stdout, sizes
    assert len(read_results(folder / SIZES_FILE)) == 2
    at_own_size = read_results(folder / SIZES_FILE)[f"{key}@16"]
    assert at_own_size["top1"] == pytest.approx(result["top1"], abs=100 / 24 + 1e-6)  # one image: other batches


def test_a_plan_lists_every_run_and_measures_each_model_once(options):
    words = ["--grid", options.grid, "--data_root", options.data_root, "--output", options.output]
    plain = run_tool("lab", "plan", *words, "--measure", "false")
    assert "48 training images; 1 runs are open: 0.0 hours" in plain.stdout, plain
    assert "The speed of 1 of them is unknown, they are not counted" in plain.stdout
    plan = run_tool("lab", "plan", *words, "--updates", 1)
    assert plan.code == 0, plan
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in plain.stdout.splitlines() if "vit" in line
    ]
    assert [row[:5] for row in rows] == [
        ["long", "vit", "0", "open", "40"],
        ["again", "vit epochs=40 val_interval=40", "0", "see above", "40"],
    ]
    (speed,) = json.loads((Path(options.output) / "tiny" / "speeds.json").read_text()).values()
    found = re.search(r"1 runs are open: (\S+) hours of training one at a time, (\S+) with 2", plan.stdout)
    assert found, plan
    assert float(found[1]) == pytest.approx(40 * 48 / speed / 3600, abs=0.06)


def test_a_plan_prefers_idle_speeds_and_estimates_those_of_low_precision(write_grid, options):
    sweep = {"sweep": {"emulate": ["", "bfloat16", "float16"]}}
    groups = {"low": {"question": "?", "variants": ["vit", "vit-one-head"], **sweep}}
    options.grid = str(write_grid(groups=groups))
    vit, low, _, other, *_ = load_grid(options.grid).runs()
    folder = Path(options.output) / "tiny"
    folder.mkdir(parents=True)
    (folder / SPEEDS).write_text(json.dumps({model_key(run): speed for run, speed in ((vit, 200), (other, 100))}))
    for run, speed in ((vit, 150), (low, 90)):
        add_result(folder / FILE, {"key": run.key, "images_per_s": speed})
    text = plan_grid(PlanOptions(**{name: getattr(options, name) for name in ("grid", "data_root", "output")}))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "| vit" in line]
    assert [(row[1], row[3], row[7]) for row in rows] == [
        ("vit emulate=", "done", "200"),
        ("vit emulate=bfloat16", "done", "90"),
        ("vit emulate=float16", "open", f"{200 * EMULATED_SPEED['float16']:.0f} (estimated)"),
        ("vit-one-head emulate=", "open", "100"),
        ("vit-one-head emulate=bfloat16", "open", f"{100 * EMULATED_SPEED['bfloat16']:.0f} (estimated)"),
        ("vit-one-head emulate=float16", "open", f"{100 * EMULATED_SPEED['float16']:.0f} (estimated)"),
    ]
    assert "4 runs are open" in text
    assert "unknown" not in text


def test_a_seed_that_two_groups_share_counts_in_both_tables_of_sizes(write_grid, data_root, monkeypatch):
    groups = {
        "sweep": {"question": "?", "variants": ["vit"], "sweep": {"lr": [2e-3, 3e-3]}},
        "seeds": {"question": "?", "variants": ["vit"], "seeds": [0, 1]},
    }
    path = write_grid(groups=groups)
    folder = path.parent / "out" / "tiny"
    folder.mkdir(parents=True)
    for run in load_grid(path).runs():
        add_result(folder / FILE, {"key": run.key, "diverged": run.label == "vit lr=0.003"})
    evaluated = []

    def evaluate(run, size, *where):
        evaluated.append((run.key, size))
        return {"key": f"{run.key}@{size}", "top1": 40.0 + run.seed}

    monkeypatch.setattr(resolution, "_evaluate", evaluate)
    options = {"grid": str(path), "data_root": str(data_root), "output": str(path.parent / "out"), "img_sizes": [16]}
    text = resolution.evaluate_resolutions(resolution.ResolutionOptions(**options))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    assert rows == [["sweep", "vit lr=0.002", "1", "40.00"], ["seeds", "vit", "2", "40.50"]]
    assert len(evaluated) == len(set(evaluated)) == 2


def test_a_run_that_fails_is_named_and_does_not_keep_the_others_from_running(write_grid, options, monkeypatch):
    options.grid = str(write_grid(seeds=[0, 1]))
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    runner = GridRunner(options, StopRequest())
    with pytest.raises(ValueError, match=r"4 runs failed, the first: vit, seed 0: exit code 1"):
        runner.run_all()
    runner.close()


def test_a_budget_that_is_spent_starts_no_run(options):
    options.hours = 1e-9
    runner = GridRunner(options, StopRequest())
    runner.run_all()
    runner.close()
    assert len(runner.todo) == 1
    assert not list(runner.folder.glob("*/run.json"))


def test_each_job_gets_cores_of_its_own_where_there_are_enough(options, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 3, 5, 7}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: None, raising=False)
    runner = GridRunner(options, StopRequest())
    runner.close()
    options.jobs, options.threads = 2, 2
    assert [runner._cores(slot) for slot in range(2)] == [[2, 3], [5, 7]]
    options.jobs = 3
    assert runner._cores(0) == []
    options.jobs, options.pin = 1, False
    assert runner._cores(0) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "--jobs", "0"), "jobs must be at least 1, got 0"),
        (("run", "--hours", "0"), "hours must be above 0, got 0.0"),
        (("walk",), "the first word must be one of plan, run, report, resolution"),
        (("report",), "no results of grid tiny there"),
    ],
)
def test_mistakes_are_one_line(grid, tmp_path, words, message):
    options = ["--grid", grid, "--output", tmp_path / "none"]
    options += ["--data_root", tmp_path] if words[0] == "run" else []
    assert message in run_tool("lab", words[0], *options, *words[1:]).refused()


def test_a_torn_last_line_of_results_is_passed_over(tmp_path):
    path = tmp_path / "results.jsonl"
    add_result(path, {"key": "a", "top1": 1})
    with open(path, "a") as file:
        file.write('{"key": "b", "to')
    assert list(read_results(path)) == ["a"]
    add_result(path, {"key": "c"})
    assert list(read_results(path)) == ["a", "c"]
    assert json.loads(path.read_text().splitlines()[0]) == {"key": "a", "top1": 1}
