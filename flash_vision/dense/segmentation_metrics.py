"""Scores of a segmentation, all from one confusion matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_vision.dense.segmentation_classes import VOID


class ConfusionMatrix:
    """Pixels by true and predicted class; void pixels are not counted.

    Args:
        num_classes: K.
        device: of the predictions.
    """

    def __init__(self, num_classes: int, *, device: torch.device | str = "cpu") -> None:
        self.counts = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)

    def update(self, predicted: Tensor, truth: Tensor) -> None:
        """Adds pixels.

        Args:
            predicted: classes, of any shape.
            truth: classes of the same shape, VOID where there is none.
        """
        assert predicted.shape == truth.shape
        number = len(self.counts)
        known = truth != VOID
        cells = truth[known].long() * number + predicted[known].long()
        self.counts += torch.bincount(cells, minlength=number * number).view(number, number)

    def reduce(self, total: Callable[[Tensor], Tensor]) -> None:
        """Replaces the counts by their sum over processes.

        Args:
            total: sums a tensor over all processes.
        """
        self.counts = total(self.counts)

    def scores(self) -> dict[str, float]:
        """miou, mean_accuracy and pixel_accuracy, in percent.

        miou and mean_accuracy are means over the classes that occur, in the truth or (miou) in a prediction; NaN where
        no pixel was counted.
        """
        hits, truth, predicted = self._sums()
        union = truth + predicted - hits
        return {
            "miou": 100 * (hits / union)[union > 0].mean().item(),
            "mean_accuracy": 100 * (hits / truth)[truth > 0].mean().item(),
            "pixel_accuracy": 100 * (hits.sum() / truth.sum()).item(),
        }

    def table(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """A row for each class: name, share of the true pixels, and iou, accuracy (recall) and precision in percent.

        Returns:
            Rows in order of the classes; None where a figure is not defined, because the class does not occur.
        """
        hits, truth, predicted = self._sums()
        total = truth.sum()
        rows = []
        for index, name in enumerate(names):
            hit, true, guess = (float(values[index]) for values in (hits, truth, predicted))
            rows.append(
                {
                    "class": name,
                    "share": _percent(true, float(total)),
                    "iou": _percent(hit, true + guess - hit),
                    "accuracy": _percent(hit, true),
                    "precision": _percent(hit, guess),
                }
            )
        return rows

    def _sums(self) -> tuple[Tensor, Tensor, Tensor]:
        counts = self.counts.double()
        return counts.diagonal(), counts.sum(1), counts.sum(0)


def _percent(part: float, whole: float) -> float | None:
    return 100 * part / whole if whole else None


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of `ConfusionMatrix.table` as aligned text, numbers with two decimals, - where there is none."""
    width = max(len("class"), *(len(row["class"]) for row in rows))
    columns = ("share", "iou", "accuracy", "precision")
    lines = [f"{'class':<{width}}  " + "  ".join(f"{column:>9}" for column in columns)]
    for row in rows:
        values = ("-" if row[column] is None else f"{row[column]:.2f}" for column in columns)
        lines.append(f"{row['class']:<{width}}  " + "  ".join(f"{value:>9}" for value in values))
    return "\n".join(lines)
