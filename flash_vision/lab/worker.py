"""One run of a grid in a process of its own: python -m flash_vision.lab.worker ORDER.json.

The order is written by `flash_vision.lab.runner`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from flash_vision.lab.grid import parse_train_config
from flash_vision.lab.rounding import RoundedProducts
from flash_vision.train.run import train


def work(order: dict[str, Any]) -> int:
    """Trains as ordered, from where the run folder stands; returns an exit code of `flash_vision.train.signals`."""
    if order["cores"]:
        os.sched_setaffinity(0, order["cores"])
    torch.set_num_threads(order["threads"])
    config = parse_train_config(order["config"], order["label"])
    threading.Thread(target=_end_with_parent, args=(order["lifeline"],), daemon=True).start()
    with RoundedProducts(order["emulate"]) if order["emulate"] else nullcontext():
        return train(config)


def _end_with_parent(lifeline: int) -> None:
    """Saves and stops once the other end of the pipe is closed: the laboratory is gone, even by kill -9."""
    os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(work(json.loads(Path(sys.argv[1]).read_text())))
