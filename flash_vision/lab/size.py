"""Parameters and MACs of the runs of a grid, and whether the variants of a group are of one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from flash_vision.lab.grid import Grid, Run
from flash_vision.profiling.macs import count_module
from flash_vision.train.tasks import create_model, resolve_preprocessing

TOLERANCE = 0.05


class Size(NamedTuple):
    """Number of parameters, and MACs of one image at the run's input size."""

    parameters: int
    macs: int


def model_sizes(runs: Sequence[Run]) -> dict[str, Size]:
    """The size of each run's model by its key, counted on the meta device.

    Raises:
        ValueError: a model that cannot be built, or that does not take the run's input size.
    """
    counted: dict[str, Size] = {}
    sizes: dict[str, Size] = {}
    for run in runs:
        fields = (run.fields.get(name) for name in ("model", "model_kwargs", "img_size", "input_size"))
        model = repr((list(fields), run.images.classes))
        if model not in counted:
            counted[model] = _count(run)
        sizes[run.key] = counted[model]
    return sizes


def _count(run: Run) -> Size:
    config = run.train_config()
    with torch.device("meta"):
        model, _ = create_model(config, run.images.classes)
    shape = resolve_preprocessing(config, model)["input_size"]
    try:
        report = count_module(model.eval(), torch.empty(1, *shape, device="meta"), trace=False)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"variant {run.label}: cannot take {shape} ({' '.join(str(error).split())})") from None
    return Size(report.params, report.macs)


def check_sizes(grid: Grid, runs: Sequence[Run], sizes: dict[str, Size]) -> None:
    """Checks that the largest variant of a group exceeds the smallest by at most TOLERANCE, in what `equal` names.

    Raises:
        ValueError: a group whose variants are not of one size.
    """
    for name, group in grid.groups.items():
        own = {run.label: sizes[run.key] for run in runs if run.group == name}
        if group.equal == "none" or len(own) < 2:
            continue
        counts = {label: getattr(size, group.equal) for label, size in own.items()}
        small, large = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        if counts[large] > (1 + TOLERANCE) * counts[small]:
            raise ValueError(
                f"grid {grid.name}, group {name}: {group.equal} must lie within {TOLERANCE:.0%} of each other, "
                f"got {counts[large]:,} for {large} and {counts[small]:,} for {small}"
            )
