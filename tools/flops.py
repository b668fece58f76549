"""MACs, parameters and activations of timm models, by two counters: python tools/flops.py flash_gau_small.

With --scaling true, MACs over image sizes; --plot is then a PNG that marks where the first model crosses the others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flash_vision.profiling.environment import environment
from flash_vision.profiling.macs import MacReport, count_macs
from flash_vision.profiling.scaling import SIZES, crossovers, plot_scaling, scaling_rows, scaling_table
from flash_vision.profiling.tables import giga, markdown_table, write_csv, write_json
from flash_vision.train.command_line import run_tool


@dataclass(kw_only=True)
class FlopsConfig:
    """What to count.

    Args:
        models: timm names; with `scaling` the first is the one that the others are compared to.
        img_size: side in pixels; 0 for each model's own.
        batch_size: images.
        depth: levels of modules in the table per module; 0 leaves it out.
        scaling: count over `img_sizes` instead of at one size.
        img_sizes: sides in pixels for `scaling`.
        plot: PNG file of the scaling; needs `scaling`.
        json: file for all counts; empty for none.
        csv: file with one row per model (and size); empty for none.
    """

    models: Sequence[str]
    img_size: int = 0
    batch_size: int = 1
    depth: int = 1
    scaling: bool = False
    img_sizes: Sequence[int] = SIZES
    plot: str = ""
    json: str = ""
    csv: str = ""

    def __post_init__(self) -> None:
        if self.plot and not self.scaling:
            raise ValueError(f"plot needs --scaling true, got plot={self.plot!r} without")
        if self.scaling and (self.img_size or self.batch_size != 1):
            raise ValueError("scaling counts one image over img_sizes; it takes neither img_size nor batch_size")
        if self.img_size < 0:
            raise ValueError(f"img_size must be at least 1, or 0 for the model's own, got {self.img_size}")


def main(config: FlopsConfig) -> None:
    rows = _scaling(config) if config.scaling else _counts(config)
    if config.csv:
        write_csv(config.csv, rows)


def _counts(config: FlopsConfig) -> list[dict[str, Any]]:
    reports = [count_macs(m, config.img_size or None, batch_size=config.batch_size) for m in config.models]
    rows = [_summary(report) for report in reports]
    print(markdown_table(rows))
    for report in reports:
        print(f"\n## {report.model}, input {tuple(report.input_shape)}")
        _print_tables(report, config.depth)
    if config.json:
        write_json(config.json, {"environment": environment("cpu"), "models": [r.as_dict() for r in reports]})
    return rows


def _summary(report: MacReport) -> dict[str, Any]:
    trace = report.trace
    agree = {True: "agree", False: "DISAGREE", None: f"fvcore failed: {report.trace_error}"}[report.counters_agree]
    return {
        "model": report.model,
        "px": "x".join(str(side) for side in report.input_shape[2:]),
        "params M": round(report.params / 1e6, 3),
        "GMACs": round(report.macs / 1e9, 4),
        "fvcore": None if trace is None else round(trace.products / 1e9, 4),
        "with norms": None if trace is None else round(trace.total / 1e9, 4),
        "activations M": None if trace is None else round(trace.activations / 1e6, 3),
        "counters": agree,
    }


def _print_tables(report: MacReport, depth: int) -> None:
    print(
        "\n"
        + markdown_table([{"part": p, "GMACs": giga(m), "share": m / report.macs} for p, m in report.by_part.items()])
    )
    costs = sorted(report.costs.items(), key=lambda item: -item[1].macs)
    products = [{"operator": n, "calls": c.calls, "GMACs": giga(c.macs)} for n, c in costs if c.macs]
    print("\n" + markdown_table(products))
    if depth:
        modules = {p: m for p, m in report.by_module.items() if p and p.count(".") < depth}
        print("\n" + markdown_table([{"module": p, "GMACs": giga(m)} for p, m in modules.items()]))
    free = report.of_kind("elementwise", "normalisation", "reduction", "cast")
    rows = [{"no MACs counted": n, "calls": c.calls, "M elements": c.elements / 1e6} for n, c in free.items()]
    print("\n" + markdown_table(rows))
    if report.opaque_to_fvcore:
        print(f"\nfvcore cannot look into: {', '.join(report.opaque_to_fvcore)}")
    if report.unknown:
        print(f"\nUNKNOWN to both counters, missing from the totals: {', '.join(report.unknown)}")


def _scaling(config: FlopsConfig) -> list[dict[str, Any]]:
    model, rows = config.models[0], scaling_rows(config.models, config.img_sizes)
    print("GMACs per image")
    print(markdown_table(scaling_table(rows)))
    for row in rows:
        if row["status"] != "ok":
            print(f"{row['model']} at {row['img_size']} px: {row['status']}")
    if all(row["status"] != "ok" for row in rows):
        raise ValueError(f"no model takes any of the sizes: {rows[0]['status']}")
    found = crossovers(rows, model)
    for crossing in found:
        side = "below" if crossing.below else "above"
        print(
            f"{model} costs less than {crossing.peer} {side} {crossing.img_size:.0f} px ({giga(crossing.macs)} GMACs)"
        )
    if config.plot:
        plot_scaling(rows, model, config.plot)
    if config.json:
        data = {"environment": environment("cpu"), "rows": rows, "crossovers": [vars(c) for c in found]}
        write_json(config.json, data)
    return rows


if __name__ == "__main__":
    sys.exit(run_tool(main, FlopsConfig, description=__doc__, positional="models"))
