"""One line of JSON for each finished run, and what is read from its folder for it."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flash_vision.lab.grid import Run
from flash_vision.lab.size import Size
from flash_vision.train.reporting import METRICS, read_metrics
from flash_vision.train.signals import EXIT_DONE, EXIT_FAILED

Result = dict[str, Any]
FILE = "results.jsonl"
SPIKE_WINDOW = 25
SPIKE_NATS = 0.5
LAST_LOSSES = 10
LEARNED_NATS = 0.1


def read_results(path: Path) -> dict[str, Result]:
    """Results by key; a line that a crash has cut short is left out, its run is taken up again."""
    results: dict[str, Result] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            continue
        results[result["key"]] = result
    return results


def add_result(path: Path, result: Result) -> None:
    """Adds a line that survives a power cut."""
    written = path.read_bytes() if path.exists() else b""
    with open(path, "a") as file:
        file.write(("\n" if written and not written.endswith(b"\n") else "") + json.dumps(result) + "\n")
        file.flush()
        os.fsync(file.fileno())


def is_finished(folder: Path, exit_code: int) -> bool:
    """Whether an ended run will not change any more: it is done, or it stopped for a loss that is not finite."""
    if exit_code != EXIT_FAILED:
        return exit_code == EXIT_DONE
    events = [record for record in read_metrics(folder / METRICS) if record["kind"] == "event"]
    return bool(events) and events[-1].get("event") == "nonfinite"


def code_tree() -> str | None:
    """Git's id of this package's files, with + after it if they differ from it; None outside of a checkout.

    Unlike the commit it stays the same when only other files change.
    """
    folder = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD:./") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def make_result(grid: str, run: Run, folder: Path, size: Size, exit_code: int, tree: str | None) -> Result:
    """What there is to say about a finished run.

    Accuracies are percentages of the evaluated split; `images_per_s` is the median over the logged updates and
    `train_seconds` the images trained on divided by it, so that pauses, kills and evaluations do not count. `spikes`
    counts jumps of the training loss, see `count_spikes`. `nonfinite` counts updates that were skipped, or whose
    gradient norm was not finite. A run has `diverged` if it stopped for a loss that is not finite, or ended hardly
    better than guessing, for it has learned nothing: mean of the last logged losses above ln(classes) - LEARNED_NATS.

    Args:
        tree: `code_tree` when it was started, or taken up again.
    """
    description = json.loads((folder / "run.json").read_text())
    records = read_metrics(folder / METRICS)
    train = [record for record in records if record["kind"] == "train"]
    evals = [record for record in records if record["kind"] == "eval"]
    skipped = {record["step"] for record in records if record.get("event") == "nonfinite"}
    skipped |= {record["step"] for record in train if not math.isfinite(record["grad_norm"])}
    losses = [record["loss"] for record in train]
    final_loss = statistics.fmean(losses[-LAST_LOSSES:]) if losses else math.nan
    config = description["config"]
    updates = max((record["step"] for record in records), default=0)
    images = updates * (config["global_batch_size"] or config["batch_size"] * config["grad_accum_steps"])
    speeds = [record["images_per_s"] for record in train if record["step"] > 1]
    speed = statistics.median(speeds) if speeds else None
    last = evals[-1] if evals else {}
    accuracies = {name: _number(last[name]) for name in last if name.startswith(("top1", "top5", "loss"))}
    return {
        "key": run.key,
        "grid": grid,
        "variant": run.label,
        "seed": run.seed,
        "evaluated_on": run.images.evaluated_on,
        "diverged": exit_code == EXIT_FAILED or not final_loss <= math.log(run.images.classes) - LEARNED_NATS,
        **accuracies,
        **{f"best_{n}": max(r[n] for r in evals) for n in ("top1", "top1_ema") if n in last},
        "parameters": size.parameters,
        "macs": size.macs,
        "images_per_s": speed,
        "train_seconds": round(images / speed, 1) if speed else None,
        "images": images,
        "updates": updates,
        "final_loss": _number(final_loss),
        "spikes": count_spikes(losses),
        "nonfinite": len(skipped),
        "emulate": run.emulate,
        "config": run.decisive,  # no paths: lines are to be shared
        "tree": tree,
        **{name: description[name] for name in ("commit", "versions", "device", "threads")},
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def count_spikes(losses: Sequence[float]) -> int:
    """Times that the loss rises above the median of the SPIKE_WINDOW values before it by SPIKE_NATS or more.

    Values above the bar in a row are one spike.
    """
    spikes, above = 0, False
    for i in range(SPIKE_WINDOW, len(losses)):
        before = above
        above = not losses[i] < statistics.median(losses[i - SPIKE_WINDOW : i]) + SPIKE_NATS
        spikes += above and not before
    return spikes


def _number(value: float) -> float | None:
    """JSON has no word for what is not finite."""
    return value if math.isfinite(value) else None
