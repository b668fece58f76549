"""Results of a grid as a table for each question and a plot, for RESULTS.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flash_vision.data.files import write_text, written_whole
from flash_vision.lab.grid import Grid, Run, load_grid
from flash_vision.lab.results import FILE, Result, read_results
from flash_vision.profiling.tables import markdown_table


@dataclass(kw_only=True)
class ReportOptions:
    """What to report, and where to.

    Args:
        grid: grid file.
        groups: groups of the grid, all by default.
        output: folder for images and results, as in the runs.
        plot: PNG file of accuracy against training time and against MACs; none when empty.
        into: Markdown file with the lines <!-- lab GRID --> and <!-- end lab GRID -->; what stands between them is
            replaced by the tables. They go to standard output when empty.
        metric: top1, or top1_ema where weights were averaged.
    """

    grid: str
    groups: list[str] = field(default_factory=list)
    output: str = "runs/lab"
    plot: str = ""
    into: str = ""
    metric: str = "top1"

    def __post_init__(self) -> None:
        if self.metric not in ("top1", "top1_ema"):
            raise ValueError(f"metric must be top1 or top1_ema, got {self.metric!r}")


def report_grid(options: ReportOptions) -> str:
    """The tables as Markdown, written into `options.into` where given; draws the plot where asked.

    Raises:
        ValueError: a bad grid file, no results yet, or a file without the two lines.
    """
    grid = load_grid(options.grid)
    results = read_results(Path(options.output) / grid.name / FILE)
    runs = grid.runs()
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, group in grid.groups.items():
        own = [run for run in runs if run.group == name]
        # n is to be equal in a sweep
        rows[name] = group_rows(own, own if group.sweep else runs, results, options.metric)
    noise = noise_of(rows) or grid.noise
    rows = {name: own for name, own in rows.items() if own and (not options.groups or name in options.groups)}
    if not rows:
        raise ValueError(f"output {options.output}: no results of grid {grid.name} there")
    text = "\n\n".join(_section(grid, name, own, noise) for name, own in rows.items()) + "\n"
    if options.plot:
        plot_rows([{"group": name, **row} for name, own in rows.items() for row in own], options.plot)
    if options.into:
        _replace_between(Path(options.into), grid.name, text)
    return text


def group_rows(
    runs: Sequence[Run], pool: Sequence[Run], results: dict[str, Result], metric: str
) -> list[dict[str, Any]]:
    """A row for each variant of a group that has results: mean and sample deviation over the seeds, n, sizes, speed.

    A run that diverged has no accuracy: it is counted, not averaged. Speed and seconds are medians over the seeds.

    Args:
        runs: of the group.
        pool: runs whose seeds count for a variant where they differ from its own in the seed alone: with those of the
            whole grid one unlucky seed does not shift a dozen groups.
    """
    settings = {run.label: run.setting for run in runs}
    suffix = metric.removeprefix("top1")
    rows: list[dict[str, Any]] = []
    for label, setting in settings.items():
        own = [results[key] for key in {run.key: 0 for run in pool if run.setting == setting} if key in results]
        if not own:
            continue
        good = [result for result in own if not result["diverged"]]
        accuracies = [result[metric] for result in good]
        speeds = [result["images_per_s"] for result in own if result["images_per_s"]]
        seconds = [result["train_seconds"] for result in own if result["train_seconds"]]
        rows.append({
            "variant": label,
            "setting": setting,
            "mean": _mean(accuracies),
            "deviation": statistics.stdev(accuracies) if len(good) > 1 else None,
            "n": len(good),
            "top5": _mean([result[f"top5{suffix}"] for result in good]),
            "loss": _mean([result[f"loss{suffix}"] for result in good]),
            "parameters": own[0]["parameters"],
            "macs": own[0]["macs"],
            "images_per_s": statistics.median(speeds) if speeds else None,
            "train_seconds": statistics.median(seconds) if seconds else None,
            "spikes": sum(result["spikes"] for result in own),
            "nonfinite": sum(result["nonfinite"] for result in own),
            "diverged": sum(result["diverged"] for result in own),
            "commits": {result["commit"] for result in own},
            "trees": {result["tree"] for result in own},
        })  # fmt: skip
    return rows


def noise_of(rows: dict[str, list[dict[str, Any]]]) -> float | None:
    """Root mean square of the sample deviations in group `a`, or in all groups of a grid without one; None for none.

    Args:
        rows: of `group_rows`, by group.
    """
    of = rows["a"] if "a" in rows else [row for own in rows.values() for row in own]
    deviations = {row["setting"]: row["deviation"] for row in of if row["deviation"] is not None}
    return math.sqrt(statistics.fmean(d * d for d in deviations.values())) if deviations else None


def _section(grid: Grid, name: str, rows: Sequence[dict[str, Any]], noise: float | None) -> str:
    group = grid.groups[name]
    # a sweep has no first variant that the others are changes of
    base = rows[0] if not group.sweep and rows[0]["variant"] == group.variants[0] and rows[0]["n"] else None
    troubled = "emulate" in group.sweep or any(row[k] for row in rows for k in ("spikes", "nonfinite", "diverged"))

    # the least difference that n seeds show
    bars: dict[int, float] = {}
    if base and noise is not None:
        seeds = sorted({row["n"] for row in rows if row is not base} - {0})
        bars = {n: 2 * noise * math.sqrt(1 / base["n"] + 1 / n) for n in seeds}

    def difference(row: dict[str, Any]) -> str | None:
        if base is None or row is base or not row["n"]:
            return None
        value = row["mean"] - base["mean"]
        return f"{value:+.2f}" + ("*" if abs(value) > bars.get(row["n"], math.inf) else "")

    def cells(row: dict[str, Any]) -> dict[str, Any]:
        troubles = {"spikes": row["spikes"], "skipped": row["nonfinite"], "diverged": row["diverged"]}
        return {
            "variant": row["variant"],
            "top-1 %": _text(row["mean"], ".2f"),
            "deviation": _text(row["deviation"], ".2f"),
            "n": row["n"],
            **({"to the first": difference(row)} if base else {}),
            "top-5 %": _text(row["top5"], ".2f"),
            f"{grid.images.evaluated_on} loss": _text(row["loss"], ".4f"),
            "M parameters": _text(row["parameters"] / 1e6, ".3f"),
            "M MACs": _text(row["macs"] / 1e6, ".1f"),
            "images/s": _text(row["images_per_s"], ".0f"),
            "training s": _text(row["train_seconds"], ".0f"),
            **(troubles if troubled else {}),
        }

    lines = [markdown_table([cells(row) for row in rows]), ""]
    if base and bars:
        shown = ", ".join(f"{bar:.2f} for n = {n}" for n, bar in bars.items())
        lines.append(f"Noise s = {noise:.2f}. An asterisk: beyond 2 s sqrt(1/{base['n']} + 1/n), {shown}.")
    lines.append(f"Commits: {_names(row['commits'] for row in rows)}.")
    if len(set.union(*(row["trees"] for row in rows))) > 1:
        lines.append(f"These rows come from different states of flash_vision: {_names(row['trees'] for row in rows)}.")
    title = f"**{name}. {group.question}** Top-1 on the {grid.images.evaluated_on} images, last epoch."
    return "\n".join([title, "", *lines])


def _mean(values: Sequence[float | None]) -> float | None:
    """None for no values, and where one is missing because it is not finite."""
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found and len(found) == len(values) else None


def _text(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


def _names(ids: Iterable[set[str | None]]) -> str:
    """Git's ids in short, with the + of those that were edited."""
    found = sorted({one or "unknown" for own in ids for one in own})
    return ", ".join(one[:7] + one[40:] for one in found)


def plot_rows(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Writes a PNG: accuracy against seconds of training and against MACs, a colour for each group.

    Args:
        rows: of `group_rows`, with the group.
        path: target file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, NullLocator

    figure = Figure(figsize=(14, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    groups = list(dict.fromkeys(row["group"] for row in rows))
    for axes, (name, factor, label) in zip(
        figure.subplots(1, 2, sharey=True),
        (("train_seconds", 1, "seconds of training"), ("macs", 1e-6, "million MACs an image")),
        strict=True,
    ):
        drawn: set[tuple[str, float]] = set()
        for i, group in enumerate(groups):
            own = [row for row in rows if row["group"] == group and row["mean"] is not None and row[name]]
            own = [row for row in own if (row["variant"], row["mean"]) not in drawn]
            drawn |= {(row["variant"], row["mean"]) for row in own}
            axes.errorbar(
                [row[name] * factor for row in own],
                [row["mean"] for row in own],
                [row["deviation"] or 0 for row in own],
                fmt="o", ms=4, capsize=2, color=f"C{i % 10}", label=group,
            )  # fmt: skip
            for row in own:
                place = (row[name] * factor, row["mean"])
                axes.annotate(row["variant"], place, xytext=(4, 3), textcoords="offset points", fontsize=7)
        axes.set(xlabel=label, xscale="log")
        axes.margins(x=0.1)  # room for names to the right of points
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3, which="both")
    figure.axes[0].set(ylabel="top-1 (%), mean and sample deviation over seeds")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), title="group", fontsize=8, loc="outside right upper")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def _replace_between(path: Path, grid: str, text: str) -> None:
    first, last = f"<!-- lab {grid} -->", f"<!-- end lab {grid} -->"
    content = path.read_text()
    if not 0 <= content.find(first) < content.find(last):
        raise ValueError(f"into {path}: must hold the line {first} and after it {last}")
    head, _, rest = content.partition(first)
    _, _, tail = rest.partition(last)
    write_text(path, f"{head}{first}\n\n{text}\n{last}{tail}")
