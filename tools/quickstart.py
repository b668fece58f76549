#!/usr/bin/env python
"""Trains flash_gau_pico on 5,000 handwritten digits in about two minutes: python tools/quickstart.py [--data DIR]."""

import os
import sys
from pathlib import Path

# threads that wait without spinning: several times faster where other programs share the cores; read when torch loads
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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
