"""Rows of measurements as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def markdown_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """A Markdown table; columns in order of first appearance unless given, a missing or None cell is blank."""
    columns = list(columns) if columns is not None else _columns(rows)
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [columns, *cells]) for i in range(len(columns))]
    rule = ["-" * width for width in widths]
    lines = [[text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in [columns, rule, *cells]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value)


def giga(count: float) -> str:
    """A count in units of 10^9, to three digits or two decimals."""
    return f"{count / 1e9:.3g}" if count < 1e9 else f"{count / 1e9:.2f}"


def write_json(path: str | Path, data: Mapping[str, Any]) -> None:
    """Writes indented JSON, making the folder if need be."""
    target = _ready(path)
    target.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def write_csv(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows with a header; columns in order of first appearance, None is an empty cell."""
    with _ready(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=_columns(rows), restval="")
        writer.writeheader()
        writer.writerows(rows)


def _ready(path: str | Path) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    return target
