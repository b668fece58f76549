#!/usr/bin/env python
"""Trains flash_gau_pico on 5,000 handwritten digits in 2 to 4 minutes: python tools/quickstart.py [--data DIR]."""

import os
import sys
from pathlib import Path

# threads that wait spin for microseconds, not milliseconds: as fast on an idle CPU, several times faster on a shared
# one; libgomp reads it when torch loads
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from flash_vision.train.command_line import run_tool
from flash_vision.train.config import option_names
from flash_vision.train.quickstart import QuickstartConfig, quickstart

RECIPES = Path(__file__).resolve().parent.parent / "configs" / "quickstart"

if __name__ == "__main__":
    sys.exit(
        run_tool(
            lambda config: sys.exit(quickstart(config, RECIPES)),
            QuickstartConfig,
            description=__doc__ or "",
            argv=option_names(sys.argv[1:]),
        )
    )
