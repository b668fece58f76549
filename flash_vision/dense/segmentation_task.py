"""The training task of segmentation and its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from timm.task import ClassificationTask
from torch import Tensor

from flash_vision.dense.segmentation import SegmentationLoss, SegmentationNetwork
from flash_vision.dense.segmentation_metrics import ConfusionMatrix


class SegmentationTask(ClassificationTask):
    """A pixel-wise classifier: the loss over its logits, scores from one confusion matrix.

    Args:
        model: the network.
        criterion: loss of logits (B, K, H, W) and classes (B, H, W).
        names: of the classes.
        total: sums a tensor over all processes.
    """

    def __init__(
        self,
        model: SegmentationNetwork,
        criterion: SegmentationLoss,
        *,
        names: Sequence[str],
        total: Callable[[Tensor], Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(model, criterion, device=device, dtype=dtype, verbose=False)
        self.names, self.total = tuple(names), total

    def create_evaluator(self) -> SegmentationEvaluator:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A fresh evaluator of this task's model."""
        assert isinstance(self.criterion, SegmentationLoss)
        return SegmentationEvaluator(self.names, self.criterion, total=self.total, device=self.device)


class SegmentationEvaluator:
    """Scores over images of any size, at the size of their label maps.

    Args:
        names: of the classes.
        criterion: loss that is reported, the mean over images.
        total: sums a tensor over all processes.
    """

    def __init__(
        self,
        names: Sequence[str],
        criterion: SegmentationLoss,
        *,
        total: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> None:
        self.names, self.criterion, self.total = names, criterion, total
        self.confusion = ConfusionMatrix(len(names), device=device)
        self.loss = torch.zeros(2, dtype=torch.float64, device=device)  # sum over images, images

    def update(self, output: list[Tensor], target: list[Tensor]) -> None:
        """Adds images.

        Args:
            output: logits (K, h, w) of each.
            target: classes (H, W) of each; the logits are resized to them, bilinearly.
        """
        for logits, labels in zip(output, target, strict=True):
            resized = resize_logits(logits[None].float(), labels.shape)
            self.confusion.update(resized[0].argmax(0), labels)
            self.loss += torch.stack([self.criterion(resized, labels[None]).double(), self.loss.new_ones(())])

    def compute(self, distributed: bool) -> dict[str, float]:
        """The scores in percent, the loss, and iou/NAME of each class that occurs, over all processes."""
        if distributed:
            self.confusion.reduce(self.total)
            self.loss = self.total(self.loss)
        total, images = self.loss.tolist()
        table = {row["class"]: row["iou"] for row in self.confusion.table(self.names)}
        return {
            **self.confusion.scores(),
            "loss": total / max(images, 1),
            **{f"iou/{name}": iou for name, iou in table.items() if iou is not None},
        }


def resize_logits(logits: Tensor, size: Sequence[int]) -> Tensor:
    """(B, K, h, w) to (B, K, *size), bilinearly; unchanged at that size."""
    if tuple(logits.shape[-2:]) == tuple(size):
        return logits
    return F.interpolate(logits, size=tuple(size), mode="bilinear", align_corners=False)
