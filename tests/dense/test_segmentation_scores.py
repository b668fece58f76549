"""Confusion matrix, scores and table, against numbers worked out by hand."""

import math

import pytest
import torch

from flash_vision.dense.segmentation import SegmentationLoss
from flash_vision.dense.segmentation_metrics import ConfusionMatrix, format_table
from flash_vision.dense.segmentation_task import SegmentationEvaluator

VOID = -1
TRUTH = torch.tensor([[0, 0, 0, 0, 1, 1], [VOID, 1, 2, 2, VOID, VOID]])
GUESS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 2, 0, 1, 2]])
# counted pixels: truth 0: 3 as 0, 1 as 1; truth 1: 2 as 1, 1 as 2; truth 2: 1 as 2, 1 as 0
IOU = {"a": 3 / 5, "b": 2 / 4, "c": 1 / 3}


def matrix(classes=3):
    confusion = ConfusionMatrix(classes)
    confusion.update(GUESS, TRUTH)
    return confusion


def test_counts_are_those_of_the_pixels_with_a_class():
    assert matrix().counts.tolist() == [[3, 1, 0], [0, 2, 1], [1, 0, 1]]


def test_scores_are_means_over_classes_and_a_share_of_pixels():
    scores = matrix().scores()
    assert scores["miou"] == pytest.approx(100 * sum(IOU.values()) / 3)
    assert scores["mean_accuracy"] == pytest.approx(100 * (3 / 4 + 2 / 3 + 1 / 2) / 3)
    assert scores["pixel_accuracy"] == pytest.approx(100 * 6 / 9)


def test_a_class_that_does_not_occur_is_left_out_of_the_means_and_one_that_is_only_predicted_counts_as_zero():
    assert matrix(classes=4).scores() == matrix().scores()
    confusion = matrix(classes=4)
    confusion.update(torch.tensor([3]), torch.tensor([0]))
    scores = confusion.scores()
    assert scores["miou"] == pytest.approx(100 * (3 / 6 + 2 / 4 + 1 / 3 + 0) / 4)
    assert scores["mean_accuracy"] == pytest.approx(100 * (3 / 5 + 2 / 3 + 1 / 2) / 3)


def test_the_table_has_a_row_for_each_class():
    rows = matrix(classes=4).table(["a", "b", "c", "d"])
    assert {row["class"]: row["iou"] for row in rows[:3]} == pytest.approx(
        {name: 100 * iou for name, iou in IOU.items()}
    )
    assert [row["share"] for row in rows] == pytest.approx([400 / 9, 300 / 9, 200 / 9, 0])
    assert [row["precision"] for row in rows[:3]] == pytest.approx([75, 200 / 3, 50])
    assert rows[3] == {"class": "d", "share": 0, "iou": None, "accuracy": None, "precision": None}
    lines = format_table(rows).splitlines()
    assert lines[1].split() == ["a", "44.44", "60.00", "75.00", "75.00"]
    assert lines[4].split() == ["d", "0.00", "-", "-", "-"]


def test_without_a_counted_pixel_the_scores_are_not_numbers():
    confusion = ConfusionMatrix(2)
    confusion.update(torch.tensor([1]), torch.tensor([VOID]))
    assert all(math.isnan(value) for value in confusion.scores().values())


def evaluator(total=None):
    return SegmentationEvaluator(
        "abc", SegmentationLoss(), total=total or (lambda values: values), device=torch.device("cpu")
    )


def logits_of(classes):
    return torch.nn.functional.one_hot(classes, 3).permute(2, 0, 1).float()


def test_the_evaluator_compares_at_the_size_of_the_label_map():
    guess = torch.tensor([[0, 1], [2, 2]])
    truth = guess.repeat_interleave(8, 0).repeat_interleave(8, 1)
    judge = evaluator()
    judge.update([logits_of(guess)], [truth])
    metrics = judge.compute(distributed=False)
    assert metrics["pixel_accuracy"] > 90
    assert set(metrics) == {"miou", "mean_accuracy", "pixel_accuracy", "loss", "iou/a", "iou/b", "iou/c"}


def test_sums_over_processes_give_what_one_process_gives():
    shares = [evaluator(), evaluator()]
    whole = evaluator()
    for number in range(4):
        truth = torch.randint(VOID, 3, (5, 4))
        logits = torch.randn(3, 5, 4)
        for judge in (whole, shares[number % 2]):
            judge.update([logits], [truth])
    other = {id(shares[0].confusion.counts): shares[1].confusion.counts, id(shares[0].loss): shares[1].loss}
    shares[0].total = lambda values: values + other[id(values)]
    assert shares[0].compute(distributed=True) == pytest.approx(whole.compute(distributed=False))
