"""Trained runs of a grid evaluated at image sizes that they were not trained at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from flash_vision.lab.grid import Run, distinct, load_grid
from flash_vision.lab.images import prepare_images
from flash_vision.lab.results import FILE, add_result, read_results
from flash_vision.lab.runner import GridOptions
from flash_vision.profiling.tables import markdown_table
from flash_vision.train.validate import ValidateConfig, validate

SIZES_FILE = "resolution.jsonl"


@dataclass(kw_only=True)
class ResolutionOptions(GridOptions):
    """Which sizes; see `GridOptions` for which runs.

    Args:
        img_sizes: sides of the square input in pixels; the images are resized to them.
        variants: labels of the variants to evaluate, all that are finished by default.
        batch_size: images a step.
    """

    img_sizes: list[int] = field(default_factory=lambda: [24, 28, 32, 40, 48, 64])
    variants: list[str] = field(default_factory=list)
    batch_size: int = 256


def evaluate_resolutions(options: ResolutionOptions) -> str:
    """A table of top-1 by size for the variants of each group, mean over the group's seeds.

    A run that stands in several groups is evaluated once. A line for each run and size goes to resolution.jsonl.

    Raises:
        ValueError: nothing finished, or a model that cannot take a size.
    """
    grid = load_grid(options.grid)
    folder = Path(options.output) / grid.name
    finished = read_results(folder / FILE)
    runs = [run for run in grid.runs(options.groups) if not finished.get(run.key, {"diverged": True})["diverged"]]
    unknown = sorted(set(options.variants) - {run.label for run in runs})
    if unknown or not runs:
        raise ValueError(f"variants: no finished run of {unknown[0] if unknown else 'this grid'} in {folder}")
    runs = [run for run in runs if not options.variants or run.label in options.variants]
    images = prepare_images(grid.images, options.data_root, options.images_folder)
    for run in tqdm(distinct(runs), unit="run", disable=None, leave=False):
        known = read_results(folder / SIZES_FILE)
        for size in options.img_sizes:
            if f"{run.key}@{size}" not in known:
                add_result(folder / SIZES_FILE, _evaluate(run, size, folder, images, options.batch_size))
    return _table(runs, read_results(folder / SIZES_FILE), options.img_sizes)


def _evaluate(run: Run, size: int, folder: Path, images: Path, batch_size: int) -> dict[str, Any]:
    config = ValidateConfig(
        model=run.fields["model"],
        # as the grid has them: a model's defaults may have changed since its model.json was written
        model_kwargs=run.fields.get("model_kwargs", {}),
        checkpoint=str(folder / run.experiment(folder) / "model.safetensors"),
        data_dir=str(images / f"{run.images.evaluated_on}.tar"),
        img_size=size,
        crop_pct=1.0,
        batch_size=batch_size,
        workers=0,
    )
    summary = validate(config).evaluations[0].summary()
    return {"key": f"{run.key}@{size}", "variant": run.label, "seed": run.seed, **summary}


def _table(runs: Sequence[Run], found: dict[str, dict[str, Any]], sizes: Sequence[int]) -> str:
    rows: list[dict[str, Any]] = []
    for group, label in dict.fromkeys((run.group, run.label) for run in runs):
        own = [run for run in runs if (run.group, run.label) == (group, label)]
        row: dict[str, Any] = {"group": group, "variant": label, "n": len(own)}
        for size in sizes:
            top1 = [found[f"{run.key}@{size}"]["top1"] for run in own]
            row[f"{size} px"] = f"{sum(top1) / len(top1):.2f}"
        rows.append(row)
    return markdown_table(rows)
