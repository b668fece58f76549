"""Runs a tool of tools/ in this process: the same parsing and exit code as the command, without a new interpreter."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from flash_vision.train.command_line import run_tool

TOOLS = Path(__file__).parents[2] / "tools"


def load_tool(name: str) -> ModuleType:
    """The module tools/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"tool_{name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(name: str, *argv: str) -> int:
    """Exit code of `python tools/NAME.py ARGV...`."""
    tool = load_tool(name)
    config_class = next(
        getattr(tool, n)
        for n in ("FlopsConfig", "BenchmarkConfig", "BreakdownConfig", "ReportConfig")
        if hasattr(tool, n)
    )
    positional = "" if name == "gpu_report" else "models"
    try:
        return run_tool(tool.main, config_class, description=tool.__doc__, positional=positional, argv=argv)
    except SystemExit as exit_:
        return int(exit_.code or 0)
