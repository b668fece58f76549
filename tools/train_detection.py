#!/usr/bin/env python
"""Trains a detector: python tools/train_detection.py --config configs/coco/mask_rcnn_flash_pyramid_tiny_1x.yaml.

The same command again continues the run. Several processes: torchrun --nproc_per_node=8 tools/train_detection.py ...
See docs/detection.md for the data, and docs/training.md for exit codes, the run folder and what a continuation keeps.
"""

import os
import sys

# threads that wait spin for microseconds, see tools/train.py
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from flash_vision.dense.detection import train_detection
from flash_vision.dense.detection_config import DetectionConfig
from flash_vision.train.command_line import run_tool
from flash_vision.train.config import option_names

if __name__ == "__main__":
    sys.exit(
        run_tool(
            lambda config: sys.exit(train_detection(config)),
            DetectionConfig,
            description=__doc__ or "",
            argv=option_names(sys.argv[1:]),
        )
    )
