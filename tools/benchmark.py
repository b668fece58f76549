"""Throughput, latency and peak memory of timm models: python tools/benchmark.py vit_small_patch16_224 flash_gau_small.

They alternate in one process; ratios are to --baseline, or the first. Lists are written --img_sizes [224,512].
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

import torch

from flash_vision.profiling.environment import environment
from flash_vision.profiling.plots import plot_throughput
from flash_vision.profiling.tables import markdown_table, write_csv, write_json
from flash_vision.profiling.throughput import BenchmarkSettings, run_benchmark
from flash_vision.train.command_line import run_tool

COLUMNS = {
    "model": "model",
    "mode": "mode",
    "precision": "precision",
    "compiled": "compiled",
    "img_size": "px",
    "batch_size": "batch",
    "images_per_s": "images/s",
    "latency_ms": "ms/step",
    "ratio": "ratio",
    "ratio_q25": "q25",
    "ratio_q75": "q75",
    "peak_memory_mib": "peak MiB",
    "step_memory_mib": "of the step",
    "status": "status",
}


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(BenchmarkSettings):
    """The grid of `BenchmarkSettings`, and where the results go.

    Args:
        threads: CPU threads of torch; 0 leaves torch's own number.
        json: file for rows, settings and environment; empty for none.
        csv: file for the rows, commit and device in each; empty for none.
        plot: PNG of images/s against image size; empty for none.
    """

    threads: int = 0
    json: str = ""
    csv: str = ""
    plot: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads < 0:
            raise ValueError(f"threads must be at least 1, or 0 for torch's own number, got {self.threads}")


def main(config: BenchmarkConfig) -> None:
    if config.threads:
        torch.set_num_threads(config.threads)
    surroundings = environment(config.device)
    rows = run_benchmark(config)
    print(markdown_table([{title: row[key] for key, title in COLUMNS.items()} for row in rows]))
    if config.json:
        write_json(config.json, {"environment": surroundings, "settings": dataclasses.asdict(config), "rows": rows})
    if config.csv:
        write_csv(config.csv, [row | _provenance(surroundings) for row in rows])
    if all(row["status"] != "ok" for row in rows):
        raise ValueError(f"no model could be measured: {rows[0]['model']}: {rows[0]['status']}")
    if config.plot:
        plot_throughput(rows, config.plot)


def _provenance(surroundings: dict[str, Any]) -> dict[str, Any]:
    return {key: surroundings[key] for key in ("commit", "uncommitted_changes", "torch", "device_name", "threads")}


if __name__ == "__main__":
    sys.exit(run_tool(main, BenchmarkConfig, description=__doc__, positional="models"))
