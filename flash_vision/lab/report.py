"""Results of a grid as a table for each question and a plot, for RESULTS.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flash_vision.data.files import write_text, written_whole
from flash_vision.lab.grid import Grid, load_grid
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
    rows = {name: group_rows(grid, name, results, options.metric) for name in grid.groups}
    rows = {name: own for name, own in rows.items() if own and (not options.groups or name in options.groups)}
    if not rows:
        raise ValueError(f"output {options.output}: no results of grid {grid.name} there")
    text = "\n\n".join(_section(grid, name, own) for name, own in rows.items())
    commits = sorted({result["commit"] or "unknown" for result in results.values()})
    text += f"\n\nCommits: {', '.join(commit[:7] + commit[40:] for commit in commits)}.\n"
    if options.plot:
        plot_rows([{"group": name, **row} for name, own in rows.items() for row in own], options.plot)
    if options.into:
        _replace_between(Path(options.into), grid.name, text)
    return text


def group_rows(grid: Grid, group: str, results: dict[str, Result], metric: str = "top1") -> list[dict[str, Any]]:
    """A row for each variant of a group that has results: mean and sample deviation over the seeds, n, sizes, speed.

    A run that diverged has no accuracy: it is counted, not averaged. Speed and seconds are medians over the seeds.
    """
    found: dict[str, list[Result]] = {}
    for run in grid.runs([group]):
        if run.key in results:
            found.setdefault(run.label, []).append(results[run.key])
    rows: list[dict[str, Any]] = []
    for label, own in found.items():
        good = [result[metric] for result in own if not result["diverged"]]
        speeds = [result["images_per_s"] for result in own if result["images_per_s"]]
        seconds = [result["train_seconds"] for result in own if result["train_seconds"]]
        rows.append({
            "variant": label,
            "mean": statistics.fmean(good) if good else None,
            "deviation": statistics.stdev(good) if len(good) > 1 else None,
            "n": len(good),
            "parameters": own[0]["parameters"],
            "macs": own[0]["macs"],
            "images_per_s": statistics.median(speeds) if speeds else None,
            "train_seconds": statistics.median(seconds) if seconds else None,
            "spikes": sum(result["spikes"] for result in own),
            "nonfinite": sum(result["nonfinite"] for result in own),
            "diverged": sum(result["diverged"] for result in own),
        })  # fmt: skip
    return rows


def _section(grid: Grid, group: str, rows: Sequence[dict[str, Any]]) -> str:
    first = rows[0]["mean"] if rows[0]["variant"].startswith(grid.groups[group].variants[0]) else None

    def cells(row: dict[str, Any]) -> dict[str, Any]:
        mean, deviation = row["mean"], row["deviation"]
        return {
            "variant": row["variant"],
            "top-1 %": None if mean is None else f"{mean:.2f}",
            "deviation": None if deviation is None else f"{deviation:.2f}",
            "n": row["n"],
            "to the first": None if mean is None or first is None or row is rows[0] else f"{mean - first:+.2f}",
            "M parameters": f"{row['parameters'] / 1e6:.3f}",
            "M MACs": f"{row['macs'] / 1e6:.1f}",
            "images/s": None if row["images_per_s"] is None else round(row["images_per_s"]),
            "training s": None if row["train_seconds"] is None else round(row["train_seconds"]),
            "spikes": row["spikes"],
            "skipped": row["nonfinite"],
            "diverged": row["diverged"],
        }

    title = f"**{group}. {grid.groups[group].question}** Top-1 on the {grid.images.evaluated_on} images, last epoch."
    return f"{title}\n\n{markdown_table([cells(row) for row in rows])}"


def plot_rows(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Writes a PNG: accuracy against seconds of training and against MACs, a colour for each group.

    Args:
        rows: of `group_rows`, with the group.
        path: target file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
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
        axes.grid(alpha=0.3, which="both")
    figure.axes[0].set(ylabel="top-1 (%), mean and sample deviation over seeds")
    figure.axes[0].legend(title="group", fontsize=8)
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
