"""Classifies images: python tools/predict.py --model NAME --checkpoint FILE IMAGE_OR_FOLDER..."""

import dataclasses
import json
import sys
from pathlib import Path

from flash_vision.data.files import write_text
from flash_vision.train.command_line import run_tool
from flash_vision.train.picture import save_prediction_grid
from flash_vision.train.predict import PredictConfig, Prediction, as_rows, decode_file, predict
from flash_vision.train.reports import to_csv


def main(config: PredictConfig) -> None:
    predictions = predict(config)
    content = [dataclasses.asdict(prediction) for prediction in predictions]
    rows = as_rows(predictions, topk=config.topk)
    for target, text in (
        (config.json_file, json.dumps(content, indent=2, ensure_ascii=False) + "\n"),
        (config.csv_file, to_csv(rows)),
    ):
        if target == "-":
            sys.stdout.write(text)
        elif target:
            write_text(Path(target), text)
    if config.picture:
        draw(predictions, config)
    if "-" not in (config.json_file, config.csv_file):
        for prediction in predictions:
            best = prediction.guesses[0] if prediction.guesses else None
            print(
                prediction.file,
                *((best.name, f"{best.confidence:.4f}") if best else ("error", prediction.error)),
                sep="\t",
            )


def draw(predictions: list[Prediction], config: PredictConfig) -> None:
    readable = [prediction for prediction in predictions if prediction.guesses]
    shown = readable[: config.max_pictured]
    if not shown:
        raise ValueError(f"picture {config.picture}: none of the {len(predictions)} images can be read")
    save_prediction_grid(
        config.picture,
        [decode_file(prediction.file) for prediction in shown],
        [prediction.guesses[0].name for prediction in shown],
        [prediction.guesses[0].confidence for prediction in shown],
        title=f"{config.model or config.checkpoint}: {len(shown)} of {len(predictions)} images",
    )


if __name__ == "__main__":
    sys.exit(run_tool(main, PredictConfig, description=__doc__, positional="images"))
