"""Runs a grid: several runs side by side, each a process of its own, resumable at any moment."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from flash_vision.data.files import write_text
from flash_vision.lab.grid import Grid, Run, distinct, load_grid
from flash_vision.lab.images import prepare_images
from flash_vision.lab.results import FILE, add_result, code_tree, is_finished, make_result, read_results
from flash_vision.lab.size import Size, check_sizes, model_sizes
from flash_vision.train.reporting import METRICS, read_metrics
from flash_vision.train.signals import EXIT_INTERRUPTED, StopRequest

LOCK_PATIENCE_S = 120
POLL_S = 0.2
PROGRESS_S = 5


@dataclass(kw_only=True)
class GridOptions:
    """Which runs of which grid, and where its data and results lie.

    Args:
        grid: grid file, for example configs/lab/screening.yaml.
        data_root: folder that the file names of the grid's images are relative to.
        groups: groups of the grid, all by default.
        output: folder for images and results; the grid's own is below it, under the grid's name.
    """

    grid: str
    data_root: str
    groups: list[str] = field(default_factory=list)
    output: str = "runs/lab"

    @property
    def images_folder(self) -> Path:
        return Path(self.output) / "images"


@dataclass(kw_only=True)
class RunOptions(GridOptions):
    """How the runs are run; see `GridOptions` for which.

    Args:
        jobs: runs side by side.
        threads: torch's threads of each.
        pin: give each job cores of its own, where the system can and has enough.
        hours: start no further run after this time; those in progress end. No limit when not given.
        device: cpu or cuda.
    """

    jobs: int = 2
    threads: int = 1
    pin: bool = True
    hours: float | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("jobs", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hours is not None and self.hours <= 0:
            raise ValueError(f"hours must be above 0, got {self.hours}")


@dataclass(kw_only=True)
class _Child:
    """A run in progress, on one of the slots 0 to jobs - 1; it ends when `lifeline` is closed."""

    run: Run
    folder: Path
    process: subprocess.Popen[bytes]
    slot: int
    lifeline: int
    tree: str | None

    def updates(self) -> int:
        """Updates that it has reported so far."""
        return max((record["step"] for record in read_metrics(self.folder / METRICS)), default=0)


class GridRunner:
    """The runs of a grid that have no result yet, and the processes that work on them.

    Args:
        options: see `RunOptions`.
        stop: a request ends the runs in progress with their state saved.
    Raises:
        ValueError: the grid or its images are not right, or another process is running it.
    """

    def __init__(self, options: RunOptions, stop: StopRequest) -> None:
        self.options, self.stop = options, stop
        self.grid: Grid = load_grid(options.grid)
        runs = self.grid.runs(options.groups)
        self.sizes: dict[str, Size] = model_sizes(runs)
        check_sizes(self.grid, runs, self.sizes)
        self.folder = Path(options.output) / self.grid.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = _lock(self.folder / ".lock")
        finished = read_results(self.folder / FILE)
        self.todo = [run for run in distinct(runs) if run.key not in finished]
        self.active: list[_Child] = []
        self.failures: list[str] = []

    def run_all(self) -> None:
        """Runs what is left, until it is done, stopped, or out of time.

        Raises:
            ValueError: runs that could not be run; the message names the first log.
        """
        if not self.todo:
            return
        images = prepare_images(self.grid.images, self.options.data_root, self.options.images_folder)
        started = time.monotonic()
        bar = tqdm(total=len(self.todo), unit="run", mininterval=0, dynamic_ncols=True)
        try:
            shown, stopping = 0.0, False
            while self.active or (self.todo and not self._is_over(started)):
                while self.todo and len(self.active) < self.options.jobs and not self._is_over(started):
                    self.active.append(self._start(self.todo.pop(0), images))
                if self.stop.signal and not stopping:
                    stopping = True
                    for child in self.active:
                        child.process.terminate()
                time.sleep(POLL_S)
                for child in [child for child in self.active if child.process.poll() is not None]:
                    self.active.remove(child)
                    bar.update(self._finish(child))
                if time.monotonic() > shown + PROGRESS_S:
                    shown = time.monotonic()
                    bar.set_postfix_str(", ".join(f"{c.run.label} at {c.updates()}" for c in self.active))
        finally:
            for child in self.active:  # only after an error of our own or a second Ctrl-C
                child.process.kill()
                child.process.wait()
            bar.close()
        if self.failures:
            raise ValueError(f"{len(self.failures)} runs failed, the first: {self.failures[0]}")

    def close(self) -> None:
        """Lets another process run this grid."""
        self.lock.close()

    def _is_over(self, started: float) -> bool:
        hours = self.options.hours
        return bool(self.stop.signal) or (hours is not None and time.monotonic() - started > hours * 3600)

    def _start(self, run: Run, images: Path) -> _Child:
        slot = min(set(range(self.options.jobs)) - {child.slot for child in self.active})
        name = run.experiment(self.folder)
        log = self.folder / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        config = run.train_config(
            data_dir=str(images), output=str(self.folder), experiment=name, device=self.options.device
        )
        tree = code_tree()
        lifeline, ours = os.pipe()
        order: dict[str, Any] = {
            "label": run.label,
            "config": config.as_dict(),
            "emulate": run.emulate,
            "threads": self.options.threads,
            "cores": self._cores(slot),
            "lifeline": lifeline,
        }
        write_text(log.with_suffix(".json"), json.dumps(order))
        # a core's worth of threads for every library, and threads that wait leave the core to the run beside it
        environment = os.environ | {"OMP_NUM_THREADS": str(self.options.threads), "GOMP_SPINCOUNT": "10000"}
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "flash_vision.lab.worker", str(log.with_suffix(".json"))],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                # the pipe tells it when we are gone, the lock keeps others out until it is gone as well
                pass_fds=(lifeline, self.lock.fileno()),
                start_new_session=True,  # Ctrl-C in the terminal is ours to pass on
            )
        os.close(lifeline)
        return _Child(run=run, folder=config.folder, process=process, slot=slot, lifeline=ours, tree=tree)

    def _cores(self, slot: int) -> list[int]:
        """The cores of a job; none where the system cannot pin or has too few."""
        if not self.options.pin or not hasattr(os, "sched_setaffinity"):
            return []
        cores, each = sorted(os.sched_getaffinity(0)), self.options.threads
        return cores[slot * each : (slot + 1) * each] if self.options.jobs * each <= len(cores) else []

    def _finish(self, child: _Child) -> bool:
        """Whether a run that has ended is done, and its result written."""
        run, code = child.run, child.process.returncode
        os.close(child.lifeline)
        done = is_finished(child.folder, code)
        if done:
            result = make_result(self.grid.name, run, child.folder, self.sizes[run.key], code, child.tree)
            add_result(self.folder / FILE, result)
            shutil.rmtree(child.folder / "checkpoints", ignore_errors=True)  # weights stay in model.safetensors
            outcome = "diverged" if result["diverged"] else f"{result['top1']:.2f}%"
            tqdm.write(f"{run.group}: {run.label}, seed {run.seed}: {outcome}", file=sys.stderr)
        elif code == EXIT_INTERRUPTED:
            tqdm.write(f"{run.group}: {run.label}, seed {run.seed}: stopped, its state is saved", file=sys.stderr)
        elif not self.stop.signal:
            self.failures.append(
                f"{run.label}, seed {run.seed}: exit code {code}, {self.folder / 'logs' / child.folder.name}.log"
            )
            tqdm.write(f"error: {self.failures[-1]}", file=sys.stderr)
        return done


def run_grid(options: RunOptions) -> None:
    """Runs a grid; Ctrl-C or SIGTERM saves the runs in progress, and the same command goes on.

    Raises:
        ValueError: see `GridRunner`.
    """
    stop = StopRequest()
    stop.install()
    runner = GridRunner(options, stop)
    try:
        runner.run_all()
    finally:
        runner.close()


def _lock(path: Path) -> IO[str]:
    """Holds a file's lock, waiting for the processes of an earlier run, killed perhaps, to save their state.

    Raises:
        ValueError: another process still holds it.
    """
    lock = open(path, "w")  # noqa: SIM115  held until this process and its children end
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError:
            if time.monotonic() > deadline:
                raise ValueError(f"{path.parent}: another process is running this grid") from None
            time.sleep(POLL_S)
