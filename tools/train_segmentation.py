#!/usr/bin/env python
"""Trains a segmentation network: python tools/train_segmentation.py --config configs/camvid/NAME.yaml --data_dir DIR.

The same command again continues the run. Several processes: torchrun --nproc_per_node=8 tools/train_segmentation.py ...
See docs/segmentation.md for the data and docs/training.md for exit codes and the run folder.
"""

import os
import sys

# threads that wait spin for microseconds, not milliseconds: as fast on an idle CPU, several times faster on a shared
# one; libgomp reads it when torch loads
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from flash_vision.dense.segmentation_config import SegmentationConfig
from flash_vision.dense.segmentation_run import train_segmentation
from flash_vision.train.command_line import run_tool
from flash_vision.train.config import option_names

if __name__ == "__main__":
    sys.exit(
        run_tool(
            lambda config: sys.exit(train_segmentation(config)),
            SegmentationConfig,
            description=__doc__ or "",
            argv=option_names(sys.argv[1:]),
        )
    )
