"""MACs against image size: a table and a plot with the sizes at which two models cross."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from flash_vision.profiling.build import build_model, check_model_name, example_input, first_line
from flash_vision.profiling.macs import count_module

SIZES = (160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)


@dataclass(frozen=True)
class Crossover:
    """`model` costs less than `peer` above (or, if `below`, below) `img_size` pixels, at `macs` MACs."""

    model: str
    peer: str
    img_size: float
    macs: float
    below: bool


def scaling_rows(models: Sequence[str], img_sizes: Sequence[int] = SIZES) -> list[dict[str, Any]]:
    """Counts each model at each square image size on the meta device.

    Args:
        models: timm names.
        img_sizes: sides in pixels.

    Returns:
        One row per model and size: `model`, `img_size`, `macs`, `params`, a column per part, `status` ("ok", or what
        the model said to the size, with blank counts).

    Raises:
        ValueError: unknown model, or no size given.
    """
    if not img_sizes:
        raise ValueError("img_sizes must name at least one size, got none")
    for name in models:
        check_model_name(name)
    pairs = list(itertools.product(models, sorted(img_sizes)))
    return [_count(name, size) for name, size in tqdm(pairs, desc="counting", disable=None)]


def _count(name: str, size: int) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "img_size": size, "macs": None, "params": None}
    try:
        model = build_model(name, img_size=size, device="meta")
        report = count_module(model, example_input(model, size, device="meta"), name=name, trace=False)
    except (RuntimeError, AssertionError, ValueError, IndexError) as error:
        return {**row, "status": first_line(error)}
    parts = {f"macs_{part}": macs for part, macs in report.by_part.items()}
    return {**row, "macs": report.macs, "params": report.params, **parts, "status": "ok"}


def crossovers(rows: Sequence[dict[str, Any]], model: str) -> list[Crossover]:
    """The sizes at which `model` and each other model cost the same, interpolated between rows on log axes."""
    curves = _curves(rows)
    found = []
    for peer in curves:
        if peer == model:
            continue
        shared = [s for s in curves[model] if s in curves[peer]]
        gaps = [math.log(curves[model][s] / curves[peer][s]) for s in shared]
        for i, (left, right) in enumerate(itertools.pairwise(gaps)):
            if left * right < 0 or (left == 0 and right != 0 and i > 0):
                share = left / (left - right)
                size = math.exp(_between(math.log(shared[i]), math.log(shared[i + 1]), share))
                low, high = curves[model][shared[i]], curves[model][shared[i + 1]]
                macs = math.exp(_between(math.log(low), math.log(high), share))
                found.append(Crossover(model, peer, size, macs, below=right > 0))
    return found


def _between(low: float, high: float, share: float) -> float:
    return low + share * (high - low)


def _curves(rows: Sequence[dict[str, Any]]) -> dict[str, dict[int, int]]:
    curves: dict[str, dict[int, int]] = {row["model"]: {} for row in rows}
    for row in rows:
        if row["macs"]:
            curves[row["model"]][row["img_size"]] = row["macs"]
    return curves


def scaling_table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by image size, a column of GMACs per model; blank where a model does not take the size."""
    curves = _curves(rows)
    sizes = sorted({row["img_size"] for row in rows})
    return [{"px": s} | {m: c[s] / 1e9 if s in c else None for m, c in curves.items()} for s in sizes]


def plot_scaling(rows: Sequence[dict[str, Any]], model: str, path: str | Path) -> list[Crossover]:
    """Writes a PNG: GMACs against image size, and how many times the MACs of `model` each peer needs.

    Args:
        rows: of `scaling_rows`.
        model: the model whose crossovers are marked.
        path: target file.

    Returns:
        The marked crossovers.
    """
    from matplotlib.figure import Figure

    curves, crossings = _curves(rows), crossovers(rows, model)
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    cost, ratio = figure.subplots(1, 2)
    for i, (name, curve) in enumerate(curves.items()):
        sizes = list(curve)
        own = name == model
        style = {"color": f"C{i}", "linewidth": 2.6 if own else 1.5, "marker": "o", "markersize": 3.5}
        cost.plot(sizes, [curve[s] / 1e9 for s in sizes], label=name, zorder=3 if own else 2, **style)
        shared = [s for s in sizes if s in curves[model]]
        ratio.plot(shared, [curve[s] / curves[model][s] for s in shared], zorder=3 if own else 2, **style)
        own_crossings = [c for c in crossings if c.peer == name]
        if own_crossings:
            at = [c.img_size for c in own_crossings]
            mark = {
                "linestyle": "",
                "marker": "X",
                "markersize": 9,
                "color": f"C{i}",
                "markeredgecolor": "k",
                "zorder": 4,
            }
            cost.plot(at, [c.macs / 1e9 for c in own_crossings], **mark)
            ratio.plot(at, [1] * len(at), label=f"{name}: {', '.join(f'{size:.0f}' for size in at)} px", **mark)
    cost.set(ylabel="GMACs per image", title="Cost of a forward pass", yscale="log")
    ratio.set(ylabel=f"MACs over those of {model}", title=f"Relative to {model}", yscale="log")
    ratio.set_yticks(*_ratio_ticks(ratio.get_ylim()))
    ratio.minorticks_off()
    for axes in (cost, ratio):
        _size_axis(axes, sorted({size for curve in curves.values() for size in curve}))
    cost.legend(fontsize=8)
    if crossings:
        ratio.legend(fontsize=8, title="costs the same at", title_fontsize=8)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return crossings


def _size_axis(axes: Any, sizes: Sequence[int]) -> None:
    few = [size for size in sizes if size in (160, 224, 384, 512, 768, 1024, 1536, 2048, 4096)]
    ticks = sizes if len(sizes) < 10 else few
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.xaxis.minorticks_off()
    axes.set_xlabel("image side in pixels")
    axes.grid(alpha=0.3)


def _ratio_ticks(limits: tuple[float, float]) -> tuple[list[float], list[str]]:
    ticks = [
        t
        for t in (0.1, 0.2, 0.25, 0.33, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 32)
        if limits[0] <= t <= limits[1]
    ]
    return ticks, [f"{t:g}" for t in ticks]
