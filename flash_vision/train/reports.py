"""Tables of a validation: on the terminal, as CSV and as JSON. Every file is written whole or not at all."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import torch

from flash_vision import __version__
from flash_vision.data.files import write_text
from flash_vision.train.validate import Report, ValidateConfig


def print_report(report: Report) -> None:
    """Prints a row for each size and crop."""
    print(f"{report.model}: {report.num_parameters / 1e6:.2f} M parameters")
    for evaluation in report.evaluations:
        row = evaluation.summary()
        real = f"  ReaL {row['real_top1']:.3f} / {row['real_top5']:.3f} %" if "real_top1" in row else ""
        print(
            f"img_size {row['img_size']}  crop_pct {row['crop_pct']:g}  "
            f"top-1 {row['top1']:.3f} % ({row['top1_correct']}/{row['images']})  "
            f"top-5 {row['top5']:.3f} % ({row['top5_correct']}/{row['images']})  loss {row['loss']:.4f}{real}"
        )


def save_report(report: Report, config: ValidateConfig) -> None:
    """Writes results.json, results.csv, per_class.csv and predictions.csv into the folder `config.output_dir`."""
    folder = Path(config.output_dir)
    summaries = [evaluation.summary() for evaluation in report.evaluations]
    per_class, predictions = [], []
    for evaluation, summary in zip(report.evaluations, summaries, strict=True):
        setting = {key: summary[key] for key in ("img_size", "crop_pct")}
        per_class += [setting | row for row in evaluation.per_class(report.class_names)]
        files = report.files or [str(index) for index in range(evaluation.num_images)]
        columns = zip(files, evaluation.targets, evaluation.predicted, evaluation.in_top5, strict=True)
        predictions += [
            setting | {"file": file, "target": target, "predicted": guess, "in_top5": int(in_top5)}
            for file, target, guess, in_top5 in columns
        ]
    content = {
        "model": report.model,
        "num_parameters": report.num_parameters,
        "versions": {"flash_vision": __version__, "torch": torch.__version__},
        "config": dataclasses.asdict(config),
        "results": summaries,
        "per_class": per_class,
    }
    write_text(folder / "results.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    write_text(folder / "results.csv", to_csv([{"model": report.model, **row} for row in summaries]))
    write_text(folder / "per_class.csv", to_csv(per_class))
    write_text(folder / "predictions.csv", to_csv(predictions))


def to_csv(rows: list[dict[str, Any]]) -> str:
    """CSV text with the keys of the first row as header; None becomes an empty field."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
