"""Plot of measured throughput against image size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_CASE = ("mode", "precision", "compiled", "batch_size")


def plot_throughput(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Writes a PNG: images/s against image size with quartiles, one panel per mode, precision, compile flag and batch.

    A size at which a model gave no figure (out of memory, failed, skipped) is a cross at the foot of the panel.

    Args:
        rows: of `run_benchmark`.
        path: target file.

    Raises:
        ValueError: no row was measured.
    """
    from matplotlib.figure import Figure

    if not any(row["status"] == "ok" for row in rows):
        raise ValueError("rows must hold at least one measured figure to plot, got none")
    panels = list(dict.fromkeys(tuple(row[key] for key in _CASE) for row in rows))
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5.2 * columns, 3.8 * lines + 0.3), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    models = list(dict.fromkeys(row["model"] for row in rows))
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw(axes, [row for row in rows if tuple(row[key] for key in _CASE) == panel], models)
        mode, precision, compiled, batch = panel
        axes.set_title(f"{mode}, {precision}, {'compiled' if compiled else 'eager'}, batch {batch}", fontsize=10)
    for axes in list(grid.flat)[len(panels) :]:
        axes.remove()
    grid[0][0].legend(fontsize=8)
    device = rows[0]["device"]
    legend = "median, bars from lower to upper quartile, cross: not measured"
    figure.suptitle(f"Throughput on {device}: {legend}", fontsize=11)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _side(row: dict[str, Any]) -> float:
    """Side in pixels, of a square of the same area where the image is none."""
    size = row["img_size"]
    return size if isinstance(size, int) else math.sqrt(size[0] * size[1])


def _label(row: dict[str, Any]) -> str:
    size = row["img_size"]
    return str(size) if isinstance(size, int) else f"{size[0]}x{size[1]}"


def _draw(axes: Any, rows: Sequence[dict[str, Any]], models: Sequence[str]) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for i, model in enumerate(models):
        own = sorted((r for r in rows if r["model"] == model), key=_side)
        good = [r for r in own if r["status"] == "ok"]
        speeds = [r["images_per_s"] for r in good]
        slow = [speed - r["batch_size"] / r["latency_ms_q75"] * 1e3 for speed, r in zip(speeds, good, strict=True)]
        fast = [r["batch_size"] / r["latency_ms_q25"] * 1e3 - speed for speed, r in zip(speeds, good, strict=True)]
        sizes = [_side(r) for r in good]
        axes.errorbar(sizes, speeds, (slow, fast), color=f"C{i}", marker="o", markersize=4, capsize=2, label=model)
        missing = [_side(r) for r in own if r["status"] != "ok"]
        foot = [0.03 + 0.03 * i] * len(missing)
        axes.plot(missing, foot, "x", color=f"C{i}", transform=axes.get_xaxis_transform())
    ticks = {_side(r): _label(r) for r in sorted(rows, key=_side)}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.tick_params(axis="y", which="both", labelsize=8)
    axes.set(xlabel="image side in pixels", ylabel="images/s")
    axes.grid(alpha=0.3, which="both")
