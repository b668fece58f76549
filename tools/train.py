#!/usr/bin/env python
"""Trains an image classifier: python tools/train.py --config configs/imagenet/flash_gau_small.yaml --data_dir DIR.

The same command again continues the run. Several processes: torchrun --nproc_per_node=8 tools/train.py ... See
docs/training.md for exit codes, the run folder and what a continuation guarantees.
"""

import os
import sys

# threads that wait spin for microseconds, not milliseconds: as fast on an idle CPU, several times faster on a shared
# one; libgomp reads it when torch loads
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from flash_vision.train.command_line import run_tool
from flash_vision.train.config import TrainConfig, option_names
from flash_vision.train.run import train

if __name__ == "__main__":
    sys.exit(
        run_tool(
            lambda config: sys.exit(train(config)),
            TrainConfig,
            description=__doc__ or "",
            argv=option_names(sys.argv[1:]),
        )
    )
