"""Accuracy of a model on a labelled data set: python tools/validate.py --model NAME --data_dir FOLDER."""

import sys
from pathlib import Path

from flash_vision.train.command_line import run_tool
from flash_vision.train.reports import print_report, save_report
from flash_vision.train.validate import ValidateConfig, validate


def main(config: ValidateConfig) -> None:
    if config.output_dir:
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    report = validate(config)
    print_report(report)
    if config.output_dir:
        save_report(report, config)


if __name__ == "__main__":
    sys.exit(run_tool(main, ValidateConfig, description=__doc__))
