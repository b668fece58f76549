"""Averages the weights of several checkpoints: python tools/average_checkpoints.py --output FILE CHECKPOINT..."""

import sys

from flash_vision.train.averaging import AverageConfig, average_checkpoints
from flash_vision.train.command_line import run_tool


def main(config: AverageConfig) -> None:
    count = average_checkpoints(config)
    print(f"{config.output}: mean of {len(config.checkpoints)} checkpoints, {count} tensors")


if __name__ == "__main__":
    sys.exit(run_tool(main, AverageConfig, description=__doc__, positional="checkpoints"))
