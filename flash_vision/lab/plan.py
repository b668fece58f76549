"""What a grid will run and how long that takes, from a short measurement of each model."""

from __future__ import annotations

import contextlib
import io
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from flash_vision.data.files import write_text
from flash_vision.lab.grid import Run, load_grid
from flash_vision.lab.images import prepare_images
from flash_vision.lab.results import FILE, Result, read_results
from flash_vision.lab.runner import GridOptions
from flash_vision.lab.size import check_sizes, model_sizes
from flash_vision.profiling.tables import markdown_table
from flash_vision.train.sources import open_split
from flash_vision.train.speed import SpeedConfig, measure_speed

SPEEDS = "speeds.json"
# training with `rounding.RoundedProducts` over training without: 0.59 to 0.68 and 0.33 to 0.42 for the networks of the
# group `a`, CPU seconds of a step of 64 images
EMULATED_SPEED = {"bfloat16": 0.64, "float16": 0.37}
SPEED_FIELDS = (
    "model",
    "model_kwargs",
    "img_size",
    "input_size",
    "batch_size",
    "global_batch_size",
    "amp",
    "model_ema",
)


@dataclass(kw_only=True)
class PlanOptions(GridOptions):
    """How the estimate is made; see `GridOptions` for which runs.

    Args:
        measure: train each model whose speed is not in the grid's folder yet, one thread, one at a time, on a machine
            that should be idle; else only speeds that are there already are used.
        jobs: runs side by side, for the estimate.
        updates: updates that the median is taken of. Of each model as many run before them and are not counted, and
            twice as many bare steps, see `train.speed`.
    """

    measure: bool = True
    jobs: int = 2
    updates: int = 12

    def __post_init__(self) -> None:
        for name in ("jobs", "updates"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def plan_grid(options: PlanOptions) -> str:
    """The runs of a grid as a table, with what is done, sizes, speed and hours, and the sum of what is left.

    A speed that was measured alone goes before that of a finished run, which had another run beside it. Runs in
    emulated low precision are not measured: where they are not finished they have the speed of the same model in
    float32 times EMULATED_SPEED, marked as an estimate.

    Raises:
        ValueError: the grid or its images are not right.
    """
    grid = load_grid(options.grid)
    runs = grid.runs(options.groups)
    sizes = model_sizes(runs)
    check_sizes(grid, runs, sizes)
    folder = Path(options.output) / grid.name
    images = prepare_images(grid.images, options.data_root, options.images_folder)
    num_images = len(open_split(runs[0].train_config(data_dir=str(images)), training=True).dataset)
    finished = read_results(folder / FILE)
    speeds = _speeds(options, runs, folder, images)
    rows, left, unknown, seen = [], 0.0, 0, set()
    for run in runs:
        again = run.key in seen
        seen.add(run.key)
        speed, estimated = _speed(run, speeds, finished)
        hours = run.fields["epochs"] * num_images / speed / 3600 if speed else None
        open_run = run.key not in finished and not again
        left += hours if hours and open_run else 0.0
        unknown += open_run and not hours
        rows.append({
            "group": run.group, "variant": run.label, "seed": run.seed,
            "state": "see above" if again else "open" if open_run else "done", "epochs": run.fields["epochs"],
            "parameters": sizes[run.key].parameters, "MMACs": round(sizes[run.key].macs / 1e6, 1),
            "images/s": speed and f"{speed:.0f}{' (estimated)' if estimated else ''}",
            "hours": hours and round(hours, 3),
        })  # fmt: skip
    count = sum(row["state"] == "open" for row in rows)
    text = (
        f"{grid.about}\n\n{markdown_table(rows)}\n\n{num_images} training images; {count} runs are open: "
        f"{left:.1f} hours of training one at a time, {left / options.jobs:.1f} with {options.jobs} at the same speed "
        "side by side; evaluations come on top"
    )
    return text + (f". The speed of {unknown} of them is unknown, they are not counted" if unknown else "")


def model_key(run: Run) -> str:
    """What runs of one speed have in common, emulated precision apart."""
    return json.dumps({name: run.fields.get(name) for name in SPEED_FIELDS}, sort_keys=True)


def _speed(run: Run, speeds: dict[str, float], finished: dict[str, Result]) -> tuple[float | None, bool]:
    """Images/s of a run, None where nothing is known, and whether that is an estimate."""
    alone, beside = speeds.get(model_key(run)), finished.get(run.key, {}).get("images_per_s")
    if not run.emulate:
        return alone or beside, False
    return (beside, False) if beside or not alone else (alone * EMULATED_SPEED[run.emulate], True)


def _speeds(options: PlanOptions, runs: Sequence[Run], folder: Path, images: Path) -> dict[str, float]:
    """Images/s of the training loop in float32 for the models of the runs; measured where not there, if asked."""
    path = folder / SPEEDS
    speeds: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    missing = {model_key(run): run for run in runs if model_key(run) not in speeds} if options.measure else {}
    folder.mkdir(parents=True, exist_ok=True)
    for key, run in tqdm(missing.items(), unit="model", disable=None, leave=False):
        speeds[key] = _measure(run, images, options.updates)
        write_text(path, json.dumps(speeds, indent=1) + "\n")
    return speeds


def _measure(run: Run, images: Path, updates: int) -> float:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        recipe: dict[str, Any] = {**run.fields, "val_split": run.images.evaluated_on, "seed": run.seed}
        path = Path(folder) / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        config = SpeedConfig(recipe=str(path), data_dir=str(images), updates=updates, rounds=2, threads=1)
        speed = measure_speed(config)["loop"]
    assert math.isfinite(speed)
    return speed
