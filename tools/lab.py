#!/usr/bin/env python
"""The laboratory: a grid of named variants x seeds through the training loop; see docs/lab.md.

python tools/lab.py plan|run|report|resolution --grid configs/lab/NAME.yaml [--data_root DIR] ...; each with --help.
"""

import os
import sys

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as in tools/train.py

from flash_vision.lab.plan import PlanOptions, plan_grid
from flash_vision.lab.report import ReportOptions, report_grid
from flash_vision.lab.resolution import ResolutionOptions, evaluate_resolutions
from flash_vision.lab.runner import RunOptions, run_grid
from flash_vision.train.command_line import run_tool

COMMANDS = {
    "plan": (lambda options: print(plan_grid(options)), PlanOptions),
    "run": (run_grid, RunOptions),
    "report": (lambda options: print(report_grid(options)), ReportOptions),
    "resolution": (lambda options: print(evaluate_resolutions(options)), ResolutionOptions),
}

if __name__ == "__main__":
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help"):
        print(__doc__)
        sys.exit(0)
    if command not in COMMANDS:
        print(f"lab.py: error: the first word must be one of {', '.join(COMMANDS)}, got {command!r}", file=sys.stderr)
        sys.exit(2)
    tool, options_class = COMMANDS[command]
    sys.exit(run_tool(tool, options_class, description=__doc__, argv=sys.argv[2:]))
