#!/usr/bin/env python
"""What the training loop and its loader cost beside the bare step: python tools/training_speed.py --recipe FILE ..."""

import json
import sys

from flash_vision.train.command_line import run_tool
from flash_vision.train.speed import SpeedConfig, measure_speed

if __name__ == "__main__":
    sys.exit(run_tool(lambda config: print(json.dumps(measure_speed(config))), SpeedConfig, description=__doc__))
