"""Grids run by real processes: killed, stopped, finished, failed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tool_process import TOOLS, run_tool

from flash_vision.lab.results import add_result, read_results
from flash_vision.lab.runner import GridRunner, RunOptions
from flash_vision.train.reporting import read_metrics
from flash_vision.train.signals import StopRequest


class Lab:
    """tools/lab.py run on a grid, as a process."""

    def __init__(self, grid: Path, data_root: Path, *options: str) -> None:
        self.output = grid.parent / "out"
        self.folder = self.output / grid.stem
        words = ["run", "--grid", str(grid), "--data_root", str(data_root), "--output", str(self.output)]
        self.log = grid.parent / f"log{len(list(grid.parent.glob('log*')))}"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(TOOLS / "lab.py"), *words, *options], stdout=log, stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip

    def wait_for_update(self, number: int) -> Path:
        """The folder of the first run that has got so far."""
        deadline = time.monotonic() + 100
        while True:
            for metrics in self.folder.glob("*/metrics.jsonl"):
                if any(record["step"] >= number for record in read_metrics(metrics)):
                    return metrics.parent
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def finish(self) -> tuple[int, str]:
        return self.process.wait(timeout=200), self.log.read_text()

    @property
    def results(self) -> list[dict]:
        return list(read_results(self.folder / "results.jsonl").values())


@pytest.fixture
def grid(write_grid):
    groups = {
        "long": {"question": "?", "variants": ["vit"], "overrides": {"epochs": 40, "val_interval": 40}},
        "short": {"question": "?", "variants": ["vit"], "sweep": {"epochs": [2]}},
        "again": {"question": "?", "variants": ["vit"]},
        "broken": {"question": "?", "variants": ["vit"], "overrides": {"opt": "nonsense"}},
    }
    return write_grid(groups=groups)


def test_a_killed_and_a_stopped_grid_go_on_where_they_stood_and_run_nothing_twice(grid, data_root):
    lab = Lab(grid, data_root, "--jobs", "1")
    run = lab.wait_for_update(12)
    lab.process.kill()
    assert lab.finish()[0] == -signal.SIGKILL

    lab = Lab(grid, data_root, "--jobs", "1")  # the killed one's child saves, ends, and frees the lock
    lab.wait_for_update(90)
    lab.process.send_signal(signal.SIGINT)
    code, log = lab.finish()
    assert code == 0, log
    assert "stopped, its state is saved" in log
    assert (run / "checkpoints" / "last.pt").exists()
    assert not lab.results

    lab = Lab(grid, data_root, "--jobs", "1")
    code, log = lab.finish()
    assert (code, "1 runs failed, the first: vit, seed 0: exit code 2" in log) == (2, True), log
    assert "opt nonsense" in "".join(path.read_text() for path in lab.folder.glob("logs/*.log"))
    assert (lab.folder / "logs" / f"{run.name}.log").read_text().count("continuing") == 2
    assert [(r["variant"], r["seed"], r["updates"]) for r in lab.results] == [("vit", 0, 240), ("vit epochs=2", 0, 12)]

    steps = [record["step"] for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"]
    assert steps == list(range(1, 241)), "an update is missing or was done twice"
    first = lab.results[0]
    assert first["images"] == 240 * 8
    assert first["train_seconds"] == pytest.approx(first["images"] / first["images_per_s"], abs=0.06)
    assert 0 <= first["top1"] <= first["best_top1"] <= 100
    assert (first["threads"], first["evaluated_on"]) == (1, "validation")
    assert first["macs"] > first["parameters"] > 1000
    assert first["commit"]
    assert (run / "model.safetensors").exists()
    assert not (run / "checkpoints").exists()

    # nothing is left but the run that cannot be run
    options = RunOptions(grid=str(grid), data_root=str(data_root), output=str(lab.output))
    runner = GridRunner(options, StopRequest())
    runner.close()
    assert [run.group for run in runner.todo] == ["broken"]


def test_a_budget_that_is_spent_starts_no_run(grid, data_root, tmp_path):
    words = ("--grid", grid, "--data_root", data_root, "--output", tmp_path / "out", "--hours", 1e-9)
    assert run_tool("lab", "run", *words).code == 0
    assert not list((tmp_path / "out" / "tiny").glob("*/run.json"))


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
