"""All measurements on a GPU in one go, under 8 minutes: python tools/gpu_report.py.

Parity in fp16 and bf16, eager and compiled; speed and peak memory of inference and training from 224 to 2048 px; where
the time goes. Leaves report.json and report.md. On a CPU: --device cpu --quick true, at small size.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from flash_vision.profiling.breakdown import break_down, dense_floor
from flash_vision.profiling.build import build_model, check_device, check_model_name, example_input, first_line
from flash_vision.profiling.environment import environment
from flash_vision.profiling.parity import parity_rows
from flash_vision.profiling.steps import Case
from flash_vision.profiling.tables import markdown_table, write_json
from flash_vision.profiling.throughput import BenchmarkSettings, run_benchmark
from flash_vision.train.command_line import run_tool

MODELS = (
    "vit_small_patch16_224",
    "flash_gau_small",
    "flash_quad_small",
    "swin_tiny_patch4_window7_224",
    "convnext_tiny",
)
QUICK_MODELS = ("test_vit", "flash_gau_pico", "test_convnext")
# image side in pixels, images per step
SIZES = ((224, 64), (512, 16), (1024, 4), (2048, 1))
QUICK_SIZES = ((32, 2),)
SPEED_COLUMNS = (
    *("model", "mode", "precision", "compiled", "img_size", "batch_size", "images_per_s", "latency_ms"),
    *("ratio", "ratio_q25", "ratio_q75", "peak_memory_mib", "status"),
)


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """What the report covers.

    Args:
        models: timm names, the baseline first; empty for the default set.
        device: torch device name.
        quick: small models and sizes, two rounds of everything: a check that the script works.
        compiled: whether to measure compiled models as well.
        budget_s: seconds; parts that would, by what such a part took so far, end later are skipped and say so.
        threads: CPU threads of torch; 0 leaves torch's own number.
        output_dir: folder for report.json and report.md.
    """

    models: Sequence[str] = ()
    device: str = "cuda"
    quick: bool = False
    compiled: bool = True
    budget_s: float = 430.0
    threads: int = 0
    output_dir: str = "runs/gpu_report"

    def __post_init__(self) -> None:
        check_device(self.device)
        for name in self.models:
            check_model_name(name)


class Report:
    """Runs the parts in order of importance until the budget is spent."""

    def __init__(self, config: ReportConfig) -> None:
        self.start = time.monotonic()
        self.deadline = self.start + config.budget_s
        self.config = config
        self.models = tuple(config.models) or (QUICK_MODELS if config.quick else MODELS)
        self.sizes = QUICK_SIZES if config.quick else SIZES
        self.rows: dict[str, list[dict[str, Any]]] = {"parity": [], "speed": [], "breakdown": []}

    def run(self) -> dict[str, Any]:
        """Fills and returns the report."""
        eager = [
            lambda: self._parity(("bf16", "fp16"), compiled=False),
            lambda: self._speed("infer", "bf16", self.sizes, self.models),
            lambda: self._speed("train", "bf16", self.sizes, self.models),
            self._breakdown,
        ]
        compiled = [
            lambda: self._speed("infer", "bf16", self.sizes[:1], self.models[:2], compiled=True),
            lambda: self._parity(("bf16",), compiled=True),
            lambda: self._speed("train", "bf16", self.sizes[:1], self.models[:2], compiled=True),
        ]
        rest = [
            lambda: self._speed("infer", "fp16", self.sizes, self.models),
            lambda: self._speed("train", "fp16", self.sizes, self.models),
            lambda: self._speed("infer", "fp32", self.sizes[:2], self.models),
        ]
        more_compiled = [lambda: self._speed("infer", "bf16", self.sizes[1:], self.models, compiled=True)]
        parts = eager + (compiled if self.config.compiled else []) + rest
        parts += more_compiled if self.config.compiled and not self.config.quick else []
        for part in tqdm(parts, desc="report", disable=None):
            part()
        elapsed = round(time.monotonic() - self.start, 1)
        settings = dataclasses.asdict(self.config) | {"models": self.models, "sizes": self.sizes}
        return {"environment": environment(self.config.device), "settings": settings, "elapsed_s": elapsed, **self.rows}

    def _parity(self, precisions: Sequence[str], *, compiled: bool) -> None:
        sizes = self.sizes[:1] if compiled else self.sizes
        for mode in ("infer", "train"):
            for precision in precisions:
                for size, batch in sizes:
                    case = Case(
                        mode=mode,
                        precision=precision,
                        compiled=compiled,
                        img_size=size,
                        batch_size=min(batch, 2),
                        device=self.config.device,
                    )
                    models = self.models[:2] if compiled else self.models
                    self._parity_case(models, case, expected_s=60.0 if compiled else 2.0)

    def _parity_case(self, models: Sequence[str], case: Case, *, expected_s: float) -> None:
        if time.monotonic() + expected_s > self.deadline:
            base = {"mode": case.mode, "precision": case.precision, "compiled": case.compiled}
            skipped = base | {"img_size": case.img_size, "error": None, "limit": None, "status": "skipped: time budget"}
            self.rows["parity"] += [{"model": name} | skipped for name in models]
            return
        self.rows["parity"] += parity_rows(models, [case])

    def _speed(
        self,
        mode: str,
        precision: str,
        sizes: Sequence[tuple[int, int]],
        models: Sequence[str],
        *,
        compiled: bool = False,
    ) -> None:
        # the second model, ours by default, also in the form that is made for the mode
        extra = [f"{name}+{'reparam' if mode == 'infer' else 'grad_checkpointing'}" for name in models[1:2]]
        for size, batch in sizes:
            settings = BenchmarkSettings(
                models=models if compiled else (*models, *extra),
                modes=(mode,),
                precisions=(precision,),
                compiled=(compiled,),
                img_sizes=(size,),
                batch_sizes=(batch,),
                device=self.config.device,
                rounds=2 if self.config.quick else 15,
                max_seconds=2.0 if self.config.quick else 5.0,
                min_ms=1.0 if self.config.quick else 30.0,
                warmup=1 if self.config.quick else 3,
                memory=torch.device(self.config.device).type == "cuda",
            )
            expected = 30.0 * len(models) if compiled else 10.0
            self.rows["speed"] += run_benchmark(settings, deadline=self.deadline, expected_s=expected)

    def _breakdown(self) -> None:
        for size, batch in self.sizes[:: 2 if len(self.sizes) > 2 else 1]:
            for name in self.models[:3]:
                case = Case(precision="bf16", img_size=size, batch_size=batch, device=self.config.device)
                row: dict[str, Any] = {"model": name, "img_size": size, "batch_size": batch}
                try:
                    self.rows["breakdown"].append(row | self._break_down(name, case))
                except (RuntimeError, ValueError, AssertionError) as error:
                    self.rows["breakdown"].append(row | {"status": f"failed: {first_line(error)}"})

    def _break_down(self, name: str, case: Case) -> dict[str, Any]:
        model = build_model(name, img_size=case.img_size, device=case.device)
        images = example_input(model, case.img_size, batch_size=case.batch_size, device=case.device)
        breakdown = break_down(model, images, case, steps=2 if self.config.quick else 5)
        floor = dense_floor(model, images, case, rounds=2 if self.config.quick else 10)
        shares = {row["kind"]: row["share"] for row in breakdown.rows()}
        return {"operators_ms": breakdown.total_ms, "over_dense": floor.ratio, **shares, "status": "ok"}


def main(config: ReportConfig) -> None:
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    report = Report(config).run()
    text = _markdown(report)
    print(text)
    folder = Path(config.output_dir)
    write_json(folder / "report.json", report)
    (folder / "report.md").write_text(text + "\n", encoding="utf-8")
    bad = [row for row in report["parity"] if row["status"] != "ok" and not row["status"].startswith("skipped")]
    if bad:
        raise ValueError(f"parity failed in {len(bad)} of {len(report['parity'])} rows, see {folder / 'report.md'}")


def _markdown(report: dict[str, Any]) -> str:
    env = report["environment"]
    device = f"{env['device_name']}, torch {env['torch']}, timm {env['timm']}, CUDA {env['cuda']}"
    commit = f"commit {env['commit'] or 'unknown'}{' with uncommitted changes' if env['uncommitted_changes'] else ''}"
    return "\n\n".join(
        [
            f"# {device}\n\n{commit}, {report['elapsed_s']} s, `{env['command']}`",
            "## Speed and memory, ratio above 1 is faster than the first model",
            markdown_table(report["speed"], SPEED_COLUMNS),
            "## Relative error against eager fp32; limit: four times that of rounding the weights once",
            markdown_table(report["parity"]),
            "## Shares of time by kind, and forward time over its dense products alone (bf16, eager, inference)",
            markdown_table(report["breakdown"]),
        ]
    )


if __name__ == "__main__":
    sys.exit(run_tool(main, ReportConfig, description=__doc__))
