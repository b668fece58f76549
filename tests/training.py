"""The training tools as real processes, one or several that train together, forked from one with the imports done."""

import functools
import multiprocessing
import os
import runpy
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from tool_process import TOOLS

from flash_vision.train.reporting import read_metrics

TINY: dict[str, Any] = {
    "model": "test_vit",
    "model_kwargs": {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2},
    "img_size": 16,
    "batch_size": 8,
    "epochs": 2,
    "warmup_epochs": 1,
    "lr": 2e-3,
    "workers": 0,
    "log_interval": 1,
    "recovery_interval": 0,
    "device": "cpu",
    "curves": False,
    "tensorboard": False,
    "seed": 1,
}


def write_images(root: Path, *, classes: int = 3, train: int = 16, validation: int = 7) -> Path:
    """root/train/CLASS/N.jpg and root/validation/CLASS/N.jpg: noise of 20 x 24 pixels, brighter by class."""
    generator = np.random.default_rng(5)
    for split, count in (("train", train), ("validation", validation)):
        for label in range(classes):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 120, (24, 20, 3)) + 130 * label // max(1, classes - 1)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:03d}.jpg")
    return root


@dataclass
class Run:
    """A started run: the processes that train together, and where they write."""

    folder: Path
    log: Path
    processes: list[Any]

    def finish(self, timeout: float = 120) -> int:
        """Exit code of the main process, after all have ended; negative for the signal that ended it."""
        for process in self.processes:
            process.join(timeout)
            assert process.exitcode is not None, f"still running after {timeout} s:\n{self.output}"
        return self.processes[0].exitcode

    def finish_well(self) -> "Run":
        """Waits, and fails unless every process ended with 0."""
        self.finish()
        assert [process.exitcode for process in self.processes] == [0] * len(self.processes), self.output
        return self

    def signal(self, number: int) -> None:
        """Sends a signal to every process that still runs."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    @property
    def output(self) -> str:
        """What the processes printed."""
        return "".join(log.read_text() for log in sorted(self.log.parent.glob(self.log.name + "*")))

    @property
    def refusal(self) -> str:
        """The one line of a run that ended with exit code 2."""
        assert self.finish() == 2, self.output
        assert self.output.count("\n") == 1, self.output
        return self.output

    def losses(self) -> dict[int, float]:
        """Loss of each update."""
        records = read_metrics(self.folder / "metrics.jsonl")
        return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}

    def evaluations(self) -> list[dict[str, Any]]:
        """What each evaluation found, without the time."""
        records = [record for record in read_metrics(self.folder / "metrics.jsonl") if record["kind"] == "eval"]
        return [{name: value for name, value in record.items() if name != "time"} for record in records]


def start(
    folder: Path,
    data: Path,
    *arguments: str,
    processes: int = 1,
    tool: str = "train",
    base: Mapping[str, Any] = TINY,
    **settings: Any,
) -> Run:
    """Starts tools/TOOL.py with `base`, `settings` and the run folder `folder`, in so many processes.

    Args:
        arguments: further words of the command line.
        base: the configuration that `settings` change.
    """
    number = sum(1 for _ in folder.parent.glob(f"{folder.name}.*.yaml"))
    config = folder.with_name(f"{folder.name}.{number}.yaml")
    chosen = {**base, "data_dir": str(data), "output": str(folder.parent), "experiment": folder.name, **settings}
    config.write_text(yaml.safe_dump(chosen))
    log = folder.with_name(f"{folder.name}.{number}.log.")
    argv = [str(TOOLS / f"{tool}.py"), "--config", str(config), *arguments]
    port = str(_free_port())
    started = []
    for rank in range(processes):
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        process = _warm().Process(target=_become, args=(argv, environment if processes > 1 else {}, f"{log}{rank}"))
        process.start()
        started.append(process)
    return Run(folder, log, started)


def train(folder: Path, data: Path, **settings: Any) -> Run:
    """A run from start to end, which must end well."""
    return start(folder, data, **settings).finish_well()


@functools.cache
def _warm() -> Any:
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flash_vision.train.run", "flash_vision.train.quickstart", "training"])
    return context


def _become(argv: list[str], environment: dict[str, str], log: str) -> None:
    """Turns this process into `python ARGV`."""
    multiprocessing.set_start_method("fork", force=True)  # for loader processes, the default of this Python on Linux
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = argv
    code: Any = 0
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as leave:
        code = leave.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code or 0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
